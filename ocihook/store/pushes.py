"""What is to be pushed from a domain, and how the attempts ended: `pushes/<id>`, one record a checkpoint.

An empty record is that of a push that was never tried.
"""

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.packs.frame import as_number, as_text, decode_frame, encode_frame, load_json

FIRST_WAIT_S, LONGEST_WAIT_S = 30.0, 3600.0  # after the first attempt that failed; twice as long after each more
_MAX_ERROR = 500  # characters
_RATE_NAME = "push-rate"  # in the store's directory: bytes per second, for all domains
_MEASURED_BYTES = 1 << 20


class Push(NamedTuple):
    """A push that is due. Times since the epoch."""

    checkpoint_id: str
    since_s: float
    attempts: int = 0  # that failed
    error: str = ""  # of the last one
    next_s: float = 0.0  # no attempt before

    def is_due(self, now_s: float) -> bool:
        """Return whether it is to be tried now; also if the clock was put back."""
        return not now_s < self.next_s <= now_s + LONGEST_WAIT_S


class Pushes:
    """The records in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def note(self, checkpoint_id: str) -> None:
        """Remember that a checkpoint is to be pushed."""
        replace_file(self._directory / checkpoint_id, b"", mode=0o600)

    def all(self) -> list[Push]:
        """Return what is to be pushed, whether it is complete or not, the oldest first."""
        names = {path.name.removesuffix(".partial") for path in self._directory.iterdir()}
        return [push for push in map(self.read, sorted(names)) if push]

    def read(self, checkpoint_id: str) -> Push | None:
        """Return the push of a checkpoint; None if it is not to be pushed. A damaged record is one never tried."""
        path = self._directory / checkpoint_id
        try:
            since_s, data = path.stat().st_mtime, path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            value = load_json(decode_frame("push", (1,), data)[1])
            attempts, since_s, next_s = (as_number(value[key]) for key in ("attempts", "since", "next"))
            return Push(checkpoint_id, since_s, attempts, as_text(value["error"]), next_s)
        except (IntegrityError, ValueError, TypeError, KeyError):
            return Push(checkpoint_id, since_s)

    def failed(
        self, push: Push, error: str, now_s: float, jitter: Callable[[float, float], float] = random.uniform
    ) -> Push:
        """Record that an attempt has failed; return when it is tried again."""
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(push.attempts, 20))
        later = push._replace(
            attempts=push.attempts + 1, error=error[:_MAX_ERROR], next_s=now_s + wait_s * jitter(0.5, 1.0)
        )
        body = {
            "attempts": later.attempts,
            "since": int(later.since_s),
            "next": int(later.next_s),
            "error": later.error,
        }
        data = encode_frame("push", 1, json.dumps(body).encode())
        replace_file(self._directory / push.checkpoint_id, data, mode=0o600, durable=False)  # lost: tried sooner
        return later

    def end(self, checkpoint_id: str) -> None:
        """Forget that a checkpoint is to be pushed."""
        (self._directory / checkpoint_id).unlink(missing_ok=True)


def note_rate(root: Path, moved_bytes: int, seconds: float) -> None:
    """Record how fast a push was, if it was long enough to tell."""
    if moved_bytes >= _MEASURED_BYTES and seconds > 0:
        with contextlib.suppress(OSError):  # a full disk: the rate of an earlier push counts
            replace_file(root / _RATE_NAME, f"{moved_bytes / seconds:.0f}".encode(), mode=0o600, durable=False)


def read_rate(root: Path) -> float:
    """Return the bytes per second of the last push of a store; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError):
        return float(int((root / _RATE_NAME).read_text()))
    return 0.0
