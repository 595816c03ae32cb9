"""`ocihook store` and `ocihook wait`: the checkpoints of this node's store, and the space that they take."""

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from ocihook.archive.repack import read_thin_archive
from ocihook.checkpoints import complete, listing, maintenance, pulling, pushing, remote_listing, transfer
from ocihook.checkpoints.prune import Keep, archive_bytes, prune_archives, stored_bytes
from ocihook.checkpoints.prune import prune as prune_store
from ocihook.cli.render import Seconds, count_of, format_bytes, json_option, print_json, print_table, progress_bar
from ocihook.config import RANGES, Settings, load_settings
from ocihook.errors import ConfigError, IntegrityError, KeyMissing, StoreError, printable
from ocihook.linux.patience import Patience
from ocihook.packs.cipher import Keyring
from ocihook.runtime import claims
from ocihook.store.pushes import Push
from ocihook.store.store import Store, store_workers
from ocihook.store.stored_manifest import CHECKPOINT_ID

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_GANG_EPOCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+(?:/[0-9a-f]*)?")
_UNITS_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _store() -> Store:
    return Store.of(load_settings())


@click.group()
def store() -> None:
    """Work with the checkpoints of this node's content store (mode `store`)."""


@store.command()
@json_option
def status(*, as_json: bool) -> None:
    """Show what the store takes, by domain."""
    settings = load_settings()
    found = listing.usage(Store.of(settings))
    waiting = pushing.due(Store.of(settings))
    total, archives = stored_bytes(Store.of(settings)), _archive_bytes(settings)
    if as_json:
        print_json(
            {
                "domains": {name: usage._asdict() for name, usage in found.items()},
                "pushes": [{"domain": name, **push._asdict()} for name, push in waiting],
                "total_bytes": total,
                "max_bytes": settings.max_store_bytes,
                "archive_bytes": archives,
                "max_archive_bytes": settings.max_archive_bytes,
            }
        )
        return
    rows = [
        [
            *(name, u.checkpoints, *map(format_bytes, (u.raw_bytes, u.stored_bytes, u.index_bytes, u.rubbish_bytes))),
            sum(where == name for where, _ in waiting),
        ]
        for name, u in found.items()
    ]
    print_table(["DOMAIN", "CHECKPOINTS", "RAW", "STORED", "INDEX", "RUBBISH", "TO PUSH"], rows)
    _print_bound("the store", total, "max_store_bytes", settings.max_store_bytes)
    _print_bound(settings.archive_dir, archives, "max_archive_bytes", settings.max_archive_bytes)
    for name, push in waiting:
        if push.attempts:
            click.echo(f"{push.checkpoint_id} in domain {name} was not pushed: {push.error}; {_attempts(push)}")


def _archive_bytes(settings: Settings) -> int:
    return archive_bytes(Path(settings.archive_dir)) if settings.archive_dir else 0


def _print_bound(what: str, size: int, key: str, bound: int) -> None:
    if 0 < bound < size:
        click.echo(
            f"{what} takes {format_bytes(size)}, {key} is {format_bytes(bound)}: `ocihook store prune` removes the "
            "oldest; what is pinned, in use or the newest stays"
        )


def _attempts(push: Push) -> str:
    wait_s = max(0, round(push.next_s - time.time()))
    return f"{push.attempts} attempts, the next in {wait_s // 60} min {wait_s % 60} s"


def _location(given: str | None) -> str:
    """Return the remote that is meant, by default the one configured."""
    location = given or load_settings().remote
    if not location:
        raise ConfigError("no remote is configured", hint="set [agent] remote, or name one")
    return location


_remote_option = click.option(
    "--remote", is_flag=False, flag_value="", metavar="[REMOTE]", help="Of the remote configured, or of REMOTE."
)


@store.command("list")
@_remote_option
@json_option
def list_command(*, remote: str | None, as_json: bool) -> None:
    """List checkpoints: complete ones, those that are still being read or stored, and what was lost."""
    found = _store()
    if remote is not None:
        _print_listed(remote_listing.list_remote(_location(remote), found.keys), as_json=as_json)
        return
    try:
        rows = listing.list_checkpoints(found)
    except (IntegrityError, KeyMissing):  # what is pending is still listed
        _print_listed(listing.list_pending(found), as_json=as_json)
        raise
    _print_listed(rows, as_json=as_json)


def _print_listed(rows: list[listing.Listed], *, as_json: bool) -> None:
    if as_json:
        values = [{**row._asdict(), "push": row.push and row.push._asdict()} for row in rows]
        print_json({"checkpoints": values})
        return
    cells = [
        [
            *(row.domain, row.id, _whose(row), row.created, _state(row), format_bytes(row.raw_bytes), _added(row)),
            _gang(row),
        ]
        for row in rows
    ]
    print_table(["DOMAIN", "CHECKPOINT", "CONTAINER", "CREATED", "STATE", "RAW", "ADDED", "GANG"], cells)
    for sentence in reasons(rows):
        click.echo(sentence)


def _whose(row: listing.Listed) -> str:
    """Return the container, the member whose newest checkpoint `latest` means, the owner of its pod, and its uid."""
    named = (("member", row.member), ("owner", row.owner), ("uid", row.owner_uid))
    return "\n".join([row.container, *(f"{word} {name}" for word, name in named if name)])


def reasons(rows: list[listing.Listed]) -> Iterator[str]:
    """Yield why checkpoints are not complete, and what to do about it."""
    for row in rows:
        if row.reason:
            tried = f" ({row.attempts} attempts)" if row.attempts > 1 else ""
            remedy = f"{row.remedy[0].upper()}{row.remedy[1:]}"
            yield printable(f"{row.id} is {row.state}{tried}: {row.reason.rstrip('.')}. {remedy}")


def _state(row: listing.Listed) -> str:
    if row.state == "pending":
        return f"pending, {percent(row)}"
    if row.state == "reading":
        return "its snapshot is being read"
    marks = [word for word, is_so in (("pinned", row.is_pinned), ("in use", row.is_used)) if is_so]
    if row.push:
        marks.append(f"not pushed, {_attempts(row.push)}" if row.push.attempts else "to be pushed")
    return ", ".join([row.state, *marks])


def _gang(row: listing.Listed) -> str:
    name = "/".join(row.gang.split("/")[:2])
    lacks, elsewhere = row.gang_missing - row.gang_elsewhere, row.gang_elsewhere
    return ", ".join(
        [name, *([f"lacks {lacks}"] if lacks else []), *([f"{elsewhere} on other nodes"] if elsewhere else [])]
    )


def percent(row: listing.Listed) -> str:
    """Return how far a pending checkpoint is."""
    return f"{100 * row.done_bytes // max(1, row.raw_bytes)} %"


def _added(row: listing.Listed) -> str:
    return format_bytes(row.added_bytes) if row.state == "complete" else ""


@store.command()
@click.argument("checkpoint")
def pin(*, checkpoint: str) -> None:
    """Keep CHECKPOINT in this node's store, whatever a prune is to remove, until `unpin`."""
    listing.pin(_store(), checkpoint, is_pinned=True)


@store.command()
@click.argument("checkpoint")
def unpin(*, checkpoint: str) -> None:
    """Undo `pin`: a prune may remove CHECKPOINT again."""
    listing.pin(_store(), checkpoint, is_pinned=False)


@store.command()
@click.option("--read-data", is_flag=True, help="Read every byte, not only what leads to it.")
@json_option
def verify(*, read_data: bool, as_json: bool) -> None:
    """Check every checkpoint. Exit status 4: something is damaged; the output says what."""
    found = _store()

    def total() -> int:
        return sum(row.raw_bytes for row in listing.list_checkpoints(found) if row.state == "complete")

    with progress_bar("verifying", total) as progress:
        wrong = maintenance.verify(found, read_data=read_data, progress=progress)
    unfinished = [] if wrong else listing.unfinished_epochs(found)
    if as_json:
        print_json({"ok": not wrong, "wrong": wrong, "incomplete": unfinished})
    else:
        for sentence in (*wrong, *unfinished):
            click.echo(sentence)
    if wrong:
        raise IntegrityError(f"the store in {found.root} is damaged, see above")
    if not as_json:
        click.echo(f"{found.root}: {'every byte' if read_data else 'all records'} right")


@store.command()
@click.option(
    "--keep-last",
    metavar="N",
    type=count_of("keep_last"),
    help="Keep the newest N checkpoints of each container, by its owner.",
)
@click.option("--keep-within", metavar="TIME", help="Keep what is younger, as in 36h or 14d.")
@click.option("--max-size", metavar="SIZE", help="Then remove the oldest of all until the rest takes no more: 500G.")
@click.option(
    "--archives",
    "archive_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Keep the same of the archives in a directory: /var/lib/kubelet/checkpoints.",
)
@_remote_option
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@json_option
def prune(
    *,
    keep_last: int | None,
    keep_within: str | None,
    max_size: str | None,
    archive_dir: Path | None,
    remote: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old checkpoints, and whatever no checkpoint needs.

    Without options as the configuration says, by default only the latter. The newest checkpoint of a container stays,
    unless there is too much for --max-size: then only the newest of all does. What is pinned or in use always stays.
    """
    settings = load_settings()
    keep = Keep.of(settings) if remote is None else Keep.of_remote(settings)
    if keep_last is not None or keep_within is not None or max_size is not None:
        within_s = 0.0 if keep_within is None else _number(keep_within, _UNITS_S, "keep_within_s")
        max_bytes = 0 if max_size is None else _number(max_size, _UNITS_BYTES, "max_store_bytes")
        keep = Keep(keep_last or 0, within_s, int(max_bytes))
    archives = archive_dir or (Path(settings.archive_dir) if settings.archive_dir else None)
    if remote is not None:
        if keep.max_bytes:
            raise click.BadParameter("--max-size is of this node's store; a remote has no bound")
        done = remote_listing.prune_remote(_location(remote), keep, _store().keys, dry_run=dry_run)
    else:
        found, done = Store.of(settings), []
        if archives:  # first: the store knows whose snapshots were lost
            bound = settings.max_archive_bytes if max_size is None else keep.max_bytes
            done = [prune_archives(archives, keep._replace(max_bytes=bound), found, dry_run=dry_run)]
        done = [*prune_store(found, keep, dry_run=dry_run), *done]
    if as_json:
        print_json({"dry_run": dry_run, "pruned": [pruned._asdict() for pruned in done]})
        return
    for pruned in done:
        for name in pruned.removed:
            click.echo(f"{pruned.where}: {'would remove' if dry_run else 'removed'} {name}")
        if not dry_run:
            click.echo(f"{pruned.where}: freed {format_bytes(pruned.freed_bytes)}")


def _number(text: str, units: dict[str, int], key: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]?)", text)
    if not match or match[2] not in units:
        raise click.BadParameter(f"{text!r} is not a number with one of the units {', '.join(filter(None, units))}")
    number = float(match[1]) * units[match[2]]
    if number > RANGES[key][1]:
        raise click.BadParameter(f"{text!r} is more than can be")
    return number


@store.command()
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT|GANG/EPOCH]...")
@click.option("--all", "is_all", is_flag=True, help="All complete checkpoints that the remote does not have.")
@click.option("--to", "location", metavar="REMOTE", help="By default the remote configured.")
@json_option
def push(*, checkpoints: tuple[str, ...], is_all: bool, location: str | None, as_json: bool) -> None:
    """Send checkpoints to a remote. What it has is not sent again.

    Without CHECKPOINT or --all, what is to be pushed by policy and has not been. GANG/EPOCH stands for all checkpoints
    of one dump of a gang; its other nodes push theirs, and it is there once all are.
    """
    found, location = _store(), _location(location)
    if is_all:
        chosen = [(row.domain, row.id) for row in listing.list_checkpoints(found) if row.state == "complete"]
    elif checkpoints:
        chosen = [each for name in checkpoints for each in _named(found, name)]
    else:
        chosen = [(name, waiting.checkpoint_id) for name, waiting in pushing.due(found)]
    moved = []
    for name, checkpoint_id in chosen:
        domain = found.open(name)
        total = partial(pushing.pack_bytes, domain, checkpoint_id)
        with progress_bar(f"pushing {checkpoint_id}", total) as progress:
            moved.append(pushing.push(domain, checkpoint_id, location, progress=progress))
        domain.pushes.end(checkpoint_id)
    _print_moved(moved, "sent to", location, as_json=as_json)


def _named(found: Store, name: str) -> list[tuple[str, str]]:
    """Return domains and ids of what is named by the id of a checkpoint, or as GANG/EPOCH."""
    if "/" not in name:
        return [(listing.find(found, name).name, name)]
    domain, ids = listing.find_gang(found, name)
    return [(domain.name, checkpoint_id) for checkpoint_id in ids]


@store.command()
@click.argument("what", metavar="CHECKPOINT|ARCHIVE|GANG/EPOCH")
@click.option("--from", "location", metavar="REMOTE", help="By default the remote configured.")
@click.option("--domain", metavar="DOMAIN", help="Where it is; by default it is looked for.")
@json_option
def pull(*, what: str, location: str | None, domain: str | None, as_json: bool) -> None:
    """Fetch a checkpoint from a remote, by its id or by the thin archive that stands for it. All of it is verified.

    GANG/EPOCH stands for all checkpoints of one dump of a gang: they are fetched if all are there.
    """
    found, location = _store(), _location(location)
    if CHECKPOINT_ID.fullmatch(what):
        name, ids = domain or remote_listing.find_remote(location, what), [what]
    elif _GANG_EPOCH.fullmatch(what) and not Path(what).exists():
        name, ids = remote_listing.find_remote_gang(location, found.keys, what, domain)
    else:
        thin = read_thin_archive(Path(what))
        name, ids = thin.domain, [thin.checkpoint_id]
    moved = []
    for checkpoint_id in ids:
        total = partial(remote_listing.remote_bytes, location, Keyring(found.keys, name), checkpoint_id)
        with progress_bar(f"pulling {checkpoint_id}", total) as progress:
            moved.append(pulling.pull(found, name, checkpoint_id, location, progress=progress))
    _print_moved(moved, "fetched from", location, as_json=as_json)


def _print_moved(rows: list[transfer.Moved], how: str, location: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"remote": location, "checkpoints": [row._asdict() for row in rows]})
        return
    for row in rows:
        click.echo(
            f"{row.checkpoint_id}: {format_bytes(row.moved_bytes)} {how} {location}, of {format_bytes(row.pack_bytes)} "
            f"that it is stored in; {format_bytes(row.raw_bytes)} of memory"
        )


@store.command()
@click.argument("checkpoint", required=False)
@click.option("--node", metavar="NAME", help="All claims and announced stops of a node that is lost.")
@json_option
def release(*, checkpoint: str | None, node: str | None, as_json: bool) -> None:
    """Remove the claims of CHECKPOINT, or of a lost node, at the remote, so that a container can resume from it now.

    Two containers must not run from one checkpoint: make sure that the other one has ended, or its node is off.
    """
    if bool(checkpoint) == bool(node):
        raise click.UsageError("name a CHECKPOINT, or --node NAME")
    if checkpoint and not CHECKPOINT_ID.fullmatch(checkpoint):
        raise click.BadParameter(f"{checkpoint!r} is not the id of a checkpoint")
    settings = load_settings()
    location = _location(None)
    released = claims.release(settings, checkpoint_id=checkpoint or "", node=node or "")
    if as_json:
        print_json({"remote": location, "released": [row._asdict() for row in released]})
        return
    for row in released:
        whose = f", of container {row.container} on node {row.host}" if row.host else ""
        what = "the announcement of a stop" if row.of.startswith(claims.STOP_PREFIX) else f"the claim of {row.of}"
        click.echo(printable(f"removed {what} in domain {row.domain}{whose}"))
    if not released:
        click.echo(f"{location} has no claim of {checkpoint or f'node {node}'}")


@store.command()
@json_option
def rekey(*, as_json: bool) -> None:
    """Encrypt everything with the newest key: after a new one was put first, or where nothing was encrypted.

    Checkpoints stay as they are. The old keys are needed until this has ended, and for what was pushed before.
    """
    done = maintenance.rekey(_store())
    if as_json:
        print_json({"domains": {name: {"packs": packs} for name, packs in done.items()}})
        return
    for name, packs in done.items():
        click.echo(f"domain {name}: wrote {packs} packs again; all is encrypted with the newest key")


@store.command()
@json_option
def repair(*, as_json: bool) -> None:
    """Rebuild the index from the packs. Needed after a message that says so; no checkpoint is changed."""
    done = maintenance.repair(_store())
    if as_json:
        print_json({"done": done})
    for sentence in () if as_json else done:
        click.echo(sentence)


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--timeout", "timeout_s", type=Seconds(), help="Seconds to wait for each; default: as long as it takes.")
@json_option
def wait(*, checkpoint: str | None, timeout_s: float | None, as_json: bool) -> None:
    """Wait until CHECKPOINT, or every one that is pending, is complete in the store.

    What no other process is storing is completed here.
    """
    settings = load_settings()
    found, workers = Store.of(settings), store_workers(settings)
    began = time.monotonic()
    ids = [checkpoint] if checkpoint else [row.id for row in listing.list_pending(found) if row.is_on_its_way]
    done = []
    for checkpoint_id in ids:
        try:
            domain = listing.find(found._replace(patience=Patience(timeout_s=timeout_s)), checkpoint_id)
        except StoreError:
            if checkpoint:
                raise
            continue  # pruned meanwhile
        manifest = complete.wait_complete(domain, checkpoint_id, workers=workers, settings=settings)
        done.append(manifest)
    complete.finish_removals(found._replace(patience=Patience(timeout_s=timeout_s)), workers)
    if as_json:
        rows = [{"id": m.id, "domain": m.domain, "added_bytes": m.added_bytes} for m in done]
        print_json({"complete": rows, "seconds": time.monotonic() - began})
        return
    for manifest in done:
        click.echo(f"{manifest.id}: complete, {format_bytes(manifest.added_bytes)} added for {manifest.container}")
