"""Images put together from packs: wherever extents cut chunks, and batches cut extents, every byte is the right one."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lz4.block
import pytest

from ocihook.errors import IntegrityError
from ocihook.packs.cipher import NO_KEYS, Keyring
from ocihook.packs.pack import LZ4, PAGE_BYTES, RAW
from ocihook.packs.pages import RANGE_BYTES, ImageFile, Target, make_image
from ocihook.packs.runs import RunPages
from ocihook.store import assemble as module
from ocihook.store import pack_directory as places
from ocihook.store.assemble import assemble, open_part
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.pack_directory import PackDirectory, pack_name
from tests.damage import flip_bit
from tests.fakes.images import read_stored
from tests.fakes.keys import make_keys
from tests.unit.test_packing import Written

BATCH = module._BATCH_PAGES


class Stored(NamedTuple):
    """Packs, what is in them, and where their chunks are."""

    directory: PackDirectory
    layout: Layout
    contents: list[bytes]
    chunks: list[list[tuple[int, int]]]  # of each pack: the offsets and first pages


def pages_of(kind: int, pages: int, rng: random.Random) -> bytes:
    return (
        rng.randbytes(pages * PAGE_BYTES)
        if kind == RAW
        else b"".join(rng.randbytes(64) * (PAGE_BYTES // 64) for _ in range(pages))
    )


@pytest.fixture(params=["plain", "encrypted"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    """Three packs: chunks of both kinds and all sizes in turns; full raw ones only; full compressed ones only."""
    rng = random.Random(7)
    is_encrypted = request.param == "encrypted"
    keyring = Keyring(make_keys(tmp_path) if is_encrypted else NO_KEYS, "team")
    (tmp_path / "packs").mkdir()
    directory = PackDirectory(tmp_path / "packs", keyring, is_encrypted, lambda: is_encrypted)
    rows = [
        [(rng.choice([RAW, LZ4]), rng.choice([1, 2, 7, 15, 16, 16, 64])) for _ in range(60)],
        [(RAW, 16)] * 40,
        [(LZ4, 16)] * 40,
    ]
    infos, contents, chunks = [], [], []
    for number, row in enumerate(rows):
        pack = directory.create(number)
        content, places = b"", []
        with pack:
            for kind, pages in row:
                plain = pages_of(kind, pages, rng)
                places.append((pack._offset, len(content) // PAGE_BYTES))
                encoded = plain if kind == RAW else lz4.block.compress(plain, store_size=False)
                pack.append(kind, pages, (1 << pages) - 1, encoded)
                content += plain
            infos.append(pack.close(durable=False))
        contents.append(content)
        chunks.append(places)
    return Stored(directory, Layout(tuple(infos), {}), contents, chunks)


def image(stored: Stored, runs: Sequence[tuple[int, int, int]], name: str = "pages-1.img") -> bytes:
    """Add an image of such extents to the layout; return its content."""
    extents, content = Extents(), b""
    for pack, first, pages in runs:
        extents.append(pack, first, pages)
        part = stored.contents[pack][first * PAGE_BYTES :] if pack != ZERO else bytes(pages * PAGE_BYTES)
        content += part[: pages * PAGE_BYTES]
    stored.layout.images[name] = extents
    return content


def random_runs(stored: Stored, rng: random.Random, pages: int) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    while sum(run[2] for run in runs) < pages:
        pack = rng.choice([0, 0, 1, 2, ZERO])
        length = rng.choice([1, 1, 2, 5, 15, 16, 17, 40, 130, 300])
        if pack == ZERO:
            runs.append((ZERO, 0, length))
            continue
        first = rng.randrange(len(stored.contents[pack]) // PAGE_BYTES - length)
        if rng.random() < 0.4:  # where a chunk begins
            first = max(start for _, start in stored.chunks[pack] if start <= first)
        runs.append((pack, first, length))
    return runs


@pytest.mark.parametrize("workers", [1, 2])
def test_extents_that_cut_chunks(stored: Stored, tmp_path: Path, workers: int) -> None:
    rng = random.Random(workers)
    expected, targets = {}, {}
    for name, pages in (
        ("pages-1.img", 5 * BATCH + 3),
        ("pages-2.img", RANGE_BYTES // PAGE_BYTES + 1),
        ("pages-3.img", 1),
    ):
        expected[name] = image(stored, random_runs(stored, rng, pages), name)
        make_image(tmp_path / name, len(expected[name]))
        targets[name] = Target(partial(ImageFile, tmp_path / name, writable=True), 0)
    done: list[int] = []
    assemble(stored.layout, stored.directory, targets, workers=workers, progress=done.append)
    assert {name: (tmp_path / name).read_bytes() for name in targets} == expected
    assert sum(done) == sum(map(len, expected.values()))
    for name, content in expected.items():
        extents = stored.layout.images[name]
        assert b"".join(read_stored(extents, stored.layout, stored.directory)) == content
        source = RunPages(open_part(stored.layout, name, stored.directory))
        for _ in range(5):
            first = rng.randrange(extents.pages)
            view = memoryview(bytearray(rng.randrange(extents.pages - first + 1) * PAGE_BYTES))
            assert source.read_into(view, first * PAGE_BYTES) == len(view)
            assert view == content[first * PAGE_BYTES :][: len(view)]
        source.close()


@pytest.mark.parametrize("most", [1 << 40, 30 * PAGE_BYTES + 5])
def test_a_batch_is_one_call_where_there_are_no_holes(stored: Stored, most: int) -> None:
    """Single pages, that all calls stay below IOV_MAX; short zero runs are written, long ones left."""
    runs = [(n % 2, n % 97 * 5, 1) for n in range(BATCH + 50)]
    runs += [(ZERO, 0, 3), (2, 3, 20), (ZERO, 0, BATCH), (1, 16, 32), (ZERO, 0, 16), (2, 0, 1), (ZERO, 0, 99)]
    content = image(stored, runs)
    target, start = Written(most), 7 * BATCH * PAGE_BYTES
    assemble(stored.layout, stored.directory, {"pages-1.img": Target(lambda: target, start)}, workers=1)
    assert target.data == bytes(start) + content[: -99 * PAGE_BYTES]
    if most > len(content):
        ends = [(end - start) // PAGE_BYTES for _, end in target.calls]
        assert ends == [BATCH, BATCH + 73, 2 * BATCH + 105, 2 * BATCH + 122]


def test_workers_are_not_all_at_one_image(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocihook.packs.pages.RANGE_BYTES", 16 * PAGE_BYTES)
    opened: list[str] = []

    def target(name: str) -> Written:
        opened.append(name)
        return Written(1 << 40)

    targets = {}
    for name, pages in (("a", 64), ("b", 32), ("c", 0)):
        image(stored, [(0, 0, pages)] if pages else [], name)
        targets[name] = Target(partial(target, name), 0)
    assemble(stored.layout, stored.directory, targets, workers=1)
    assert "".join(opened) == "abaaba"


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("harmed", [1, 2, 3])
def test_a_damaged_chunk_is_named_and_not_written(stored: Stored, pack: int, harmed: int) -> None:
    """The end of one is wanted, the next whole, and the beginning of the last; the byte may be one that is not."""
    image(stored, [(pack, 16 + 5, 11 + 16 + 4)])
    offset, _ = stored.chunks[pack][harmed]
    flip_bit(stored.directory.path / pack_name(pack), offset + 100)
    target = Written(1 << 40)
    with pytest.raises(IntegrityError, match=rf"{pack_name(pack)}: the chunk at byte {offset} is damaged"):
        assemble(stored.layout, stored.directory, {"pages-1.img": Target(lambda: target, 0)}, workers=1)
    assert not target.data


def test_pages_that_a_pack_does_not_have(stored: Stored) -> None:
    pages = len(stored.contents[1]) // PAGE_BYTES
    image(stored, [(1, pages - 1, 2)])
    with pytest.raises(IntegrityError, match=rf"pack {pack_name(1)} has no page {pages}"):
        list(open_part(stored.layout, "pages-1.img", stored.directory).runs(0, 2 * PAGE_BYTES))


def test_more_packs_than_stay_open(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_OPEN_PACKS", 2)
    content = image(stored, random_runs(stored, random.Random(1), 3 * BATCH))
    make_image(tmp_path / "image", len(content))
    target = Target(partial(ImageFile, tmp_path / "image", writable=True), 0)
    assemble(stored.layout, stored.directory, {"pages-1.img": target}, workers=1)
    assert (tmp_path / "image").read_bytes() == content
