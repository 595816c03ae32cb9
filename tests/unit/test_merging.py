"""What CRIU wrote and what was read before become one page image, byte for byte as CRIU alone would have written it."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from ocihook.criu.images import (
    PAGE_BYTES,
    PageRun,
    check_page_images,
    complete_pagemap,
    make_pagemap,
    parse_pagemap,
    parse_runs,
)
from ocihook.criu.proto import message_class
from ocihook.errors import ImageError, IntegrityError
from ocihook.images.image_set import open_packs
from ocihook.images.merging import (
    READ_PREFIX,
    complete_pagemaps,
    is_incomplete,
    merge,
    merge_images,
    pages_name_of,
)
from ocihook.linux.procfs import Process
from ocihook.memory.left_out import join, note_left_out
from ocihook.memory.snapshot import Copied
from ocihook.model import ContainerRef
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import PackedImage, PackedManifest
from ocihook.packs.packing import pack, pack_images
from ocihook.packs.pages import RANGE_BYTES, ImageFile, Source
from ocihook.packs.runs import RunPages
from tests.damage import flip_bit

PID, PAGES_ID = 7, 3
START = 1 << 40
PARENT, PRESENT = 1, 4


def runs_of(pages: dict[int, bytes], shortest: random.Random | None = None) -> list[tuple[int, int]]:
    """Return start and end, in pages, of runs; some are cut in two for no reason, if there is a source of chance."""
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page and not (shortest and shortest.random() < 0.1):
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


def as_pagemap(rows: list[tuple[int, int, bool]], *, is_old: bool) -> bytes:
    """Return CRIU's pagemap of rows of first page, end, and whether they are in the page image."""
    made = make_pagemap([], PAGES_ID)
    for first, end, is_present in rows:
        entry = message_class("pagemap_entry")(vaddr=START + first * PAGE_BYTES, compat_nr_pages=end - first)
        if is_old:
            entry.in_parent = not is_present  # type: ignore[attr-defined]
        else:
            entry.nr_pages = end - first  # type: ignore[attr-defined]
            entry.flags = PRESENT if is_present else PARENT  # type: ignore[attr-defined]
        data = entry.SerializeToString()
        made += len(data).to_bytes(4, "little") + data
    return made


class Dump:
    """An image set of one process, of which pages were read, and others written, as chance wants it."""

    def __init__(self, directory: Path, chance: random.Random, *, pages: int) -> None:
        self.directory = directory
        density, dirty = chance.choice([0.1, 0.5, 0.99]), chance.choice([0.0, 0.01, 0.3])
        there = [page for page in range(pages) if chance.random() < density] or [0]
        self.read = {page: self._content(page, b"read") for page in there}
        self.memory = dict(self.read)  # as CRIU alone would have written it
        self.written: dict[int, bytes] = {}
        for page in range(-3, pages + 3):
            if chance.random() < dirty:
                self.written[page] = self.memory[page] = self._content(page, b"written")
        for page in [page for page in self.read if page not in self.written and chance.random() < dirty]:
            del self.memory[page]  # it is gone: CRIU does not name it at all
        (directory / "pages-3.img").write_bytes(b"".join(self.written[page] for page in sorted(self.written)))
        left_out = {page: b"" for page in self.memory if page not in self.written}
        rows = [(*run, True) for run in runs_of(self.written, chance)]
        rows += [(*run, False) for run in runs_of(left_out, chance)]
        self.pagemap = as_pagemap(sorted(rows), is_old=chance.random() < 0.5)
        (directory / f"pagemap-{PID}.img").write_bytes(self.pagemap)
        self.pagemaps = {PID: self.known([(START + a * PAGE_BYTES, START + b * PAGE_BYTES) for a, b in self.spans])}
        (directory / pages_name_of(PID)).write_bytes(b"".join(self.read[page] for page in sorted(self.read)))
        images, packs = pack_images(directory, [pages_name_of(PID)], prefix=READ_PREFIX, workers=2, durable=False)
        (directory / pages_name_of(PID)).unlink()
        self.manifest = self.manifest_of(images, packs)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """What was read, in pages."""
        return runs_of(self.read)

    @staticmethod
    def known(spans: list[tuple[int, int]]) -> bytes:
        """Return the pagemap of what was read."""
        return make_pagemap(spans, 1)

    @staticmethod
    def _content(page: int, word: bytes) -> bytes:
        return bytes(PAGE_BYTES) if page % 5 == 0 else (word + str(page).encode()).ljust(PAGE_BYTES, b"\1")

    @staticmethod
    def manifest_of(images: object, packs: object) -> PackedManifest:
        """Return a manifest of such images."""
        return PackedManifest(
            created="",
            writer="",
            container=ContainerRef(id="c"),
            host={},
            packed_images=tuple(images),  # type: ignore[arg-type]
            other_images=(),
            packs=tuple(packs),  # type: ignore[arg-type]
        )

    def merged(self) -> tuple[PackedImage, bytes]:
        """Join all; return the image, and what it has."""
        found = merge_images(self.directory, self.directory, self.manifest, self.pagemaps, workers=2, durable=False)
        (image,) = found.images
        return image, self.content_of(self.directory, found.images, found.packs)

    def content_of(self, directory: Path, images: Sequence[PackedImage], infos: Sequence[PackInfo]) -> bytes:
        """Return what the one image has that is in packs."""
        (image,) = images
        packs = open_packs(directory, self.manifest_of(images, infos))
        try:
            content = bytearray(image.size_bytes)
            RunPages(packs.parts[image.name]).read_into(memoryview(content), 0)
        finally:
            packs.close()
        return bytes(content)

    def expected(self) -> bytes:
        """Return the page image as CRIU alone would have written it."""
        return b"".join(self.memory[page] for page in sorted(self.memory))


@pytest.mark.parametrize("seed", range(12))
def test_a_joined_image_is_what_criu_alone_would_have_written(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    dump = Dump(tmp_path, chance, pages=chance.choice([1, 17, 300, 5000]))
    if not is_incomplete(dump.pagemap):
        return
    image, content = dump.merged()
    assert image.name == "pages-3.img"
    assert content == dump.expected()
    assert dump.merged()[1] == content, "it may run again"
    for _ in range(2):
        complete_pagemaps(tmp_path)
    after = (tmp_path / f"pagemap-{PID}.img").read_bytes()
    assert [run[:2] for run in parse_runs(after)] == [run[:2] for run in parse_runs(dump.pagemap)]
    assert not is_incomplete(after)
    assert parse_pagemap(after).present_bytes == image.size_bytes
    check_page_images(tmp_path, {image.name: image.size_bytes})


@pytest.mark.parametrize("seed", range(6))
def test_with_memory_that_is_read_later_it_is_the_same(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    images, record, place = (tmp_path / name for name in ("images", "record", "place"))
    for directory in (images, record, place):
        directory.mkdir()
    dump, process = Dump(images, chance, pages=chance.choice([17, 300, 5000])), Process(PID, 1)
    (record / str(PID)).write_bytes(dump.pagemaps[PID])
    left_out = note_left_out(images, record, {str(PID): process})
    complete_pagemaps(images)
    assert note_left_out(images, record, {str(PID): process}) == left_out, "it may run again"
    if not is_incomplete(dump.pagemap):
        assert left_out == []
        return
    (image,) = left_out
    areas = image.areas()
    assert {area.process for area in areas} == {process}
    sources = []
    for number, area in enumerate(areas):
        pages = [(at - START) // PAGE_BYTES for span in area.spans for at in range(*span, PAGE_BYTES)]
        (tmp_path / str(number)).write_bytes(b"".join(dump.memory[page] for page in pages))
        sources.append(Source(partial(ImageFile, tmp_path / str(number)), 0, len(pages) * PAGE_BYTES))
    copied = Copied(*pack(sources, place, prefix=READ_PREFIX, workers=2, durable=False), was_forked=True)
    moved = join(left_out, copied, {image.name: images / image.name}, place, 2)
    assert dump.content_of(place, moved.images, moved.packs) == dump.expected()
    check_page_images(images, {image.name: image.size_bytes})


def test_what_criu_has_not_touched_stays_in_its_pack(tmp_path: Path) -> None:
    chance = random.Random(1)
    dump = Dump(tmp_path, chance, pages=1)
    pages = 3 * RANGE_BYTES // PAGE_BYTES
    dump.read = {page: dump._content(page, b"read") for page in range(pages)}
    dump.memory = {**dump.read, 5: b"w" * PAGE_BYTES}
    (tmp_path / "pages-3.img").write_bytes(dump.memory[5])
    (tmp_path / f"pagemap-{PID}.img").write_bytes(
        as_pagemap([(0, 5, False), (5, 6, True), (6, pages, False)], is_old=False)
    )
    dump.pagemaps = {PID: dump.known([(START, START + pages * PAGE_BYTES)])}
    (tmp_path / pages_name_of(PID)).write_bytes(b"".join(dump.read.values()))
    for path in tmp_path.glob("*.pack"):
        path.unlink()
    images, packs = pack_images(tmp_path, [pages_name_of(PID)], prefix=READ_PREFIX, workers=1, durable=False)
    dump.manifest = dump.manifest_of(images, packs)
    image, content = dump.merged()
    assert content == dump.expected()
    assert image.segments[1:] == images[0].segments[1:]
    assert image.segments[0] not in images[0].segments


def naive(runs: list[PageRun], read: list[tuple[int, int]]) -> list[tuple[bool, int]]:
    """Return for each page of an image whether it was read, and its offset there; LookupError where nobody has it."""
    pages = [page for start, end in read for page in range(start, end, PAGE_BYTES)]
    found, written = [], 0
    for run in runs:
        for page in range(run.vaddr, run.vaddr + run.pages * PAGE_BYTES, PAGE_BYTES):
            if run.is_present:
                found.append((False, written))
                written += PAGE_BYTES
            elif page not in pages:
                raise LookupError(page)
            else:
                found.append((True, pages.index(page) * PAGE_BYTES))
    return found


@pytest.mark.parametrize("seed", range(200))
def test_runs_holes_and_overlaps_against_a_naive_model(seed: int) -> None:
    chance = random.Random(seed)
    pages = {page: b"" for page in range(60) if chance.random() < 0.8}
    read = [(a * PAGE_BYTES, b * PAGE_BYTES) for a, b in runs_of(pages, chance)]
    missing = chance.choice([0.0, 0.0, 0.05])
    named = {page: b"" for page in range(60) if page in pages or chance.random() < missing}
    written = {page for page in range(62) if chance.random() < 0.2}
    rows = [PageRun(a * PAGE_BYTES, b - a, True) for a, b in runs_of(dict.fromkeys(written, b""), chance)]
    rows += [
        PageRun(a * PAGE_BYTES, b - a, False)
        for a, b in runs_of({page: b"" for page in named if page not in written}, chance)
    ]
    rows.sort()
    try:
        expected = naive(rows, read)
    except LookupError:
        with pytest.raises(ImageError, match="which nobody has read before"):
            list(merge(rows, read))
        return
    pieces = list(merge(rows, read))
    found = [(p.is_read, p.offset + at) for p in pieces for at in range(0, p.size_bytes, PAGE_BYTES)]
    assert found == expected
    for one, after in pairwise(pieces):
        assert one.is_read != after.is_read or one.offset + one.size_bytes != after.offset, "joined"


def test_a_clean_page_that_nobody_has_read_is_refused(tmp_path: Path) -> None:
    dump = Dump(tmp_path, random.Random(3), pages=300)
    with pytest.raises(ImageError, match=f"memory that pagemap-{PID}.img names, which nobody has read"):
        merge_images(tmp_path, tmp_path, dump.manifest, {}, workers=1, durable=False)
    dump.pagemaps = {PID: dump.known([(START - PAGE_BYTES, START)])}
    with pytest.raises(ImageError, match="which nobody has read before"):
        dump.merged()
    record = tmp_path / "record"
    record.mkdir()
    (record / str(PID)).write_bytes(dump.pagemaps[PID])
    with pytest.raises(ImageError, match=f"memory that pagemap-{PID}.img names, which nobody was to read"):
        note_left_out(tmp_path, record, {})
    with pytest.raises(ImageError, match="which nobody has read before"):
        note_left_out(tmp_path, record, {str(PID): Process(PID, 1)})
    assert (tmp_path / f"pagemap-{PID}.img").read_bytes() == dump.pagemap


def test_a_damaged_pack_is_refused_where_it_is_packed_again(tmp_path: Path) -> None:
    chance = random.Random(0)
    dump = Dump(tmp_path, chance, pages=1)
    dump.written = {}
    pages = 64
    dump.read = {page: dump._content(page, b"read") for page in range(pages)}
    for path in tmp_path.glob("*.pack"):
        path.unlink()
    (tmp_path / pages_name_of(PID)).write_bytes(b"".join(dump.read.values()))
    images, packs = pack_images(tmp_path, [pages_name_of(PID)], prefix=READ_PREFIX, workers=1, durable=False)
    dump.manifest = dump.manifest_of(images, packs)
    dump.pagemaps = {PID: dump.known([(START, START + pages * PAGE_BYTES)])}
    (tmp_path / "pages-3.img").write_bytes(b"w" * PAGE_BYTES)
    (tmp_path / f"pagemap-{PID}.img").write_bytes(as_pagemap([(0, 9, False), (9, 10, True)], is_old=False))
    flip_bit(tmp_path / packs[0].name, 100)
    with pytest.raises(IntegrityError, match="is damaged"):
        dump.merged()


def test_a_complete_pagemap_is_left_as_it_is() -> None:
    made = as_pagemap([(0, 2, True), (4, 5, True)], is_old=False)
    assert complete_pagemap(made) == made
    assert not is_incomplete(made)
