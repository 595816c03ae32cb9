"""How results look: tables for people, JSON for programs, a progress bar for long work on a terminal."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import click

from ocihook.config import RANGES
from ocihook.errors import printable

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA_VERSION = 1


def json_option(command: F) -> F:
    """Give a command `--json`, passed to it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


class Seconds(click.FloatRange):
    """A time to wait: a number of seconds, at most a year."""

    def __init__(self) -> None:
        super().__init__(min=0, max=366 * 86400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Return the number; "nan" is refused, though it is a float."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number


def count_of(key: str) -> click.IntRange:
    """Return the type of an option that overrides an integer setting."""
    low, high = RANGES[key]
    return click.IntRange(int(low), int(high))


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))


def print_error(code: str, text: str, remedy: str, exit_status: int, *, as_json: bool) -> None:
    """Print on stderr what went wrong: a line for people, or one JSON object on one line for programs.

    stdout is left to results, of which there may be some before an error.
    """
    if as_json:
        error = {"code": code, "text": text, "remedy": remedy, "exit_status": exit_status}
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}), err=True)
        return
    sentence = f"{text.rstrip('.')}. {remedy[0].upper()}{remedy[1:]}" if remedy else text
    click.echo(f"ocihook: error: {printable(sentence)}", err=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, width: int = 0, folded: Collection[str] | None = None
) -> None:
    """Print rows under column names; without names, just the rows.

    Args:
        columns: their names, or empty ones.
        rows: of cells.
        width: in characters, at most; 0: the terminal's, or 160 where there is none.
        folded: names of the columns that may take several lines; None: all.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None if any(columns) else box.SIMPLE, show_header=any(columns), pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=folded is not None and name not in folded)
    for row in rows:
        table.add_row(*(Text("\n".join(map(printable, str(cell).split("\n")))) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table, width=min(width, console.width) if width else None)


@contextlib.contextmanager
def progress_bar(label: str, total_bytes: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work on a terminal; yield a function to call with each number of bytes done.

    Only on a terminal is the total computed, which may take a while.
    """
    if not sys.stderr.isatty():
        yield lambda _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total_bytes())
        yield lambda size: progress.update(task, advance=size)


def format_bytes(size: int) -> str:
    """Return a size for people."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
