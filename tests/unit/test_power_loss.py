"""A node that loses power at any moment of a dump, a prune, a push, a pull or a rekey: what was said to be is there."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from ocihook.checkpoints import complete as ops
from ocihook.checkpoints import listing, maintenance
from ocihook.checkpoints.pending import pending_ids
from ocihook.checkpoints.prune import Keep, prune
from ocihook.checkpoints.pushing import push
from ocihook.checkpoints.remote_listing import list_remote, prune_remote
from ocihook.checkpoints.stage import stage
from ocihook.errors import IntegrityError, OcihookError
from ocihook.images.image_set import (
    finish_packing,
    list_packable,
    pack_image_set,
    rehydrate_image_set,
    verify_image_set,
)
from ocihook.linux.procfs import Process
from ocihook.packs.cipher import NO_KEYS, KeySource
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.packed_manifest import read_manifest
from ocihook.session.journal import Journal
from ocihook.stages.stored_pages import begin
from ocihook.store.thin import read_thin
from ocihook.store.verify import verify
from tests.fakes.images import make_image_set
from tests.fakes.keys import make_keys
from tests.fakes.power_loss import KILLED, Disk, Mark, run_recorded, write_tree
from tests.unit.test_store_crash import CONTAINER, Node, pages
from tests.unit.test_transfer import Other

STRIDE = 5  # a process is killed at every fifth call; at every one takes two minutes
Marks = frozenset[str]
OLD = pages(12, 1)
NEW = OLD[: 4 * PAGE_BYTES] + pages(8, 2)
THIRD = pages(7, 3)
LAST = THIRD + NEW + pages(5, 4)
LABELS = {OLD: "old", NEW: "new", THIRD: "third", LAST: "last"}
KEY, NEXT_KEY = "11" * 32, "22" * 32


class Case(NamedTuple):
    """Something that a node does, and what must be true whenever the power goes."""

    root: Path  # as it is before
    act: Callable[[Mark], object]
    check: Callable[[Marks], object]  # given what had been said to be done; the root is as it was left


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder has its own."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def lose_power(case: Case, tmp_path: Path, *, syncs: bool = True) -> int:
    """Check every state that is left; return how many there are."""
    disk, log = Disk(case.root, volatile=["run"]), tmp_path / "log"
    assert run_recorded(case.root, log, case.act) == 0
    disk.replay(log, syncs=syncs)
    states = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ocihook.checkpoints.pending.this_boot", lambda: "another one")
        for state in disk.states():
            states += 1
            shutil.rmtree(case.root)
            write_tree(state.tree, case.root)  # at the same place: jobs name paths
            try:
                case.check(state.marks)
            except BaseException as error:
                error.add_note(f"power lost after call {state.at}, left: {state.how}; promised: {set(state.marks)}")
                raise
    return states


def at_node(root: Path, keys: KeySource = NO_KEYS) -> Node:
    node = object.__new__(Node)
    node.root, node.store_dir, node.keys, node.old, node.new = root, root / "store", keys, OLD, NEW
    return node


def make_node(root: Path, *contents: bytes, keys: KeySource = NO_KEYS) -> Node:
    root.mkdir()
    node = at_node(root, keys)
    for content in contents:
        node.dump(content)
        node.complete()
    shutil.rmtree(root / "images", ignore_errors=True)
    return node


def contents(node: Node) -> list[str]:
    """Return what the checkpoints of a store hold, the oldest first."""
    return [LABELS.get(content, "something else") for content in node.contents()]


def stored(node: Node) -> list[str]:
    """Return the same, once every byte has been verified."""
    if "team" not in node.store.names():
        return []
    assert verify(node.domain, read_data=True) == []
    return contents(node)


def check_goes_on(node: Node, *expected: str) -> None:
    """Check that a store that has these checkpoints takes one more, of memory that it has and of other."""
    node.dump(LAST)
    node.complete()
    node.assert_clean()
    assert pending_ids(node.domain) == []
    assert contents(node) == [*expected, "last"]


# --- what is done


def dump(tmp_path: Path, *, durable: bool = True, workers: int = 1, first: bool = False) -> Case:
    """A dump into the store, and what is done in the background after it."""
    root = make_node(tmp_path / "node", *([] if first else [OLD])).root
    before = [] if first else ["old"]

    def act(mark: Mark) -> None:
        node = at_node(root)
        make_image_set(node.images, {1: NEW})
        criu = Process.find(os.getpid())
        assert criu is not None
        journal = Journal.create(root / "run", criu)
        staging = begin(journal, CONTAINER, node.images, node.images, node.store)
        names = list_packable(node.images)
        stage(staging.place, names, CONTAINER, node.images, store=node.store, host={}, durable=durable)
        journal.finish()
        if durable:
            mark("taken")
        (checkpoint_id,) = pending_ids(node.domain)
        assert ops.complete(node.domain, checkpoint_id, workers=workers)
        mark("complete")

    def check(marks: Marks) -> None:
        node = at_node(root)
        for row in listing.list_checkpoints(node.store):
            if row.state == "lost":
                assert not durable
                with pytest.raises(IntegrityError, match="was lost"):
                    ops.complete(node.domain, row.id, workers=1)
        assert "complete" not in marks or stored(node) == [*before, "new"]
        is_promised = durable and ("taken" in marks or (node.images.exists() and read_thin(node.images) is not None))
        if "team" in node.store.names():
            if durable:
                node.complete()
            prune(node.store, Keep())
        found = stored(node)
        assert found == [*before, "new"] or (found == before and not is_promised)
        check_goes_on(node, *found)

    return Case(root, act, check)


def complete(tmp_path: Path) -> Case:
    """What is done in the background."""
    node = make_node(tmp_path / "node", OLD)
    node.dump(NEW)

    def act(mark: Mark) -> None:
        for checkpoint_id in pending_ids(node.domain):
            ops.complete(node.domain, checkpoint_id, workers=1)
        mark("complete")

    def check(marks: Marks) -> None:
        assert contents(node) == ["old", "new"] or not marks
        node.complete()
        assert stored(node) == ["old", "new"]
        check_goes_on(node, "old", "new")

    return Case(node.root, act, check)


def pack(tmp_path: Path, *, are_images_synced: bool) -> Case:
    """A dump into packs in the engine's directory."""
    root = tmp_path / "node"
    root.mkdir()
    images = root / "images"
    images.mkdir()
    if are_images_synced:
        make_image_set(images, {1: NEW, 2: OLD})

    def act(mark: Mark) -> None:
        if not are_images_synced:
            make_image_set(images, {1: NEW, 2: OLD})
        assert pack_image_set(images, container=CONTAINER, host={}, workers=1, durable=True)
        mark("packed")

    def check(marks: Marks) -> None:
        assert "packed" not in marks or read_manifest(images) is not None
        if read_manifest(images) is not None:
            finish_packing(images)
            assert verify_image_set(images, workers=1) is not None
            rehydrate_image_set(images, workers=1)
        elif not are_images_synced:
            return
        for name, content in (("pages-1.img", NEW), ("pages-2.img", OLD)):
            assert (images / name).read_bytes() == content

    return Case(root, act, check)


def prune_store(tmp_path: Path) -> Case:
    """A prune that removes two checkpoints of three, and rewrites a pack of which a third is needed."""
    root = make_node(tmp_path / "node", OLD, THIRD, NEW).root

    def act(mark: Mark) -> None:
        prune(at_node(root).store, Keep(last=1))
        mark("pruned")

    def check(marks: Marks) -> None:
        node = at_node(root)
        found = stored(node)
        assert found in (["old", "third", "new"], ["old", "new"], ["third", "new"], ["new"])
        assert "pruned" not in marks or found == ["new"]
        check_goes_on(node, *found)

    return Case(root, act, check)


def push_second(tmp_path: Path) -> Case:
    """A push of the second of two checkpoints to a directory."""
    node = make_node(tmp_path / "node", OLD, NEW)
    root = tmp_path / "there"
    root.mkdir()
    first, second = (manifest.id for manifest in node.domain.checkpoints())
    push(node.domain, first, str(root))
    return Case(
        root, partial(_push, node, root, (second,)), partial(_check_remote, node, root, (first,), (first, second))
    )


def push_first(tmp_path: Path) -> Case:
    """A push to an empty directory."""
    node = make_node(tmp_path / "node", OLD, NEW)
    root = tmp_path / "there"
    root.mkdir()
    ids = tuple(manifest.id for manifest in node.domain.checkpoints())
    return Case(root, partial(_push, node, root, ids), partial(_check_remote, node, root, (), ids))


def _push(node: Node, there: Path, ids: tuple[str, ...], mark: Mark) -> None:
    for checkpoint_id in ids:
        push(node.domain, checkpoint_id, str(there))
        mark(checkpoint_id)


def _check_remote(node: Node, there: Path, before: tuple[str, ...], after: tuple[str, ...], marks: Marks) -> None:
    has = tuple(row.id for row in list_remote(str(there)))
    assert set(has) >= {*before, *marks}
    assert has == after[: len(has)]
    expected = dict(zip(after, ("old", "new"), strict=True))
    _check_pulled(there, has, expected)
    for checkpoint_id in after:
        push(node.domain, checkpoint_id, str(there))
    for path in there.rglob("*"):
        os.utime(path, (0, 0))  # so that what was announced, or begun, is found to be of long ago
    prune_remote(str(there), Keep())
    _check_pulled(there, after, expected)
    kinds = {path.name.partition(".")[2] for path in there.rglob("*") if path.is_file()}
    assert kinds == {"pack", "layout", "manifest"}


def _check_pulled(there: Path, ids: tuple[str, ...], expected: dict[str, str]) -> None:
    if ids:
        root = there.with_name("other")
        other = Other(root)
        for checkpoint_id in ids:
            other.pull(checkpoint_id, str(there))
        assert stored(other) == [expected[checkpoint_id] for checkpoint_id in ids]
        shutil.rmtree(root)


def prune_there(tmp_path: Path) -> Case:
    """A prune of a remote."""
    node = make_node(tmp_path / "node", OLD, NEW)
    root = tmp_path / "there"
    root.mkdir()
    first, second = (manifest.id for manifest in node.domain.checkpoints())
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(root))

    def act(mark: Mark) -> None:
        prune_remote(str(root), Keep(last=1))
        mark("pruned")

    def check(marks: Marks) -> None:
        has = [row.id for row in list_remote(str(root))]
        assert has in ([first, second], [second])
        assert "pruned" not in marks or has == [second]
        _check_pulled(root, tuple(has), {first: "old", second: "new"})
        prune_remote(str(root), Keep(last=1))
        _check_pulled(root, (second,), {second: "new"})
        assert len(list(root.rglob("*.layout"))) == 1

    return Case(root, act, check)


def pull_into(tmp_path: Path, *, has_first: bool) -> Case:
    """A pull, into a store that has another checkpoint of the container or that does not exist yet."""
    node = make_node(tmp_path / "node", OLD, NEW)
    there = tmp_path / "there"
    there.mkdir()
    first, second = (manifest.id for manifest in node.domain.checkpoints())
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(there))
    root = tmp_path / "other"
    other = Other(root)
    before = ["old"] if has_first else []
    if has_first:
        other.pull(first, str(there))

    def act(mark: Mark) -> None:
        other.pull(second, str(there))
        mark("pulled")

    def check(marks: Marks) -> None:
        again = at_node(root)
        found = stored(again)
        assert found == [*before, "new"] or (found == before and not marks)
        listing.list_checkpoints(again.store)
        Other.pull(again, second, str(there))  # type: ignore[arg-type]
        if again.domain.pending_dir.exists():
            for path in again.domain.pending_dir.iterdir():
                os.utime(path, (0, 0))
        check_goes_on(again, *before, "new")

    return Case(root, act, check)


def rekey(tmp_path: Path, *, was_encrypted: bool) -> Case:
    """A new key, or the first one."""
    keys = make_keys(tmp_path, KEY) if was_encrypted else NO_KEYS
    root = make_node(tmp_path / "node", OLD, NEW, keys=keys).root
    both = make_keys(tmp_path, NEXT_KEY, *([KEY] if was_encrypted else []))
    (tmp_path / "new").mkdir()
    new = make_keys(tmp_path / "new", NEXT_KEY)

    def act(mark: Mark) -> None:
        maintenance.rekey(at_node(root, both).store)
        mark("done")

    def check(marks: Marks) -> None:
        node = at_node(root, new if marks else both)
        assert stored(node) == ["old", "new"]
        if marks:
            written = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
            assert OLD[:64] not in written
        maintenance.rekey(node.store)
        check_goes_on(at_node(root, new), "old", "new")

    return Case(root, act, check)


CASES: dict[str, Callable[[Path], Case]] = {
    "dump": dump,
    "the first dump": partial(dump, first=True),
    "dump by two workers": partial(dump, workers=2),
    "dump of what goes on running": partial(dump, durable=False),
    "completion": complete,
    "packing": partial(pack, are_images_synced=True),
    "packing what is not synced": partial(pack, are_images_synced=False),
    "prune": prune_store,
    "push": push_second,
    "the first push": push_first,
    "remote prune": prune_there,
    "pull": partial(pull_into, has_first=True),
    "the first pull": partial(pull_into, has_first=False),
    "rekey": partial(rekey, was_encrypted=True),
    "the first key": partial(rekey, was_encrypted=False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr("ocihook.packs.pages.RANGE_BYTES", 4 * PAGE_BYTES)
    return CASES[request.param](tmp_path)


def test_power_is_lost(case: Case, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    count = lose_power(case, tmp_path)
    record_property("states", count)
    print(f"{count} states")
    assert count > 8


@pytest.mark.parametrize("name", [name for name in CASES if "dump" not in name and "packing" not in name])
def test_killed_and_done_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process had not synced when it was killed, the next one relies on; then the power is lost."""
    monkeypatch.setattr("ocihook.checkpoints.transfer.TRANSFERS", 1)
    case = CASES[name](tmp_path)
    before = Disk(case.root, volatile=["run"]).tree()
    for number in range(0, 1000, STRIDE):
        shutil.rmtree(case.root)
        write_tree(before, case.root)
        disk, log = Disk(case.root, volatile=["run"]), tmp_path / f"log-{number}"
        status = run_recorded(case.root, log, lambda _: case.act(lambda _: None), last=number)
        assert status in {0, KILLED}
        assert run_recorded(case.root, log, case.act) == 0
        disk.replay(log)
        state = disk.last_state()
        shutil.rmtree(case.root)
        write_tree(state.tree, case.root)
        try:
            case.check(state.marks)
        except BaseException as error:
            error.add_note(f"killed at call {number}")
            raise
        if status == 0:
            break
    assert number > 3


def test_nothing_is_synced(case: Case, tmp_path: Path) -> None:
    """These tests see it."""
    with pytest.raises((AssertionError, OcihookError)):
        lose_power(case, tmp_path, syncs=False)
