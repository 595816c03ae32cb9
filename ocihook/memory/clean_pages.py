"""Host memory in a dump: read past CRIU on all cores while everything stands still; no process loses a page.

CRIU, told to track memory, writes no page that is clean since an earlier dump. So all private memory is read and marked
as clean, and an earlier dump is made up that has it (criu/parent_images.py). What CRIU writes beside it, and what it
leaves out, become one page image (images/merging.py). Where anything goes wrong before CRIU begins, it dumps all by
itself.

Where a snapshot is taken, nothing is read before CRIU begins, and no page image is joined before the snapshot is read
(left_out.py). So nobody looks for pages before CRIU does: the earlier dump has all that is mapped.

Which memory is clean the kernel knows by its soft-dirty bits: Documentation/admin-guide/mm/soft-dirty.rst.
"""

import logging
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple

from ocihook import __version__
from ocihook.config import Policy
from ocihook.criu.files import CriuOptions, options_for
from ocihook.criu.images import make_pagemap
from ocihook.criu.parent_images import PAGES_ID, has_parent, make_parent, remove_parent
from ocihook.errors import IntegrityError, OcihookError, StoreFull, plain
from ocihook.images.image_set import MovedRegions, discard_packs, discard_regions
from ocihook.images.merging import READ_PREFIX, Merged, complete_pagemaps, merge_images, pages_name_of
from ocihook.images.pre_copied import Piece
from ocihook.linux import soft_dirty
from ocihook.linux.files import identity, same_directory
from ocihook.linux.memory import ProcessMemory, Span, common_spans
from ocihook.linux.page_scan import anonymous_bytes, private_spans, scan_private
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants, pid_below
from ocihook.memory.left_out import note_left_out
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import PackedImage, PackedManifest, Segment, read_manifest, write_manifest
from ocihook.packs.packing import pack
from ocihook.packs.pages import Parts, Source
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant
from ocihook.session.timing import opener

LEAST_PROCESS_BYTES = 64 << 20  # of private memory; of a process with less, CRIU is as fast
MOST_WORKERS = 400  # the packs of two readings have numbers of three digits at most
# A longer run is packed for itself, so that what CRIU writes of the short ones beside it leaves it where it is.
_LONG_RUN_BYTES = 1 << 20
_CLEAR_SOFT_DIRTY = "4"  # proc_pid_clear_refs(5)
_MERGED_NAME = "merged"  # directory, in that with the record, with the manifest of what was joined

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackFacts(Facts):
    """How CRIU was called."""

    tracks_memory: bool = False  # and nobody but us makes it a parent


@dataclass(kw_only=True)
class PagesRead(Effect, kind="pages-read"):
    """Memory was read into packs, or is to be, and an earlier dump made up that CRIU compares with."""

    holds_container: ClassVar[bool] = False
    directory: Path  # the image directory
    identity: list[int]
    place: Path  # of the packs
    place_identity: list[int]
    record: Path  # directory with what was read
    snapshot: dict[str, Process] = field(default_factory=dict)  # by CRIU's numbers, what is read later

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Remove the made-up dump; and the packs, if they did not become a checkpoint."""
        images = same_directory(self.directory, self.identity)
        if images:
            remove_parent(images)
        place = same_directory(self.place, self.place_identity)
        if place:
            discard_regions(place)
        shutil.rmtree(self.record, ignore_errors=True)


class _Read(NamedTuple):
    """A process whose memory is read."""

    process: Process
    pid: int  # CRIU's number
    runs: list[Span]


class ReadPages(Participant):
    """Reads memory once all stands still, just before CRIU begins; or has CRIU leave it to a snapshot."""

    def needs_tasks(self, dump: Dump) -> bool:
        """Find out whether CRIU tracks memory, and a process has enough of it, or will have; tasks need not run."""
        dump.reads_memory = can_read(dump)
        return False

    def hold(self, dump: Dump) -> None:
        """Read it; or leave it to CRIU if that is not possible."""
        remove_parent(dump.directory)  # of a dump that ended with the node's power: CRIU must not compare with it
        if not dump.reads_memory:
            return
        effect = PagesRead(
            directory=Path(dump.image_dir),
            identity=identity(dump.directory),
            place=dump.place_name,
            place_identity=identity(dump.place),
            record=dump.journal.path.with_suffix(".read"),
        )
        dump.journal.add(effect)
        try:
            try:
                _read(dump, effect)
            except (OcihookError, OSError) as error:
                if dump.pre_copied is None:
                    raise
                dump.patience.check()
                log.warning("container %s: what was pre-copied is of no use: %s", dump.container, plain(error))
                dump.pre_copied = None
                remove_parent(dump.directory)
                shutil.rmtree(effect.record, ignore_errors=True)
                _read(dump, effect)
        except (OcihookError, OSError) as error:
            remove_parent(dump.directory)
            discard_read(dump.place)
            shutil.rmtree(effect.record, ignore_errors=True)
            dump.journal.forget(effect)
            dump.patience.check()
            log.warning("container %s: all memory goes through CRIU: %s", dump.container, plain(error))


class MergedPages(Participant):
    """Joins what was read with what CRIU has written; or finds out what is to be joined."""

    def after_images(self, dump: Dump) -> str:
        """Join it; refuse the dump if CRIU has left out anything that was not read."""
        effect = dump.journal.find(PagesRead)
        if effect is None:
            return ""
        if effect.snapshot:
            left_out = note_left_out(dump.directory, effect.record, effect.snapshot)
            complete_pagemaps(dump.directory)
            remove_parent(dump.directory)
            dump.awaited = {image.name: image.size_bytes for image in left_out}
            return ""
        with dump.journal.phase("merge") as phase:
            merged = _merge(dump, effect)
            complete_pagemaps(dump.directory)
            remove_parent(dump.directory)
            phase["bytes"] = sum(image.size_bytes for image in merged.images)
        if not merged.images:  # CRIU took each process for another one than was read
            discard_read(_place(dump, effect))
            return ""
        moved = dump.moved or MovedRegions((), (), {})
        dump.moved = moved._replace(packs=moved.packs + merged.packs, images=merged.images)
        return f"{phase['bytes']} bytes of host memory were read past CRIU"


def can_read(dump: Dump) -> bool:
    """Return whether memory is to be read past CRIU: it tracks memory, the kernel too, and there is enough of it."""
    return (
        not left_to_criu(dump.policy)
        and _is_tracked(dump)
        and soft_dirty.works()
        and dump.freezer is not None
        and (dump.has_gpu or readable_bytes(dump.init_pid) > 0)
    )


def readable_bytes(init_pid: int) -> int:
    """Return how much memory of a container is read past CRIU, if any is: about, as long as it runs."""
    sizes = map(anonymous_bytes, descendants(init_pid))
    return sum(size for size in sizes if size >= LEAST_PROCESS_BYTES)


def left_to_criu(policy: Policy) -> str:
    """Return why a policy leaves all memory to CRIU in a dump, "" if it does not."""
    if policy.host_memory != "direct":
        return f'host_memory is "{policy.host_memory}"'
    return 'mode is "off"' if policy.mode == "off" else ""


def is_asked_to_track(options: CriuOptions) -> bool:
    """Return whether CRIU tracks memory; runtimes have it do so where an earlier dump is named."""
    return options.has("parent-path") or (options.has("track-mem") and options.has("prev-images-dir"))


def _is_tracked(dump: Dump) -> bool:
    """Return whether CRIU tracks memory, and nobody but us makes it an earlier dump to compare with."""
    call, journal = dump.call(), dump.journal
    if not journal.facts(TrackFacts).tracks_memory:  # else it was found before the agent was killed
        options = options_for(dump.container.runtime, call.criu_config, call.criu_asked)
        # The launcher has removed a link to none.
        if not is_asked_to_track(options) or has_parent(dump.directory):
            return False
        journal.note(TrackFacts(tracks_memory=True))
    return True


def discard_read(place: Path) -> None:
    """Remove packs of what was read that are not used."""
    for path in place.glob(f"{READ_PREFIX}[0-9]*.pack"):
        path.unlink(missing_ok=True)


def _read(dump: Dump, effect: PagesRead) -> None:
    journal, place = dump.journal, dump.place
    if dump.freezer is None or not dump.freezer.is_frozen():
        raise OcihookError("its tasks are not frozen")
    copied = dump.pre_copied
    if copied is None:
        discard_earlier(place)
    else:
        copied.settle()
    found = [one for pid in descendants(dump.init_pid) if (one := _find(dump, pid))]
    effect.record.mkdir(mode=0o700)
    if dump.takes_snapshot and found:
        _check_room(dump, readable_bytes(dump.init_pid))
        effect.snapshot = {str(one.pid): one.process for one in found}
        journal.save()
    else:
        write_manifest(effect.record, _manifest(dump, _pack(dump, found)), durable=False)
    with journal.phase("mark clean"):
        for one in found:
            if not one.process.is_alive():
                raise OcihookError(f"process {one.process.pid} ended while its memory was read")
            Path(f"/proc/{one.process.pid}/clear_refs").write_text(_CLEAR_SOFT_DIRTY)
    pagemaps = {one.pid: make_pagemap(one.runs, PAGES_ID) for one in found}
    for pid, pagemap in pagemaps.items():
        (effect.record / str(pid)).write_bytes(pagemap)
    make_parent(dump.directory, pagemaps)


def _check_room(dump: Dump, size_bytes: int) -> None:
    space = os.statvfs(dump.place)
    if size_bytes > space.f_bavail * space.f_frsize:
        raise StoreFull(f"its {size_bytes} bytes of memory do not fit into {dump.place_name}")


def _pack(dump: Dump, found: Sequence[_Read]) -> Merged:
    """Read what has not been pre-copied."""
    journal, copied, place = dump.journal, dump.pre_copied, dump.place
    pieces = [
        (one, piece)
        for one in found
        for piece in (copied.pieces(one.process, one.runs) if copied else [Piece(tuple(one.runs))])
    ]
    to_read = [(one, piece.spans) for one, piece in pieces if not piece.segments]
    _check_room(dump, sum(span.size_bytes for _, spans in to_read for span in spans))
    common = common_spans(descendants(dump.init_pid))
    with journal.phase("memory read") as phase, journal.spans(phase) as measured:
        phase["bytes"] = sum(span.size_bytes for _, spans in to_read for span in spans)
        rows_of = [list(sources(one.process, spans, common, partial(opener, measured))) for one, spans in to_read]
        rows, packs = pack(
            [source for row in rows_of for source in row],
            place,
            prefix=READ_PREFIX,
            first=copied.first if copied else 0,
            workers=min(dump.call().workers, MOST_WORKERS),
            durable=not dump.call().leave_running,
            patience=dump.patience,
            progress=dump.progress,
        )
    packed = iter(rows)
    fresh = iter([[segment for _ in row for segment in next(packed)] for row in rows_of])
    segments: dict[int, list[Segment]] = {one.pid: [] for one in found}
    for one, piece in pieces:
        segments[one.pid] += piece.segments or next(fresh)
    images = tuple(
        PackedImage(pages_name_of(one.pid), sum(run.size_bytes for run in one.runs), tuple(segments[one.pid]))
        for one in found
    )
    return Merged(images, tuple(_used(place, [*(copied.packs if copied else ()), *packs], segments.values())))


def _used(place: Path, packs: Iterable[PackInfo], rows: Iterable[Iterable[Segment]]) -> list[PackInfo]:
    """Remove packs that nothing is read from any more; return the others."""
    names = {segment.pack for row in rows for segment in row}
    kept = []
    for info in packs:
        if info.name in names:
            kept.append(info)
        else:
            (place / info.name).unlink(missing_ok=True)
    return kept


def discard_earlier(place: Path) -> None:
    """Remove what an earlier dump into the same directory has left, but nothing that this one has moved there."""
    if read_manifest(place) is not None:
        discard_packs(place)
        discard_regions(place)
    discard_read(place)  # also of one that the node's power loss has ended


def _find(dump: Dump, pid: int) -> _Read | None:
    process = Process.find(pid)
    if process is None or anonymous_bytes(pid) < LEAST_PROCESS_BYTES:
        return None
    number = pid_below(dump.init_pid, pid).split("/")[0]
    find_runs = private_spans if dump.takes_snapshot else scan_private
    return _Read(process, int(number), find_runs(pid)) if number.isdigit() else None


class _RunPages:
    """Reads runs of a process's memory as if they lay one after the other."""

    def __init__(self, memory: ProcessMemory, parts: Parts, common: Sequence[Span]) -> None:
        self._memory, self._parts, self._common = memory, parts, common

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`; return how many bytes there were."""
        done = 0
        for start, size, address in self._parts.within(offset, offset + len(view)):
            after = bisect_left(self._common, (address + size,))
            is_common = after > 0 and self._common[after - 1].end > address
            read = self._memory.read_shared_into if is_common else self._memory.read_into
            got = read(view[start - offset : start - offset + size], address)
            done += got
            if got < size:
                break
        return done

    def close(self) -> None:
        """Close the memory."""
        self._memory.close()


def sources(
    process: Process,
    runs: Iterable[Span],
    common: Sequence[Span],
    opener_of: Callable[[Process], Callable[[], ProcessMemory]],
) -> Iterator[Source]:
    """Yield what is packed of a process's memory, in the order of its runs; `common`: where others may share it."""
    for is_long, row in groupby(runs, lambda run: run.size_bytes >= _LONG_RUN_BYTES):
        for group in ([run] for run in row) if is_long else (list(row),):
            parts = Parts(_one_after_the_other(group))
            yield Source(partial(_open, opener_of(process), parts, common), 0, parts.size_bytes)


def _open(opened: Callable[[], ProcessMemory], parts: Parts, common: Sequence[Span]) -> _RunPages:
    return _RunPages(opened(), parts, common)


def _one_after_the_other(runs: Iterable[Span]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for run in runs:
        yield at, run.size_bytes, run.start
        at += run.size_bytes


def _merge(dump: Dump, effect: PagesRead) -> Merged:
    """Join what is to be joined, or find what was joined before the agent was killed."""
    done = effect.record / _MERGED_NAME
    known = read_manifest(done) if done.exists() else None
    if known is not None:
        return Merged(known.packed_images, known.packs)
    read = read_manifest(effect.record)
    if read is None:
        raise IntegrityError(f"{effect.record}, the record of what memory was read, is gone")
    pagemaps = {int(path.name): path.read_bytes() for path in effect.record.iterdir() if path.name.isdigit()}
    merged = merge_images(
        dump.directory,
        _place(dump, effect),
        read,
        pagemaps,
        workers=dump.call().workers,
        durable=not dump.call().leave_running,
        patience=dump.patience,
        progress=dump.progress,
    )
    done.mkdir(mode=0o700, exist_ok=True)
    write_manifest(done, _manifest(dump, merged), durable=False)
    return merged


def _place(dump: Dump, effect: PagesRead) -> Path:
    return dump.directory if identity(dump.directory) == effect.place_identity else effect.place


def _manifest(dump: Dump, merged: Merged) -> PackedManifest:
    return PackedManifest(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        writer=f"ocihook {__version__}",
        container=dump.container,
        host={},
        packed_images=merged.images,
        other_images=(),
        packs=merged.packs,
    )
