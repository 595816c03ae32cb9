"""The table of the audit: for each piece of a task's state whether it is as before, and how it is put back.

What CRIU loses was read from its source (4.1.1, 4.2): its images have no field for it. What it keeps is compared, too,
as far as this costs nothing: a row without `put_back` is reported only.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ocihook.audit.mapped import FLAGS, KEY, NAME, POLICY, TASK_POLICY
from ocihook.audit.places import CGROUP_FILES
from ocihook.audit.reading import ALL_CPUS
from ocihook.audit.state import ContainerState
from ocihook.linux.attributes import set_attributes
from ocihook.linux.descriptors import copy_of
from ocihook.linux.file_state import (
    add_count,
    add_seals,
    disarm,
    lock,
    set_flags,
    set_pipe_size,
    set_signal,
)
from ocihook.linux.mounts import restrict_inside
from ocihook.linux.patience import Patience
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
from ocihook.linux.workers import call_each

IsSame = Callable[[str, str, ContainerState], bool]
PutBack = Callable[["Target", str, str], None]  # given the value before and the one that it has


class Target(NamedTuple):
    """The task, descriptor, cgroup or file of a restored container that has a piece of state."""

    pid: int = 0
    tid: int = 0  # of a thread; else the pid
    fd: int = -1  # of a descriptor
    cgroup: Path | None = None
    path: str = ""  # of a file, as the process has it


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
    matters: bool = True  # a program can notice a difference


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


def _on_copy(put_back: Callable[[int, str, str], None]) -> PutBack:
    """Return what puts back on a copy of a descriptor, given that and both values."""

    def on_copy(target: Target, before: str, after: str) -> None:
        copy = copy_of(target.pid, target.fd)
        try:
            put_back(copy, before, after)
        finally:
            os.close(copy)

    return on_copy


def _setting(set_it: Callable[[int, str], None]) -> PutBack:
    return _on_copy(lambda copy, before, _after: set_it(copy, before))


def _optional(name: str) -> PutBack:
    return _on_copy(lambda copy, before, _after: set_option(copy, name, int(before)))


def _count(copy: int, before: str, after: str) -> None:
    if int(before) > _MOST_COUNT:
        raise ValueError("no counter is so large")
    add_count(copy, int(before) - int(after))


def _disarm(copy: int, before: str, _after: str) -> None:
    if before != "0":
        raise ValueError("a timer that has expired cannot be made anew")
    disarm(copy)


def _check_use(cgroup: Path, name: str, limit: str) -> None:
    """Refuse a limit of memory that is less than what is in use: the kernel would kill for it."""
    used = {"memory.max": "memory.current", "memory.swap.max": "memory.swap.current"}.get(name)
    if used and limit != "max" and int((cgroup / used).read_text()) > int(limit):
        raise ValueError("more is in use")


def _limiting_cgroup(name: str) -> PutBack:
    def limit(target: Target, before: str, _after: str) -> None:
        if target.cgroup is not None:
            _check_use(target.cgroup, name, before)
            for line in before.split("\n"):  # one write each, as the kernel takes them
                (target.cgroup / name).write_text(line)

    return limit


def _restrict(target: Target, before: str, _after: str) -> None:
    """Restrict a mount as it was; what is narrower here stays so. A process of its own enters the namespace."""
    work = partial(restrict_inside, place=target.path, options=before.split(","))
    (outcome,) = call_each(work, [target.pid], Patience(timeout_s=_MOUNT_S))
    if isinstance(outcome, Exception):
        raise ValueError(str(outcome))


def _set_attributes(target: Target, before: str, _after: str) -> None:
    set_attributes(target.pid, target.path, before)


def _is_still_same(before: str, after: str, _here: ContainerState) -> bool:
    """Return whether a descriptor shares its open file with the one that it did."""
    return before in ("", after)


def _has_all_bits(before: str, after: str, _here: ContainerState) -> bool:
    return not int(before, 16) & ~int(after, 16)


def _is_same_filter(before: str, after: str, _here: ContainerState) -> bool:
    """Return whether a file of hexadecimal bits has the same."""
    return int(before, 16) == int(after, 16)


def _is_same_mitigation(before: str, after: str, _here: ContainerState) -> bool:
    """Return whether a thread's own choice is as before; what the machine does by itself does not count."""
    of_thread = all(text.startswith(("thread", "conditional")) for text in (before, after))
    return before == after or not of_thread


_MOST_COUNT = (1 << 64) - 2  # of an eventfd: a write beyond waits for a reader (eventfd(2))
_MOUNT_S = 5.0  # for a remount
_STATUS = "task/TID/status"
_CRIU_ON_MEMORY = {
    "wf": "kept from CRIU 4.2 on", "dp": "kept from CRIU 4.2 on", "lf": "locked at once", "sl": "lost", "sf": "lost",
    "um": "lost", "uw": "lost", "ui": "lost",
}  # fmt: skip
_THREAD_ROWS = (
    Row("CPU affinity", "CPU affinity", _set_affinity, is_same=_is_same_affinity, seen=_STATUS),
    Row(
        "scheduling", "scheduling (policy, nice, slice, clamps)", _set_scheduling, criu="kept but slice and clamps",
        seen="sched_getattr(2)",
    ),
    Row("I/O priority", "I/O priority", _set_io_priority, seen="ioprio_get(2)"),
    Row("timer slack", "timer slack", _writing("timerslack_ns"), seen="timerslack_ns"),
    Row("personality", "personality", seen="personality", inherited="put back if all processes have the same"),
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
    Row("pending", "signals that are blocked and wait", criu="kept", is_same=_has_all_bits, seen=_STATUS),
    Row("SigIgn", "ignored signals", criu="kept", seen=_STATUS),
    Row("SigCgt", "handled signals", criu="kept", seen=_STATUS),
    Row("THP_enabled", "use of huge pages (PR_SET_THP_DISABLE)", criu="kept", seen=_STATUS),
    Row("untag_mask", "tagged addresses", seen=_STATUS),
    Row("x86_Thread_features", "shadow stack", criu="kept from CRIU 4.2 on", seen=_STATUS),
    Row("Speculation_Store_Bypass", "speculative store bypass", is_same=_is_same_mitigation, seen=_STATUS,
        inherited="put back if all processes have the same"),
    Row("SpeculationIndirectBranch", "indirect branch speculation", is_same=_is_same_mitigation, seen=_STATUS,
        inherited="put back if all processes have the same"),
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
    Row("cgroup", "cgroup (v2) of its own", criu="kept, but not with manage-cgroups ignore", absent=".", seen="cgroup"),
    Row("POSIX timers", "POSIX timers", criu="kept", seen="timers"),
    *(Row(f"SELinux {name}", f"SELinux label ({name})", criu="lost", seen=f"attr/{name}")
      for name in ("exec", "fscreate", "keycreate", "sockcreate")),
    *(Row(name, what, criu=_CRIU_ON_MEMORY.get(name, "kept"), seen="smaps", matters=name != "dp",
          inherited="put back by its image" if name == "wf" else "")
      for name, what in FLAGS.items()),
    Row(KEY, "protection keys of memory", seen="smaps"),
    Row(POLICY, "NUMA policy of memory", seen="numa_maps"),
    Row(TASK_POLICY, "NUMA policy", seen="numa_maps", inherited="put back if all processes have the same"),
    Row(NAME, "names of memory", seen="smaps", matters=False),
)  # fmt: skip
_FILE_ROWS = (
    Row("kind", "kind of descriptors", criu="kept", seen="fd/"),
    Row("same", "open files that descriptors share", criu="kept", is_same=_is_still_same, absent="", seen="kcmp(2)"),
    Row("flags", "flags of open files", _setting(set_flags), criu="kept", seen="fdinfo/"),
    Row("locks", "locks of files", _setting(lock), criu="kept with its option file-locks", seen="fdinfo/"),
    Row("signal", "signal of input and output (F_SETSIG)", _setting(set_signal), criu="kept", seen="fcntl(2)"),
    Row("owner", "owner of files (F_SETOWN)", criu="kept", seen="fcntl(2)"),
    Row("pipe size", "size of pipes", _setting(set_pipe_size), criu="kept", seen="fcntl(2)"),
    Row("seals", "seals of memfds", _setting(add_seals), criu="kept", seen="fcntl(2)"),
    Row("count", "counter of eventfds", _on_copy(_count), criu="kept, of 32 bits", seen="fdinfo/"),
    Row("ticks", "timerfds that are off", _on_copy(_disarm), criu="kept unless its time was absolute", seen="fdinfo/"),
    Row("[eventpoll]", "what epoll watches", criu="kept but EPOLLONESHOT that has fired", seen="fdinfo/"),
    Row("[eventfd]", "semaphore mode of eventfds", seen="fdinfo/"),
    Row("inotify", "flags of inotify watches (IN_ONESHOT, IN_EXCL_UNLINK)", seen="fdinfo/"),
    Row("[fanotify]", "fanotify marks", criu="kept but marks of file systems", seen="fdinfo/"),
    Row("[signalfd]", "signals of signalfds", criu="kept", seen="fdinfo/"),
    Row("[timerfd]", "clocks and intervals of timerfds", criu="kept", seen="fdinfo/"),
    Row("peer", "user and group of the peer of a Unix socket (SO_PEERCRED)", is_right=True, seen="SO_PEERCRED"),
    *(Row(name, f"socket option {name}", _optional(name), seen="getsockopt(2)") for name in OPTIONS),
)
_MOUNT_ROWS = (
    Row("file system", "file system of mounts", criu="kept", seen="mountinfo"),
    Row(
        "options",
        "options of mounts",
        _restrict,
        is_right=True,
        criu="kept but nosymfollow; of the root from CRIU 4.2 on",
        seen="mountinfo",
    ),
    Row("file system options", "options of file systems", criu="kept", seen="mountinfo"),
    Row("propagation", "propagation of mounts", criu="kept", seen="mountinfo"),
)
_PLACED_ROWS = (Row("attributes", "extended attributes and ACLs", _set_attributes, absent="", seen="xattr(7)"),)
_CGROUP_ROWS = tuple(
    Row(name, f"limit of cgroups that it has made ({name})", _limiting_cgroup(name), seen="cgroup v2",
        criu="kept" if name in ("pids.max", "cpuset.cpus", "cpuset.mems", "cgroup.max.depth", "cgroup.max.descendants")
        else "lost")
    for name in CGROUP_FILES
)  # fmt: skip
THREAD: Mapping[str, Row] = {row.name: row for row in _THREAD_ROWS}
PROCESS: Mapping[str, Row] = {row.name: row for row in _PROCESS_ROWS}
FILE: Mapping[str, Row] = {row.name: row for row in _FILE_ROWS}
MOUNTED: Mapping[str, Row] = {row.name: row for row in _MOUNT_ROWS}
LIMITED: Mapping[str, Row] = {row.name: row for row in _CGROUP_ROWS}
PLACED: Mapping[str, Row] = {row.name: row for row in _PLACED_ROWS}
