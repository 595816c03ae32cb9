"""Dumps of gangs in the store, at remotes and as archives: complete or not there, kept and removed whole."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.checkpoints import listing, pushing, remote_listing
from ocihook.checkpoints.epochs import Epochs
from ocihook.checkpoints.gang_note import GangNote, write_note
from ocihook.checkpoints.pending import Job, directory_of, write_job
from ocihook.checkpoints.prune import Keep, prune, prune_archives
from ocihook.cli import store as command
from ocihook.config import Policy, Settings
from ocihook.errors import NoCheckpoint, OcihookError, RemoteError, StoreError
from ocihook.gang.link import Link
from ocihook.linux.patience import Patience
from ocihook.model import ContainerRef, GangRef
from ocihook.runtime.choice import Known, choose, describe_epochs, restorable, whole
from ocihook.runtime.containers import Kept
from ocihook.store.domain import Domain, new_checkpoint_id
from ocihook.store.store import Store
from ocihook.store.thin import Thin, write_thin
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.unit.test_gang import LIMIT_S, Serving
from tests.unit.test_retention import ids, made
from tests.unit.test_stored_belongings import stop as stop_in_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def domain(store: Store) -> Domain:
    return store.open("team", create=True)


@pytest.fixture
def remote(tmp_path: Path) -> str:
    (tmp_path / "remote").mkdir()
    return str(tmp_path / "remote")


def member(name: str, epoch: int, *, size: int = 2, here: int = 2, attempt: str = "") -> ContainerRef:
    """Return a container as a dump of its gang has named it."""
    pod = ContainerRef(id=f"{name}{epoch}", engine="containerd", name="main", pod_name=name, pod_namespace="team")
    gang = GangRef("team", "job", name, size, epoch, attempt or f"{epoch:016x}")
    return GangNote(gang=gang, here=here).on(pod)


def dump(domain: Domain, number: int, *members: ContainerRef) -> list[str]:
    return [made(domain, number, content=2, container=each).id for each in members]


def test_who_is_missing() -> None:
    a, b, lone = member("a", 1), member("b", 1), ContainerRef(id="x")
    assert [Epochs([a, b]).missing(a), Epochs([a, a]).missing(a), Epochs([a]).missing(b)] == [0, 1, 1]
    assert Epochs([a, member("b", 1, attempt="f" * 16)]).missing(a) == 1, "the same number of another coordinator"
    assert Epochs([]).is_whole(lone)
    far = member("a", 1, here=1)
    assert Epochs([far]).has_all_of_node(far)
    assert not Epochs([a]).has_all_of_node(a)
    unknown = dataclasses.replace(a, gang_size="")
    assert not Epochs([unknown]).is_whole(unknown)


def test_an_epoch_that_lacks_a_member_is_not_the_last(store: Store, domain: Domain) -> None:
    """One member's third dump was lost: the second is the last that can be restored."""
    for epoch in (1, 2):
        dump(domain, epoch, member("a", epoch), member("b", epoch))
    (torn,) = dump(domain, 3, member("a", 3))
    (pruned,) = prune(store, Keep(last=1))
    assert len(pruned.removed) == 2
    assert [m.container.gang.split("/")[1] for m in domain.checkpoints()] == ["2", "2", "3"]
    rows = {row.id: row.gang_missing for row in listing.list_checkpoints(store)}
    assert [missing for checkpoint_id, missing in rows.items() if checkpoint_id != torn] == [0, 0]
    assert rows[torn] == 1
    assert listing.unfinished_epochs(store) == [
        f"domain team: job/3/{3:016x} lacks 1 of its members, and is not restored"
    ]
    last = dump(domain, 4, member("a", 4), member("b", 4))
    prune(store, Keep(last=1))
    assert ids(domain) == last, "what was never complete is not kept beside what is"


def test_what_is_never_complete_does_not_pile_up(store: Store, domain: Domain) -> None:
    dumps = [dump(domain, epoch, member("a", epoch)) for epoch in range(1, 5)]
    prune(store, Keep(last=2))
    assert ids(domain) == [*dumps[2], *dumps[3]]


def test_one_that_is_pinned_or_used_keeps_its_epoch(store: Store, domain: Domain) -> None:
    dumps = [dump(domain, epoch, member("a", epoch), member("b", epoch)) for epoch in range(1, 5)]
    domain.pin(dumps[0][0])
    use = domain.marks.begin_use(dumps[1][1])
    prune(store, Keep(last=1))
    assert ids(domain) == [*dumps[0], *dumps[1], *dumps[3]]
    prune(store, Keep(max_bytes=1))
    assert ids(domain) == [*dumps[0], *dumps[1], *dumps[3]]
    os.close(use)
    prune(store, Keep(max_bytes=1))
    assert ids(domain) == [*dumps[0], *dumps[3]]


def test_members_on_other_nodes_are_not_missed_by_a_node(store: Store, domain: Domain) -> None:
    dumps = [dump(domain, epoch, member("a", epoch, here=1)) for epoch in range(1, 4)]
    prune(store, Keep(last=1))
    assert ids(domain) == dumps[2]
    assert listing.unfinished_epochs(store) == []
    (row,) = listing.list_checkpoints(store)
    assert (row.gang_missing, row.gang_elsewhere) == (1, 1)


def test_each_node_pushes_its_own(tmp_path: Path, remote: str) -> None:
    """The second node's last push has failed: the remote keeps, and gives, the epoch before."""
    stores = {name: Store(tmp_path / name) for name in "ab"}
    domains = {name: store.open("team", create=True) for name, store in stores.items()}
    pushed: dict[int, list[str]] = {}
    for epoch in (1, 2, 3):
        for name, domain in domains.items():
            (checkpoint_id,) = dump(domain, epoch, member(name, epoch, here=1))
            if (name, epoch) != ("b", 3):
                pushing.push(domain, checkpoint_id, remote)
                pushed.setdefault(epoch, []).append(checkpoint_id)
    (done,) = remote_listing.prune_remote(remote, Keep(last=1))
    assert sorted(done.removed) == sorted(pushed[1])
    missing = {row.id: row.gang_missing for row in remote_listing.list_remote(remote)}
    assert missing == {**dict.fromkeys(pushed[2], 0), pushed[3][0]: 1}
    keys = stores["a"].keys
    name, found = remote_listing.find_remote_gang(remote, keys, "job/2")
    assert (name, sorted(found)) == ("team", sorted(pushed[2]))
    with pytest.raises(RemoteError, match=r"lacks 1 of the members of job/3. Each node pushes"):
        remote_listing.find_remote_gang(remote, keys, "job/3")
    pushing.push(domains["b"], ids(domains["b"])[-1], remote)
    (done,) = remote_listing.prune_remote(remote, Keep(last=1))
    assert sorted(done.removed) == sorted(pushed[2])


def test_commands_take_an_epoch(
    tmp_path: Path, store: Store, domain: Domain, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Settings(store_dir=str(store.root), remote=remote), tmp_path / "elsewhere"
    monkeypatch.setattr(command, "load_settings", lambda: here)
    members = dump(domain, 1, member("a", 1), member("b", 1))
    dump(domain, 2, member("a", 2))

    def run(*words: str) -> str:
        done = CliRunner().invoke(command.store, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    moved = json.loads(run("push", "job/1", "--json"))["checkpoints"]
    assert [row["checkpoint_id"] for row in moved] == members
    assert "job/2, lacks 1" in run("list")
    assert "job/2/0000000000000002 lacks 1 of its members, and is not restored" in run("verify")
    assert json.loads(run("verify", "--json"))["ok"]
    here = Settings(store_dir=str(there), remote=remote)
    assert len(json.loads(run("pull", "job/1", "--json"))["checkpoints"]) == 2
    assert set(ids(Store(there).open("team"))) == set(members)
    with pytest.raises(StoreError, match="has nothing of job/7"):
        run("push", "job/7")


def test_an_epoch_of_two_coordinators_is_named_in_full(store: Store, domain: Domain, remote: str) -> None:
    first = dump(domain, 1, member("a", 1), member("b", 1))
    second = dump(domain, 2, *(member(name, 1, attempt="f" * 16) for name in "ab"))
    with pytest.raises(StoreError, match="has 2 dumps job/1: job/1/0000000000000001 in domain team, job/1/ffff"):
        listing.find_gang(store, "job/1")
    assert listing.find_gang(store, f"job/1/{'f' * 16}")[1] == second
    prune(store, Keep(last=1))
    assert ids(domain) == second
    assert first != second


def test_archives_of_an_epoch_go_together(tmp_path: Path, store: Store) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()

    def archive(name: str, epoch: int, *, written_s: float, thin: Thin | None = None) -> Path:
        images = tmp_path / f"{name}{epoch}"
        make_image_set(images, {1: mixed_pages(3)})
        if thin is not None:
            write_thin(images, thin, durable=False)
        write_note(images, GangNote(gang=GangRef("default", "job", name, 2, epoch, "0" * 16), here=2))
        path = directory / f"{name}{epoch}.tar"
        make_archive(path, images, "containerd")
        os.utime(path, (written_s, written_s))
        return path

    whole = [archive(name, 1, written_s=1000) for name in "ab"]
    torn = archive("a", 2, written_s=2000)
    prune_archives(directory, Keep(last=2), store)
    assert all(path.exists() for path in (*whole, torn)), "the last whole epoch, and one that may become so"
    newer = [archive(name, 3, written_s=3000 + number) for number, name in enumerate("ab")]
    done = prune_archives(directory, Keep(last=2), store)
    assert sorted(done.removed) == sorted(path.name for path in (*whole, torn))
    bounded = prune_archives(directory, Keep(max_bytes=1), store)
    assert bounded.removed == ()
    assert all(path.exists() for path in newer), "the newest, and what is of its epoch"
    archive("a", 4, written_s=4000)
    archive("b", 4, written_s=4001, thin=lose(store, "b", 4))
    assert prune_archives(directory, Keep(last=1), store).removed == ()
    assert prune_archives(directory, Keep(max_bytes=1), store).removed == ()
    assert all(path.exists() for path in newer), "a snapshot of epoch 4 was lost: 3 is the last that is whole"


def lose(store: Store, name: str, epoch: int) -> Thin:
    """Take a member's checkpoint of which the snapshot is lost at once."""
    domain = store.open("team", create=True)
    checkpoint_id = new_checkpoint_id()
    directory_of(domain, checkpoint_id).mkdir()
    job = Job(
        id=checkpoint_id,
        created="2027-01-15T12:00:00Z",
        container=member(name, epoch),
        host={},
        images={},
        sizes={},
        other_images=(),
        boot_id="",
        awaits_memory=True,
    )
    write_job(domain, job, durable=False)
    return Thin("team", checkpoint_id)


def test_an_epoch_with_a_lost_snapshot_is_not_there(store: Store, domain: Domain) -> None:
    first = dump(domain, 1, member("a", 1), member("b", 1))
    second = [*dump(domain, 2, member("a", 2)), lose(store, "b", 2).checkpoint_id]
    states = {row.id: (row.state, row.gang_missing) for row in listing.list_checkpoints(store)}
    assert [states[one] for one in second] == [("complete", 1), ("lost", 0)]
    known = [
        Known(one, member(name, epoch), f"2027-01-15T0{epoch}:00:00Z")
        for epoch, ids_ in ((1, first), (2, second))
        for name, one in zip("ab", ids_, strict=True)
    ]
    assert [one.id for one in restorable(whole(known, store, "team", Patience()))] == first
    prune(store, Keep(last=1), loss_kept_s=60)
    assert ids(domain) == [*first, second[0]], "the last whole epoch, and what is left of the newer one"


# --- which one a gang is restored from


class Node:
    """A node of the gang's: its store, and the member that is dumped and made again there."""

    def __init__(self, directory: Path, name: str, remote: str = "") -> None:
        self.name, self.directory = name, directory
        self.choose_error = False  # whether `choose` returns the error in place of its name
        self.settings = Settings(store_dir=str(directory / "store"), remote=remote, workers=1)
        self.store = Store.of(self.settings)
        (directory / "upper").mkdir(parents=True)

    def dump(self, epoch: int, *, name: str = "", here: int = 1, owner_uid: str = "") -> str:
        """Do what a dump of a member that is stopped does."""
        container = dataclasses.replace(member(name or self.name, epoch, here=here), owner_uid=owner_uid)
        images = self.directory / f"images-{container.id}"
        return stop_in_store(self.store, images, self.directory / "upper", container)[1].id

    def choose(self, name: str = "", uid: str = "new", owner_uid: str = "") -> str:
        """Return what the member is restored from, or the name of the error."""
        pod = dataclasses.replace(member(name or self.name, 9), gang="", gang_member="", pod_uid=uid)
        pod = dataclasses.replace(pod, owner_uid=owner_uid)
        kept = Kept(container=pod, bundle=Path("/"), program=Path("/"), prefix=(), domain="team")
        gang = GangRef("team", "job", pod.pod_name, 2)
        policy = Policy(restore_from="latest", gang_timeout_s=LIMIT_S)
        try:
            return choose(kept, policy, self.settings, Patience(timeout_s=LIMIT_S), gang).thin.checkpoint_id
        except NoCheckpoint as error:
            return str(error) if self.choose_error else "none"


@pytest.fixture
def coordinated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Serving(tmp_path).link
    monkeypatch.setattr(Link, "of", lambda _: link)


def together(*acts: Callable[[], str]) -> list[str]:
    """Have processes of their own do something at the same time."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in acts]

    def do(number: int) -> None:
        try:
            pipes[number][1].send(acts[number]())
        except (OcihookError, OSError) as error:
            pipes[number][1].send(repr(error))

    processes = [fork.Process(target=do, args=(number,)) for number in range(len(acts))]
    for process in processes:
        process.start()
    try:
        assert all(pipe.poll(2 * LIMIT_S) for pipe, _ in pipes)
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.usefixtures("coordinated")
def test_members_are_restored_from_the_last_dump_that_all_have(tmp_path: Path) -> None:
    """Each node knows its own store alone; what one member has lost no member is restored from."""
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    assert together(a.choose, b.choose) == ["none", "none"]
    first = [a.dump(1), b.dump(1)]
    assert together(a.choose, b.choose) == first
    second = a.dump(2)
    assert together(a.choose, b.choose) == first
    assert together(a.choose, b.choose) == first
    assert [second, b.dump(2)] == together(a.choose, b.choose)


@pytest.mark.usefixtures("coordinated")
def test_epochs_of_another_owner_do_not_count(tmp_path: Path) -> None:
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    new = (functools.partial(node.choose, owner_uid="uid-2") for node in (a, b))
    a_new, b_new = new
    old = [node.dump(1, owner_uid="uid-1") for node in (a, b)]
    assert together(a_new, b_new) == ["none", "none"]
    a.choose_error = b.choose_error = True
    assert all("an earlier job of this name, uid uid-1" in error for error in together(a_new, b_new))
    a.choose_error = b.choose_error = False
    assert together(*(functools.partial(node.choose, owner_uid="uid-1") for node in (a, b))) == old
    own = [node.dump(2, owner_uid="uid-2") for node in (a, b)]
    a.dump(3, owner_uid="uid-1"), b.dump(3, owner_uid="uid-1")
    assert together(a_new, b_new) == own
    assert together(a_new, functools.partial(b.choose, owner_uid="")) == own, "what one member does not know, others do"


def test_without_a_common_epoch_each_that_there_is_is_named_with_the_member_that_lacks_it() -> None:
    def known(*members: tuple[str, int]) -> list[Known]:
        return [Known(f"{name}{epoch}", member(name, epoch), f"2027-01-15T0{epoch}:00:00Z") for name, epoch in members]

    mine = member("a", 9)
    both = [("a", 1), ("b", 1)]
    assert describe_epochs(known(*both, ("a", 2)), mine) == (
        "epoch job/2 lacks b; epoch job/1 has all members, of which one did not offer it"
    )
    assert describe_epochs(known(("a", 2)), mine) == "epoch job/2 lacks 1 of 2 members"
    assert describe_epochs(known(("b", 2)), mine) == ""
    assert describe_epochs([], mine) == ""


@pytest.mark.usefixtures("coordinated")
def test_the_error_of_a_member_names_the_epochs(tmp_path: Path, remote: str) -> None:
    a, b = Node(tmp_path / "a", "a", remote), Node(tmp_path / "b", "b", remote)
    torn = a.dump(2)
    pushing.push(a.store.open("team"), torn, remote)
    a.choose_error = b.choose_error = True
    said = together(a.choose, b.choose)
    assert "no epoch of gang team/job has a checkpoint of every member" in said[0]
    assert "epoch job/2 lacks 1 of 2 members" in said[0]
    assert "there is no checkpoint team/b/main" in said[1]


@pytest.mark.usefixtures("coordinated")
def test_members_on_new_nodes_come_to_what_is_whole_at_the_remote(tmp_path: Path, remote: str) -> None:
    a, b = Node(tmp_path / "a", "a", remote), Node(tmp_path / "b", "b", remote)
    first = [a.dump(1), b.dump(1)]
    for node, checkpoint_id in zip((a, b), first, strict=True):
        pushing.push(node.store.open("team"), checkpoint_id, remote)
    pushing.push(a.store.open("team"), a.dump(2), remote)
    b.dump(2)  # is not pushed before the node ends
    new = [Node(tmp_path / f"new-{name}", name, remote) for name in "ab"]
    assert together(*(node.choose for node in new)) == first


@pytest.mark.usefixtures("coordinated")
def test_one_of_a_node_s_members_was_lost(tmp_path: Path) -> None:
    node = Node(tmp_path / "node", "")
    first = [node.dump(1, name=name, here=2) for name in "ab"]
    node.dump(2, name="a", here=2)
    assert together(partial(node.choose, "a"), partial(node.choose, "b")) == first
    lone = member("a", 9)
    kept = Kept(container=lone, bundle=Path("/"), program=Path("/"), prefix=(), domain="team")
    torn = max(set(ids(node.store.open("team"))) - set(first))
    for wanted in ("latest", torn):  # not even by its id, nor where annotations no longer name the gang
        policy = Policy(restore_from=wanted)
        with contextlib.suppress(NoCheckpoint):
            assert choose(kept, policy, node.settings, Patience(timeout_s=LIMIT_S)).thin.checkpoint_id == first[0]


@pytest.mark.usefixtures("coordinated")
def test_a_member_without_a_checkpoint_keeps_nobody_waiting(tmp_path: Path) -> None:
    a, b = Node(tmp_path / "a", "a"), Node(tmp_path / "b", "b")
    a.dump(1)
    assert b.choose() == "none"
    assert a.choose() == "none"
