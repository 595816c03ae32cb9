"""What a restore refuses for want of memory, and what doctor says of memory: whether it goes past CRIU, or why not."""

import logging
import mmap
import os
from types import SimpleNamespace
from typing import cast

import pytest

from ocihook.config import Policy, Settings
from ocihook.errors import PreflightError
from ocihook.images.direct import Cut, Direct
from ocihook.linux.memory import DetailedMapping, Mapping, Span, read_detailed_mappings
from ocihook.memory import host_memory
from ocihook.node.doctor import host_memory as doctor
from ocihook.node.doctor.finding import Status
from ocihook.node.doctor.workload import Workload
from ocihook.packs.pages import Parts
from ocihook.session.participant import Restore

GIB, MIB = 1 << 30, 1 << 20
OWN = os.getpid()


def restore(preflight: str) -> Restore:
    """Return a restore in which a GiB goes past CRIU, and two of a GPU's memory."""
    cut = Cut("pagemap-1.img", b"", Direct(1, "pages-1.img", Parts([(0, GIB, 0)]), Parts()))
    checkpoint = SimpleNamespace(region_bytes=2 * GIB)
    policy = Policy(gpu_preflight=preflight)
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
    ("mappings", "said"),
    [
        ([mapping(1, 60), mapping(62, 4, name="[heap]")], "of 64 MiB, 64 go past CRIU"),
        ([mapping(1, 60, name="[anon: pool]"), mapping(62, 4), mapping(70, 9, "r--p")], "of 73 MiB, 64 go past CRIU"),
        ([mapping(1, 63)], "63 MiB go through CRIU in a restore: it has less than 64 MiB"),
        ([mapping(1, 90, flags="rd wr lo")], "90 MiB go through CRIU in a restore: less than 64 MiB of it are plain"),
        ([mapping(1, 90, flags="rd wr ht")], "90 MiB go through"),
        ([mapping(1, 90, name="[stack]", flags="gd")], "90 MiB go through"),
        ([mapping(1, 90, "rw-s")], "90 MiB go through"),
        ([mapping(1, 90, "rwxp")], "90 MiB go through"),
    ],
)
def test_which_way_memory_goes(monkeypatch: pytest.MonkeyPatch, mappings: list[DetailedMapping], said: str) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: mappings)
    (finding,) = doctor.check_host_memory(workload())
    assert said in finding.detail


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Policy(host_memory="criu"), 'all goes through CRIU in a restore: host_memory is "criu"'),
        (Policy(mode="off"), "all goes through CRIU in a restore: it is not packed, and with fewer than 4 workers"),
        (Policy(mode="store"), "of 90 MiB, 90 go past CRIU"),
    ],
)
def test_which_way_a_policy_has_memory_go(monkeypatch: pytest.MonkeyPatch, policy: Policy, said: str) -> None:
    monkeypatch.setattr(doctor, "load_settings", lambda: Settings(workers=3))
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    (finding,) = doctor.check_host_memory(workload(policy))
    assert said in finding.detail


def test_memory_that_children_are_to_find_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90), mapping(99, 1, flags="wf")])
    first, *_ = doctor.check_host_memory(workload())
    assert (first.check, first.status) == ("wipe-on-fork", Status.WARN)
    assert "children forked after a restore get a copy" in first.detail


@pytest.mark.parametrize(("reason", "status"), [("", Status.OK), ('mode is "store"', Status.WARN)])
def test_whether_memory_is_read_while_it_runs(monkeypatch: pytest.MonkeyPatch, reason: str, status: Status) -> None:
    monkeypatch.setattr(doctor, "read_detailed_mappings", lambda _pid: [mapping(1, 90)])
    monkeypatch.setattr(doctor, "why_not", lambda _policy, _pids: reason)
    first, *_ = doctor.check_host_memory(workload(Policy(pre_copy=True)))
    assert (first.check, first.status) == ("pre-copy", status)
    assert reason in first.detail
    assert all(one.check != "pre-copy" for one in doctor.check_host_memory(workload()))


def workload(policy: Policy | None = None) -> Workload:
    """Return this process as a workload."""
    facts = SimpleNamespace(pids=(OWN,), policy=lambda: policy or Policy(), who=lambda pid: f"process {pid}")
    return cast("Workload", facts)


def test_what_is_in_mappings_is_read() -> None:
    with mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_DONTFORK)  # the kernel joins it with no other
        memory[: 3 * MIB] = bytes(3 * MIB)
        found = [each for each in read_detailed_mappings(OWN) if "dc" in each.flags]
    (ours,) = [each for each in found if each.mapping.span.size_bytes == 4 * MIB]
    assert ours.mapping.mode == "rw-p"
    assert ours.anonymous_bytes >= 3 * MIB
