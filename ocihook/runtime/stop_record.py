"""What is on record of a stop, for the agent and for engines' calls: that it was asked for, and what came of it."""

import json
import logging
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ocihook.config import Policy
from ocihook.errors import UnsupportedError, reason
from ocihook.linux.files import replace_file
from ocihook.linux.procfs import Process, status_fields
from ocihook.model import ContainerRef
from ocihook.runtime import containers
from ocihook.runtime.call import Call
from ocihook.session.record import from_json, to_json
from ocihook.store.lineage import has_identity, is_own

STOP_NAME = "stop.json"  # in the directory of a container
CHECKPOINTED, SIGNALLED = "checkpointed", "signalled"
_TERM = ("15", "TERM")
_STOP_SIGNAL = "org.opencontainers.image.stopSignal"  # an annotation that podman writes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop that was asked for."""

    words: tuple[str, ...]  # what the runtime was called with: run if the checkpoint fails
    init: Process | None = None  # of the container
    outcome: str = ""  # CHECKPOINTED or SIGNALLED; "": it is under way
    message: str = ""  # why it was not checkpointed
    announced: str = ""  # the token of its announcement at the remote (announced.py)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is to be done any more."""
        return bool(self.outcome)


def record_of(container_id: str) -> Path:
    """Return where a stop is on record."""
    return containers.directory_of(container_id) / STOP_NAME


def read_stop(container_id: str) -> Stop | None:
    """Return the last stop that was asked for; None if none was. One whose record is damaged is under way."""
    path = record_of(container_id)
    try:
        return from_json(Stop, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("%s cannot be read, container %s is stopped by TERM: %r", path, container_id, error)
        return Stop(words=("kill", container_id, "TERM"))


def write_stop(container_id: str, stop: Stop) -> None:
    """Put a stop on record."""
    data = json.dumps(to_json(stop)).encode()
    replace_file(record_of(container_id), data, mode=0o600, durable=False)


def stops_under_way() -> Iterator[str]:
    """Yield the ids of containers whose stop is under way, or was when the agent was killed."""
    for path in sorted(containers.root().glob(f"*/{STOP_NAME}")):
        stop = read_stop(path.parent.name)
        if stop is not None and not stop.is_over:
            yield path.parent.name


def is_stopping(domain: str, container: ContainerRef) -> bool:
    """Return whether a container whose checkpoint would be this one's own is being checkpointed, as it is stopped."""
    kept = (containers.read(container_id) for container_id in stops_under_way())
    return any(each and each.domain == domain and is_own(each.container, container) for each in kept)


def stop_signals(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the signals that begin a stop of a container, by number or by name without SIG."""
    named = str((config.get("annotations") or {}).get(_STOP_SIGNAL, "")).upper().removeprefix("SIG")
    return (*_TERM, *filter(None, [named]))


def signal_of(call: Call) -> str:
    """Return the signal of a `kill`, by number or by name without SIG."""
    return call.positional[1].upper().removeprefix("SIG") if len(call.positional) > 1 else "TERM"


def has_effect(pid: int, name: str) -> bool:
    """Return whether a signal may do something to a container's first process: the kernel ignores what it leaves alone.

    Args:
        pid: of the process.
        name: of the signal, or its number.
    """
    fields = status_fields(pid)
    known = signal.Signals.__members__.get(f"SIG{name}")
    number = int(name) if name.isdigit() else known.value if known is not None else 0
    masks = (int(fields.get(mask, "0"), 16) for mask in ("SigBlk", "SigIgn", "SigCgt"))
    return number == 0 or any(mask >> (number - 1) & 1 for mask in masks)


def checkpoint_signals(config: Mapping[str, Any], policy: Policy, container: ContainerRef) -> tuple[str, ...]:
    """Return the signals of a container that become a checkpoint.

    Replicas of a Deployment without a member's name have none: no container would choose their checkpoints.
    """
    is_wanted = policy.checkpoint_on_stop and policy.mode != "off" and has_identity(container)
    return stop_signals(config) if is_wanted else ()


def read_config(kept: containers.Kept) -> Mapping[str, Any]:
    """Return the config.json of a container's bundle.

    Raises:
        UnsupportedError: if it cannot be read.
    """
    path = kept.bundle / "config.json"
    try:
        found = json.loads(path.read_text("utf-8", "replace"))
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise UnsupportedError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise UnsupportedError(f"{path} is not a JSON object")
    return found
