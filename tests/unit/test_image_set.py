"""An image set goes into packs and comes out again; whatever interrupts it, the memory is there exactly once."""

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook.errors import ImageError, IntegrityError, OcihookError, StoreFull
from ocihook.images import image_set
from ocihook.linux.patience import ENDLESS
from ocihook.model import ContainerRef
from ocihook.packs import packed_manifest as manifests
from ocihook.packs.pack import PackFile, PackInfo
from tests.fakes.images import make_image_set, mixed_pages

MEMORY = {1: mixed_pages(700), 7: mixed_pages(90, seed=2), 8: b""}
CONTAINER = ContainerRef(id="ab" * 32, engine="podman")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "checkpoint", MEMORY)
    return tmp_path / "checkpoint"


def pack(directory: Path, workers: int = 2) -> manifests.PackedManifest:
    manifest = image_set.pack_image_set(directory, container=CONTAINER, host={}, workers=workers, durable=True)
    assert manifest is not None
    return manifest


def test_packed_and_rehydrated_images_are_the_same(directory: Path) -> None:
    before = contents(directory)
    manifest = pack(directory)
    assert not list(directory.glob("pages-*"))
    assert manifest.raw_bytes == sum(map(len, MEMORY.values()))
    assert manifest.stored_bytes < manifest.raw_bytes
    packed = contents(directory)
    assert image_set.verify_image_set(directory, workers=2) == manifest
    names = image_set.rehydrate_image_set(directory, workers=2)
    assert {name: data for name, data in contents(directory).items() if "ocihook" not in name} == before
    image_set.dehydrate(directory, names)
    image_set.dehydrate(directory, names)
    assert contents(directory) == packed


def test_a_set_without_memory_is_not_packed(tmp_path: Path) -> None:
    make_image_set(tmp_path, {})
    before = contents(tmp_path)
    assert image_set.pack_image_set(tmp_path, container=CONTAINER, host={}, workers=1, durable=False) is None
    assert contents(tmp_path) == before
    assert image_set.rehydrate_image_set(tmp_path, workers=1) == []


def test_packs_of_an_earlier_dump_into_the_directory_do_not_count(directory: Path) -> None:
    pack(directory)
    fresh = {1: mixed_pages(300, seed=9)}
    make_image_set(directory, fresh)
    (directory / "pagemap-7.img").unlink()
    (directory / "pagemap-8.img").unlink()
    pack(directory)
    image_set.rehydrate_image_set(directory, workers=1)
    assert (directory / "pages-1.img").read_bytes() == fresh[1]


@pytest.mark.parametrize("act", [image_set.verify_image_set, image_set.rehydrate_image_set])
def test_an_image_that_no_pagemap_names_is_refused(directory: Path, act: Callable[..., object]) -> None:
    """A manifest can claim any size, of zeros that no pack has."""
    manifest = pack(directory)
    (directory / "pagemap-7.img").unlink()
    others = tuple(image for image in manifest.other_images if image.name != "pagemap-7.img")
    manifests.write_manifest(directory, dataclasses.replace(manifest, other_images=others), durable=False)
    before = contents(directory)
    with pytest.raises(ImageError, match=r"no pagemap is there that names pages-2\.img"):
        act(directory, workers=1)
    assert contents(directory) == before


class Killed(BaseException):
    """Stands for a process that ends at once."""


@pytest.mark.parametrize("step", ["pack_images", "write_manifest", "after the manifest"])
def test_interrupted_packing_is_put_right(directory: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Killed at a step, nothing cleans up; a later reader has all of the memory."""
    before = contents(directory)
    finish = image_set.finish_packing

    def killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(image_set, "finish_packing", killed)
    if step != "after the manifest":
        monkeypatch.setattr(image_set, step, killed)
    with pytest.raises(Killed):
        pack(directory, workers=1)
    monkeypatch.undo()
    if step == "after the manifest":
        assert list(directory.glob("pages-*"))
        finish(directory)
        assert not list(directory.glob("pages-*"))
        image_set.rehydrate_image_set(directory, workers=1)
        assert {name: data for name, data in contents(directory).items() if "ocihook" not in name} == before
    else:
        finish(directory)
        assert contents(directory) == before


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing pack", "pack ocihook-0.pack cannot be opened"),
        ("truncated pack", "its manifest says"),
        ("flipped pack", "is damaged"),
        ("linked pack", "cannot be opened"),
        ("flipped manifest", "the manifest is damaged"),
        ("newer manifest", "of version 3, this ocihook knows versions up to 2"),
        ("missing manifest", "without a manifest"),
        ("missing image", "image core-1.img is missing"),
        ("other image", "image core-1.img is not what was checkpointed"),
    ],
)
def test_a_damaged_set_is_refused_and_left_as_it_was(directory: Path, fault: str, message: str) -> None:
    pack(directory, workers=1)
    damaged = directory / "ocihook-0.pack"
    manifest = directory / manifests.MANIFEST_NAME
    what, thing = fault.split(" ")
    if fault == "newer manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b"ocihook-manifest 1", b"ocihook-manifest 3", 1))
    elif thing == "manifest":
        manifest.unlink() if what == "missing" else flip(manifest, 400)
    elif fault == "missing pack":
        damaged.unlink()
    elif fault == "truncated pack":
        os.truncate(damaged, damaged.stat().st_size - 1)
    elif fault == "flipped pack":
        flip(damaged, 5000)
    elif fault == "linked pack":
        damaged.rename(directory.parent / "elsewhere")
        damaged.symlink_to(directory.parent / "elsewhere")
    elif what == "missing":
        (directory / "core-1.img").unlink()
    else:
        (directory / "core-1.img").write_bytes(b"something")
    before = contents(directory)
    for attempt in (image_set.verify_image_set, image_set.rehydrate_image_set):
        with pytest.raises(IntegrityError, match=message):
            attempt(directory, workers=2)
    assert contents(directory) == before


def test_truncated_page_image_is_not_packed(directory: Path) -> None:
    os.truncate(directory / "pages-1.img", 4096)
    before = contents(directory)
    with pytest.raises(ImageError, match=r"pages-1.img has 4096 bytes, pagemap-1.img says 2867200"):
        pack(directory)
    assert contents(directory) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", place], check=True, timeout=60)
    yield place
    subprocess.run(["umount", place], check=True, timeout=60)


def test_full_disk_while_packing_leaves_the_images(small_disk: Path) -> None:
    directory = small_disk / "checkpoint"
    make_image_set(directory, {1: os.urandom(900 * 4096)})
    before = contents(directory)
    with pytest.raises(StoreFull, match="its images are left as CRIU wrote them"):
        pack(directory)
    assert contents(directory) == before


def moved_packs(directory: Path, size_bytes: int) -> image_set.MovedRegions:
    """Make packs as moved memory comes in; their content does not matter here."""
    directory.mkdir()
    names = ["ocihook-region-0.pack", "ocihook-region-1.pack"]
    for name in names:
        (directory / name).write_bytes(os.urandom(size_bytes))
    return image_set.MovedRegions((), tuple(PackInfo(name, size_bytes, 0, 0) for name in names), {})


def test_packs_from_elsewhere_take_the_place_of_older_ones(directory: Path, tmp_path: Path) -> None:
    moved = moved_packs(tmp_path / "memory", 20 << 20)  # more than is copied at a time
    (directory / "ocihook-region-7.pack").write_bytes(b"of an earlier dump")
    before = contents(directory).keys() - {"ocihook-region-7.pack"}
    for _ in range(2):  # the first may have been interrupted
        image_set.take_in(moved, tmp_path / "memory", directory, ENDLESS)
        found = contents(directory)
        assert found.keys() == before | contents(tmp_path / "memory").keys()
        assert all(found[name] == data for name, data in contents(tmp_path / "memory").items())


def test_a_full_disk_takes_no_packs_in(small_disk: Path, tmp_path: Path) -> None:
    moved = moved_packs(tmp_path / "memory", 3 << 20)
    with pytest.raises(StoreFull, match="no space left for the checkpoint's GPU memory, which takes 6291456 bytes"):
        image_set.take_in(moved, tmp_path / "memory", small_disk, ENDLESS)
    assert contents(small_disk) == {}
    assert len(contents(tmp_path / "memory")) == 2


def test_full_disk_while_unpacking_is_refused_with_figures(small_disk: Path, tmp_path: Path) -> None:
    make_image_set(tmp_path / "checkpoint", {1: bytes(2048 * 4096)})
    pack(tmp_path / "checkpoint")
    directory = small_disk / "checkpoint"
    directory.mkdir()
    for path in (tmp_path / "checkpoint").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    before = contents(directory)
    with pytest.raises(StoreFull, match=r"needs 8388608 bytes, \d+ are free"):
        image_set.rehydrate_image_set(directory, workers=2)
    assert contents(directory) == before


def test_errors_say_what_to_do() -> None:
    error = OcihookError("it broke.", hint="mend it")
    assert str(error) == "it broke. Mend it"


def test_packing_a_packed_set_again_does_not_lose_its_memory(directory: Path) -> None:
    manifest = pack(directory)
    before = contents(directory)
    with pytest.raises(ImageError, match=r"pages-1.img has 0 bytes"):
        pack(directory)
    assert contents(directory) == before
    assert image_set.verify_image_set(directory, workers=1) == manifest


def test_packs_that_hold_less_than_the_pagemaps_say_do_not_verify(directory: Path) -> None:
    """Every checksum is right, and yet CRIU could not restore from it."""
    manifest = pack(directory)
    make_image_set(directory.parent / "larger", {1: mixed_pages(701)})
    pagemap = directory / "pagemap-1.img"
    pagemap.write_bytes((directory.parent / "larger" / pagemap.name).read_bytes())
    others = [
        image._replace(digest=manifests.digest_file(pagemap)) if image.name == pagemap.name else image
        for image in manifest.other_images
    ]
    manifests.write_manifest(directory, dataclasses.replace(manifest, other_images=tuple(others)), durable=False)
    before = contents(directory)
    for attempt in (image_set.verify_image_set, image_set.rehydrate_image_set):
        with pytest.raises(ImageError, match=r"pages-1.img has 2867200 bytes, pagemap-1.img says 2871296"):
            attempt(directory, workers=2)
    assert contents(directory) == before


def test_packs_may_lie_elsewhere(directory: Path) -> None:
    manifest = pack(directory)
    elsewhere = {}
    for pack_info in manifest.packs:
        moved = directory.parent / f"moved-{pack_info.name}"
        moved.write_bytes(b"before" + (directory / pack_info.name).read_bytes() + b"after")
        (directory / pack_info.name).unlink()
        elsewhere[pack_info.name] = PackFile(moved, offset=6, size_bytes=pack_info.size_bytes)
    assert image_set.verify_image_set(directory, workers=2, elsewhere=elsewhere) == manifest
    image_set.rehydrate_image_set(directory, workers=2, elsewhere=elsewhere)
    assert (directory / "pages-1.img").read_bytes() == MEMORY[1]
    (directory / manifests.MANIFEST_NAME).unlink()
    with pytest.raises(IntegrityError, match="without a manifest"):
        image_set.verify_image_set(directory, workers=1, elsewhere=elsewhere)
