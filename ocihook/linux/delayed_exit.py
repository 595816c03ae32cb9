"""Delays the failing exit of another process until this one has reported why it fails.

A child of this process traces the other's first thread, which the kernel stops when it begins to exit; its parent
learns of the exit only afterwards. The kernel detaches when the tracer exits for whatever reason: no agent that is
killed leaves a process stopped.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from ocihook.linux.ptrace import await_exit
from ocihook.linux.workers import die_with_parent

_MOST_S = 2.0  # that an exit is awaited, and then delayed
_SIGNAL = 3  # the tracer's only descriptor: an engine may wait for the end of all copies of the others


class DelayedExit:
    """A process whose failing exit waits for `close`, or two seconds."""

    def __init__(self, pid: int, is_wanted: Callable[[], bool]) -> None:
        """Trace it.

        Args:
            pid: of the process.
            is_wanted: called in the tracer when the process exits with an error; False lets it exit at once.

        Raises:
            OSError: if no process can be forked.
        """
        parent = os.getpid()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        self._tracer = os.fork()
        if self._tracer == 0:
            with contextlib.suppress(BaseException):  # the other process then runs as if untraced
                die_with_parent(parent)
                os.dup2(writer, _SIGNAL)
                os.closerange(_SIGNAL + 1, os.sysconf("SC_OPEN_MAX"))
                if await_exit(pid) and is_wanted():
                    os.write(_SIGNAL, b"x")
                    time.sleep(_MOST_S)  # waits: for our parent, which kills this process
            os._exit(0)
        os.close(writer)

    def wait(self) -> None:
        """Wait until the process exits, or two seconds: all that it writes is written then."""
        poll = select.poll()
        poll.register(self._reader)
        poll.poll(_MOST_S * 1000)  # waits: for a process whose child has exited

    def close(self) -> None:
        """Let the process exit."""
        os.close(self._reader)
        os.kill(self._tracer, signal.SIGKILL)
        os.waitpid(self._tracer, 0)  # waits: for a child that is killed
