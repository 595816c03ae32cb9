"""Keeps CRIU from its end, when it has detached from a container that runs on and its runtime does not know it yet.

The last thing of all that `criu dump` does is to write its statistics into its work directory (cr-dump.c,
cr_dump_finish(): after pstree_switch_state(); stats.c, write_stats(): an open(2) without O_EXCL in the current
directory). Where a FIFO has their name CRIU waits in that call until somebody reads. No action script is called there.
CRIU takes no notice if its statistics cannot be written; so whoever wants its dump to fail kills it there.
"""

import contextlib
import os
import stat

from ocihook.errors import GivenUp
from ocihook.linux.patience import Patience
from ocihook.linux.workers import run_ahead_of_others

NAME = "stats-dump"
_MAX_BYTES = 1 << 16  # they are some dozens; a pipe has room for so many


def keep(work_directory: int) -> None:
    """Have a `criu dump` wait at its end. May run again, as long as CRIU has not come there.

    Raises:
        OSError: from the file system.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME, dir_fd=work_directory)  # of an earlier dump
    os.mkfifo(NAME, 0o600, dir_fd=work_directory)


def is_kept(work_directory: int) -> bool:
    """Tell whether CRIU waits at its end, or will."""
    try:
        return stat.S_ISFIFO(os.stat(NAME, dir_fd=work_directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


def forget(work_directory: int) -> None:
    """Let nobody wait who comes there from now on. May run any time."""
    if is_kept(work_directory):
        os.unlink(NAME, dir_fd=work_directory)


def release(work_directory: int, patience: Patience) -> None:
    """Let CRIU end. Its statistics are written while it does; whoever reads them waits for its runtime, which is later.

    Args:
        work_directory: CRIU's.
        patience: with CRIU.

    Raises:
        OSError: from the file system; CRIU waits on.
    """
    if not is_kept(work_directory):
        return
    fifo = os.open(NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=work_directory)
    written = os.open(
        f"{NAME}.partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
        dir_fd=work_directory,
    )  # fmt: skip
    reader = -1
    try:
        os.rename(f"{NAME}.partial", NAME, src_dir_fd=work_directory, dst_dir_fd=work_directory)
        with run_ahead_of_others():
            # Whoever is in its open(2) by now has the FIFO, whatever the name leads to; who comes later, the file.
            reader = os.open(f"/proc/self/fd/{fifo}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            _copy(reader, written, patience)
    finally:
        for fd in (fifo, written, reader):
            if fd >= 0:
                os.close(fd)


def _copy(reader: int, written: int, patience: Patience) -> None:
    """Copy what a writer writes until it has no more to write, or ends."""
    has_ended = False
    while not has_ended:
        try:
            patience.ready(reader)
        except GivenUp:  # which is what it was to do; what it wrote may still be there
            has_ended = True
        data = os.read(reader, _MAX_BYTES)  # waits: no, it is ready
        os.write(written, data)
        if not data:
            break
