"""What a dump would meet: a container or a process tree, with everything in it that checks look at, read once."""

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ocihook.config import Policy, Settings, apply_annotations, load_settings
from ocihook.container.identity import container_ref, engine_of
from ocihook.container.running import RunningContainer
from ocihook.criu.files import CriuOptions, options_for
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.linux.open_files import OpenFile, mapped_files, namespaces, open_files
from ocihook.linux.procfs import Process, descendants
from ocihook.linux.sockets import Socket, sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A process tree, as a dump would meet it."""

    init_pid: int
    pids: tuple[int, ...]
    options: CriuOptions
    container: RunningContainer | None
    files: tuple[OpenFile, ...]
    sockets: tuple[Socket, ...]

    def who(self, pid: int) -> str:
        """Return a process as people know it."""
        try:
            name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        except OSError:
            name = "gone"
        return f"process {pid} ({name})"

    def policy(self) -> Policy:
        """Return what is wanted for it, by this node's settings and its annotations.

        Raises:
            IdentificationError: if its annotations do not say whose container it is.
        """
        try:
            settings = load_settings()
        except ConfigError:  # reported by the check of the node
            settings = Settings()
        if self.container is None:
            return settings.policy
        annotations = self.container.annotations
        container = container_ref(annotations, container_id=self.container.id, runtime="", bundle="")
        return apply_annotations(settings, annotations, in_pod=container.is_in_pod).policy

    @property
    def has_own_pids(self) -> bool:
        """Return whether it has a PID namespace of its own."""
        return namespaces(self.init_pid).get("pid") != namespaces(os.getpid()).get("pid")


def read_workload(init_pid: int, container: RunningContainer | None = None) -> Workload:
    """Return a process and all that descend from it.

    Raises:
        UnsupportedError: if there is no such process.
    """
    if Process.find(init_pid) is None:
        raise UnsupportedError(f"there is no process {init_pid}")
    if os.geteuid() != 0:
        raise UnsupportedError("only root can inspect the processes of others", hint="use sudo")
    pids = tuple(descendants(init_pid))
    annotations = container.annotations if container else {}
    asked = frozenset({"file-locks"}) if engine_of(annotations) == "cri-o" else frozenset[str]()
    runtime = container.runtime if container else ""
    return Workload(
        init_pid=init_pid,
        pids=pids,
        options=options_for(runtime, annotations.get("org.criu.config", ""), asked),
        container=container,
        files=tuple(chain.from_iterable((*open_files(pid), *mapped_files(pid)) for pid in pids)),
        sockets=tuple(chain.from_iterable(sockets(pid) for pid in pids)),
    )
