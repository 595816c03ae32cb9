"""A process that dies at any single write of a dump into a store or of a prune: nothing complete is lost."""

import contextlib
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ocihook.checkpoints import complete as ops
from ocihook.checkpoints import listing
from ocihook.checkpoints import stage as staging
from ocihook.checkpoints.pending import claimed, pending_ids
from ocihook.checkpoints.prune import Keep, prune
from ocihook.checkpoints.stage import stage, stage_in_memory
from ocihook.config import Settings
from ocihook.errors import GivenUp, KeyMissing
from ocihook.images.image_set import list_packable
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.packs.cipher import NO_KEYS, KeySource
from ocihook.packs.pack import PAGE_BYTES
from ocihook.session.journal import Journal
from ocihook.session.undo import undo_all
from ocihook.stages.stored_pages import begin
from ocihook.store.domain import Domain
from ocihook.store.garbage import rubbish
from ocihook.store.page_ids import ID_BYTES
from ocihook.store.store import Store
from ocihook.store.thin import read_thin
from ocihook.store.verify import verify
from tests.fakes.images import make_image_set, read_stored
from tests.fakes.keys import make_keys

CONTAINER = ContainerRef(id="c1", name="trainer", pod_name="pod", pod_namespace="team")
WRITES = ("fsync", "ftruncate", "link", "mkdir", "pwrite", "replace", "rmdir", "unlink", "write", "writev")
DIED = 9


def die_at(number: int, *, torn: bool) -> None:
    """Have this process end at its n-th write; a torn one is half done then, any other not at all."""
    count = 0

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if torn and name in {"write", "pwrite"}:
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                elif torn and name == "writev":
                    whole = b"".join(arguments[1])
                    os.write(arguments[0], whole[: len(whole) // 2])
                elif torn:
                    with contextlib.suppress(OSError):
                        function(*arguments, **options)  # done, and not reported
                os._exit(DIED)
            return function(*arguments, **options)

        return call

    for name in WRITES:
        setattr(os, name, counted(name, getattr(os, name)))


def in_child(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - the exit status shows it
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_once(*acts: Callable[[], object]) -> list[int]:
    """Return the exit statuses of acts that begin at the same moment, each in a process of its own."""
    waiting, begin_now = os.pipe()
    pids = []
    for act in acts:
        pid = os.fork()
        if pid == 0:
            os.close(begin_now)
            os.read(waiting, 1)
            os._exit(in_child(act))
        pids.append(pid)
    os.close(waiting)
    os.close(begin_now)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def pages(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count * PAGE_BYTES)


class Node:
    """A store with one checkpoint, and a dump that is to become the second."""

    def __init__(self, root: Path, keys: KeySource = NO_KEYS) -> None:
        self.root, self.store_dir, self.keys = root, root / "store", keys
        root.mkdir()
        self.old = pages(60, 1)
        self.new = self.old[: 40 * PAGE_BYTES] + pages(30, 2)
        self.dump(self.old)
        self.complete()

    def copy(self, to: Path) -> "Node":
        shutil.copytree(self.root, to)
        node = object.__new__(Node)
        node.keys = self.keys
        node.root, node.store_dir, node.old, node.new = to, to / "store", self.old, self.new
        return node

    @property
    def store(self) -> Store:
        return Store(self.store_dir, self.keys)

    @property
    def domain(self) -> Domain:
        return self.store.open("team")

    @property
    def images(self) -> Path:
        return self.root / "images"

    def dump(self, content: bytes) -> None:
        shutil.rmtree(self.images, ignore_errors=True)
        make_image_set(self.images, {1: content})
        criu = Process.find(os.getpid())
        assert criu is not None
        self.take(Journal.create(self.root / "run", criu))

    def take(self, journal: Journal) -> None:
        staging = begin(journal, CONTAINER, self.images, self.images, self.store)
        staging.names = list_packable(self.images)
        journal.save()
        stage(staging.place, staging.names, CONTAINER, self.images, store=self.store, host={}, durable=True)
        journal.forget(staging)
        journal.finish()

    def complete(self) -> None:
        for checkpoint_id in pending_ids(self.domain):
            assert ops.complete(self.domain, checkpoint_id, workers=1)

    def contents(self) -> list[bytes]:
        domain = self.domain
        return [b"".join(_read(domain, manifest)) for manifest in domain.checkpoints()]

    def assert_clean(self) -> None:
        domain = self.domain
        assert verify(domain, read_data=True) == []
        prune(self.store, Keep())
        assert verify(domain, read_data=True) == []
        assert rubbish(domain) == ([], [])


def _read(domain: Domain, manifest: Any) -> Iterator[bytes]:
    layout = domain.layout(manifest)
    for extents in layout.images.values():
        yield from read_stored(extents, layout, domain.packs)


def recover(node: Node) -> None:
    """Do what the next agent does."""
    for path in (node.root / "run" / "sessions").glob("*.json"):
        journal = Journal.load(path)
        undo_all(journal, Patience())
        journal.finish()
    node.complete()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "first")


@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_page_ids_of_the_checkpoint_before(
    node: Node, workers: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say of another page that it is one of the new ones; what was found by them is thrown away."""
    monkeypatch.setattr("ocihook.packs.pages.RANGE_BYTES", 16 * PAGE_BYTES)
    (ids,) = node.domain.checkpoints_dir.glob("*.ids")
    page = node.new[40 * PAGE_BYTES : 41 * PAGE_BYTES]
    with ids.open("r+b") as file:
        file.seek(40 * ID_BYTES)
        file.write(node.domain.page_ids.of(page))
    node.dump(node.new)
    (pending,) = pending_ids(node.domain)
    assert ops.complete(node.domain, pending, workers=workers)
    assert re.search(r"domain team: the page ids of checkpoint \S+ are damaged", caplog.text)
    assert node.contents() == [node.old, node.new]
    assert node.domain.checkpoints()[-1].added_bytes < 40 * PAGE_BYTES  # the others were found all the same
    node.assert_clean()


@pytest.mark.parametrize("torn", [False, True])
def test_a_dump_that_dies_at_any_write(node: Node, tmp_path: Path, *, torn: bool) -> None:
    taken = kept = number = 0
    while True:
        number += 1
        copy = node.copy(tmp_path / str(number))
        shutil.rmtree(copy.images)
        make_image_set(copy.images, {1: node.new})
        image = copy.images / "pages-1.img"
        criu = Process.find(os.getpid())
        assert criu is not None
        journal = Journal.create(copy.root / "run", criu)

        def act(copy: Node = copy, journal: Journal = journal, number: int = number) -> None:
            die_at(number, torn=torn)
            copy.take(journal)
            copy.complete()

        status = in_child(act)
        assert status in {0, DIED}
        recover(copy)
        if read_thin(copy.images):
            assert copy.contents() == [node.old, node.new]
            assert not image.exists()
            taken += 1
        else:
            assert copy.contents() == [node.old]
            assert image.read_bytes() == node.new
            kept += 1
        assert pending_ids(copy.domain) == []
        copy.assert_clean()
        shutil.rmtree(copy.root)
        if status == 0:
            break
    assert number > 40
    assert taken > 20
    assert kept > 3


@pytest.mark.parametrize("torn", [False, True])
def test_a_prune_that_dies_at_any_write(node: Node, tmp_path: Path, *, torn: bool) -> None:
    third = pages(50, 3)
    for content in (node.new, third):
        node.dump(content)
        node.complete()
    number = 0
    while True:
        number += 1
        copy = node.copy(tmp_path / str(number))

        def act(copy: Node = copy, number: int = number) -> None:
            die_at(number, torn=torn)
            prune(copy.store, Keep(last=1))

        status = in_child(act)
        assert status in {0, DIED}
        assert verify(copy.domain, read_data=True) == []
        assert copy.contents()[-1] == third
        prune(copy.store, Keep(last=1))
        assert copy.contents() == [third]
        copy.assert_clean()
        copy.dump(node.old)
        copy.complete()
        assert copy.contents() == [third, node.old]
        copy.assert_clean()
        shutil.rmtree(copy.root)
        if status == 0:
            break
    assert number > 10


class Empty(Node):
    """A node that has dumped nothing into its store yet."""

    def __init__(self, root: Path, store_dir: Path, keys: KeySource = NO_KEYS) -> None:
        self.root, self.store_dir, self.keys = root, store_dir, keys
        root.mkdir()


@pytest.fixture(params=["plain", "encrypted"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> KeySource:
    return make_keys(tmp_path) if request.param == "encrypted" else NO_KEYS


@pytest.fixture
def slow_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that makes a domain is not done before others have seen that there is none."""

    def randbits(count: int) -> int:
        time.sleep(0.01)
        return int.from_bytes(os.urandom(count // 8), "big")

    monkeypatch.setattr("ocihook.store.domain.secrets.randbits", randbits)


@pytest.mark.usefixtures("slow_chance")
def test_first_dumps_of_a_namespace_at_once(tmp_path: Path, keys: KeySource) -> None:
    """The first process makes the domain, all others use it."""
    for number in range(10):
        store_dir = tmp_path / f"store-{number}"
        nodes = [Empty(tmp_path / f"{number}-{which}", store_dir, keys) for which in range(3)]
        contents = [pages(3, 1) + pages(3, 10 + which) for which in range(3)]

        def act(node: Node, content: bytes) -> None:
            node.dump(content)
            for checkpoint_id in pending_ids(node.domain):
                ops.complete(node.domain, checkpoint_id, workers=1)  # or another one is at it

        statuses = at_once(*(partial(act, node, content) for node, content in zip(nodes, contents, strict=True)))
        assert statuses == [0, 0, 0]
        nodes[0].complete()  # what another one was at while it was taken
        assert sorted(nodes[0].contents()) == sorted(contents)
        assert {manifest.seed for manifest in nodes[0].domain.checkpoints()} == {nodes[0].domain.seed}
        nodes[0].assert_clean()


@pytest.mark.usefixtures("slow_chance")
@pytest.mark.parametrize("is_alone", [False, True])
def test_one_of_two_that_make_a_domain_dies(tmp_path: Path, keys: KeySource, *, is_alone: bool) -> None:
    """At any write, while another one makes it, too, or before: that one makes it, or continues with it."""
    died = 0
    for number in range(1, 30):  # more than there are
        store, told = Store(tmp_path / str(number), keys), tmp_path / f"seed-{number}"

        def dies(store: Store = store, number: int = number) -> None:
            die_at(number, torn=False)
            store.open("team", create=True)

        def goes_on(store: Store = store, told: Path = told) -> None:
            told.write_text(str(store.open("team", create=True).seed))

        status, other = [in_child(dies), in_child(goes_on)] if is_alone else at_once(dies, goes_on)
        assert status in {0, DIED}
        assert other == 0
        assert told.read_text() == str(store.open("team", create=True).seed)
        died += status == DIED
    assert died >= 3 or not is_alone, "whoever comes second has little to write"


def test_a_full_disk_leaves_what_was_taken(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from ocihook.packs import pack

    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)

    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pack.os, "writev", full)  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="No space"):
            ops.complete(node.domain, checkpoint_id, workers=1)
    assert pending_ids(node.domain) == [checkpoint_id]
    assert node.contents() == [node.old]
    node.complete()
    assert node.contents() == [node.old, node.new]
    node.assert_clean()


@pytest.mark.parametrize("has_job", [True, False])
def test_what_was_taken_goes_though_who_completed_it_was_killed(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, has_job: bool
) -> None:
    settings = Settings(store_dir=str(node.store.root))
    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "discard_staged", fail_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            ops.complete(node.domain, checkpoint_id, workers=1)
    pending = node.domain.pending_dir / checkpoint_id
    if not has_job:
        (pending / "job").unlink()
    assert ops.has_pending(node.store)
    assert ops.complete_pending(settings, timeout_s=60) == []
    assert not pending.exists()
    assert not ops.has_pending(node.store)
    node.assert_clean()


def test_why_a_checkpoint_is_not_complete_is_kept_until_it_is(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from ocihook.packs import pack

    settings = Settings(store_dir=str(node.store_dir), history_dir=str(node.root / "history"), workers=1)
    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    (waiting,) = listing.list_pending(node.store)
    assert (waiting.state, waiting.code, waiting.reason, waiting.attempts) == ("pending", "", "", 0)

    with monkeypatch.context() as patch:
        patch.setattr(pack.os, "writev", fail_with(OSError(28, "No space left on device")))  # type: ignore[attr-defined]
        for attempts in (1, 2):
            ops.complete_all(settings)
            (row,) = listing.list_pending(node.store)
            assert (row.state, row.code, row.attempts) == ("pending", "store-full", attempts)
            assert "No space left on device" in row.reason
            assert row.remedy == f"make room in {node.domain.directory}, then `ocihook wait`"
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_store", fail_with(KeyMissing("the key is gone", hint="bring it back")))
        with pytest.raises(KeyMissing):
            ops.wait_complete(node.domain, checkpoint_id, workers=1)
        (row,) = listing.list_pending(node.store)
        assert (row.code, row.reason, row.remedy, row.attempts) == (
            "key-missing",
            "the key is gone",
            "bring it back",
            3,
        )
        # A restore that ends while it waits is no fault of the checkpoint.
        patch.setattr(ops, "_store", fail_with(GivenUp("CRIU was killed")))
        with pytest.raises(GivenUp, match="CRIU was killed"):
            ops.wait_complete(node.domain, checkpoint_id, workers=1)
        assert listing.list_pending(node.store)[0].attempts == 3
    (node.domain.pending_dir / checkpoint_id / "failed").write_bytes(b"torn")
    assert listing.list_pending(node.store)[0].reason == ""
    ops.complete_all(settings)
    assert listing.list_pending(node.store) == []
    assert node.contents() == [node.old, node.new]
    node.assert_clean()


def fail_with(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_what_was_in_memory_when_the_node_went_down_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounted: list[Path] = []
    monkeypatch.setattr(staging, "mount_memory", lambda place, _size: mounted.append(place))
    monkeypatch.setattr(staging, "available_bytes", lambda: 1 << 40)
    criu = Process.find(os.getpid())
    assert criu is not None
    journal = Journal.create(node.root / "run", criu)
    place = begin(journal, CONTAINER, node.images, node.images, node.store).place.pending
    assert stage_in_memory(place, 4096, 1 << 30)
    assert mounted == [place]
    # Here it is not mounted: as after a boot.
    (row,) = listing.list_pending(node.store)
    assert (row.id, row.state, row.code) == (place.name, "lost", "integrity")
    assert row.reason == "it was in memory when the node went down, and not stored yet"
    assert ops.has_pending(node.store)
    ops.complete_all(Settings(store_dir=str(node.store_dir), history_dir=str(node.root / "history"), workers=1))
    assert f"checkpoint {place.name} in domain team is lost: it was in memory" in caplog.text
    undo_all(journal, Patience())
    assert not place.exists()
    assert listing.list_pending(node.store) == []
    journal.finish()

    def refuse(_place: Path, _size: int) -> NoReturn:
        raise OSError(1, "may not mount")

    monkeypatch.setattr(staging, "mount_memory", refuse)
    place = begin(journal, CONTAINER, node.images, node.images, node.store).place.pending
    assert not stage_in_memory(place, 4096, 1 << 30)
    assert list(place.iterdir()) == []


def test_a_job_that_cannot_be_read_hides_no_other(node: Node) -> None:
    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    (node.domain.pending_dir / checkpoint_id / "job").write_bytes(b"torn")
    (row,) = listing.list_pending(node.store)
    assert (row.id, row.state, row.code) == (checkpoint_id, "lost", "integrity")
    assert "does not begin as one" in row.reason
    assert row.remedy == "`ocihook store prune` removes what is left of it"


def test_a_node_that_went_down_says_what_is_lost(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    (node.domain.pending_dir / checkpoint_id / "pages-1.img").write_bytes(node.new[:-PAGE_BYTES])
    assert [row.state for row in listing.list_checkpoints(node.store)] == ["complete", "lost"]
    with pytest.raises(Exception, match=r"was lost: pages-1.img has .* bytes of"):
        ops.complete(node.domain, checkpoint_id, workers=1)
    assert node.contents() == [node.old]
    prune(node.store, Keep())
    assert pending_ids(node.domain) == []
    with pytest.raises(Exception, match=f"no checkpoint {checkpoint_id}"):
        ops.wait_complete(node.domain, checkpoint_id, workers=1)


def test_two_that_complete_at_once(node: Node) -> None:
    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    with claimed(node.domain.pending_dir / checkpoint_id) as is_ours:
        assert is_ours
        assert in_child(lambda: os._exit(int(ops.complete(node.domain, checkpoint_id, workers=1)))) == 0
    node.complete()
    assert node.contents() == [node.old, node.new]
