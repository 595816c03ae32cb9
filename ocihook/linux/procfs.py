"""Reads /proc: who a process is, who started it, whether it is still the same process."""

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import NamedTuple

_READ_BYTES = 4096
_ENDED = "ZX"  # states of a task that runs no more: proc_pid_stat(5), field 3
_EXITING = 0x4  # PF_EXITING (include/linux/sched.h), of field 9 of proc_pid_stat(5)


class Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int  # since boot, in clock ticks (proc_pid_stat(5), field 22)

    @classmethod
    def find(cls, pid: int) -> "Process | None":
        """Return the living process with this pid, if there is one; its first thread may have ended before others."""
        fields = _stat_fields(pid)
        if not fields or (fields[0] in _ENDED and not _has_other_threads(pid)):
            return None
        return cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Return whether a thread of it still runs; a zombie has none."""
        return Process.find(self.pid) == self

    def is_ending(self) -> bool:
        """Return whether it is gone, or none of its threads runs any more: it may still wait for other processes."""
        fields = _stat_fields(self.pid)
        if not fields or int(fields[19]) != self.start_ticks:
            return True
        threads = filter(None, map(_stat_fields, thread_ids(self.pid)))
        return all(int(each[6]) & _EXITING for each in threads)

    def open(self) -> int | None:
        """Return a pidfd, or None when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            if self.is_alive():
                return pidfd
            os.close(pidfd)
        return None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; False when it is gone."""
        pidfd = self.open()
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def _has_other_threads(pid: int) -> bool:
    """Return whether a thread runs of a process whose first thread has ended."""
    return any(fields[0] not in _ENDED for tid in thread_ids(pid) if (fields := _stat_fields(tid)))


def _stat_fields(pid: int) -> list[str]:
    """Return /proc/PID/stat from its third field (state) on; [] when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # a command name may contain anything, ')' too


class Stat(NamedTuple):
    """Some fields of proc_pid_stat(5) of a process or thread."""

    state: str = ""  # one letter; "": it has gone
    parent: int = 0
    group: int = 0
    session: int = 0
    terminal: int = 0  # its controlling one, as a device; 0: none
    exit_signal: int = signal.SIGCHLD
    policy: int = 0  # of scheduling: SCHED_OTHER
    foreground: int = 0  # process group of that terminal
    exit_code: int = 0  # of one that has ended, as wait(2) has it


def read_stat(pid: int) -> Stat:
    """Return the fields of a process or thread; those of `Stat()` when it has gone."""
    fields = _stat_fields(pid)
    if not fields:
        return Stat()
    parent, group, session, terminal, foreground = map(int, fields[1:6])
    ended = int(fields[49]) if len(fields) > 49 else 0
    return Stat(fields[0], parent, group, session, terminal, int(fields[35]), int(fields[38]), foreground, ended)


def status_fields(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by their names; {} when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


class Child(NamedTuple):
    """A child as its parent's kernel records have it, alive or not waited for yet."""

    process: Process
    parent: int
    has_ended: bool
    end_signal: int  # what its parent gets when it ends; 0: nothing

    @classmethod
    def find(cls, pid: int) -> "Child | None":
        """Return what has this pid, if there is anything."""
        fields = _stat_fields(pid)
        if not fields:
            return None
        return cls(Process(pid, int(fields[19])), int(fields[1]), Process.find(pid) is None, int(fields[35]))


def address_space(pid: int) -> tuple[str, ...]:
    """Return what a program's start has put where in a process, () when it is gone; another program's differs.

    The program, and from proc_pid_stat(5) the addresses of code, stack, data, heap, arguments and environment: fields
    26 to 28 and 45 to 51.
    """
    try:
        program = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return ()
    fields = _stat_fields(pid)
    return (f"{program.st_dev}:{program.st_ino}", *fields[23:26], *fields[42:49])


def parent_pid(pid: int) -> int:
    """Return the parent's pid, 0 if there is none."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def is_session_leader(pid: int) -> bool:
    """Return whether a process leads its session; False when it is gone."""
    fields = _stat_fields(pid)
    return bool(fields) and int(fields[3]) == pid


def has_session_outside(pid: int) -> bool:
    """Return whether the leader of a process's session is outside its PID namespace; False when it is gone."""
    return status_fields(pid).get("NSsid", "").split()[-1:] == [
        "0"
    ]  # as each namespace sees it, its own last (proc(5))


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; [] when it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode("utf-8", "surrogateescape") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def tracer_pid(pid: int) -> int | None:
    """Return the pid of the process that traces this one, 0 for none, None when it is gone."""
    value = status_fields(pid).get("TracerPid")
    return int(value) if value else None


def has_pending(tid: int, number: signal.Signals) -> bool:
    """Return whether a signal waits for a thread, or for its process; False when it is gone."""
    status = status_fields(tid)
    pending = int(status.get("SigPnd", "0"), 16) | int(status.get("ShdPnd", "0"), 16)
    return bool(pending & 1 << number - 1)


def thread_ids(pid: int) -> list[int]:
    """Return the threads of a process; [] when it is gone."""
    return sorted(map(int, _listed(f"/proc/{pid}/task")))


def has_exited(tid: int) -> bool:
    """Return whether a thread is a zombie, as the first of a process may be, or gone."""
    fields = _stat_fields(tid)
    return not fields or fields[0] in _ENDED


def can_be_interrupted(tid: int) -> bool:
    """Return whether a thread runs, sleeps or is stopped, and does not wait for a disk; False when it is gone."""
    fields = _stat_fields(tid)
    return bool(fields) and fields[0] in "RSTt"


def has_ended(pidfd: int) -> bool:
    """Return whether the process behind a pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def descendants(pid: int) -> list[int]:
    """Return a process and all that descend from it, parents first; what ends meanwhile may be missing."""
    found = [pid]
    for parent in found:  # grows while it is iterated
        found += children(parent)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, ended ones that it has not waited for included."""
    found: list[int] = []
    for task in _listed(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += map(int, _content(f"/proc/{pid}/task/{task}/children").split())
    return found


def _content(path: str) -> bytes:
    """Return the content of a file, in no more calls than needed: a container may have thousands of such files.

    Raises:
        OSError: if it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = last = os.read(fd, _READ_BYTES)  # waits: no, a file of /proc answers at once
        while len(last) == _READ_BYTES:  # a file of /proc gives as much as there is
            last = os.read(fd, _READ_BYTES)  # waits: no, as above
            found += last
        return found
    finally:
        os.close(fd)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def pid_below(init_pid: int, pid: int) -> str:
    """Return the pid of a process or thread as `init_pid` sees it, those of namespaces further inside after a slash."""
    depth = max(1, len(_namespace_pids(init_pid)))
    return "/".join(_namespace_pids(pid)[depth - 1 :])


def _namespace_pids(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []
