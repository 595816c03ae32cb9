"""Compares the state of a container's tasks after a restore with that at its dump, and says in words what differs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ocihook.audit.places import CGROUP, MOUNT, TMPFS_FILE
from ocihook.audit.rows import FILE, LIMITED, MOUNTED, PLACED, PROCESS, THREAD, Row
from ocihook.audit.state import ContainerState, ProcessState, Values
from ocihook.errors import printable

_MISSING = Row("process", "processes", is_right=False, criu="kept")
_CLOSED = Row("descriptor", "descriptors", criu="kept")
_UNMOUNTED = Row("mount", "mounts", criu="kept")
_OF_PLACES = {MOUNT: MOUNTED, CGROUP: LIMITED, TMPFS_FILE: PLACED}
_TABLES = (MOUNTED, PLACED, LIMITED, THREAD, PROCESS, FILE)
_SHOWN = 3  # tasks that a message names
_TEXT = 60  # characters of a value in a message


class Difference(NamedTuple):
    """A piece of state of one task that is not as it was."""

    row: Row
    process: str  # its pid in the container; "" for what is of the container
    thread: str  # id of its thread there; "" for what is of the whole process
    name: str  # of its program, or of a mount or cgroup
    before: str
    after: str
    file: str = ""  # a descriptor's number, for what is of one

    @property
    def task(self) -> str:
        """The task, descriptor, mount or cgroup, in words."""
        of_file = f" descriptor {self.file}" if self.file else ""
        return printable(f"{self.name} {self.thread or self.process}{of_file}".strip())


def compare(before: ContainerState, after: ContainerState) -> list[Difference]:
    """Return what differs, by rows in their order; a process or thread that is missing, first."""
    found = list(_all(before, after))
    rows = (_MISSING, _UNMOUNTED, _CLOSED, *(row for table in _TABLES for row in table.values()))
    order = {row: place for place, row in enumerate(rows)}
    return sorted(found, key=lambda difference: order[difference.row])


def _all(before: ContainerState, after: ContainerState) -> Iterator[Difference]:
    yield from _places(before, after)
    for pid, had in before.processes.items():
        has = after.processes.get(pid)
        if has is None:
            yield Difference(_MISSING, pid, "", had.name, "", "missing")
            continue
        for row, old, new in _rows(PROCESS, had.own, has.own, after):
            yield Difference(row, pid, "", had.name, old, new)
        yield from _files(pid, had, has, after)
        for tid, old_values in had.threads.items():
            new_values = has.threads.get(tid)
            if new_values is None:
                yield Difference(_MISSING, pid, tid, had.name, "", "missing")
            elif new_values != old_values:
                for row, old, new in _rows(THREAD, old_values, new_values, after):
                    yield Difference(row, pid, tid, had.name, old, new)


def _places(before: ContainerState, after: ContainerState) -> Iterator[Difference]:
    for name, old_values in before.places.items():
        kind = name.partition(" ")[0]
        new_values = after.places.get(name, {} if kind == TMPFS_FILE else None)
        if new_values is not None:
            for row, old, new in _rows(_OF_PLACES.get(kind, {}), old_values, new_values, after):
                yield Difference(row, "", "", name, old, new)
        elif kind == MOUNT and after.places:
            yield Difference(_UNMOUNTED, "", "", name, "", "missing")


def _files(pid: str, had: ProcessState, has: ProcessState, after: ContainerState) -> Iterator[Difference]:
    for fd, old_values in had.files.items():
        new_values = has.files.get(fd)
        if new_values is None:
            yield Difference(_CLOSED, pid, "", had.name, "", "closed", fd)
        elif new_values != old_values:
            for row, old, new in _rows(FILE, old_values, new_values, after):
                yield Difference(row, pid, "", had.name, old, new, fd)


def _rows(rows: Mapping[str, Row], had: Values, has: Values, here: ContainerState) -> Iterator[tuple[Row, str, str]]:
    for name, row in rows.items():
        old, new = had.get(name, row.absent), has.get(name, row.absent)
        if old is not None and new is not None and not _is_same(row, old, new, here):
            yield row, old, new


def _is_same(row: Row, old: str, new: str, here: ContainerState) -> bool:
    try:
        return row.is_same(old, new, here)
    except ValueError:  # a note that another program has written
        return old == new


def in_words(differences: Iterable[Difference]) -> list[str]:
    """Return one line a row, with the first tasks by name: "CPU affinity of nginx (7, 8; was 0, is all)"."""
    return [_line(row, list(found)) for row, found in groupby(differences, key=lambda difference: difference.row)]


def _line(row: Row, found: Sequence[Difference]) -> str:
    first = found[0]
    values = f" (was {_shown(first.before)}, is {_shown(first.after)})" if first.before else ""
    return f"{row.what} of {named(found)}{values}"


def named(found: Sequence[Difference]) -> str:
    """Return the tasks of differences, the first of them by name."""
    tasks = list(dict.fromkeys(difference.task for difference in found))
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return ", ".join(tasks[:_SHOWN]) + more


def _shown(value: str) -> str:
    text = printable(value) or "empty"
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
