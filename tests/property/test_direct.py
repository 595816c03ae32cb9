"""Which memory goes past CRIU: pagemaps that are cut, against a model that looks at every single page."""

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ocihook.criu.images import PAGE_BYTES, cut_pagemap, parse_pagemap, parse_runs
from ocihook.criu.mappings import AddressSpace, Area
from ocihook.criu.proto import message_class
from ocihook.images.direct import join, own_areas, split, within
from ocihook.packs.pages import Part, Parts, ScatteredPages

HEAD = struct.pack("<II", 0x54564319, 0x56084025)
PAGES = 96


def framed(kind: str, **fields: int) -> bytes:
    data: bytes = message_class(kind)(**fields).SerializeToString()
    return struct.pack("<I", len(data)) + data


def pagemap(runs: list[tuple[int, int]]) -> bytes:
    rows = [framed("pagemap_entry", vaddr=a * PAGE_BYTES, compat_nr_pages=n, nr_pages=n, flags=4) for a, n in runs]
    return HEAD + framed("pagemap_head", pages_id=3) + b"".join(rows)


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Runs of pages (first, number) in order, some of them next to each other."""
    found, at = [], 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=8)):
        found.append((at + gap, size))
        at += gap + size
    return found


def numbers(runs: list[tuple[int, int]]) -> list[int]:
    return [page for first, count in runs for page in range(first, first + count)]


def pages_of(parts: Iterable[Part]) -> dict[int, int]:
    """Return where each page of an image goes, by its number there."""
    return {
        (start + at) // PAGE_BYTES: (to + at) // PAGE_BYTES
        for start, size, to in parts
        for at in range(0, size, PAGE_BYTES)
    }


@given(rows(), rows())
def test_a_cut_pagemap_and_what_goes_past_it_are_all_pages_once(
    runs: list[tuple[int, int]], gone: list[tuple[int, int]]
) -> None:
    before = pagemap(runs)
    spans = [(first * PAGE_BYTES, (first + count) * PAGE_BYTES) for first, count in gone]
    after = cut_pagemap(before, spans, 9)
    dumped, missing = numbers(runs), set(numbers(gone))
    left = [page for page in dumped if page not in missing]
    assert [run.vaddr // PAGE_BYTES + n for run in parse_runs(after) for n in range(run.pages)] == left
    assert parse_pagemap(after).pages_name == "pages-9.img"
    direct = split(1, before, after)
    assert direct.pages_name == "pages-3.img"
    place = {page: number for number, page in enumerate(dumped)}
    assert pages_of(direct.kept) == {place[page]: number for number, page in enumerate(left)}
    assert pages_of(direct.parts) == {place[page]: page for page in dumped if page in missing}


@given(rows(), rows())
def test_what_of_runs_lies_in_areas(runs: list[tuple[int, int]], areas: list[tuple[int, int]]) -> None:
    found = within(
        join(parse_runs(pagemap(runs))),
        [Area(first * PAGE_BYTES, (first + count) * PAGE_BYTES, is_plain=True) for first, count in areas],
    )
    place = {page: number for number, page in enumerate(numbers(runs))}
    assert [
        ((run.address + at) // PAGE_BYTES, (run.offset + at) // PAGE_BYTES)
        for run in found
        for at in range(0, run.size_bytes, PAGE_BYTES)
    ] == [(page, place[page]) for page in numbers(runs) if page in numbers(areas)]


class Memory:
    def __init__(self) -> None:
        self.data = bytearray(4 * PAGES)

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        content = b"".join(buffers)
        self.data[offset : offset + len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing is held."""


@given(rows(), st.lists(st.integers(0, PAGES), min_size=2, max_size=6))
def test_scattered_pages_take_all_and_write_their_parts(parts: list[tuple[int, int]], cuts: list[int]) -> None:
    image = bytes(range(1, 1 + 2 * PAGES))
    taken = Parts((first, count, first * 2 + 5) for first, count in parts)
    memory, low, high = Memory(), min(cuts), max(cuts)
    edges = sorted({low, *cuts, high})
    buffers = [image[a:b] for a, b in pairwise(edges)]
    assert ScatteredPages(memory, taken).write(buffers, low) == high - low
    model = bytearray(4 * PAGES)
    for first, count in parts:
        for byte in range(max(first, low), min(first + count, high)):
            model[first * 2 + 5 + byte - first] = image[byte]
    overlap = any(a[0] * 2 + 5 + a[1] > b[0] * 2 + 5 for a, b in pairwise(parts))
    assert overlap or memory.data == model
    assert taken.touches(low, high) == any(max(a, low) < min(a + n, high) for a, n in parts)


def test_what_a_child_has_alike_is_left_to_criu_in_both() -> None:
    plain, other = Area(0, 4, is_plain=True), Area(8, 16, is_plain=True)
    locked = Area(0, 4, is_plain=False)
    spaces = {1: AddressSpace(7, (plain, other)), 2: AddressSpace(7, (locked,)), 3: AddressSpace(8, (plain, other))}
    assert own_areas(spaces, {1: 0, 2: 1, 3: 1}) == {1: [other], 2: [], 3: [plain, other]}
    assert own_areas(spaces, {1: 0, 2: 0, 3: 0})[1] == [plain, other]
