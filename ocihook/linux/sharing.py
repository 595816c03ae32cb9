"""Finds out what processes share: memory, a directory, a file that one descriptor has and another watches (kcmp(2))."""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import cmp_to_key, partial

_SYS_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_EPOLL_TARGET = 7  # linux/kcmp.h: KCMP_EPOLL_TFD
_SLOT = struct.Struct("III")  # struct kcmp_epoll_slot: epoll descriptor, number of the target, which of these
_NO_TARGET = (errno.ENOENT, errno.EBADF, errno.ESRCH)
_ORDERS = {0: 0, 1: -1, 2: 1}
_libc = ctypes.CDLL(None, use_errno=True)


class Kind(IntEnum):
    """A part that clone(2) can share; the numbers are linux/kcmp.h's."""

    MEMORY = 1
    DIRECTORY = 3


def sharing(pids: Sequence[int], kind: Kind) -> tuple[tuple[int, ...], ...]:
    """Return the groups of two processes or more that share something, each in the order of `pids`.

    What has gone shares nothing; nor does anything on a kernel without kcmp.
    """
    if _SYS_KCMP is None or len(pids) < 2:
        return ()
    compare = partial(_compare, kind=kind)
    groups: list[list[int]] = []
    for pid in sorted(pids, key=cmp_to_key(compare)):
        if groups and compare(groups[-1][0], pid) == 0:
            groups[-1].append(pid)
        else:
            groups.append([pid])
    return tuple(tuple(sorted(group, key=pids.index)) for group in groups if len(group) > 1)


def _compare(one: int, other: int, kind: Kind) -> int:
    """Order two processes by what they have of a kind."""
    found: int = _libc.syscall(_SYS_KCMP, one, other, int(kind), 0, 0)
    return _ORDERS.get(found, -1 if one < other else 1)


def is_target(pid: int, fd: int, epoll: int, number: int, which: int) -> bool:
    """Return whether a descriptor of a process is what its epoll descriptor watches; True where that is unknown.

    Args:
        pid: of the process.
        fd: the descriptor.
        epoll: the descriptor of the epoll instance.
        number: that the watched file had when it was added.
        which: of those with that number.
    """
    if _SYS_KCMP is None:
        return True
    slot = ctypes.create_string_buffer(_SLOT.pack(epoll, number, which))
    found: int = _libc.syscall(_SYS_KCMP, pid, pid, _EPOLL_TARGET, fd, slot)
    return found == 0 or (found < 0 and ctypes.get_errno() not in _NO_TARGET)
