"""`ocihook install` and `ocihook uninstall`."""

import os
from pathlib import Path

import click

from ocihook.checkpoints.complete import complete_pending
from ocihook.cli.render import Seconds, json_option, print_json
from ocihook.config import load_settings
from ocihook.errors import OcihookError, UnsupportedError, plain, printable
from ocihook.node import handlers
from ocihook.node.install import (
    DRAIN_S,
    NODE,
    Change,
    apply_change,
    apply_install,
    apply_refresh,
    apply_uninstall,
    check_tracking,
    default_libexec,
    other_action_scripts,
    plan_install,
    plan_refresh,
    plan_uninstall,
)

_TREE = click.Path(path_type=Path, file_okay=False, exists=True)
_PATH = click.Path(path_type=Path)
_root = click.option("--root", type=_TREE, default=NODE, help="Work on the file system tree in DIR (for image builds).")
_libexec = click.option(
    "--libexec",
    type=_PATH,
    default=default_libexec,
    show_default=str(default_libexec()),
    help="Where the launcher goes.",
)
_dry_run = click.option("--dry-run", is_flag=True, help="Show what would change, change nothing.")


@click.command()
@_root
@_libexec
@click.option("--runtime", "with_handler", is_flag=True, help="Put the runtime handler before runc and crun, too.")
@click.option(
    "--track-memory",
    is_flag=True,
    help="Have CRIU track memory, so that large processes are dumped past it, in parallel.",
)
@click.option(
    "--refresh", is_flag=True, help="Bring what is installed in order; install nothing where nothing is installed."
)
@_dry_run
@json_option
def install(
    *,
    root: Path,
    libexec: Path,
    with_handler: bool,
    track_memory: bool,
    refresh: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Have CRIU call ocihook at every checkpoint and restore on this node.

    Writes a marked block into the CRIU configuration files that this node's runtimes read; every other line stays
    as it is. Installing again is harmless.

    With --runtime, engines get a handler `ocihook` by a drop-in each: its containers are checkpointed when they are
    stopped, and resume where they were when they are created again, as their annotations ask for it.

    With --track-memory, the block has CRIU track which memory is written to, in every dump of this node. The kernel
    must be able to (soft-dirty bits), or CRIU would refuse every dump and restore: it is tested now, and at each boot
    before the engines start; where the test fails the lines go again. So they do when it is installed without this
    option. Containers of the runtime handler need none of this.
    """
    if refresh and (with_handler or track_memory):
        raise click.UsageError("--refresh keeps what is installed: neither --runtime nor --track-memory goes with it")
    root = root.resolve()
    if refresh:
        _refresh(root, libexec, dry_run=dry_run, as_json=as_json)
        return
    if track_memory:
        check_tracking(root)
    changes = plan_install(root, libexec, track_memory=track_memory)
    handler = handlers.plan_handlers(root, libexec) if with_handler else []
    if not dry_run:
        _check_root(root)
        apply_install(changes, root)
        for change in handler:
            apply_change(change)
    changes += handler
    _report(changes, dry_run=dry_run, as_json=as_json, nothing="ocihook is installed already; nothing to change.")
    for path, script in other_action_scripts(root):
        click.echo(f"note: {path} also names {script}: it stays, and runs too", err=True)
    for note in handlers.notes(root) if with_handler and not dry_run else ():
        click.echo(f"note: {note}", err=True)


def _refresh(root: Path, libexec: Path, *, dry_run: bool, as_json: bool) -> None:
    changes = plan_refresh(root, libexec)
    if not dry_run:
        _check_root(root)
        apply_refresh(changes, root)
    handler = handlers.plan_refresh(root, libexec)
    if not dry_run:
        for change in handler:
            apply_change(change)
    changes += handler
    _report(changes, dry_run=dry_run, as_json=as_json, nothing="What is installed is in order; nothing to change.")


@click.command()
@_root
@_libexec
@click.option("--timeout", "timeout_s", type=Seconds(), default=DRAIN_S, show_default=True, help="Seconds to wait.")
@_dry_run
@json_option
def uninstall(*, root: Path, libexec: Path, timeout_s: float, dry_run: bool, as_json: bool) -> None:
    """Undo what install changed; what was there before is left, byte for byte.

    First the runtime handler goes, unless containers need it: then nothing is undone. Then CRIU's configuration: no new
    dump or restore calls ocihook. The rest goes when those that run have ended. Then pending checkpoints are stored, as
    nothing does so afterwards. Those that cannot be stored are reported, and stay.
    """
    root = root.resolve()
    handler = handlers.plan_removal(root, libexec)
    changes = plan_uninstall(root, libexec)
    if not dry_run:
        _check_root(root)
        handlers.remove(handler, root)
        apply_uninstall(changes, root, libexec, timeout_s=timeout_s)
        if root == NODE:
            _complete_pending(timeout_s)
    _report(handler + changes, dry_run=dry_run, as_json=as_json, nothing="ocihook is not installed; nothing to change.")


def _complete_pending(timeout_s: float) -> None:
    try:
        left = complete_pending(load_settings(), timeout_s=timeout_s)
    except (OcihookError, OSError) as error:
        click.echo(f"note: whether checkpoints are pending is not known: {printable(plain(error))}", err=True)
        return
    for row in left:
        reason = row.reason or "it was not stored in time"
        sentence = f"checkpoint {row.id} of {row.container or 'a container'} is not complete: {reason.rstrip('.')}. "
        if row.is_on_its_way:
            sentence += (
                "It stays in the store; nothing completes it unless ocihook is installed again, or by `ocihook wait`"
            )
        click.echo(f"note: {printable(sentence)}", err=True)


def _check_root(root: Path) -> None:
    if os.geteuid() != 0 and root == NODE:
        raise UnsupportedError("only root can change this node", hint="use sudo, --root DIR, or --dry-run")


def _report(changes: list[Change], *, dry_run: bool, as_json: bool, nothing: str) -> None:
    if as_json:
        print_json(
            {"dry_run": dry_run, "changes": [{"path": str(c.path), "removed": c.after is None} for c in changes]}
        )
    elif not changes:
        click.echo(nothing)
    elif dry_run:
        for change in changes:
            click.echo(change.diff())
    else:
        for change in changes:
            click.echo(f"{'removed' if change.after is None else 'wrote'} {change.path}")
