"""What a restore refuses for want of memory, and what doctor says of memory: whether it goes past CRIU, or why not."""

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import cast

import pytest

from ocihook.config import Policy, Settings
from ocihook.criu.files import CriuOptions
from ocihook.errors import PreflightError, TraceError
from ocihook.images.direct import Cut, Direct
from ocihook.linux.memory import DetailedMapping, Mapping, Span, read_detailed_mappings
from ocihook.linux.ptrace import CallInstruction
from ocihook.memory import host_memory, snapshot
from ocihook.node.doctor import host_memory as doctor
from ocihook.packs.pages import Parts
from ocihook.preflight.finding import Status
from ocihook.preflight.observation import Observation
from ocihook.runtime import containers
from ocihook.session.participant import Restore

GIB, MIB = 1 << 30, 1 << 20
OWN = os.getpid()


def fail_to_find(pid: int) -> CallInstruction:
    raise TraceError(f"process {pid} has no instruction that makes a system call")


NOTHING_PREVENTS_IT: dict[str, object] = {
    "find_gpu_processes": lambda _pid: [],
    "memory_headroom_bytes": lambda _pid: None,
    "available_bytes": lambda: GIB,
    "task_headroom": lambda _pid: None,
}


def restore(preflight: str) -> Restore:
    """Return a restore in which a GiB goes past CRIU, and two of a GPU's memory."""
    cut = Cut("pagemap-1.img", b"", Direct(1, "pages-1.img", Parts([(0, GIB, 0)]), Parts()))
    checkpoint = SimpleNamespace(region_bytes=2 * GIB)
    policy = Policy(preflight=preflight)
    return cast("Restore", SimpleNamespace(cuts=[cut], checkpoint=checkpoint, criu_pid=1, policy=policy))


@pytest.mark.parametrize(
    ("available", "swap", "limit", "message"),
    [
        (3 * GIB, 0, None, ""),
        (2 * GIB, GIB, 2 * GIB, ""),
        (2 * GIB, GIB - 1, None, "takes 3.0 GiB of memory, the node has 3.0 GiB left: free memory on the node"),
        (64 * GIB, GIB, GIB, "takes 3.0 GiB of memory, the container's memory limit leaves 2.0 GiB: raise the limit"),
    ],
)
def test_room_is_checked_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
    swap: int,
    limit: int | None,
    message: str,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    monkeypatch.setattr(host_memory, "free_swap_bytes", lambda: swap)
    monkeypatch.setattr(host_memory, "memory_headroom_bytes", lambda _pid: limit)
    if not message:
        host_memory._check_room(restore("refuse"))
        return
    with pytest.raises(PreflightError, match=message):
        host_memory._check_room(restore("refuse"))
    with caplog.at_level(logging.WARNING):
        host_memory._check_room(restore("warn"))
    assert message in caplog.text


def mapping(start_mib: int, size_mib: int, mode: str = "rw-p", name: str = "", flags: str = "") -> DetailedMapping:
    """Return a mapping that is full."""
    span = Span(start_mib * MIB, (start_mib + size_mib) * MIB)
    return DetailedMapping(Mapping(span, mode, 0, name), size_mib * MIB, frozenset(flags.split()))


@pytest.mark.parametrize(
    ("mappings", "dump", "restore"),
    [
        ([mapping(1, 60), mapping(62, 4, name="[heap]")], "64 MiB go past CRIU", "64 MiB go past CRIU"),
        (
            [mapping(1, 60, name="[anon: pool]"), mapping(62, 4), mapping(70, 9, "r--p")],
            "73 MiB go past CRIU",
            "64 MiB go past CRIU, on all cores, but not 9 MiB read-only",
        ),
        (
            [mapping(1, 90), mapping(99, 8, flags="lo"), mapping(199, 7, flags="ht"), mapping(299, 6, "---p")],
            "98 MiB go past CRIU, on all cores, but not 7 MiB of hugetlb, 6 MiB not readable",
            "90 MiB go past CRIU, on all cores, but not 8 MiB locked, 7 MiB of hugetlb, 6 MiB not readable",
        ),
        ([mapping(1, 90, flags="rd wr lo")], "90 MiB go past", "less than 64 MiB of it are plain memory"),
        ([mapping(1, 90, flags="rd wr lo")], "90 MiB go past", "has mapped alike (90 MiB locked)"),
        ([mapping(1, 90, name="[stack]", flags="gd")], "90 MiB go past", "(90 MiB growing down)"),
        ([mapping(1, 90, "rw-s")], "0 MiB go past CRIU, on all cores, but not 90 MiB shared", "(90 MiB shared)"),
        ([mapping(1, 90, "rwxp")], "90 MiB go past", "(90 MiB executable)"),
    ],
)
def test_which_way_memory_goes(
    monkeypatch: pytest.MonkeyPatch, mappings: list[DetailedMapping], dump: str, restore: str
) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: mappings)
    monkeypatch.setattr(doctor, "find_freezer", lambda _pid: True)
    finding, _ = doctor.check_host_memory(seen(), marks_writes=True)
    said_of_dump, said_of_restore = finding.detail.split("; ")
    assert dump in said_of_dump
    assert restore in said_of_restore


def test_small_processes_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each large one has its own, the largest first."""
    mib = {OWN: 70, OWN + 1: 90, OWN + 2: 63, OWN + 3: 2}
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda pid: [mapping(pid, mib[pid])])
    monkeypatch.setattr(doctor, "_own_starts", lambda mapped: {pid: {pid * MIB} for pid in mapped})
    facts = seen(pids=tuple(mib))
    said = [finding.detail for finding in doctor.check_host_memory(facts)]
    assert "soft-dirty" in said[0]
    assert [detail.split(":")[0] for detail in said[1:]] == [
        f"process {OWN + 1}, 90 MiB", f"process {OWN}, 70 MiB", "2 processes, 65 MiB in all"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(host_memory="criu"), ["in a dump, all goes through CRIU: host_memory", "in a restore, all goes"]),
        (
            Policy(mode="off"),
            ['all goes through CRIU: mode is "off"', "through CRIU: it is not packed, and with fewer than 4 workers"],
        ),
        (Policy(mode="store"), ["in a dump, all goes through CRIU: this kernel", "in a restore 90 MiB go past CRIU"]),
    ],
)
def test_which_way_a_policy_has_memory_go(monkeypatch: pytest.MonkeyPatch, policy: Policy, said: list[str]) -> None:
    monkeypatch.setattr(doctor, "load_settings", lambda: Settings(workers=3))
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    findings = list(doctor.check_host_memory(seen(policy)))
    assert [words for words, finding in zip(said, findings, strict=True) if words not in finding.detail] == []


@pytest.mark.parametrize(
    ("names", "kept", "freezer", "said"),
    [
        ({"track-mem", "prev-images-dir"}, None, True, "in a dump 90 MiB go past CRIU"),
        ({"parent-path"}, None, True, "in a dump 90 MiB go past CRIU"),
        ({"track-mem"}, None, True, "CRIU is not asked to track memory, by /etc/criu/default.conf"),
        (set(), "its record", True, "in a dump 90 MiB go past CRIU"),
        ({"parent-path"}, "its record", None, "it has no cgroup of its own"),
    ],
)
def test_who_has_criu_track_memory(
    monkeypatch: pytest.MonkeyPatch, names: set[str], kept: object, freezer: object, said: str
) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    monkeypatch.setattr(doctor, "find_freezer", lambda _pid: freezer)
    monkeypatch.setattr(containers, "read", lambda _id: kept)
    first, *_ = doctor.check_host_memory(seen(names=names), marks_writes=True)
    assert said in first.detail
    assert bool(first.remedy) == ("not asked" in said)


STORE = Policy(mode="store")


@pytest.mark.parametrize(
    ("policy", "facts", "said", "remedy"),
    [
        (STORE, {}, "it goes on while its memory is read from a snapshot", ""),
        (STORE, {"find_gpu_processes": lambda _pid: ["one"]}, "if there is room for its GPU memory, too", ""),
        (Policy(), {}, 'it stands still while its memory is read: mode is "inline"', ""),
        (Policy(mode="store", snapshot="off"), {}, 'it stands still while its memory is read: snapshot is "off"', ""),
        (
            STORE,
            {"memory_headroom_bytes": lambda _pid: 9 * MIB, "available_bytes": lambda: GIB},
            "9 MiB are needed for what it may write meanwhile, and its memory limit leaves it 9 MiB",
            "raise its limits",
        ),
        (
            STORE,
            {"task_headroom": lambda _pid: 0},
            "0 more tasks, and",
            "raise its limits",
        ),
        (STORE, {"find_call_instruction": fail_to_find}, "has no instruction that makes a system call", ""),
    ],
)
def test_whether_memory_is_read_from_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, facts: dict[str, object], said: str, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    for name, fact in {"find_freezer": lambda _pid: True, **NOTHING_PREVENTS_IT, **facts}.items():
        monkeypatch.setattr(doctor if hasattr(doctor, name) else snapshot, name, fact)
    *_, last = doctor.check_host_memory(seen(policy), marks_writes=True)
    assert (last.check, last.status) == ("snapshot", Status.OK)
    assert said in last.detail
    assert remedy in last.remedy
    assert bool(last.remedy) == bool(remedy)


def test_a_process_whose_children_are_in_another_namespace() -> None:
    """It cannot be forked: the first process of a namespace takes all others with it."""
    script = "import ctypes, time; ctypes.CDLL(None).unshare(0x20000000); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert "would begin a new PID namespace" in doctor._not_forked(seen(), process.pid)
        process.kill()
    assert doctor._not_forked(seen(), OWN) == ""
    assert doctor._not_forked(seen(), process.pid) == "", "it has ended"


@pytest.mark.parametrize(("reason", "status"), [("", Status.OK), ('mode is "store"', Status.WARN)])
def test_whether_memory_is_read_while_it_runs(monkeypatch: pytest.MonkeyPatch, reason: str, status: Status) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    monkeypatch.setattr(doctor, "why_not", lambda _policy, _pids: reason)
    first, *_ = doctor.check_host_memory(seen(Policy(pre_copy=True)))
    assert (first.check, first.status) == ("pre-copy", status)
    assert reason in first.detail
    assert all(one.check != "pre-copy" for one in doctor.check_host_memory(seen()))


def seen(
    policy: Policy | None = None,
    *,
    names: Collection[str] = ("track-mem", "prev-images-dir"),
    pids: Collection[int] = (OWN,),
) -> Observation:
    """Return an observation of this process, or of others."""
    facts = SimpleNamespace(
        init_pid=OWN,
        pids=pids,
        policy=lambda: policy or Policy(),
        who=lambda pid: f"process {pid}",
        criu=(4, 1, 1),
        options=CriuOptions(names=frozenset(names)),
        container=SimpleNamespace(id="ab"),
    )
    return cast("Observation", facts)


def test_what_is_in_mappings_is_read() -> None:
    with mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_DONTFORK)  # the kernel joins it with no other
        memory[: 3 * MIB] = bytes(3 * MIB)
        found = [each for each in read_detailed_mappings(OWN) if "dc" in each.flags]
    (ours,) = [each for each in found if each.mapping.span.size_bytes == 4 * MIB]
    assert ours.mapping.mode == "rw-p"
    assert ours.anonymous_bytes >= 3 * MIB
