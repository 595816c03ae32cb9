"""A domain of the store: what is taken comes back, nothing is stored twice, and what is damaged is seen."""

import contextlib
import os
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from ocihook.errors import IntegrityError, StoreError
from ocihook.model import ContainerRef
from ocihook.packs.cipher import NO_KEYS
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.pages import ImageFile, Source, Target
from ocihook.store.assemble import assemble
from ocihook.store.deduplicate import deduplicate
from ocihook.store.domain import Domain, new_checkpoint_id
from ocihook.store.garbage import remove_rubbish, repair
from ocihook.store.index import MAX_RUNS, Index
from ocihook.store.page_ids import PageIds
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredImage, StoredManifest
from ocihook.store.verify import verify
from tests.fakes.images import mixed_pages, read_stored
from tests.fakes.keys import make_keys

CONTAINER = ContainerRef(id="c1", name="trainer", pod_name="pod", pod_namespace="team")


@pytest.fixture(params=["plain", "encrypted"])
def domain(request: pytest.FixtureRequest, tmp_path: Path) -> Domain:
    keys = make_keys(tmp_path) if request.param == "encrypted" else NO_KEYS
    return Domain.open(tmp_path / "store", "team", keys, create=True)


def take(
    domain: Domain,
    images: Mapping[str, bytes],
    *,
    container: ContainerRef = CONTAINER,
    before: StoredManifest | None = None,
    workers: int = 1,
    created: str = "",
) -> StoredManifest:
    """Store images as a checkpoint."""
    scratch = domain.pending_dir / new_checkpoint_id()
    scratch.mkdir()
    sources = {}
    for name, content in images.items():
        (scratch / name).write_bytes(content)
        sources[name] = Source(partial(ImageFile, scratch / name), 0, len(content))
    ids_fd = os.open(scratch / "ids", os.O_RDWR | os.O_CREAT)
    try:
        taken = deduplicate(
            sources,
            packs=domain.packs,
            index_dir=domain.index_dir,
            page_ids=domain.page_ids,
            ids_fd=ids_fd,
            before=domain.before(before) if before else None,
            workers=workers,
        )
    finally:
        os.close(ids_fd)
    manifest = StoredManifest(
        id=scratch.name,
        sequence=0,
        previous=None,
        created=created,
        writer="",
        domain=domain.name,
        seed=domain.seed,
        container=container,
        host={},
        images=tuple(StoredImage(name, len(content)) for name, content in images.items()),
        other_images=(),
        page_ids_digest=taken.ids_digest,
        added_bytes=sum(info.size_bytes for info in taken.new_packs),
    )
    with domain.shared():
        domain.commit(manifest, taken.layout, scratch / "ids")
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    return domain.read(manifest.id)


def content_of(domain: Domain, manifest: StoredManifest) -> dict[str, bytes]:
    layout = domain.layout(manifest)
    return {name: b"".join(read_stored(extents, layout, domain.packs)) for name, extents in layout.images.items()}


def pack_bytes(domain: Domain) -> int:
    return sum(path.stat().st_size for path in domain.packs_dir.glob("*.pack"))


def random_pages(pages: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(pages * PAGE_BYTES)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_taken_comes_back(domain: Domain, tmp_path: Path, workers: int) -> None:
    images = {"pages-1.img": mixed_pages(40_000, seed=1), "pages-2.img": mixed_pages(7, seed=2), "pages-3.img": b""}
    manifest = take(domain, images, workers=workers)
    assert content_of(domain, manifest) == images
    targets = {}
    for name, content in images.items():
        (tmp_path / name).write_bytes(bytes(len(content)))
        targets[name] = Target(partial(ImageFile, tmp_path / name, writable=True), 0)
    assemble(domain.layout(manifest), domain.packs, targets, workers=workers)
    assert {name: (tmp_path / name).read_bytes() for name in images} == images
    assert verify(domain, read_data=True) == []
    assert Store(tmp_path / "store").names() == ["team"]


def test_the_same_again_takes_nothing(domain: Domain) -> None:
    images = {"pages-1.img": mixed_pages(3000, seed=1)}
    first = take(domain, images)
    assert first.added_bytes > 0
    assert take(domain, images, before=first).added_bytes == 0
    assert take(domain, images).added_bytes == 0, "by the index, with every page compared"
    assert verify(domain, read_data=True) == []


def shifted(pages: bytes) -> bytes:
    """Return what a heap that has grown and moved looks like: parts inserted, removed, exchanged, changed."""
    cut = [pages[at : at + 500 * PAGE_BYTES] for at in range(0, len(pages), 500 * PAGE_BYTES)]
    cut[2], cut[4] = cut[4], cut[2]
    changed = bytearray(b"".join([*cut[:1], random_pages(7, 99), *cut[1:3], cut[3][: -3 * PAGE_BYTES], *cut[4:]]))
    changed[1000 * PAGE_BYTES + 5] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("with_before", [True, False])
def test_only_what_changed_is_added(domain: Domain, *, with_before: bool) -> None:
    old = random_pages(3000, 1)
    first = take(domain, {"pages-1.img": old})
    new = shifted(old)
    second = take(domain, {"pages-1.img": new}, before=first if with_before else None)
    assert 8 * PAGE_BYTES <= second.added_bytes < 9 * PAGE_BYTES
    assert content_of(domain, second)["pages-1.img"] == new
    assert content_of(domain, first)["pages-1.img"] == old


def test_a_page_that_only_looks_the_same_is_stored(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    """No id is trusted with another container's memory: here all pages have the same one."""
    from ocihook.store import page_ids as module

    monkeypatch.setattr(module, "xxh3_128_digest", lambda data, _seed: bytes(16) if not any(data[:64]) else b"\1" * 16)
    one, other = random_pages(1, 1), random_pages(1, 2)
    take(domain, {"pages-1.img": one})
    second = take(domain, {"pages-1.img": other}, container=ContainerRef(id="other"))
    assert content_of(domain, second)["pages-1.img"] == other


def test_pages_twice_in_one_checkpoint(domain: Domain) -> None:
    page = random_pages(1, 1)
    assert take(domain, {"pages-1.img": page * 600 + bytes(PAGE_BYTES) + page}).added_bytes < 2 * PAGE_BYTES


def test_a_source_that_ends_early(domain: Domain, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(PAGE_BYTES))
    source = Source(partial(ImageFile, tmp_path / "short"), 0, 2 * PAGE_BYTES)
    fd = os.open(tmp_path / "ids", os.O_RDWR | os.O_CREAT)
    with pytest.raises(StoreError, match="ended before page 2"):
        deduplicate(
            {"pages-1.img": source},
            packs=domain.packs,
            index_dir=domain.index_dir,
            page_ids=domain.page_ids,
            ids_fd=fd,
            before=None,
            workers=1,
        )
    os.close(fd)


def test_every_flipped_bit_is_found(domain: Domain) -> None:
    first = take(domain, {"pages-1.img": mixed_pages(300, seed=1)})
    second = take(domain, {"pages-1.img": mixed_pages(300, seed=2)}, before=first)
    assert verify(domain, read_data=True) == []
    files = [path for part in (domain.packs_dir, domain.checkpoints_dir) for path in part.iterdir()]
    assert len(files) == 2 * 4
    for path in [*files, domain.directory / "head"]:
        good = path.read_bytes()
        for position in {*range(0, len(good), max(1, len(good) // 25)), len(good) - 1}:
            path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
            assert verify(domain, read_data=True), f"{path.name} at {position}"
        path.unlink()
        if path.suffix != ".ids" and path.name != "head":  # these are made again, and refer to nothing else
            assert verify(domain, read_data=True), f"without {path.name}"
        path.write_bytes(good)
    assert verify(domain, read_data=True) == []
    assert content_of(domain, second)


def test_prune_removes_what_nothing_needs(domain: Domain) -> None:
    old = random_pages(2000, 1)
    first = take(domain, {"pages-1.img": old})
    other = take(domain, {"pages-1.img": random_pages(500, 7)}, container=ContainerRef(id="other"))
    new = old[: 1000 * PAGE_BYTES] + random_pages(1000, 3)
    second = take(domain, {"pages-1.img": new}, before=first)
    (domain.packs_dir / "00000000000000aa.pack").write_bytes(b"of a dump that was killed")
    with domain.alone():
        domain.remove([other.id])
        assert remove_rubbish(domain) > 500 * PAGE_BYTES
    assert verify(domain, read_data=True) == []
    assert content_of(domain, second)["pages-1.img"] == new
    with domain.alone():
        domain.remove([first.id])
        remove_rubbish(domain)
    assert verify(domain, read_data=True) == []
    assert content_of(domain, second)["pages-1.img"] == new
    with domain.alone():
        domain.remove([second.id])
        remove_rubbish(domain)
    assert pack_bytes(domain) == 0
    assert verify(domain, read_data=True) == []
    third = take(domain, {"pages-1.img": old})
    assert third.sequence == 3
    assert verify(domain, read_data=True) == []


def test_a_checkpoint_removed_by_hand_shows(domain: Domain) -> None:
    made = [take(domain, {"pages-1.img": random_pages(3, n)}) for n in range(3)]
    for number, manifest in enumerate(made):
        path = domain.checkpoints_dir / f"{manifest.id}.manifest"
        data = path.read_bytes()
        path.unlink()
        assert any("was removed" in line for line in verify(domain, read_data=False)), number
        path.write_bytes(data)
    assert verify(domain, read_data=False) == []


def test_repair_rebuilds_the_index(domain: Domain) -> None:
    images = {"pages-1.img": random_pages(500, 1)}
    take(domain, images)
    (run,) = domain.index_dir.iterdir()
    for damaged in (b"garbage", run.read_bytes()[:-1]):
        run.write_bytes(damaged)
        with pytest.raises(StoreError, match="repair"):
            take(domain, images)
    with domain.alone():
        assert repair(domain) == ["rebuilt the index: 500 pages of 1 packs"]
    assert take(domain, images).added_bytes == 0
    with domain.alone():
        remove_rubbish(domain)
    assert verify(domain, read_data=True) == []


def test_a_lost_index_costs_space_and_no_data(domain: Domain) -> None:
    images = {"pages-1.img": random_pages(50, 1)}
    first = take(domain, images)
    for path in domain.index_dir.iterdir():
        path.unlink()
    second = take(domain, images)
    assert second.added_bytes == first.added_bytes
    assert content_of(domain, first) == content_of(domain, second) == images


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_bad_pack_is_not_relied_on(domain: Domain, harm: str) -> None:
    images = {"pages-1.img": random_pages(50, 1)}
    first = take(domain, images)
    (pack,) = domain.packs_dir.iterdir()
    data = pack.read_bytes()
    pack.unlink()
    if harm == "damaged":
        pack.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    second = take(domain, images)
    assert content_of(domain, second) == images
    if harm == "missing":
        with pytest.raises(IntegrityError):
            domain.before(first)


def test_runs_of_the_index_are_merged(domain: Domain) -> None:
    made = [take(domain, {"pages-1.img": random_pages(20 + n, n)}) for n in range(3 * MAX_RUNS)]
    domain.merge_index()
    assert len(list(domain.index_dir.iterdir())) <= MAX_RUNS
    for n, manifest in enumerate(made):
        again = take(domain, {"pages-1.img": random_pages(20 + n, n)}, container=ContainerRef(id="other"))
        assert again.added_bytes == 0
        assert content_of(domain, manifest) == content_of(domain, again)
    with domain.alone():
        domain.remove([manifest.id for manifest in domain.checkpoints() if manifest.id != made[0].id])
        remove_rubbish(domain)
    with contextlib.closing(Index(domain.index_dir)) as index:
        assert len(index) == 20


def test_a_prune_waits_for_others(domain: Domain) -> None:
    with domain.shared(), domain.shared(), pytest.raises(StoreError, match="in use"), domain.alone(0.2):
        pass
    with domain.alone():
        pass


def test_a_damaged_checkpoint_stops_a_prune(domain: Domain) -> None:
    manifest = take(domain, {"pages-1.img": random_pages(3, 1)})
    path = domain.checkpoints_dir / f"{manifest.id}.layout"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError), domain.alone():
        remove_rubbish(domain)
    assert pack_bytes(domain)


@pytest.mark.parametrize("name", ["", "../x", "A", "a" * 64, "-a"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="no name"):
        Domain.open(tmp_path, name, create=True)


def test_a_domain_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no domain"):
        Domain.open(tmp_path, "team")


@pytest.mark.parametrize("key", [None, bytes(range(16))])
def test_ids_of_zero_pages_are_made_without_the_pages(key: bytes | None) -> None:
    page_ids = PageIds(7, key)
    assert page_ids.of_run(3, []) == page_ids.of(bytes(3 * PAGE_BYTES))
    assert page_ids.of_run(2, [b"a" * PAGE_BYTES, b"b" * PAGE_BYTES]) == page_ids.of(
        b"a" * PAGE_BYTES + b"b" * PAGE_BYTES
    )
