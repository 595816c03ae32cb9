"""Marks on checkpoints of a domain that keep a prune from them: a pin, until it is taken off, and use, while it lasts.

    checkpoints/<id>.pin    empty: pinned
    checkpoints/<id>.use    empty: whoever reads the checkpoint holds flock shared, whoever removes it or moves its
                            pages alone, and only for that moment

What is in use keeps its manifest, its layout and so its packs. A process that dies uses nothing any more.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ocihook.linux.files import replace_file, sync_directory


class Marks:
    """The marks in a directory of checkpoints. Whether there is such a checkpoint, they do not know."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def is_pinned(self, checkpoint_id: str) -> bool:
        """Tell whether a checkpoint is pinned."""
        return self._pin(checkpoint_id).exists()

    def pin(self, checkpoint_id: str) -> None:
        """Pin a checkpoint, durably."""
        replace_file(self._pin(checkpoint_id), b"", mode=0o600)

    def unpin(self, checkpoint_id: str) -> None:
        """Take a pin off, durably."""
        self._pin(checkpoint_id).unlink(missing_ok=True)
        sync_directory(self._directory)

    def begin_use(self, checkpoint_id: str) -> int:
        """Use a checkpoint until the descriptor that is returned is closed, here and in all processes forked since."""
        while True:
            fd = self._open(checkpoint_id, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._use(checkpoint_id))):
                    return fd
            os.close(fd)  # the mark was removed meanwhile, with the checkpoint

    @contextlib.contextmanager
    def unless_used(self, checkpoint_id: str) -> Iterator[bool]:
        """Tell whether nobody uses a checkpoint; whoever wants to waits until the context ends."""
        try:
            fd = self._open(checkpoint_id, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            os.close(fd)

    def is_used(self, checkpoint_id: str) -> bool:
        """Tell whether somebody uses a checkpoint."""
        if not self._use(checkpoint_id).exists():
            return False
        with self.unless_used(checkpoint_id) as is_free:
            return not is_free

    def forget(self, checkpoint_id: str) -> None:
        """Remove all marks of a checkpoint that is gone; call it in `unless_used`."""
        self._pin(checkpoint_id).unlink(missing_ok=True)
        self._use(checkpoint_id).unlink(missing_ok=True)

    def _open(self, checkpoint_id: str, how: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._use(checkpoint_id), flags, 0o600)
        try:
            fcntl.flock(fd, how)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _pin(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.pin"

    def _use(self, checkpoint_id: str) -> Path:
        return self._directory / f"{checkpoint_id}.use"
