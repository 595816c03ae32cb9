"""Checks of descriptors by what the kernel says of each (proc_pid_fdinfo(5)): kinds, modes, owners.

integration/criu/test_states.py tries each with two versions of CRIU.
"""

import contextlib
import fcntl
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ocihook.criu.version import has_libbpf
from ocihook.linux.descriptors import copy_descriptor
from ocihook.linux.open_files import OpenFile
from ocihook.linux.sharing import is_target
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail
from ocihook.preflight.observation import Observation, ProcessSeen

_CLOSE = "have the application close it before the dump"
_ANONYMOUS = "anon_inode:"
_PIDFD_THREAD = os.O_EXCL  # linux/pidfd.h
_TIMER_CLOCKS = (0, 1, 7)  # that CRIU restores: real time, monotonic, boot time (criu/include/timerfd.h)
_MAP_TYPES = (1, 2)  # hash table, array (linux/bpf.h; criu/bpfmap.c)
_MOST_PIPES = 1024  # with a reading end (criu/pipes.c, NR_PIPES_WITH_DATA)
_F_GETOWN_EX, _F_OWNER_PGRP = 16, 2  # asm-generic/fcntl.h
_OWNER = struct.Struct("ii")
_WATCHED = re.compile(r"^tfd:\s*(\d+) .* ino:([0-9a-f]+) sdev:([0-9a-f]+)", re.MULTILINE)


def _number(file: OpenFile, name: str) -> int | None:
    """Return the number that the kernel shows by a name; None if it shows none."""
    found = re.search(rf"^{name}:\s+(-?\d+)", file.info, re.MULTILINE)
    return int(found[1]) if found else None


def _of_kind(seen: Observation, kind: str) -> Iterator[OpenFile]:
    return (file for file in seen.files if file.name == f"{_ANONYMOUS}{kind}")


def _pidfd(seen: Observation) -> Iterator[Problem]:
    for file in _of_kind(seen, "[pidfd]"):
        pid = _number(file, "Pid")
        if file.flags & _PIDFD_THREAD:
            yield fail(f"{seen.who(file.pid)} has a pidfd of a thread (PIDFD_THREAD), which CRIU cannot dump", _CLOSE)
        elif pid is not None and pid >= 0 and pid not in seen.pids:  # -1: of a process that has ended
            detail = f"{seen.who(file.pid)} has a pidfd of process {pid}, which CRIU does not dump"
            yield fail(detail, f"{_CLOSE}, or end that process")


def _timer_clock(seen: Observation) -> Iterator[Problem]:
    for file in _of_kind(seen, "[timerfd]"):
        clock = _number(file, "clockid")
        if clock is not None and clock not in _TIMER_CLOCKS:
            detail = f"{seen.who(file.pid)} has a timer (timerfd) on the clock {clock}, which CRIU cannot dump"
            yield fail(
                detail, "have the application use CLOCK_BOOTTIME or CLOCK_REALTIME, or run it without CAP_WAKE_ALARM"
            )


def _bpf_map(seen: Observation) -> Iterator[Problem]:
    for file in _of_kind(seen, "bpf-map"):
        kind = _number(file, "map_type")
        if not has_libbpf():
            detail = f"{seen.who(file.pid)} has a BPF map open, and this CRIU is built without libbpf"
            yield fail(detail, "have the application close it, or install a CRIU that is built with libbpf")
        elif kind is not None and kind not in _MAP_TYPES:
            detail = f"{seen.who(file.pid)} has a BPF map of type {kind} open; CRIU dumps hash tables and arrays only"
            yield fail(detail, _CLOSE)


def _epoll(seen: Observation) -> Iterator[Problem]:
    """What is watched must be open in the process itself, by whatever number (criu/eventpoll.c)."""
    for process in seen.processes:
        for file in process.files:
            for number in _lost_targets(process, file) if file.name == f"{_ANONYMOUS}[eventpoll]" else ():
                detail = (
                    f"{seen.who(process.pid)} watches (epoll) what was its descriptor {number}, which it has closed"
                )
                remedy = "have the application take it out (EPOLL_CTL_DEL) before it closes it"
                yield fail(f"{detail} and another process has open", remedy)


def _lost_targets(process: ProcessSeen, epoll: OpenFile) -> Iterator[int]:
    """Yield the numbers under which files are watched that the process does not have open any longer."""
    counts: Counter[int] = Counter()
    for text, inode, _ in _WATCHED.findall(epoll.info):
        number = int(text)
        same = sorted((file.fd for file in process.files if file.inode == int(inode, 16)), key=lambda fd: fd != number)
        if not any(fd >= 0 and is_target(process.pid, fd, epoll.fd, number, counts[number]) for fd in same):
            yield number
        counts[number] += 1


def _pipes(seen: Observation) -> Iterator[OpenFile]:
    return (file for file in seen.files if file.name.startswith("pipe:["))


def _packet_pipe(seen: Observation) -> Iterator[Problem]:
    options = {
        option for one in seen.processes for mount in one.mounts if mount.kind == "autofs" for option in mount.options
    }
    for file in _pipes(seen):
        if file.flags & os.O_DIRECT and f"pipe_ino={file.inode}" not in options:  # autofs has its own in that mode
            detail = f"{seen.who(file.pid)} has a pipe in packet mode (O_DIRECT), which CRIU cannot dump"
            yield fail(detail, "have the application make its pipes without O_DIRECT")


def _many_pipes(seen: Observation) -> Iterator[Problem]:
    count = len({file.inode for file in _pipes(seen) if file.flags & os.O_ACCMODE != os.O_WRONLY})
    if count > _MOST_PIPES:
        detail = f"it has {count} pipes; CRIU dumps {_MOST_PIPES}"
        yield fail(detail, "run it with fewer processes or event loops, or spread it over containers")


def _socket_path(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        if stat.S_ISSOCK(file.mode) and file.name.startswith("/"):
            detail = f"{seen.who(file.pid)} has the path of a socket open (O_PATH): {file.name}"
            yield fail(f"{detail}, which CRIU takes for a socket", _CLOSE)


def _long_path(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        if not file.name:
            detail = f"{seen.who(file.pid)} has a file open (descriptor {file.fd}) whose path is longer than 4096 bytes"
            yield fail(detail, "have the application close it, or keep it in a directory that is less deep")


def _lost_namespace(seen: Observation) -> Iterator[Problem]:
    """A namespace that is open, and in which no process of the container is."""
    joined = {name for process in seen.processes for name in process.namespaces.values()}
    for file in seen.files:
        kind, _, rest = file.name.partition(":")
        if kind in ("net", "mnt", "pid", "ipc", "uts", "user", "cgroup", "time") and rest and file.name not in joined:
            detail = f"{seen.who(file.pid)} has a namespace open ({file.name}) in which no process of the container is"
            yield fail(detail, _CLOSE)


def _proc_file(seen: Observation) -> Iterator[Problem]:
    """When CRIU opens files, only processes are there again: neither threads, nor processes that are not dumped."""
    inside = {_innermost(process): process for process in seen.processes}
    for process in seen.processes:
        places = {mount.id: mount.place for mount in process.mounts if mount.kind == "proc"}
        for file in process.files:
            place = places.get(file.mount_id)
            if place is None or file.is_deleted or not file.name.startswith(f"{place}/"):
                continue
            words = file.name[len(place) :].strip("/").split("/")
            if (
                words[0].isdigit()
                and (seen.has_own("pid") or words[0] in inside)
                and (what := _not_restored(process, place, words, inside))
            ):
                yield fail(
                    f"{seen.who(process.pid)} has {file.name} open, of {what}, which a restore does not have", _CLOSE
                )


def _innermost(process: ProcessSeen) -> str:
    """Return a process's pid as it sees it itself."""
    return (process.status.get("NSpid", "").split() or [str(process.pid)])[-1]


def _not_restored(process: ProcessSeen, place: str, words: list[str], inside: dict[str, ProcessSeen]) -> str:
    """Return what a file of /proc is of, if it is not there when CRIU opens files; "" if it is."""
    pid, *rest = words
    if pid not in inside:  # of one that has ended CRIU makes another
        is_alive = Path(f"/proc/{process.pid}/root{place}/{pid}").exists()
        return "a process that is not dumped, or a thread" if is_alive else ""
    if rest[:1] == ["task"] and len(rest) > 1 and rest[1] != pid:
        return "a thread"
    if rest[:1] == ["fdinfo"] and len(rest) > 1 and all(file.fd != int(rest[1]) for file in inside[pid].files):
        return "a descriptor that is closed"
    return ""


def _file_owner(seen: Observation) -> Iterator[Problem]:
    """Only a process that lives can be one, and of the living those of `exec` are not restored."""
    others = {process.pid for process in seen.outside}
    for file in seen.files if others else ():
        if file.fd >= 0 and (owner := _owner(file)) in others:
            detail = f"{seen.who(file.pid)} has a descriptor ({file.fd}) that signals {seen.who(owner)} (F_SETOWN)"
            yield fail(
                f"{detail}, which CRIU does not dump", f"end it (kill {owner}), or have the application take it back"
            )


def _owner(file: OpenFile) -> int:
    """Return whom a descriptor is to signal, as this process sees its pid; 0 if that is no process."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(file.pid)
        try:
            copy = copy_descriptor(pidfd, file.fd)
        finally:
            os.close(pidfd)
        try:
            kind, pid = _OWNER.unpack(fcntl.fcntl(copy, _F_GETOWN_EX, bytes(_OWNER.size)))
        finally:
            os.close(copy)
        return int(pid) if kind != _F_OWNER_PGRP else 0
    return 0


CHECKS = (
    Check(name="pidfd", find=_pidfd),
    Check(name="timer-clock", find=_timer_clock),
    Check(name="bpf-map", find=_bpf_map),
    Check(name="epoll", find=_epoll),
    Check(name="packet-pipe", find=_packet_pipe),
    Check(name="many-pipes", find=_many_pipes),
    Check(name="socket-path", find=_socket_path),
    Check(name="long-path", find=_long_path),
    Check(name="lost-namespace", find=_lost_namespace),
    Check(name="proc-file", find=_proc_file),
    Check(name="file-owner", find=_file_owner),
)
