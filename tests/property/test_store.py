"""Properties of the store: what goes in comes out, and nothing that was damaged ever does."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from ocihook.criu.images import PageRun, parse_pagemap, parse_runs
from ocihook.errors import OcihookError
from ocihook.linux.workers import run_forked
from ocihook.model import ContainerRef
from ocihook.packs import pages
from ocihook.packs.pack import CHUNK_PAGES, PAGE_BYTES, PackFile, PackInfo, PackReader
from ocihook.packs.packed_manifest import (
    MANIFEST_NAME,
    MAX_MEMORY_BYTES,
    OtherImage,
    PackedImage,
    PackedManifest,
    Segment,
    decode_manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from ocihook.packs.packing import pack_images
from ocihook.packs.pages import CHUNK_BYTES
from ocihook.packs.unpacking import Packs
from tests.fakes.images import read_pages
from tests.unit.test_images import PRESENT, pagemap

# Pages by what they cost: zero, random, text, equal but for one byte at either end.
PAGES = [
    bytes(PAGE_BYTES),
    b"".join((n * 2654435761 % 2**32).to_bytes(4, "little") for n in range(PAGE_BYTES // 4)),
    (b"pages of text compress. " * 200)[:PAGE_BYTES],
    bytes(PAGE_BYTES - 1) + b"\x01",
    b"\x01" + bytes(PAGE_BYTES - 1),
]
runs = st.tuples(st.sampled_from(PAGES), st.sampled_from([1, 1, 1, 2, 3, 31, 63, 64, 65, 130]))
images = st.lists(runs, max_size=12).map(lambda row: b"".join(page * count for page, count in row))
image_sets = st.dictionaries(st.integers(1, 99).map(lambda n: f"pages-{n}.img"), images, max_size=4)


@contextmanager
def segments_of(size_bytes: int) -> Iterator[None]:
    """Small segments, so that small images have several."""
    with patch.object(pages, "RANGE_BYTES", size_bytes):
        yield


@given(
    image_sets, st.integers(1, 4), st.sampled_from([PAGE_BYTES, CHUNK_BYTES - PAGE_BYTES, 2 * CHUNK_BYTES, 16 << 20])
)
@settings(max_examples=60, deadline=None)
def test_packing_and_rehydrating_is_the_identity(contents: dict[str, bytes], workers: int, segment_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name, segments_of(segment_bytes):
        directory = Path(name)
        for image, content in contents.items():
            (directory / image).write_bytes(content)
        packed, infos = pack_images(directory, list(contents), prefix="ocihook-", workers=workers, durable=False)
        assert {image: (directory / image).read_bytes() for image in contents} == contents
        files = {info.name: PackFile(directory / info.name) for info in infos}
        covered_once(packed, infos, files)
        packs = Packs(packed, infos, files)
        for image, content in contents.items():
            (directory / image).unlink()
            assert b"".join(read_pages(packs, image)) == content
        packs.verify(workers=workers)
        packs.rehydrate(directory, workers=workers)
        packs.close()
        assert {image: (directory / image).read_bytes() for image in contents} == contents


def covered_once(packed: list[PackedImage], infos: list[PackInfo], files: dict[str, PackFile]) -> None:
    """Every chunk of every pack belongs to one segment, chunks lie in one row, and pages add up to the images."""
    for info in infos:
        reader = PackReader(files[info.name], info)
        chunks = list(reader.chunks(0, info.chunks))
        reader.close()
        assert chunks[0].offset == 16
        assert all(chunk.pages <= CHUNK_PAGES or chunk.present == 0 for chunk in chunks)
        used = [
            number
            for image in packed
            for segment in image.segments
            if segment.pack == info.name
            for number in range(segment.first_chunk, segment.first_chunk + segment.chunks)
        ]
        assert sorted(used) == list(range(info.chunks))


def small_checkpoint(directory: Path) -> PackedManifest:
    """A checkpoint of few bytes with every kind of chunk."""
    (directory / "pages-1.img").write_bytes(PAGES[2] * 3 + PAGES[0] * 70 + PAGES[1] + PAGES[0] + PAGES[3])
    packed, infos = pack_images(directory, ["pages-1.img"], prefix="ocihook-", workers=1, durable=False)
    manifest = PackedManifest(
        created="2026-11-20T00:00:00Z",
        writer="test",
        container=ContainerRef(id="0"),
        host={},
        packed_images=tuple(packed),
        other_images=(),
        packs=tuple(infos),
    )
    write_manifest(directory, manifest, durable=False)
    return manifest


def restored(directory: Path) -> bytes:
    """The image, through a manifest and packs that may be damaged."""
    manifest = read_manifest(directory)
    assert manifest is not None
    packs = Packs(
        manifest.packed_images, manifest.packs, {p.name: PackFile(directory / p.name) for p in manifest.packs}
    )
    try:
        return b"".join(read_pages(packs, "pages-1.img"))
    finally:
        packs.close()


def is_refused(directory: Path) -> bool:
    try:
        restored(directory)
    except OcihookError:
        return True
    return False


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_any_flipped_bit_and_any_truncation_is_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        small_checkpoint(directory)
        content = (directory / "pages-1.img").read_bytes()
        assert restored(directory) == content
        path = directory / data.draw(st.sampled_from(["ocihook-0.pack", MANIFEST_NAME]))
        whole = path.read_bytes()
        damaged = bytearray(whole)
        bit = data.draw(st.integers(0, len(whole) * 8 - 1))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert is_refused(directory)
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert is_refused(directory)
        path.write_bytes(whole + data.draw(st.binary(min_size=1, max_size=40)))
        assert is_refused(directory)


def test_every_bit_outside_the_chunks_matters(tmp_path: Path) -> None:
    manifest = small_checkpoint(tmp_path)
    path = tmp_path / "ocihook-0.pack"
    whole = path.read_bytes()
    table_bytes = 32 * manifest.packs[0].chunks + 32
    for bit in [*range(16 * 8), *range((len(whole) - table_bytes) * 8, len(whole) * 8)]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert is_refused(tmp_path), f"bit {bit}"


numbers = st.integers(0, (1 << 60) - 1)
pack_names = st.integers(0, 9999).map(lambda n: f"ocihook-{n}.pack")
texts = st.text(st.characters(codec="utf-8"), max_size=20)
manifests = st.builds(
    PackedManifest,
    created=texts,
    writer=texts,
    container=st.builds(ContainerRef, id=texts, engine=texts, runtime=texts, name=texts, pod_name=texts),
    host=st.dictionaries(texts, texts, max_size=3),
    packed_images=st.lists(
        st.builds(
            PackedImage,
            st.integers(0, 10**10 - 1).map(lambda n: f"pages-{n}.img"),
            st.integers(0, MAX_MEMORY_BYTES // 4),  # of as many images
            st.lists(st.builds(Segment, pack_names, numbers, numbers), max_size=3).map(tuple),
        ),
        max_size=4,
        unique_by=lambda image: image.name,
    ).map(tuple),
    other_images=st.lists(
        st.builds(
            OtherImage,
            st.from_regex(r"(?!pages)[A-Za-z0-9_@.:-]{1,30}\.img", fullmatch=True),
            numbers,
            st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
        ),
        max_size=4,
        unique_by=lambda image: image.name,
    ).map(tuple),
    packs=st.lists(
        st.builds(PackInfo, pack_names, numbers, numbers, st.integers(0, 2**64 - 1)),
        max_size=4,
        unique_by=lambda pack: pack.name,
    ).map(tuple),
)


@given(manifests)
@settings(max_examples=150, deadline=None)
def test_a_manifest_is_read_as_it_was_written(manifest: PackedManifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


@given(
    st.lists(st.tuples(st.integers(0, 2**52 - 1), st.integers(0, 2**32 - 1), st.booleans(), st.booleans()), max_size=20)
)
@settings(max_examples=100, deadline=None)
def test_a_pagemap_adds_up(entries: list[tuple[int, int, bool, bool]]) -> None:
    data = pagemap(
        *(
            {"vaddr": page * PAGE_BYTES, "flags": PRESENT if is_present else 1}
            | ({"nr_pages": pages, "compat_nr_pages": 0} if is_new else {"compat_nr_pages": pages})
            for page, pages, is_present, is_new in entries
        )
    )
    parsed = parse_pagemap(data)
    assert list(parse_runs(data)) == [PageRun(page * PAGE_BYTES, pages, present) for page, pages, present, _ in entries]
    assert parsed.present_bytes == sum(pages for _, pages, is_present, _ in entries if is_present) * PAGE_BYTES


@given(st.integers(0, 300), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_workers_share_the_tasks_out(tasks: int, workers: int) -> None:
    def worker(_number: int, numbers: Iterator[int]) -> Iterator[int]:
        yield from numbers

    assert sorted(run_forked(worker, tasks=tasks, workers=workers)) == list(range(tasks))
