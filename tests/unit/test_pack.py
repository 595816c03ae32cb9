"""A single pack: what the writer puts down byte by byte, and what the reader refuses."""

import contextlib
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from ocihook.errors import IntegrityError, StoreError
from ocihook.packs.pack import (
    CHUNK_PAGES,
    LZ4,
    PAGE_BYTES,
    RAW,
    ZERO,
    Chunk,
    PackFile,
    PackInfo,
    PackReader,
    PackWriter,
    read_at,
)
from tests.open_files import nothing_left_open

PAGE = bytes(range(256)) * 16


def write_pack(path: Path) -> PackInfo:
    with PackWriter(path) as writer:
        writer.append(RAW, 2, 0b10, PAGE)
        writer.append(ZERO, 300, 0)
        writer.append(LZ4, 1, 1, b"stored")
        return writer.close(durable=False)


def sealed(path: Path, *records: tuple[int, int, int, int, int, int], content: bytes = PAGE) -> PackInfo:
    """Write a pack whose checksums are right and whose records say anything."""
    table = b"".join(struct.pack("<QQQIHBx", *record) for record in records)
    offset = 16 + len(content)
    trailer = struct.pack("<8sQQII", b"OCIHTAIL", offset, xxh3_64_intdigest(table), len(records), 0)
    path.write_bytes(struct.pack("<8sHHI", b"OCIHPACK", 1, 0, 0) + content + table + trailer)
    return PackInfo(path.name, path.stat().st_size, len(records), xxh3_64_intdigest(table))


def chunks(path: Path, info: PackInfo) -> list[Chunk]:
    reader = PackReader(PackFile(path), info)
    try:
        return list(reader.chunks(0, info.chunks))
    finally:
        reader.close()


def test_the_bytes_are_those_of_the_format_description(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    info = write_pack(path)
    table = (
        struct.pack("<QQQIHBx", 16, 0b10, xxh3_64_intdigest(PAGE), PAGE_BYTES, 2, RAW)
        + struct.pack("<QQQIHBx", 16 + PAGE_BYTES, 0, 0, 0, 300, ZERO)
        + struct.pack("<QQQIHBx", 16 + PAGE_BYTES, 1, xxh3_64_intdigest(b"stored"), 6, 1, LZ4)
    )
    assert path.read_bytes() == (
        b"OCIHPACK\x01\0\0\0\0\0\0\0"
        + PAGE
        + b"stored"
        + table
        + struct.pack("<8sQQII", b"OCIHTAIL", 16 + PAGE_BYTES + 6, xxh3_64_intdigest(table), 3, 0)
    )
    assert info == PackInfo("a.pack", path.stat().st_size, 3, xxh3_64_intdigest(table))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_pack_inside_an_archive_is_read_through_its_window(tmp_path: Path) -> None:
    info = write_pack(tmp_path / "a.pack")
    archive = tmp_path / "archive.tar"
    archive.write_bytes(b"x" * 512 + (tmp_path / "a.pack").read_bytes() + b"y" * 512)
    reader = PackReader(PackFile(archive, 512, info.size_bytes), info)
    first = next(reader.chunks(0, 1))
    assert reader.read(first) == PAGE
    assert reader.pages(0, 3) == 303
    reader.close()


def test_a_window_longer_than_its_archive_is_refused(tmp_path: Path) -> None:
    info = write_pack(tmp_path / "a.pack")
    with pytest.raises(IntegrityError, match="bytes, its manifest says"):
        PackReader(PackFile(tmp_path / "a.pack", 512, info.size_bytes), info)


def test_a_writer_that_did_not_close_leaves_no_pack(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    with nothing_left_open(), PackWriter(path) as writer:
        writer.append(RAW, 1, 1, PAGE)
        writer.flush()
    with pytest.raises(IntegrityError):
        PackReader(PackFile(path), PackInfo("a.pack", path.stat().st_size, 1, 0))


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "a.pack").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        PackWriter(tmp_path / "a.pack")
    assert (tmp_path / "a.pack").read_bytes() == b"mine"


def test_more_pieces_than_one_write_takes(tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    with PackWriter(path) as writer:
        for _ in range(2500):
            writer.append(LZ4, 1, 1, b"abc")
        info = writer.close(durable=True)
    assert path.read_bytes()[16 : 16 + 7500] == b"abc" * 2500
    assert len(chunks(path, info)) == 2500


@pytest.mark.parametrize("kind", ["missing", "link", "directory", "fifo"])
def test_only_a_regular_file_is_a_pack(tmp_path: Path, kind: str) -> None:
    info = write_pack(tmp_path / "real.pack")
    path = tmp_path / "a.pack"
    if kind == "link":
        path.symlink_to("real.pack")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(IntegrityError, match="cannot be opened"):
        PackReader(PackFile(path), info)


GOOD = (16, 1, xxh3_64_intdigest(PAGE), PAGE_BYTES, 1, RAW)


def test_a_sealed_pack_is_read(tmp_path: Path) -> None:
    assert chunks(tmp_path / "p", sealed(tmp_path / "p", GOOD)) == [Chunk(*GOOD)]


@pytest.mark.parametrize(
    "record",
    [
        (0, *GOOD[1:]),  # inside the header
        (17, *GOOD[1:]),  # past the last chunk
        (2**64 - 1, *GOOD[1:]),
        (16, 0, *GOOD[2:]),  # content, yet no page present
        (16, 0b10, *GOOD[2:]),  # a page beyond the chunk
        (16, 1, GOOD[2], PAGE_BYTES - 1, 1, RAW),  # raw of another size
        (16, 1, GOOD[2], PAGE_BYTES, 1, LZ4),  # LZ4 that saves nothing
        (16, 1, GOOD[2], 0, 1, LZ4),
        (16, 1, GOOD[2], PAGE_BYTES, 0, RAW),
        (16, 1, GOOD[2], PAGE_BYTES, CHUNK_PAGES + 1, RAW),
        (16, 1, GOOD[2], PAGE_BYTES, 1, 3),  # an unknown kind
        (16, 1, 0, 0, 1, ZERO),
        (16, 0, 1, 0, 1, ZERO),
        (16, 0, 0, 1, 1, ZERO),
        (16, 0, 0, 0, 0, ZERO),
        (15, 0, 0, 0, 1, ZERO),
    ],
)
def test_an_impossible_record_is_refused(tmp_path: Path, record: tuple[int, int, int, int, int, int]) -> None:
    info = sealed(tmp_path / "p", record)
    with pytest.raises(IntegrityError, match="impossible record"):
        chunks(tmp_path / "p", info)


def test_chunks_must_lie_in_one_row(tmp_path: Path) -> None:
    info = sealed(tmp_path / "p", GOOD, GOOD)
    with pytest.raises(IntegrityError, match="impossible record"):
        chunks(tmp_path / "p", info)


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 1), (-1, 1), (0, -1), (2**60, 1)])
def test_chunks_that_are_not_there(tmp_path: Path, first: int, count: int) -> None:
    reader = PackReader(PackFile(tmp_path / "p"), sealed(tmp_path / "p", GOOD))
    with pytest.raises(IntegrityError, match="has no chunks"):
        list(reader.chunks(first, count))
    with pytest.raises(IntegrityError, match="has no chunks"):
        reader.pages(first, count)
    reader.close()


@pytest.mark.parametrize("count", [2, 10**6, 1 << 59])
def test_more_chunks_than_the_file_can_hold(tmp_path: Path, count: int) -> None:
    info = sealed(tmp_path / "p", GOOD)
    with pytest.raises(IntegrityError):
        PackReader(PackFile(tmp_path / "p"), info._replace(chunks=count))


def test_a_pack_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    info = sealed(tmp_path / "p", GOOD)
    sealed(tmp_path / "p", (16, 1, 12345, PAGE_BYTES, 1, RAW))
    with pytest.raises(IntegrityError, match="table or trailer"):
        PackReader(PackFile(tmp_path / "p"), info)


def test_a_later_version_is_named_as_the_reason(tmp_path: Path) -> None:
    info = sealed(tmp_path / "p", GOOD)
    data = bytearray((tmp_path / "p").read_bytes())
    data[8] = 3
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(IntegrityError, match="a version that this ocihook knows"):
        PackReader(PackFile(tmp_path / "p"), info)


def test_a_damaged_chunk_is_named_by_its_place(tmp_path: Path) -> None:
    info = sealed(tmp_path / "p", (16, 1, 12345, PAGE_BYTES, 1, RAW))
    reader = PackReader(PackFile(tmp_path / "p"), info)
    with pytest.raises(IntegrityError, match="chunk at byte 16 is damaged"):
        reader.read(Chunk(16, 1, 12345, PAGE_BYTES, 1, RAW))
    reader.close()


def test_reading_past_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with (tmp_path / "f").open("rb") as file, pytest.raises(StoreError, match="2 bytes early"):
        read_at(file.fileno(), 4, 1)


def is_full(chunk: Chunk) -> bool:
    return chunk.kind != ZERO and chunk.present == (1 << chunk.pages) - 1


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, -16, 2**40]),  # away from where it would have to be
        st.sampled_from([1, 2, 16, 64, 65, 0]),  # pages
        st.sampled_from([0, 1, -1]),  # in its bitmap
        st.sampled_from([RAW, LZ4, ZERO, 3]),
        st.sampled_from([0, 1, -1, -100]),  # stored bytes, but for its content
    )
    | st.tuples(st.just(0), st.integers(1, 64), st.just(0), st.just(LZ4), st.just(-1))
    | st.tuples(st.just(0), st.integers(1, 64), st.just(0), st.just(RAW), st.just(0)),
    max_size=5,
)


@given(RECORDS)
def test_full_chunks_are_checked_as_others_are(rows: list[tuple[int, int, int, int, int]]) -> None:
    """All at once, and yet what `chunks` refuses one by one is refused, and what is not full."""
    offset, records = 16, []
    for away, pages, more, kind, difference in rows:
        size = max(0, pages * PAGE_BYTES + difference)
        records.append((max(0, offset + away), max(0, (1 << min(pages, 64)) - 1 + more) % 2**64, 0, size, pages, kind))
        offset += size
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "p"
        info = sealed(path, *records, content=b"")
        with path.open("r+b") as file:  # a hole in place of the content
            tail = file.read()[16:]
            file.truncate(offset + len(tail))
            file.seek(offset)
            file.write(tail[:-32] + struct.pack("<8sQ", b"OCIHTAIL", offset) + tail[-16:])
        reader = PackReader(PackFile(path), info._replace(size_bytes=offset + len(tail)))
        expected = []
        with contextlib.suppress(IntegrityError):
            expected += [chunk.pages for chunk in reader.chunks(0, len(records)) if is_full(chunk)]
        if len(expected) == len(records):
            assert list(reader.full_chunks()) == [sum(expected[:number]) for number in range(len(records) + 1)]
        else:
            with pytest.raises(IntegrityError):
                reader.full_chunks()
        reader.close()
