"""`ocihook gang` and `ocihook coordinator`: containers that are checkpointed and restored together."""

import socket
from pathlib import Path
from typing import Any

import click

from ocihook.cli.render import json_option, print_json, print_table
from ocihook.config import load_settings
from ocihook.errors import ConfigError, printable
from ocihook.gang.certificates import server_tls
from ocihook.gang.coordinator import Coordinator
from ocihook.gang.link import Link, unreachable
from ocihook.gang.server import serve
from ocihook.linux.patience import Patience
from ocihook.node import gangs

_STATUS_S = 10.0
_podman = click.option("--podman", default="podman", show_default=True, help="The command, with global options.")


@click.group()
def gang() -> None:
    """Checkpoint and restore the containers of one job together: all of them or none."""


@gang.command()
@json_option
def status(*, as_json: bool) -> None:
    """Show the gangs that the coordinator knows: attempts, how far their members are, and complete epochs."""
    settings = load_settings()
    link = Link.of(settings)
    try:
        found = link.ask(None, Patience(timeout_s=_STATUS_S))["gangs"]
    except OSError as error:
        if link.url or Path(link.socket).exists():
            raise unreachable(link, error) from error
        found = Coordinator(Path(settings.gang_dir)).status()  # no agent runs here, so there is no attempt
    if as_json:
        print_json({"gangs": found})
        return
    print_table(["NAMESPACE", "GANG", "EPOCHS", "ATTEMPT", "STATE", "MEMBERS"], [_row(row) for row in found])
    for row in found:
        if reason := row.get("attempt", {}).get("reason"):
            click.echo(printable(f"{row['gang']}: attempt {row['attempt']['epoch']}: {reason}"))


def _row(found: dict[str, Any]) -> list[str]:
    attempt = found.get("attempt", {})
    members = ", ".join(f"{name} {phase}" for name, phase in attempt.get("members", {}).items())
    what = f"{attempt['act']} {attempt['epoch']}" if attempt else ""
    epochs = " ".join(map(str, found["epochs"]))
    return [found["namespace"], found["gang"], epochs, what, attempt.get("state", ""), members]


@gang.command()
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--leave-running", is_flag=True, help="Let the containers run on.")
@_podman
def checkpoint(*, name: str, directory: Path, leave_running: bool, podman: str) -> None:
    """Checkpoint all containers of a gang that podman runs here into archives in a new DIRECTORY."""
    _tell(gangs.checkpoint(name, directory.absolute(), leave_running=leave_running, podman=podman), "checkpointed")


@gang.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_podman
def restore(*, directory: Path, podman: str) -> None:
    """Restore all containers of a gang with podman from the archives in a DIRECTORY."""
    _tell(gangs.restore(directory.absolute(), podman=podman), "restored")


@gang.command()
@click.argument("archives", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def verify(*, archives: tuple[Path, ...]) -> None:
    """Check that ARCHIVES are all members of one epoch of a gang, and that their connections fit together."""
    _tell(gangs.verify(archives), "complete")


def _tell(found: gangs.GangCheckpoint, what: str) -> None:
    ref = found.note.gang
    members = ", ".join(found.archives)
    text = f"gang {ref}, epoch {ref.epoch}: {what}; members {members}; {found.connections} connections between them"
    click.echo(printable(text))


@click.command()
@click.option("--listen", default="0.0.0.0:7443", show_default=True, metavar="HOST:PORT", help="Where to listen.")
def coordinator(*, listen: str) -> None:
    """Coordinate the gangs of several nodes, which reach this over mutual TLS (`coordinator` in [agent]).

    Certificates are in tls_dir. Only clients with a certificate of the authority in its ca.crt are accepted.
    """
    settings = load_settings()
    tls = server_tls(Path(settings.tls_dir))
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"{listen!r} is not an address to listen on", hint="name HOST:PORT")
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, int(port)), family=family, backlog=1024) as listener:
        click.echo(f"listening on {listen}", err=True)
        serve(listener, Path(settings.gang_dir), tls)
