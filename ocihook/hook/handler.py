"""Answers an engine's call of the runtime for a container of ours; the `sh` beside it has found that it is one."""

import logging
import os
import sys
from pathlib import Path

from ocihook import wire
from ocihook.errors import OcihookError, plain
from ocihook.hook import client
from ocihook.log import set_up_logging
from ocihook.runtime.call import Call


def main() -> None:
    """Answer the call of our arguments: the runtime's path, and what it was called with."""
    call = Call.parse(Path(sys.argv[1]), sys.argv[2:])
    status = 1
    try:
        runtime_dir = Path(wire.RUNTIME_DIR)
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        set_up_logging(logging.INFO, runtime_dir / wire.HANDLER_LOG_NAME)  # 0, 1 and 2 become the container's
        status = _answer(call)
    except (OcihookError, OSError) as error:
        call.say(plain(error))
    except Exception as error:
        logging.getLogger(__name__).exception("%s", call.command)
        call.say(f"defect in `{call.command}`, see {wire.RUNTIME_DIR}/{wire.HANDLER_LOG_NAME}: {error!r}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: the engine waits, and to take Python's modules apart takes as long as our own work


def _answer(call: Call) -> int:
    match call.command:  # each loads what it needs alone
        case "create":
            from ocihook.runtime.create import create

            return create(call, client.wake)
        case "restore":
            from ocihook.runtime.create import keep_restored

            return keep_restored(call)
        case "start" | "state" as name:
            from ocihook.runtime import held

            return held.start(call) if name == "start" else held.state(call)
        case "kill" | "delete" as name:
            from ocihook.runtime import stop

            return stop.kill(call, client.ask) if name == "kill" else stop.delete(call, client.ask)
        case "checkpoint":
            from ocihook.runtime import tracking

            return tracking.checkpoint(call)
        case _:
            return call.pass_on()
