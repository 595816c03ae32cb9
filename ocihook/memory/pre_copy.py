"""Host memory read while the container runs: what has not changed since need not be read once all stand still.

Soft-dirty bits are cleared before a page is read. What is not soft-dirty when all stand still is as it was read: new
mappings and pages that are written to or moved are soft-dirty. What these bits do not show is refused, or found:

- Whole page tables that are moved are not marked: a process that calls mremap(2) is read once more (page_moves.py).
- Mappings lost the mark when they were merged, up to Linux 6.18.36 and 6.18 (soft_dirty.py).
- Devices write to memory without a fault: a GPU, RDMA, io_uring, direct I/O. A container with any is not pre-copied.
- A program that another one has replaced (execve(2)) has other memory at the same addresses.

It is read once; a second round would need a moment of standstill, too, since bits cannot be read and cleared at once.
"""

import contextlib
import ctypes
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ocihook.config import Policy
from ocihook.errors import OcihookError, StoreFull, plain
from ocihook.images.image_set import discard_regions
from ocihook.images.merging import READ_PREFIX
from ocihook.images.pre_copied import MOST_PIECES, CopiedMemory, Piece, chunk_sizes
from ocihook.linux import page_moves, soft_dirty
from ocihook.linux.files import identity, same_directory
from ocihook.linux.memory import ProcessMemory, Span, common_spans, read_mappings
from ocihook.linux.open_files import open_files
from ocihook.linux.page_moves import MoveCounter
from ocihook.linux.page_scan import PLAIN_FILES, anonymous_bytes, scan_dirty, scan_private
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, address_space, descendants
from ocihook.memory.clean_pages import LEAST_PROCESS_BYTES, MOST_WORKERS, discard_earlier, discard_read, sources
from ocihook.packs.pack import PAGE_BYTES, PackInfo
from ocihook.packs.packing import pack
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant

_MEMORY_DEVICES = 1  # major number of /dev/null, zero, full, random, urandom, whose minors these are
_HARMLESS_MINORS = (3, 5, 7, 8, 9)
_TERMINALS = (5, *range(136, 144))  # major numbers
_IO_URING, _AIO = "anon_inode:[io_uring]", "/[aio]"

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class MemoryPreCopied(Effect, kind="memory-pre-copied"):
    """Memory is read into packs while the container runs."""

    holds_container: ClassVar[bool] = False
    place: Path  # of the packs
    place_identity: list[int]

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Remove the packs, if they did not become a checkpoint."""
        place = same_directory(self.place, self.place_identity)
        if place:
            discard_regions(place)


@dataclass(frozen=True, eq=False)
class _Watched:
    """A process that is read while it runs."""

    process: Process
    counter: MoveCounter
    space: tuple[str, ...]
    runs: list[Span]


class PreCopy(Participant):
    """Reads memory while the tasks run."""

    def __init__(self) -> None:
        self._is_wanted = False

    def needs_tasks(self, dump: Dump) -> bool:
        """Return whether memory is to be read while they run, and may be."""
        if not dump.policy.pre_copy:
            return False
        if not dump.reads_memory:
            reason = "memory is not read past CRIU"
        elif dump.has_gpu:
            reason = "it has processes that use a GPU"
        elif dump.call().gang is not None:
            reason = "the other members of its gang would have to wait for it"
        else:
            reason = why_not(dump.policy, descendants(dump.init_pid))
        if reason:
            log.warning("container %s: no pre-copy: %s", dump.container, reason)
        self._is_wanted = not reason
        return self._is_wanted

    def prepare(self, dump: Dump) -> None:
        """Read it; whatever goes wrong, it is read when all stand still."""
        if not self._is_wanted:
            return
        discard_earlier(dump.place)
        effect = MemoryPreCopied(place=dump.place_name, place_identity=identity(dump.place))
        dump.journal.add(effect)
        watched = list(_watch(descendants(dump.init_pid)))
        try:
            dump.pre_copied = _copy(dump, watched)
        except (OcihookError, OSError) as error:
            for one in watched:
                one.counter.close()
            discard_read(dump.place)
            dump.journal.forget(effect)
            dump.patience.check()
            log.warning("container %s: no pre-copy: %s", dump.container, plain(error))


class _Copied:
    """What was read: a PreCopied."""

    def __init__(
        self, init_pid: int, copied: Mapping[_Watched, CopiedMemory], packs: Sequence[PackInfo], first: int
    ) -> None:
        self.packs, self.first = packs, first
        self._init_pid = init_pid
        self._copied = copied
        self._right: dict[Process, tuple[CopiedMemory, list[Span]]] = {}  # with what is dirty

    def settle(self) -> None:
        """Find out which pages are dirty, and of which processes that is not known."""
        reason = _unseen_writer(descendants(self._init_pid))
        for watched, memory in self._copied.items():
            process, moves = watched.process, watched.counter.count
            watched.counter.close()
            if not process.is_alive():
                continue
            if address_space(process.pid) != watched.space:
                log.info("process %s runs another program now: its memory is read once more", process.pid)
            elif moves:
                log.info("process %s has moved memory meanwhile: it is read once more", process.pid)
            elif reason:
                log.info("process %s: its memory is read once more: %s", process.pid, reason)
            else:
                self._right[process] = memory, scan_dirty(process.pid)

    def pieces(self, process: Process, now: Sequence[Span]) -> Iterator[Piece]:
        """Yield what makes up the memory of a process: what is right as it was read, and what is to be read."""
        if process not in self._right:
            return iter([Piece(tuple(now))] if now else [])
        memory, dirty = self._right[process]
        return memory.pieces(now, dirty, most=MOST_PIECES // len(self._right))


def _copy(dump: Dump, watched: Sequence[_Watched]) -> _Copied:
    workers = min(dump.call().workers, MOST_WORKERS)
    size = sum(run.size_bytes for one in watched for run in one.runs)
    space = os.statvfs(dump.place)
    if size > space.f_bavail * space.f_frsize:
        raise StoreFull(f"its {size} bytes of memory do not fit into {dump.place_name}")
    with dump.journal.phase("pre-copy") as phase:
        phase["bytes"] = size
        common = common_spans(one.process.pid for one in watched)
        found = [(one, source) for one in watched for source in sources(one.process, one.runs, common, _opener)]
        rows, packs = pack(
            [source for _, source in found],
            dump.place,
            prefix=READ_PREFIX,
            workers=workers,
            durable=not dump.call().leave_running,
            patience=dump.patience,
            progress=dump.progress,
        )
    copied = {}
    for one in watched:
        segments = [s for (other, _), row in zip(found, rows, strict=True) if other is one for s in row]
        copied[one] = CopiedMemory(one.runs, segments, chunk_sizes(dump.place, packs, segments))
    return _Copied(dump.init_pid, copied, packs, workers)


def why_not(policy: Policy, pids: Iterable[int]) -> str:
    """Return why memory of processes cannot be read while they run, "" if it can.

    Args:
        policy: of their container.
        pids: all of its processes.
    """
    if policy.mode != "inline":
        return f'mode is "{policy.mode}"'
    if not soft_dirty.measure():  # whatever is noted: whether memory is right depends on it
        return "this kernel does not mark the pages that are written to (soft-dirty bits)"
    if not soft_dirty.outlive_merging():
        least = ".".join(map(str, soft_dirty.KEPT_SINCE))
        return f"Linux {os.uname().release} loses soft-dirty bits when mappings are merged; {least} and 6.19 do not"
    if not page_moves.works():
        return "this kernel does not count what a process moves in its memory (trace events of mremap)"
    return _unseen_writer(pids)


def _unseen_writer(pids: Iterable[int]) -> str:
    """Return what may write to processes' memory without a fault, "" if nothing may."""
    for pid in pids:
        for file in open_files(pid):
            if file.name == _IO_URING:
                return f"process {pid} uses io_uring"
            if stat.S_ISCHR(file.mode) and not _is_harmless(file.device):
                return f"process {pid} has the device {file.name} open"
            if _is_direct(pid, file.fd):
                return f"process {pid} has {file.name} open for direct I/O"
        for mapping in read_mappings(pid):
            name = mapping.name
            if name.startswith((_IO_URING, _AIO)):
                return f"process {pid} uses asynchronous I/O ({name})"
            if name.startswith("/dev/") and not name.startswith(PLAIN_FILES):
                return f"process {pid} has the device {name} mapped"
    return ""


def _is_harmless(device: int) -> bool:
    major, minor = os.major(device), os.minor(device)
    return major in _TERMINALS or (major == _MEMORY_DEVICES and minor in _HARMLESS_MINORS)


def _is_direct(pid: int, fd: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return False
    return any(int(line.split()[1], 8) & os.O_DIRECT for line in lines if line.startswith("flags:"))


def _watch(pids: Iterable[int]) -> Iterator[_Watched]:
    """Clear the bits of those processes that have enough memory; yield what they have then."""
    for pid in pids:
        process = Process.find(pid)
        if process is None or anonymous_bytes(pid) < LEAST_PROCESS_BYTES:
            continue
        space, counter = address_space(pid), None
        try:
            counter = MoveCounter(process)
            soft_dirty.clear(pid)
            yield _Watched(process, counter, space, list(_apart(scan_private(pid))))
        except OSError as error:
            log.info("process %s is not pre-copied: %s", pid, plain(error))
            if counter is not None:
                counter.close()


def _apart(runs: Iterable[Span]) -> Iterator[Span]:
    """Yield runs in order, none beside another: of a process that runs, the kernel may show a page twice."""
    last = Span(0, 0)
    for run in runs:
        if run.start <= last.end:
            last = Span(last.start, max(last.end, run.end))
            continue
        if last.size_bytes:
            yield last
        last = run
    if last.size_bytes:
        yield last


class _MovingMemory(ProcessMemory):
    """The memory of a process that runs, and may have ended: what is gone when it is read reads as zeros."""

    def __init__(self, process: Process) -> None:
        try:
            super().__init__(process)
        except ProcessLookupError:
            self._pid, self._file = 0, -1  # no process

    def read_into(self, view: memoryview, address: int) -> int:
        """Fill `view`."""
        return _fill(super().read_into, view, address)

    def read_shared_into(self, view: memoryview, address: int) -> int:
        """Do the same where pages are to stay shared."""
        return _fill(super().read_shared_into, view, address)


def _fill(read: Callable[[memoryview, int], int], view: memoryview, address: int) -> int:
    done = 0
    while done < len(view):
        got = 0
        with contextlib.suppress(OSError):
            got = read(view[done:], address + done)
        if not got:
            got = min(len(view) - done, PAGE_BYTES - (address + done) % PAGE_BYTES)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view, done)), 0, got)
        done += got
    return done


def _opener(process: Process) -> Callable[[], _MovingMemory]:
    return partial(_MovingMemory, process)
