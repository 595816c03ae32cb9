"""The freezer of a container's cgroup, v1 and v2: is it frozen, thaw it, freeze it again.

Engines freeze a container before they let CRIU dump it (CRI-O and containerd do, podman does not). In v2 the state
of a frozen task in /proc is still S: only cgroup.events shows it. CRIU and the engine restore the state that they
found, so what is thawed must be frozen again.
"""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ocihook.errors import FreezeError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, thread_ids, tracer_pid

HELD = "ocihook-held"  # name of a cgroup, below a container's, of processes that do not run before they are started
FREEZE_TIMEOUT_S = 10.0  # for all tasks of a container to stop, or to resume
_V2_MEMORY = ("memory.max", "memory.current")
_RECLAIMED = ("inactive_file", "active_file", "slab_reclaimable")  # of memory.stat; in v1 with those below: total_
_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_CPUSETS = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # v2, v1
_V1_UNLIMITED_BYTES = 1 << 60
_CLONE_NEWCGROUP = 0x02000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Freezer:
    """The freezer of one cgroup."""

    directory: Path
    version: int  # of cgroups: 1 or 2

    @property
    def switch(self) -> Path:
        """The file that stops its tasks, and lets them run."""
        return self.directory / ("freezer.state" if self.version == 1 else "cgroup.freeze")

    @property
    def thawed(self) -> str:
        """What is written to `switch` to let them run."""
        return "THAWED" if self.version == 1 else "0"

    def is_frozen(self) -> bool:
        """Return whether every task in it is stopped, by its own freezer or an ancestor's."""
        if self.version == 1:
            return self._read("freezer.state") == "FROZEN"
        return "frozen 1" in self._read("cgroup.events").splitlines()

    def is_set(self) -> bool:
        """Return whether this freezer was set to stop the tasks, and not only an ancestor's."""
        if self.version == 1:
            return self._read("freezer.self_freezing") == "1"
        return self._read("cgroup.freeze") == "1"

    def thaw(self, patience: Patience | None) -> None:
        """Let the tasks run. A cgroup that is gone has none.

        Args:
            patience: how long to wait until they run; None: do not, and an ancestor may hold them.

        Raises:
            FreezeError: if an ancestor holds them frozen, or they do not run in time.
            GivenUp: if its caller has given up.
        """
        if not self.directory.exists():
            return
        self._write(self.thawed)
        if patience is None:
            return
        held_by = self._frozen_ancestor()
        if held_by:
            raise FreezeError(f"{self.directory} is frozen by its ancestor {held_by}, which is not ours to thaw")
        self._wait(patience, frozen=False)

    def freeze(self, patience: Patience | None, meanwhile: Callable[[], object] | None = None) -> None:
        """Stop the tasks.

        Args:
            patience: how long to wait until they have stopped; None: do not.
            meanwhile: called after the freezer is set, and before the wait.

        Raises:
            FreezeError: if they do not stop in time.
            GivenUp: if its caller has given up.
        """
        self._write("FROZEN" if self.version == 1 else "1")
        if meanwhile is not None:
            meanwhile()
        if patience is not None:
            self._wait(patience, frozen=True)

    def enclose(self, pid: int) -> None:
        """Move a process into this cgroup, which is made in its parent if need be.

        Raises:
            OSError: if that is not possible.
        """
        self.directory.mkdir(exist_ok=True)
        (self.directory / "cgroup.procs").write_text(str(pid))

    def members(self) -> list[int]:
        """Return the processes that are in this cgroup itself.

        Raises:
            OSError: if there is no such cgroup.
        """
        return [int(pid) for pid in (self.directory / "cgroup.procs").read_text().split()]

    def all_members(self) -> set[int]:
        """Return the processes of this cgroup and of all below it; what ends meanwhile does not matter."""
        found: set[int] = set()
        for directory, _, _ in os.walk(self.directory):
            with contextlib.suppress(OSError):
                found.update(Freezer(Path(directory), self.version).members())
        return found

    def dissolve(self) -> None:
        """Move its processes into its parent, and remove it.

        Raises:
            OSError: if that is not possible.
        """
        while pids := self.members():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (self.directory.parent / "cgroup.procs").write_text(str(pid))
        self.directory.rmdir()

    def _frozen_ancestor(self) -> Path | None:
        if self.version == 1:
            frozen = self._read("freezer.parent_freezing") == "1"
            return self.directory.parent if frozen else None
        for ancestor in self.directory.parents:
            try:
                if (ancestor / "cgroup.freeze").read_text().strip() == "1":
                    return ancestor
            except OSError:
                break  # the root cgroup has no freezer
        return None

    def _wait(self, patience: Patience, *, frozen: bool) -> None:
        if not patience.within(FREEZE_TIMEOUT_S).until(lambda: self.is_frozen() == frozen):
            raise FreezeError(f"{self.directory} was not {'frozen' if frozen else 'thawed'} in time")

    def _read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text().strip()
        except OSError as error:
            raise FreezeError(f"{self.directory / name} cannot be read: {error.strerror}") from error

    def _write(self, value: str) -> None:
        try:
            self.switch.write_text(value)
        except OSError as error:
            raise FreezeError(f"{self.switch} cannot be written: {error.strerror}") from error


def find_freezer(pid: int, container_cgroup: str = "") -> Freezer | None:
    """Return the freezer of the container that `pid` is in; None if it is in a root cgroup or has no freezer.

    On a hybrid machine, where a task is in both hierarchies, the one that is frozen counts.

    Args:
        pid: of one of its processes.
        container_cgroup: name of the cgroup that the runtime gave the container, and that engines freeze: the process
            may be in one below it. "": not known; then it is the process's own.
    """
    found = [
        _frozen_at(Freezer(mount / path.lstrip("/"), version), container_cgroup)
        for version, path in _cgroup_paths(pid)
        for mount in _cgroup_mounts(version)
        if path != "/"
    ]
    found = [freezer for freezer in found if freezer.switch.exists()]
    return next((freezer for freezer in found if freezer.is_frozen()), found[0] if found else None)


def unified_cgroup(pid: int, container_cgroup: str = "") -> Path | None:
    """Return the directory of the container's cgroup of v2; None if it has none. The arguments are `find_freezer`'s."""
    for version, path in _cgroup_paths(pid):
        for mount in _cgroup_mounts(2) if version == 2 and path != "/" else ():
            directory = mount / path.lstrip("/")
            if directory.is_dir():
                return _up_to(container_cgroup, directory)[-1]
    return None


def kill(process: Process) -> None:
    """Kill a process, a frozen one, too: the freezer of v1 keeps it from ending."""
    if process.send(signal.SIGKILL):
        with contextlib.suppress(FreezeError, OSError):  # it has ended by now, or an ancestor's freezer holds it
            _let_end(process.pid)


def _let_end(pid: int) -> None:
    """Thaw a killed process of v1; it leaves a cgroup that others may share, and they stay frozen."""
    freezer = find_freezer(pid)
    if freezer and freezer.version == 1 and freezer.directory.name == HELD:
        freezer = Freezer(freezer.directory.parent, 1)
        (freezer.directory / "cgroup.procs").write_text(str(pid))
    if freezer and freezer.version == 1 and freezer.is_set():
        freezer.switch.write_text(freezer.thawed)


def held_below_root(pid: int) -> Freezer | None:
    """Return the freezer of a cgroup below the root of v2, for a process that is in a root cgroup, where none is.

    None if it is elsewhere, or there is no v2.
    """
    if any(path != "/" for _, path in _cgroup_paths(pid)):
        return None
    seen = (mount for mount in _cgroup_mounts(2) if (mount / "cgroup.procs").exists())  # one may be hidden
    return next((Freezer(mount / HELD, 2) for mount in seen), None)


def _frozen_at(inner: Freezer, container_cgroup: str) -> Freezer:
    """Return the freezer that was set, of those from a process's own up to its container's; else the container's."""
    freezers = [Freezer(directory, inner.version) for directory in _up_to(container_cgroup, inner.directory)]
    with contextlib.suppress(FreezeError):  # it has no freezer
        return next((freezer for freezer in freezers if freezer.is_set()), freezers[-1])
    return freezers[-1]


def _up_to(container_cgroup: str, directory: Path) -> list[Path]:
    """Return the cgroups from one up to that of its container, or that one alone if this is not among its ancestors."""
    row = [directory, *directory.parents]
    names = [one.name for one in row[:-1]]  # the root's is "", which means not known
    return row[: names.index(container_cgroup) + 1 if container_cgroup in names else 1]


def oom_groups(pid: int, container_cgroup: str = "") -> tuple[list[Path], list[Path]]:
    """Return the switches by which the kernel ends a whole cgroup where it would end one process (memory.oom.group).

    Those that are on, in the cgroups (v2) of a process up to its container's, and in those above. Kubelets set that of
    each container.
    """
    ours: list[Path] = []
    above: list[Path] = []
    for row in _rows(pid, "memory"):
        own = _up_to(container_cgroup, row[0])
        for directory in row:
            switch = directory / "memory.oom.group"
            with contextlib.suppress(OSError):  # v1, or without that controller
                if switch.read_text().strip() == "1":
                    (ours if directory in own else above).append(switch)
    return ours, above


def wait_until_released(process: Process, patience: Patience) -> None:
    """Wait until a process runs freely, neither traced nor frozen, or is gone.

    Raises:
        FreezeError: if it does not in time.
        GivenUp: if its caller has given up.
    """
    wait_until_let_go(process, patience)
    wait_until_thawed(process, patience)


def wait_until_let_go(process: Process, patience: Patience) -> None:
    """Wait until no other process traces any thread of a process; as `wait_until_released`."""
    _wait_until(
        lambda pid: all(tracer_pid(tid) in (0, os.getpid(), None) for tid in thread_ids(pid)), process, patience
    )


def wait_until_thawed(process: Process, patience: Patience) -> None:
    """Wait until no freezer keeps a process from running; as `wait_until_released`."""
    _wait_until(lambda pid: not is_frozen(pid), process, patience)


def is_frozen(pid: int) -> bool:
    """Return whether a process is frozen, or leaves its cgroup just now, which is removed behind it."""
    try:
        freezer = find_freezer(pid)
        return freezer is not None and freezer.is_frozen()
    except FreezeError:
        return True


def _wait_until(is_so: Callable[[int], bool], process: Process, patience: Patience) -> None:
    if not patience.until(lambda: not process.is_alive() or is_so(process.pid)):
        raise FreezeError(
            f"process {process.pid} is still stopped by its engine or tracer",
            hint="let the container run (for instance `podman unpause`), then `ocihook recover`",
        )


def memory_headroom_bytes(pid: int, *, reclaims_all: bool = False) -> int | None:
    """Return how much more memory the cgroups of a process allow it; None if nothing limits it.

    What can be reclaimed at once, file cache that is not in use, counts as free; with `reclaims_all` also what the
    kernel reclaims before it kills a process, but not what it would swap.
    """
    reclaimed = _RECLAIMED if reclaims_all else _RECLAIMED[:1]
    rooms = []
    for directory in chain.from_iterable(_rows(pid, "memory")):
        names = _V2_MEMORY if (directory / _V2_MEMORY[0]).exists() else _V1_MEMORY
        try:
            limit, used = ((directory / name).read_text().strip() for name in names)
            lines = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max" and int(limit) < _V1_UNLIMITED_BYTES:
            found = {name: int(value) for name, value in lines}
            reclaimable = sum(found.get(f"total_{name}", found.get(name, 0)) for name in reclaimed)
            rooms.append(int(limit) - int(used) + reclaimable)
    return min(rooms, default=None)


def task_headroom(pid: int) -> int | None:
    """Return how many more tasks the cgroups of a process allow it; None if nothing limits them."""
    rooms = []
    for directory in chain.from_iterable(_rows(pid, "pids")):
        with contextlib.suppress(OSError, ValueError):  # without that controller, or "max"
            limit, used = (int((directory / name).read_text()) for name in ("pids.max", "pids.current"))
            rooms.append(limit - used)
    return min(rooms, default=None)


def allowed_cpus(pid: int) -> str:
    """Return the processors on which the cgroup of a process lets it run, as the kernel lists them; "" if unknown."""
    for row in _rows(pid, "cpuset"):
        for directory in row:
            for name in _CPUSETS:
                with contextlib.suppress(OSError):
                    return (directory / name).read_text().strip()
    return ""


def _rows(pid: int, controller: str) -> Iterator[list[Path]]:
    """Yield the cgroup that a process is in and those above it, for each hierarchy that may have a controller."""
    for version, path in _cgroup_paths(pid, controller):
        for mount in _cgroup_mounts(version, controller):
            row = [mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents]
            yield row[: row.index(mount) + 1]


def unshare_namespace(cgroup: Path) -> None:
    """Give this process a cgroup namespace whose root is a cgroup of v2, made if need be; it does not stay there.

    Raises:
        OSError: if that is not possible.
    """
    paths = (path.lstrip("/") for version, path in _cgroup_paths(os.getpid()) if version == 2)
    found = (mount / path for path in paths for mount in _cgroup_mounts(2))
    own = next((directory for directory in found if (directory / "cgroup.procs").exists()), None)
    if own is None:
        raise OSError(errno.ENOENT, "no cgroup of v2")
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "cgroup.procs").write_text("0")
    try:
        if _libc.unshare(_CLONE_NEWCGROUP) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
    finally:
        (own / "cgroup.procs").write_text("0")


def is_in_another_namespace(pid: int) -> bool:
    """Return whether a process has another cgroup namespace than this one; True when it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/cgroup") != os.readlink("/proc/self/ns/cgroup")
    except OSError:
        return True


def join_namespace_of_node() -> None:
    """Leave the cgroup namespace of a CRIU whose hook has started this process: it would see no cgroup of others."""
    with contextlib.suppress(OSError), open("/proc/1/ns/cgroup") as namespace:  # a kernel without any
        _libc.setns(namespace.fileno(), _CLONE_NEWCGROUP)


def leave_cgroup() -> None:
    """Move this process to the root of every cgroup hierarchy that can be reached.

    An agent started by a hook is otherwise in the cgroup of the container that is being restored: that one's memory
    limit would be the agent's, too, and the agent would be killed with it.
    """
    for version in (1, 2):
        for mount in _cgroup_mounts(version, controller=None):
            try:
                (mount / "cgroup.procs").write_text("0")
            except OSError:
                continue  # read-only, or a hierarchy without processes


def _cgroup_paths(pid: int, controller: str = "freezer") -> list[tuple[int, str]]:
    paths = []
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths.append((2, path))
        elif controller in controllers.split(","):
            paths.append((1, path))
    return sorted(paths)


def _cgroup_mounts(version: int, controller: str | None = "freezer") -> list[Path]:
    """Return where a hierarchy is mounted: of v1, the one with `controller` (None: all)."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        is_wanted = kind == "cgroup" and (controller is None or controller in options.split(","))
        if kind == "cgroup2" if version == 2 else is_wanted:
            mounts.append(Path(before.split()[4]))
    return mounts
