"""What no runtime's restore applies: sysctls in namespaces of the container's own, and OOM scores."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ocihook.container.spec import Rights, spec_facts
from ocihook.errors import RestoreError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.runtime.unrestored import apply_unrestored, lacking


def soon() -> Patience:
    """Return the patience of a call that begins now."""
    return Patience(timeout_s=60)


NAMESPACES = 0x08000000 | 0x04000000 | 0x00020000  # of IPC, UTS and mounts (linux/sched.h)
PRIVATE = 1 << 18 | 16384  # MS_PRIVATE, MS_REC (linux/mount.h)
HERE = Path("/proc/sys/kernel/msgmax")


@pytest.fixture
def init() -> Iterator[Process]:
    """A process in namespaces of its own, with a child that has another OOM score."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Path("/proc/self/oom_score_adj").write_text("100")
            assert ctypes.CDLL(None, use_errno=True).unshare(NAMESPACES) == 0, os.strerror(ctypes.get_errno())
            if os.fork() == 0:
                Path("/proc/self/oom_score_adj").write_text("500")
                os.write(writer, b"x")
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    process = Process.find(pid)
    assert process is not None
    yield process
    for child in [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()), pid]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(pid, 0)


def rights(config: dict[str, Any]) -> Rights:
    found = spec_facts(config, Path("/b")).rights
    assert found is not None
    return found


def apply(init: Process, then: int | None, config: dict[str, Any]) -> list[str]:
    before = rights({"process": {"oomScoreAdj": then}})
    return apply_unrestored(init, before, rights(config), config, soon())


def bundle(sysctls: dict[str, str], *types: str, **process: Any) -> dict[str, Any]:
    return {"process": process, "linux": {"sysctl": sysctls, "namespaces": [{"type": name} for name in types]}}


def scores(init: Process) -> list[int]:
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (init.pid, *children)]


def test_sysctls_are_set_in_the_container_alone(init: Process) -> None:
    before, mine = HERE.read_text(), os.readlink("/proc/self/ns/ipc")
    assert apply(init, None, bundle({"kernel.msgmax": "7777"}, "ipc")) == []
    assert HERE.read_text() == before
    assert os.readlink("/proc/self/ns/ipc") == mine
    with open(f"/proc/{init.pid}/ns/ipc") as namespace:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).setns(namespace.fileno(), 0)
            os._exit(0 if HERE.read_text().strip() == "7777" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_of_the_node_is_never_set(init: Process) -> None:
    before = HERE.read_text()
    assert apply(init, None, bundle({"kernel.msgmax": "7777", "kernel.pid_max": "9"}, "uts")) == []
    assert HERE.read_text() == before


def test_one_that_cannot_be_set_is_named(init: Process) -> None:
    with pytest.raises(RestoreError, match=r"its sysctl kernel\.msgmax cannot be set to 'x': Invalid argument"):
        apply(init, None, bundle({"kernel.msgmax": "x"}, "ipc"))


def test_the_score_of_processes_that_have_not_set_their_own(init: Process) -> None:
    assert apply(init, 100, bundle({}, oomScoreAdj=300)) == []
    assert scores(init) == [300, 500]
    for then, wanted in ((None, 400), (300, None), (299, 400)):
        process = {} if wanted is None else {"oomScoreAdj": wanted}
        assert apply(init, then, bundle({}, **process)) == []
        assert scores(init) == [300, 500]


MOUNTINFO = """\
1 0 0:1 / / rw,relatime - overlay overlay rw
2 1 0:2 / /data ro,nosuid,relatime shared:1 - ext4 /dev/x rw
3 1 0:3 / /a\\040b rw - tmpfs tmpfs rw
4 1 0:4 / /sys rw - sysfs sysfs ro
5 1 0:5 / /top ro - tmpfs tmpfs rw
6 5 0:6 / /top rw,noatime - tmpfs tmpfs rw
7 1 0:7 / /fine rw - tmpfs tmpfs rw
8 1 0:8 /null /masked rw,noexec - devtmpfs devtmpfs rw
"""


def test_mounts_that_lack_a_restriction() -> None:
    mounts = {
        "/data": ["ro", "noexec", "nosuid"],
        "/a b": ["nodev"],
        "/sys": ["ro"],
        "/top": ["ro"],
        "/fine": ["rw"],
        "/missing": ["ro"],
    }
    config = {
        "root": {"readonly": True},
        "linux": {"maskedPaths": ["/masked"]},
        "mounts": [{"destination": place, "options": ["rbind", *words]} for place, words in mounts.items()],
    }
    assert lacking(MOUNTINFO, rights(config)) == {
        "/": ("relatime", "ro"),
        "/data": ("noexec", "nosuid", "relatime", "ro"),
        "/a b": ("nodev",),
        "/top": ("noatime", "ro"),
        "/masked": ("noexec", "nosuid", "ro"),
    }
    assert lacking(MOUNTINFO, rights({})) == {}


def test_a_mount_gets_its_restrictions_in_the_container_alone(init: Process, tmp_path: Path) -> None:
    """Its other options stay."""
    place = tmp_path / "mounted"
    place.mkdir()
    child = os.fork()
    if child == 0:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{init.pid}/ns/mnt") as namespace:
                assert libc.setns(namespace.fileno(), 0) == 0
            assert libc.mount(None, b"/", None, PRIVATE, None) == 0
            assert libc.mount(b"t", os.fsencode(place), b"tmpfs", 1024 | 2, None) == 0  # noatime, nosuid
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    config = {"mounts": [{"destination": str(place), "type": "tmpfs", "options": ["ro", "noexec"]}]}
    assert apply(init, None, config) == []
    (line,) = (
        line for line in Path(f"/proc/{init.pid}/mountinfo").read_text().splitlines() if line.split()[4] == str(place)
    )
    assert {*line.split()[5].split(",")} == {"ro", "noexec", "noatime", "nosuid"}
    assert str(place) not in Path("/proc/self/mountinfo").read_text()
    assert lacking(line, rights(config)) == {}
