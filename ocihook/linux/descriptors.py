"""Copies of other processes' descriptors (pidfd_getfd(2)): they stay valid when the owner closes its own, or ends."""

import ctypes
import os
import select

_PIDFD_GETFD = 438  # on every architecture (asm-generic/unistd.h)
_libc = ctypes.CDLL(None, use_errno=True)


def copy_descriptor(pidfd: int, fd: int) -> int:
    """Return a copy of the descriptor `fd` of the process behind `pidfd`; the caller closes it.

    Raises:
        OSError: if there is none, or this process may not access that one.
    """
    copy: int = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {fd} cannot be copied")
    return copy


def copy_of(pid: int, fd: int) -> int:
    """Return a copy of the descriptor `fd` of a process; as `copy_descriptor`."""
    pidfd = os.pidfd_open(pid)
    try:
        return copy_descriptor(pidfd, fd)
    finally:
        os.close(pidfd)


def write_at_once(fd: int, data: bytes) -> bool:
    """Write to a shared descriptor if that does not block; return whether it was written."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not any(event & select.POLLOUT for _, event in poll.poll(0)):
        return False
    return os.write(fd, data[: select.PIPE_BUF]) > 0
