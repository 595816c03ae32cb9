"""System V objects of a process's IPC namespace, read by a thread that enters it and ends (sysvipc(7))."""

import ctypes
import os
import threading
from pathlib import Path
from typing import NamedTuple

_CLONE_NEWIPC = 1 << 27
_REMOVED = 0o1000  # linux/shm.h: SHM_DEST
_libc = ctypes.CDLL(None, use_errno=True)


class Queue(NamedTuple):
    """A message queue."""

    id: int
    bytes: int  # of all its messages
    messages: int


class Objects(NamedTuple):
    """The message queues and removed shared memory of a namespace, and its limits."""

    queues: tuple[Queue, ...] = ()
    most_bytes: int = 0  # that a new queue may hold (kernel.msgmnb)
    longest_bytes: int = 0  # that a message may be (kernel.msgmax)
    removed: tuple[int, ...] = ()  # segments of shared memory that are removed when no process has them (IPC_RMID)


def objects_of(pid: int) -> Objects:
    """Return the objects that a process sees; none if it is gone, or its namespace may not be entered."""
    found: list[Objects] = []

    def read() -> None:
        try:
            fd = os.open(f"/proc/{pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if _libc.setns(fd, _CLONE_NEWIPC) == 0:
                found.append(_read())
        finally:
            os.close(fd)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()  # waits: for system calls
    return found[0] if found else Objects()


def _read() -> Objects:
    """Return those of the calling thread's namespace; columns are key, id, permissions, of a queue bytes and count."""
    try:
        return Objects(
            tuple(Queue(int(row[1]), int(row[3]), int(row[4])) for row in _rows("msg")),
            _limit("msgmnb"),
            _limit("msgmax"),
            tuple(int(row[1]) for row in _rows("shm") if int(row[2], 8) & _REMOVED),
        )
    except OSError:  # a kernel without System V objects
        return Objects()


def _rows(kind: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]


def _limit(name: str) -> int:
    return int(Path(f"/proc/sys/kernel/{name}").read_text())
