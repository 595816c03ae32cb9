"""Two nodes with a slow remote: a pod that is created again on the other node waits for what its predecessor leaves."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd
from integration.slow_remote import MANIFESTS, PACKS, SlowRemote

_AGAIN: dict[str, Any] = {"checkpoint_on_stop": "true", "restore_from": "latest", "member": "job"}
_SETTINGS = """[agent]
idle_timeout_s = 2
remote = "{}"
[policy]
mode = "store"
push = "always"
"""
_IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
# The stage at which CRIU waits when the agents are killed; or what the remote does not take of the checkpoint then.
_KILLED = (("pre-dump", ""), ("post-dump", ""), ("post-dump", PACKS), ("post-dump", MANIFESTS))
_ORDERS = (("created", "ended", "pushed"), ("ended", "created", "pushed"), ("ended", "pushed", "created"))


@pytest.fixture
def nodes(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[list[HandledContainerd]]:
    """Two nodes; the directory of the second is seen by the first."""
    (scratch / "other").mkdir()
    with contextlib.ExitStack() as stack:
        made = []
        for place, remote in ((scratch, "/scratch/other/remote"), (scratch / "other", "/scratch/remote")):
            node = HandledContainerd(place, forky_root, wheels, workload)
            stack.callback(node.close)
            node.install()
            node.configure(_SETTINGS.format(remote))
            node.stall()
            made.append(node)
        made[1].pull_from(made[0].registry.address)  # the same image is the same name
        made[1].image = made[0].image
        yield made


def handler_log(node: HandledContainerd) -> str:
    path = node.namespace.path("/run/ocihook/handler.log")
    return path.read_text() if path.exists() else ""


class Move:
    """A pod that is stopped on one node and created again on another."""

    def __init__(
        self,
        one: HandledContainerd,
        two: HandledContainerd,
        remote: SlowRemote,
        container: str,
        stage: str = "post-dump",
    ) -> None:
        """Begin the stop, whose CRIU waits at a stage."""
        self.one, self.two, self.remote, self.container = one, two, remote, container
        self._told = len(handler_log(two))
        self.started: list[str] = []
        one.stall_at(stage)
        stop = {"container_id": container, "timeout": 60}
        self._stopping = threading.Thread(target=one.call, args=("StopContainer",), kwargs=stop)
        self._stopping.start()
        one.wait_for_stall()

    def created(self, name: str, *, is_to_wait: bool) -> None:
        """Create the pod again."""
        self._creating = threading.Thread(target=self._create, args=(name,))
        self._creating.start()
        if is_to_wait:
            wait_for("it to wait", lambda: "waits for its checkpoint" in handler_log(self.two)[self._told :])

    def _create(self, name: str) -> None:
        self.started.append(self.two.start(name, mib=4, container_name="main", **_AGAIN))

    def ended(self) -> None:
        """Let the stop end."""
        self.one.go_on()
        self._stopping.join()

    def pushed(self) -> None:
        """Let the checkpoint be pushed."""
        assert self.started == [], "it does not start from scratch"
        self.remote.let_go()
        self.one.ocihook("wait")
        self.one.ocihook("store", "push")

    def end(self) -> str:
        """Check that the pod goes on; return its container."""
        self._creating.join()
        (again,) = self.started
        wait_for("it to count", lambda: len(self.two.counts(again)) > 2)
        last = self.one.counts(self.container)[-1]
        assert self.two.counts(again)[0] == last + 1, handler_log(self.two)
        wait_for("the announcement to be withdrawn", lambda: self.remote.announced() == [])
        self.one.remove(self.container)
        self.remote.hold()
        return again


def test_every_order_of_end_creation_and_push(nodes: list[HandledContainerd], scratch: Path) -> None:
    one, two = nodes
    remote = SlowRemote(scratch / "other/remote")
    container = one.start("job-0", mib=4, container_name="main", **_AGAIN)
    counting = container
    wait_for("it to count", lambda: len(nodes[0].counts(counting)) > 2)
    for number, order in enumerate(_ORDERS, 1):
        move = Move(one, two, remote, container)
        assert remote.announced(), "it is announced before its dump"
        for event in order:
            if event == "created":
                move.created(f"job-{number}", is_to_wait=order[-1] != "created")
            elif event == "ended":
                move.ended()
            else:
                move.pushed()
        container = move.end()
        one, two = two, one


def pushed(remote: SlowRemote, node: HandledContainerd, held: str) -> None:
    """Wait until a checkpoint is pushed as far as the remote takes it."""
    remote.hold(held)
    before = remote.packs()
    node.go_on()
    wait_for("it to be stored", lambda: remote.phases() == ["pushed"])
    if held == MANIFESTS:
        wait_for("it to be half pushed", lambda: remote.packs() > before)


def test_agents_killed_at_each_step(nodes: list[HandledContainerd], scratch: Path) -> None:
    """Those of both nodes: the new container waits until another agent has pushed, and goes on from that."""
    one, two = nodes
    remote = SlowRemote(scratch / "other/remote")
    container = one.start("job-0", mib=4, container_name="main", **_AGAIN)
    for number, (stage, held) in enumerate(_KILLED):
        remote.let_go()
        move = Move(one, two, remote, container, stage)
        assert remote.phases() == ["dumped"]
        if held:
            pushed(remote, one, held)
        else:
            remote.hold()
        assert one.kill_agent()
        move.created(f"job-{number + 1}", is_to_wait=True)
        two.kill_agent()
        move.ended()  # before its end, the engine's call has another agent go on
        one.start_agent()
        move.pushed()
        container = move.end()
        one, two = two, one


def lose(node: HandledContainerd, remote: SlowRemote, *members: str) -> None:
    """Lose a node while it stops a container of each member."""
    node.stall_at("pre-dump")
    for member in members:
        threading.Thread(target=_stop_in_vain, args=(node, member)).start()
    wait_for("all to be announced", lambda: remote.phases() == ["dumped"] * len(members))
    node.wait_for_stall()
    node.lose()


def _stop_in_vain(node: HandledContainerd, container: str) -> None:
    with pytest.raises(grpc.RpcError):
        node.call("StopContainer", container_id=container, timeout=60)


def test_a_lost_node(nodes: list[HandledContainerd], scratch: Path) -> None:
    """Its stops cost one wait, then the policy decides; once its claims are released, its containers go on at once."""
    one, two = nodes
    remote = SlowRemote(scratch / "other/remote")
    remote.let_go()
    last = one.stop(one.start("job-0", mib=4, container_name="main", **_AGAIN))
    one.ocihook("wait")
    one.ocihook("store", "push")
    wait_for("the announcement to be withdrawn", lambda: remote.announced() == [])
    job = two.start("job-1", mib=4, container_name="main", **_AGAIN)
    assert two.counts(job)[0] == last + 1
    new: dict[str, Any] = {**_AGAIN, "member": "new"}
    lose(two, remote, job, two.start("new-0", mib=4, container_name="main", **new))
    assert len(remote.claims()) == 1

    short: dict[str, Any] = {"restore_wait_s": "1"}
    with pytest.raises(grpc.RpcError, match="has not brought a checkpoint"):
        one.start("new-1", mib=4, container_name="main", on_no_checkpoint="fail", **new, **short)
    again = one.start("new-2", mib=4, container_name="main", **new, **({} if _IS_NIGHTLY else short))
    assert one.counts(again)[0] == 1
    assert len(remote.announced()) == 2 - _IS_NIGHTLY, "what has expired is removed"

    told, started = len(handler_log(one)), list[str]()
    creating = threading.Thread(
        target=lambda: started.append(one.start("job-2", mib=4, container_name="main", **_AGAIN))
    )
    creating.start()
    wait_for("it to wait", lambda: "waits for its checkpoint" in handler_log(one)[told:])
    one.ocihook("store", "release", "--node", two.namespace.path("/var/lib/ocihook/store/claims/node").read_text())
    creating.join()
    assert one.counts(started[0])[0] == last + 1, handler_log(one)
    assert remote.announced() == []
    two.come_back()
    two.start_agent()
    wait_for("it to say that both have failed", lambda: remote.phases() == ["failed", "failed"])
    assert len(remote.claims()) == 1, "of the container that goes on"
