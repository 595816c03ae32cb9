"""A snapshot of processes' memory: they stand still until each has forked, and the forks are read while they go on.

How long they stand still depends on how much memory they have, but not on where it goes to. Until it is read, each page
that they write to is copied, which counts as theirs: so a fork drops what has been read, and a container without room
for that is read while it stands still (`lacking`). So is one of which a process cannot be forked.

A fork has no pages that were set to stay out of one (MADV_DONTFORK, MADV_WIPEONFORK): those are read before all go on.
It has no shared memory of its own either; that is CRIU's. A snapshot may be lost: forks end with the agent, with the
container, and before any other process where memory runs out: alone, also where the kernel would end their whole
cgroup with them (memory.oom.group). That costs the checkpoint, and never the job.
"""

import errno
import fcntl
import logging
import os
import signal
import struct
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, NamedTuple

from ocihook.errors import OcihookError, SnapshotLost, TraceError, plain
from ocihook.linux.cgroup import memory_headroom_bytes, oom_groups, task_headroom, wait_until_thawed
from ocihook.linux.forked import Fork, clock_ticks, end, find_forks, fork, reap
from ocihook.linux.hold import Hold
from ocihook.linux.memory import ProcessMemory, Span, available_bytes, commit_headroom_bytes, read_mappings, subtract
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants, tracer_pid
from ocihook.linux.ptrace import CallInstruction, find_call_instruction
from ocihook.linux.workers import at_idle_priority, restore_priority
from ocihook.packs.pack import PAGE_BYTES, PackInfo
from ocihook.packs.packed_manifest import Segment
from ocihook.packs.packing import pack
from ocihook.packs.pages import Parts, Progress, Source, no_progress
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts

_THERE = 3 << 62  # /proc/PID/pagemap: present, or swapped (Documentation/admin-guide/mm/pagemap.rst)
_ENTRY_BYTES = 8
_TABLE_SHARE = 512  # a page table has an entry of 8 bytes for each page of 4 KiB
_NOTE = struct.Struct("<QQQ")  # pid, start and end of what has been read
_UNRECORDED_END_S = 5.0  # for the end of a fork whose tracer was killed before it was on record
_END_S = 10.0  # from the end of a fork's memory to its own
_FULL = (errno.ENOSPC, errno.EDQUOT)

Kept = tuple[list[tuple[Segment, ...]], list[PackInfo]]

log = logging.getLogger(__name__)


class Area(NamedTuple):
    """Memory of a process that is packed as one row of pages."""

    process: Process
    spans: tuple[Span, ...]  # in order


class Copied(NamedTuple):
    """Where the memory is."""

    rows: list[tuple[Segment, ...]]  # of each area
    packs: list[PackInfo]
    was_forked: bool  # else it was read while all stood still


@dataclass(kw_only=True)
class Snapshotted(Effect, kind="snapshotted"):
    """Processes have forks with their memory, or are about to."""

    ends_with_stage: ClassVar[bool] = False  # what was to be copied has gone on since
    holds_container: ClassVar[bool] = False
    processes: list[Process]  # which are made to fork
    since_ticks: int
    forks: list[Process] = field(default_factory=list)
    are_all_known: bool = False
    oom_groups: list[Path] = field(default_factory=list)  # switches that are off for as long as there are forks

    def hurry(self) -> None:
        """Have them read at normal priority: somebody waits for that."""
        for tracer in {tracer_pid(one.pid) for one in self.forks}:
            for reader in descendants(tracer) if tracer else ():
                restore_priority(reader)

    def give_up(self) -> None:
        """End the forks, in whatever process they are read: the snapshot is lost."""
        for one in self.forks:
            one.send(signal.SIGKILL)

    def undo(self, _journal: Journal, patience: Patience) -> None:
        """End the forks, and have their parents wait for them: they have died with the agent if it was killed.

        Raises:
            FreezeError, TraceError: as long as a container is frozen or traced; it can be tried again.
        """
        self.give_up()
        for process in self.processes:
            wait_until_thawed(process, patience)
        forks = [*self.forks, *self._unrecorded()]
        for one in forks:
            end(one)
        for switch in self.oom_groups:
            with suppress(OSError):  # the container is gone
                switch.write_text("1")
        for one in forks:
            reap(one, self.processes)

    def _unrecorded(self) -> list[Process]:
        """Return the forks that are not on record. They have ended: one that lives is a child of the job's own."""
        if self.are_all_known:
            return []
        found = [one for process in self.processes for one in find_forks(process, self.since_ticks)]
        rest = [one for one in found if one not in self.forks]
        for one in rest:
            if tracer_pid(one.pid) == os.getpid():  # made, and then not found
                one.send(signal.SIGKILL)
        Patience(timeout_s=_UNRECORDED_END_S).until(lambda: not any(one.is_alive() for one in rest))
        return [one for one in rest if not one.is_alive()]


def lacking(init_pid: int, memory_bytes: int, share: float, gpu_bytes: int = 0) -> str:
    """Return what a container lacks while its snapshot is read, for what it may write and start; "" if nothing.

    Its forks may take half of the processes that it may still have.

    Args:
        init_pid: of the container, whose limits count, too.
        memory_bytes: that it has.
        share: how much of it it may write meanwhile.
        gpu_bytes: that it has on GPUs, and that its forks alone have once it has its GPUs back.
    """
    tables_bytes = (memory_bytes + gpu_bytes) / _TABLE_SHARE
    need = int(memory_bytes * share + gpu_bytes + tables_bytes)
    for wanted, room, whose in (
        (need, available_bytes(), "its node has {} left"),
        (need, memory_headroom_bytes(init_pid), "its memory limit leaves it {}"),
        (need + memory_bytes + gpu_bytes, commit_headroom_bytes(), "its node lets it ask for {} (overcommit_memory)"),
    ):
        if room is not None and room < wanted:
            what = f"{wanted >> 20} MiB are needed for what it may write meanwhile"
            return f"{what}, and {whose.format(f'{max(0, room) >> 20} MiB')}"
    processes, tasks = len(descendants(init_pid)), task_headroom(init_pid)
    if tasks is not None and tasks < 2 * processes:
        return f"its limit leaves it {max(0, tasks)} more tasks, and {processes} may have to be forked"
    return ""


class Snapshot:
    """Memory of processes at one instant: what forks have of it is still to be read."""

    def __init__(
        self, journal: Journal, effect: Snapshotted, pieces: Sequence["_Piece"], forks: Mapping[Process, Fork],
        at_once: Kept, keep: Callable[..., Kept],
    ) -> None:  # fmt: skip
        self._journal, self._effect = journal, effect
        self._pieces, self._forks = pieces, forks
        self._at_once, self._keep = at_once, keep

    def read(self, progress: Progress = no_progress) -> Copied:
        """Read the rest, once; the forks end.

        Args:
            progress: called with the bytes done.

        Raises:
            SnapshotLost: if a fork ended before it was read.
            OcihookError, OSError: if packing fails.
        """
        later = [piece for piece in self._pieces if piece.fork is not None]
        try:
            with self._journal.phase("snapshot read") as phase:
                phase["bytes"] = sum(piece.size_bytes for piece in later)
                read_later, more = _read_forks(later, self._forks, self._keep, progress)
        finally:
            _finish(self._effect, self._journal)
        read, packs = self._at_once
        found = {True: iter(read_later), False: iter(read)}
        rows: dict[int, tuple[Segment, ...]] = defaultdict(tuple)
        for piece in self._pieces:
            rows[piece.area] += next(found[piece.fork is not None])
        return Copied([rows[number] for number in sorted(rows)], [*packs, *more], was_forked=bool(self._forks))


def take(  # noqa: PLR0913 - what is copied, how, and for whom
    areas: Sequence[Area],
    directory: Path,
    *,
    journal: Journal,
    still: AbstractContextManager[Hold],
    prefix: str,
    workers: int,
    durable: bool,
    may_fork: bool = True,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> Snapshot:
    """Take a snapshot of processes' memory; they stand still no longer than they must. Its forks end with this process.

    Args:
        areas: what is copied; none is empty.
        directory: gets packs `<prefix>N.pack`. On any error those are left, for the caller to remove.
        journal: of the session.
        still: holds all threads of all the processes in its block; they may still be on their way to their stop.
        prefix: of the packs.
        workers: processes that pack.
        durable: whether packs are synced.
        may_fork: False: there is no room for that.
        patience: how long to wait.
        progress: called with the bytes that are read while all stand still.

    Raises:
        OcihookError, OSError: if packing fails, or a process has ended. The others go on.
    """
    processes = sorted({area.process for area in areas})
    instructions = _instructions(processes) if may_fork else {}
    groups = _oom_groups(processes, journal.facts(CallFacts).cgroup) if instructions else []
    effect = Snapshotted(processes=processes, since_ticks=clock_ticks(), oom_groups=groups or [])
    journal.add(effect, undone_last=True)
    if groups is None or not _switched_off(groups):
        instructions = {}
    keep = partial(pack, directory=directory, prefix=prefix, workers=workers, durable=durable, patience=patience)
    try:
        with still as hold:
            hold.settle(patience)
            forks = _fork_all(instructions, hold, effect, journal)
            pieces = [piece for number, area in enumerate(areas) for piece in _pieces(number, area, forks)]
            with journal.phase("memory read") as phase:
                at_once = [piece for piece in pieces if piece.fork is None]
                phase["bytes"] = sum(piece.size_bytes for piece in at_once)
                kept = keep([piece.source() for piece in at_once], progress=progress)
    except BaseException:
        _finish(effect, journal)
        raise
    return Snapshot(journal, effect, pieces, forks, kept, partial(keep, first=workers))


def _instructions(processes: Iterable[Process]) -> dict[Process, CallInstruction]:
    """Find where each process can be made to fork; {} if one cannot."""
    try:
        return {process: find_call_instruction(process.pid) for process in processes}
    except TraceError as error:
        log.warning("memory is read while all stand still, which takes longer: %s", error)
        return {}


def _oom_groups(processes: Iterable[Process], container_cgroup: str) -> list[Path] | None:
    """Find what would have forks end together with processes of the job; None if it is not only this container's."""
    found: set[Path] = set()
    for process in processes:
        ours, above = oom_groups(process.pid, container_cgroup)
        if above:
            log.warning("memory is read while all stand still, which takes longer: %s is set", above[0])
            return None
        found.update(ours)
    return sorted(found)


def _switched_off(switches: Iterable[Path]) -> bool:
    for switch in switches:
        try:
            switch.write_text("0")
        except OSError as error:
            log.warning("memory is read while all stand still, which takes longer: %s: %s", switch, plain(error))
            return False
    return True


def _fork_all(
    instructions: Mapping[Process, CallInstruction], hold: Hold, effect: Snapshotted, journal: Journal
) -> dict[Process, Fork]:
    """Fork all processes, or none."""
    forks: dict[Process, Fork] = {}
    try:
        with journal.phase("fork"):
            for process, instruction in instructions.items():
                forks[process] = fork(process, hold.threads.get(process, ()), instruction)
                effect.forks.append(forks[process].process)
        effect.are_all_known = True
    except TraceError as error:
        log.warning("memory is read while all stand still, which takes longer: %s", error)
        for one in forks.values():
            end(one.process)
        forks = {}
    journal.save()
    return forks


class _Piece(NamedTuple):
    """A part of an area that is read at once."""

    area: int
    spans: tuple[Span, ...]
    process: Process
    fork: Process | None  # None: while it stands still

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return sum(span.size_bytes for span in self.spans)

    def source(self, notes: int = -1, starts: Sequence[int] = ()) -> Source:
        """Return what is packed.

        Args:
            notes: file that gets which addresses were read and are of no use any more; -1: none.
            starts: of all that is read of this fork, in order.
        """
        parts, at = [], 0
        for span in self.spans:
            parts.append((at, span.size_bytes, span.start))
            at += span.size_bytes
        return Source(partial(_Pages, self.fork or self.process, Parts(parts), notes, starts), 0, at)


def _pieces(number: int, area: Area, forks: Mapping[Process, Fork]) -> Iterator[_Piece]:
    """Cut an area into what its process's fork has, and what it has not."""
    forked = forks.get(area.process)
    if forked is None:
        yield _Piece(number, area.spans, area.process, None)
        return
    missing = _missing(area, forked.process)
    if not missing:
        yield _Piece(number, area.spans, area.process, forked.process)
        return
    there = subtract(area.spans, missing)
    parts = [(span, forked.process) for span in there] + [(span, None) for span in subtract(area.spans, there)]
    for reader, row in groupby(sorted(parts, key=itemgetter(0)), key=itemgetter(1)):
        yield _Piece(number, tuple(span for span, _ in row), area.process, reader)


def _missing(area: Area, fork: Process) -> list[Span]:
    """Return the mappings that an area is in and a fork has not, or has empty.

    One that is in a fork has all pages there that it had. So one page of each that is there in the process tells.
    """
    missing = []
    starts = [span.start for span in area.spans]
    ours, its = (os.open(f"/proc/{one.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC) for one in (area.process, fork))
    try:
        for mapping in read_mappings(area.process.pid):
            first = max(0, bisect_right(starts, mapping.span.start) - 1)
            for span in area.spans[first : first + 2]:
                at = max(span.start, mapping.span.start)
                if at < min(span.end, mapping.span.end):
                    if not (_is_there(its, at) and _is_there(ours, at)):
                        missing.append(mapping.span)
                    break
    finally:
        os.close(ours)
        os.close(its)
    return missing


def _is_there(pagemap: int, address: int) -> bool:
    entry = os.pread(pagemap, _ENTRY_BYTES, address // PAGE_BYTES * _ENTRY_BYTES)
    return bool(int.from_bytes(entry, sys.byteorder) & _THERE)


class _Pages:
    """Reads spans of a process's memory as if they lay one after the other."""

    def __init__(self, process: Process, parts: Parts, notes: int, starts: Sequence[int]) -> None:
        self._memory = ProcessMemory(process)
        self._pid = process.pid
        self._parts, self._notes, self._starts = parts, notes, starts
        self._done: list[Span] = []

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""
        done = 0
        for start, size, address in self._parts.within(offset, offset + len(view)):
            got = self._memory.read_shared_into(view[start - offset : start - offset + size], address)
            done += got
            self._note(Span(address, address + got))
            if got < size:
                break
        return done

    def _note(self, span: Span) -> None:
        last = self._done[-1] if self._done else None
        # Nothing that is still to be read lies between them.
        if last and bisect_left(self._starts, last.end) == bisect_left(self._starts, span.start):
            self._done[-1] = Span(last.start, span.end)
        else:
            self._done.append(span)

    def close(self) -> None:
        """Note what was read, and close the memory."""
        self._memory.close()
        if self._notes >= 0:
            for span in self._done:
                os.write(self._notes, _NOTE.pack(self._pid, *span))


def _read_forks(
    pieces: Sequence[_Piece], forks: Mapping[Process, Fork], keep: Callable[..., Kept], progress: Progress
) -> Kept:
    """Read forks while their parents go on, when nobody else needs the processor; they drop what has been read.

    Raises:
        SnapshotLost: as soon as one has ended: nobody but this process can wait for it then, and its container, killed,
            does not end before.
    """
    by_pid = {one.process.pid: one for one in forks.values()}
    starts: dict[Process | None, list[int]] = defaultdict(list)
    for piece in pieces:
        starts[piece.fork] += [span.start for span in piece.spans]
    for row in starts.values():
        row.sort()
    notes = os.memfd_create("ocihook-read", os.MFD_CLOEXEC)
    fcntl.fcntl(notes, fcntl.F_SETFL, os.O_APPEND)
    seen = 0

    def drop(size_bytes: int) -> None:
        nonlocal seen
        progress(size_bytes)
        for pid, span in _noted(notes, seen):
            seen += _NOTE.size
            by_pid[pid].drop(span)

    alive = {f"the snapshot of process {one.parent.pid}": one.process for one in forks.values()}
    try:
        with at_idle_priority(), closing(Patience(alive)) as patience:
            sources = [piece.source(notes, starts[piece.fork]) for piece in pieces]
            found = keep(sources, progress=drop, patience=patience)
    except (OcihookError, OSError) as error:
        if (
            getattr(error, "errno", 0) not in _FULL
        ):  # memory that cannot be read is that of a fork on its way to its end
            Patience(timeout_s=_END_S).until(lambda: not all(one.process.is_alive() for one in forks.values()))
        _check(forks.values(), error)
        raise
    finally:
        os.close(notes)
    _check(forks.values())
    return found


def _noted(notes: int, offset: int) -> Iterator[tuple[int, Span]]:
    """Yield what has been read, from an offset on: of a note that crosses a page the first part may be there alone."""
    while len(note := os.pread(notes, _NOTE.size, offset)) == _NOTE.size:
        pid, start, end_address = _NOTE.unpack(note)
        yield pid, Span(start, end_address)
        offset += _NOTE.size


def _check(forks: Iterable[Fork], error: Exception | None = None) -> None:
    lost = [one for one in forks if not one.process.is_alive()]
    if lost:
        who = ", ".join(str(one.parent.pid) for one in lost)
        raise SnapshotLost(
            f"the snapshot of the memory of process {who} ended before it was read",
            hint="make another checkpoint; where memory runs out the kernel ends snapshots first",
        ) from error


def _finish(effect: Snapshotted, journal: Journal) -> None:
    try:
        effect.undo(journal, Patience(timeout_s=0))
    except (OcihookError, OSError) as error:  # tried again when the session ends
        log.info("%s", error)
    else:
        journal.forget(effect)
