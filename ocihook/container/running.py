"""Finds a running container by its id or name in what runtimes and engines keep of it."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ocihook.container.conmon import conmon_name
from ocihook.errors import IdentificationError
from ocihook.model import short_id

# State roots: the runtimes' own (podman, CRI-O), and those that containerd's shims give them, one for each namespace.
_ROOTS = ("runc", "crun", "containerd/runc/*", "containerd/crun/*")
_TIMEOUT_S = 10.0


class RunningContainer(NamedTuple):
    """A container that a runtime runs."""

    id: str
    runtime: str  # runc, crun
    init_pid: int
    bundle: str
    annotations: Mapping[str, str]
    config: Mapping[str, object]  # of the bundle


def find_container(name: str, run: Path = Path("/run")) -> RunningContainer:
    """Return the one running container with this id or name (Kubernetes', podman's), or whose id begins so.

    In podman's own order: a container may be called what another one's id begins with.

    Raises:
        IdentificationError: if there is none, or more than one.
    """
    found = list(containers(run))
    for matches in (_has_id, _is_called, _is_podmans, _id_begins_with):
        matching = [container for container in found if matches(container, name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            ids = ", ".join(short_id(container.id) for container in matching)
            raise IdentificationError(f"{name!r} may be any of {len(matching)} containers: {ids}", hint="name its id")
    raise IdentificationError(
        f"no running container {name!r} is known to runc or crun",
        hint="name its id or its name as the engine shows it; containers of gVisor, Kata and the like have no CRIU",
    )


def container_of(pid: int, run: Path = Path("/run")) -> RunningContainer | None:
    """Return the container whose init process this is, None if there is none."""
    return next((container for container in containers(run) if container.init_pid == pid), None)


def containers(run: Path = Path("/run")) -> Iterator[RunningContainer]:
    """Yield all running containers that runtimes know."""
    for root in _ROOTS:
        for path in (*run.glob(f"{root}/*/state.json"), *run.glob(f"{root}/*/status")):
            with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
                if container := _read(path):
                    yield container


def _read(path: Path) -> RunningContainer | None:
    state = json.loads(path.read_bytes())
    if path.name == "state.json":  # runc
        runtime, pid = "runc", int(state["init_process_pid"])
        labels = state["config"].get("labels") or ()
        bundle = next((label.removeprefix("bundle=") for label in labels if label.startswith("bundle=")), "")
    else:
        runtime, pid, bundle = "crun", int(state["pid"]), str(state.get("bundle", ""))
    if not Path(f"/proc/{pid}").exists():
        return None
    config: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((Path(bundle) / "config.json").read_text("utf-8", "replace"))
    annotations = config.get("annotations")
    known = {str(k): str(v) for k, v in annotations.items()} if isinstance(annotations, dict) else {}
    return RunningContainer(path.parent.name, runtime, pid, bundle, known, config)


def _has_id(container: RunningContainer, name: str) -> bool:
    return container.id == name


def _id_begins_with(container: RunningContainer, name: str) -> bool:
    return container.id.startswith(name)


def _is_called(container: RunningContainer, name: str) -> bool:
    annotations = container.annotations
    names = {annotations.get("io.kubernetes.container.name"), annotations.get("io.kubernetes.cri.container-name")}
    return name in names or conmon_name(container.init_pid, container.id) == name


def _is_podmans(container: RunningContainer, name: str) -> bool:
    """Return whether podman's database has it under this name: its conmon may have been killed."""
    return container.id == _podman_id(name)


@cache
def _podman_id(name: str) -> str:
    """Return the id of podman's container of this very name; "" if there is none."""
    command = ["podman", "container", "inspect", "--format", "{{.Id}} {{.Name}}", "--", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    container_id, _, found = done.stdout.strip().partition(" ")
    return container_id if done.returncode == 0 and found == name else ""
