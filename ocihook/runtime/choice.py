"""Which checkpoint a new container resumes from: the one that is named, or the newest of its member."""

import calendar
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ocihook.archive.places import archive_files
from ocihook.checkpoints.epochs import Epochs, epoch_of
from ocihook.checkpoints.listing import memory_state
from ocihook.checkpoints.pending import is_here, keep_in_use, pending_ids, read_job
from ocihook.config import ANY, LATEST, Policy, Settings
from ocihook.errors import (
    DumpUnderWay,
    IdentificationError,
    IntegrityError,
    NoCheckpoint,
    RemoteError,
    StoreError,
    UnsupportedError,
    printable,
)
from ocihook.linux.patience import Patience
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef, GangRef
from ocihook.packs.cipher import Keyring, KeySource
from ocihook.remote.location import open_remote
from ocihook.runtime import waiting
from ocihook.runtime.announced import Found, find_announced, name_of
from ocihook.runtime.claims import node_name
from ocihook.runtime.containers import Kept
from ocihook.runtime.left_behind import is_restart
from ocihook.runtime.stop_record import is_stopping
from ocihook.store.domain import Domain
from ocihook.store.lineage import domain_name, has_identity, is_own, lineage, owner_name
from ocihook.store.store import Store, store_workers
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.thin import Thin

MADE_S = 60.0  # that a checkpoint which is being made is waited for: of a stop, or read from a snapshot
REMOTE_S = 60.0  # that a remote may take to say what it has: engines wait two minutes for the whole of `create`
ARCHIVES_S = 60.0  # that the archives of engines are read for
_SKEW_S = 3600.0  # by which the clocks of nodes may differ, between which archives are copied
STALL_S = 90.0  # that a remote may send nothing of a checkpoint: a connection that is dead was made anew by then
COMPLETE_S = 600.0  # that a checkpoint which another process stores is waited for

_POLL_S, _LONGEST_POLL_S = 0.2, 2.0  # between looks at the remote, for a stop that is under way
_TOLD_EVERY_S = 15.0  # what a container waits for
_FORGET_S = 10.0  # that a remote may take to remove what a lost node has announced

log = logging.getLogger(__name__)

_NEXT = 1 << 62  # sequence of what waits to be stored: it has none yet, and is behind all that have


class Known(NamedTuple):
    """A checkpoint as far as its choice goes."""

    id: str
    container: ContainerRef
    created: str
    sequence: int = 0  # in its store, which tells of one second what was made later
    archive: Path | None = None  # of an engine; None: in a store


class _Remote(NamedTuple):
    """The checkpoints and announced stops of a domain at a remote.

    Stops are read first, since a push ends before its announcement is withdrawn.
    """

    known: Sequence[Known] = ()
    announced: Sequence[Found] = ()


class Chosen(NamedTuple):
    """The checkpoint that a container resumes from."""

    thin: Thin
    is_restart: bool  # it is of the same container, or pod: this one was restarted, and not made again
    archive: Path | None = None  # of an engine, that it is in; None: it is in the store, or at the remote


def choose(
    kept: Kept,
    policy: Policy,
    settings: Settings,
    patience: Patience,
    gang: GangRef | None = None,
    say: Callable[[str], object] = log.info,
) -> Chosen:
    """Return the checkpoint that is named, or the newest of the container's member.

    It is in this node's store, at the remote, or in an archive that an engine has written on this node.

    What is of a dump of a gang that is not complete is none. The members of a gang come to the same dump. For `latest`,
    a checkpoint that was lost is none, and one that is still being read from a snapshot is waited for, up to MADE_S;
    then the one before it counts. A stop of the member that is under way, on this node or announced at the remote, is
    waited for, up to `restore_wait_s`; in a gang, those of all members.

    Args:
        kept: the container.
        policy: of the container.
        settings: the node's.
        patience: with the engine's call.
        gang: that it is in.
        say: tells what the container waits for.

    Raises:
        GangError: if the members of its gang do not all ask.
        NoCheckpoint: if there is none.
        UnsupportedError: if the container has no identity that says which checkpoints are its own.
        RemoteError: if the remote, which may have a newer one, does not answer in time.
        IntegrityError: if one is damaged.
        GivenUp: if its caller has given up.
    """
    if gang is None or policy.restore_from != LATEST:
        return _choose(kept, policy, settings, patience, None, say)
    from ocihook.gang.link import Link  # for gangs alone
    from ocihook.gang.membership import Choice

    asking = Choice(gang, patience, link=Link.of(settings), timeout_s=policy.gang_timeout_s)
    while True:
        asking.settle()
        with contextlib.suppress(DumpUnderWay):  # what there was is too old
            return _choose(kept, policy, settings, patience, gang, say, asking.ask)


def _choose(
    kept: Kept,
    policy: Policy,
    settings: Settings,
    patience: Patience,
    gang: GangRef | None,
    say: Callable[[str], object],
    ask_gang: Callable[[Sequence[str]], str] | None = None,
) -> Chosen:
    store, wanted = Store.of(settings, patience), policy.restore_from
    if wanted == LATEST and not has_identity(kept.container):
        raise UnsupportedError(
            f"pod {kept.container.pod_name} is one of many that are alike: which checkpoint is its own is not known",
            hint="name a checkpoint by its id, or a member by ocihook.io/member",
        )
    there, why, epochs = _Remote(), "", ""
    seen: list[Known] = []
    if wanted == LATEST:  # a new pod may be made before the old one has ended
        there, why = _wait_for_stops(kept, policy, settings, patience, gang, say)
    limit = patience.within(MADE_S)
    names = [kept.domain] if wanted == LATEST else domains_of(kept.domain, store.names(), settings)
    if ask_gang is not None:
        _complete_own(store, kept, settings, limit)  # what cannot be stored is not offered to the other members
    for name in names:
        known = [*_here(store, name), *there.known]
        if settings.remote and wanted != LATEST and all(one.id != wanted for one in known):
            known += _ask_remote(settings, name, patience).known
        usable = _usable(known, wanted, kept, store, name, limit)
        found = _find(_choosable(usable, wanted, kept, policy, store, name), wanted, kept)
        if found is None or wanted == LATEST:
            known += _archived(name, wanted, found.created if found else "", settings, patience)
        seen = known
        usable = _usable(known, wanted, kept, store, name, limit)
        known = _choosable(usable, wanted, kept, policy, store, name)
        found = _find(known, wanted, kept)
        if ask_gang is not None and not _is_restarted(found, kept, policy):
            found = _find_with_gang(known, kept, ask_gang)
            epochs = "" if found is not None else _lacking(gang, describe_epochs(seen, kept.container))
        if found is not None:
            if wanted == LATEST:
                _note(found, kept, store, name)
            return Chosen(Thin(name, found.id), is_restart(kept.container, found.container), found.archive)
    where = f"in domain {', '.join(names)} of this node's store"
    raise _missing(
        seen, kept, wanted, f"{where}{f', nor at {settings.remote}' if settings.remote else ''}", epochs, why
    )


def _lacking(gang: GangRef | None, epochs: str) -> str:
    """Return that no epoch of a gang is complete; "" if there is no epoch."""
    return f"no epoch of gang {gang} has a checkpoint of every member that is created now: {epochs}" if epochs else ""


def _note(found: Known, kept: Kept, store: Store, name: str) -> None:
    """Note what is the latest: the next checkpoint is the newer one, whatever the clocks of both nodes say."""
    store.open(name, create=name not in store.names()).note_chosen(lineage(kept.container), found.created)
    if kept.container.owner_uid and not (found.container.owner_uid or kept.container.owner):
        log.warning("checkpoint %s does not say which job made it: it may be of an earlier one", found.id)


def _missing(seen: Sequence[Known], kept: Kept, wanted: str, where: str, epochs: str, why: str) -> NoCheckpoint:
    """Return why there is no checkpoint for a container.

    Args:
        seen: checkpoints that there are.
        kept: the container.
        wanted: as the policy has it.
        where: it was looked for.
        epochs: that its gang has none in common; "": that is not why.
        why: a stop that is waited for has brought none; "": there was no such stop.
    """
    if epochs:
        return NoCheckpoint(
            "; ".join(filter(None, [epochs, why])),
            hint="an epoch counts once the checkpoints of all its members are at the remote, or on their nodes",
        )
    other = _of_another_owner(seen, kept.container) if wanted == LATEST else ""
    if other:
        owner = owner_name(kept.container)
        return NoCheckpoint(
            "; ".join(filter(None, [other, why])),
            hint=printable(f"to resume from it, name it by its id, or set ocihook.io/owner to {owner}"),
        )
    of = lineage(kept.container) if wanted == LATEST else wanted
    where = f"{where}, nor in an engine's archive here"
    return NoCheckpoint(
        f"there is no checkpoint {of} of a stopped container {where}{why and '; '}{why}",
        hint="one is made when a container is stopped that has ocihook.io/checkpoint-on-stop",
    )


def _wait_for_stops(
    kept: Kept,
    policy: Policy,
    settings: Settings,
    patience: Patience,
    gang: GangRef | None,
    say: Callable[[str], object],
) -> tuple[_Remote, str]:
    """Wait until no stop is under way that may bring a newer checkpoint; return what the remote has then.

    Returns:
        Also why a stop has brought none, or was not waited for any longer; "" if there was no such stop.

    Raises:
        NoCheckpoint: if a stop is still under way at the end of the wait, and that is to fail.
        RemoteError: if the remote does not answer in time.
        GivenUp: if its caller has given up.
    """
    watch, poll_s, told_s = waiting.begin(kept, waiting.STOPS), _POLL_S, -math.inf
    of = name_of(kept.domain, "*" if gang else lineage(kept.container), gang.name if gang else "*")
    why: list[str] = []
    awaited: list[Found] = []
    while True:
        here = patience.within(watch.left_s(policy.restore_wait_s, time.monotonic()))
        is_here = not here.until(lambda: not is_stopping(kept.domain, kept.container))
        try:
            remote = _ask_remote(settings, kept.domain, patience, of) if settings.remote else _Remote()
        except RemoteError as error:
            if not awaited or not watch.left_s(policy.restore_wait_s, time.monotonic()):
                raise
            log.warning("container %s waits on: %s", kept.container, error)
            patience.sleep(_LONGEST_POLL_S)
            continue
        stops = [one for one in remote.announced if not _is_of_another(one.announced.holder.container, kept.container)]
        alive, dead = watch.look(stops, time.monotonic())
        for one in dead:
            why.append(f"{_stop(one)} was not renewed for {waiting.MISSED * one.announced.every_s:g} s")
            _forget(one, kept.domain, settings, patience)
        complete = {one.id for one in remote.known}
        awaited = waiting.to_wait_for(alive, node_name(settings) if alive else "", complete)
        limit_s = waiting.limit_s(policy.restore_wait_s, [one.announced for one in awaited])
        left_s = watch.left_s(limit_s, time.monotonic())
        if not (awaited or is_here) or not left_s:
            break
        waiting.keep(kept, waiting.STOPS, watch)
        if time.monotonic() - told_s >= _TOLD_EVERY_S:
            told_s = time.monotonic()
            on = ", ".join(map(_stop, awaited)) or "a stop on this node"
            say(f"container {kept.container} waits for its checkpoint, for {left_s:.0f} s at most: {on}")
        patience.within(left_s).sleep(poll_s)
        poll_s = min(poll_s * 1.3, _LONGEST_POLL_S)
    failed = [one for one in alive if one.announced.failed and one.announced.holder.node != node_name(settings)]
    why += [f"{_stop(one)} has failed: {one.announced.failed}" for one in failed]
    if awaited or is_here:
        on = ", ".join(map(_stop, awaited)) or f"a stop of {lineage(kept.container)} on this node"
        late = f"{on} has not brought a checkpoint in {policy.restore_wait_s:g} s or the time of its push"
        if policy.on_no_checkpoint == "fail":
            waiting.keep(kept, waiting.STOPS, watch)  # who is called again does not wait as long again
            raise NoCheckpoint(late, hint="raise restore_wait_s, or wait until it is at the remote")
        why.append(late)
    waiting.end(kept, waiting.STOPS)
    for each in why:
        log.warning("container %s: %s", kept.container, each)
    return remote, "; ".join(why)


def _stop(one: Found) -> str:
    """Return a stop in words."""
    holder, phase = one.announced.holder, one.announced.phase
    size = f", {one.announced.size_bytes >> 20} MiB are being {phase}" if one.announced.size_bytes else ""
    return printable(f"the stop of container {holder.container} on node {holder.host}{size}")


def _forget(one: Found, name: str, settings: Settings, patience: Patience) -> None:
    """Remove an announcement of a node that is gone, so that it costs one wait; it does not matter if that fails."""

    def remove(location: str) -> None:
        open_remote(location, name).remove_claim(one.of, one.token)

    call_each(remove, [settings.remote], patience.within(_FORGET_S))


def _is_of_another(one: ContainerRef, container: ContainerRef) -> bool:
    """Return whether a container was the same member of another owner of that name."""
    return lineage(one) == lineage(container) and not is_own(one, container)


def _of_another_owner(known: Sequence[Known], container: ContainerRef) -> str:
    """Return that the newest checkpoint is of another job, if all of the member's are; "" otherwise."""
    if any(is_own(one.container, container) for one in known):
        return ""
    one = max((one for one in known if lineage(one.container) == lineage(container)), key=_age, default=None)
    if one is None:
        return ""
    of = f"an earlier job of this name, uid {one.container.owner_uid}; this container is of uid {container.owner_uid}"
    return printable(f"the checkpoint {one.id} is of {of}")


def describe_epochs(known: Sequence[Known], container: ContainerRef) -> str:
    """Return which epochs of its gang a member has a checkpoint of, the newest first, and which members each lacks.

    Args:
        known: checkpoints of a domain, as far as they are known on this node and at the remote.
        container: the member that is created.
    """
    mine = sorted((one for one in known if one.container.gang and is_own(one.container, container)), key=_age)
    gangs = {one.container.gang.partition("/")[0] for one in mine}
    others = [one.container for one in known if one.container.gang.partition("/")[0] in gangs]
    names = {each.gang_member for each in others}
    sentences = []
    for dump in dict.fromkeys(one.container.gang for one in reversed(mine)):
        there = [each for each in others if each.gang == dump]
        missing = sorted(names - {each.gang_member for each in there})
        lacking = Epochs(there).missing(there[0])
        unnamed = f"{lacking} of {there[0].gang_size} members" if lacking else ""
        what = f"lacks {', '.join(missing) or unnamed}" if lacking else "has all members, of which one did not offer it"
        sentences.append(f"epoch {epoch_of(there[0])} {what}")
    return printable("; ".join(sentences))


def _find(known: Iterable[Known], wanted: str, kept: Kept) -> Known | None:
    if wanted == LATEST:
        return newest(known, lineage(kept.container))
    return next((one for one in known if one.id == wanted), None)


def restorable(known: Sequence[Known]) -> list[Known]:
    """Return what is not of a dump of a gang that lacks members which the same node, or the remote, should have."""
    epochs = Epochs(one.container for one in known)
    return [one for one in known if epochs.is_whole(one.container) or epochs.has_all_of_node(one.container)]


def whole(known: Iterable[Known], store: Store, name: str, limit: Patience) -> list[Known]:
    """Return what has all of its memory, or comes to have it within a limit: an archive may be there long before.

    Args:
        known: checkpoints of a domain.
        store: this node's.
        name: of the domain.
        limit: for memory that is still being read from snapshots.
    """
    return [one for one in known if _has_memory(store, Thin(name, one.id), limit)]


def _has_memory(store: Store, thin: Thin, limit: Patience) -> bool:
    limit.until(lambda: memory_state(store, thin) != "reading")
    return not memory_state(store, thin)


def _usable(known: Sequence[Known], wanted: str, kept: Kept, store: Store, name: str, limit: Patience) -> list[Known]:
    """Return what a container can be restored from. What is asked for by its id fails by itself, and says why."""
    return restorable(whole(_related(known, kept), store, name, limit) if wanted == LATEST else known)


def _related(known: Sequence[Known], kept: Kept) -> list[Known]:
    """Return the checkpoints of the container's member, and of the others in the same dumps of its gang."""
    dumps = {one.container.gang for one in known if is_own(one.container, kept.container)} - {""}
    return [one for one in known if is_own(one.container, kept.container) or one.container.gang in dumps]


def _choosable(known: list[Known], wanted: str, kept: Kept, policy: Policy, store: Store, name: str) -> list[Known]:
    """Return what a new pod may resume from by `latest`; for a container that its own pod has restarted, all."""
    if wanted != LATEST or name not in store.names() or _is_restarted(_find(known, wanted, kept), kept, policy):
        return known
    left = store.open(name).marks.left()
    return [one for one in known if one.id not in left]


def _is_restarted(found: Known | None, kept: Kept, policy: Policy) -> bool:
    """Return whether the container's pod has restarted it, so that it starts from scratch; others of a gang run on."""
    return found is not None and is_restart(kept.container, found.container) and not policy.restore_on_restart


def _find_with_gang(known: Iterable[Known], kept: Kept, ask: Callable[[Sequence[str]], str]) -> Known | None:
    """Return the member's part of the dump that all members are restored from."""
    mine = [one for one in known if lineage(one.container) == lineage(kept.container) and one.container.gang]
    mine.sort(key=_age)
    dump = ask(list(dict.fromkeys(one.container.gang for one in mine)))
    return next((one for one in reversed(mine) if dump and one.container.gang == dump), None)


def _complete_own(store: Store, kept: Kept, settings: Settings, limit: Patience) -> None:
    """Store what is pending of the container's member, as far as it can be, and is read by then."""
    from ocihook.checkpoints.complete import wait_complete  # takes long to load

    if kept.domain not in store.names():
        return
    domain = store.open(kept.domain)
    for checkpoint_id in pending_ids(domain):
        with contextlib.suppress(IntegrityError, StoreError, OSError):  # it is reported by whoever stores it
            job = read_job(domain, checkpoint_id)
            is_own = job is not None and lineage(job.container) == lineage(kept.container)
            if is_own and _has_memory(store, Thin(domain.name, checkpoint_id), limit):
                wait_complete(domain, checkpoint_id, workers=store_workers(settings), settings=settings)


def _age(one: Known) -> tuple[str, int, str]:
    return one.created, one.sequence, one.id


def newest(known: Iterable[Known], of: str) -> Known | None:
    """Return the newest checkpoint of a lineage, None if there is none."""
    return max(
        (one for one in known if lineage(one.container) == of),
        key=_age,
        default=None,
    )


def known_checkpoints(name: str, settings: Settings, patience: Patience) -> list[Known]:
    """Return all checkpoints of a domain that a container can resume from: here, at the remote and in archives.

    Raises:
        OcihookError: if the store or the remote cannot be read.
    """
    remote = _ask_remote(settings, name, patience).known if settings.remote else ()
    archived = _archived(name, LATEST, "", settings, patience)
    return [*_here(Store.of(settings, patience), name), *remote, *archived]


def domains_of(own: str, there: Iterable[str], settings: Settings) -> list[str]:
    """Return the domains that a container of a domain may have checkpoints of, its own first."""
    rules = {*settings.restore_from.get(own, ()), *settings.restore_from.get(ANY, ())}
    return [own, *sorted((rules | ({*there} if ANY in rules else set())) - {own, ANY})]


def _here(store: Store, name: str) -> Iterable[Known]:
    """Yield the stops' checkpoints of a domain, those that are still being stored, too."""
    if name not in store.names():
        return
    domain = store.open(name)
    for checkpoint_id in pending_ids(domain):  # before the others: one that is complete a moment later is among those
        with contextlib.suppress(IntegrityError):  # it was lost, which is reported elsewhere
            job = read_job(domain, checkpoint_id)
            if job is not None and job.belongings_bytes:
                yield Known(job.id, job.container, job.created, _NEXT)
    for manifest in domain.checkpoints():
        if manifest.belongings_bytes:
            yield _known(manifest)


def _known(manifest: StoredManifest) -> Known:
    return Known(manifest.id, manifest.container, manifest.created, manifest.sequence)


def _archived(name: str, wanted: str, after: str, settings: Settings, patience: Patience) -> list[Known]:
    """Return the checkpoints of a domain in archives of engines; for `latest` those that were made after a time.

    An archive was written after its checkpoint was made, so older files need not be read. A process of its own reads
    the others: a directory of another machine may hang, and compressed archives are read whole.
    """
    since_s = _seconds(after if wanted == LATEST else _time_of(wanted)) - _SKEW_S
    files = archive_files(settings, since_s)
    if not files:
        return []
    from ocihook.archive.restorable import find_archives  # takes long to load, and most nodes have none

    def read(paths: list[Path]) -> list[Known]:
        return [
            Known(archived.id, archived.origin.container, archived.origin.created, archive=archived.path)
            for archived in find_archives(paths)
            if _domain_of(archived.origin.container) == name and archived.origin.created >= after
        ]

    (outcome,) = call_each(read, [files], patience.within(ARCHIVES_S))
    if isinstance(outcome, TimeoutError):
        raise StoreError(
            f"the {len(files)} archives in {files[0].parent} were not read in {ARCHIVES_S:g} s",
            hint="remove those that nobody needs, or have engines write them without compression",
        ) from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _time_of(checkpoint_id: str) -> str:
    """Return when a checkpoint was made, by its id."""
    when = checkpoint_id.partition("-")[0]
    return f"{when[:4]}-{when[4:6]}-{when[6:11]}:{when[11:13]}:{when[13:]}"


def _seconds(when: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(when, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:  # none
        return 0.0


def _domain_of(container: ContainerRef) -> str:
    with contextlib.suppress(IdentificationError):  # an archive that does not say whose it is, is of no domain
        return domain_name(container)
    return ""


def _ask_remote(settings: Settings, name: str, patience: Patience, stops: str = "") -> _Remote:
    """Return the stops' checkpoints of a domain at the remote. A process of its own asks: that may take any time.

    Args:
        settings: the node's.
        name: of the domain.
        patience: with the engine's call.
        stops: a name of stops that may be announced, as `name_of` returns it; "": none matters.
    """
    from ocihook.checkpoints.remote_listing import RemoteCheckpoints  # takes long to load, as the next two

    def ask(location: str) -> _Remote:
        keyring = Keyring(KeySource.of(settings), name)
        announced = find_announced(open_remote(location, name), keyring, stops) if stops else []
        checkpoints = RemoteCheckpoints(location, keyring).all()
        return _Remote([_known(manifest) for manifest in checkpoints if manifest.belongings_bytes], announced)

    (outcome,) = call_each(ask, [settings.remote], patience.within(REMOTE_S))
    if isinstance(outcome, TimeoutError):
        raise RemoteError(f"{settings.remote} has not said in {REMOTE_S:g} s which checkpoints it has") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def fetch(
    chosen: Thin, settings: Settings, patience: Patience, *, with_belongings: bool = True
) -> tuple[Domain, StoredManifest]:
    """Have a checkpoint in this node's store, complete: pull it, or wait until it is stored; it stays in use.

    Without belongings, an engine's archive has what is not memory.

    Raises:
        OcihookError: if it cannot be had.
        OSError: from the file system, a full one included.
        GivenUp: if its caller has given up; what has been pulled is kept for a while.
    """
    store = Store.of(settings, patience)
    keep_in_use(store, chosen, is_pulled=bool(settings.remote))
    if not is_here(store, chosen):
        (outcome,) = call_each(partial(_bring, store, chosen.domain, settings.remote), [chosen.checkpoint_id], patience)
        if isinstance(outcome, Exception):
            raise outcome
    domain = Store.of(settings, patience.within(COMPLETE_S)).open(chosen.domain)
    if chosen.checkpoint_id not in domain.checkpoint_ids():
        from ocihook.checkpoints.complete import wait_complete

        wait_complete(domain, chosen.checkpoint_id, workers=store_workers(settings), settings=settings)
    domain.settle()  # the process that completed it may have been killed before it did
    manifest = domain.read(chosen.checkpoint_id)
    if with_belongings and not manifest.belongings_bytes:
        raise UnsupportedError(
            f"checkpoint {manifest.id} was made by an engine, whose archive has the rest of it",
            hint="have the archive in archive_dir, or name one that was made when its container was stopped",
        )
    return domain, manifest


def _bring(store: Store, domain: str, remote: str, checkpoint_id: str) -> None:
    """Pull a checkpoint, in a process of its own, as long as some of it arrives.

    Raises:
        OcihookError: as `pull`; also if nothing arrives for too long.
    """
    from ocihook.checkpoints.pulling import pull

    def give_up(*_: object) -> None:
        raise RemoteError(f"{remote} has sent nothing of checkpoint {checkpoint_id} for {STALL_S:g} s")

    def wait_on(_bytes: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, STALL_S)

    signal.signal(signal.SIGALRM, give_up)
    wait_on(0)
    pull(store, domain, checkpoint_id, remote, progress=wait_on)
    signal.setitimer(signal.ITIMER_REAL, 0)
