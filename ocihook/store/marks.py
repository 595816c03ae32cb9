"""Marks on checkpoints of a domain: pinned or unreported, until that is taken off; in use, while it lasts; left behind.

    checkpoints/<id>.pin    pinned; empty, or why, if no user did it
    checkpoints/<id>.use    empty: a reader of the checkpoint holds flock shared; what removes it or moves its
                            pages holds it alone, and only for that moment
    checkpoints/<id>.left   empty: its container was created again in its own pod, and started from scratch; no new
                            pod resumes from it, and it is not pushed
    checkpoints/<id>.unreported  empty: the coordinator of its gang does not know yet that it is complete; made before
                            it is, by the process that stores it

What is in use keeps its manifest, its layout and so its packs. When a process dies, its use ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ocihook.errors import StoreError
from ocihook.linux.files import replace_file, sync_directory, try_lock
from ocihook.linux.patience import Patience


class Marks:
    """The marks in a directory of checkpoints. Does not check whether a checkpoint exists."""

    def __init__(self, directory: Path, patience: Patience) -> None:
        self._directory = directory
        self._patience = patience

    def is_pinned(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is pinned."""
        return self._pin(checkpoint_id).exists()

    def pin(self, checkpoint_id: str, why: bytes = b"") -> None:
        """Pin a checkpoint, durably."""
        replace_file(self._pin(checkpoint_id), why, mode=0o600)

    def unpin(self, checkpoint_id: str, *, only: bytes | None = None) -> None:
        """Take a pin off, durably; with `only`, no other than one that was set for this reason."""
        try:
            is_wanted = only is None or self._pin(checkpoint_id).read_bytes() == only
        except FileNotFoundError:
            return
        if is_wanted:
            self._pin(checkpoint_id).unlink(missing_ok=True)
            sync_directory(self._directory)

    def leave(self, checkpoint_id: str) -> None:
        """Leave a checkpoint behind, durably."""
        replace_file(self._left(checkpoint_id), b"", mode=0o600)

    def is_left(self, checkpoint_id: str) -> bool:
        """Return whether a checkpoint is left behind."""
        return self._left(checkpoint_id).exists()

    def left_since_s(self, checkpoint_id: str) -> float:
        """Return since when, in seconds since the epoch; 0 if it is not."""
        try:
            return self._left(checkpoint_id).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def left(self) -> set[str]:
        """Return all checkpoints that are left behind."""
        return {path.stem for path in self._directory.glob("*.left")}

    def note_unreported(self, checkpoint_id: str) -> None:
        """Remember that a gang's coordinator is to know of a checkpoint, durably."""
        replace_file(self._unreported(checkpoint_id), b"", mode=0o600)

    def unreported(self) -> set[str]:
        """Return all checkpoints that a gang's coordinator is to know of, complete or not."""
        return {path.stem for path in self._directory.glob("*.unreported")}

    def note_reported(self, checkpoint_id: str) -> None:
        """Forget that a gang's coordinator is to know of a checkpoint."""
        self._unreported(checkpoint_id).unlink(missing_ok=True)

    def begin_use(self, checkpoint_id: str) -> int:
        """Use a checkpoint until the descriptor that is returned is closed, here and in all processes forked since.

        Raises:
            StoreError: if it is being removed or moved for too long.
        """
        while True:
            fd = self._open(checkpoint_id)
            try:
                if not self._patience.until(partial(try_lock, fd, fcntl.LOCK_SH)):
                    raise StoreError(f"checkpoint {checkpoint_id} is in use by another process")
            except BaseException:
                os.close(fd)
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._use(checkpoint_id))):
                    return fd
            os.close(fd)  # the mark was removed meanwhile, with the checkpoint

    @contextlib.contextmanager
    def unless_used(self, checkpoint_id: str) -> Iterator[bool]:
        """Yield whether nobody uses a checkpoint; who wants to use it waits until the context ends."""
        fd = self._open(checkpoint_id)
        try:
            yield try_lock(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def is_used(self, checkpoint_id: str) -> bool:
        """Return whether somebody uses a checkpoint."""
        if not self._use(checkpoint_id).exists():
            return False
        with self.unless_used(checkpoint_id) as is_free:
            return not is_free

    def forget(self, checkpoint_id: str) -> None:
        """Remove all marks of a checkpoint that is gone; call it in `unless_used`."""
        self._pin(checkpoint_id).unlink(missing_ok=True)
        self._left(checkpoint_id).unlink(missing_ok=True)
        self.note_reported(checkpoint_id)
        self._use(checkpoint_id).unlink(missing_ok=True)

    def _open(self, checkpoint_id: str) -> int:
        return os.open(self._use(checkpoint_id), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _pin(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.pin"

    def _left(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.left"

    def _unreported(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.unreported"

    def _use(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.use"
