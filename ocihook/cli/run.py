"""`ocihook run`: a podman container that resumes from a checkpoint."""

import click

from ocihook.cli.render import json_option, print_json
from ocihook.config import load_settings
from ocihook.errors import printable
from ocihook.linux.patience import ENDLESS
from ocihook.node.podman_run import checkpoint_there, find_checkpoint, run_from


@click.command()
@click.option("--from", "source", required=True, metavar="NAME", help="A container's name or id, or a checkpoint's id.")
@click.option(
    "--on",
    "node",
    metavar="NODE",
    help="Where that container runs: ssh://USER@HOST, unix://SOCKET or a connection's name.",
)
@click.option("--name", default="", help="Of the new container; default: the same.")
@json_option
@click.argument("arguments", metavar="[-- OPTIONS IMAGE ARGUMENTS...]", nargs=-1, type=click.UNPROCESSED)
def run(*, source: str, node: str | None, name: str, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Run a podman container that resumes from a checkpoint, made as the container was that was checkpointed.

    The checkpoint is the newest of that container in this node's store, at the remote, or in an archive of podman. With
    --on, a container that runs on another node is checkpointed there, which ends it, and comes here.

    Its options, image and arguments are those that it was made with. If that is not known any more, or to change them,
    give them after --, as for `podman run`.
    """
    settings = load_settings()
    known = checkpoint_there(node, source, settings, new_name=name, given=arguments) if node else None
    if known is not None and not as_json:
        click.echo(f"container {printable(source)} was checkpointed on {printable(node or '')}, into {known.archive}")
    known = known or find_checkpoint(source, settings, ENDLESS)
    made = run_from(known, name, arguments)
    if as_json:
        archive = str(known.archive) if known.archive else None
        print_json({"container": made.container, "name": made.name, "checkpoint": known.id, "archive": archive})
    else:
        click.echo(
            f"container {printable(made.name)} ({made.container[:12]}) resumes from checkpoint {known.id} of "
            f"{known.container}, made at {known.created}"
        )
