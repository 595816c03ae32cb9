"""OCI hook: a container whose annotations are wrong is not made, where else it would be known at its checkpoint.

The state of the container is on standard input (OCI runtime-spec, runtime.md, State), with its annotations.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ocihook import wire
from ocihook.config import apply_annotations, load_settings
from ocihook.container.identity import container_ref
from ocihook.errors import ConfigError, OcihookError
from ocihook.log import set_up_logging

_MOST_BYTES = 16 << 20  # of a state
# What runc reports when it restores a container, where an annotation refuses nothing; crun calls no hook then.
_IN_RESTORE = "stopped"


def main(state: IO[str] = sys.stdin) -> int:
    """Check the annotations of a container; return 1 to have it not made."""
    try:
        check(json.loads(state.read(_MOST_BYTES)))
    except (OcihookError, ValueError) as error:
        sys.stderr.write(f"ocihook: {error}\n")  # which runc reports
        _log(f"a container is not made: {error}")  # crun reports our status alone
        return 1
    return 0


def _log(text: str) -> None:
    directory = Path(wire.RUNTIME_DIR)
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        set_up_logging(logging.INFO, directory / wire.HANDLER_LOG_NAME)
        logging.getLogger(__name__).error("%s", text)


def check(state: object) -> None:
    """Refuse annotations that would refuse a checkpoint.

    Raises:
        ValueError: if it is no state of a container.
        AdmissionError, ConfigError: if an annotation is wrong, or may not be set.
        IdentificationError: if the annotations contradict one another about the engine.
    """
    if not isinstance(state, Mapping) or not isinstance(notes := state.get("annotations") or {}, Mapping):
        raise ValueError("this is no state of a container")
    if state.get("status") == _IN_RESTORE:
        return
    annotations = {str(name): str(text) for name, text in notes.items()}
    container = container_ref(
        annotations, container_id=str(state.get("id", "")), runtime="", bundle=str(state.get("bundle", ""))
    )
    try:
        settings = load_settings()
    except ConfigError as error:  # the administrator's, and no reason not to start containers
        sys.stderr.write(f"ocihook: {error}\n")
        return
    refused = apply_annotations(settings, annotations, in_pod=container.is_in_pod).refused
    if refused:
        raise refused[0]
