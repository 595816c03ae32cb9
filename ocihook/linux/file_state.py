"""State of an open file that fcntl(2) reads and sets, on a copy of its descriptor: it is the same open file.

Numbers: asm-generic/fcntl.h, linux/fcntl.h.
"""

import ctypes
import fcntl
import os
import re
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_SETFL_BITS = os.O_APPEND | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK
_SHOWN = _SETFL_BITS | os.O_ACCMODE | os.O_CLOEXEC | os.O_SYNC | os.O_DSYNC | os.O_PATH  # others are of the call alone
_GETOWN_EX, _SETSIG, _GETSIG = 16, 10, 11
_GETPIPE_SZ, _SETPIPE_SZ = 1032, 1031
_ADD_SEALS, _GET_SEALS = 1033, 1034
_OWNER = struct.Struct("=ii")  # struct f_owner_ex: type, pid
_LOCK = struct.Struct("=hh4xqqi4x")  # struct flock of 64 bits: type, whence, start, length, pid
_OFD_SETLK = 37
_HELD = re.compile(r"^lock:\s+\d+:\s+(\w+)\s+(\w+)\s+(\w+)\s+-?\d+\s+\S+\s+(\d+)\s+(\w+)$", re.MULTILINE)
_FLAGS = re.compile(r"^flags:\s+([0-7]+)$", re.MULTILINE)
_OF_LOCK = {"READ": fcntl.F_RDLCK, "WRITE": fcntl.F_WRLCK}
_OF_FLOCK = {"READ": fcntl.LOCK_SH, "WRITE": fcntl.LOCK_EX}


def read_info(info: str, *, is_terminal: bool = False) -> dict[str, str]:
    """Return what proc_pid_fdinfo(5) says of any file: its flags, and the locks that are held through it.

    Args:
        info: the text.
        is_terminal: it is a program's end of a terminal. Runtimes open it by TIOCGPTPEER with O_CLOEXEC, and the kernel
            shows that flag of all copies.
    """
    found = {}
    if match := _FLAGS.search(info):
        shown = _SHOWN & ~os.O_CLOEXEC if is_terminal else _SHOWN
        found["flags"] = f"{int(match[1], 8) & shown:o}"
    found["locks"] = ", ".join(sorted(" ".join(match) for match in _HELD.findall(info)))
    return found


def read_copy(fd: int, kind: str) -> dict[str, str]:
    """Return what fcntl(2) shows of a copy.

    Args:
        fd: the copy.
        kind: of the file: pipe, memfd or another.
    """
    found = {"signal": str(fcntl.fcntl(fd, _GETSIG)), "owner": _owner(fd)}
    if kind == "pipe":
        found["pipe size"] = str(fcntl.fcntl(fd, _GETPIPE_SZ))
    elif kind == "memfd":
        found["seals"] = str(fcntl.fcntl(fd, _GET_SEALS))
    return found


def _owner(fd: int) -> str:
    """Return to which kind of task signals of the file go, without its number; "" if to none."""
    kind, pid = _OWNER.unpack(fcntl.fcntl(fd, _GETOWN_EX, bytes(_OWNER.size)))
    return ("thread", "process", "group")[kind] if pid and 0 <= kind < 3 else ""


def set_flags(fd: int, value: str) -> None:
    """Set those flags that can be set of an open file; as all below an OSError or a ValueError if that fails."""
    now = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, now & ~_SETFL_BITS | int(value, 8) & _SETFL_BITS)


def set_signal(fd: int, value: str) -> None:
    """Set the signal that tells of input or output (F_SETSIG)."""
    fcntl.fcntl(fd, _SETSIG, int(value))


def set_pipe_size(fd: int, value: str) -> None:
    """Set how much a pipe holds."""
    fcntl.fcntl(fd, _SETPIPE_SZ, int(value))


def add_seals(fd: int, value: str) -> None:
    """Seal a memfd."""
    fcntl.fcntl(fd, _ADD_SEALS, int(value))


def lock(fd: int, value: str) -> None:
    """Lock a file again, with those of its locks that belong to the open file and not to a process."""
    for kind, _, mode, start, end in (one.split() for one in value.split(", ") if one):
        if kind == "FLOCK":
            fcntl.flock(fd, _OF_FLOCK[mode] | fcntl.LOCK_NB)
        elif kind == "OFDLCK":
            length = 0 if end == "EOF" else int(end) - int(start) + 1
            fcntl.fcntl(fd, _OFD_SETLK, _LOCK.pack(_OF_LOCK[mode], os.SEEK_SET, int(start), length, 0))


def add_count(fd: int, count: int) -> None:
    """Add to the counter of an eventfd, which has room for that; less than 0 cannot be."""
    if count < 0:
        raise ValueError("a counter cannot be made smaller without its readers")
    os.eventfd_write(fd, count)  # it has room for what was in it


def disarm(fd: int) -> None:
    """Turn a timerfd off: it forgets that it has expired."""
    if _libc.timerfd_settime(fd, 0, bytes(32), None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime")
