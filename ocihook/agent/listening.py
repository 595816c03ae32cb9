"""Sockets by whose files others find the agent: a file may be removed, replaced or covered while the agent listens."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_FIRST_SYSTEMD_FD = 3  # sd_listen_fds(3)


class Listener:
    """A listening Unix socket, and the inode of the file that leads to it."""

    def __init__(
        self, path: Path, kind: socket.SocketKind, backlog: int, inherited: socket.socket | None = None
    ) -> None:
        self.path, self._kind, self._backlog = path, kind, backlog
        self._is_made_here = inherited is None  # the file, which is removed at the end
        self.socket = inherited or self._bind()
        self._file = _identity(path)  # that leads here

    @classmethod
    def of_systemd(cls, path: Path, kind: socket.SocketKind, backlog: int) -> "Listener":
        """Return systemd's socket; one of its own where no file leads to systemd's."""
        inherited = socket.socket(fileno=_FIRST_SYSTEMD_FD)
        if _is_answered(path, kind):
            return cls(path, kind, backlog, inherited)
        inherited.close()
        return cls(path, kind, backlog)

    @property
    def is_found(self) -> bool:
        """Return whether the path leads here."""
        return self._file is not None and _identity(self.path) == self._file

    @property
    def is_replaced(self) -> bool:
        """Return whether the path leads to another file."""
        return _identity(self.path) not in (None, self._file)

    def bind_again(self) -> socket.socket:
        """Make the path lead here again, by a new socket; return the former, whose clients still wait.

        Raises:
            OSError: if there can be no such file; the former socket stays.
        """
        former, self.socket = self.socket, self._bind()
        self._is_made_here, self._file = True, _identity(self.path)
        return former

    def close(self) -> None:
        """Stop listening; remove the file if this process made it, and never another one."""
        if self._is_made_here and self.is_found:
            self.path.unlink(missing_ok=True)
        self.socket.close()

    def _bind(self) -> socket.socket:
        self.path.unlink(missing_ok=True)  # stale: the agent's lock is held, so no other agent has it
        made = socket.socket(socket.AF_UNIX, self._kind)
        try:
            made.bind(str(self.path))
            made.listen(self._backlog)
        except OSError:
            made.close()
            raise
        return made


def is_passed_by_systemd() -> bool:
    """Return whether systemd has started this process for a socket."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def turn_away() -> None:
    """Close the connections that wait at systemd's socket: their clients try again, and find the agent that runs."""
    with socket.socket(fileno=_FIRST_SYSTEMD_FD) as inherited:
        for connection in waiting(inherited):
            connection.close()


def waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept the connections that wait already."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()  # waits: no, it does not block
            connection.setblocking(True)
            yield connection


def _is_answered(path: Path, kind: socket.SocketKind) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino
