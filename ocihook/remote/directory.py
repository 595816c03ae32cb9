"""A remote in a directory that nodes share, such as an NFS mount."""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ocihook.errors import RemoteError, plain
from ocihook.linux.files import make_directory, open_regular, sync_directory
from ocihook.remote.blobs import PIECE_BYTES, Blob

_PARTIAL = ".partial"


class DirectoryBlobs:
    """Blobs as files. What is being written has a temporary name; `below` does not show what a crash leaves of it."""

    def __init__(self, directory: Path) -> None:
        """Use a directory, which must exist: with a missing mount, the node's own disk would be filled."""
        self._directory = directory

    def below(self, prefix: str) -> Iterator[Blob]:
        """Yield what begins with `prefix`, which ends in a slash."""
        with self._telling():
            self._check()
            try:
                entries = list(os.scandir(self._directory / prefix))
            except FileNotFoundError:
                return
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and not entry.name.endswith(_PARTIAL):
                        yield Blob(prefix + entry.name, status.st_size, status.st_mtime)

    def folders(self, prefix: str) -> list[str]:
        """Return the parts between `prefix` and the next slash in the names of blobs."""
        with self._telling():
            self._check()
            with contextlib.suppress(FileNotFoundError):
                return sorted(entry.name for entry in os.scandir(self._directory / prefix) if entry.is_dir())
            return []

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small blob; None if there is none."""
        with self._telling():
            self._check()
            try:
                fd = open_regular(self._directory / name)
            except FileNotFoundError:
                return None
            with open(fd, "rb") as file:
                data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise RemoteError(f"{self._directory / name} is larger than {limit_bytes} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store a small blob; it replaces one with this name."""
        with self._telling(), self._new(name) as partial, partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def send(self, name: str, path: Path) -> Iterator[int]:
        """Store a file; yield the bytes done, bit by bit. It is read again from where it was put."""
        with self._telling(), self._new(name) as partial:
            sent, stored = hashlib.blake2b(), hashlib.blake2b()
            with path.open("rb") as source, partial.open("xb") as target:
                while data := source.read(PIECE_BYTES):
                    target.write(data)
                    sent.update(data)
                    yield len(data)
                target.flush()
                os.fsync(target.fileno())
                os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from there
            with partial.open("rb") as file:
                while data := file.read(PIECE_BYTES):
                    stored.update(data)
            if sent.digest() != stored.digest():
                raise RemoteError(f"{self._directory} has not stored what was written to {name}")

    def fetch(self, name: str, path: Path) -> Iterator[int]:
        """Append to a file what it lacks of a blob; yield the bytes done, bit by bit."""
        with self._telling():
            self._check()
            with open(open_regular(self._directory / name), "rb") as source, path.open("ab") as target:
                source.seek(target.tell())
                while data := source.read(PIECE_BYTES):
                    target.write(data)
                    yield len(data)

    def remove(self, name: str) -> None:
        """Remove a blob, if it is there."""
        with self._telling():
            (self._directory / name).unlink(missing_ok=True)

    def settle(self, prefix: str) -> None:
        """Return when a power loss can no longer undo what was written or removed below `prefix`, by any process."""
        with self._telling():
            self._check()
            with contextlib.suppress(FileNotFoundError):
                sync_directory(self._directory / prefix)

    def sweep(self, prefix: str, before_s: float) -> int:
        """Remove what writes have left below `prefix` that were interrupted before a time; return the bytes."""
        freed = 0
        with self._telling():
            for path in (self._directory / prefix).glob(f"*{_PARTIAL}"):
                status = path.stat()
                if status.st_mtime < before_s:
                    path.unlink(missing_ok=True)
                    freed += status.st_size
        return freed

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[Path]:
        """Yield the path for a new file, which is renamed to its name when it is complete."""
        path = self._directory / name
        self._check()
        make_directory(path.parent, within=self._directory)
        partial = path.with_name(f"{secrets.token_hex(8)}{_PARTIAL}")
        try:
            yield partial
            partial.replace(path)
            sync_directory(path.parent)
        finally:
            partial.unlink(missing_ok=True)

    def _check(self) -> None:
        if not self._directory.is_dir():
            raise RemoteError(f"the remote {self._directory} is no directory", hint="is it mounted?")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "make room there, or `ocihook store prune --remote`" if error.errno == errno.ENOSPC else ""
            raise RemoteError(f"the remote {self._directory}: {plain(error)}", hint=hint) from error
