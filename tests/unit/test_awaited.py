"""A checkpoint whose memory is still being read from a snapshot, or was lost: whole or not there, whoever dies when."""

import contextlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ocihook.agent.metrics import render
from ocihook.checkpoints import complete as ops
from ocihook.checkpoints import listing, pending, pulling, pushing
from ocihook.checkpoints.awaited import lose, reading, supply
from ocihook.checkpoints.pending import directory_of, pending_ids, read_job
from ocihook.checkpoints.prune import Keep, prune, prune_by_policy
from ocihook.checkpoints.stage import Place, choose_place, stage, stage_in_memory
from ocihook.config import Settings
from ocihook.errors import IntegrityError, SnapshotLost, StoreError
from ocihook.images.image_set import MovedRegions
from ocihook.images.merging import READ_PREFIX
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.node.doctor import store as doctor
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.packed_manifest import PackedImage
from ocihook.packs.packing import pack
from ocihook.packs.pages import ImageFile, Source
from ocihook.session import history
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump, Restore, SizeFacts
from ocihook.stages.awaited_memory import AwaitsMemory, read_snapshot
from ocihook.stages.stored_pages import StoredPages
from ocihook.store.thin import Thin, read_thin
from tests.fakes.images import make_image_set
from tests.unit.test_retention import doing
from tests.unit.test_store_crash import CONTAINER, DIED, Node, die_at, in_child

WHY = "its copy was killed for want of memory"
DIED_READING = "what read it was killed"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "first")


def settings_of(node: Node) -> Settings:
    return Settings(store_dir=str(node.store_dir), history_dir=str(node.root / "history"), workers=1)


def begin(node: Node) -> Place:
    """Take what CRIU has written of the new memory: a part."""
    shutil.rmtree(node.images, ignore_errors=True)
    make_image_set(node.images, {1: node.new[: 7 * PAGE_BYTES], 2: node.old[: 3 * PAGE_BYTES]})
    place = choose_place(CONTAINER, node.store)
    place.pending.mkdir()
    return place


def take(node: Node, place: Place) -> None:
    names = ["pages-1.img", "pages-2.img"]
    stage(
        *(place, names, CONTAINER, node.images),
        store=node.store,
        host={},
        durable=False,
        is_pushed=True,
        awaits_memory=True,
    )


def read(node: Node, place: Place) -> MovedRegions:
    """Read all of the memory into packs, as if from the snapshot."""
    memory = node.root / "memory"
    memory.write_bytes(node.new)
    source = Source(partial(ImageFile, memory), 0, len(node.new))
    (segments,), packs = pack([source], place.pending, prefix=READ_PREFIX, workers=1, durable=False)
    image = PackedImage("pages-1.img", len(node.new), segments)
    return MovedRegions((), tuple(packs), {}, (image,))


def dump(node: Node, *, end: Callable[[Place, MovedRegions], object]) -> str:
    place = begin(node)
    with reading(place):
        take(node, place)
        end(place, read(node, place))
    return place.pending.name


def supplied(node: Node) -> Callable[[Place, MovedRegions], object]:
    return lambda place, moved: supply(node.store, place, moved, CONTAINER, durable=False)


def lost(node: Node) -> Callable[[Place, MovedRegions], object]:
    return lambda place, _moved: lose(node.store, place, WHY)


def refuse_restore(node: Node, why: str) -> None:
    """Restore the engine's archive, in a process of its own: the checkpoint is in use for as long as that lives."""
    criu = Process.find(os.getpid())
    assert criu is not None
    journal = Journal.create(node.root / "run", criu)
    journal.identify(CONTAINER, str(node.images))
    restore = Restore(
        journal=journal,
        patience=Patience(),
        criu_pid=criu.pid,
        init_pid=0,
        image_dir=str(node.images),
        directory=node.images,
        settings=settings_of(node),
    )
    with pytest.raises(SnapshotLost, match=why):
        StoredPages().check(restore)


def row_of(node: Node, checkpoint_id: str) -> listing.Listed:
    return next(row for row in listing.list_checkpoints(node.store) if row.id == checkpoint_id)


def test_it_is_complete_once_its_memory_was_read(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, settings = begin(node), settings_of(node)
    checkpoint_id, thin = place.pending.name, Thin("team", place.pending.name)
    with reading(place):
        take(node, place)
        moved = read(node, place)
        assert (place.pending / "job").read_bytes().startswith(b"ocihook-job 2 "), "earlier releases refuse it"
        assert read_thin(node.images) == thin, "the engine's archive is as it will stay"
        assert row_of(node, checkpoint_id).state == "reading"
        assert listing.memory_state(node.store, thin) == "reading"
        for refused in (
            lambda: listing.pin(node.store, checkpoint_id, is_pinned=True),
            lambda: pushing.push(node.domain, checkpoint_id, str(tmp_path)),
            lambda: pulling.find_stored(settings, thin),
        ):
            with pytest.raises(StoreError, match=r"still being read from a snapshot. `ocihook wait`"):
                refused()
        hasty = node.store._replace(patience=Patience(timeout_s=0)).open("team")
        with pytest.raises(StoreError, match="not complete yet, its memory is still being read from a snapshot"):
            ops.wait_complete(hasty, checkpoint_id, workers=1)
        ops.complete_all(settings)
        prune(node.store, Keep())
        assert b'ocihook_store_pending_checkpoints{domain="team"} 1.0' in render(settings)
        assert node.contents() == [node.old]
        monkeypatch.setattr("ocihook.checkpoints.awaited._CLAIM_TIMEOUT_S", 0.1)
        with pytest.raises(StoreError, match="in use by another process"), reading(place):
            pass
        job = supply(node.store, place, moved, CONTAINER, durable=False)
        assert supply(node.store, place, MovedRegions((), (), {}), CONTAINER, durable=False) == job, "may run twice"
        lose(node.store, place, WHY)  # too late
    assert listing.memory_state(node.store, thin) == ""
    assert ops.complete(node.domain, checkpoint_id, workers=1)
    newest = node.contents()[1]
    assert (node.new in newest, len(newest)) == (True, len(node.new) + 3 * PAGE_BYTES), "of page image 1 all was read"
    lose(node.store, place, WHY)
    with pytest.raises(IntegrityError, match=rf"checkpoint {checkpoint_id} .* was removed meanwhile"):
        supply(node.store, place, moved, CONTAINER, durable=False)
    node.assert_clean()


def test_an_agent_that_is_killed_once_all_is_read_has_lost_nothing(node: Node) -> None:
    """It has not said so yet: the next one finds that the checkpoint has its memory."""
    place, me = begin(node), Process.find(os.getpid())
    assert me is not None
    with reading(place):
        take(node, place)
        supplied(node)(place, read(node, place))
    journal = Journal.create(node.root / "run", me)
    journal.identify(CONTAINER, str(node.images))
    journal.note(CallFacts(store=(str(node.store_dir), "", "")))
    journal.add(AwaitsMemory(init=me, place=place))
    journal = Journal.load(journal.path)
    dump = Dump(journal, Patience(), 0, me.pid, str(node.images), node.images)
    assert f"all of its memory is read, {len(node.new) + 3 * PAGE_BYTES} bytes" in read_snapshot(dump)
    assert journal.effects == []
    assert journal.facts(SizeFacts).checkpoint == place.pending.name
    assert ops.complete(node.domain, place.pending.name, workers=1)
    node.assert_clean()


def test_one_whose_snapshot_was_lost_is_incomplete_for_good(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(node)
    checkpoint_id = dump(node, end=lost(node))
    assert [path.name for path in directory_of(node.domain, checkpoint_id).iterdir()] == ["job"]
    for _ in range(2):
        ops.complete_all(settings)
    assert caplog.text.count(WHY) == 1, "it is reported once"
    why = rf"{checkpoint_id} of container \S+ is incomplete: the snapshot of its memory was lost: {WHY}. Restore an"
    thin = Thin("team", checkpoint_id)
    for refused in (
        lambda: ops.wait_complete(node.domain, checkpoint_id, workers=1, settings=settings),
        lambda: listing.pin(node.store, checkpoint_id, is_pinned=True),
        lambda: pushing.push(node.domain, checkpoint_id, str(tmp_path)),
        lambda: pulling.find_stored(settings, thin),
        lambda: supply(
            node.store, Place(directory_of(node.domain, checkpoint_id), tmp_path, "team"), *_NOTHING, durable=False
        ),
    ):
        with pytest.raises(SnapshotLost, match=why):
            refused()
    assert in_child(lambda: refuse_restore(node, why)) == 0
    assert listing.memory_state(node.store, thin) == "lost"
    row = row_of(node, checkpoint_id)
    assert (row.state, row.code, row.container) == ("lost", "snapshot-lost", str(CONTAINER))
    assert row.remedy.startswith("restore an earlier one, or checkpoint again; `ocihook store prune`")
    (record,) = [found for found in history.read(Path(settings.history_dir)) if found["id"] == f"store-{checkpoint_id}"]
    assert (history.outcome_of(record), history.error_of(record)[0]) == ("failed", "snapshot-lost")
    assert not node.domain.due_pushes()
    metrics = render(settings)
    assert b'ocihook_store_lost_checkpoints{domain="team"} 1.0' in metrics
    assert b'ocihook_failures_total{act="store",code="snapshot-lost"} 1.0' in metrics
    monkeypatch.setattr(doctor, "load_settings", lambda: settings)
    assert any(WHY in found.detail for check in doctor.CHECKS for found in check())
    prune_by_policy(Settings(store_dir=str(node.store_dir), keep_last=1))
    assert row_of(node, checkpoint_id).state == "lost", "a restore can still say why"
    prune(node.store, Keep())
    assert [row.state for row in listing.list_checkpoints(node.store)] == ["complete"]
    node.assert_clean()


_NOTHING = (MovedRegions((), (), {}), CONTAINER)


def wait(node: Node, checkpoint_id: str) -> None:
    with pytest.raises(SnapshotLost, match=DIED_READING):
        ops.wait_complete(node.domain, checkpoint_id, workers=1)


def complete_all(node: Node, _checkpoint_id: str) -> None:
    ops.complete_all(settings_of(node))


def look(node: Node, checkpoint_id: str) -> None:
    assert listing.memory_state(node.store, Thin("team", checkpoint_id)) == "lost"


def list_all(node: Node, checkpoint_id: str) -> None:
    assert DIED_READING in row_of(node, checkpoint_id).reason


@pytest.mark.parametrize("first", [wait, complete_all, look, list_all])
def test_a_reader_that_died_is_found_by_whoever_looks_first(node: Node, first: Callable[[Node, str], None]) -> None:
    place = begin(node)
    checkpoint_id = place.pending.name
    claim = contextlib.ExitStack()

    def read_on() -> None:
        claim.enter_context(reading(place))
        take(node, place)
        read(node, place)

    with doing(read_on):
        assert row_of(node, checkpoint_id).state == "reading"
    first(node, checkpoint_id)
    assert sorted(path.name for path in place.pending.iterdir() if path.name != "failed") == ["job"]
    job = read_job(node.domain, checkpoint_id)
    assert job is not None
    assert (job.awaits_memory, job.lost) == (False, DIED_READING)
    prune(node.store, Keep())
    assert not place.pending.exists()


def test_a_node_that_went_down_has_lost_it(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_id = dump(node, end=lambda *_: None)
    (tmp_path / "boot").write_text("another one")
    monkeypatch.setattr(pending, "_BOOT_ID", tmp_path / "boot")
    assert "lost: the node went down before it was read" in row_of(node, checkpoint_id).reason


def test_a_full_disk_does_not_keep_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written down: it is lost all the same, and what was taken makes room."""
    place = begin(node)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        with reading(place):
            take(node, place)
            read(node, place)
            patch.setattr("ocihook.checkpoints.awaited.write_job", refuse)
            with pytest.raises(OSError, match="No space"):
                lose(node.store, place, WHY)
        assert DIED_READING in row_of(node, place.pending.name).reason
        assert [path.name for path in place.pending.iterdir()] == ["job"]
    assert DIED_READING in row_of(node, place.pending.name).reason


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_memory_that_was_mounted_for_it_is_given_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocihook.checkpoints.stage.has_memory_mounted", lambda: False)
    monkeypatch.setattr("ocihook.checkpoints.stage.available_bytes", lambda: 1 << 40)
    place = begin(node)
    assert stage_in_memory(place.pending, 1 << 20, 1 << 30)
    with reading(place):
        take(node, place)
        read(node, place)
        assert os.path.ismount(place.pending)
        lose(node.store, place, WHY)
    assert not os.path.ismount(place.pending)
    assert WHY in row_of(node, place.pending.name).reason
    assert [path.name for path in place.pending.iterdir()] == ["job"]
    assert not place.pins.exists()
    prune(node.store, Keep())
    assert not place.pending.exists()


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("end", [supplied, lost])
def test_a_reader_that_dies_at_any_write(
    node: Node,
    tmp_path: Path,
    end: Callable[[Node], Callable[[Place, MovedRegions], object]],
    *,
    again: bool,
    torn: bool,
) -> None:
    """All of the memory, or none: whether the same is done again, or somebody finds that the reader died."""
    number, whole = 0, 0
    while True:
        number += 1
        copy = node.copy(tmp_path / str(number))
        place = begin(copy)

        take(copy, place)
        moved = read(copy, place)

        def act(do: Callable[[Place, MovedRegions], object], place: Place, moved: MovedRegions, number: int) -> None:
            with reading(place):
                die_at(number, torn=torn)
                do(place, moved)

        status = in_child(partial(act, end(copy), place, moved, number))
        assert status in {0, DIED}
        if again:
            with reading(place):
                end(copy)(place, moved)
        ops.complete_all(settings_of(copy))
        is_whole = place.pending.name in copy.domain.checkpoint_ids()
        if is_whole:
            assert node.new in copy.contents()[1]
            assert pending_ids(copy.domain) == []
            whole += 1
        else:
            assert row_of(copy, place.pending.name).state == "lost"
            assert {path.name for path in place.pending.iterdir()} == {"job", "failed"}
        assert is_whole == (end is supplied) or (end is supplied and status == DIED and not again)
        copy.assert_clean()
        assert not place.pending.exists()
        shutil.rmtree(copy.root)
        if status == 0:
            break
    assert number > 3
    assert bool(whole) == (end is supplied)
