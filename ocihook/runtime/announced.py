"""A stop that is under way is announced at the remote: a container that is created again elsewhere waits for it.

The announcement is written before the dump begins, renewed while the checkpoint is dumped, stored and pushed, and
withdrawn after the push. A stop that fails leaves its reason there for a while. A node that dies renews nothing.

No two clocks are compared: each announcement has a number that grows with every renewal, and who waits sees by its own
clock how long that number has not changed (waiting.py).

Two files record an announcement on its own node, since two processes write: `<name>.json` the stop, `<name>.tended` the
agent that renews it.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ocihook.checkpoints.pending import pending_ids, read_job
from ocihook.config import Settings
from ocihook.errors import IntegrityError, OcihookError, plain
from ocihook.linux.files import make_directory, replace_file
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import descendants
from ocihook.linux.workers import call_each
from ocihook.model import GangRef
from ocihook.packs.cipher import Keyring, KeySource
from ocihook.packs.frame import load_json
from ocihook.remote.location import open_remote
from ocihook.remote.remote import ClaimBlob, Remote
from ocihook.runtime import containers
from ocihook.runtime.claims import STOP_PREFIX, Holder, holder_of, seal_claim, unseal_claim
from ocihook.runtime.stop_record import read_stop
from ocihook.session.record import from_json, to_json
from ocihook.store.lineage import lineage
from ocihook.store.pushes import read_rate
from ocihook.store.store import Store

EVERY_S = 10.0  # at which an announcement is renewed
_FAILED_FOR_S = 300.0  # that the reason of a stop that has failed stays at the remote
_ANNOUNCE_S = 10.0  # that a stop waits for the remote; then the agent announces it
_TEND_S = 60.0  # that the remote may take for one renewal
_TENDED = ".tended"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DUMPING, STORING, PUSHING, DONE, FAILED = "dumped", "stored", "pushed", "done", "failed"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A stop as others see it at the remote."""

    holder: Holder  # the node, and the container that is stopped
    since: str = ""  # RFC 3339, UTC, by that node's clock: for people
    renewed: int = 0  # grows with each renewal
    every_s: float = EVERY_S  # from one renewal to the next
    phase: str = DUMPING
    size_bytes: int = 0  # that are expected at the remote; 0: not known yet
    bytes_per_s: float = 0.0  # of the node's last push; 0: not known
    checkpoint: str = ""  # its id, once it is dumped
    failed: str = ""  # why there will be no checkpoint

    @property
    def push_s(self) -> float:
        """Return how long the push of all may take; 0 if that is not known."""
        return self.size_bytes / self.bytes_per_s if self.bytes_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """An announcement as its own node has it on record."""

    domain: str
    of: str  # its name at the remote
    token: str
    location: str  # of the remote
    holder: Holder
    since: str
    checkpoint: str = ""  # its id, once it is dumped
    failed: str = ""  # why the stop has made no checkpoint


class _Tended(NamedTuple):
    """How far the agent is with an announcement."""

    renewed: int = 0
    next_s: float = 0.0  # since the epoch: when it is renewed
    state: str = ""  # that the remote has; "": none
    ended_s: float = 0.0  # since the epoch: when the stop was seen to be done, or to have failed


class Found(NamedTuple):
    """An announcement as it was found at the remote."""

    of: str
    token: str
    announced: Announced


def name_of(domain: str, member: str, gang: str) -> str:
    """Return the name of a member's stops; `*` for the member or the gang stands for any."""
    return f"{STOP_PREFIX}{_digest(f'{domain}/{member}', member)}-{_digest(f'{domain}/{gang}', gang)}"


def _digest(text: str, part: str) -> str:
    return part if part == "*" else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def announce(kept: containers.Kept, gang: GangRef | None, settings: Settings, again: str = "") -> str:
    """Announce a stop, before its dump begins. A remote that does not answer at once keeps no stop from its dump.

    Args:
        kept: the container that is stopped.
        gang: that it is in.
        settings: the node's; its checkpoints are pushed.
        again: what this returned to an agent that was killed over the same stop.

    Returns:
        The token of the announcement.
    """
    path = _record(kept, gang, settings, again)
    (outcome,) = call_each(lambda one: _tend(one, settings), [path], Patience(timeout_s=_ANNOUNCE_S))
    if isinstance(outcome, Exception):
        why = "it does not answer" if isinstance(outcome, TimeoutError) else plain(outcome)
        log.warning(
            "the stop of container %s is not announced at %s: %s. A container that is created again on another node "
            "does not wait for its checkpoint until it is",
            *(kept.container, settings.remote, why),
        )
    return path.stem


def _record(kept: containers.Kept, gang: GangRef | None, settings: Settings, again: str) -> Path:
    """Record an announcement on this node; return where. An agent that follows a killed one finds the first one."""
    for path, known in _all(settings):
        if known.token == again:  # a stop that has failed is tried again
            _write(path, replace(known, failed=""))
            return path
        if known.holder.container.id == kept.container.id and not (known.checkpoint or known.failed):
            return path
    directory = _directory(settings)
    make_directory(directory, within=Path(settings.store_dir))
    announcement = Announcement(
        domain=kept.domain,
        of=name_of(kept.domain, lineage(kept.container), gang.name if gang else ""),
        token=secrets.token_hex(8),
        location=settings.remote,
        holder=holder_of(kept.container, settings),
        since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    path = directory / f"{announcement.token}.json"
    _write(path, announcement)
    return path


def note_end(container_id: str, settings: Settings, *, checkpoint: str = "", failed: str = "") -> None:
    """Note how the dump of an announced stop has ended; the agent tells the remote.

    Args:
        container_id: that was stopped.
        settings: the node's.
        checkpoint: its id; it is announced until it is at the remote.
        failed: why there is no checkpoint.
    """
    for path, known in _all(settings):
        if known.holder.container.id == container_id and not (known.checkpoint or known.failed):
            _write(path, replace(known, checkpoint=checkpoint, failed=failed))


def has_announcements(settings: Settings) -> bool:
    """Return whether an agent must stay for an announced stop; for one whose push is due it stays as for any push."""
    return any(_read_tended(path).state != PUSHING for path, _ in _all(settings))


def has_due_announcements(settings: Settings) -> bool:
    """Return whether an announcement is to be renewed or withdrawn."""
    now_s = time.time()
    return any(_is_due(path, known, settings, now_s) for path, known in _all(settings))


def tend_announcements(settings: Settings) -> None:
    """Renew what is announced of this node, and withdraw what has ended."""
    now_s = time.time()
    for path, known in list(_all(settings)):
        if not _is_due(path, known, settings, now_s):
            continue
        (outcome,) = call_each(lambda one: _tend(one, settings), [path], Patience(timeout_s=_TEND_S))
        if isinstance(outcome, Exception):
            log.error("the announcement of the stop of container %s: %s", known.holder.container, plain(outcome))


def _is_due(path: Path, known: Announcement, settings: Settings, now_s: float) -> bool:
    """Return whether there is something to do; also if the clock was put back."""
    tended = _read_tended(path)
    if not now_s < tended.next_s <= now_s + EVERY_S:
        return True
    with contextlib.suppress(OcihookError, OSError):  # it is reported when it is tended
        return _state(known, settings, is_stopped=_is_under_way(known))[0] != tended.state
    return False


def _tend(path: Path, settings: Settings) -> None:
    """Write an announcement, or withdraw it, as its stop has come.

    Raises:
        OcihookError, OSError: if the remote cannot be reached; it is tried again.
    """
    is_stopped = _is_under_way(_read(path))  # before its record is read: a stop notes its end first there
    known, tended, now_s = _read(path), _read_tended(path), time.time()
    state, why = _state(known, settings, is_stopped=is_stopped)
    is_over = state in (DONE, FAILED)
    ended_s = (tended.ended_s or now_s) if is_over else 0.0
    is_forgotten = is_over and not 0 <= now_s - ended_s < _FAILED_FOR_S
    _write_tended(path, _Tended(tended.renewed + 1, now_s + EVERY_S, state, ended_s))
    try:
        remote = open_remote(known.location, known.domain)
        if state == DONE or is_forgotten:
            remote.remove_claim(known.of, known.token)
            is_forgotten = True
            return
        announced = Announced(
            holder=known.holder,
            since=known.since,
            renewed=tended.renewed + 1,
            every_s=EVERY_S,
            phase=state,
            size_bytes=_size_bytes(known, state, settings),
            bytes_per_s=read_rate(Path(settings.store_dir)),
            checkpoint=known.checkpoint,
            failed=why,
        )
        remote.write_claim(known.of, known.token, _encode(announced, known, settings))
    finally:
        if is_forgotten:  # whatever the remote has: who sees it unchanged does not wait for it
            path.unlink(missing_ok=True)
            path.with_suffix(_TENDED).unlink(missing_ok=True)


def _state(known: Announcement, settings: Settings, *, is_stopped: bool) -> tuple[str, str]:
    """Return the state of a stop, and why it has failed.

    Args:
        known: its record.
        settings: the node's.
        is_stopped: whether its container is still being stopped.
    """
    if known.failed:
        return FAILED, known.failed
    if not known.checkpoint:
        return (DUMPING, "") if is_stopped else (FAILED, "its node went down, or its agent was killed")
    store, checkpoint_id = Store.of(settings), known.checkpoint
    if known.domain in store.names():
        domain = store.open(known.domain)
        if domain.marks.is_left(checkpoint_id):
            return FAILED, "its container was created again in its own pod"
        if checkpoint_id in pending_ids(domain):  # first: it may be completed at any moment
            with contextlib.suppress(IntegrityError):
                job = read_job(domain, checkpoint_id)
                if job is not None and not job.lost:
                    return STORING, ""
        if checkpoint_id in domain.checkpoint_ids():
            return (PUSHING if domain.pushes.read(checkpoint_id) else DONE), ""
    return FAILED, "its checkpoint was lost, or removed, before it was pushed"


def _is_under_way(known: Announcement) -> bool:
    stop = read_stop(known.holder.container.id)
    return stop is not None and not stop.is_over


def _size_bytes(known: Announcement, state: str, settings: Settings) -> int:
    """Return the bytes that are to come to the remote, as far as they are known; 0 if they are not."""
    with contextlib.suppress(OcihookError, OSError):
        if state == DUMPING:
            return _memory_bytes(known)
        domain = Store.of(settings).open(known.domain)
        if state == STORING and (job := read_job(domain, known.checkpoint)) is not None:
            return job.raw_bytes
        if state == PUSHING:
            return sum(info.size_bytes for info in domain.layout(domain.read(known.checkpoint)).packs)
    return 0


def _memory_bytes(known: Announcement) -> int:
    """Return the memory of a container that is being dumped; 0 if it is not known."""
    stop = read_stop(known.holder.container.id)
    if stop is None or stop.init is None or not stop.init.is_alive():
        return 0
    return sum(map(_resident_bytes, descendants(stop.init.pid)))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def find_announced(remote: Remote, keyring: Keyring, of: str) -> list[Found]:
    """Return what is announced at a remote under a name, in which `*` stands for any text.

    What is malformed, not of its own name, or not encrypted where all is, counts for nothing: it may be forged.

    Raises:
        RemoteError: if the remote cannot be reached.
        KeyMissing: if there is no key.
    """
    found = []
    for blob in remote.claims(of):
        try:
            found.append(Found(blob.of, blob.token, _decode(blob, keyring)))
        except (ValueError, TypeError, KeyError, AttributeError, IntegrityError) as error:
            log.warning("an announced stop at the remote counts for nothing, it is malformed or forged: %s", error)
    return found


def _encode(announced: Announced, known: Announcement, settings: Settings) -> bytes:
    keyring = Keyring(KeySource.of(settings), known.domain)
    return seal_claim(keyring, known.of, known.token, json.dumps(to_json(announced)).encode())


def _decode(blob: ClaimBlob, keyring: Keyring) -> Announced:
    """Read an announcement.

    Raises:
        IntegrityError, ValueError, TypeError, KeyError, AttributeError: if it is malformed, or another one.
    """
    announced = from_json(Announced, load_json(unseal_claim(keyring, blob)))
    member = lineage(announced.holder.container)
    if not blob.of.startswith(name_of(keyring.domain, member, "*").removesuffix("*")):
        raise ValueError(f"it is of {member!r}, whose stops have another name")
    if not 0 < announced.every_s <= EVERY_S * 6 or min(announced.size_bytes, announced.bytes_per_s) < 0:
        raise ValueError("numbers that cannot be")
    return announced


def _directory(settings: Settings) -> Path:
    return Path(settings.store_dir) / "stops"


def _all(settings: Settings) -> Iterator[tuple[Path, Announcement]]:
    """Yield what is on record; a damaged record is removed: the remote's expires."""
    for path in sorted(_directory(settings).glob("*.json")):
        try:
            yield path, _read(path)
        except FileNotFoundError:  # it was withdrawn just now
            continue
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s cannot be read, and is removed: %r", path, error)
            path.unlink(missing_ok=True)


def _read(path: Path) -> Announcement:
    return from_json(Announcement, load_json(path.read_bytes()))


def _write(path: Path, announcement: Announcement) -> None:
    replace_file(path, json.dumps(to_json(announcement)).encode(), mode=0o600, durable=False)


def _read_tended(path: Path) -> _Tended:
    try:
        return from_json(_Tended, load_json(path.with_suffix(_TENDED).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not tended yet
        return _Tended()


def _write_tended(path: Path, tended: _Tended) -> None:
    replace_file(path.with_suffix(_TENDED), json.dumps(to_json(tended)).encode(), mode=0o600, durable=False)
