"""Members of gangs on nodes, by the engines' own commands: podman here or elsewhere, and what speaks CRI on this node.

`podman --url` reaches the service of another node's podman over ssh, with keys and connections that podman itself is
configured with; archives come and go by that connection. So podman-py, with its requests, is not needed.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.container.identity import container_ref, gang_ref
from ocihook.errors import GangError, OcihookError, printable
from ocihook.model import GangRef

_LOOK_S = 60.0  # for an engine to say what runs
_LAST_LINES = 3  # of what an engine says of a failure
_CRI_CHECKPOINT_S = 600  # that crictl waits for: more than members wait for one another


class Running(NamedTuple):
    """A member that runs."""

    engine: "Engine"
    container_id: str
    ref: GangRef


class Engine(NamedTuple):
    """An engine of a node."""

    command: tuple[str, ...]
    node: str = ""  # as the user named it; "": this one
    is_cri: bool = False

    @classmethod
    def podman(cls, command: str, node: str = "") -> "Engine":
        """Return podman on a node.

        Args:
            command: of podman, with its global options.
            node: URL of its service (ssh://root@NODE/run/podman/podman.sock, unix:///PATH), or the name of a connection
                that podman knows; "" is this node's own.
        """
        return cls((*shlex.split(command), *connection_to(node)), node)

    @classmethod
    def cri(cls, command: str) -> "Engine":
        """Return this node's containerd or CRI-O, by `crictl` with its global options."""
        return cls(tuple(shlex.split(command)), is_cri=True)

    def members(self) -> list[Running]:
        """Return the members of gangs that run there.

        Raises:
            GangError: if the engine does not say.
        """
        ids = self.ask("ps", "--quiet", "--no-trunc").split()
        if not ids:
            return []
        found = []
        for container_id, container_name, annotations in self._inspect(ids):
            try:
                known = {"container_id": container_id, "runtime": "", "bundle": "", "name": container_name}
                ref = gang_ref(annotations, container_ref(annotations, **known))
            except OcihookError:  # its annotations are wrong, so it is in no gang
                continue
            if ref is not None:
                found.append(Running(self, container_id, ref))
        return found

    def checkpoint(self, container_id: str, archive: Path, *, leave_running: bool) -> list[str]:
        """Return the command that checkpoints a container into an archive here."""
        if self.is_cri:
            limit = ("--timeout", f"{_CRI_CHECKPOINT_S}s")
            return [*self.command, *limit, "checkpoint", f"--export={archive}", container_id]
        options = [] if self.node else ["--compress", "none"]  # a service compresses as it wants
        options += ["--leave-running"] if leave_running else []
        return [*self.command, "container", "checkpoint", "--export", str(archive), *options, container_id]

    def start(self, container_id: str) -> list[str]:
        """Return the command that starts a container of CRI that is made: it is restored then."""
        return [*self.command, "--timeout", f"{_CRI_CHECKPOINT_S}s", "start", container_id]

    def restore(self, archive: Path) -> list[str]:
        """Return the command that restores a container from an archive here."""
        return [*self.command, "container", "restore", "--import", str(archive)]

    def _inspect(self, ids: Sequence[str]) -> list[tuple[str, str, Mapping[str, str]]]:
        """Return id, name and annotations of containers."""
        try:
            if self.is_cri:
                specs = [(each, json.loads(self.ask("inspect", each))["info"]["runtimeSpec"]) for each in ids]
                return [(each, "", _texts(spec.get("annotations"))) for each, spec in specs]
            rows = json.loads(self.ask("container", "inspect", *ids))
            return [(row["Id"], row["Name"], _texts(row["Config"].get("Annotations"))) for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GangError(f"{self} says something unexpected of its containers: {error!r}") from error

    def ask(self, *words: str) -> str:
        """Return what a command of the engine prints.

        Raises:
            GangError: if it fails.
        """
        try:
            done = subprocess.run(
                [*self.command, *words],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=_LOOK_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GangError(f"{self} does not answer: {error}") from error
        if done.returncode != 0:
            raise GangError(f"{self} fails: {last_lines(done.stderr)}")
        return done.stdout

    def __str__(self) -> str:
        return f"{self.command[0]} of {self.node or 'this node'}"


def connection_to(node: str) -> list[str]:
    """Return the options by which podman reaches a node, as Engine.podman takes it."""
    return ["--url" if "://" in node else "--connection", node] if node else []


def _texts(value: Any) -> dict[str, str]:  # noqa: ANN401 - anything that JSON can say
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, Mapping) else {}


def last_lines(text: str) -> str:
    """Return the end of what a command has said, as one line."""
    return printable(" ".join(text.strip().splitlines()[-_LAST_LINES:]))


def all_members(engines: Sequence[Engine]) -> list[Running]:
    """Return the members of gangs on several nodes, which are asked at the same time.

    Raises:
        GangError: if an engine does not answer.
    """
    with ThreadPoolExecutor(len(engines)) as pool:
        parts = [*pool.map(Engine.members, engines)]
    return sorted((running for part in parts for running in part), key=lambda running: running.ref)


def find_members(engines: Sequence[Engine], namespace: str, name: str) -> dict[str, Running]:
    """Return the members of a gang on several nodes, by what they are called in it.

    Raises:
        GangError: if an engine does not answer, there is no member, or one is on two nodes.
    """
    found: dict[str, Running] = {}
    for running in all_members(engines):
        member = running.ref.member
        if running.ref[:2] != (namespace, name):
            continue
        if member in found:
            where = f"{found[member].engine} and on {running.engine}"
            raise GangError(f"member {member} of gang {name} runs twice, on {where}", hint="stop one of them")
        found[member] = running
    if not found:
        raise GangError(
            f"no container of gang {name} runs there", hint="containers say ocihook.io/gang and ocihook.io/gang-size"
        )
    return found
