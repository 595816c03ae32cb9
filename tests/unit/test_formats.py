"""What earlier versions wrote is read, restored, gone on with and removed by this one (tests/data/formats)."""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ocihook.archive import repack as archive
from ocihook.checkpoints import complete as ops
from ocihook.checkpoints import listing, pulling, pushing, rehydrate, remote_listing
from ocihook.checkpoints.prune import Keep, prune
from ocihook.checkpoints.stage import stage
from ocihook.cli.timeline_page import page
from ocihook.config import Settings
from ocihook.container.engine_archive import read_facts
from ocihook.errors import StoreError, UnsupportedError
from ocihook.gpu.mapping import check_gpus
from ocihook.images.image_set import (
    list_packable,
    open_packs,
    rehydrate_image_set,
    verify_image_set,
    write_packed_parts,
)
from ocihook.linux.procfs import Process
from ocihook.packs.cipher import NO_KEYS, KeySource
from ocihook.packs.packed_manifest import PackedManifest, PackedRegion, read_manifest
from ocihook.packs.pages import Part, Parts, Target, scattered
from ocihook.packs.runs import RunPages
from ocihook.session import history
from ocihook.session.journal import Journal
from ocihook.session.timeline import chrome_trace, lay_out
from ocihook.stages.stored_pages import begin
from ocihook.store.domain import Domain
from ocihook.store.garbage import rubbish
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest, StoredRegion
from ocihook.store.verify import verify
from tests.fakes.images import make_image_set, read_stored

DATA = Path(__file__).parents[1] / "data/formats"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))
PAGE = 4096


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def name_of(region: PackedRegion | StoredRegion) -> str:
    return f"{region.process} {region.start:x}"


class Written:
    """All that a version wrote, in a directory of this test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.expected: dict[str, Any] = json.loads((root / "expected.json").read_text())

    def images_of(self, name: str) -> Path:
        """Unpack an engine's archive; return the image set in it."""
        target = self.root / f"{name}.unpacked"
        with tarfile.open(self.root / name) as tar:
            tar.extractall(target, filter="data")
        return target / "checkpoint"


class Memory:
    """The memory of a process, as large as a page image, and empty."""

    def __init__(self, size_bytes: int) -> None:
        self.content = bytearray(size_bytes)

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        content = b"".join(buffers)
        self.content[offset : offset + len(content)] = content
        return len(content)

    def close(self) -> None:
        """Nothing is held."""


def _same(memory: Memory) -> Memory:
    return memory


def check_past_criu(directory: Path, names: Iterable[str], write: Callable[[Mapping[str, Target]], None]) -> None:
    """Check that every other page of page images, which are in a directory, can be written into processes."""
    for name in names:
        expected = bytearray((directory / name).read_bytes())
        parts = Parts([Part(at, PAGE, at) for at in range(PAGE, len(expected), 2 * PAGE)])
        for at in range(0, len(expected), 2 * PAGE):
            expected[at : at + PAGE] = bytes(len(expected[at : at + PAGE]))
        memory = Memory(len(expected))
        write({name: scattered(partial(_same, memory), parts)})
        assert memory.content == expected


class Kept(Written):
    """One of its stores."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        facts = self.expected[name]
        self.keys = KeySource(str(root / "store.keys")) if name == "store-encrypted" else NO_KEYS
        self.store = Store(Path(name), self.keys)  # a relative path, as where it was made: a job has paths in it
        self.remote = root / f"{name}-remote"
        self.name: str = facts["domain"]
        self.contents: dict[str, dict[str, str]] = facts["contents"]
        self.removed: str = facts["removed"]
        self.complete: list[str] = facts["complete"]
        self.pending: str = facts["pending"]

    @property
    def domain(self) -> Domain:
        return self.store.open(self.name)

    def read(self, store: Store, checkpoint_id: str) -> dict[str, str]:
        """Restore a checkpoint into a new directory; return the digests of what came out, regions by their places."""
        domain = store.open(self.name)
        manifest = domain.read(checkpoint_id)
        directory = self.root / f"restored-{len(list(self.root.iterdir()))}"
        directory.mkdir()
        rehydrate.rehydrate_stored(domain, manifest, directory, workers=2)
        found = {path.name: digest(path.read_bytes()) for path in directory.iterdir()}
        layout = domain.layout(manifest)
        for region in manifest.regions:
            pieces = read_stored(layout.images[region.name], layout, domain.packs)
            found[name_of(region)] = digest(b"".join(pieces))
        return found

    def add(self, like: StoredManifest, memory: dict[int, bytes]) -> StoredManifest:
        """Dump the container of a checkpoint once more."""
        images = self.root / "images"
        make_image_set(images, memory)
        criu = Process.find(os.getpid())
        assert criu is not None
        journal = Journal.create(self.root / "run", criu)
        staging = begin(journal, like.container, images, images, self.store)
        staging.names = list_packable(images)
        stage(staging.place, staging.names, like.container, images, store=self.store, host={}, durable=True)
        journal.forget(staging)
        journal.finish()
        assert ops.complete(self.domain, staging.place.pending.name, workers=1)
        return self.domain.read(staging.place.pending.name)


@pytest.fixture(params=VERSIONS)
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(DATA / f"{request.param}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="tar")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["store", "store-encrypted"])
def kept(request: pytest.FixtureRequest, root: Path) -> Kept:
    return Kept(root, request.param)


def test_packed_archives(root: Path) -> None:
    written = Written(root)
    for name in ("archive-plain.tar", "archive-gpu.tar"):
        path, expected = root / name, written.expected[name]
        assert archive.is_packed(read_facts(path))
        assert archive.inspect_archive(path).facts.container.engine == "podman"
        manifest = archive.verify_archive(path, workers=2)
        assert isinstance(manifest, PackedManifest)
        assert manifest.raw_bytes == manifest.image_bytes + sum(region.size_bytes for region in manifest.regions)
        images = written.images_of(name)
        assert verify_image_set(images, workers=2) == manifest
        assert rehydrate_image_set(images, workers=2) == [image.name for image in manifest.packed_images]
        found = {image.name: digest((images / image.name).read_bytes()) for image in manifest.packed_images}
        packs = open_packs(images, manifest)
        for region in manifest.regions:
            content = bytearray(region.size_bytes)
            assert RunPages(packs.parts[region.name]).read_into(memoryview(content), 0) == region.size_bytes
            found[name_of(region)] = digest(bytes(content))
        packs.close()
        assert found == expected


def test_memory_goes_past_criu(root: Path) -> None:
    written = Written(root)
    images = written.images_of("archive-plain.tar")
    names = rehydrate_image_set(images, workers=2)
    manifest = read_manifest(images)
    assert manifest is not None
    check_past_criu(images, names, partial(write_packed_parts, images, manifest, workers=1))


def test_stored_memory_goes_past_criu(kept: Kept) -> None:
    manifest = kept.domain.read(kept.complete[-1])
    images = kept.root / "images"
    images.mkdir()
    rehydrate.rehydrate_stored(kept.domain, manifest, images, workers=2)
    names = [image.name for image in manifest.images]
    check_past_criu(images, names, partial(rehydrate.write_stored_parts, kept.domain, manifest, workers=1))


def test_a_packed_archive_without_gpu_state_can_be_unpacked(root: Path) -> None:
    unpack = partial(archive.unpack_archive, compression="none", force=False, workers=2)
    unpack(root / "archive-plain.tar", root / "again.tar")
    assert archive.verify_archive(root / "again.tar", workers=2) is None
    written = Written(root)
    images = written.images_of("again.tar")
    expected = written.expected["archive-plain.tar"]
    assert {name: digest((images / name).read_bytes()) for name in expected} == expected
    with pytest.raises(UnsupportedError, match="has GPU state"):
        unpack(root / "archive-gpu.tar", root / "no.tar")


def test_what_is_known_of_gpus(root: Path) -> None:
    manifest = verify_image_set(Written(root).images_of("archive-gpu.tar"), workers=2)
    assert manifest is not None
    assert {region.process for region in manifest.regions} == set(manifest.gpu["held"]) == set(manifest.gpu["threads"])
    with pytest.raises(UnsupportedError, match=r"made with driver 580\.159\.04"):
        check_gpus(manifest.gpu, [], "1", ())


def test_a_store_is_listed_verified_and_restored(kept: Kept) -> None:
    assert verify(kept.domain, read_data=True) == []
    rows = listing.list_checkpoints(kept.store)
    states = dict.fromkeys(kept.complete, "complete") | {kept.pending: "pending"}
    assert {row.id: row.state for row in rows} == states
    assert [waiting.checkpoint_id for _, waiting in pushing.due(kept.store)] == [kept.complete[-1]]
    for checkpoint_id in kept.complete:
        assert kept.read(kept.store, checkpoint_id) == kept.contents[checkpoint_id]
    with pytest.raises(StoreError, match="no checkpoint"):
        kept.domain.read(kept.removed)
    assert kept.domain.entries()[kept.removed].previous is None, "the first link of the chain"


def test_a_thin_archive_of_a_store(kept: Kept) -> None:
    path = kept.root / f"thin-{kept.name}.tar"
    assert archive.read_thin_archive(path).checkpoint_id == kept.expected[path.name] == kept.complete[-1]
    assert archive.verify_archive(path, workers=2, store=kept.store) == kept.domain.read(kept.complete[-1])


def test_a_pending_checkpoint_is_completed(kept: Kept) -> None:
    manifest = ops.wait_complete(kept.domain, kept.pending, workers=1)
    assert manifest.previous is not None
    assert manifest.previous.id == kept.complete[-1]
    assert 0 < manifest.added_bytes < manifest.raw_bytes // 2, "it is compared with the one before"
    assert kept.read(kept.store, kept.pending) == kept.contents[kept.pending]
    assert verify(kept.domain, read_data=True) == []
    assert listing.list_pending(kept.store) == []


def test_a_store_goes_on(kept: Kept) -> None:
    """The container is dumped again, twice, checkpoints are pruned, and what is left is as it was."""
    last = kept.domain.read(kept.complete[-1])
    directory = kept.root / "last"
    directory.mkdir()
    rehydrate.rehydrate_stored(kept.domain, last, directory, workers=1)
    memory = {1: (directory / "pages-1.img").read_bytes(), 7: (directory / "pages-2.img").read_bytes()}
    same = kept.add(last, memory)
    assert (same.added_bytes, same.sequence) == (0, last.sequence + 1)
    memory[1] = memory[1][:PAGE] + b"x" * PAGE + memory[1][2 * PAGE :]
    changed = kept.add(last, memory)
    assert 0 < changed.added_bytes < 2 * PAGE
    assert verify(kept.domain, read_data=True) == []
    (pruned,) = prune(kept.store, Keep(last=1))
    assert set(pruned.removed) == {*kept.complete, same.id}
    assert [row.id for row in listing.list_checkpoints(kept.store)] == [changed.id, kept.pending]
    assert ops.complete(kept.domain, kept.pending, workers=1)
    assert kept.read(kept.store, kept.pending) == kept.contents[kept.pending]
    assert kept.read(kept.store, changed.id)["pages-1.img"] == digest(memory[1])
    assert verify(kept.domain, read_data=True) == []
    assert rubbish(kept.domain) == ([], [])


def test_checkpoints_at_a_remote(kept: Kept) -> None:
    location = str(kept.remote)
    assert [row.id for row in remote_listing.list_remote(location, kept.keys)] == kept.complete
    other = Store(kept.root / "other", kept.keys)
    for checkpoint_id in reversed(kept.complete):
        pulling.pull(other, kept.name, checkpoint_id, location)
        assert kept.read(other, checkpoint_id) == kept.contents[checkpoint_id]
    assert verify(other.open(kept.name), read_data=True) == []
    assert pushing.push(kept.domain, kept.complete[-1], location).moved_bytes == 0
    (pruned,) = remote_listing.prune_remote(location, Keep(last=1), kept.keys)
    assert pruned.removed == (kept.complete[0],)


def test_a_push_that_was_due(kept: Kept) -> None:
    location = str(kept.remote)
    settings = Settings(store_dir=str(kept.store.root), remote=location, key_file=kept.keys.file)
    assert pushing.push_due(settings) == []
    assert not pushing.due(kept.store)


def test_the_history(root: Path) -> None:
    dump, restore = records = history.read(root / "history")
    assert [history.act_of(record) for record in records] == ["dump", "restore"]
    for record in records:
        found = lay_out(record, records)
        assert (found.outcome, found.container.partition(" ")[0]) == ("done", "team/pod/trainer")
        assert history.find(records, record["id"]) == record
        assert any(bar.lane in {"GPU-0a", "GPU-0b"} for bar in found.bars)
        assert len(chrome_trace(found)["traceEvents"]) > len(found.bars)
        assert "<svg" in page(found)
    assert {bar.lane for bar in lay_out(restore).bars if bar.lane.startswith("GPU")} == {"GPU-0b"}
    history.keep(root / "history", "5-5", {**dump, "id": "5-5", "ended": restore["ended"] + 1}, limit=9)
    assert history.totals(root / "history")["acts"]["dump"]["outcomes"]["done"]["count"] == 2
