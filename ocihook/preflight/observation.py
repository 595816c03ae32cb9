"""An observation of a container or process tree: all that checks look at, read once.

It is plain data, so tests make one without a container. A process that ends meanwhile is left out.
"""

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

from ocihook.audit.mapped import Allowance
from ocihook.audit.reading import Reader
from ocihook.audit.state import ContainerState
from ocihook.config import Policy, Settings, apply_annotations, load_settings
from ocihook.container.identity import container_ref, engine_of
from ocihook.container.running import RunningContainer
from ocihook.criu.files import CriuOptions, options_for
from ocihook.criu.version import find_program
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.linux.cgroup import allowed_cpus, find_freezer, memory_headroom_bytes
from ocihook.linux.memory import free_swap_bytes
from ocihook.linux.open_files import (
    FileMapping,
    Mount,
    OpenFile,
    file_mappings,
    makers_of_namespaces,
    mapped_files,
    mounts,
    namespaces,
    open_files,
    resolve_inside,
    used_files,
)
from ocihook.linux.procfs import Process, Stat, descendants, read_stat, status_fields, thread_ids, tracer_pid
from ocihook.linux.sharing import Kind, sharing
from ocihook.linux.socket_queues import Queue, sockets_and_queues
from ocihook.linux.sockets import Socket, hides_socket_options
from ocihook.linux.sysv import Objects, objects_of
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import UnixSocket, unix_sockets
from ocihook.net.survey import Survey

_UNIX = 1  # AF_UNIX
_CONSOLE = {"/dev/console", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}
_FOR_MEMORY_S, _MOST_MEMORY_BYTES = 0.05, 2 << 30  # to look at what is set for it, while the container may run


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A thread, and what the kernel shows of it."""

    tid: int
    stat: Stat = field(default_factory=Stat)  # proc_pid_stat(5)
    status: Mapping[str, str] = field(default_factory=dict)  # proc_pid_status(5), by its names


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSeen:
    """A process, and what the kernel shows of it."""

    pid: int
    threads: tuple[Task, ...] = ()  # the leader first
    namespaces: Mapping[str, str] = field(default_factory=dict)
    files: tuple[OpenFile, ...] = ()  # descriptors, then deleted files that are mapped
    used: Mapping[str, OpenFile] = field(default_factory=dict)  # its `cwd`, `root` and `exe`
    sockets: tuple[Socket, ...] = ()
    queues: Mapping[int, Queue] = field(default_factory=dict)  # of its Unix and netlink sockets, by inode
    mounts: Sequence[Mount] = ()  # that it sees
    maps: str = ""  # proc_pid_maps(5)
    limits: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # soft and hard, by RLIMIT_...; as far as known

    @property
    def leader(self) -> Task:
        """Its first thread."""
        return self.threads[0] if self.threads else Task(tid=self.pid)

    @property
    def stat(self) -> Stat:
        """The first thread's."""
        return self.leader.stat

    @property
    def status(self) -> Mapping[str, str]:
        """The first thread's."""
        return self.leader.status

    @property
    def is_zombie(self) -> bool:
        """Return whether it has ended and its parent has not waited for it."""
        return self.stat.state in ("Z", "X")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A process tree, as a dump would meet it."""

    init_pid: int
    processes: tuple[ProcessSeen, ...] = ()  # that CRIU dumps: the first one and its descendants, zombies included
    outside: tuple[ProcessSeen, ...] = ()  # others in its cgroups, as those of `exec`: CRIU leaves them out
    tasks: ContainerState = field(default_factory=ContainerState)  # state of what CRIU dumps (audit/)
    criu: tuple[int, ...] = ()  # version; (): unknown
    options: CriuOptions = field(default_factory=CriuOptions)
    container: RunningContainer | None = None
    sharing_memory: Sequence[Sequence[int]] = ()  # groups of processes that are no threads (CLONE_VM), parents first
    sharing_directory: Sequence[Sequence[int]] = ()  # likewise (CLONE_FS)
    unix: Mapping[int, UnixSocket] = field(default_factory=dict)  # of its network namespace, by inode
    made_in: Mapping[str, str] = field(default_factory=dict)  # by kind: the user namespace of the first process's own
    node: Mapping[str, str] = field(default_factory=dict)  # namespaces of the node
    freezer_version: int = 0  # of its cgroups; 0: it has no freezer, or is in no container
    room_bytes: int | None = None  # that the container's memory limits leave; None: no limit
    swap_bytes: int = 0  # free on the node
    hides_socket_options: bool = False  # the kernel, from CRIU before 4.2

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that CRIU dumps."""
        return tuple(process.pid for process in self.processes)

    @property
    def files(self) -> Iterator[OpenFile]:
        """The files of all processes."""
        return chain.from_iterable(process.files for process in self.processes)

    @property
    def sockets(self) -> Iterator[Socket]:
        """The sockets of all processes; one that several have comes several times."""
        return chain.from_iterable(process.sockets for process in self.processes)

    @cached_property
    def by_pid(self) -> Mapping[int, ProcessSeen]:
        """All processes, by their pids."""
        return {process.pid: process for process in (*self.outside, *self.processes)}

    @cached_property
    def mappings(self) -> Mapping[int, tuple[FileMapping, ...]]:
        """The mappings of files, by pid."""
        return {process.pid: file_mappings(process.maps) for process in self.processes}

    @cached_property
    def configured_places(self) -> Mapping[str, set[str]]:
        """The places where a bundle has its runtime mount something, by purpose: /var/run may be a link to /run."""
        config = self.container.config if self.container else {}
        if not config:
            return {}
        linux = config.get("linux")
        linux = linux if isinstance(linux, Mapping) else {}
        rows = [m for m in (config.get("mounts") or ()) if isinstance(m, Mapping)]  # type: ignore[attr-defined]
        binds = {
            str(m.get("destination")) for m in rows if m.get("type") == "bind" or "bind" in (m.get("options") or ())
        }
        places = {
            "bind": binds,
            "mount": {str(m.get("destination")) for m in rows},
            "device": {str(d.get("path")) for d in (linux.get("devices") or ()) if isinstance(d, Mapping)},
            "masked": {*map(str, linux.get("maskedPaths") or ()), *map(str, linux.get("readonlyPaths") or ())},
            "console": _CONSOLE,
        }
        return {purpose: {resolve_inside(self.init_pid, one) for one in named} for purpose, named in places.items()}

    @cached_property
    def sysv_objects(self) -> Objects:
        """The objects of its IPC namespace, if that is its own."""
        return objects_of(self.init_pid) if self.has_own("ipc") else Objects()

    @property
    def init(self) -> ProcessSeen:
        """The first process."""
        return self.by_pid.get(self.init_pid, ProcessSeen(pid=self.init_pid))

    @property
    def engine(self) -> str:
        """Return podman, containerd or cri-o; "" for another, or none."""
        return engine_of(self.container.annotations) if self.container else ""

    def has_own(self, kind: str) -> bool:
        """Return whether it has a namespace of a kind that is not the node's."""
        return self.init.namespaces.get(kind) != self.node.get(kind)

    def who(self, pid: int) -> str:
        """Return a process by its pid and name."""
        process = self.by_pid.get(pid)
        name = (process.status.get("Name") if process else None) or _name_of(pid)
        return f"process {pid} ({name})"

    def survey(self) -> Survey | None:
        """Return its Internet sockets in its network namespace; None if it has none."""
        return Survey.of_sockets(self.init_pid, self.sockets)

    def policy(self) -> Policy:
        """Return its policy, by this node's settings and its annotations.

        Raises:
            IdentificationError: if its annotations contradict one another about its owner.
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


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "exited"


def predict(init_pid: int, container: RunningContainer | None = None) -> Observation:
    """Return what a dump would meet, with the CRIU of this node and the options that it would have.

    Raises:
        UnsupportedError: if the process does not exist, or the caller is not root.
    """
    if Process.find(init_pid) is None:
        raise UnsupportedError(f"there is no process {init_pid}")
    if os.geteuid() != 0:
        raise UnsupportedError("only root can inspect the processes of others", hint="use sudo")
    annotations = container.annotations if container else {}
    asked = frozenset({"file-locks"}) if engine_of(annotations) == "cri-o" else frozenset[str]()
    options = options_for(container.runtime if container else "", annotations.get("org.criu.config", ""), asked)
    program = find_program("criu")
    return observe(init_pid, criu=program.version if program else (), options=options, container=container)


def observe(
    init_pid: int,
    *,
    criu: tuple[int, ...],
    options: CriuOptions,
    container: RunningContainer | None,
    cgroup: str = "",
) -> Observation:
    """Read a process tree, and the other processes of its cgroups.

    Args:
        init_pid: its first process.
        criu: version of the CRIU that dumps it; () if it is unknown.
        options: of that CRIU.
        container: it is this container; None: of no runtime.
        cgroup: name of the cgroup that the runtime gave the container; "" if it is unknown.
    """
    mounted: dict[str, list[Mount]] = {}
    tree = descendants(init_pid)
    pids = [pid for pid in tree if not _is_of_snapshot(pid)]
    processes = tuple(seen for pid in pids if (seen := _read(pid, mounted)) is not None)
    living = [seen.pid for seen in processes if seen.maps]  # those that have ended have all the same memory: none
    freezer = find_freezer(init_pid, cgroup) if container else None
    others = sorted(freezer.all_members() - set(tree)) if freezer else []
    has_unix = any(sock.family == _UNIX for process in processes for sock in process.sockets)
    return Observation(
        init_pid=init_pid,
        processes=processes,
        outside=tuple(seen for pid in others if (seen := _read_briefly(pid)) is not None),
        tasks=_read_tasks(init_pid, pids),
        criu=criu,
        options=options,
        container=container,
        sharing_memory=sharing(living, Kind.MEMORY),
        sharing_directory=sharing(living, Kind.DIRECTORY),
        unix=_unix_sockets(init_pid) if has_unix else {},
        made_in=makers_of_namespaces(init_pid),
        node=namespaces(os.getpid()),
        freezer_version=freezer.version if freezer else 0,
        room_bytes=memory_headroom_bytes(init_pid, reclaims_all=True),
        swap_bytes=free_swap_bytes(),
        hides_socket_options=hides_socket_options(),
    )


def _read_tasks(init_pid: int, pids: Sequence[int]) -> ContainerState:
    """Return the state that a restore may lose; options of sockets are put back."""
    allowance = Allowance(_FOR_MEMORY_S, _MOST_MEMORY_BYTES)
    return Reader(init_pid, allowed_cpus(init_pid), allowance=allowance, with_options=False).read(pids)


def _is_of_snapshot(pid: int) -> bool:
    """Return whether a process is a fork that ocihook reads: it is traced, and its parent gets no signal at its end.

    A dump waits until such forks have exited (linux/forked.py).
    """
    return not read_stat(pid).exit_signal and bool(tracer_pid(pid))


def _read_briefly(pid: int) -> ProcessSeen | None:
    """Read a process that is not dumped: its first thread and its namespaces; None if it has gone."""
    stat = read_stat(pid)
    if not stat.state:
        return None
    return ProcessSeen(
        pid=pid, threads=(Task(tid=pid, stat=stat, status=status_fields(pid)),), namespaces=namespaces(pid)
    )


def _read(pid: int, mounted: dict[str, list[Mount]]) -> ProcessSeen | None:
    """Read a process; None if it has gone. Mounts are read once for each mount namespace and root directory."""
    tids = sorted(thread_ids(pid), key=lambda tid: (tid != pid, tid))
    threads = [Task(tid=tid, stat=read_stat(tid), status=status_fields(tid)) for tid in tids]
    threads = [thread for thread in threads if thread.stat.state]
    if not threads:
        return None
    own = namespaces(pid)
    where = f"{own.get('mnt')} {_link(f'/proc/{pid}/root')}"
    if where not in mounted:
        mounted[where] = mounts(pid)
    found, waiting = sockets_and_queues(pid)
    maps = _maps(pid)
    return ProcessSeen(
        pid=pid,
        threads=tuple(threads),
        namespaces=own,
        files=(*open_files(pid), *mapped_files(pid, maps)),
        used=used_files(pid),
        sockets=found,
        queues=waiting,
        mounts=mounted[where],
        maps=maps,
        limits=_limits(pid),
    )


def _limits(pid: int) -> Mapping[int, tuple[int, int]]:
    with contextlib.suppress(OSError):  # it has exited, or may not be read
        return {kind: resource.prlimit(pid, kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)}
    return {}


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def _maps(pid: int) -> str:
    """Return a process's proc_pid_maps(5); "" if it has exited, or is a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    return ""


def _unix_sockets(pid: int) -> Mapping[int, UnixSocket]:
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        return unix_sockets(NetNamespace.of(pid))
    return {}
