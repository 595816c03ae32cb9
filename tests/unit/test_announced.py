"""Stops that are announced at a remote: what a container that is created again elsewhere does, in every order."""

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import ocihook.remote.s3  # noqa: F401 - once, and not in each process that asks
from ocihook import wire
from ocihook.checkpoints import pushing
from ocihook.config import Policy, Settings
from ocihook.errors import GivenUp, NoCheckpoint, RemoteError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef, GangRef
from ocihook.packs.cipher import Keyring, KeySource
from ocihook.remote.location import open_remote
from ocihook.runtime import announced, claims, containers, waiting
from ocihook.runtime.announced import (
    Announced,
    Found,
    announce,
    find_announced,
    has_announcements,
    has_due_announcements,
    name_of,
    note_end,
    tend_announcements,
)
from ocihook.runtime.choice import choose
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import CHECKPOINTED, SIGNALLED, Stop, write_stop
from ocihook.session.record import to_json
from ocihook.store.lineage import lineage
from ocihook.store.store import Store
from tests.fakes.object_storage import make_bucket, object_storage
from tests.fakes.registry import Registry
from tests.unit.test_stored_belongings import stop as stop_in_store

OLD = "train-0-bcdfg"
NEW = "train-0-zzxww"
NOBODY: Mapping[str, str] = MappingProxyType({})


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "remote").mkdir()
    return str(tmp_path / "remote")


@pytest.fixture(params=["directory", "bucket", "registry"])
def location(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with contextlib.ExitStack() as stack:
        if request.param == "directory":
            yield request.getfixturevalue("directory")
        elif request.param == "registry":
            registry = Registry()
            stack.callback(registry.close)
            yield f"oci://{registry.address}/team/job?plain_http=yes"
        else:
            yield make_bucket(stack.enter_context(object_storage()), "checkpoints")


def pod(name: str, uid: str = "u", **owner: str) -> ContainerRef:
    names = {"name": "main", "pod_name": name, "pod_namespace": "team", "pod_uid": uid}
    return ContainerRef(id=f"{name}-{uid}", engine="containerd", **names, **owner)


def kept(container: ContainerRef) -> Kept:
    return Kept(container=container, bundle=Path("/"), program=Path("/"), prefix=(), domain="team")


class Node:
    """A node: its store, and what it has below /run."""

    def __init__(self, root: Path, location: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        root.mkdir()
        (root / "upper").mkdir()
        self.root, self._monkeypatch, self._numbers = root, monkeypatch, itertools.count()
        self.settings = Settings(store_dir=str(root / "store"), remote=location, workers=1, **more)
        (root / "store").mkdir()

    def here(self) -> None:
        """Do what follows on this node."""
        self._monkeypatch.setattr(wire, "RUNTIME_DIR", str(self.root / "run"))

    def stop(self, name: str = OLD, **owner: str) -> "Stopped":
        """Begin to stop a container."""
        self.here()
        container = pod(name, **owner)
        containers.keep(kept(container))
        write_stop(container.id, Stop(words=("kill", "15")))
        return Stopped(self, container)

    def checkpoint(self, container: ContainerRef) -> str:
        """Do what a dump of a container does, which the store has completed."""
        images = self.root / f"images-{next(self._numbers)}"
        return stop_in_store(Store.of(self.settings), images, self.root / "upper", container)[1].id

    def found(self) -> list[Found]:
        keyring = Keyring(KeySource.of(self.settings), "team")
        return find_announced(open_remote(self.settings.remote, "team"), keyring, "stop-*")

    def choose(
        self, patience: Patience, name: str = NEW, uid: str = "new", owner: Mapping[str, str] = NOBODY, **policy: Any
    ) -> str:
        """Return what a new container resumes from."""
        self.here()
        wanted = Policy(**{"restore_from": "latest", **policy})
        return choose(kept(pod(name, uid, **owner)), wanted, self.settings, patience).thin.checkpoint_id


class Stopped:
    """The steps of a stop, as the agent makes them."""

    def __init__(self, node: Node, container: ContainerRef) -> None:
        self.node, self.container, self.id = node, container, ""

    def announce(self) -> None:
        self.node.here()
        announce(kept(self.container), None, self.node.settings)

    def dump(self) -> None:
        self.node.here()
        self.id = self.node.checkpoint(self.container)
        Store.of(self.node.settings).open("team").pushes.note(self.id)
        note_end(self.container.id, self.node.settings, checkpoint=self.id)
        write_stop(self.container.id, Stop(words=("kill", "15"), outcome=CHECKPOINTED))

    def fail(self) -> None:
        self.node.here()
        note_end(self.container.id, self.node.settings, failed="the disk is full")
        write_stop(self.container.id, Stop(words=("kill", "15"), outcome=SIGNALLED))

    def tend(self) -> None:
        self.node.here()
        containers.forget(self.container.id) if self.id else None
        tend_announcements(self.node.settings)

    def push(self) -> None:
        self.node.here()
        domain = Store.of(self.node.settings).open("team")
        pushing.push(domain, self.id, self.node.settings.remote)
        domain.pushes.end(self.id)

    def reboot(self) -> None:
        """Lose what is below /run, then have an agent tend what is on record."""
        self.node.here()
        containers.forget(self.container.id)
        tend_announcements(self.node.settings)


class Stepping(Patience):
    """Does the next step each time the waiter would sleep; fails if it sleeps without any step to come."""

    def __init__(self, node: Node, steps: Sequence[Callable[[], object]]) -> None:
        super().__init__()
        self.node, self.steps = node, [*steps]
        self.shared = self.steps  # copies of a patience share it

    def sleep(self, seconds: float) -> None:
        del seconds
        assert self.shared, "it waits for nothing"
        self.shared.pop(0)()
        self.node.here()


@pytest.fixture
def nodes(tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    return Node(tmp_path / "one", directory, monkeypatch), Node(tmp_path / "two", directory, monkeypatch)


@pytest.mark.parametrize("before", range(1, 7))
def test_a_new_container_resumes_from_a_stop_however_far_that_has_come(nodes: tuple[Node, Node], before: int) -> None:
    """The new container is created after so many steps of the stop, and looks between each two of the others."""
    one, two = nodes
    older = one.checkpoint(pod(OLD, "first"))
    pushing.push(Store.of(one.settings).open("team"), older, one.settings.remote)
    old = one.stop()
    steps = [old.announce, old.tend, old.dump, old.tend, old.push, old.tend]
    for step in steps[:before]:
        step()
    assert two.choose(Stepping(two, steps[before:])) == old.id
    old.tend()
    assert (one.found(), has_announcements(one.settings)) == ([], False)
    assert not list((two.root / "run/waits").glob("*")), "a wait that is over is forgotten"


@pytest.mark.parametrize("before", range(1, 4))
@pytest.mark.parametrize("has_older", [True, False])
def test_a_stop_that_fails_says_so_and_the_policy_decides(
    nodes: tuple[Node, Node], before: int, *, has_older: bool
) -> None:
    one, two = nodes
    older = one.checkpoint(pod(OLD, "first"))
    if has_older:
        pushing.push(Store.of(one.settings).open("team"), older, one.settings.remote)
    old = one.stop()
    steps = [old.announce, old.fail, old.tend]
    for step in steps[:before]:
        step()
    if has_older:
        assert two.choose(Stepping(two, steps[before:])) == older
        return
    with pytest.raises(
        NoCheckpoint,
        match=rf"no checkpoint .*; the stop of container team/{OLD}/main on node .* has failed: the disk is full",
    ):
        two.choose(Stepping(two, steps[before:]))
    one.here()
    assert has_announcements(one.settings), "others may still come"


@pytest.mark.parametrize("kept_steps", range(1, 6))
def test_an_agent_that_is_killed_at_any_step_leaves_nothing_that_hangs(
    nodes: tuple[Node, Node], kept_steps: int
) -> None:
    """The node goes down after so many steps and comes back: what was dumped is pushed, what was not has failed."""
    one, two = nodes
    old = one.stop()
    for step in [old.announce, old.tend, old.dump, old.tend, old.push][:kept_steps]:
        step()
    after: list[Callable[[], object]] = [old.reboot]
    if 3 <= kept_steps < 5:
        after += [old.push, old.reboot]
    patience = Stepping(two, after)
    if kept_steps < 3:
        with pytest.raises(NoCheckpoint, match="its node went down, or its agent was killed"):
            two.choose(patience)
    else:
        assert two.choose(patience) == old.id


def test_a_lost_node_costs_the_wait_once(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announced, "EVERY_S", 0.01)
    one, two = nodes
    one.stop().announce()
    with pytest.raises(NoCheckpoint, match=r"on node .* was not renewed for 0.06 s"):
        two.choose(Patience())
    assert one.found() == []
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []), uid="another")


def test_clocks_of_nodes_do_not_matter(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    old = one.stop()
    old.announce()
    (file,) = Path(one.settings.remote).glob("domains/team/claims/stop-*")
    for offset_s in (-3600, 3600):
        os.utime(file, (file.stat().st_mtime + offset_s,) * 2)
        content = json.loads(file.read_bytes())
        file.write_text(json.dumps(content | {"since": "1970-01-01T00:00:00Z"}))
        with pytest.raises(GivenUp):
            two.choose(_GivesUp())
    assert two.choose(Stepping(two, [old.dump, old.push, old.tend])) == old.id


class _GivesUp(Patience):
    """Of an engine that gives up as soon as a container waits."""

    def sleep(self, seconds: float) -> None:
        raise GivenUp(f"the engine gave up and not in {seconds} s")


def test_a_wait_goes_on_in_the_next_call_of_the_engine(nodes: tuple[Node, Node]) -> None:
    """All calls for one pod have one bound; those for another one have their own."""
    one, two = nodes
    one.stop().announce()
    with pytest.raises(GivenUp):
        two.choose(_GivesUp())
    (record,) = (two.root / "run/waits").glob("*")
    watch = json.loads(record.read_bytes())
    assert len(watch["seen"]) == 1
    record.write_text(json.dumps(watch | {"began_s": watch["began_s"] - 299, "looked_s": watch["looked_s"]}))
    left: list[str] = []
    with pytest.raises(GivenUp):
        choose(kept(pod(NEW, "new")), Policy(restore_from="latest"), two.settings, _GivesUp(), say=left.append)
    assert re.match(rf"container team/{NEW}/main waits for its checkpoint, for [01] s at most: the stop of", left[0])
    record.write_text(json.dumps(watch | {"began_s": watch["began_s"] - 301}))
    with pytest.raises(NoCheckpoint, match="has not brought a checkpoint in 300 s or the time of its push"):
        two.choose(Stepping(two, []))
    assert not record.exists()
    with pytest.raises(GivenUp):
        two.choose(_GivesUp(), uid="another")
    record.write_text(json.dumps(watch | {"began_s": watch["began_s"] - 301}))
    for _ in range(2):
        with pytest.raises(NoCheckpoint, match="has not brought"):
            two.choose(Stepping(two, []), on_no_checkpoint="fail")
        assert record.exists(), "the next call does not wait as long again"


def test_no_wait_where_none_is_wanted(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    one.stop().announce()
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []), restore_wait_s=0)


def test_what_is_expected_to_take_longer_is_waited_for_longer() -> None:
    holder = claims.Holder(node="n", host="h", container=pod(OLD))
    large = Announced(holder=holder, size_bytes=100 << 30, bytes_per_s=100 << 20)
    assert waiting.limit_s(300, []) == 300
    assert waiting.limit_s(300, [replace(large, bytes_per_s=0)]) == 300
    assert waiting.limit_s(300, [large]) == pytest.approx(2048)
    assert waiting.limit_s(300, [replace(large, size_bytes=1 << 60)]) == waiting.LONGEST_S, "a forged size"
    assert waiting.limit_s(0, [large]) == 0


def test_what_is_not_renewed_is_dead_by_the_clock_of_who_waits() -> None:
    holder = claims.Holder(node="n", host="h", container=pod(OLD))
    watch, now_s = waiting.Watch(began_s=0), 0.0
    again = one = Found("stop", "a", Announced(holder=holder, every_s=10))
    for renewed in range(5):
        again = one._replace(announced=replace(one.announced, renewed=renewed))
        for _ in range(7):
            assert watch.look([again], now_s) == ([again], [])
            now_s += 10
        now_s += 1000  # the remote is away: no node can renew it, nor see that
    assert watch.look([again], now_s) == ([again], [])
    now_s += 0.1
    assert watch.look([again], now_s) == ([], [again])
    assert watch.look([], now_s) == ([], [])
    assert watch.look([again], now_s) == ([again], []), "it is written again: its node lives"


@pytest.mark.parametrize(
    "forged",
    [b"", b"{", b"[]", b"{}", b'{"holder": 1}', b"\xff\xfe", b"x" * 10000],
)
def test_what_is_malformed_counts_for_nothing(nodes: tuple[Node, Node], forged: bytes) -> None:
    one, two = nodes
    of = name_of("team", lineage(pod(OLD)), "")
    open_remote(one.settings.remote, "team").write_claim(of, "x", forged)
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []))


def test_a_stop_of_an_earlier_job_of_the_name_is_not_waited_for_nor_resumed_from(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    old = one.stop(owner_uid="uid-1")
    old.announce()
    for node in nodes:
        with pytest.raises(NoCheckpoint, match="there is no checkpoint team/train-0/main"):
            node.choose(Stepping(node, []), owner={"owner_uid": "uid-2"})
    old.dump()
    old.push()
    old.tend()
    for node in nodes:
        with pytest.raises(NoCheckpoint, match=f"{old.id} is of an earlier job of this name, uid uid-1; .* uid-2"):
            node.choose(Stepping(node, []), owner={"owner_uid": "uid-2"})
    told = [({"owner_uid": "uid-2"}, old.id), ({"owner_uid": "uid-2", "owner": "train"}, "latest")]
    same = [({"owner_uid": "uid-1"}, "latest"), ({}, "latest")]
    for owner, wanted in [*told, *same]:
        assert two.choose(Stepping(two, []), owner=owner, restore_from=wanted) == old.id


def test_a_checkpoint_that_does_not_name_its_owner_counts_as_before(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = nodes
    old = one.stop()
    old.dump()
    assert one.choose(Stepping(one, []), owner={"owner_uid": "uid-2"}) == old.id
    assert caplog.text.count(f"checkpoint {old.id} does not say which job made it") == 1


def test_a_stop_of_another_member_or_namespace_is_not_waited_for(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    old = one.stop("train-1-bcdfg")
    old.announce()
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []))
    (found,) = one.found()
    data = json.dumps(to_json(found.announced)).encode()
    remote = open_remote(one.settings.remote, "team")
    remote.write_claim(name_of("team", lineage(pod(OLD)), ""), "forged", data)
    other = replace(found.announced, holder=replace(found.announced.holder, container=pod(OLD)))
    data = json.dumps(to_json(other)).encode()
    remote.write_claim(name_of("other", lineage(pod(OLD)), ""), "copied", data)
    remote.write_claim(
        name_of("team", lineage(pod(OLD)), ""),
        "huge",
        json.dumps(to_json(replace(other, every_s=1e9))).encode(),
    )
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []))


def test_where_all_is_encrypted_an_announcement_is(
    tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    one, two = (Node(tmp_path / name, directory, monkeypatch, key_file=str(key)) for name in ("one", "two"))
    old = one.stop()
    old.announce()
    (file,) = Path(directory).glob("domains/team/claims/stop-*")
    assert OLD.encode() not in file.read_bytes()
    with pytest.raises(GivenUp):
        two.choose(_GivesUp())
    (found,) = one.found()
    plain = json.dumps(to_json(replace(found.announced, renewed=99))).encode()
    copied = file.read_bytes()
    remote = open_remote(directory, "team")
    for path in file.parent.iterdir():
        path.unlink()
    remote.write_claim(found.of, "plain", plain)
    remote.write_claim(found.of, "copied", copied)  # under another name
    with pytest.raises(NoCheckpoint):
        two.choose(Stepping(two, []))


def test_the_remote_is_away(nodes: tuple[Node, Node], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = nodes
    old = one.stop()
    away = tmp_path / "away"
    Path(one.settings.remote).rename(away)
    old.announce()
    assert "is not announced" in caplog.text
    with pytest.raises(RemoteError):
        two.choose(Stepping(two, []))
    away.rename(one.settings.remote)
    one.here()
    for path in (Path(one.settings.store_dir) / "stops").glob("*.tended"):
        path.unlink()
    assert has_due_announcements(one.settings)
    old.tend()
    assert two.choose(Stepping(two, [old.dump, old.push, old.tend])) == old.id

    def lose() -> None:
        Path(one.settings.remote).rename(away)

    def find() -> None:
        away.rename(one.settings.remote)

    second = one.stop()
    second.announce()
    assert two.choose(Stepping(two, [lose, find, second.dump, second.push, second.tend])) == second.id
    third = one.stop()
    third.announce()
    with pytest.raises(GivenUp):
        two.choose(_GivesUp(), uid="late")
    (record,) = (two.root / "run/waits").glob("*")
    watch = json.loads(record.read_bytes())

    def end() -> None:
        record.write_text(json.dumps(watch | {"began_s": watch["began_s"] - 400}))
        lose()

    with pytest.raises(GivenUp):
        two.choose(_GivesUp(), uid="late")
    end()
    with pytest.raises(RemoteError):
        two.choose(Stepping(two, []), uid="late")


def test_every_kind_of_remote(tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Node(tmp_path / name, location, monkeypatch) for name in ("one", "two"))
    old = one.stop()
    old.announce()
    assert [each.announced.holder.container.pod_name for each in one.found()] == [OLD]
    assert two.choose(Stepping(two, [old.dump, old.tend, old.push])) == old.id
    old.tend()
    assert one.found() == []
    failing = one.stop()
    failing.announce()
    with contextlib.suppress(NoCheckpoint):
        two.choose(Stepping(two, [failing.fail, failing.tend]))
    assert [each.announced.failed for each in one.found()] == ["the disk is full"]


def test_a_stop_announces_once_and_an_agent_that_follows_goes_on(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    old = one.stop()
    old.announce()
    old.announce()
    (found,) = one.found()
    old.fail()
    again = one.stop()
    again.announce()
    assert len(one.found()) == 2, "another stop of the same container is another one"
    assert found.token in {each.token for each in one.found()}


def test_an_agent_that_follows_one_killed_at_its_end_announces_no_second_stop(nodes: tuple[Node, Node]) -> None:
    """The first one has noted how the dump has ended at the announcement, and not yet at the stop."""
    one, _ = nodes
    old = one.stop()
    token = announce(kept(old.container), None, one.settings)
    note_end(old.container.id, one.settings, failed="the disk is full")
    assert announce(kept(old.container), None, one.settings, token) == token
    (found,) = one.found()
    assert (found.token, found.announced.failed) == (token, ""), "it is tried again"
    old.dump()
    assert announce(kept(old.container), None, one.settings, token) == token
    (found,) = one.found()
    assert found.announced.checkpoint == old.id


def test_a_failure_is_forgotten_after_a_while(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = nodes
    old = one.stop()
    old.announce()
    old.fail()
    old.tend()
    monkeypatch.setattr(announced, "_FAILED_FOR_S", -1.0)
    for path in (Path(one.settings.store_dir) / "stops").glob("*.tended"):
        path.unlink()
    old.tend()
    assert (one.found(), has_announcements(one.settings)) == ([], False)


def test_a_job_is_suspended_and_resumed_five_times(nodes: tuple[Node, Node]) -> None:
    """Each new container is created while its predecessor is stopped on the other node, and goes on from its state."""
    here, there = nodes
    last = ""
    for _ in range(5):
        old = here.stop()
        old.announce()
        with pytest.raises(GivenUp):
            there.choose(_GivesUp(), uid="killed while it waits")
        assert there.choose(Stepping(there, [old.dump, old.push, old.tend])) == old.id != last
        old.tend()
        last, here, there = old.id, there, here
    assert (here.found(), there.found()) == ([], [])


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_the_last_state_counts_whatever_the_clocks_of_two_nodes_say(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The container goes on in turn on nodes whose clocks are an hour apart."""
    one, two = nodes
    now, newest = time.gmtime, ""
    for turn, node in enumerate([one, two, one, two]):
        other = two if node is one else one
        with monkeypatch.context() as clock:
            there_s = time.time() + (ahead_s if node is two else 0)
            clock.setattr(time, "gmtime", lambda *given, there_s=there_s: now(*given or (there_s,)))
            newest = node.checkpoint(pod(OLD, f"pod {turn}"))
            pushing.push(Store.of(node.settings).open("team"), newest, node.settings.remote)
        assert other.choose(Stepping(other, []), uid=f"pod {turn + 1}") == newest


def test_stops_of_all_members_of_a_gang_are_waited_for(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    gang = GangRef("team", "job", "train-0", 2)
    container = pod("train-1-bcdfg")
    one.here()
    containers.keep(kept(container))
    write_stop(container.id, Stop(words=("kill", "15"), init=Process.find(os.getpid())))
    announce(kept(container), gang, one.settings)
    (found,) = one.found()
    assert found.announced.size_bytes > 1 << 20, "it says how much memory its container has"
    two.here()
    with pytest.raises(GivenUp):
        choose(kept(pod(NEW)), Policy(restore_from="latest"), two.settings, _GivesUp(), gang)
    other = gang._replace(name="other")
    with pytest.raises(NoCheckpoint):
        choose(kept(pod(NEW)), Policy(restore_from="latest", gang_timeout_s=0.1), two.settings, Stepping(two, []), None)
    assert name_of("team", "*", other.name) != name_of("team", "*", gang.name)
