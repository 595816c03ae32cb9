"""Named bytes, put and got whole: what a directory and an object store have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

PIECE_BYTES = 4 << 20  # read, sent and reported at a time


class Blob(NamedTuple):
    """Bytes with a name, which is a path without `.` and `..`."""

    name: str
    size_bytes: int
    modified_s: float  # since the epoch, by the clock of whoever keeps it


class Blobs(Protocol):
    """Keeps blobs. What is written is there whole or not at all, and seen by everybody once a call returns.

    What is removed may be there again after a power loss, until `settle`.

    Every call raises a RemoteError if it cannot be done.
    """

    def below(self, prefix: str) -> Iterator[Blob]:
        """Yield what begins with `prefix`, which ends in a slash."""

    def folders(self, prefix: str) -> list[str]:
        """Return what stands between `prefix` and the next slash in the names of blobs."""

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small blob; None if there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Store a small blob, in place of another one."""

    def send(self, name: str, path: Path) -> Iterator[int]:
        """Store a file; yield the bytes done, bit by bit."""

    def fetch(self, name: str, path: Path) -> Iterator[int]:
        """Append to a file what it lacks of a blob; yield the bytes done, bit by bit."""

    def remove(self, name: str) -> None:
        """Remove a blob, if it is there."""

    def settle(self, prefix: str) -> None:
        """Return when a power loss cannot undo any more what was written or removed below `prefix`, by whomever."""

    def sweep(self, prefix: str, before_s: float) -> int:
        """Remove what writes have left below `prefix` that were interrupted before a time; return the bytes."""
