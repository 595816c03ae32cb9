"""OCI hook: a container whose annotations are wrong is not made, where else it would be known at its checkpoint.

The state of the container is on standard input (OCI runtime-spec, runtime.md, State), with its annotations.
"""

import json
import sys
from collections.abc import Mapping
from typing import IO

from ocihook.config import apply_annotations, load_settings
from ocihook.container.identity import container_ref
from ocihook.errors import ConfigError, OcihookError

_MOST_BYTES = 16 << 20  # of a state


def main(state: IO[str] = sys.stdin) -> int:
    """Check the annotations of a container; return 1 to have it not made."""
    try:
        check(json.loads(state.read(_MOST_BYTES)))
    except (OcihookError, ValueError) as error:
        sys.stderr.write(f"ocihook: {error}\n")
        return 1
    return 0


def check(state: object) -> None:
    """Refuse annotations that would refuse a checkpoint.

    Raises:
        ValueError: if it is no state of a container.
        AdmissionError, ConfigError: if an annotation is wrong, or may not be set.
        IdentificationError: if the annotations contradict one another about the engine.
    """
    if not isinstance(state, Mapping) or not isinstance(notes := state.get("annotations") or {}, Mapping):
        raise ValueError("this is no state of a container")
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
