"""How long a new container waits for stops, or for a claim to end: by its own clock, over all calls of its engine.

An engine that loses patience kills `create`, and may call it again for the same pod: what was seen is on record below
/run, so that the wait goes on where it was. The record is removed when the wait is over.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ocihook import wire
from ocihook.linux.files import replace_file
from ocihook.packs.frame import load_json
from ocihook.runtime.announced import Announced, Found
from ocihook.runtime.containers import Kept
from ocihook.session.record import from_json, to_json
from ocihook.store.lineage import lineage

MISSED = 6  # renewals, after which a node is gone
UNSEEN_S = 20.0  # between two looks: what was not renewed meanwhile may have been
LONGEST_S = 3600.0  # whatever a push is expected to take
_SLOWER = 2.0  # that a push may take, against what is expected
_FORGOTTEN_S = 900.0  # after the last look, another wait begins
_DIRECTORY = "waits"
STOPS, CLAIM = "stops", "claim"  # that are waited for


@dataclass
class Watch:
    """Announced stops as one container has seen them, by the monotonic clock."""

    began_s: float
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)  # renewals, and since when: by token
    looked_s: float = 0.0

    def look(self, found: Iterable[Found], now_s: float) -> tuple[list[Found], list[Found]]:
        """Return which announcements are alive, and which have missed too many renewals while this one looked."""
        alive: list[Found] = []
        dead: list[Found] = []
        unseen_s = now_s - self.looked_s
        unseen_s = unseen_s if unseen_s > UNSEEN_S else 0.0  # the remote was away, maybe for the stopping node, too
        self.looked_s, before, self.seen = now_s, self.seen, {}
        for one in found:
            renewed, since_s = before.get(one.token, (-1, now_s))
            since_s = min(since_s + unseen_s, now_s) if renewed == one.announced.renewed else now_s
            self.seen[one.token] = one.announced.renewed, since_s
            (dead if now_s - since_s > MISSED * one.announced.every_s else alive).append(one)
        return alive, dead

    def left_s(self, limit_s: float, now_s: float) -> float:
        """Return for how long the container waits from now on."""
        return max(0.0, self.began_s + limit_s - now_s)


def limit_s(wait_s: float, announced: Iterable[Announced]) -> float:
    """Return how long a container waits in all: as configured, and longer than the pushes that are expected."""
    pushes = [_SLOWER * one.push_s for one in announced]
    return max(wait_s, min(LONGEST_S, max(pushes, default=0.0))) if wait_s else 0.0


def to_wait_for(found: Iterable[Found], own_node: str, complete: Collection[str]) -> list[Found]:
    """Return the stops that may still bring a checkpoint which is not here yet.

    Args:
        found: announced stops.
        own_node: what happens there is known without them.
        complete: ids of the checkpoints that are at the remote.
    """
    return [
        one
        for one in found
        if not one.announced.failed
        and one.announced.holder.node != own_node
        and one.announced.checkpoint not in complete
    ]


def _path(kept: Kept, what: str) -> Path:
    """Return where the wait of a container is on record: of its pod, in which an engine makes it again."""
    of = "\0".join((what, kept.domain, lineage(kept.container), kept.container.pod_uid or kept.container.id))
    name = hashlib.blake2b(of.encode(), digest_size=12).hexdigest()
    return Path(wire.RUNTIME_DIR) / _DIRECTORY / f"{name}.json"


def begin(kept: Kept, what: str) -> Watch:
    """Begin to wait for something, or go on where a call that was killed had come."""
    now_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        watch = from_json(Watch, load_json(_path(kept, what).read_bytes()))
        if watch.began_s <= watch.looked_s <= now_s < watch.looked_s + _FORGOTTEN_S:
            return watch
    return Watch(began_s=now_s)


def keep(kept: Kept, what: str, watch: Watch) -> None:
    """Put a wait on record; a full disk below /run costs no more than that."""
    with contextlib.suppress(OSError):
        _path(kept, what).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(_path(kept, what), json.dumps(to_json(watch)).encode(), mode=0o600, durable=False)


def end(kept: Kept, what: str) -> None:
    """Forget a wait that is over."""
    _path(kept, what).unlink(missing_ok=True)
