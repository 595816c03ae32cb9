"""The options of commands that reach a registry."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ocihook.cli.render import F

if TYPE_CHECKING:
    from ocihook.registry.client import Access

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def registry_options(command: F) -> F:
    """Give a command what `access_of` takes: `auth_file`, `ca_file` and `plain_http`."""
    for decorate in (
        click.option(
            "--plain-http", is_flag=True, help="The registry has no TLS: what is sent can be read on the way."
        ),
        click.option("--ca-file", type=_FILE, help="Certificates to trust besides the system's."),
        click.option(
            "--authfile", "auth_file", type=_FILE, help="Credentials; default: those of podman or docker login."
        ),
    ):
        command = decorate(command)
    return command


def access_of(auth_file: Path | None, ca_file: Path | None, *, plain_http: bool) -> "Access":
    """Return how a registry is reached."""
    from ocihook.registry.client import Access

    return Access(auth_file, ca_file, plain_http)
