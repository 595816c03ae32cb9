"""Belongings in the store: a part of their checkpoint, laid out again for a restore."""

import dataclasses
import os
from pathlib import Path

import pytest

from ocihook.belongings.bringing import read_members
from ocihook.belongings.filesystems import Rootfs
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR, Belongings, lay_out
from ocihook.checkpoints.complete import unreported, wait_complete
from ocihook.checkpoints.pulling import pull
from ocihook.checkpoints.pushing import push
from ocihook.checkpoints.stage import choose_place, stage
from ocihook.config import Settings
from ocihook.errors import IntegrityError, UnsupportedError
from ocihook.images.image_set import list_other_images, list_packable
from ocihook.model import ContainerRef
from ocihook.packs.pages import no_progress
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from ocihook.store.stored_manifest import BELONGINGS_NAME, StoredManifest, decode_stored, encode_stored
from ocihook.store.thin import read_thin
from ocihook.store.verify import verify_checkpoint
from tests.fakes.images import make_image_set, mixed_pages

CONTAINER = ContainerRef(id="c" * 64, engine="podman", runtime="runc", name="job")


def stop(
    store: Store, directory: Path, upper: Path, container: ContainerRef = CONTAINER
) -> tuple[Domain, StoredManifest]:
    """Do what a dump of a container that is stopped does, and complete it."""
    make_image_set(directory, {1: mixed_pages(40)})
    names = list_packable(directory)
    place = choose_place(container, store)
    place.pending.mkdir()
    others = [image.name for image in list_other_images(directory, packed_names=set(names))]
    belongings = Belongings(Rootfs(upper, upper), {"volumes/%2Fdata": upper})
    belongings.save(place.pending / BELONGINGS_NAME, directory, others, b'{"image": "x"}', no_progress)
    job = stage(place, names, container, directory, store=store, host={}, durable=True, with_belongings=True)
    assert job.belongings_bytes > 0
    domain = store.open(place.domain)
    return domain, wait_complete(domain, job.id, workers=1)


def test_a_checkpoint_of_a_gang_that_no_agent_completes_is_left_to_be_reported(tmp_path: Path, upper: Path) -> None:
    """A gang's coordinator would never know of it, if only the process that completes it could report it."""
    store = Store(tmp_path / "store")
    _, alone = stop(store, tmp_path / "alone", upper)
    domain, ours = stop(
        store, tmp_path / "ours", upper, dataclasses.replace(CONTAINER, gang="job/1/a", gang_member="a")
    )
    domain.marks.note_unreported("given-up")  # its dump was lost before it was complete
    assert alone.id != ours.id
    assert [(place.name, checkpoint_id) for place, checkpoint_id in unreported(store)] == [(domain.name, ours.id)]
    assert domain.marks.unreported() == {ours.id}
    domain.marks.note_reported(ours.id)
    assert unreported(store) == []


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    top = tmp_path / "upper"
    top.mkdir()
    (top / "weights").write_bytes(os.urandom(300_000))
    return top


def test_they_are_laid_out_as_they_were_saved(tmp_path: Path, upper: Path) -> None:
    store = Store(tmp_path / "store")
    domain, manifest = stop(store, tmp_path / "images", upper)
    assert manifest.belongings_bytes > 600_000
    verify_checkpoint(domain, manifest)
    place = tmp_path / "place"
    place.mkdir()
    lay_out(domain, manifest, place, workers=1)
    assert (place / FACTS_NAME).read_bytes() == b'{"image": "x"}'
    images = place / IMAGES_DIR
    thin = read_thin(images)
    assert thin is not None
    assert thin.checkpoint_id == manifest.id
    for image in manifest.other_images:
        assert (images / image.name).read_bytes() == (tmp_path / "images" / image.name).read_bytes()
    assert not list(images.glob("pages-*"))
    names = {info.name for info, _ in read_members(place / BELONGINGS_NAME)}
    assert {"rootfs/weights", "volumes/%2Fdata/weights", "checkpoint/inventory.img"} <= names


def test_what_has_not_changed_is_stored_once(tmp_path: Path, upper: Path) -> None:
    store = Store(tmp_path / "store")
    _, first = stop(store, tmp_path / "first", upper)
    (upper / "log").write_text("something before it")
    _, second = stop(store, tmp_path / "second", upper)
    assert first.added_bytes > 300_000
    assert second.added_bytes < 50_000


def test_they_are_pushed_and_pulled_with_their_checkpoint(tmp_path: Path, upper: Path) -> None:
    domain, manifest = stop(Store(tmp_path / "store"), tmp_path / "images", upper)
    (tmp_path / "remote").mkdir()
    push(domain, manifest.id, str(tmp_path / "remote"))
    other = Store(tmp_path / "other")
    pull(other, domain.name, manifest.id, str(tmp_path / "remote"))
    there = other.open(domain.name)
    place = tmp_path / "place"
    place.mkdir()
    lay_out(there, there.read(manifest.id), place, workers=1)
    assert (place / FACTS_NAME).exists()


def test_damage_is_found(tmp_path: Path, upper: Path) -> None:
    domain, manifest = stop(Store(tmp_path / "store"), tmp_path / "images", upper)
    for pack in domain.packs_dir.iterdir():
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    (tmp_path / "place").mkdir()
    with pytest.raises(IntegrityError):
        lay_out(domain, manifest, tmp_path / "place", workers=1)


def test_a_manifest_without_them_is_written_for_earlier_releases(tmp_path: Path, upper: Path) -> None:
    _, manifest = stop(Store(tmp_path / "store"), tmp_path / "images", upper)
    assert decode_stored(encode_stored(manifest)) == manifest
    assert encode_stored(manifest).startswith(b"ocihook-checkpoint 2 ")
    plain = dataclasses.replace(manifest, belongings_bytes=0)
    assert encode_stored(plain).startswith(b"ocihook-checkpoint 1 ")
    assert decode_stored(encode_stored(plain)) == plain


def test_what_a_restore_could_not_read_is_refused(tmp_path: Path, upper: Path) -> None:
    """A container is not ended for a checkpoint that no restore reads."""
    os.setxattr(upper / "weights", "user.number", b"7" * 300)
    belongings = Belongings(Rootfs(upper, upper), {})
    with pytest.raises(UnsupportedError, match="could not be restored"):
        belongings.save(tmp_path / "tar", tmp_path, [], b"{}", no_progress)


def test_more_than_the_node_allows_is_refused(upper: Path) -> None:
    belongings = Belongings(Rootfs(upper, upper), {"volumes/%2Fdata": upper})
    belongings.check_sizes(Settings())
    with pytest.raises(UnsupportedError, match="bytes in its rootfs"):
        belongings.check_sizes(Settings(max_rootfs_bytes=1000))
    with pytest.raises(UnsupportedError, match=r"bytes in its volumes.*max_volumes_bytes"):
        belongings.check_sizes(Settings(max_volumes_bytes=1000))
    Belongings(Rootfs(upper, None), {}).check_sizes(Settings(max_rootfs_bytes=0, max_volumes_bytes=0))
