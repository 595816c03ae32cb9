"""`ocihook agent`: runs the agent in the foreground, as systemd does."""

import click

from ocihook.agent.server import main


@click.command()
def agent() -> None:
    """Run the agent in the foreground.

    There is no need to: systemd starts it through ocihook.socket, and the action script where there is no systemd.
    """
    main()
