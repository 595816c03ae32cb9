"""The `ocihook` command: finds the subcommand, and turns every error into one line and an exit status."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType

import click
from click.shell_completion import CompletionItem

from ocihook import __version__
from ocihook.cli.render import printable
from ocihook.errors import OcihookError

# name -> module:attribute and summary, so that `--help` imports none of them
COMMANDS: Mapping[str, tuple[str, str]] = {
    "install": ("ocihook.cli.install:install", "Have CRIU call ocihook on this node."),
    "uninstall": ("ocihook.cli.install:uninstall", "Take back what install changed."),
    "doctor": ("ocihook.cli.doctor:doctor", "Check whether a checkpoint will work here, and what to do if not."),
    "archive": ("ocihook.cli.archive:archive", "List, inspect, verify, pack, unpack and compare checkpoint archives."),
    "image": ("ocihook.cli.image:image", "Make OCI images of checkpoint archives, and push them."),
    "store": ("ocihook.cli.store:store", "Show, verify and prune the checkpoints of this node's store."),
    "wait": ("ocihook.cli.store:wait", "Wait until checkpoints are complete in the store."),
    "ps": ("ocihook.cli.sessions:ps", "Show the dumps and restores that are going on."),
    "timeline": ("ocihook.cli.timeline:timeline", "Show what took how long in a dump or restore."),
    "metrics": ("ocihook.cli.metrics:metrics", "Print this node's metrics for Prometheus."),
    "recover": ("ocihook.cli.sessions:recover", "Undo what sessions left whose agent was killed."),
    "agent": ("ocihook.cli.agent:agent", "Run the agent in the foreground."),
    "demo": ("ocihook.cli.demo:demo", "Checkpoint and restore a real container, with figures."),
}


# Of every command. Those of errors are their classes' (errors.py).
EXIT_STATUS: Mapping[int, str] = {
    0: "done",
    1: "error",
    2: "usage or configuration is wrong",
    4: "a checkpoint is damaged",
    5: "not possible on this node",
    7: "the agent failed, or something is still to be undone",
    9: "no space is left",
    10: "a remote or a registry cannot be reached, or refuses",
    130: "interrupted",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        named = [(name, summary) for name, (_, summary) in COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(n, help=s) for n, s in named] + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"Exit status: {', '.join(f'{status} {meaning}' for status, meaning in EXIT_STATUS.items())}.",
)
@click.version_option(__version__, prog_name="ocihook")
def cli() -> None:
    """Checkpoint and restore GPU containers on stock clusters."""


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, _stop)  # so that commands remove what they were making
    try:
        status = cli(
            prog_name="ocihook", standalone_mode=False
        )  # what a command raised as click's Exit comes back as a number
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OcihookError as error:
        click.echo(f"ocihook: error: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        sys.exit(1)
    except OSError as error:
        click.echo(f"ocihook: error: {printable(str(error))}", err=True)
        sys.exit(1)
