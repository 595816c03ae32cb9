"""Named bytes, written and read as a whole: what a directory and an object store have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

PIECE_BYTES = 4 << 20  # read, sent and reported at a time


class Blob(NamedTuple):
    """Bytes with a name, which is a path without `.` and `..`."""

    name: str
    size_bytes: int
    modified_s: float  # since the epoch, by the clock of the storage


class Blobs(Protocol):
    """Stores blobs. What is written exists completely or not at all, and is visible to all once a call returns.

    Until `settle`, what was removed may reappear after a power loss.

    Every call raises a RemoteError if it cannot be done.
    """

    def below(self, prefix: str) -> Iterator[Blob]:
        """Yield what begins with `prefix`, which ends in a slash."""

    def folders(self, prefix: str) -> list[str]:
        """Return the parts between `prefix` and the next slash in the names of blobs."""

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small blob; None if there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Store a small blob; it replaces one with this name."""

    def send(self, name: str, path: Path) -> Iterator[int]:
        """Store a file; yield the bytes done, bit by bit."""

    def fetch(self, name: str, path: Path) -> Iterator[int]:
        """Append to a file what it lacks of a blob; yield the bytes done, bit by bit."""

    def remove(self, name: str) -> None:
        """Remove a blob, if it is there."""

    def settle(self, prefix: str) -> None:
        """Return when a power loss can no longer undo what was written or removed below `prefix`, by any process."""

    def sweep(self, prefix: str, before_s: float) -> int:
        """Remove what writes have left below `prefix` that were interrupted before a time; return the bytes."""
