"""`ocihook metrics`: this node's metrics for Prometheus, to be printed or left for node_exporter."""

from pathlib import Path

import click

from ocihook.agent.metrics import render
from ocihook.config import load_settings
from ocihook.linux.files import replace_file


@click.command()
@click.option(
    "--textfile",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Replace this file in one step, for node_exporter's textfile collector (NAME.prom).",
)
def metrics(*, textfile: Path | None) -> None:
    """Print metrics in Prometheus's text format.

    They come from the history and the store, whether an agent runs or not. `metrics_address` in the configuration has
    the agent serve the same over HTTP.
    """
    text = render(load_settings())
    if textfile is None:
        click.echo(text, nl=False)
    else:
        replace_file(textfile, text, mode=0o644, durable=False)
