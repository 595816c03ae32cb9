"""`ocihook archive`: inspect, verify, pack, unpack and compare the checkpoint archives of engines."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ocihook.archive import compare, repack
from ocihook.cli.render import F, count_of, format_bytes, json_option, print_json, print_table, progress_bar
from ocihook.config import Policy, apply_annotations, load_settings
from ocihook.container.engine_archive import COMPRESSIONS, ArchiveFacts
from ocihook.errors import plain
from ocihook.memory.host_memory import left_to_criu
from ocihook.net.addresses import parse_pairs
from ocihook.net.note import decode_note
from ocihook.net.policy import IN_WORDS, Fate, fate, parse
from ocihook.net.relocation import CHANGED, relocate
from ocihook.stages.dump import pack_workers
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)
_workers = click.option(
    "--workers", type=count_of("workers"), default=0, help="Processes to use; default: one for each core."
)
_compress = click.option(
    "--compress",
    "compression",
    type=click.Choice(COMPRESSIONS),
    default="none",
    show_default=True,
    help="Of the output.",
)
_force = click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")


@click.group()
def archive() -> None:
    """Work with the checkpoint archives of podman, containerd and CRI-O (tar, also gzip or zstd)."""


@archive.command("list")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@json_option
def list_command(*, paths: tuple[Path, ...], as_json: bool) -> None:
    """List archives; a directory stands for the files in it (for instance /var/lib/kubelet/checkpoints)."""
    rows: list[dict[str, Any]] = []
    for path, facts in repack.list_archives(list(paths)):
        row: dict[str, Any] = {"path": str(path), "bytes": path.stat().st_size}
        if isinstance(facts, ArchiveFacts):
            container = facts.container
            row |= {"engine": container.engine, "container": str(container), "image": facts.image}
            row |= {
                "created": facts.created,
                "packed": repack.is_packed(facts),
                "thin": repack.is_thin(facts),
                "checkpoint": facts.checkpoint,
                "error": None,
            }
        else:
            row |= {
                "engine": "",
                "container": "",
                "image": "",
                "created": "",
                "packed": None,
                "thin": None,
                "checkpoint": "",
                "error": plain(facts),
            }
        rows.append(row)
    if as_json:
        print_json({"archives": rows})
        return
    cells = [
        [
            *(r["path"], r["engine"], r["container"], r["image"], r["created"]),
            *(format_bytes(r["bytes"]), _packed(r), r["checkpoint"]),
        ]
        for r in rows
    ]
    print_table(["ARCHIVE", "ENGINE", "CONTAINER", "IMAGE", "CREATED", "SIZE", "PACKED", "CHECKPOINT"], cells)


def _packed(row: dict[str, Any]) -> str:
    return f"error: {row['error']}" if row["error"] else "yes" if row["packed"] else "thin" if row["thin"] else "no"


@archive.command()
@click.argument("path", metavar="ARCHIVE", type=_FILE)
@json_option
def inspect(*, path: Path, as_json: bool) -> None:
    """Show whose checkpoint an archive is, its processes and their memory, and how it was dumped."""
    inspection = repack.inspect_archive(path)
    value = {**repack.to_json(inspection), "memory": _memory(inspection), "sockets": _sockets(inspection)}
    if as_json:
        print_json({"archive": str(path), **value})
        return
    container, stats, manifest = value["container"], value["stats"], value["manifest"]
    rows = [
        ["archive", f"{path} ({format_bytes(value['archive_bytes'])})"],
        ["engine", container["engine"]],
        ["container", f"{container['name']} {container['id']}".strip()],
        ["pod", f"{container['pod_namespace']}/{container['pod_name']}" if container["pod_name"] else ""],
        ["image", value["image"]],
        ["runtime", value["runtime"]],
        ["created", value["created"]],
        ["memory images", f"{format_bytes(value['raw_bytes'])} raw, {format_bytes(value['stored_bytes'])} stored"],
        ["packed", f"by {manifest['writer']} at {manifest['created']}" if manifest else "no"],
        [
            "in the store",
            "checkpoint {checkpoint_id} of domain {domain}".format(**value["thin"]) if value["thin"] else "",
        ],
    ]
    if manifest:
        rows.append(
            [
                "dumped on",
                ", ".join(f"{key} {text}" for key, text in manifest["host"].items() if text and key != "cpu_features"),
            ]
        )
    if value["gpu"]:
        names = ", ".join(f"{device['name']} {device['uuid']}" for device in value["gpu"]["devices"])
        rows.append(["GPUs", f"{names}; {format_bytes(value['gpu']['memory_bytes'])}, driver {value['gpu']['driver']}"])
    if stats:
        rows.append(["frozen", f"{stats['frozen_us'] / 1e6:.3f} s (CRIU's own measure)"])
    print_table(["", ""], [row for row in rows if row[1]])
    processes = [[p["pid"], p["ppid"], p["threads"], format_bytes(p["memory_bytes"])] for p in value["processes"]]
    print_table(["PID", "PARENT", "THREADS", "MEMORY"], processes)
    memory = [[m["pid"], format_bytes(m["direct_bytes"]), m["reason"]] for m in value["memory"]]
    print_table(["PID", "PAST CRIU", "WHY NOT"], memory)
    print_table(["SOCKET", "IN A RESTORE"], [[s["socket"], IN_WORDS[Fate(s["fate"])]] for s in value["sockets"]])


def _memory(inspection: repack.Inspection) -> list[dict[str, Any]]:
    """Return how much memory of each process a restore on this node will write past CRIU, or why none."""
    policy, workers = _policy(inspection), pack_workers(load_settings())
    rows = []
    for way in inspection.ways:
        reason = way.reason or left_to_criu(policy, workers, is_packed=way.is_packed)
        size = way.cut.direct.parts.size_bytes if way.cut and not reason else 0
        rows.append({"pid": way.pid, "direct_bytes": size, "reason": reason})
    return rows


def _policy(inspection: repack.Inspection) -> Policy:
    facts = inspection.facts
    policy, *_ = apply_annotations(load_settings(), facts.annotations, in_pod=facts.container.is_in_pod)
    return policy


def _sockets(inspection: repack.Inspection) -> list[dict[str, str]]:
    """Return what a restore on this node will do with each socket that has an address."""
    policy = _policy(inspection)
    note = decode_note(inspection.network) if inspection.network else None
    own = note.own if note else frozenset(sock.local for sock in inspection.sockets)
    gang = parse_pairs(filter(None, policy.address_map.split(",")), "address_map")
    fates = [(sock, fate(sock, parse(policy.tcp, "tcp"), own, gang.keys())) for sock in inspection.sockets]
    shown = [(sock, what) for sock, what in fates if sock.is_connection or what is not Fate.STAYS]
    return [{"socket": str(sock), "fate": str(what)} for sock, what in shown]


@archive.command()
@click.argument("path", metavar="ARCHIVE", type=_FILE)
@_workers
@json_option
def verify(*, path: Path, workers: int, as_json: bool) -> None:
    """Read an archive to its end and check every checksum and size in it. Exit status 4: it is damaged."""
    with progress_bar("verifying", lambda: repack.memory_bytes(path)) as progress:
        store = Store.of(load_settings())
        manifest = repack.verify_archive(path, store=store, workers=_count(workers), progress=progress)
    if as_json:
        print_json({"archive": str(path), "ok": True, "packed": manifest is not None})
    elif manifest is None:
        click.echo(f"{path}: not packed; its images are complete, their content has no checksums")
    elif isinstance(manifest, StoredManifest):
        click.echo(
            f"{path}: {format_bytes(manifest.raw_bytes)} of memory in checkpoint {manifest.id} of domain "
            f"{manifest.domain}, every byte right"
        )
    else:
        click.echo(
            f"{path}: {len(manifest.packs)} packs, {format_bytes(manifest.raw_bytes)} of memory, every checksum right"
        )


def _conversion(command: F) -> F:
    """Give a command the arguments and options of pack and unpack."""
    source, output = click.argument("source", type=_FILE), click.argument("output", type=_OUTPUT)
    for decorate in (json_option, _workers, _force, _compress, output, source):
        command = decorate(command)
    return command


@archive.command()
@_conversion
@click.option("--store", "into_store", is_flag=True, help="Put the memory into this node's store: OUTPUT is thin then.")
def pack(*, source: Path, output: Path, as_json: bool, into_store: bool, **options: Any) -> None:  # noqa: ANN401 - passed on
    """Write OUTPUT, a packed archive, from SOURCE, a plain or thin one."""
    store = Store.of(load_settings())
    run = partial(repack.pack_archive, into_store=store if into_store else None, store=store)
    _convert("packing", run, source, output, as_json=as_json, **options)


@archive.command()
@_conversion
def unpack(*, source: Path, output: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401 - passed on
    """Write OUTPUT, a plain archive that restores on a node without ocihook, from SOURCE, a packed or thin one."""
    store = Store.of(load_settings())
    _convert("unpacking", partial(repack.unpack_archive, store=store), source, output, as_json=as_json, **options)


def _convert(
    label: str,
    run: Callable[..., object],
    source: Path,
    output: Path,
    *,
    compression: str,
    force: bool,
    workers: int,
    as_json: bool,
) -> None:
    before = source.stat().st_size
    with progress_bar(label, lambda: repack.memory_bytes(source)) as progress:
        run(source, output, compression=compression, force=force, workers=_count(workers), progress=progress)
    after = output.stat().st_size
    if as_json:
        print_json({"source": str(source), "output": str(output), "source_bytes": before, "output_bytes": after})
    else:
        click.echo(f"{output}: {format_bytes(after)}, from {format_bytes(before)}")


@archive.command()
@click.argument("source", metavar="ARCHIVE", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=_OUTPUT, required=False)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    required=True,
    metavar="OLD=NEW",
    help="What becomes of an address: of the container, or of one that it stays connected to. May be given often.",
)
@click.option("--close-others", is_flag=True, help="End connections to addresses that are not named.")
@_compress
@_force
@json_option
def move(
    *,
    source: Path,
    output: Path | None,
    addresses: tuple[str, ...],
    close_others: bool,
    compression: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write OUTPUT, the same checkpoint at other addresses; or change an image directory, where it is.

    A restore on a node with ocihook does that by itself. This is for one without it, and where nobody may write into
    CRIU's memory.
    """
    pairs = parse_pairs(addresses, "--address")
    plans = []

    def change(directory: Path) -> tuple[str, ...]:
        plans.append(relocate(directory, pairs, close_others=close_others))
        return tuple(name for name in CHANGED if (directory / name).exists())

    if source.is_dir() == (output is not None):
        raise click.UsageError("an archive needs an OUTPUT, an image directory has none")
    if output is None:
        change(source)
    else:
        repack.replace_images(source, output, change, compression=compression, force=force)
    (plan,) = plans
    moved, closed = len(plan.moves) - len(plan.closed), len(plan.closed)
    if as_json:
        print_json({"source": str(source), "output": str(output or source), "moved": moved, "closed": closed})
    else:
        click.echo(f"{output or source}: {moved} sockets have moved, {closed} connections end")


@archive.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@json_option
def diff(*, first: Path, second: Path, as_json: bool) -> None:
    """Compare two archives: their images, and the memory of each process page by page. Exit status 1: they differ."""
    with progress_bar("comparing", lambda: repack.memory_bytes(first) + repack.memory_bytes(second)) as progress:
        result = compare.diff_archives(first, second, progress=progress)
    if as_json:
        images = [{"name": name, "state": state} for name, state in result.images]
        print_json({"images": images, "memory": [m._asdict() for m in result.memory]})
    else:
        print_table(["IMAGE", "STATE"], [[name, state] for name, state in result.images if state != "same"])
        columns = ["MEMORY", "SAME", "CHANGED", "ONLY IN FIRST", "ONLY IN SECOND"]
        print_table(columns, [[m.name, *m[1:]] for m in result.memory])
    is_same = all(state == "same" for _, state in result.images) and not any(any(m[2:]) for m in result.memory)
    if not is_same:
        raise click.exceptions.Exit(1)


def _count(workers: int) -> int:
    return workers or len(os.sched_getaffinity(0))
