"""The table of the audit: for each piece of a task's state whether it is as before, and how it is put back.

What CRIU loses was read from its source (4.1.1, 4.2): its images have no field for it. What it keeps is compared, too,
as far as this costs nothing: a row without `put_back` is reported only.
"""

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ocihook.audit.reading import ALL_CPUS
from ocihook.audit.state import ContainerState
from ocihook.linux.descriptors import copy_descriptor
from ocihook.linux.socket_options import OPTIONS, set_option
from ocihook.linux.task_state import (
    LIMITS,
    MOST_CPUS,
    Scheduling,
    parse_cpus,
    set_io_priority,
    set_limit,
    set_scheduling,
    write_file,
)

IsSame = Callable[[str, str, ContainerState], bool]
PutBack = Callable[["Target", str, str], None]  # given the value before and the one that it has


class Target(NamedTuple):
    """The task or descriptor of a restored container that has a piece of state."""

    pid: int
    tid: int  # of a thread; else the pid
    fd: int = -1  # of a descriptor


class Row(NamedTuple):
    """One piece of state."""

    name: str  # as it was read (reading.py)
    what: str  # in messages
    put_back: PutBack | None = None  # raises an OSError or a ValueError if it cannot
    is_right: bool = False  # it bounds what a program may do: a difference may be a danger
    is_same: IsSame = lambda before, after, _: before == after
    absent: str | None = None  # what it means if it was not read; None: nothing, it is not compared then
    criu: str = "lost"  # what CRIU does with it: lost, kept, or kept with an exception
    seen: str = ""  # where it was read
    inherited: str = ""  # when it is right from the beginning (inheriting.py)


def _is_same_affinity(before: str, after: str, here: ContainerState) -> bool:
    """Return whether a thread runs on the processors that it had, as far as its cgroup has these."""
    if before == after or ALL_CPUS in (before, after):
        return before == after
    wanted = parse_cpus(before)
    return parse_cpus(after) == (wanted & parse_cpus(here.cpus) or wanted)


def _set_affinity(target: Target, before: str, _after: str) -> None:
    cpus = range(MOST_CPUS) if before == ALL_CPUS else parse_cpus(before)
    os.sched_setaffinity(target.tid, cpus)  # the kernel leaves out what the cgroup does not allow


def _set_scheduling(target: Target, before: str, after: str) -> None:
    set_scheduling(target.tid, Scheduling.parse(before), Scheduling.parse(after))


def _set_io_priority(target: Target, before: str, _after: str) -> None:
    set_io_priority(target.tid, int(before))


def _writing(name: str, form: str = "{}") -> PutBack:
    def write(target: Target, before: str, _after: str) -> None:
        write_file(f"/proc/{target.tid}/{name}", form.format(before))

    return write


def _limiting(name: str) -> PutBack:
    def limit(target: Target, before: str, _after: str) -> None:
        set_limit(target.pid, name, before)

    return limit


def _optional(name: str) -> PutBack:
    def set_on_copy(target: Target, before: str, _after: str) -> None:
        pidfd = os.pidfd_open(target.pid)
        try:
            copy = copy_descriptor(pidfd, target.fd)
        finally:
            os.close(pidfd)
        try:
            set_option(copy, name, int(before))
        finally:
            os.close(copy)

    return set_on_copy


def _is_same_filter(before: str, after: str, _here: ContainerState) -> bool:
    """Return whether a file of hexadecimal bits has the same."""
    return int(before, 16) == int(after, 16)


def _is_same_mitigation(before: str, after: str, _here: ContainerState) -> bool:
    """Return whether a thread's own choice is as before; what the machine does by itself does not count."""
    of_thread = all(text.startswith(("thread", "conditional")) for text in (before, after))
    return before == after or not of_thread


_STATUS = "task/TID/status"
_THREAD_ROWS = (
    Row("CPU affinity", "CPU affinity", _set_affinity, is_same=_is_same_affinity, seen=_STATUS),
    Row(
        "scheduling", "scheduling (policy, nice, slice, clamps)", _set_scheduling, criu="kept but slice and clamps",
        seen="sched_getattr(2)",
    ),
    Row("I/O priority", "I/O priority", _set_io_priority, seen="ioprio_get(2)"),
    Row("timer slack", "timer slack", _writing("timerslack_ns"), seen="timerslack_ns"),
    Row("Uid", "user ids", is_right=True, criu="kept", seen=_STATUS),
    Row("Gid", "group ids", is_right=True, criu="kept", seen=_STATUS),
    Row("Groups", "supplementary groups", is_right=True, criu="kept unless there are none", seen=_STATUS,
        inherited="put back"),
    *(Row(f"Cap{kind}", f"capabilities ({kind})", is_right=True, criu="kept", seen=_STATUS)
      for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")),
    Row("NoNewPrivs", "no_new_privs", is_right=True, criu="kept", seen=_STATUS),
    Row("Seccomp", "seccomp mode", is_right=True, criu="kept", seen=_STATUS),
    Row("Seccomp_filters", "number of seccomp filters", is_right=True, criu="kept", seen=_STATUS),
    Row("Umask", "umask", criu="kept", seen=_STATUS),
    Row("SigBlk", "blocked signals", criu="kept", seen=_STATUS),
    Row("SigIgn", "ignored signals", criu="kept", seen=_STATUS),
    Row("SigCgt", "handled signals", criu="kept", seen=_STATUS),
    Row("THP_enabled", "use of huge pages (PR_SET_THP_DISABLE)", criu="kept", seen=_STATUS),
    Row("untag_mask", "tagged addresses", seen=_STATUS),
    Row("x86_Thread_features", "shadow stack", criu="kept from CRIU 4.2 on", seen=_STATUS),
    Row("Speculation_Store_Bypass", "speculative store bypass", is_same=_is_same_mitigation, seen=_STATUS),
    Row("SpeculationIndirectBranch", "indirect branch speculation", is_same=_is_same_mitigation, seen=_STATUS),
    *(Row(f"{kind} namespace", f"{kind} namespace of its own", is_right=True, criu="kept, but not of single threads",
          seen="ns/")
      for kind in ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")),
    *(Row(name, what, absent="shared", seen="kcmp(2)") for name, what in (
        ("files", "descriptors of a thread's own"),
        ("fs", "working directory of a thread's own"),
    )),
)  # fmt: skip
_PROCESS_ROWS = (
    *(Row(name, f"limit ({name})", _limiting(name), criu="kept where it may be set", seen="limits") for name in LIMITS),
    Row("oom_score_adj", "oom_score_adj", _writing("oom_score_adj"), criu="kept unless it is 0", seen="oom_score_adj"),
    Row("coredump_filter", "coredump_filter", _writing("coredump_filter", "0x{}"), is_same=_is_same_filter,
        seen="coredump_filter"),
    Row("autogroup nice", "nice of its autogroup", _writing("autogroup"), seen="autogroup"),
    Row("loginuid", "login uid", criu="kept where it may be set", seen="loginuid"),
    Row("personality", "personality", seen="personality", inherited="put back if all processes have the same"),
    Row("POSIX timers", "POSIX timers", criu="kept", seen="timers"),
    *(Row(f"SELinux {name}", f"SELinux label ({name})", criu="lost", seen=f"attr/{name}")
      for name in ("exec", "fscreate", "keycreate", "sockcreate")),
)  # fmt: skip
_FILE_ROWS = (
    Row("kind", "kind of descriptors", criu="kept", seen="fd/"),
    Row("[eventfd]", "semaphore mode of eventfds", seen="fdinfo/"),
    Row("inotify", "flags of inotify watches (IN_ONESHOT, IN_EXCL_UNLINK)", seen="fdinfo/"),
    Row("[fanotify]", "fanotify marks", criu="kept but marks of file systems", seen="fdinfo/"),
    Row("[signalfd]", "signals of signalfds", criu="kept", seen="fdinfo/"),
    Row("[timerfd]", "clocks and intervals of timerfds", criu="kept", seen="fdinfo/"),
    Row("peer", "user and group of the peer of a Unix socket (SO_PEERCRED)", is_right=True, seen="SO_PEERCRED"),
    *(Row(name, f"socket option {name}", _optional(name), seen="getsockopt(2)") for name in OPTIONS),
)
THREAD: Mapping[str, Row] = {row.name: row for row in _THREAD_ROWS}
PROCESS: Mapping[str, Row] = {row.name: row for row in _PROCESS_ROWS}
FILE: Mapping[str, Row] = {row.name: row for row in _FILE_ROWS}
