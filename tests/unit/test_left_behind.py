"""Checkpoints of a container that its own pod has created again: no new pod resumes from them."""

import itertools
from pathlib import Path

import pytest

from ocihook import wire
from ocihook.checkpoints import pushing
from ocihook.checkpoints.prune import Keep, prune
from ocihook.config import Policy, Settings
from ocihook.errors import NoCheckpoint, StoreError
from ocihook.linux.patience import ENDLESS
from ocihook.model import ContainerRef
from ocihook.remote.location import open_remote
from ocihook.runtime import left_behind
from ocihook.runtime.choice import choose
from ocihook.runtime.containers import Kept
from ocihook.runtime.left_behind import has_due_left, has_left, leave_behind, tend_left
from ocihook.runtime.stop_record import checkpoint_signals
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from tests.unit.test_stored_belongings import stop as stop_in_store


def pod(uid: str, number: int = 0, name: str = "db-0") -> ContainerRef:
    names = {"engine": "containerd", "name": "main", "pod_name": name, "pod_namespace": "team"}
    return ContainerRef(id=f"{uid}-{number}", pod_uid=uid, **names)


class Node:
    def __init__(self, root: Path, remote: Path) -> None:
        (root / "upper").mkdir(parents=True)
        (root / "store").mkdir()
        self.root, self._numbers = root, itertools.count()
        self.settings = Settings(store_dir=str(root / "store"), remote=str(remote), workers=1)

    @property
    def domain(self) -> Domain:
        return Store.of(self.settings).open("team", create=True)

    def stop(self, container: ContainerRef, *, is_pushed: bool = True) -> str:
        images = self.root / f"images-{next(self._numbers)}"
        found: str = stop_in_store(Store.of(self.settings), images, self.root / "upper", container)[1].id
        self.domain.pushes.note(found)
        if is_pushed:
            assert pushing.push_due(self.settings) == []
        return found

    def choose(self, container: ContainerRef, *, is_restored: bool = False) -> tuple[str, bool]:
        kept = Kept(container=container, bundle=Path("/"), program=Path("/"), prefix=(), domain="team")
        policy = Policy(restore_from="latest", restore_on_restart=is_restored)
        found = choose(kept, policy, self.settings, ENDLESS)
        return found.thin.checkpoint_id, found.is_restart

    def restart(self, container: ContainerRef) -> list[str]:
        kept = Kept(container=container, bundle=Path("/"), program=Path("/"), prefix=(), domain="team")
        return leave_behind(kept, self.settings)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "remote").mkdir()
    return Node(tmp_path / "one", tmp_path / "remote"), Node(tmp_path / "two", tmp_path / "remote")


@pytest.mark.parametrize("is_pushed", [True, False])
def test_a_new_pod_does_not_resume_what_its_liveness_probe_has_killed(
    nodes: tuple[Node, Node], *, is_pushed: bool
) -> None:
    one, two = nodes
    good = one.stop(pod("first"))
    hung = one.stop(pod("second"), is_pushed=is_pushed)
    assert one.choose(pod("second", 1)) == (hung, True), "the very pod is known again"
    assert one.restart(pod("second", 1)) == [hung]
    assert one.restart(pod("second", 1)) == []
    assert has_due_left(one.settings)
    tend_left(one.settings)
    assert not has_left(one.settings)
    assert pushing.push_due(one.settings, at_once=True) == []
    for node in nodes:
        assert node.choose(pod("third")) == (good, False), "as on a node that was lost, so that there is no later stop"
    assert one.choose(pod("second", 2)) == (hung, True), "it does not resume from the state of another pod"
    with pytest.raises(StoreError, match="created again in its own pod"):
        pushing.push(one.domain, hung, one.settings.remote)
    later = one.stop(pod("second", 2))
    assert two.choose(pod("third")) == (later, False), "its next stop counts"


def test_a_push_that_was_begun_before_leaves_nothing_at_the_remote(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    hung = one.stop(pod("first"), is_pushed=False)
    real = pushing._send

    def send(*arguments: object) -> object:
        one.restart(pod("first", 1))
        tend_left(one.settings)  # before it is committed
        return real(*arguments)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(pushing, "_send", send)
    pushing.push_due(one.settings)
    assert hung not in open_remote(one.settings.remote, "team").checkpoint_ids()
    with pytest.raises(NoCheckpoint):
        two.choose(pod("second"))


def test_a_remote_that_is_away_is_tried_again(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nodes
    one.stop(pod("first"))
    one.restart(pod("first", 1))
    remote = Path(one.settings.remote)
    remote.rename(remote.with_name("away"))
    tend_left(one.settings)
    assert has_left(one.settings)
    assert not has_due_left(one.settings)
    remote.with_name("away").rename(remote)
    monkeypatch.setattr(left_behind, "_AGAIN_S", 0.0)
    tend_left(one.settings)
    assert not has_left(one.settings)
    with pytest.raises(NoCheckpoint):
        two.choose(pod("second"))


def test_it_keeps_no_other_checkpoint_from_retention(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    good = one.stop(pod("first"))
    hung = one.stop(pod("second"))
    one.restart(pod("second", 1))
    prune(Store.of(one.settings), Keep(last=1))
    assert one.domain.checkpoint_ids() == sorted([good, hung])
    later = one.stop(pod("second", 1))
    prune(Store.of(one.settings), Keep(last=1))
    assert one.domain.checkpoint_ids() == [later]
    assert one.domain.marks.left() == set()


def test_a_stop_that_no_pod_would_resume_from_is_no_checkpoint() -> None:
    policy = Policy(checkpoint_on_stop=True)
    replica = pod("a", name="web-5d78c9869d-bcdfg")
    assert checkpoint_signals({}, policy, pod("a")) == ("15", "TERM")
    assert checkpoint_signals({}, policy, replica) == ()
    named = ContainerRef(**{**replica.to_json(), "member": "web"})
    assert checkpoint_signals({}, policy, named) == ("15", "TERM")
    assert checkpoint_signals({}, Policy(checkpoint_on_stop=True, mode="off"), pod("a")) == ()
