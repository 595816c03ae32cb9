"""What every kind of remote does: hold packs, and checkpoints that exist only with all of their packs."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ocihook.packs.pack import PackInfo

MAX_CLAIM_BYTES = 16 << 10


class ClaimBlob(NamedTuple):
    """A claim of a checkpoint, or the announcement of a stop, as it was written."""

    token: str  # its name, which no other claim has ever
    data: bytes
    written_s: float  # since the epoch, by the storage's clock; in a registry by the clock of the node
    of: str = ""  # the id of the checkpoint, or the name of the stop


class Remote(Protocol):
    """One domain of a remote. Forked processes inherit what it has read; their connections are their own."""

    def checkpoint_ids(self) -> list[str]:
        """Return the ids of all complete checkpoints."""

    def manifest(self, checkpoint_id: str) -> bytes | None:
        """Return a checkpoint's manifest; None if there is none."""

    def layout(self, checkpoint_id: str, limit_bytes: int) -> bytes | None:
        """Return its layout; one that is larger is an error."""

    def pushing(self, checkpoint_id: str, packs: Collection[PackInfo]) -> contextlib.AbstractContextManager[set[str]]:
        """Protect packs from a prune while a checkpoint is pushed; yield the names of those that are there."""

    def send_pack(self, info: PackInfo, path: Path) -> Iterator[int]:
        """Store a pack; yield the bytes done, bit by bit. It is not visible before it is complete.

        Raises:
            RemoteError: if the remote cannot be reached, or has stored something else.
        """

    def fetch_pack(self, checkpoint_id: str, info: PackInfo, path: Path) -> Iterator[int]:
        """Append to `path` what it lacks of a checkpoint's pack; yield the bytes done, bit by bit. Nothing is verified.

        Raises:
            RemoteError: if the remote cannot be reached, or has no such pack.
        """

    def commit(self, checkpoint_id: str, manifest: bytes, layout: bytes, packs: Mapping[PackInfo, Path]) -> None:
        """Complete a checkpoint whose packs have been sent from these files, within its `pushing`."""

    def settle(self) -> None:
        """Return when no power loss can undo that checkpoints were completed or removed, by any process."""

    def pruning(self, every_s: float) -> contextlib.AbstractContextManager[bool]:
        """Yield whether this node is to prune: none has begun to for so long. A block that raises does not count."""

    def remove(self, checkpoint_ids: Collection[str]) -> None:
        """Remove checkpoints; packs that only they needed stay until `remove_rubbish`."""

    def remove_rubbish(self, needed: Callable[[], Collection[str]]) -> int:
        """Remove packs that are not among those needed, and that no running push needs; return the bytes.

        Args:
            needed: returns the packs of all checkpoints that are complete when it is called.
        """

    def claims(self, of: str) -> list[ClaimBlob]:
        """Return the claims of a checkpoint: all whose `write_claim` had returned when this was called.

        Args:
            of: the id of the checkpoint, or the name of a stop; `*` in it stands for any text.
        """

    def write_claim(self, of: str, token: str, data: bytes) -> None:
        """Write a claim, or write it again. All see it once this has returned.

        Args:
            of: the id of a checkpoint, or the name of a stop: letters, digits and `-`.
            token: tells it from others of the same.
            data: its content.
        """

    def remove_claim(self, of: str, token: str) -> None:
        """Remove a claim, if it is there."""
