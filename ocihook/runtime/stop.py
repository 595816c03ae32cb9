"""The calls for a container that is stopped: `kill` becomes a checkpoint, and `state` and `delete` fit to it.

Engines ask once for a stop, and give up after a `kill` that failed. So `kill` succeeds whatever becomes of the
checkpoint; the agent makes it (stopping.py), which does not die with the engine's call. crun forgets a container that
was checkpointed, and engines misread its error: so the state is reported here.
"""

import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ocihook import wire
from ocihook.config import apply_annotations, load_settings
from ocihook.errors import OcihookError, plain
from ocihook.runtime import containers
from ocihook.runtime.call import Call
from ocihook.runtime.stop_record import (
    Stop,
    checkpoint_signals,
    read_config,
    read_stop,
    signal_of,
    stop_signals,
    write_stop,
)

if TYPE_CHECKING:
    from ocihook.runtime.member_end import MemberEnd

Ask = Callable[[bytes], tuple[int, str]]  # sends a request to the agent, and returns its verdict
_KILL = frozenset(("9", "KILL"))

log = logging.getLogger(__name__)


def kill(call: Call, ask: Ask) -> int:
    """Have a container checkpointed in place of the signal that stops it; hold KILL back while that is under way.

    Args:
        call: `kill`.
        ask: asks the agent.

    Raises:
        OcihookError: if no runtime would accept the container's name.
    """
    kept = containers.read(call.container_id)
    directory = containers.directory_of(call.container_id)
    if kept is None or (directory / containers.HELD_NAME).exists():
        call.pass_on()
    if (directory / containers.ENDED_NAME).exists():
        return 0
    name = signal_of(call)
    is_to_stop = name not in _KILL and _is_wanted(name, kept)
    is_joined = _is_under_way(call.container_id)
    if not is_to_stop and not (name in _KILL and is_joined):
        _suspend_gpus(call, kept, name)
        call.pass_on()
    if not is_joined:
        write_stop(call.container_id, Stop(words=call.words))
    if _is_gone(call, ask) or not is_joined:
        return 0  # if it is not gone the agent has delivered the signal
    _suspend_gpus(call, kept, name)
    return call.pass_on()


def _suspend_gpus(call: Call, kept: containers.Kept, name: str) -> None:
    """Take the GPUs of a restored container before a signal that ends it, where the driver needs that."""
    if kept.init is None:
        return
    from ocihook.runtime.suspending import suspend_gpus  # takes long to load

    try:
        if (name in _KILL or name in stop_signals(read_config(kept))) and (why := suspend_gpus(kept, load_settings())):
            call.say(
                f"container {kept.container} is stopped with its GPU, which the node may not survive: {why}", "warning"
            )
    except (OcihookError, OSError) as error:
        call.say(plain(error), "warning")


def _is_under_way(container_id: str) -> bool:
    stop = read_stop(container_id)
    return stop is not None and not stop.is_over


def _is_gone(call: Call, ask: Ask) -> bool:
    """Wait until the stop is over; return whether the container was checkpointed."""
    try:
        status, message = ask(wire.Request(wire.STOP_STAGE, call.pid, 0, call.container_id).encode())
    except (OSError, wire.ProtocolError) as error:
        call.say(
            f"container {call.container_id} is stopped without a checkpoint, there is no agent: {plain(error)}",
            "warning",
        )
        call.pass_on()
    is_gone = status == 0 or containers.read(call.container_id) is None  # it may be deleted by now
    if not is_gone:
        call.say(message, "warning")
    return is_gone


def _is_wanted(name: str, kept: containers.Kept) -> bool:
    """Return whether a signal stops a container that is then to be checkpointed.

    If that cannot be decided, since the configuration was broken after `create`, it is as it was then: whatever the
    agent cannot do for that reason it reports, and delivers the signal.
    """
    try:
        config = read_config(kept)
        notes = config.get("annotations") or {}
        policy = apply_annotations(load_settings(), notes, in_pod=kept.container.is_in_pod).policy
    except (OcihookError, OSError) as error:
        log.warning("container %s is stopped as it was made to be: %s", kept.container, plain(error))
        return name in kept.stop_signals
    return name in checkpoint_signals(config, policy, kept.container)


def state(call: Call) -> int:
    """Print the state `stopped` of OCI for a container that was checkpointed and is gone."""
    kept = containers.read(call.container_id)
    if kept is None:
        call.pass_on()
    answer = {
        "ociVersion": "1.0.2",
        "id": call.container_id,
        "pid": 0,
        "status": "stopped",
        "bundle": str(kept.bundle),
    }
    json.dump(answer, sys.stdout)
    return 0


def _member_end(call: Call, kept: containers.Kept | None) -> "MemberEnd | None":
    from ocihook.runtime.member_end import MemberEnd  # takes long to load

    return MemberEnd.of(call, kept)


def delete(call: Call, ask: Ask) -> int:
    """Delete a container, whether its runtime still knows it or not.

    Args:
        call: `delete`.
        ask: asks the agent.

    Raises:
        OcihookError: if what a restore has done cannot be undone.
    """
    if (containers.directory_of(call.container_id) / wire.RESTORING_NAME).exists():
        from ocihook.runtime.restoring import settle  # takes long to load

        settle(call.container_id)
    if _is_under_way(call.container_id):
        _is_gone(call, ask)
    is_ended = (containers.directory_of(call.container_id) / containers.ENDED_NAME).exists()
    kept = containers.read(call.container_id)
    if kept is not None and not is_ended and {"--force", "-f"} & call.options.keys():
        _suspend_gpus(call, kept, "KILL")
    words = ["delete", "--force", call.container_id] if is_ended else call.words[len(call.prefix) :]
    end = _member_end(call, kept)
    done = call.run(*words)
    if done.returncode == 0 or is_ended:
        containers.forget(call.container_id)
        if end is not None:
            end.report()
        return 0
    sys.stderr.write(done.stderr)
    return done.returncode
