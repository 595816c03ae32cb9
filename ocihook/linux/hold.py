"""Threads that are held one by one, where a freezer would hold too many."""

import contextlib
from collections.abc import Mapping

from ocihook.errors import TraceError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import HeldThread, held

_STOP_TIMEOUT_S = 20.0


class Hold:
    """Threads that are stopped until they are released, or this process ends."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.threads: dict[Process, list[HeldThread]] = {}  # those that are held, of each process

    @property
    def is_empty(self) -> bool:
        """Return whether no process was added since all were released."""
        return not self.threads

    def add(self, threads: Mapping[Process, int], patience: Patience | None) -> None:
        """Hold all threads of processes but one each; without patience, frozen ones need not have stopped yet.

        Those that this process holds already stay held.

        Raises:
            TraceError: if one cannot be held.
            GivenUp: if its caller has given up.
        """
        for process, able in threads.items():
            found = self._stack.enter_context(held(process.pid, patience, without=able))
            self.threads.setdefault(process, []).extend(found)

    def settle(self, patience: Patience) -> None:
        """Wait until all have stopped, those that were frozen when they were added, too.

        Raises:
            TraceError: if one has not in time.
            GivenUp: if its caller has given up.
        """
        threads = [thread for found in self.threads.values() for thread in found]
        if not patience.within(_STOP_TIMEOUT_S).until(lambda: all(thread.has_settled() for thread in threads)):
            raise TraceError("not all threads stop: is the container frozen?")

    def release(self) -> None:
        """Resume all."""
        self._stack.close()
        self.threads = {}
