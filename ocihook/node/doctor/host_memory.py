"""Which way the memory of a workload's processes would come back in a restore: past CRIU or through it, and why."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from ocihook.config import Policy, Settings, load_settings
from ocihook.criu.mappings import AddressSpace, Area
from ocihook.errors import ConfigError, OcihookError
from ocihook.images.direct import LEAST_RUN_BYTES, own_areas, too_little
from ocihook.linux.memory import DetailedMapping, read_detailed_mappings
from ocihook.linux.procfs import parent_pid
from ocihook.memory.host_memory import left_to_criu
from ocihook.memory.pre_copy import why_not
from ocihook.node.doctor.finding import Finding, Status
from ocihook.node.doctor.workload import Workload
from ocihook.stages.dump import pack_workers

_CHECK = "host-memory"
_NOT_PLAIN = {"lo", "gd", "ht", "ss"}  # locked, growing down, of huge pages, a shadow stack (fs/proc/task_mmu.c)
_MIB = 1 << 20


def check_host_memory(workload: Workload) -> Iterator[Finding]:
    """Say which way each process's memory would come back on this node, if it were dumped now.

    By mappings: CRIU knows each page, and may find the memory in shorter runs.
    """
    try:
        policy = workload.policy()
    except OcihookError:  # reported by the check of the policy
        return
    mapped: dict[int, list[DetailedMapping]] = {}
    for pid in workload.pids:
        with contextlib.suppress(OSError):  # it has just ended
            mapped[pid] = read_detailed_mappings(pid)
    yield from _about_wiping(workload, mapped)
    if policy.pre_copy:
        yield _about_pre_copy(policy, workload)
    reason = left_to_criu(policy, pack_workers(_settings()), is_packed=policy.mode != "off")
    if reason:
        yield Finding(_CHECK, Status.OK, f"all goes through CRIU in a restore: {reason}")
        return
    spaces: dict[int, AddressSpace] = {}
    for pid, mappings in mapped.items():
        with contextlib.suppress(OSError):
            spaces[pid] = AddressSpace(os.stat(f"/proc/{pid}/exe").st_ino, tuple(map(_area, mappings)))
    own = own_areas(spaces, {pid: parent_pid(pid) for pid in spaces})
    sizes = {pid: sum(each.anonymous_bytes for each in mapped[pid]) for pid in spaces}
    for pid, all_bytes in sorted(sizes.items(), key=lambda size: -size[1]):
        content = {each.mapping.span.start: each.anonymous_bytes for each in mapped[pid]}
        long_bytes = sum(size for area in own[pid] if (size := content[area.start]) >= LEAST_RUN_BYTES)
        who, total = workload.who(pid), f"{all_bytes // _MIB} MiB"
        if reason := too_little(all_bytes, long_bytes):
            yield Finding(f"{_CHECK}-criu", Status.OK, f"{who}: {total} go through CRIU in a restore: {reason}")
        else:
            detail = f"{who}: of {total}, {long_bytes // _MIB} go past CRIU in a restore, on all cores"
            yield Finding(_CHECK, Status.OK, detail)


def _about_pre_copy(policy: Policy, workload: Workload) -> Finding:
    reason = why_not(policy, workload.pids)
    if not reason:
        return Finding("pre-copy", Status.OK, "memory that a dump reads past CRIU is read while the container runs")
    detail = f"ocihook.io/pre-copy has no effect, memory is read while the container stands still: {reason}"
    return Finding("pre-copy", Status.WARN, detail, "remove the annotation, or what prevents it")


def _about_wiping(workload: Workload, mapped: Mapping[int, list[DetailedMapping]]) -> Iterator[Finding]:
    """CRIU, up to 4.2 at least, takes no note of this advice (criu/proc_parse.c, parse_vmflags)."""
    for pid, mappings in mapped.items():
        if any("wf" in each.flags for each in mappings):
            detail = (
                f"{workload.who(pid)} has memory that its children are to find empty (MADV_WIPEONFORK): libraries have "
                "keys and random numbers in it. CRIU does not restore that: children forked after a restore get a copy"
            )
            yield Finding("wipe-on-fork", Status.WARN, detail, "have such children run a program (execve)")


def _area(each: DetailedMapping) -> Area:
    mapping = each.mapping
    is_nameless = not mapping.name or mapping.name == "[heap]" or mapping.name.startswith("[anon:")
    is_plain = mapping.mode == "rw-p" and mapping.inode == 0 and is_nameless and not each.flags & _NOT_PLAIN
    return Area(*mapping.span, is_plain=is_plain)


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:  # reported by the check of the node
        return Settings()
