"""Delays CRIU's exit: it has detached from a container that continues to run, and its runtime does not know yet.

The last thing of all that `criu dump` does is to write its statistics into its work directory (cr-dump.c,
cr_dump_finish(): after pstree_switch_state(); stats.c, write_stats(): an open(2) without O_EXCL in the current
directory). Where a FIFO has their name, CRIU waits in that call until somebody reads. No action script is called there.
CRIU ignores an error in writing its statistics; so to make its dump fail, it is killed there.

The FIFO has a second name, which is removed last. So if the process that releases CRIU is killed in between, another
one finds the FIFO that CRIU waits at, though the statistics have their name already.
"""

import contextlib
import logging
import os
import stat

from ocihook.errors import GivenUp
from ocihook.linux.patience import Patience
from ocihook.linux.workers import run_ahead_of_others
from ocihook.wire import KEPT_NAME

NAME = "stats-dump"
_PARTIAL = f"{NAME}.partial"
_MAX_BYTES = 1 << 16  # a few dozen in practice; a pipe holds this many
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


def keep(work_directory: int) -> None:
    """Have a `criu dump` wait at its end. May run again, as long as CRIU has not reached it.

    Raises:
        OSError: from the file system; CRIU does not wait then.
    """
    forget(work_directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME, dir_fd=work_directory)  # of an earlier dump
    os.mkfifo(KEPT_NAME, 0o600, dir_fd=work_directory)
    try:
        os.link(KEPT_NAME, NAME, src_dir_fd=work_directory, dst_dir_fd=work_directory)
    except OSError:
        forget(work_directory)
        raise


def is_kept(work_directory: int) -> bool:
    """Return whether CRIU waits at its end, or will."""
    return _is_fifo(work_directory, KEPT_NAME)


def forget(work_directory: int) -> None:
    """Let a CRIU that reaches its end from now on exit without waiting. May run any time.

    Raises:
        OSError: from the file system.
    """
    for name in (NAME, KEPT_NAME):
        if _is_fifo(work_directory, name):
            os.unlink(name, dir_fd=work_directory)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_PARTIAL, dir_fd=work_directory)


def release(work_directory: int, patience: Patience) -> bytes:
    """Let CRIU end; return the statistics that it writes as it does, nothing if it had written them before.

    They are then in their file, too, for the engine, which waits for the runtime. May run again after any interruption.

    Args:
        work_directory: CRIU's.
        patience: limits the wait for CRIU.

    Raises:
        OSError: from the file system; CRIU continues to wait.
    """
    if not is_kept(work_directory):
        return b""
    statistics = _make_room(work_directory)
    reader = -1
    try:
        with run_ahead_of_others():
            # A CRIU already in open(2) has the FIFO, whatever the name refers to now; a later one opens the file.
            reader = os.open(KEPT_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=work_directory)
            written = _copy(reader, statistics, patience)
        os.unlink(KEPT_NAME, dir_fd=work_directory)
    finally:
        for fd in (statistics, reader):
            if fd >= 0:
                os.close(fd)
    return written


def _make_room(work_directory: int) -> int:
    """Put an empty file in place of the FIFO and return it, -1 where there is no room for one: CRIU ignores that."""
    try:
        file = os.open(_PARTIAL, _NEW, 0o600, dir_fd=work_directory)
    except OSError as error:
        log.warning("CRIU's statistics cannot be kept: %s", error)
        if _is_fifo(work_directory, NAME):
            os.unlink(NAME, dir_fd=work_directory)
        return -1
    os.rename(_PARTIAL, NAME, src_dir_fd=work_directory, dst_dir_fd=work_directory)
    return file


def _copy(reader: int, statistics: int, patience: Patience) -> bytes:
    """Copy what a writer writes until it closes the FIFO or ends; return it."""
    has_ended, written = False, b""
    while not has_ended:
        try:
            patience.ready(reader)
        except GivenUp:  # it ended, as it was to; what it wrote may still be there
            has_ended = True
        data = os.read(reader, _MAX_BYTES)  # waits: no, it is ready
        if not data:
            break
        written += data
        with contextlib.suppress(OSError):  # no room: CRIU itself would have had none either
            os.write(statistics, data)
    return written


def _is_fifo(work_directory: int, name: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(name, dir_fd=work_directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
