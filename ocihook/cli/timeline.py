"""`ocihook timeline`: what took how long in a dump or restore, as a table, JSON, a trace, or a page with a picture."""

import contextlib
import json
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ocihook.cli.render import format_bytes, json_option, print_json, print_table
from ocihook.config import load_settings
from ocihook.errors import OcihookError, printable
from ocihook.linux.files import replace_file
from ocihook.session import history
from ocihook.session.journal import open_journals, read_journal
from ocihook.session.timeline import Bar, Timeline, chrome_trace, lay_out, lay_out_gang, merge

_WIDTH = 32  # of the bars in the table


def _complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the sessions and checkpoints that the history has, the newest first."""
    records = []
    with contextlib.suppress(OcihookError, OSError):  # an error must not appear while a line is typed
        records = [r for r in history.read(Path(load_settings().history_dir)) if history.act_of(r) != "store"]
    names = [(str(n), history.act_of(r)) for r in records[::-1] for n in (r["id"], r["facts"].get("checkpoint")) if n]
    return [CompletionItem(name, help=act) for name, act in dict(names).items() if name.startswith(incomplete)]


@click.command()
@click.argument("name", metavar="[CHECKPOINT|SESSION]", required=False, shell_complete=_complete)
@click.option("--chrome", is_flag=True, help="Print a trace for chrome://tracing, Perfetto or speedscope.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write one page with a picture that needs nothing else.",
)
@click.option("--gang", "gang_name", metavar="GANG", help="Show all members of a gang that are on this node.")
@click.option(
    "--add",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Members on another node: what `timeline --gang GANG --json` has printed there. May be repeated.",
)
@json_option
def timeline(
    *,
    name: str | None,
    chrome: bool,
    html_file: Path | None,
    gang_name: str | None,
    files: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Show what took how long in a dump or restore: stages, phases, CRIU's parts, each process, GPU and worker.

    Of a checkpoint in the store, its dump is shown. A container's name, NAMESPACE/POD/NAME or id means its newest
    session; without a name the node's newest is shown. Of a gang ([NAMESPACE/]NAME) it is the newest dump or restore.
    """
    if chrome and as_json:
        raise click.UsageError("--chrome and --json cannot go together")
    if gang_name and name:
        raise click.UsageError("a session and --gang cannot go together")
    if files and not gang_name:
        raise click.UsageError("--add goes with --gang")
    kept = history.read(Path(load_settings().history_dir))
    records = kept + _open_sessions()
    if gang_name:
        found = merge([lay_out_gang(records, gang_name), *map(_read, files)])
    else:
        found = lay_out(history.find(records, name), kept)
    if html_file is not None:
        from ocihook.cli.timeline_page import page

        replace_file(html_file, page(found).encode(), mode=0o644, durable=False)
    if chrome:
        click.echo(json.dumps(chrome_trace(found)))
    elif as_json:
        print_json(found.to_json())
    elif html_file is None:
        _print(found)


def _read(path: Path) -> Timeline:
    """Read what this command has printed on another node."""
    try:
        return Timeline.from_json(json.loads(path.read_bytes()))
    except (ValueError, TypeError, LookupError) as error:
        raise click.BadParameter(f"{path} is no timeline as JSON: {error!r}") from error


def _open_sessions() -> list[dict[str, Any]]:
    found = []
    for path in open_journals():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            found.append({"id": path.stem, **read_journal(path)})
    return found


def _print(found: Timeline) -> None:
    facts = [f"session {found.session}", f"{found.seconds:.3f} s", found.outcome]
    facts += [f"checkpoint {found.checkpoint}"] if found.checkpoint else []
    click.echo(printable(f"{found.act} of {found.who}: {', '.join(facts)}"))
    if found.error:
        click.echo(printable(found.error))
    rows, lane = [], ""
    for bar in found.bars:
        rows.append(["" if bar.lane == lane else bar.lane, *_cells(bar, found.seconds)])
        lane = bar.lane
    print_table(["WHO", "WHAT", "START", "DURATION", "BYTES", "RATE", ""], rows)


def _cells(bar: Bar, seconds: float) -> list[str]:
    rate = bar.bytes_per_s
    return [
        bar.name + (" (failed)" if bar.failed else ""),
        f"{'~' if bar.is_estimated else ''}{bar.start_s:.3f} s",
        f"{bar.seconds:.3f} s",
        format_bytes(bar.bytes) if bar.bytes else "",
        f"{format_bytes(int(rate))}/s" if rate else "",
        _drawn(bar, seconds),
    ]


def _drawn(bar: Bar, seconds: float) -> str:
    per_cell = max(seconds, 1e-6) / _WIDTH
    first = min(_WIDTH - 1, int(bar.start_s / per_cell))
    last = min(_WIDTH, max(first + 1, round((bar.start_s + bar.seconds) / per_cell)))
    return "·" * first + "█" * (last - first) + "·" * (_WIDTH - last)
