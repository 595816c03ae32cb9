"""The memory path over a plain process: out into packs, dropped, back in byte for byte; and what is damaged is seen."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ocihook.errors import ImageError, IntegrityError
from ocihook.images.image_set import (
    MovedRegions,
    discard_regions,
    finish_packing,
    pack_image_set,
    read_packed,
    rehydrate_image_set,
    verify_image_set,
)
from ocihook.linux.memory import ProcessMemory, Span
from ocihook.linux.mounts import pin_file, unpin_directory
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.memory.regions import CheckpointedProcess, move_out, pin, release, write_back
from ocihook.model import ContainerRef
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.packed_manifest import (
    MAX_MEMORY_BYTES,
    PackedManifest,
    PackedRegion,
    decode_manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from tests.fakes.images import make_address_space, make_image_set, mixed_pages

CONTENT = mixed_pages(5000, seed=3)
PROGRAM = """
import ctypes, mmap, sys
region = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(ctypes.addressof(ctypes.c_char.from_buffer(region)), flush=True)
sys.stdin.read()
"""


class Program:
    """A process with a region of CONTENT."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PROGRAM, str(len(CONTENT))]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        start = int(self.popen.stdout.readline())
        self.span = Span(start, start + len(CONTENT))
        process = Process.find(self.popen.pid)
        assert process is not None
        self.process = process
        memory = ProcessMemory(process)
        for offset in range(0, len(CONTENT), 1 << 20):
            memory.write([CONTENT[offset : offset + (1 << 20)]], start + offset)

    @property
    def content(self) -> bytes:
        buffer = bytearray(len(CONTENT))
        assert ProcessMemory(self.process).read_into(memoryview(buffer), self.span.start) == len(CONTENT)
        return bytes(buffer)

    @property
    def checkpointed(self) -> list[CheckpointedProcess]:
        return [CheckpointedProcess(self.process, self.process.pid, (self.span,))]


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.popen.kill()
    program.popen.communicate()


def moved(program: Program, directory: Path, workers: int = 2) -> PackedManifest:
    directory.mkdir(exist_ok=True)
    return move_out(
        program.checkpointed,
        {program.process: "7"},
        directory,
        container=ContainerRef(id="ab"),
        gpu={"driver": "1", "devices": []},
        workers=workers,
        durable=False,
    )


def test_out_and_back(program: Program, tmp_path: Path) -> None:
    manifest = moved(program, tmp_path / "images")
    assert program.content == CONTENT
    assert manifest.raw_bytes == len(CONTENT)
    release(program.checkpointed, ENDLESS)
    assert program.content == bytes(len(CONTENT))
    (tmp_path / "images" / "ocihook.manifest").write_bytes(encode_manifest(manifest))
    assert write_back(tmp_path / "images", {"7": program.process}, workers=2) == len(CONTENT)
    assert program.content == CONTENT
    assert write_back(tmp_path / "images", {"8": program.process}, workers=2) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_pins_outlive_the_directory(program: Program, tmp_path: Path) -> None:
    """What an engine does with a failed checkpoint does not take the only copy along."""
    manifest = moved(program, tmp_path / "images")
    pins = tmp_path / "pins"
    pin(manifest, tmp_path / "images", pins)
    release(program.checkpointed, ENDLESS)
    shutil.rmtree(tmp_path / "images")
    try:
        assert write_back(pins, {"7": program.process}, workers=2) == len(CONTENT)
        assert program.content == CONTENT
    finally:
        unpin_directory(pins)
    assert not pins.exists()
    unpin_directory(pins)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_file_pinned_again_can_still_be_removed(tmp_path: Path) -> None:
    """By an agent that continues where another was killed."""
    (tmp_path / "pins").mkdir()
    source, place = tmp_path / "source", tmp_path / "pins/source"
    source.write_bytes(b"content")
    try:
        pin_file(source, place)
        pin_file(source, place)
        source.unlink()
        assert place.read_bytes() == b"content"
    finally:
        unpin_directory(tmp_path / "pins")


def test_damaged_packs_are_not_written(program: Program, tmp_path: Path) -> None:
    manifest = moved(program, tmp_path / "images", workers=1)
    (tmp_path / "images" / "ocihook.manifest").write_bytes(encode_manifest(manifest))
    pack = tmp_path / "images" / manifest.packs[0].name
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        write_back(tmp_path / "images", {"7": program.process}, workers=2)


def test_a_process_that_is_gone(program: Program, tmp_path: Path) -> None:
    manifest = moved(program, tmp_path / "images")
    (tmp_path / "images" / "ocihook.manifest").write_bytes(encode_manifest(manifest))
    program.popen.kill()
    program.popen.wait()
    with pytest.raises(OSError, match="has ended"):
        write_back(tmp_path / "images", {"7": program.process}, workers=2)
    release(program.checkpointed, ENDLESS)


def test_the_manifest_keeps_regions(program: Program, tmp_path: Path) -> None:
    manifest = moved(program, tmp_path / "images")
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert encode_manifest(manifest).startswith(b"ocihook-manifest 2 ")


@pytest.fixture
def image_set(program: Program, tmp_path: Path) -> tuple[Path, MovedRegions]:
    """An image set with moved memory, before its manifest is written."""
    directory = tmp_path / "images"
    manifest = moved(program, directory)
    make_image_set(directory, {7: mixed_pages(100)})
    return directory, MovedRegions(manifest.regions, manifest.packs, manifest.gpu)


def packed(directory: Path, moved: MovedRegions, *, with_images: bool) -> PackedManifest:
    manifest = pack_image_set(
        directory,
        container=ContainerRef(id="a"),
        host={},
        workers=2,
        durable=False,
        moved=moved,
        with_images=with_images,
    )
    assert manifest is not None
    return manifest


@pytest.mark.parametrize("with_images", [True, False])
def test_an_image_set_with_moved_memory(image_set: tuple[Path, MovedRegions], *, with_images: bool) -> None:
    directory, regions = image_set
    before = (directory / "pages-1.img").read_bytes()
    manifest = packed(directory, regions, with_images=with_images)
    assert bool(manifest.packed_images) is with_images
    assert (directory / "pages-1.img").exists() is not with_images
    assert verify_image_set(directory, workers=2) == manifest
    rehydrate_image_set(directory, workers=2)
    assert (directory / "pages-1.img").read_bytes() == before
    finish_packing(directory)
    assert verify_image_set(directory, workers=2) == manifest


@pytest.mark.parametrize("way", ["verify", "rehydrate", "write back"])
def test_every_flipped_bit_of_moved_memory_is_found(
    image_set: tuple[Path, MovedRegions], program: Program, way: str
) -> None:
    directory, regions = image_set
    packed(directory, regions, with_images=True)

    def read_all() -> None:
        if way == "verify":
            verify_image_set(directory, workers=1)
        elif way == "rehydrate":
            rehydrate_image_set(directory, workers=1)
        else:
            write_back(directory, {"7": program.process}, workers=1)

    read_all()
    for pack in (directory / info.name for info in regions.packs):
        good = pack.read_bytes()
        for position in range(0, len(good), len(good) // 20):
            pack.write_bytes(good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :])
            with pytest.raises(IntegrityError):
                read_all()
        pack.unlink()
        with pytest.raises(IntegrityError, match="cannot be opened"):
            read_all()
        with pytest.raises(IntegrityError, match="cannot be opened"):
            rehydrate_image_set(directory, with_regions=False, workers=1)
        pack.write_bytes(good)
    read_all()


def rewrite(directory: Path, region: PackedRegion) -> None:
    """Have a manifest claim another region."""
    manifest = read_manifest(directory)
    assert manifest is not None
    write_manifest(directory, replace(manifest, regions=(region,)), durable=False)


@pytest.mark.parametrize("way", [verify_image_set, rehydrate_image_set])
def test_memory_that_its_process_had_not_mapped(
    image_set: tuple[Path, MovedRegions], way: Callable[..., object]
) -> None:
    """The manifest does not decide how large a process was; CRIU's own list is. Pieces of one mapping are one."""
    directory, regions = image_set
    (region,) = regions.regions
    middle, end = region.start + 10 * PAGE_BYTES, region.start + region.size_bytes
    for areas, is_mapped in (
        ([(region.start, end)], True),
        ([(region.start - PAGE_BYTES, middle), (middle, end + PAGE_BYTES)], True),
        ([(region.start, end - PAGE_BYTES)], False),
        ([(region.start + PAGE_BYTES, end)], False),
        ([(region.start, middle), (middle + PAGE_BYTES, end)], False),
        ([], False),
    ):
        make_address_space(directory, 7, areas)
        packed(directory, regions, with_images=False)
        if is_mapped:
            way(directory, workers=1)
            continue
        with pytest.raises(ImageError, match=rf"memory of process 7 at {region.start:#x}, which mm-7.img does not"):
            way(directory, workers=1)


def test_chunks_that_are_claimed_twice(image_set: tuple[Path, MovedRegions]) -> None:
    """Else one chunk could be any number of terabytes, each of which would be decoded."""
    directory, regions = image_set
    packed(directory, regions, with_images=True)
    (region,) = regions.regions
    times = 100_000
    rewrite(directory, region._replace(size_bytes=times * region.size_bytes, segments=region.segments * times))
    for act in (verify_image_set, rehydrate_image_set):
        with pytest.raises(IntegrityError, match="twice"):
            act(directory, workers=1)
    with pytest.raises(IntegrityError, match="twice"):
        write_back(directory, {}, workers=1)


def test_more_memory_than_there_is(image_set: tuple[Path, MovedRegions]) -> None:
    directory, regions = image_set
    manifest = packed(directory, regions, with_images=True)
    (region,) = regions.regions
    left = MAX_MEMORY_BYTES - manifest.image_bytes
    rewrite(directory, region._replace(size_bytes=left))
    with pytest.raises(IntegrityError, match=f"packs hold {region.size_bytes} bytes of"):
        verify_image_set(directory, workers=1)
    rewrite(directory, region._replace(size_bytes=left + PAGE_BYTES))
    with pytest.raises(IntegrityError, match=f"claims {MAX_MEMORY_BYTES + PAGE_BYTES} bytes of memory"):
        verify_image_set(directory, workers=1)


def test_moved_memory_without_a_manifest_is_no_checkpoint(image_set: tuple[Path, MovedRegions]) -> None:
    directory, _ = image_set
    with pytest.raises(IntegrityError, match="without a manifest"):
        read_packed(directory)
    finish_packing(directory)  # of images alone
    assert list(directory.glob("ocihook-region-*"))
    discard_regions(directory)
    assert not list(directory.glob("ocihook-*"))
    assert read_manifest(directory) is None


def test_every_kind_of_buffer_is_written(program: Program) -> None:
    memory = ProcessMemory(program.process)
    pieces: list[bytes | memoryview] = [
        b"a" * 4096,
        memoryview(bytearray(b"b" * 4096)),
        memoryview(b"xc" * 4096)[1:4097],
        memoryview(b"d" * 100),
    ]
    assert memory.write(pieces, program.span.start) == 3 * 4096 + 100
    assert program.content[: 3 * 4096 + 101] == b"".join(map(bytes, pieces)) + CONTENT[3 * 4096 + 100 :][:1]
