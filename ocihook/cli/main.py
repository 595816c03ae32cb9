"""The `ocihook` command: finds the subcommand, and turns every error into one line and an exit status."""

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from ocihook import __version__
from ocihook.cli.render import print_error
from ocihook.errors import OcihookError, from_system

# name -> module:attribute and summary, so that `--help` imports none of them
COMMANDS: Mapping[str, tuple[str, str]] = {
    "install": ("ocihook.cli.install:install", "Have CRIU call ocihook on this node."),
    "uninstall": ("ocihook.cli.install:uninstall", "Undo what install changed."),
    "doctor": ("ocihook.cli.doctor:doctor", "Check whether a checkpoint will work here, and what to do if not."),
    "config": ("ocihook.cli.config:config", "Show this node's settings, and where each comes from."),
    "archive": ("ocihook.cli.archive:archive", "List, inspect, verify, pack, unpack and compare checkpoint archives."),
    "image": ("ocihook.cli.image:image", "Make OCI images of checkpoint archives, and push them."),
    "store": ("ocihook.cli.store:store", "Show, verify and prune the checkpoints of this node's store."),
    "wait": ("ocihook.cli.store:wait", "Wait until checkpoints are complete in the store."),
    "run": ("ocihook.cli.run:run", "Run a podman container that resumes from a checkpoint."),
    "ps": ("ocihook.cli.sessions:ps", "Show the dumps and restores that are going on."),
    "timeline": ("ocihook.cli.timeline:timeline", "Show what took how long in a dump or restore."),
    "gang": ("ocihook.cli.gang:gang", "Checkpoint and restore the containers of one job together."),
    "coordinator": ("ocihook.cli.gang:coordinator", "Coordinate the gangs of several nodes."),
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
    3: "the output is there already",
    4: "a checkpoint is damaged",
    5: "not possible on this node",
    6: "the file is not a checkpoint archive, or a hostile one",
    7: "the agent failed, or something is still to be undone",
    8: "the archive is packed, thin or plain already, or not what the command is for",
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
        if signal.getsignal(number) == signal.SIG_DFL:  # not ignored, as it is under nohup
            signal.signal(number, _stop)  # so that commands remove what they were making
    try:
        status = cli(
            prog_name="ocihook", standalone_mode=False
        )  # click returns the number of an Exit that a command raised
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        if _is_for_programs():
            print_error("usage", error.format_message(), "", error.exit_code, as_json=True)
        else:
            error.show()
        sys.exit(error.exit_code)
    except OcihookError as error:
        _fail(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        sys.exit(1)
    except OSError as error:
        _fail(from_system(error))


def _fail(error: OcihookError) -> NoReturn:
    print_error(error.code, str(error.args[0]), error.hint, error.exit_code, as_json=_is_for_programs())
    sys.exit(error.exit_code)


def _is_for_programs() -> bool:
    """Return whether `--json` was given; also where the other arguments were wrong."""
    words = sys.argv[1:]
    return "--json" in words[: words.index("--") if "--" in words else None]
