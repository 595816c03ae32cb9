"""Logging of agent and command line: the journal with fields of its own, stderr, or a file for a detached agent."""

import contextlib
import fcntl
import logging
import os
from _socket import AF_UNIX, SOCK_DGRAM, socket  # the module `socket` loads a dozen more
from collections.abc import Callable, Mapping
from pathlib import Path

from ocihook.errors import plain

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
FILE_BYTES = 1 << 20  # of a file, which is in memory (/run); as much again is kept of what was before
_PRIORITIES = {10: 7, 20: 6, 30: 4, 40: 3, 50: 2}  # syslog(3), by level

Fields = Callable[[], Mapping[str, str]]
_sources: list[Fields] = []


def add_fields(source: Fields) -> None:
    """Have `source` asked for fields of the journal at every record of this process, as OCIHOOK_CONTAINER is one."""
    _sources.append(source)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{self.formatTime(record)} {record.levelname.lower()} [{record.process}] {text}"


class _JournalHandler(logging.Handler):
    """Speaks the journal's own protocol: fields as lines, or with a length where a value has line breaks.

    https://systemd.io/JOURNAL_NATIVE_PROTOCOL
    """

    def __init__(self) -> None:
        super().__init__()
        self._otherwise = logging.StreamHandler()

    def emit(self, record: logging.LogRecord) -> None:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(_PRIORITIES.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": "ocihook",
            "LOGGER": record.name,
        }
        for source in _sources:
            fields |= source()
        try:
            with contextlib.closing(socket(AF_UNIX, SOCK_DGRAM)) as sender:  # whatever a child has closed
                sender.sendto(b"".join(_encode(name, value) for name, value in fields.items()), str(JOURNAL_SOCKET))
        except OSError:  # the journal restarts, or the record is too long for a packet
            self._otherwise.emit(record)


class _FileHandler(logging.Handler):
    """Appends to a file that many processes write, and that any of them may put aside: it is opened for each record."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as handlers do
            self.handleError(record)
        with contextlib.suppress(OSError):  # as no record is a reason not to go on
            self._put_aside()

    def _put_aside(self) -> None:
        if self._path.stat().st_size < FILE_BYTES:
            return
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)  # whose lock is not our parent's, too
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or another process is at it
            now = self._path.stat()
            if os.path.samestat(now, os.fstat(fd)) and now.st_size >= FILE_BYTES:
                self._path.replace(f"{self._path}.1")
        finally:
            os.close(fd)


def _put_in_words(record: logging.LogRecord) -> bool:
    """Have an error of the system say which file and why, without its number."""
    if isinstance(record.args, tuple):
        record.args = tuple(plain(value) if isinstance(value, OSError) else value for value in record.args)
    return True


def _encode(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


def set_up_logging(level: int, file: Path | None = None) -> None:
    """Send all records to `file`, else to the journal where stderr is connected to it, else to stderr.

    Of a file the last `FILE_BYTES` and a little more are kept at least, twice that at most; the older in FILE.1.
    """
    handler: logging.Handler
    if file is not None:
        handler = _FileHandler(file)
    elif "JOURNAL_STREAM" in os.environ and JOURNAL_SOCKET.exists():
        handler = _JournalHandler()
    else:
        handler = logging.StreamHandler()
    handler.addFilter(_put_in_words)
    is_journal = isinstance(handler, _JournalHandler)
    handler.setFormatter(logging.Formatter("%(message)s") if is_journal else _Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
