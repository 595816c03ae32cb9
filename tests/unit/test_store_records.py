"""The store's records: what is written is read, and what is not one is refused."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.checkpoints.prune import Keep, choose
from ocihook.errors import IntegrityError
from ocihook.model import ContainerRef
from ocihook.packs.frame import decode_frame, encode_frame
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import OtherImage
from ocihook.store.extents import ZERO, Extents, Layout, decode_layout, encode_layout
from ocihook.store.stored_manifest import (
    Link,
    StoredImage,
    StoredManifest,
    StoredRegion,
    decode_stored,
    encode_stored,
)
from ocihook.store.thin import THIN_NAME, Thin, read_thin, write_thin

ID = "20260102T030405Z-0123abcd"
MANIFEST = StoredManifest(
    id=ID,
    sequence=7,
    previous=Link("20260102T030404Z-0123abcd", "ab" * 32),
    created="2026-01-02T03:04:05Z",
    writer="ocihook 1",
    domain="team",
    seed=0x1234,
    container=ContainerRef(id="c", name="trainer"),
    host={"kernel": "6"},
    images=(StoredImage("pages-1.img", 8192),),
    regions=(StoredRegion("7/1", 0x7F0000000000, 4096, 0),),
    gpu={"driver": "1", "devices": []},
    other_images=(OtherImage("core-1.img", 3, "0" * 32), OtherImage("descriptors.json", 2, "1" * 32)),
    page_ids_digest="cd" * 32,
    added_bytes=5,
)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, ZERO]), st.integers(0, 50), st.integers(1, 9)), max_size=30))
def test_extents_are_a_row_of_pages(rows: list[tuple[int, int, int]]) -> None:
    extents = Extents()
    expected: list[tuple[int, int]] = []
    for pack, first, pages in rows:
        extents.append(pack, first, pages)
        expected += [(pack, 0 if pack == ZERO else first + n) for n in range(pages)]

    def listed(found: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(pack, 0 if pack == ZERO else first + n) for pack, first, length in found for n in range(length)]

    assert listed(extents) == expected
    joined = Extents()
    for half in (list(extents)[: len(extents) // 2], list(extents)[len(extents) // 2 :]):
        joined.extend(*([extent[column] for extent in half] for column in range(3)))
    assert (list(joined), joined.pages) == (list(extents), extents.pages)
    assert extents.pages == len(expected)
    again = Extents.from_bytes(extents.to_bytes())
    assert list(again) == list(extents)
    for start in range(0, len(expected), 3):
        for pages in (1, len(expected) - start):
            assert listed(again.cut(start, pages)) == expected[start : start + pages]


def layout() -> Layout:
    one, two = Extents(), Extents()
    one.append(0, 5, 3)
    one.append(ZERO, 0, 4)
    two.append(1, 0, 1)
    packs = tuple(PackInfo(f"{n:016x}.pack", 100 + n, 3, 5 << 60) for n in range(2))
    return Layout(packs, {"pages-1.img": one, "memory 0 of process 1": two})


SIZES = [("pages-1.img", 7), ("memory 0 of process 1", 1)]


def test_a_layout_is_read_again() -> None:
    found = decode_layout(encode_layout(layout()), SIZES)
    assert found.packs == layout().packs
    assert {name: list(extents) for name, extents in found.images.items()} == {
        name: list(extents) for name, extents in layout().images.items()
    }


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[::-1], [("pages-1.img", 6), SIZES[1]]])
def test_a_layout_of_something_else(sizes: list[tuple[str, int]]) -> None:
    with pytest.raises(IntegrityError, match="other images"):
        decode_layout(encode_layout(layout()), sizes)


def test_a_layout_that_names_a_pack_that_it_does_not_list() -> None:
    packs, images = layout()
    with pytest.raises(IntegrityError, match="does not list"):
        decode_layout(encode_layout(Layout(packs[:1], images)), SIZES)


def test_a_manifest_is_read_again() -> None:
    assert decode_stored(encode_stored(MANIFEST)) == MANIFEST
    assert MANIFEST.raw_bytes == 12288
    assert MANIFEST.image_bytes == 8192
    assert [part.name for part in MANIFEST.parts] == ["pages-1.img", "memory 0 of process 7/1"]


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../x"},
        {"sequence": -1},
        {"previous": ["x", "y"]},
        {"images": [["../pages-1.img", 1]]},
        {"images": [["pages-1.img", "1"]]},
        {"regions": [["7", 1, 4096, 0]]},
        {"regions": [["7", 4096, 8 << 40, 0]]},
        {"images": [["pages-1.img", 8 << 40]]},
        {"gpu": []},
        {"gpu": {"driver": "1", "devices": [1]}},
        {"host": {"a": 1}},
        {"page_ids_digest": "x"},
        {"container": {}},
    ],
)
def test_a_manifest_that_is_none(change: dict[str, object]) -> None:
    _, body = decode_frame("checkpoint", (1,), encode_stored(MANIFEST))
    data = encode_frame("checkpoint", 1, json.dumps({**json.loads(body), **change}).encode())
    with pytest.raises(IntegrityError, match="malformed"):
        decode_stored(data)


def thin_of(domain: object) -> bytes:
    return encode_frame("thin", 1, json.dumps({"domain": domain, "checkpoint": ID}).encode())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], "checksum"),
        (lambda data: b"x" + data, "does not begin"),
        (lambda data: data.replace(b"ocihook-thin 1", b"ocihook-thin 2"), "version 2"),
        (lambda data: data.replace(b"ocihook-thin", b"ocihook-head"), "does not begin"),
        (lambda _data: encode_frame("thin", 1, b"[]"), "malformed"),
        (lambda _data: encode_frame("thin", 1, b'{"domain": "a", "checkpoint": "../b"}'), "malformed"),
        *(
            (lambda _data, name=name: thin_of(name), "malformed")
            for name in ("", "..", "../x", "a/b", "a b", "-x", "A", "a\n", "a" * 64, "$(id)", "_node2", "\0", 5, None)
        ),
        (lambda _data: b"", "does not begin"),
    ],
)
def test_a_thin_record_that_is_none(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    assert read_thin(tmp_path) is None
    write_thin(tmp_path, Thin("team", ID), durable=False)
    assert read_thin(tmp_path) == Thin("team", ID)
    path = tmp_path / THIN_NAME
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(IntegrityError, match=message):
        read_thin(tmp_path)


def made(sequence: int, created: str, container: str = "a") -> StoredManifest:
    return replace(MANIFEST, id=f"{sequence}", sequence=sequence, created=created, container=ContainerRef(id=container))


def test_checkpoints_of_one_epoch_go_together() -> None:
    now = 1_767_322_800.0  # 2026-01-02T03:00:00Z

    def member(sequence: int, name: str, epoch: str) -> StoredManifest:
        return replace(made(sequence, "2026-01-01T00:00:00Z"), container=ContainerRef(id=name, gang=epoch))

    row = [member(0, "a", "job/1"), member(1, "b", "job/1"), member(2, "a", "job/2"), member(3, "b", "job/2")]
    assert sorted(choose(row, Keep(last=1), now)) == ["0", "1"]
    row.append(member(4, "a", "job/3"))  # b has none that is newer: its part of the second epoch stays, and so does a's
    assert sorted(choose(row, Keep(last=1), now)) == ["0", "1"]


def test_what_a_prune_keeps() -> None:
    """The newest in their order stays whatever the clock said; what is not a time is old."""
    now = 1_767_322_800.0  # 2026-01-02T03:00:00Z
    row = [
        made(0, "2026-01-02T02:59:00Z"),
        made(1, "2025-12-01T00:00:00Z", "b"),
        made(2, "never"),
        made(3, "2026-01-01T00:00:00Z"),
        made(4, "2020-01-01T00:00:00Z"),
    ]
    assert choose(row, Keep(), now) == []
    assert sorted(choose(row, Keep(last=1), now)) == ["0", "2", "3"]
    assert sorted(choose(row, Keep(last=2), now)) == ["0", "2"]
    assert sorted(choose(row, Keep(within_s=3600), now)) == ["2", "3"]
    assert sorted(choose(row, Keep(last=2, within_s=3600), now)) == ["2"]
