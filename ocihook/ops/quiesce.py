"""Asks an application to come to rest before its dump, and tells it when it may go on.

The application's init gets a signal while it runs and creates (or touches) a file to say that it is ready.
"""

import os
import signal
import time

from ocihook.errors import QuiesceError
from ocihook.linux.procfs import Process

POLL_S = 0.002


def signal_number(name: str) -> signal.Signals:
    """Return the signal of this name, given without SIG."""
    return signal.Signals[f"SIG{name}"]


def ask_to_quiesce(init: Process, *, signal_name: str, ack: str, timeout_s: float) -> float:
    """Signal `init`, which must be able to run, and wait for its acknowledgement; return the seconds it took.

    Raises:
        QuiesceError: if the process is gone, or does not answer in time.
    """
    before = _identity(init.pid, ack)
    start = time.monotonic()
    if not init.send(signal_number(signal_name)):
        raise QuiesceError(f"process {init.pid} ended before it could be quiesced")
    while _identity(init.pid, ack) in (None, before):
        if not init.is_alive():
            raise QuiesceError(f"process {init.pid} ended on SIG{signal_name}")
        if time.monotonic() - start > timeout_s:
            raise QuiesceError(
                f"the application did not create or touch {ack} within {timeout_s:g} s of SIG{signal_name}",
                hint="raise ocihook.io/quiesce-timeout-s, or remove ocihook.io/quiesce-signal",
            )
        time.sleep(POLL_S)
    return time.monotonic() - start


def _identity(pid: int, path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file of the container is made or touched; None if it is not there.

    Every component is opened without following links: a container's link must not lead to the node's files.
    """
    try:
        fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        *parents, name = path.strip("/").split("/")
        for parent in parents:
            inner = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    finally:
        os.close(fd)
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
