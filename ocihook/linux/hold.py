"""Threads that are held one by one, where a freezer would hold too many."""

import contextlib
from collections.abc import Mapping

from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import held


class Hold:
    """Threads that are stopped until they are released, or this process ends."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.is_empty = True

    def add(self, threads: Mapping[Process, int], patience: Patience | None) -> None:
        """Hold all threads of processes but one each; without patience, frozen ones need not have stopped yet.

        Those that this process holds already stay held.

        Raises:
            TraceError: if one cannot be held.
            GivenUp: if nobody waits for it any more.
        """
        for process, able in threads.items():
            self._stack.enter_context(held(process.pid, patience, without=able))
            self.is_empty = False

    def release(self) -> None:
        """Resume all."""
        self._stack.close()
        self.is_empty = True
