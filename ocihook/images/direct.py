"""Direct restore: which memory goes past CRIU into restored processes, and the pagemaps that leave CRIU the rest.

CRIU restores with one thread a process. Most memory lies in a few long runs of plain mappings. Pagemaps are cut so that
CRIU does not know of these: it maps them, and finds no pages. While the new processes wait, all cores write them.

The original pagemap keeps a second name until the restore is over. What is to be written is the difference from the cut
one: no other record is needed. That name also has the digest of the cut pagemap in it, so that later, even after a
power loss, a cut pagemap can be distinguished from one that a new dump has written.
"""

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.images import (
    PAGE_BYTES,
    PageRun,
    cut_pagemap,
    join_pagemap,
    page_images,
    pages_name_in,
    parse_pagemap,
    parse_runs,
    read_bounded,
)
from ocihook.criu.mappings import AddressSpace, Area, read_address_spaces, read_parents
from ocihook.errors import ImageError
from ocihook.linux.files import replace_file
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.packs.pages import (
    ImageFile,
    Part,
    Parts,
    Progress,
    Target,
    make_image,
    no_progress,
    scattered,
)
from ocihook.packs.runs import PlainImage, write_images

LEAST_RUN_BYTES = 1 << 20  # a shorter run is left to CRIU
LEAST_PROCESS_BYTES = 64 << 20  # of a process in such runs; less is left to CRIU, which is as fast for it
LEAST_WORKERS = 4  # with fewer CRIU reads page images of its own as fast; from packs and the store it pays with any
_BYTES_A_RUN = 64 << 10  # a process with shorter runs, on average of all, is left to CRIU: reading them takes longer
# The launcher of every release calls the agent at `post-restore` where a name like this exists (hook/criu-action).
_SAVED_NAME = re.compile(r"ocihook-region-(pagemap-[0-9]{1,10}\.img)-([0-9a-f]{32})\.pack")


class Direct(NamedTuple):
    """Memory of one process that goes past CRIU."""

    pid: int  # CRIU's number of the process
    pages_name: str  # of the page image that it is in
    parts: Parts  # of that image, and the addresses where they go
    kept: Parts  # what CRIU restores, and where it goes in the page image that CRIU is given


class Cut(NamedTuple):
    """A pagemap that is to be cut."""

    name: str
    pagemap: bytes  # the cut one
    direct: Direct


class Way(NamedTuple):
    """How the memory of a process comes back in a restore."""

    pid: int  # CRIU's number of the process
    cut: Cut | None  # for what goes past CRIU; None: all is left to it
    reason: str  # why; "" if not
    is_packed: bool  # it comes out of packs, or of the store


class MemoryImages(NamedTuple):
    """What CRIU's images say of the memory of all processes."""

    spaces: Mapping[int, AddressSpace]  # by CRIU's numbers of the processes
    parents: Mapping[int, int]
    pagemaps: Mapping[int, bytes]  # as CRIU wrote them
    pages_names: Sequence[str]  # what all pagemaps name, those of shared memory, too


class Run(NamedTuple):
    """Memory at an address, and its place in a page image."""

    address: int
    size_bytes: int
    offset: int


def join(runs: Iterable[PageRun]) -> Iterator[Run]:
    """Yield the runs that a page image has pages of; adjacent ones are joined."""
    last = Run(0, 0, 0)
    for address, pages, is_present in runs:
        if not is_present:
            continue
        size, offset = pages * PAGE_BYTES, last.offset + last.size_bytes
        if last.size_bytes and last.address + last.size_bytes == address:
            last = last._replace(size_bytes=last.size_bytes + size)
            continue
        if last.size_bytes:
            yield last
        last = Run(address, size, offset)
    if last.size_bytes:
        yield last


def within(runs: Iterable[Run], areas: Iterable[Area]) -> Iterator[Run]:
    """Yield the parts of runs that lie in areas, area by area; both are in the order of addresses."""
    rest = iter(areas)
    area = next(rest, None)
    for run in runs:
        end = run.address + run.size_bytes
        while area is not None and area.start < end:
            low, high = max(run.address, area.start), min(end, area.end)
            if low < high:
                yield Run(low, high - low, run.offset + low - run.address)
            if area.end > end:
                break
            area = next(rest, None)


def too_little(all_bytes: int, long_bytes: int) -> str:
    """Return why a process is left to CRIU for the size of its memory, "" if it is not.

    Args:
        all_bytes: its memory that CRIU dumps.
        long_bytes: of that, what is in long enough runs of memory that may go past it.
    """
    if all_bytes < LEAST_PROCESS_BYTES:
        return f"it has less than {LEAST_PROCESS_BYTES >> 20} MiB"
    if long_bytes < LEAST_PROCESS_BYTES:
        return (
            f"less than {LEAST_PROCESS_BYTES >> 20} MiB of it are plain memory, in rows of {LEAST_RUN_BYTES >> 20} MiB "
            "and more, that no parent or child has mapped alike"
        )
    return ""


def choose(pagemap: bytes, areas: Iterable[Area]) -> tuple[list[tuple[int, int]], str]:
    """Return start and end of what goes past CRIU; [] and the reason for a process that is left to it.

    Args:
        pagemap: an image, as CRIU wrote it.
        areas: those that may go past it, in the order of addresses.

    Raises:
        ImageError: if the pagemap is damaged.
    """
    known = parse_pagemap(pagemap)
    if known.is_compressed:
        return [], "CRIU has compressed it"
    if reason := too_little(known.present_bytes, LEAST_PROCESS_BYTES):
        return [], reason
    count = end = 0
    for address, pages, is_present in parse_runs(pagemap):
        if address < end or not is_present:  # never with pages of a parent: CRIU then restores page by page
            return [], "some of it is in the images of an earlier dump"
        count, end = count + 1, address + pages * PAGE_BYTES
    long = [run for run in within(join(parse_runs(pagemap)), areas) if run.size_bytes >= LEAST_RUN_BYTES]
    long_bytes = sum(run.size_bytes for run in long)
    if reason := too_little(known.present_bytes, long_bytes):
        return [], reason
    if long_bytes < count * _BYTES_A_RUN:
        return [], f"it is in {count} runs, which take longer to read than CRIU takes"
    return [(run.address, run.address + run.size_bytes) for run in long], ""


def own_areas(spaces: Mapping[int, AddressSpace], parents: Mapping[int, int]) -> dict[int, list[Area]]:
    """Return the plain areas of each process that CRIU does not restore as shared with its parent or a child.

    CRIU has the child inherit what both have mapped alike, and keeps pages that are the same in one copy (criu/mem.c:
    prepare_cow_vmas). Written to each process, they would take that memory once for each.
    """
    shared: dict[int, set[tuple[int, int]]] = {pid: set() for pid in spaces}
    for pid, space in spaces.items():
        parent = spaces.get(parents.get(pid, 0))
        if parent is not None and parent.executable == space.executable:
            alike = {area[:2] for area in space.areas} & {area[:2] for area in parent.areas}
            shared[pid] |= alike
            shared[parents[pid]] |= alike
    return {
        pid: [area for area in space.areas if area.is_plain and area[:2] not in shared[pid]]
        for pid, space in spaces.items()
    }


def split(pid: int, before: bytes, after: bytes) -> Direct:
    """Return what goes past CRIU, by a pagemap as CRIU wrote it and as it was cut.

    Raises:
        ImageError: if one is damaged.
    """
    left = (Area(run.address, run.address + run.size_bytes, is_plain=True) for run in join(parse_runs(after)))
    kept = Parts(_one_after_the_other(within(join(parse_runs(before)), left)))
    return Direct(pid, parse_pagemap(before).pages_name, Parts(_gaps(join(parse_runs(before)), kept)), kept)


def _one_after_the_other(runs: Iterable[Run]) -> Iterator[Part]:
    at = 0
    for run in runs:
        yield Part(run.offset, run.size_bytes, at)
        at += run.size_bytes


def _gaps(runs: Iterable[Run], kept: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of runs that are not kept, with their addresses; no kept part extends beyond a run."""
    rest = iter(kept)
    part = next(rest, None)
    for address, size, offset in runs:
        at, end = offset, offset + size
        while part is not None and part.start < end:
            if at < part.start:
                yield Part(at, part.start - at, address + at - offset)
            at = part.start + part.size_bytes
            part = next(rest, None)
        if at < end:
            yield Part(at, end - at, address + at - offset)


def read_memory_images(directory: Path) -> MemoryImages:
    """Read what an image set says of memory.

    Raises:
        ImageError: if an image is damaged.
        OSError: from the file system.
    """
    spaces = read_address_spaces(directory)
    paths = {pid: directory / f"pagemap-{pid}.img" for pid in spaces}
    return MemoryImages(
        spaces,
        read_parents(directory),
        {pid: read_bounded(path) for pid, path in paths.items() if path.exists()},
        [pages_name_in(read_bounded(path), path.name) for path in sorted(directory.glob("pagemap-*.img"))],
    )


def plan(directory: Path, packed: Collection[str]) -> list[Cut]:
    """Return how the pagemaps of an image set are to be cut; nothing is written.

    Args:
        directory: the image set.
        packed: names of page images that come out of packs, or of the store; all others are there, and stay.

    Raises:
        ImageError: if an image is damaged.
        OSError: from the file system.
    """
    ways = find_ways(read_memory_images(directory), packed, page_images(directory))
    return [way.cut for way in ways if way.cut is not None]


def find_ways(images: MemoryImages, packed: Collection[str], there: Collection[str] = ()) -> list[Way]:
    """Return how the memory of each process would come back; as `plan`, `there` being names that are taken."""
    areas = own_areas(images.spaces, images.parents)
    free = max(map(_number, {*images.pages_names, *there}), default=0) + 1
    common = {name for name, times in Counter(images.pages_names).items() if times > 1}
    ways: list[Way] = []
    for pid, written in sorted(images.pagemaps.items()):
        before = join_pagemap(written)
        pages_name = parse_pagemap(before).pages_name
        is_packed = pages_name in packed
        gone, reason = choose(before, areas[pid])
        if pages_name in common:
            gone, reason = [], "its page image is that of other memory, too"
        if not gone:
            ways.append(Way(pid, None, reason, is_packed))
            continue
        name = f"pagemap-{pid}.img"
        number = _number(pages_name) if is_packed else free + len(ways)
        after = cut_pagemap(before, gone, number, name)
        cut = Cut(name, after, split(pid, before, after))
        # What CRIU restores from page images of its own must be copied first; if that is much, cutting is not worth it.
        if is_packed or cut.direct.kept.size_bytes <= cut.direct.parts.size_bytes:
            ways.append(Way(pid, cut, "", is_packed))
        else:
            ways.append(Way(pid, None, "more of it would have to be copied for CRIU than goes past it", is_packed))
    return ways


def _number(pages_name: str) -> int:
    return int(pages_name.removeprefix("pages-").removesuffix(".img"))


def cut_pagemaps(directory: Path, cuts: Sequence[Cut], patience: Patience) -> None:
    """Put cut pagemaps in place, and write the page images that they name if these come from no packs.

    Raises:
        OSError: from the file system, a full one included; call `put_back` then.
        GivenUp: if its caller has given up; likewise.
    """
    for cut in cuts:
        os.link(directory / cut.name, directory / f"ocihook-region-{cut.name}-{_digest(cut.pagemap)}.pack")
        replace_file(directory / cut.name, cut.pagemap, mode=0o600, durable=False)
        pages_name = parse_pagemap(cut.pagemap).pages_name
        if pages_name != cut.direct.pages_name:
            make_image(directory / pages_name, cut.direct.kept.size_bytes)
            made = scattered(partial(ImageFile, directory / pages_name, writable=True), cut.direct.kept)
            write_plain(directory, {cut.direct.pages_name: made}, workers=1, patience=patience)


def put_back(directory: Path) -> None:
    """Put pagemaps back that were cut, and remove the page images that were made for these alone. May run any time.

    A pagemap that a new dump has written over a cut one is left. One that is not a valid pagemap was damaged by a power
    loss. An engine may be removing all of it meanwhile.

    Raises:
        OSError: from the file system.
    """
    with contextlib.suppress(FileNotFoundError):
        for name, saved in _saved(directory):
            _put_back(directory / name, saved)


def _put_back(path: Path, saved: Path) -> None:
    now = read_bounded(path) if path.exists() else b""
    try:
        pages_name = parse_pagemap(now).pages_name
    except ImageError:
        saved.replace(path)
        return
    if not saved.name.endswith(f"-{_digest(now)}.pack"):
        saved.unlink()
        return
    if pages_name != parse_pagemap(read_bounded(saved)).pages_name:
        path.with_name(pages_name).unlink(missing_ok=True)
    saved.replace(path)


def is_cut(directory: Path) -> bool:
    """Return whether any pagemap of an image set was cut."""
    return any(True for _ in _saved(directory))


def read_cut(directory: Path) -> list[Direct]:
    """Return what goes past CRIU, by the pagemaps that were cut.

    Raises:
        ImageError: if one is damaged.
        OSError: from the file system.
    """
    return [
        split(
            int(name.removeprefix("pagemap-").removesuffix(".img")),
            join_pagemap(read_bounded(saved), saved.name),
            read_bounded(directory / name),
        )
        for name, saved in _saved(directory)
    ]


def _saved(directory: Path) -> list[tuple[str, Path]]:
    """Return the names of pagemaps that were cut, and the files that have them as they were."""
    names = sorted(entry.name for entry in os.scandir(directory))
    return [(match[1], directory / name) for name in names if (match := _SAVED_NAME.fullmatch(name))]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_plain(
    directory: Path,
    targets: Mapping[str, Target],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write parts of plain page images, as CRIU wrote them, to their targets.

    Raises:
        ImageError: if a page image ends early.
        OSError: from the file system; also if a process is gone, or has nothing mapped there.
    """
    images = {
        name: PlainImage(directory / name, 0, target.parts.end) for name, target in targets.items() if target.parts
    }
    write_images(images, targets, workers=workers, patience=patience, progress=progress)
