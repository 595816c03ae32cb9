"""`ocihook gang` and `ocihook coordinator`: containers that are checkpointed and restored together."""

import contextlib
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ocihook.cli.render import json_option, print_json, print_table
from ocihook.config import load_settings
from ocihook.errors import ConfigError, OcihookError, printable
from ocihook.gang.certificates import ServerTls
from ocihook.gang.coordinator import Coordinator
from ocihook.gang.link import Link, unreachable
from ocihook.gang.server import expect_many, serve
from ocihook.linux.patience import Patience
from ocihook.node import gangs
from ocihook.node.gang_engines import Engine, Running, all_members

_STATUS_S = 10.0
_podman = click.option("--podman", default="podman", show_default=True, help="The command, with global options.")
_nodes = click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NODE",
    help="A node that runs members: ssh://root@HOST/run/podman/podman.sock, or a connection that podman knows; "
    "'' is this one. May be repeated. [default: this node]",
)
_cri = click.option("--cri", is_flag=True, help="The members are pods of this node's containerd or CRI-O.")
_crictl = click.option(
    "--crictl", default="crictl", show_default=True, help="The command for --cri, with global options."
)


@click.group()
def gang() -> None:
    """Checkpoint and restore the containers of one job together: all of them or none."""


def _engines(nodes: tuple[str, ...], podman: str, crictl: str) -> list[Engine]:
    if crictl and nodes:
        raise click.BadParameter("--cri is of this node alone; --node is podman's")
    return [Engine.cri(crictl)] if crictl else [Engine.podman(podman, node) for node in dict.fromkeys(nodes) or ("",)]


@gang.command()
@_nodes
@_cri
@_crictl
@_podman
@json_option
def status(*, nodes: tuple[str, ...], cri: bool, crictl: str, podman: str, as_json: bool) -> None:
    """Show the gangs that the coordinator knows: attempts, how far their members are, and complete epochs.

    With --node or --cri also the members that run there, and whether a gang lacks some.
    """
    running = all_members(_engines(nodes, podman, crictl if cri else "")) if nodes or cri else None
    settings = load_settings()
    link = Link.of(settings)
    try:
        found = link.ask(None, Patience(timeout_s=_STATUS_S))["gangs"]
    except OSError as error:
        if link.url or Path(link.socket).exists():
            raise unreachable(link, error) from error
        found = Coordinator(Path(settings.gang_dir)).status()  # no agent runs here, so there is no attempt
    if as_json:
        print_json({"gangs": found, **({} if running is None else {"members": [_facts_of(one) for one in running]})})
        return
    print_table(["NAMESPACE", "GANG", "EPOCHS", "ATTEMPT", "STATE", "MEMBERS"], [_row(row) for row in found])
    for row in found:
        for epoch, missing in row.get("incomplete", {}).items():
            click.echo(printable(f"{row['gang']}: epoch {epoch} is not complete: {', '.join(missing)}"))
        for member, fate in row.get("missed", {}).items():
            click.echo(printable(f"{row['gang']}: member {member} {fate}"))
        if reason := row.get("attempt", {}).get("reason"):
            click.echo(printable(f"{row['gang']}: attempt {row['attempt']['epoch']}: {reason}"))
    if running is not None:
        _print_members(running)


def _facts_of(running: Running) -> dict[str, str]:
    ref = running.ref
    where = {"node": running.engine.node, "container": running.container_id}
    return {"namespace": ref.namespace, "gang": ref.name, "member": ref.member, **where}


def _print_members(running: Sequence[Running]) -> None:
    rows = [
        [one.ref.namespace, one.ref.name, one.ref.member, str(one.engine), one.container_id[:12]] for one in running
    ]
    click.echo()
    print_table(["NAMESPACE", "GANG", "MEMBER", "RUNS IN", "CONTAINER"], rows)
    there = Counter((one.ref.namespace, one.ref.name, one.ref.size) for one in running)
    for (namespace, name, size), count in there.items():
        if count != size:
            gang = "/".join(filter(None, (namespace, name)))
            click.echo(printable(f"{gang}: {count} of its {size} members run there"))


def _row(found: dict[str, Any]) -> list[str]:
    attempt = found.get("attempt", {})
    members = ", ".join(f"{name} {phase}" for name, phase in attempt.get("members", {}).items())
    what = f"{attempt['act']} {attempt['epoch']}" if attempt else ""
    epochs = " ".join(map(str, found["epochs"]))
    return [found["namespace"], found["gang"], epochs, what, attempt.get("state", ""), members]


@gang.command()
@click.argument("name", metavar="[NAMESPACE/]NAME")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--leave-running", is_flag=True, help="Let the containers run on. By CRI they always do.")
@click.option(
    "--tries",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Try so often, as long as all run on: a rank that was inside a collective is outside at another moment.",
)
@_nodes
@_cri
@_crictl
@_podman
@json_option
def checkpoint(  # noqa: PLR0913 - one argument each option
    *,
    name: str,
    directory: Path,
    leave_running: bool,
    tries: int,
    nodes: tuple[str, ...],
    cri: bool,
    crictl: str,
    podman: str,
    as_json: bool,
) -> None:
    """Checkpoint all containers of a gang into archives in a new DIRECTORY: those of podman, here or on several nodes.

    With --cri it is the gang NAMESPACE/NAME of pods on this node; an engine that has its own time limit ends it there.
    """
    engines = _engines(nodes, podman, crictl if cri else "")
    found = gangs.checkpoint(
        name, directory.absolute(), engines, leave_running=leave_running, tries=tries, look=_Phases(name)
    )
    _report(found, "checkpointed", as_json=as_json)


@gang.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--on", "moved", multiple=True, metavar="MEMBER=NODE", help="Restore a member on another node than it is from."
)
@click.option("--cri", is_flag=True, help="Make pods again that this node's containerd had, where no kubelet runs.")
@_crictl
@_podman
@json_option
def restore(*, directory: Path, moved: tuple[str, ...], cri: bool, crictl: str, podman: str, as_json: bool) -> None:
    """Restore all containers of a gang with podman from the archives in a DIRECTORY, each on the node it is from.

    With --cri the pods are made again as they were. Those of a kubelet are not: their controller makes them.
    """
    if cri:
        if moved:
            raise click.BadParameter("--cri is of this node alone; --on is podman's")
        found = gangs.restore_pods(directory.absolute(), Engine.cri(crictl), look=_Phases())
        _report(found, "restored", as_json=as_json)
        return
    pairs = {member: node for member, _, node in (each.partition("=") for each in moved)}
    if not all("=" in each for each in moved):
        raise click.BadParameter("--on takes MEMBER=NODE")
    found = gangs.restore(directory.absolute(), podman, pairs, look=_Phases())
    _report(found, "restored", as_json=as_json)


@gang.command()
@click.argument("archives", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def verify(*, archives: tuple[Path, ...], as_json: bool) -> None:
    """Check that ARCHIVES are all members of one epoch of a gang, and that their connections fit together."""
    _report(gangs.verify(archives), "complete", as_json=as_json)


class _Phases:
    """Shows on a terminal, or in a log, which phases the members of a gang have reached."""

    def __init__(self, name: str = "") -> None:
        self._name, self._shown = name, ""

    def __call__(self) -> None:
        """Look, and show what has changed; the coordinator may be on another node, or not there yet."""
        with contextlib.suppress(OcihookError, OSError):
            found = Link.of(load_settings()).ask(None, Patience(timeout_s=_STATUS_S))["gangs"]
            for row in found:
                attempt = row.get("attempt", {})
                if attempt.get("state") == "open" and self._name in ("", row["gang"], _full_name(row)):
                    members = ", ".join(f"{member} {phase}" for member, phase in attempt["members"].items())
                    line = printable(f"{_full_name(row)}, {attempt['act']} {attempt['epoch']}: {members}")
                    if line != self._shown:
                        self._shown = line
                        click.echo(line, err=True)


def _full_name(row: Mapping[str, Any]) -> str:
    return "/".join(filter(None, (row["namespace"], row["gang"])))


def _report(found: gangs.GangCheckpoint, what: str, *, as_json: bool) -> None:
    ref = found.note.gang
    if as_json:
        archives = {member: str(path) for member, path in found.archives.items()}
        facts = {"namespace": ref.namespace, "gang": ref.name, "epoch": ref.epoch, "attempt": ref.attempt}
        print_json({"outcome": what, **facts, "archives": archives, "connections": found.connections})
        return
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
    tls = ServerTls(Path(settings.tls_dir))
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"{listen!r} is not an address to listen on", hint="name HOST:PORT")
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, int(port)), family=family, backlog=1024) as listener:
        click.echo(f"listening on {listen}", err=True)
        expect_many()
        serve(listener, Path(settings.gang_dir), tls)
