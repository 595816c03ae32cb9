"""Each row of the checks of a restore finds its condition, and a real file system and kernel are read for them."""

import os
import stat
import struct
from pathlib import Path
from typing import Any

import pytest

from ocihook.config import Policy, Settings
from ocihook.criu.files import CriuOptions
from ocihook.criu.needs import NeededFile, NeededMount, Needs, read_needs
from ocihook.criu.proto import message_class
from ocihook.errors import ImageError, PreflightError
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.preflight import participant
from ocihook.preflight.checks import run
from ocihook.preflight.finding import Status
from ocihook.preflight.participant import Preflight
from ocihook.preflight.restores import CHECKS
from ocihook.preflight.target import Bind, Restoration, observe_restore
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Restore
from tests.fakes.images import make_image_set

ROOT, DATA, TMP = (
    NeededMount("/", is_external=False),
    NeededMount("/data", is_external=True),
    NeededMount("/tmp", is_external=False),
)
MOUNTS = {1: ROOT, 2: DATA, 3: TMP}
LOG = NeededFile("/data/log", os.O_RDWR, 5, stat.S_IFREG | 0o644, 2)
HUGE = 2 << 20


def needing(**facts: Any) -> Needs:
    return Needs(**{"mounts": MOUNTS, **facts})


def restoration(needs: Needs, **facts: Any) -> Restoration:
    return Restoration(needs=needs, criu=(4, 2), **facts)


ROWS: list[tuple[Needs, dict[str, Any], str]] = [
    (needing(), {}, ""),
    (needing(pids=frozenset({7})), {"taken_pids": {7}}, "pid-taken"),
    (needing(pids=frozenset({70000})), {"sysctls": {"kernel/pid_max": 32768}}, "limits"),
    (needing(pids=frozenset({32767})), {"sysctls": {"kernel/pid_max": 32768}}, ""),
    (needing(highest_descriptor=1024), {"sysctls": {"fs/nr_open": 1024}}, "limits"),
    (needing(highest_descriptor=1023), {"sysctls": {"fs/nr_open": 1024}}, ""),
    (needing(pids=frozenset(range(1, 12))), {"most_tasks": 10}, "limits"),
    (needing(largest_pipe_bytes=9), {"sysctls": {"fs/pipe-max-size": 8}, "has_user_namespace": True}, "limits"),
    (needing(largest_pipe_bytes=9), {"sysctls": {"fs/pipe-max-size": 8}}, ""),
    (needing(rings=frozenset({(8, 4096)})), {"possible_cpus": 2, "sysctls": {"fs/aio-max-nr": 99}}, ""),
    (needing(rings=frozenset({(8, 4096)})), {"possible_cpus": 64, "sysctls": {"fs/aio-max-nr": 99}}, "aio-ring"),
    (needing(rings=frozenset({(8, 4096)})), {"sysctls": {"fs/aio-max-nr": 9, "fs/aio-nr": 4}}, "aio-ring"),
    (needing(memfd_modes=frozenset({0o777})), {"sysctls": {"vm/memfd_noexec": 1}}, "memfd"),
    (needing(memfd_modes=frozenset({0o666})), {"sysctls": {"vm/memfd_noexec": 1}}, ""),
    (needing(memfd_modes=frozenset({0o666})), {"sysctls": {"vm/memfd_noexec": 2}}, "memfd"),
    (needing(huge_bytes={HUGE: 3 * HUGE}), {"free_huge_bytes": {HUGE: 2 * HUGE}}, "no-huge-pages"),
    (needing(huge_bytes={HUGE: 3 * HUGE}), {"free_huge_bytes": {HUGE: 3 * HUGE}}, ""),
    (needing(), {"unknown_advice": frozenset({102})}, "kernel-memory"),
    (needing(), {"has_droppable": False}, "kernel-memory"),
    (needing(profiles=frozenset({"x"}), security_module=2), {"security_module": 0}, "lsm"),
    (needing(profiles=frozenset({"x"}), security_module=2), {"security_module": 2, "profiles": frozenset({"x"})}, ""),
    (needing(security_module=2), {"security_module": 0}, ""),
    (needing(has_filters=True), {"is_filtered": True}, "seccomp"),
    (needing(has_tmpfs=True), {"missing_programs": ("gzip",)}, "tmpfs-content"),
    (needing(closes_tcp=True), {}, "tcp-in-image"),
    (needing(closes_tcp=True), {"options": CriuOptions(names=frozenset({"tcp-close"}))}, ""),
    (needing(has_uprobes=True), {}, "uprobes"),
]


@pytest.mark.parametrize(("needs", "facts", "name"), ROWS)
def test_rows(needs: Needs, facts: dict[str, Any], name: str) -> None:
    found = run(restoration(needs, **facts), CHECKS)
    assert [(one.check, one.status) for one in found] == ([(name, Status.FAIL)] if name else [])
    assert all(one.remedy for one in found)


def test_a_profile_that_is_not_loaded_is_a_warning() -> None:
    needs = needing(profiles=frozenset({"x (enforce)"}), security_module=2)
    (found,) = run(restoration(needs, security_module=2, profiles=frozenset({"y"})), CHECKS)
    assert (found.check, found.status) == ("lsm", Status.WARN)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (LOG, ""),
        (LOG._replace(path="/data/gone"), "file-missing"),
        (LOG._replace(size=9), "file-size"),
        (LOG._replace(size=9, flags=os.O_WRONLY | os.O_APPEND), ""),
        (LOG._replace(mode=stat.S_IFREG | 0o600), "file-mode"),
        (LOG._replace(mode=stat.S_IFDIR | 0o644), "file-missing"),
        (LOG._replace(path="/etc/passwd", mount=1), "file-missing"),  # the container's own, not the node's
        (LOG._replace(path="/link/log", mount=1), ""),
        (LOG._replace(path="/tmp/gone", mount=3), ""),  # CRIU brings it
        (LOG._replace(path="/data/gone", mount=9), ""),
    ],
)
def test_files(tmp_path: Path, file: NeededFile, name: str) -> None:
    """Of the root file system by its own links, of volumes where these lie on the node."""
    root, volume = tmp_path / "rootfs", tmp_path / "volume"
    for place in (root / "data", volume):
        place.mkdir(parents=True)
        (place / "log").write_text("12345")
        (place / "log").chmod(0o644)
    (root / "link").symlink_to("/data")
    seen = restoration(needing(files=(file,)), root=root, binds={"/data": Bind(source=volume)})
    assert [one.check for one in run(seen, CHECKS)] == ([name] if name else [])


def test_a_volume_that_is_read_only_now(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("12345")
    for flags, names in ((os.O_RDWR, ["file-missing"]), (os.O_RDONLY, [])):
        needs = needing(files=(LOG._replace(flags=flags, mode=None),))
        seen = restoration(needs, binds={"/data": Bind(source=tmp_path, is_read_only=True)})
        assert [one.check for one in run(seen, CHECKS)] == names


def test_a_root_file_system_that_is_not_made_yet() -> None:
    needs = needing(files=(LOG._replace(path="/gone", mount=1),))
    assert run(restoration(needs), CHECKS) == []


def message(kind: str, **fields: Any) -> bytes:
    data: bytes = message_class(kind)(**fields).SerializeToString()
    return struct.pack("<I", len(data)) + data


def image(magic: int, *entries: bytes) -> bytes:
    return struct.pack("<II", 0x54564319, magic) + b"".join(entries)


def reg(number: int, name: bytes, **fields: Any) -> bytes:
    return message("seen_file_entry", id=number, reg={"id": number, "flags": 2, "name": name, **fields})


def test_images_say_what_is_needed() -> None:
    images = {
        "inventory.img": struct.pack("<I", 0x58313116) + message("inventory_entry", img_version=1, tcp_close=True),
        "files.img": image(0x56303138, reg(1, b"/data/a", size=3, mnt_id=2), reg(2, b"/b"), reg(3, b"pipe", ext=True)),
        "remap-fpath.img": image(0x59133954, message("remap_file_path_entry", orig_id=2, remap_id=5)),
        "mountpoints-12.img": image(
            0x55563928, message("mnt_entry", fstype=0, mnt_id=2, mountpoint=b"./data", ext_key="/data")
        ),
        "pstree.img": image(
            0x50273030,
            message("pstree_entry", pid=1, ppid=0, pgid=1, sid=1, threads=[1, 8]),
            message("pstree_entry", pid=9, ppid=1, pgid=1, sid=1, threads=[2491920736]),  # a zombie
        ),
        "fdinfo-2.img": image(0x56213732, message("fdinfo_entry", fd=40), message("fdinfo_entry", fd=3)),
        "core-1.img": image(
            0x55053847, message("core_entry", thread_core={"seccomp_mode": 2, "creds": {"lsm_profile": "p"}})
        ),
        "memfd.img": image(0x48453499, message("memfd_inode_entry", size=1, mode=0o777)),
        "pipes-data.img": image(
            0x56453709, message("pipe_data_entry", bytes=2, size=9), b"xx", message("pipe_data_entry", bytes=0, size=4)
        ),
    }
    needs = read_needs(images, ["tmpfs-53.tar.gz.img"])
    assert [(one.path, one.size, one.mount) for one in needs.files] == [("/data/a", 3, 2)]
    assert needs.mounts == {2: NeededMount("/data", is_external=True)}
    assert (sorted(needs.pids), needs.highest_descriptor, needs.largest_pipe_bytes) == ([1, 8, 9], 40, 9)
    assert (needs.closes_tcp, needs.has_filters, needs.has_tmpfs) == (True, True, True)
    assert needs.profiles == {"p"}
    assert needs.memfd_modes == {0o777}
    with pytest.raises(ImageError, match="files"):
        read_needs(images | {"files.img": images["files.img"][:-1]})


def test_this_node_is_observed() -> None:
    """A new PID namespace has all numbers free; where it joins this one's, this process has its own."""
    needs = needing(pids=frozenset({os.getpid()}), advice=frozenset({14, 63}))
    seen = observe_restore(
        needs, criu=(4, 2), options=CriuOptions(), config={"linux": {"namespaces": [{"type": "pid"}]}}
    )
    assert seen.taken_pids == frozenset()
    assert 63 in seen.unknown_advice
    assert seen.sysctls["fs/nr_open"] > 0
    joined = observe_restore(
        needs, criu=(4, 2), options=CriuOptions(), config={"linux": {"namespaces": []}, "root": {}}
    )
    assert joined.taken_pids == {os.getpid()}


@pytest.mark.parametrize("policy", ["refuse", "warn"])
def test_a_restore_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Unless the policy takes the risk."""
    me = Process.find(os.getpid())
    assert me is not None
    journal = Journal.create(tmp_path, me)
    journal.identify(ContainerRef(id="ab" * 32, engine="podman", runtime="runc", name="job"), str(tmp_path))
    journal.note(CallFacts(criu_version="4.2", policy=Policy(preflight=policy)))
    monkeypatch.setattr(participant, "read_config", lambda _pid, _bundle: {"linux": {"namespaces": []}, "root": {}})
    images = tmp_path / "images"
    make_image_set(images, {os.getpid(): bytes(4096)})
    restore = Restore(journal, ENDLESS, me.pid, 0, str(images), images, settings=Settings())
    if policy == "warn":
        Preflight().check(restore)
        return
    with pytest.raises(PreflightError, match=f"are taken in its PID namespace .{os.getpid()}"):
        Preflight().check(restore)
