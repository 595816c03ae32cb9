"""Checks of what the kernel shows of each thread: what it shares, how it is scheduled, what it may, and its session.

Under some of these conditions a dump succeeds and its restore fails. integration/criu/test_states.py tries each.
"""

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from ocihook.criu.causes import remedy_of
from ocihook.linux.procfs import status_fields
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen, Task

_DEADLINE, _EXT = 6, 7  # linux/sched.h
_CAP_SYS_RESOURCE = 24  # linux/capability.h
_LINE_BYTES = 4096  # of a file of /proc that CRIU can read (criu/bfd.c)
_FIRST_REAL_TIME = 32  # signal
_NOTIFIED = re.compile(r"^notify: \w+/tid\.(\d+)", re.MULTILINE)  # proc_pid_timers(5)
_DESCRIPTORS = 3  # that CRIU needs in a process, tried with 4.1.1 and 4.2; one more in the first
_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_PARASITE_BYTES = (1 << 16, 1 << 20)  # of addresses, that CRIU needs in a process: at least, and as a rule at most


def _living(seen: Observation) -> Iterator[ProcessSeen]:
    return (process for process in seen.processes if not process.is_zombie)


def _scheduling(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        policies = {task.stat.policy for task in process.threads} & {_DEADLINE, _EXT}
        if policies:
            name = "SCHED_DEADLINE" if _DEADLINE in policies else "SCHED_EXT"
            detail = f"{seen.who(process.pid)} has the scheduling policy {name}, which CRIU dumps and does not restore"
            yield fail(
                detail, f"chrt --other --all-tasks --pid 0 {process.pid} before the dump, and set it again after it"
            )


def _session_order(seen: Observation) -> Iterator[Problem]:
    """CRIU forks a process where its parent is, whose session it then has (criu/pstree.c, prepare_pstree_ids)."""
    born: dict[int, int] = {}
    for process in seen.processes:
        if not _is_born_right(seen, process) and not _can_be_born(seen, process, born):
            detail = f"{seen.who(process.pid)} belongs to a session whose leader has ended, or is no ancestor of it"
            yield fail(
                f"{detail}: CRIU dumps and does not restore that",
                "have it call setsid, or have its parent do without PR_SET_CHILD_SUBREAPER",
            )


def _is_born_right(seen: Observation, process: ProcessSeen) -> bool:
    """Return whether it leads its session, is in its parent's, or is a child of the first process."""
    parent = seen.by_pid.get(process.stat.parent)
    if process.pid == seen.init_pid or parent is None or parent.pid == seen.init_pid:
        return True
    return process.stat.session in (process.pid, parent.stat.session)


def _can_be_born(seen: Observation, process: ProcessSeen, born: dict[int, int]) -> bool:
    """Return whether an ancestor leads its session, and all between can have been of that session before."""
    session = process.stat.session
    above = seen.by_pid.get(process.stat.parent)
    while above is not None and above.pid != session:
        if born.setdefault(above.pid, session) != session:
            return False
        above = seen.by_pid.get(above.stat.parent) if above.pid != seen.init_pid else None
    return above is not None


def _shares_memory(seen: Observation) -> Iterator[Problem]:
    for first, *others in seen.sharing_memory:
        for pid in others:
            detail = f"{seen.who(pid)} shares its memory with {seen.who(first)} (CLONE_VM), which CRIU cannot dump"
            yield fail(detail, remedy_of("shared-parts"))


def _shares_directory(seen: Observation) -> Iterator[Problem]:
    for first, *others in seen.sharing_directory:
        for pid in others:
            detail = f"{seen.who(pid)} shares its working directory with {seen.who(first)} (CLONE_FS)"
            yield fail(f"{detail}, which CRIU cannot dump", "have the application use threads, or share nothing")


def _waits_in_kernel(seen: Observation) -> Iterator[Problem]:
    for pid in (pid for group in seen.sharing_memory for pid in group):
        if seen.by_pid[pid].stat.state == "D":
            detail = f"{seen.who(pid)} waits until its child of vfork or posix_spawn runs a program"
            yield fail(f"{detail}, and cannot be stopped", "try again; the child must run its program, or end")


def _first_thread_ended(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        if process.leader.stat.state == "Z" and any(task.stat.state not in ("Z", "X") for task in process.threads[1:]):
            detail = f"{seen.who(process.pid)} has ended its first thread while others run, which CRIU cannot dump"
            yield fail(detail, "have the program's first thread wait for the others (pthread_join)")


def _stopped(seen: Observation) -> Iterator[Problem]:
    """In a frozen cgroup of version 1 CRIU waits for a stopped process without end (criu/seize.c)."""
    for process in _living(seen) if seen.freezer_version == 1 else ():
        if process.stat.state == "T":
            detail = (
                f"{seen.who(process.pid)} is stopped, and CRIU would wait for it without end (cgroups of version 1)"
            )
            yield fail(detail, f"kill -CONT {process.pid}, or boot the node with cgroups of version 2")


def _many_groups(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        if len(process.status.get("Groups", "")) + len("Groups:\t") >= _LINE_BYTES:
            count = len(process.status["Groups"].split())
            detail = f"{seen.who(process.pid)} is in {count} groups, more than CRIU can read"
            yield fail(detail, "start it with fewer supplementary groups")


def _no_sys_resource(seen: Observation) -> Iterator[Problem]:
    """Another user's limits can be read with that capability only (prlimit(2)); CRIU has those of its runtime."""
    own = status_fields(os.getpid())
    if int(own.get("CapEff", "0"), 16) >> _CAP_SYS_RESOURCE & 1:
        return
    users = {"Uid": own.get("Uid", "").split()[:1], "Gid": own.get("Gid", "").split()[:1]}
    for process in _living(seen):
        if any(set(process.status.get(kind, "").split()[:3]) - set(mine) for kind, mine in users.items()):
            detail = (
                f"{seen.who(process.pid)} is another user's, and CRIU may not read its limits without CAP_SYS_RESOURCE"
            )
            yield fail(detail, "run the engine with CAP_SYS_RESOURCE, or the container's processes as root")


def _capabilities(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        if any(_number(task, "CapInh") & ~_number(task, "CapBnd") for task in process.threads):
            detail = f"{seen.who(process.pid)} has inheritable capabilities outside its bounding set"
            yield fail(
                f"{detail}: CRIU dumps and does not restore that", "have the application drop them before the dump"
            )


def _number(task: Task, name: str) -> int:
    return int(task.status.get(name) or "0", 16)


def _pending_signals(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        queued, _, limit = process.status.get("SigQ", "").partition("/")
        waits = any(
            (_number(task, "SigPnd") | _number(task, "ShdPnd")) >> _FIRST_REAL_TIME - 1 for task in process.threads
        )
        if waits and limit and int(queued) > int(limit):
            detail = f"{seen.who(process.pid)} has pending signals, and its limit (RLIMIT_SIGPENDING) is {limit} by now"
            yield fail(f"{detail}, below the {queued} that wait", f"prlimit --pid {process.pid} --sigpending={queued}")


def _timer_thread(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        tids = {task.tid for task in process.threads}
        for tid in map(int, _NOTIFIED.findall(_timers(process.pid))):
            if tid not in tids:
                detail = f"{seen.who(process.pid)} has a timer that is to signal its thread {tid}, which has ended"
                yield fail(detail, "have the application delete the timer (timer_delete)")


def _timers(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/timers").read_text()
    return ""


def _address_space(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        limit, _ = process.limits.get(resource.RLIMIT_AS, _UNLIMITED)
        room = limit - (int((process.status.get("VmSize", "0").split() or ["0"])[0]) << 10)
        if limit != resource.RLIM_INFINITY and room < _PARASITE_BYTES[1]:
            detail = f"{seen.who(process.pid)} has few addresses left (RLIMIT_AS), and CRIU needs some in it"
            remedy = f"prlimit --pid {process.pid} --as={limit - room + 2 * _PARASITE_BYTES[1]}"
            yield (fail if room < _PARASITE_BYTES[0] else warn)(detail, remedy)


def _few_descriptors(seen: Observation) -> Iterator[Problem]:
    """CRIU opens some in each process: a socket, /proc, pipes; in the first one of /proc, too."""
    for process in _living(seen):
        limit, most = process.limits.get(resource.RLIMIT_NOFILE, _UNLIMITED)
        used = sum(0 <= file.fd < limit for file in process.files)
        need = _DESCRIPTORS + (process.pid == seen.init_pid)
        if limit != resource.RLIM_INFINITY and limit - used < need:
            detail = f"{seen.who(process.pid)} has {used} of {limit} descriptors in use (RLIMIT_NOFILE)"
            raised = used + 2 * need
            remedy = f"prlimit --pid {process.pid} --nofile={raised}:{max(most, raised)}"
            yield fail(f"{detail}; CRIU needs {need} more in it", remedy)


def _exec(seen: Observation) -> Iterator[Problem]:
    others = [process for process in seen.outside if not process.is_zombie]
    if others:
        names = ", ".join(seen.who(process.pid) for process in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield warn(
            f"CRIU leaves out what `exec` has started: {names}{more}", "end it before the dump, or start it again"
        )


CHECKS = (
    Check(name="scheduling", find=_scheduling),
    Check(name="session-order", find=_session_order),
    Check(name="shared-parts", find=_shares_memory),
    Check(name="shared-parts", find=_shares_directory),
    Check(name="waits-in-kernel", find=_waits_in_kernel),
    Check(name="first-thread-ended", find=_first_thread_ended),
    Check(name="stopped", find=_stopped, is_final=True),  # nothing could end that CRIU
    Check(name="many-groups", find=_many_groups),
    Check(name="no-sys-resource", find=_no_sys_resource),
    Check(name="capabilities", find=_capabilities),
    Check(name="pending-signals", find=_pending_signals),
    Check(name="timer-thread", find=_timer_thread),
    Check(name="address-space", find=_address_space),
    Check(name="few-descriptors", find=_few_descriptors),
    Check(name="exec", find=_exec),
)
