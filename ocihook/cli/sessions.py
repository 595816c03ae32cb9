"""`ocihook ps` and `ocihook recover`: what sessions do on this node, and undoing what a dead one left."""

import contextlib
import textwrap
import time
from pathlib import Path
from typing import Any

import click

from ocihook.checkpoints.listing import list_pending
from ocihook.cli.render import Seconds, format_bytes, json_option, print_json, print_table
from ocihook.cli.store import percent, reasons
from ocihook.config import Settings, load_settings
from ocihook.errors import AgentError, ConfigError, printable
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.runtime.restoring import recover_restores
from ocihook.session import history
from ocihook.session.journal import open_journals, read_journal
from ocihook.stages.recover import recover as recover_sessions
from ocihook.store.store import Store

_WIDTH = 100  # of what is printed, in characters


@click.command()
@click.option("--all", "-a", "show_all", is_flag=True, help="Also show the last ended sessions.")
@json_option
def ps(*, show_all: bool, as_json: bool) -> None:
    """Show the dumps and restores that are going on, and the checkpoints that are still being stored."""
    settings = load_settings()
    found = history.read(Path(settings.history_dir)) if show_all else []
    for path in open_journals():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            found.append({"id": path.stem, **read_journal(path)})
    pending = list_pending(Store.of(settings))
    if as_json:
        print_json({"sessions": found, "pending": [row._asdict() for row in pending]})
        return
    columns = ["SESSION", "BEGAN", "CONTAINER", "ACT", "STATE", "RAW", "STORED", "TIME"]
    print_table(columns, [_row(record) for record in found], width=_WIDTH, folded=("CONTAINER", "STATE"))
    for record in found:
        for sentence in filter(None, (history.error_of(record)[1], record["facts"].get("waits_for"))):
            _print_wrapped(f"{record['id']}: {sentence}")
    if pending:
        rows = [
            [row.id, row.container, row.domain, row.state, format_bytes(row.raw_bytes), percent(row)] for row in pending
        ]
        columns = ["CHECKPOINT", "CONTAINER", "DOMAIN", "STATE", "RAW", "STORED"]
        print_table(columns, rows, width=_WIDTH, folded=("CONTAINER", "DOMAIN"))
        for sentence in reasons(pending):
            _print_wrapped(sentence)


def _print_wrapped(sentence: str) -> None:
    click.echo("\n".join(textwrap.wrap(printable(sentence), _WIDTH, subsequent_indent="    ")))


def _row(record: dict[str, Any]) -> list[str]:
    facts = record["facts"]
    container = ContainerRef.from_json(record["container"]) if record["container"] else None
    return [
        record["id"],
        time.strftime("%m-%d %H:%M:%S", time.localtime(record["began"])),
        str(container or ""),
        history.act_of(record),
        _state(record),
        format_bytes(facts["raw_bytes"]) if "raw_bytes" in facts else "",
        format_bytes(facts["stored_bytes"]) if "stored_bytes" in facts else "",
        f"{record.get('ended', time.time()) - record['began']:.1f} s",
    ]


def _state(record: dict[str, Any]) -> str:
    if "waits_for" in record["facts"]:
        return "waits for room on a GPU"
    if code := history.error_of(record)[0]:
        return f"{history.outcome_of(record)}: {code}"
    if "ended" in record:
        return history.outcome_of(record)
    if Process(*record["criu"]).is_alive():
        stage = list(record["stages"])[-1:]
        return ", ".join([history.outcome_of(record), *stage])
    waiting = ", ".join(effect["kind"] for effect in record["effects"])
    return f"undoing: {waiting}" if waiting else "ending"


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError as error:  # not a reason to leave a node unrecovered
        click.echo(f"ocihook: {printable(str(error))}", err=True)
        return Settings()


@click.command()
@click.option(
    "--wait",
    "release_timeout_s",
    type=Seconds(),
    default=60.0,
    show_default=True,
    help="Seconds for a container to run.",
)
@json_option
def recover(*, release_timeout_s: float, as_json: bool) -> None:
    """Undo what sessions left whose agent was killed.

    Normally there is nothing to do: a restarted agent does this by itself. Exit status 7 if something could not be
    undone; what and why is shown, and the command can be repeated.
    """
    recoveries = recover_sessions(settings=_settings(), release_timeout_s=release_timeout_s) + recover_restores()
    if as_json:
        print_json({"sessions": [recovery._asdict() for recovery in recoveries]})
    elif not recoveries:
        click.echo("No session is open.")
    else:
        print_table(["SESSION", "CONTAINER", "OUTCOME", "DETAIL"], [list(recovery) for recovery in recoveries])
    failed = [recovery.session_id for recovery in recoveries if recovery.outcome == "failed"]
    if failed:
        raise AgentError(f"sessions {', '.join(failed)} could not be recovered")
