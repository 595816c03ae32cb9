"""Finds the state of tasks that a restore will not bring back, before the dump."""

from collections.abc import Iterator

from ocihook.audit.comparing import Difference
from ocihook.audit.inheriting import numa_policy, personalities
from ocihook.audit.mapped import KEY, POLICY, TASK_POLICY
from ocihook.audit.reading import THREADS_NAMESPACES
from ocihook.audit.rows import FILE, PROCESS, THREAD
from ocihook.audit.state import ContainerState, ProcessState

_SEMAPHORE = "eventfd-semaphore:1"
_LOST_FLAGS = 0x80000000 | 0x04000000  # IN_ONESHOT, IN_EXCL_UNLINK (linux/inotify.h)
_ROOT = "0 0"
_FIRED = 0x40000000  # EPOLLONESHOT alone: it reports nothing (linux/eventpoll.h)
_LOST_OF_MEMORY = ("lf", "sl", "sf", "um", "uw", "ui", KEY, POLICY)


def foresee(state: ContainerState) -> Iterator[Difference]:
    """Yield what no CRIU restores and nothing puts back, with the value that it has after a restore."""
    found = personalities(state)
    after = next(iter(found)) if len(found) == 1 else "0"
    for pid, process in state.processes.items():
        yield from _of_threads(pid, process)
        yield from _of_memory(pid, process)
        if process.own.get(TASK_POLICY) and numa_policy(state) is None:
            yield Difference(PROCESS[TASK_POLICY], pid, "", process.name, process.own[TASK_POLICY], "")
        yield from _of_files(pid, process)
        for tid, values in process.threads.items():
            value = values.get("personality", after)
            if int(value, 16) != int(after, 16):
                yield Difference(THREAD["personality"], pid, tid, process.name, value, after)


def _of_memory(pid: str, process: ProcessState) -> Iterator[Difference]:
    for name in _LOST_OF_MEMORY:
        if value := process.own.get(name):
            yield Difference(PROCESS[name], pid, "", process.name, value, "")


def _of_threads(pid: str, process: ProcessState) -> Iterator[Difference]:
    leader = process.threads.get(pid, {})
    for tid, values in process.threads.items():
        for name in ("files", "fs"):
            if name in values:
                yield Difference(THREAD[name], pid, tid, process.name, values[name], "shared")
        for kind in THREADS_NAMESPACES:
            name = f"{kind} namespace"
            if name in leader and values.get(name, leader[name]) != leader[name]:
                yield Difference(THREAD[name], pid, tid, process.name, values[name], leader[name])


def _of_files(pid: str, process: ProcessState) -> Iterator[Difference]:
    for fd, values in process.files.items():
        if values.get("[eventfd]") == _SEMAPHORE:
            yield Difference(FILE["[eventfd]"], pid, "", process.name, "semaphore", "counter", fd)
        if any(_has_lost_flags(watch) for watch in values.get("inotify", "").split()):
            yield Difference(FILE["inotify"], pid, "", process.name, values["inotify"], "without", fd)
        if any(_has_fired(watch) for watch in values.get("[eventpoll]", "").split()):
            yield Difference(FILE["[eventpoll]"], pid, "", process.name, "fired", "armed", fd)
        if values.get("peer", _ROOT) != _ROOT:
            yield Difference(FILE["peer"], pid, "", process.name, values["peer"], _ROOT, fd)


def _has_lost_flags(watch: str) -> bool:
    return bool(int(watch.partition(":")[2] or "0", 16) & _LOST_FLAGS)


def _has_fired(watch: str) -> bool:
    """Return whether an entry of epoll has reported what it is to report once."""
    _, _, rest = watch.partition(":")
    return int(rest.partition(":")[0] or "0", 16) == _FIRED
