"""How long a caller waits for work: every wait of a session checks this, and ends when the caller does.

The callers of a dump or restore are CRIU and the runtime that called it. An engine that loses patience kills the
runtime, and no signal or message says so: so every wait checks whether they are still alive.
"""

import copy
import math
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping

from ocihook.errors import GivenUp
from ocihook.linux.procfs import Process

_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
_NOBODY: Mapping[str, Process] = {}


class Patience:
    """Waits while certain processes live, up to a deadline. Forked processes may share it."""

    def __init__(self, waiting: Mapping[str, Process] = _NOBODY, *, timeout_s: float | None = None) -> None:
        """Begin to wait.

        Args:
            waiting: the processes that wait, by their names; none: the work must be done anyway, as an undo.
            timeout_s: how long; None: as long as they wait.
        """
        self._waiting = {name: (process, process.open()) for name, process in waiting.items()}
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

    @property
    def _pidfds(self) -> list[int]:
        return [pidfd for _, pidfd in self._waiting.values() if pidfd is not None]

    def within(self, timeout_s: float) -> "Patience":
        """Return the same patience with a deadline at most so many seconds from now."""
        shorter = copy.copy(self)
        shorter._deadline = min(self._deadline, time.monotonic() + timeout_s)  # noqa: SLF001 - our own
        return shorter

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, inf if there is none, 0 when it is over."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left_s == 0

    def check(self) -> None:
        """Check that everybody still waits; the deadline does not matter here.

        Raises:
            GivenUp: naming who no longer does.
        """
        for name, (process, pidfd) in self._waiting.items():
            if pidfd is None or _poll([pidfd]).poll(0):
                raise GivenUp(f"{name} (pid {process.pid}) was killed meanwhile")

    def sleep(self, seconds: float) -> None:
        """Wait for this long, or until the deadline.

        Raises:
            GivenUp: as soon as somebody has given up.
        """
        _poll(self._pidfds).poll(max(0.0, min(seconds, self.left_s)) * 1000)
        self.check()

    def until(
        self, is_so: Callable[[], bool], *, poll_s: float = _POLL_S, longest_poll_s: float = _LONGEST_POLL_S
    ) -> bool:
        """Wait until a condition holds, polling less often with time; False if it does not by the deadline.

        Raises:
            GivenUp: as soon as somebody has given up.
        """
        self.check()
        while not is_so():
            if self.is_over:
                return False
            self.sleep(poll_s)
            poll_s = min(poll_s * 1.1, longest_poll_s)
        return True

    def ready(self, *fds: int) -> bool:
        """Wait until one of these descriptors can be read, or is at its end; False if none is by the deadline.

        Raises:
            GivenUp: as soon as somebody has given up.
        """
        poll = _poll([*fds, *self._pidfds])
        self.check()
        found = {fd for fd, _ in poll.poll(None if self._deadline == math.inf else self.left_s * 1000)}
        if found.isdisjoint(fds):
            self.check()
            return False
        return True

    def close(self) -> None:
        """Stop waiting."""
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._waiting = {}


ENDLESS = Patience()  # of work that nobody waits for, or that must be done


def _poll(fds: Iterable[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll
