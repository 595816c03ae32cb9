"""Which way the memory of processes would go in a dump and in a restore: past CRIU or through it, and why.

Each way is an entry of `_ways`; whatever else reads or writes memory past CRIU is one more.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ocihook.config import Policy, Settings, load_settings
from ocihook.criu.mappings import AddressSpace, Area
from ocihook.errors import ConfigError, OcihookError, TraceError
from ocihook.gpu.processes import find_gpu_processes
from ocihook.images.direct import LEAST_PROCESS_BYTES, LEAST_RUN_BYTES, own_areas, too_little
from ocihook.linux.cgroup import find_freezer
from ocihook.linux.memory import DetailedMapping, read_detailed_mappings
from ocihook.linux.procfs import parent_pid
from ocihook.linux.ptrace import find_call_instruction
from ocihook.memory import clean_pages, host_memory
from ocihook.memory.pre_copy import why_not
from ocihook.memory.snapshot import lacking
from ocihook.preflight.finding import Finding, Status
from ocihook.preflight.observation import Observation
from ocihook.runtime import containers
from ocihook.stages.dump import pack_workers

HOST_MEMORY = "host-memory"
_NOT_PLAIN = {  # VmFlags (fs/proc/task_mmu.c)
    "lo": "locked",
    "gd": "growing down",
    "ht": "of hugetlb",
    "ss": "of shadow stacks",
}
_MIB = 1 << 20
_TRACK = "ocihook install --track-memory, or the runtime handler"


class _Way(NamedTuple):
    """An act in which memory can go past CRIU."""

    act: str
    all_left: str  # why none does; "" if it does
    remedy: str
    left: Callable[[int, DetailedMapping], str]  # of a process: what a mapping is that stays with CRIU; "" if it is not
    too_little: Callable[[int, int], str]  # as `images.direct.too_little`


def check_host_memory(seen: Observation, *, marks_writes: bool = False) -> Iterator[Finding]:
    """Say which way each process's memory would go on this node, if it were dumped now and restored.

    By mappings: CRIU knows each page, and may find the memory in shorter runs.

    Args:
        seen: the processes.
        marks_writes: whether the kernel marks what is written to (soft-dirty bits). It is asked before, since the
            answer takes a fork, and checks run in threads.
    """
    try:
        policy = seen.policy()
    except OcihookError:  # reported by the check of the policy
        return
    mapped: dict[int, list[DetailedMapping]] = {}
    for pid in seen.pids:
        with contextlib.suppress(OSError):  # it has just ended
            mapped[pid] = read_detailed_mappings(pid)
    if policy.pre_copy:
        yield _about_pre_copy(policy, seen)
    ways = list(_ways(seen, policy, mapped, marks_writes=marks_writes))
    for way in ways:
        if way.all_left:
            yield Finding(HOST_MEMORY, Status.OK, f"{way.act}, all goes through CRIU: {way.all_left}", way.remedy)
    open_ways = [way for way in ways if not way.all_left]
    sizes = {pid: sum(map(_size_bytes, mappings)) for pid, mappings in mapped.items()}
    large = {pid: size for pid, size in sizes.items() if size >= LEAST_PROCESS_BYTES}
    if open_ways:
        for pid, size in sorted(large.items(), key=lambda one: -one[1]):
            said = "; ".join(_said(way, pid, mapped[pid], size) for way in open_ways)
            yield Finding(HOST_MEMORY, Status.OK, f"{seen.who(pid)}, {size // _MIB} MiB: {said}")
        if large and ways[0] in open_ways:
            yield _about_snapshot(policy, seen, large)
    if open_ways and (small := len(sizes) - len(large)):
        size = (sum(sizes.values()) - sum(large.values())) // _MIB
        who = f"{small} {'process' if small == 1 else 'processes'}, {size} MiB in all"
        least = LEAST_PROCESS_BYTES // _MIB
        yield Finding(HOST_MEMORY, Status.OK, f"{who}: CRIU is as fast for one with less than {least} MiB")


def _ways(
    seen: Observation, policy: Policy, mapped: Mapping[int, list[DetailedMapping]], *, marks_writes: bool
) -> Iterator[_Way]:
    reason, remedy = _not_in_a_dump(seen, policy, marks_writes=marks_writes)
    yield _Way("in a dump", reason, remedy, lambda _, each: _left_in_dump(each), lambda _all, _past: "")
    reason = host_memory.left_to_criu(policy, pack_workers(_settings()), is_packed=policy.mode != "off")
    yield _Way("in a restore", reason, "", partial(_left_in_restore, _own_starts(mapped)), too_little)


def _not_in_a_dump(seen: Observation, policy: Policy, *, marks_writes: bool) -> tuple[str, str]:
    """Return why no memory is read past CRIU in a dump, and the remedy; both "" if it is."""
    if reason := clean_pages.left_to_criu(policy):
        return reason, ""
    if not marks_writes:
        return "this kernel does not mark what is written to (soft-dirty bits), so CRIU cannot track it", ""
    if find_freezer(seen.init_pid) is None:
        return "it has no cgroup of its own that can be frozen", ""
    if clean_pages.is_asked_to_track(seen.options) or _is_handled(seen):
        return "", ""
    return f"CRIU is not asked to track memory, by {seen.options.file} or before", _TRACK


def _is_handled(seen: Observation) -> bool:
    """Return whether the runtime handler stands before its runtime: each call of that has CRIU track memory."""
    try:
        return seen.container is not None and containers.read(seen.container.id) is not None
    except OcihookError:
        return False


def _said(way: _Way, pid: int, mappings: list[DetailedMapping], all_bytes: int) -> str:
    """Return what becomes of a process's memory in an act."""
    left: dict[str, int] = {}
    for each in mappings:
        kind = way.left(pid, each)
        left[kind] = left.get(kind, 0) + _size_bytes(each)
    past = left.pop("", 0)
    kinds = ", ".join(f"{size // _MIB} MiB {kind}" for kind, size in left.items() if size >= _MIB)
    if reason := way.too_little(all_bytes, past):
        return f"{way.act} all goes through CRIU: {reason}" + (f" ({kinds})" if kinds else "")
    return f"{way.act} {past // _MIB} MiB go past CRIU, on all cores" + (f", but not {kinds}" if kinds else "")


def _left_in_dump(each: DetailedMapping) -> str:
    mode = each.mapping.mode
    if mode[3] != "p":
        return "shared"
    if mode[0] != "r":
        return "not readable"
    return _NOT_PLAIN["ht"] if "ht" in each.flags else ""


def _left_in_restore(own_starts: Mapping[int, Collection[int]], pid: int, each: DetailedMapping) -> str:
    mapping = each.mapping
    kinds = [kind for flag, kind in _NOT_PLAIN.items() if flag in each.flags]
    if mapping.mode[3] != "p":
        kinds.append("shared")
    elif mapping.mode[1] != "w":
        kinds.append("read-only" if mapping.mode[0] == "r" else "not readable")
    elif mapping.mode != "rw-p":
        kinds.append("executable" if mapping.mode[0] == "r" else "not readable")
    elif not _is_plain(each):
        kinds.append("of files")
    elif mapping.span.start not in own_starts.get(pid, ()):
        kinds.append("that a parent or child has mapped alike")
    elif each.anonymous_bytes < LEAST_RUN_BYTES:
        kinds.append(f"in rows below {LEAST_RUN_BYTES // _MIB} MiB")
    return kinds[0] if kinds else ""


def _own_starts(mapped: Mapping[int, list[DetailedMapping]]) -> dict[int, set[int]]:
    """Return where the plain mappings of each process begin that CRIU does not restore as shared."""
    spaces: dict[int, AddressSpace] = {}
    for pid, mappings in mapped.items():
        with contextlib.suppress(OSError):
            spaces[pid] = AddressSpace(os.stat(f"/proc/{pid}/exe").st_ino, tuple(map(_area, mappings)))
    own = own_areas(spaces, {pid: parent_pid(pid) for pid in spaces})
    return {pid: {area.start for area in areas} for pid, areas in own.items()}


def _area(each: DetailedMapping) -> Area:
    return Area(*each.mapping.span, is_plain=_is_plain(each))


def _is_plain(each: DetailedMapping) -> bool:
    mapping = each.mapping
    is_nameless = not mapping.name or mapping.name == "[heap]" or mapping.name.startswith("[anon:")
    return mapping.mode == "rw-p" and mapping.inode == 0 and is_nameless and not each.flags & _NOT_PLAIN.keys()


def _size_bytes(each: DetailedMapping) -> int:
    """Return how much of it CRIU dumps as the process's own; the kernel does not say how much of hugetlb is used."""
    is_private_hugetlb = "ht" in each.flags and each.mapping.mode[3] == "p"
    return each.mapping.span.size_bytes if is_private_hugetlb else each.anonymous_bytes


def _about_pre_copy(policy: Policy, seen: Observation) -> Finding:
    reason = why_not(policy, seen.pids)
    if not reason:
        return Finding("pre-copy", Status.OK, "memory that a dump reads past CRIU is read while the container runs")
    detail = f"ocihook.io/pre-copy has no effect, memory is read while the container stands still: {reason}"
    return Finding("pre-copy", Status.WARN, detail, "remove the annotation, or what prevents it")


def _about_snapshot(policy: Policy, seen: Observation, sizes: Mapping[int, int]) -> Finding:
    """Say whether the memory of processes, by their sizes, would be read while the container runs on."""
    reason, remedy = _no_snapshot(policy, seen, sizes)
    if reason:
        detail = f"left running, it stands still while its memory is read: {reason}"
        return Finding("snapshot", Status.OK, detail, remedy)
    detail = "left running, it goes on while its memory is read from a snapshot"
    if find_gpu_processes(seen.init_pid):
        detail += ", if there is room for its GPU memory, too"  # how much that is, is known once it is locked
    return Finding("snapshot", Status.OK, detail)


def _no_snapshot(policy: Policy, seen: Observation, sizes: Mapping[int, int]) -> tuple[str, str]:
    """Return why no snapshot would be taken, as far as it is known beforehand, and the remedy; both "" if one would."""
    if policy.mode != "store":
        return f'mode is "{policy.mode}"', ""
    if policy.snapshot != "on":
        return f'snapshot is "{policy.snapshot}"', ""
    init_pid, share, size_bytes = seen.init_pid, _settings().snapshot_share, sum(sizes.values())
    if reason := lacking(init_pid, size_bytes, share):
        return reason, "raise its limits, or lower snapshot_share"
    reasons = (reason for pid in sizes if (reason := _not_forked(seen, pid)))
    return next(reasons, ""), ""


def _not_forked(seen: Observation, pid: int) -> str:
    """Return why a process cannot be forked, "" if nothing is known to prevent it."""
    try:
        own, next_own = os.readlink(f"/proc/{pid}/ns/pid"), ""
        with contextlib.suppress(FileNotFoundError):  # nobody has been in that one yet
            next_own = os.readlink(f"/proc/{pid}/ns/pid_for_children")
        find_call_instruction(pid)
    except TraceError as error:
        return str(error.args[0])
    except OSError:  # it has just ended
        return ""
    return "" if own == next_own else f"the next child of {seen.who(pid)} would begin a new PID namespace"


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:  # reported by the check of the node
        return Settings()
