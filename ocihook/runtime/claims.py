"""Of all nodes that share a remote, one restores a checkpoint, or runs from it: a claim at the remote says which.

Whoever claims writes under a name that nobody else has, then looks. Of two at once at least one sees the other: if both
do, the name that comes first wins. That needs no more of a storage than that all see what was written; a conditional
write would not let a claim be taken over, and neither registries nor all servers of S3 have one.

A claim ends with its container: the agent withdraws it then, and renews it until then. What nobody renews any more is
of a node that is gone. So it is for a container of the same node, which looks at its own processes (restoring.py), and
of a pod of the same name: a cluster has one of a name at a time.
"""

import base64
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ocihook.config import Settings
from ocihook.errors import CheckpointInUse, OcihookError, RemoteError, RestoreError, plain, printable
from ocihook.linux.files import make_directory, replace_file
from ocihook.linux.patience import Patience
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef
from ocihook.packs.cipher import Keyring, KeySource, opened, seal
from ocihook.packs.frame import load_json
from ocihook.remote.location import open_remote, remote_domains
from ocihook.remote.remote import ClaimBlob, Remote
from ocihook.runtime import containers
from ocihook.session.record import from_json, to_json
from ocihook.store.store import Store
from ocihook.store.thin import Thin
from ocihook.wire import RESTORING_NAME

LASTS_S = 1800.0  # without being renewed
RENEWED_EVERY_S = 300.0
CLAIM_S = 60.0  # that a remote may take
_WITHDRAW_S = 10.0  # likewise, where an engine waits; else the agent does it
_UNDECIDED_S = 20.0  # within which whoever has written a claim has also looked, or has given up
_AGAIN_S = 30.0  # after a remote that was away
_NODE_NAME = "node"
STOP_PREFIX = "stop-"  # of the names of announced stops (announced.py)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who claims a checkpoint: what others see at the remote."""

    node: str  # a random number that a node's store has
    host: str  # for people
    container: ContainerRef
    is_decided: bool = False  # it has looked, and holds the checkpoint

    def stands_in_for(self, other: "Holder") -> bool:
        """Return whether what the other one has claimed cannot run any more, since this container exists."""
        mine, theirs = self.container, other.container
        is_same_pod = bool(mine.pod_name) and (mine.pod_namespace, mine.pod_name) == (
            theirs.pod_namespace,
            theirs.pod_name,
        )
        return (self.node, self.host) == (other.node, other.host) or is_same_pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim as its own node has it on record."""

    checkpoint: Thin
    location: str  # of the remote
    token: str
    holder: Holder
    next_s: float  # since the epoch: when it is next renewed, or its withdrawal tried again
    ended_s: float = 0.0  # since the epoch: when its container was seen to have ended

    @property
    def is_held(self) -> bool:
        """Return whether its container is being restored, or runs; what cannot be read is."""
        try:
            container = self.holder.container
            if (containers.directory_of(container.id) / RESTORING_NAME).exists():
                return True
            kept = containers.read(container.id)
        except (OcihookError, OSError):
            return True
        return bool(kept and kept.checkpoint == self.checkpoint.checkpoint_id and kept.is_running)

    def is_due(self, now_s: float) -> bool:
        """Return whether the agent has to do something; also if the clock was put back."""
        return not now_s < self.next_s <= now_s + RENEWED_EVERY_S or (not self.ended_s and not self.is_held)


def holder_of(container: ContainerRef, settings: Settings) -> Holder:
    """Return a container of this node as others see it at the remote."""
    return Holder(node=node_name(settings), host=os.uname().nodename, container=container)


def node_name(settings: Settings) -> str:
    """Return the name of this node's store, which no other has."""
    directory = Path(settings.store_dir) / "claims"
    make_directory(directory, within=Path(settings.store_dir))
    return _node(directory)


def note_claim(checkpoint: Thin, container: ContainerRef, settings: Settings) -> Path:
    """Put on record, here, that a checkpoint is about to be claimed; return where."""
    directory = Path(settings.store_dir) / "claims"
    make_directory(directory, within=Path(settings.store_dir))
    claim = Claim(
        checkpoint=checkpoint,
        location=settings.remote,
        token=secrets.token_hex(8),
        holder=holder_of(container, settings),
        next_s=time.time() + RENEWED_EVERY_S,
    )
    path = directory / f"{checkpoint.domain}.{checkpoint.checkpoint_id}.{claim.token}.json"
    _write(path, claim)
    return path


def make_claim(path: Path, patience: Patience) -> None:
    """Claim a checkpoint at the remote, as is on record.

    Raises:
        RestoreError: if another container has it.
        RemoteError: if that is not known, since the remote does not answer.
    """
    claim = _read(path)
    (outcome,) = call_each(_claim, [claim], patience.within(CLAIM_S))
    if isinstance(outcome, TimeoutError):
        raise RemoteError(f"{claim.location} has not said in {CLAIM_S:g} s who runs from a checkpoint") from outcome
    if isinstance(outcome, Exception):
        raise outcome


def is_claimed(checkpoint: Thin, container: ContainerRef, settings: Settings, patience: Patience) -> bool:
    """Return whether a claim at the remote keeps a container from a checkpoint.

    Raises:
        RemoteError: if the remote does not answer.
    """
    holder = holder_of(container, settings)

    def look(location: str) -> bool:
        blobs = open_remote(location, checkpoint.domain).claims(checkpoint.checkpoint_id)
        return any(not holder.stands_in_for(_decode(blob.data, location)) for blob in blobs)

    (outcome,) = call_each(look, [settings.remote], patience.within(CLAIM_S))
    if isinstance(outcome, TimeoutError):
        raise RemoteError(f"{settings.remote} has not said in {CLAIM_S:g} s who runs from a checkpoint") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Released(NamedTuple):
    """A claim, or an announced stop, that was removed."""

    domain: str
    of: str  # the checkpoint, or the name of the stop
    host: str  # the node that had it; "" if the claim is malformed
    container: str


def release(settings: Settings, *, checkpoint_id: str = "", node: str = "") -> list[Released]:
    """Remove claims at the remote whose containers are gone, as after the loss of a node; return them.

    A node that is not lost writes its claims again when it renews them, and logs that they were removed.

    Args:
        settings: the node's, with a remote.
        checkpoint_id: all claims of this checkpoint.
        node: all claims and announced stops of the node with this host name, or this name of its store.

    Raises:
        RemoteError: if the remote cannot be reached, or has no such checkpoint.
    """
    domains = {*remote_domains(settings.remote), *Store.of(settings).names()}
    found = []
    for domain in sorted(domains):
        remote = open_remote(settings.remote, domain)
        for blob in remote.claims(checkpoint_id or "*"):
            holder = _holder_of(blob, Keyring(KeySource.of(settings), domain))
            if checkpoint_id or (holder and node in (holder.host, holder.node)):
                remote.remove_claim(blob.of, blob.token)
                names = (holder.host, str(holder.container)) if holder else ("", "")
                found.append(Released(domain, blob.of, *names))
    return found


def _holder_of(blob: ClaimBlob, keyring: Keyring) -> Holder | None:
    """Return who has a claim or has announced a stop; None if it is malformed, or the key is missing."""
    with contextlib.suppress(OcihookError, ValueError, TypeError, KeyError, AttributeError):
        if blob.of.startswith(STOP_PREFIX):
            return from_json(Holder, load_json(unseal_claim(keyring, blob))["holder"])
        return _decode(blob.data, "the remote")
    return None


def seal_claim(keyring: Keyring, of: str, token: str, data: bytes) -> bytes:
    """Return a claim as the remote has it: encrypted where its domain is."""
    return base64.b64encode(seal(keyring, f"stop {of}.{token}", data)) if keyring.is_configured else data


def unseal_claim(keyring: Keyring, blob: ClaimBlob) -> bytes:
    """Return the content of a claim that `seal_claim` has written.

    Raises:
        IntegrityError: if it is damaged, or another one, or not encrypted and should be.
        ValueError: if it is not Base64 and should be.
        KeyMissing: if there is no key.
    """
    if not keyring.is_configured:
        return blob.data
    data = base64.b64decode(blob.data, validate=True)
    return opened(keyring, f"stop {blob.of}.{blob.token}", data, must_be_sealed=lambda: True)


def end_claim(path: Path) -> None:
    """Withdraw a claim whose restore was undone; if the remote does not answer at once, the agent does it later."""
    with contextlib.suppress(OcihookError, OSError):  # the claim stays on record: the agent tends it
        claim = _read(path)
        (outcome,) = call_each(_withdraw, [claim], Patience(timeout_s=_WITHDRAW_S))
        if outcome is None:
            path.unlink(missing_ok=True)


def _claim(mine: Claim) -> None:
    remote, checkpoint_id = _remote(mine), mine.checkpoint.checkpoint_id
    remote.write_claim(checkpoint_id, mine.token, _encode(mine.holder))
    patience = Patience(timeout_s=_UNDECIDED_S)
    try:
        while rivals := _rivals(remote, mine):
            decided = [
                holder for token, holder, age_s in rivals
                if token < mine.token or holder.is_decided or age_s > _UNDECIDED_S
            ]  # fmt: skip
            if decided or patience.is_over:
                rival = (decided or [rivals[0][1]])[0]
                raise CheckpointInUse(
                    f"checkpoint {checkpoint_id} is being restored or runs already, on node {printable(rival.host)}, "
                    f"as container {rival.container}",
                    hint="stop that one first: two must not resume from the same state. If that node is gone, "
                    f"`ocihook store release {checkpoint_id}`; else it is free {LASTS_S / 60:g} minutes later",
                )
            patience.sleep(0.2)  # it sees ours, and withdraws
        remote.write_claim(checkpoint_id, mine.token, _encode(replace(mine.holder, is_decided=True)))
    except BaseException:
        remote.remove_claim(checkpoint_id, mine.token)
        raise


def _rivals(remote: Remote, mine: Claim) -> list[tuple[str, Holder, float]]:
    """Return who else has a claim that counts, with the seconds since it was written; remove those that do not."""
    checkpoint_id = mine.checkpoint.checkpoint_id
    found = {claim.token: claim for claim in remote.claims(checkpoint_id)}
    own = found.pop(mine.token, None)
    if own is None:
        raise RemoteError(f"{mine.location} does not show what was just written there")
    rivals = []
    for token, claim in sorted(found.items()):
        age_s = own.written_s - claim.written_s
        if age_s <= LASTS_S and not mine.holder.stands_in_for(holder := _decode(claim.data, mine.location)):
            rivals.append((token, holder, age_s))
        else:
            remote.remove_claim(checkpoint_id, token)
    return rivals


def _withdraw(claim: Claim) -> None:
    remote, checkpoint_id = _remote(claim), claim.checkpoint.checkpoint_id
    if any(each.token == claim.token for each in remote.claims(checkpoint_id)):
        remote.remove_claim(checkpoint_id, claim.token)


def _renew(claim: Claim) -> None:
    remote, checkpoint_id = _remote(claim), claim.checkpoint.checkpoint_id
    if all(each.token != claim.token for each in remote.claims(checkpoint_id)):
        log.error(
            "container %s runs from checkpoint %s, and its claim at %s was removed: another one may run from it, too",
            claim.holder.container,
            checkpoint_id,
            claim.location,
        )
    remote.write_claim(checkpoint_id, claim.token, _encode(replace(claim.holder, is_decided=True)))


def has_claims(store_dir: Path) -> bool:
    """Return whether something of this node has a claim, so that an agent must be there."""
    return any(True for _ in _all(store_dir))


def has_due_claims(store_dir: Path) -> bool:
    """Return whether a claim is to be renewed or withdrawn."""
    now_s = time.time()
    return any(claim.is_due(now_s) for _, claim in _all(store_dir))


def tend_claims(store_dir: Path, location: str = "") -> None:
    """Renew the claims of containers that run, and withdraw those of containers that have ended.

    Args:
        store_dir: of the node.
        location: of its remote, for a claim of which that is not known.
    """
    for path, found in _all(store_dir):
        claim = replace(found, location=found.location or location)
        now_s = time.time()
        if not claim.is_due(now_s):
            continue
        is_held = claim.is_held
        try:
            (_renew if is_held else _withdraw)(claim)
        except (OcihookError, OSError) as error:
            log.error("the claim of container %s: %s", claim.holder.container, plain(error))
            ended_s = 0.0 if is_held else claim.ended_s or now_s
            if ended_s and not 0 <= now_s - ended_s < LASTS_S:  # it has no effect any more
                path.unlink(missing_ok=True)
            else:
                _write(path, replace(claim, next_s=now_s + _AGAIN_S, ended_s=ended_s))
            continue
        if is_held:
            _write(path, replace(claim, next_s=now_s + RENEWED_EVERY_S))
        else:
            path.unlink(missing_ok=True)


def _all(store_dir: Path) -> Iterator[tuple[Path, Claim]]:
    for path in sorted((store_dir / "claims").glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # it was withdrawn just now
            yield path, _read_or_rebuild(path)


def _read_or_rebuild(path: Path) -> Claim:
    """Return a claim; of a damaged record, what its name says, and who runs: the remote must not be without it."""
    try:
        return _read(path)
    except RestoreError as error:
        log.error("%s; the claim is renewed as long as a container may have it", error)
    *domain, checkpoint_id, token = path.stem.split(".")
    container, own_domain = _container_of(path, checkpoint_id)
    holder = Holder(node=_node(path.parent), host=os.uname().nodename, container=container)
    thin = Thin(".".join(domain) or own_domain, checkpoint_id)
    return Claim(checkpoint=thin, location="", token=token, holder=holder, next_s=0)


def _container_of(path: Path, checkpoint_id: str) -> tuple[ContainerRef, str]:
    """Return the container that may have a claim, and its domain: one with a damaged record may, too."""
    for directory in sorted(containers.root().glob("*")):
        try:
            kept = containers.read(directory.name)
            noted = (directory / RESTORING_NAME).read_bytes() if (directory / RESTORING_NAME).exists() else b""
        except (OcihookError, OSError):
            return ContainerRef(id=directory.name), ""
        if kept and (kept.checkpoint == checkpoint_id or path.name.encode() in noted):
            return kept.container, kept.domain
    return ContainerRef(id="unknown"), ""  # none: whoever had it has ended


def _remote(claim: Claim) -> Remote:
    return open_remote(claim.location, claim.checkpoint.domain)


def _node(directory: Path) -> str:
    """Return the name of this node's store, which no other has. Two that make it at once agree."""
    path = directory / _NODE_NAME
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    made = directory / secrets.token_hex(16)
    replace_file(made, made.name.encode(), mode=0o600)
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(made)
    made.unlink()
    return path.read_text()


def _encode(holder: Holder) -> bytes:
    return json.dumps(to_json(holder)).encode()


def _decode(data: bytes, location: str) -> Holder:
    try:
        return from_json(Holder, load_json(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RemoteError(f"a claim at {location} is malformed: {error}") from error


def _write(path: Path, claim: Claim) -> None:
    replace_file(path, json.dumps(to_json(claim)).encode(), mode=0o600)


def _read(path: Path) -> Claim:
    data = path.read_bytes()
    try:
        return from_json(Claim, load_json(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RestoreError(f"{path} cannot be read: {error!r}") from error
