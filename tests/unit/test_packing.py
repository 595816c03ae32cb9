"""Packing and rehydrating image sets: edges of sizes and shapes, failures, and who leaves what behind."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lz4.block
import pytest

from ocihook.errors import IntegrityError, StoreError
from ocihook.linux.workers import WorkerDied
from ocihook.packs import packing, pages, runs
from ocihook.packs.pack import CHUNK_PAGES, LZ4, PAGE_BYTES, RAW, ZERO, Chunk, PackFile, PackInfo, PackReader
from ocihook.packs.packed_manifest import PackedImage, Segment
from ocihook.packs.packing import AGENT_BYTES, WORKER_BYTES, pack_images, workers_within
from ocihook.packs.pages import BATCH_BYTES, CHUNK_BYTES, FILE_BATCH_BYTES, RANGE_BYTES, PageWriter
from ocihook.packs.unpacking import Packs
from tests.damage import flip_bit
from tests.fakes.images import read_pages
from tests.open_files import nothing_left_open
from tests.unit.test_ptrace import wait_until

ZERO_PAGE = bytes(PAGE_BYTES)
TEXT_PAGE = (b"a page that compresses well. " * 200)[:PAGE_BYTES]
Packed = tuple[list[PackedImage], list[PackInfo]]


def noise(pages: int) -> bytes:
    return os.urandom(pages * PAGE_BYTES)


def pack(directory: Path, names: Sequence[str], workers: int = 2) -> Packed:
    return pack_images(directory, names, prefix="ocihook-", workers=workers, durable=False)


def opened(directory: Path, packed: Packed) -> Packs:
    return Packs(*packed, {info.name: PackFile(directory / info.name) for info in packed[1]})


def chunks_of(directory: Path, packed: Packed) -> list[Chunk]:
    """All chunks of all packs."""
    found: list[Chunk] = []
    for info in packed[1]:
        reader = PackReader(PackFile(directory / info.name), info)
        found += reader.chunks(0, info.chunks)
        reader.close()
    return found


def rehydrated(directory: Path, packed: Packed, workers: int = 2) -> dict[str, bytes]:
    """Content of all images after a way through the packs; checks that `runs` agrees."""
    target = directory / "rehydrated"
    target.mkdir()
    packs = opened(directory, packed)
    packs.verify(workers=workers)
    packs.rehydrate(target, workers=workers)
    content = {path.name: path.read_bytes() for path in target.iterdir()}
    pieces = {image.name: list(read_pages(packs, image.name)) for image in packed[0]}
    assert content == {name: b"".join(parts) for name, parts in pieces.items()}
    assert all(part and len(part) % PAGE_BYTES == 0 for parts in pieces.values() for part in parts)
    packs.close()
    return content


SHAPES = {
    "empty": b"",
    "one page": TEXT_PAGE,
    "one zero page": ZERO_PAGE,
    "one page of noise": noise(1),
    "all zero": bytes(RANGE_BYTES + 3 * PAGE_BYTES),
    "zero but the last page": bytes(RANGE_BYTES) + TEXT_PAGE,
    "longer than a segment": TEXT_PAGE * (RANGE_BYTES // PAGE_BYTES + 65),
    "noise, longer than a batch": noise(BATCH_BYTES // PAGE_BYTES + 1),
    "every other page": (TEXT_PAGE + ZERO_PAGE + noise(1) + ZERO_PAGE) * 300,
    "noise, then zeros to the end": noise(3) + bytes(100 * PAGE_BYTES),
    "partial last chunk": noise(64) + ZERO_PAGE + TEXT_PAGE * 5,
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_comes_back_as_it_was(tmp_path: Path, shape: str, workers: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(SHAPES[shape])
    packed = pack(tmp_path, ["pages-1.img"], workers)
    assert rehydrated(tmp_path, packed, workers) == {"pages-1.img": SHAPES[shape]}


def test_an_image_set_comes_back_as_it_was(tmp_path: Path) -> None:
    images = {f"pages-{number}.img": content for number, content in enumerate(SHAPES.values())}
    for name, content in images.items():
        (tmp_path / name).write_bytes(content)
    packed = pack(tmp_path, list(images))
    assert [image.name for image in packed[0]] == list(images)
    assert rehydrated(tmp_path, packed) == images


def test_workers_are_not_all_at_one_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, segments in (("pages-1.img", 4), ("pages-2.img", 2)):
        (tmp_path / name).write_bytes(TEXT_PAGE * (segments * RANGE_BYTES // PAGE_BYTES))
    packed = pack(tmp_path, ["pages-1.img", "pages-2.img"])
    opened_images: list[str] = []
    image_file = pages.ImageFile

    def open_image(path: Path, *, writable: bool) -> pages.ImageFile:
        opened_images.append(path.name)
        return image_file(path, writable=writable)

    monkeypatch.setattr(runs, "ImageFile", open_image)
    rehydrated(tmp_path, packed, workers=1)
    assert [name[6] for name in opened_images] == ["1", "2", "1", "1", "2", "1"]


def test_an_empty_image_needs_no_pack(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").touch()
    packed = pack(tmp_path, ["pages-1.img"])
    assert packed == ([PackedImage("pages-1.img", 0, ())], [])
    assert os.listdir(tmp_path) == ["pages-1.img"]


def test_no_image_at_all(tmp_path: Path) -> None:
    assert pack(tmp_path, []) == ([], [])
    assert rehydrated(tmp_path, ([], [])) == {}


def test_a_worker_without_a_task_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(TEXT_PAGE)
    (tmp_path / "pages-2.img").write_bytes(TEXT_PAGE)
    images, packs = pack(tmp_path, ["pages-1.img", "pages-2.img"], workers=8)
    assert {info.name for info in packs} == {path.name for path in tmp_path.glob("*.pack")}
    assert {segment.pack for image in images for segment in image.segments} == {info.name for info in packs}


def test_zeros_cost_a_record_and_noise_its_own_size(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(RANGE_BYTES))
    (tmp_path / "pages-2.img").write_bytes(noise(64))
    (tmp_path / "pages-3.img").write_bytes(TEXT_PAGE * 64)
    packed = pack(tmp_path, ["pages-1.img", "pages-2.img", "pages-3.img"], workers=1)
    kinds = [(chunk.kind, chunk.pages) for chunk in chunks_of(tmp_path, packed)]
    assert kinds == [(ZERO, RANGE_BYTES // PAGE_BYTES), (RAW, 64), (LZ4, 64)]
    assert sum(info.size_bytes for info in packed[1]) < CHUNK_BYTES + 4 * PAGE_BYTES


def test_zeros_come_back_as_holes(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(RANGE_BYTES) + TEXT_PAGE)
    packed = pack(tmp_path, ["pages-1.img"])
    rehydrated(tmp_path, packed)
    image = (tmp_path / "rehydrated" / "pages-1.img").stat()
    assert image.st_size == RANGE_BYTES + PAGE_BYTES
    assert image.st_blocks * 512 < CHUNK_BYTES
    assert image.st_mode & 0o777 == 0o600


def test_progress_adds_up(tmp_path: Path) -> None:
    size = 2 * RANGE_BYTES + PAGE_BYTES
    (tmp_path / "pages-1.img").write_bytes(bytes(size))
    done: list[int] = []
    packed = pack_images(tmp_path, ["pages-1.img"], prefix="ocihook-", workers=2, durable=True, progress=done.append)
    assert sum(done) == size
    packs = opened(tmp_path, packed)
    packs.verify(workers=2, progress=done.append)
    packs.close()
    assert sum(done) == 2 * size


@pytest.mark.parametrize("size", [1, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_an_image_of_parts_of_pages_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(size))
    with pytest.raises(StoreError, match="whole number of pages"):
        pack(tmp_path, ["pages-1.img"])
    assert os.listdir(tmp_path) == ["pages-1.img"]


@pytest.mark.parametrize("kind", ["missing", "link", "directory", "fifo"])
def test_only_regular_files_are_packed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pages-1.img"
    if kind == "link":
        (tmp_path / "target").write_bytes(TEXT_PAGE)
        path.symlink_to("target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(OSError, match=r"No such file|Too many levels|Not a regular file"):
        pack(tmp_path, ["pages-1.img"])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("change", [-PAGE_BYTES, -1, PAGE_BYTES])
def test_an_image_that_changes_its_size_meanwhile_is_refused(tmp_path: Path, change: int, workers: int) -> None:
    size = 4 * RANGE_BYTES
    path = tmp_path / "pages-1.img"
    path.write_bytes(bytes(size))

    def grow(_done: int) -> None:
        os.truncate(path, size + change)

    with pytest.raises(StoreError, match=r"an image ended|was changed"):
        pack_images(tmp_path, [path.name], prefix="ocihook-", workers=workers, durable=False, progress=grow)


def test_an_existing_pack_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(TEXT_PAGE)
    (tmp_path / "ocihook-0.pack").write_bytes(b"of an earlier dump")
    with pytest.raises(FileExistsError):
        pack(tmp_path, ["pages-1.img"], workers=1)
    assert (tmp_path / "ocihook-0.pack").read_bytes() == b"of an earlier dump"


def test_an_existing_image_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(TEXT_PAGE)
    packs = opened(tmp_path, pack(tmp_path, ["pages-1.img"]))
    with pytest.raises(FileExistsError):
        packs.rehydrate(tmp_path, workers=1)
    packs.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounts a tmpfs: needs root")
    path = tmp_path / "small"
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield path
    libc.umount2(os.fsencode(path), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_while_packing(small_disk: Path, workers: int) -> None:
    content = noise(1500)
    for name in ("pages-1.img", "pages-2.img"):
        (small_disk / name).write_bytes(content[: 700 * PAGE_BYTES])
    with nothing_left_open(), pytest.raises(OSError, match="No space left"):
        pack(small_disk, ["pages-1.img", "pages-2.img"], workers)
    assert (small_disk / "pages-1.img").read_bytes() == content[: 700 * PAGE_BYTES]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_while_rehydrating(tmp_path: Path, small_disk: Path, workers: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(TEXT_PAGE * 1500 + noise(1000))
    (tmp_path / "pages-2.img").write_bytes(TEXT_PAGE)
    packs = opened(tmp_path, pack(tmp_path, ["pages-1.img", "pages-2.img"]))
    with pytest.raises(OSError, match="No space left"):
        packs.rehydrate(small_disk, workers=workers)
    packs.close()


def test_a_killed_worker_fails_the_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages-1.img").write_bytes(bytes(4 * RANGE_BYTES))
    pack_range = packing._pack_range

    def die(fd: int, start: int, *rest: object) -> None:
        if start == 2 * RANGE_BYTES:
            os.kill(os.getpid(), signal.SIGKILL)
        pack_range(fd, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "_pack_range", die)
    with pytest.raises(WorkerDied):
        pack(tmp_path, ["pages-1.img"], workers=2)


def test_killing_the_caller_stops_its_workers(tmp_path: Path) -> None:
    with (tmp_path / "pages-1.img").open("wb") as file:
        file.truncate(64 << 30)  # holes: minutes of reading
    program = (
        "import sys; from pathlib import Path; from ocihook.packs.packing import pack_images\n"
        "pack_images(Path(sys.argv[1]), ['pages-1.img'], prefix='ocihook-', workers=2, durable=False,"
        " progress=lambda _: print(flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
        assert len(children) == 2
        caller.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in children))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("where", ["first", "last"])
def test_one_flipped_bit_is_found_by_verify_and_by_rehydrate(tmp_path: Path, where: str, workers: int) -> None:
    (tmp_path / "pages-1.img").write_bytes(noise(10) + TEXT_PAGE * 100 + bytes(RANGE_BYTES) + noise(5))
    packed = pack(tmp_path, ["pages-1.img"], workers=1)
    kept = [chunk for chunk in chunks_of(tmp_path, packed) if chunk.kind != ZERO]
    offset = kept[0].offset if where == "first" else kept[-1].offset + kept[-1].stored_bytes - 1
    flip_bit(tmp_path / "ocihook-0.pack", offset)
    packs = opened(tmp_path, packed)
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError, match="is damaged"):
        packs.verify(workers=workers)
    with pytest.raises(IntegrityError, match="is damaged"):
        packs.rehydrate(tmp_path / "out", workers=workers)
    with pytest.raises(IntegrityError, match="is damaged"):
        list(read_pages(packs, "pages-1.img"))
    packs.close()


def test_a_pack_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(noise(10))
    packs = opened(tmp_path, pack(tmp_path, ["pages-1.img"], workers=1))
    os.truncate(tmp_path / "ocihook-0.pack", 100)
    with pytest.raises(IntegrityError, match="ends early"):
        packs.verify(workers=1)
    packs.close()


def two_segments(directory: Path) -> tuple[PackedImage, list[PackInfo]]:
    (directory / "pages-1.img").write_bytes(TEXT_PAGE * (RANGE_BYTES // PAGE_BYTES + 1))
    images, packs = pack(directory, ["pages-1.img"], workers=1)
    return images[0], packs


def test_packs_that_do_not_cover_an_image_are_refused(tmp_path: Path) -> None:
    image, packs = two_segments(tmp_path)
    first, second = image.segments
    for wrong in (
        image._replace(segments=(first,)),
        image._replace(segments=(first, second, second)),
        image._replace(size_bytes=image.size_bytes - PAGE_BYTES),
        image._replace(size_bytes=image.size_bytes + 1),
        image._replace(segments=()),
        image._replace(segments=(first, Segment("ocihook-7.pack", 0, 1))),
        image._replace(segments=(first, second._replace(first_chunk=1000))),
        image._replace(segments=(Segment(first.pack, 0, first.chunks + second.chunks),)),  # longer than a segment
        image._replace(segments=(*image.segments, Segment(first.pack, 0, 0))),
        image._replace(size_bytes=0, segments=(Segment(first.pack, 0, 0),)),
    ):
        with pytest.raises(IntegrityError):
            opened(tmp_path, ([wrong], packs))


def test_a_missing_pack_is_named(tmp_path: Path) -> None:
    image, packs = two_segments(tmp_path)
    with nothing_left_open():
        with pytest.raises(IntegrityError, match=r"ocihook-0\.pack is missing"):
            Packs([image], packs, {})
        (tmp_path / "ocihook-0.pack").unlink()
        with pytest.raises(IntegrityError, match=r"ocihook-0\.pack cannot be opened"):
            opened(tmp_path, ([image], packs))


def test_decoding_is_checked_beyond_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A writer that lies: the checksum of what it stored is right, yet that is no LZ4 of so many pages.
    for lie in (b"\xff" * 1000, lz4.block.compress(TEXT_PAGE, store_size=False)):
        directory = tmp_path / str(len(lie))
        directory.mkdir()
        (directory / "pages-1.img").write_bytes(TEXT_PAGE * 2)
        with monkeypatch.context() as patch:
            patch.setattr(lz4.block, "compress", lambda *_, lie=lie, **__: lie)
            packed = pack(directory, ["pages-1.img"])
        packs = opened(directory, packed)
        packs.verify(workers=1)
        with pytest.raises(IntegrityError, match="decode"):
            packs.rehydrate(tmp_path / str(len(lie)) / "..", workers=1)
        (tmp_path / "pages-1.img").unlink()
        packs.close()


@pytest.mark.parametrize("limit", [1, 1000, PAGE_BYTES + 1])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    content = noise(3) + ZERO_PAGE + TEXT_PAGE
    (tmp_path / "pages-1.img").write_bytes(content)
    pwrite, write = os.pwrite, os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda fd, parts: write(fd, b"".join(parts)[:limit]))
        patch.setattr(os, "pwritev", lambda fd, parts, at: pwrite(fd, b"".join(parts)[:limit], at))
        packed = pack(tmp_path, ["pages-1.img"], workers=1)
        assert rehydrated(tmp_path, packed, workers=1) == {"pages-1.img": content}


def test_workers_stay_within_the_memory_bound() -> None:
    assert workers_within(1 << 60, 8) == 8
    assert workers_within(0, 8) == 1
    assert workers_within(AGENT_BYTES + 3 * WORKER_BYTES, 8) == 3
    assert workers_within(AGENT_BYTES + 3 * WORKER_BYTES - 1, 8) == 2
    assert workers_within(256 << 20, 2) == 2


class Written:
    """Memory that records how it was written, and takes less than it was given."""

    def __init__(self, most: int) -> None:
        self.calls: list[tuple[int, int]] = []
        self.data = bytearray()
        self._most = most

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        data = b"".join(buffers)[: self._most]
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        self.data[len(self.data) :] = bytes(max(0, offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self.calls.append((offset, offset + len(data)))
        return len(data)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("batch_bytes", [BATCH_BYTES, FILE_BATCH_BYTES])
@pytest.mark.parametrize("most", [1 << 40, 3 * PAGE_BYTES + 5])
def test_pages_are_written_in_whole_batches(most: int, batch_bytes: int) -> None:
    target, start = Written(most), 5 * PAGE_BYTES
    writer = PageWriter(target, start, batch_bytes)
    expected = bytearray(start)
    pieces = [1, 2, 2000, CHUNK_PAGES, -700, 3, *[1] * 1500, -1, 20]  # negative: skipped
    for number, count in enumerate(pieces):
        if count < 0:
            writer.skip(-count)
            expected += bytes(-count * PAGE_BYTES)
        else:
            piece = bytes([number % 255 + 1]) * (count * PAGE_BYTES)
            writer.put(memoryview(piece))
            expected += piece
    writer.flush()
    assert target.data == expected
    assert all(end - start <= batch_bytes for start, end in target.calls)
    if most > batch_bytes:  # of all ends only those of what is before something skipped, and of the last, are anywhere
        assert sum(end % batch_bytes > 0 for _, end in target.calls) == 3


def test_a_target_that_takes_nothing_is_an_error() -> None:
    writer = PageWriter(Written(0), 0, BATCH_BYTES)
    writer.put(bytes(PAGE_BYTES))
    with pytest.raises(OSError, match="ended early"):
        writer.flush()
