"""State of one task that CRIU does not restore, read and set from outside: scheduling, limits, files of /proc.

Each read is one system call or one file, without any help of the task: a container is stopped while they are made.
Formats: proc_pid_status(5), proc_pid_limits(5), proc_pid_timers(5), sched_setattr(2), ioprio_set(2), kcmp(2).
"""

import contextlib
import ctypes
import os
import platform
import re
import resource
import struct
from collections.abc import Mapping
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {  # asm/unistd.h: sched_setattr, sched_getattr, ioprio_set, ioprio_get, kcmp
    "x86_64": (314, 315, 251, 252, 312),
    "aarch64": (274, 275, 30, 31, 272),
}
_SCHED_SETATTR, _SCHED_GETATTR, _IOPRIO_SET, _IOPRIO_GET, _KCMP = _NUMBERS.get(platform.machine(), (-1,) * 5)
_ATTR = struct.Struct("=IIQiIQQQII")  # struct sched_attr (linux/sched/types.h)
_RESET_ON_FORK, _UTIL_CLAMP = 0x01, 0x60
_MOST_UTIL = 1024  # SCHED_CAPACITY_SCALE
_WHO_PROCESS = 1
MOST_CPUS = 1 << 13  # NR_CPUS of the largest kernels
_MOST_BYTES = 1 << 16  # of a file of /proc that is read at once
KCMP_FILES, KCMP_FS = 2, 3  # linux/kcmp.h
_KCMP_FILE = 0

# Lines of /proc/PID/limits.
LIMITS: Mapping[str, int] = {
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max resident set": resource.RLIMIT_RSS,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
    "Max file locks": 10,  # RLIMIT_LOCKS
    "Max pending signals": resource.RLIMIT_SIGPENDING,
    "Max msgqueue size": resource.RLIMIT_MSGQUEUE,
    "Max nice priority": resource.RLIMIT_NICE,
    "Max realtime priority": resource.RLIMIT_RTPRIO,
    "Max realtime timeout": resource.RLIMIT_RTTIME,
}
_LIMIT = re.compile(r"^(Max [a-z ]+?)\s{2,}(\w+)\s+(\w+)", re.MULTILINE)


class Scheduling(NamedTuple):
    """How a thread is scheduled, as sched_setattr(2) has it."""

    policy: int
    flags: int
    nice: int
    priority: int
    runtime_ns: int  # of SCHED_DEADLINE; of other policies the slice that was asked for, 0: the system's
    deadline_ns: int
    period_ns: int
    util_min: int
    util_max: int

    def words(self) -> str:
        """Return it as text."""
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "Scheduling":
        """Read what `words` made; else a ValueError."""
        numbers = [int(word) for word in text.split()]
        if len(numbers) != len(cls._fields):
            raise ValueError(f"{text!r} does not describe how a thread is scheduled")
        return cls(*numbers)


def read_file(path: str) -> bytes:
    """Return the content of a small file of /proc; b"" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _MOST_BYTES)  # waits: no, a file of /proc answers at once
    except OSError:
        return b""
    finally:
        os.close(fd)


def write_file(path: str, value: str) -> None:
    """Write a file of /proc at once.

    Raises:
        OSError: if the kernel refuses.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


_attr_buffer = ctypes.create_string_buffer(_ATTR.size)


def raw_scheduling(tid: int) -> bytes:
    """Return how a thread is scheduled as the kernel says it, b"" if it does not; `describe_scheduling` reads it."""
    done = _libc.syscall(_SCHED_GETATTR, tid, _attr_buffer, _ATTR.size, 0)
    return _attr_buffer.raw if done == 0 else b""


def describe_scheduling(raw: bytes, usual_slice_ns: int) -> Scheduling:
    """Return what `raw_scheduling` says; what a thread has by default is 0, and of no other machine."""
    _, policy, flags, nice, priority, runtime, deadline, period, util_min, util_max = _ATTR.unpack(raw)
    if policy not in (6, 7) and runtime == usual_slice_ns:  # SCHED_DEADLINE, SCHED_EXT
        runtime = 0
    return Scheduling(policy, flags, nice, priority, runtime, deadline, period, util_min, util_max or _MOST_UTIL)


def usual_slice_ns() -> int:
    """Return the slice of a thread that has asked for none (Linux 6.12), which depends on the machine."""
    raw = raw_scheduling(0)
    return int(_ATTR.unpack(raw)[5]) if raw else 0


def set_scheduling(tid: int, wanted: Scheduling, has: Scheduling) -> None:
    """Schedule a thread as wanted.

    Raises:
        OSError: if the kernel refuses.
    """
    flags = wanted.flags & _RESET_ON_FORK
    if (wanted.util_min, wanted.util_max) != (has.util_min, has.util_max):
        flags |= _UTIL_CLAMP
    fields = (wanted.policy, flags, *wanted[2:])
    _check(_libc.syscall(_SCHED_SETATTR, tid, _ATTR.pack(_ATTR.size, *fields), 0), "sched_setattr")


def io_priority(tid: int) -> int:
    """Return the I/O priority that a thread has asked for, 0 for none; -1 if it cannot be read."""
    number: int = _libc.syscall(_IOPRIO_GET, _WHO_PROCESS, tid)
    return number


def set_io_priority(tid: int, value: int) -> None:
    """Set it.

    Raises:
        OSError: if the kernel refuses.
    """
    _check(_libc.syscall(_IOPRIO_SET, _WHO_PROCESS, tid, value), "ioprio_set")


def shares(tid: int, other: int, kind: int) -> bool:
    """Return whether two threads share something (KCMP_...); True where the kernel does not say."""
    return _libc.syscall(_KCMP, tid, other, kind, 0, 0) in (0, -1)


def is_same_open_file(pid: int, fd: int, other: int, other_fd: int) -> bool:
    """Return whether descriptors of two processes are one open file; False where the kernel does not say."""
    return bool(_libc.syscall(_KCMP, pid, other, _KCMP_FILE, fd, other_fd) == 0)


def parse_limits(text: str) -> dict[str, str]:
    """Return soft and hard limit by name ("Max open files": "1024 4096")."""
    return {name: f"{soft} {hard}" for name, soft, hard in _LIMIT.findall(text)}


def set_limit(pid: int, name: str, value: str) -> None:
    """Set a limit of a process, as `parse_limits` has it.

    Raises:
        OSError, ValueError: if the kernel refuses.
        KeyError: if there is no such limit.
    """
    soft, hard = (resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in value.split())
    resource.prlimit(pid, LIMITS[name], (soft, hard))


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it ("0-3,8"); else a ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if int(last or first) >= MOST_CPUS:
            raise ValueError(f"{part!r} has more processors than any machine")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def online_cpus() -> str:
    """Return the processors that this machine has, as the kernel lists them; "" if it does not."""
    return read_file("/sys/devices/system/cpu/online").decode().strip()


def listed(path: str) -> list[str]:
    """Return the names in a directory; [] if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []
