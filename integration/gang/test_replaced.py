"""Controllers make members anew while the old ones are dumped, crash or are stopped alone: no dump loses to that."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.gang.handled import HandledNetPodman
from integration.gang.mesh import Mesh
from integration.gang.nodes import attempt, epochs, limit_members, link_nodes, serve_nodes
from integration.gang.test_faults import MEETING_AGENT
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman, Place
from integration.podman.engine import IMAGE
from integration.podman.test_faults import start_agent
from integration.slow_remote import SlowRemote

_NOTES = {"checkpoint_on_stop": "true", "restore_from": "latest", "on_restore_error": "fail", "gang_gather_s": "60"}


class Replaced(Mesh):
    """Members that are known by their numbers, whatever their containers are called."""

    def notes_of(self, number: int) -> dict[str, str]:
        """Return the annotations of one member."""
        return self.notes | {"gang_index": str(number), "member": self.names[number]}

    def make(self, number: int, generation: int) -> str:
        """Make a container of a member beside its earlier one, with a network and an address of its own."""
        name = f"{self.names[number]}-{generation}"
        engine, old = self.engines[self.names[number]], self.names[number]
        engine.make_place(name, Place.of(generation, number + 1))
        options = [f"--volume={self._said[old].parent}:/said"]
        return engine(*engine.peer_command(name, name, *self._words[old], options=options, **self.notes_of(number)))

    def stop(self, number: int, generation: int = 0) -> str:
        """Stop a member's container."""
        name = self.names[number] + (f"-{generation}" if generation else "")
        return self.engines[self.names[number]]("stop", "--time", "600", name)


class Swapped(Replaced):
    """Members that each move to the other one's node."""

    def place_of_files(self, engine: NetPodman) -> Path:
        """Return that of the last engine: it is within that of the first, so both see it."""
        del engine
        return list(self.engines.values())[-1].scratch

    def swap(self) -> None:
        """Have each member's next container made on the other one's node."""
        self.engines = dict(zip(self.names, reversed(self.engines.values()), strict=True))


def _members(node: NetPodman) -> dict[str, str]:
    found: dict[str, str] = attempt(node)["members"]
    return found


def _finish(*acts: "Future[str]") -> None:
    for act in acts:
        act.result()


def test_a_member_that_is_made_during_a_dump_continues_from_it(make_node: MakeNode) -> None:
    node = make_node(kind=HandledNetPodman)
    limit_members(node)
    mesh = Replaced([node], 2, notes=_NOTES)
    start_agent(node, MEETING_AGENT, "hold", "dumped", "1")
    with ThreadPoolExecutor() as pool:
        stops = [pool.submit(mesh.stop, number) for number in range(2)]
        wait_for("the dump", lambda: _members(node) == {"0": "dumped", "1": "held"})
        first = pool.submit(mesh.make, 0, 1)
        wait_for("the new one to wait", lambda: "a dump, is under way" in node.agent_log())
        node.namespace.path("/run/ocihook/go").touch()
        _finish(*stops, first, pool.submit(mesh.make, 1, 1))
        mesh.assert_flows()
        wait_for("all to be stored, and reported", lambda: len(epochs(node)[0]) == 1)

        first = pool.submit(mesh.make, 0, 2)  # before the others are stopped
        wait_for("it to ask", lambda: (attempt(node)["act"], _members(node)) == ("choose", {"0": "chosen"}))
        _finish(*[pool.submit(mesh.stop, number, 1) for number in range(2)])
        _finish(first, pool.submit(mesh.make, 1, 2))
    mesh.assert_flows()
    wait_for("all to be stored, and reported", lambda: len(epochs(node)[0]) == 2)


def _use(remote: SlowRemote, *nodes: NetPodman) -> None:
    """Have nodes push all that they store."""
    for node in nodes:
        text = node.namespace.path("/etc/ocihook/config.toml").read_text()
        place = f'[agent]\nremote = "{remote.directory}"\n'
        node.configure(text.replace("[agent]\n", place) + 'mode = "store"\npush = "always"\n')


def _push(node: NetPodman) -> None:
    node.ocihook("wait")
    node.ocihook("store", "push")


@pytest.mark.parametrize("killed", ["", "between stop and creation", "while all wait"])
def test_members_that_swap_nodes_wait_for_a_slow_remote(make_node: MakeNode, killed: str) -> None:
    """They go on from one epoch, whenever their coordinator is killed and started again."""
    nodes = [make_node(kind=HandledNetPodman), make_node(kind=HandledNetPodman)]
    coordinator = serve_nodes(nodes, link_nodes(nodes)[0])
    remote = SlowRemote(nodes[1].scratch / "remote", "_node")  # within that of the first
    _use(remote, *nodes)
    saved = str(nodes[1].scratch / "saved.tar")  # the same image, for the gate
    nodes[0]("save", "--output", saved, IMAGE)
    nodes[1]("load", "--input", saved)
    mesh = Swapped(nodes, 2, notes=_NOTES)
    with ThreadPoolExecutor() as pool:
        _finish(*[pool.submit(mesh.stop, number) for number in range(2)])
        if killed.startswith("between"):
            coordinator.restart()
        mesh.swap()
        made = [pool.submit(mesh.make, number, 1) for number in range(2)]
        wait_for("both to wait", lambda: all("waits for its checkpoint" in node.agent_log() for node in nodes))
        if killed.startswith("while"):
            coordinator.restart()
        assert not any(act.done() for act in made)
        remote.let_go()
        for node in nodes:
            _push(node)
        _finish(*made)
    mesh.assert_flows()
    wait_for("no stop to be announced", lambda: remote.announced() == [])
    complete, incomplete = epochs(nodes[0])
    assert (len(complete), incomplete) == (1, {})


@pytest.mark.parametrize("order", ["while the other is stopped", "before the other is stopped"])
def test_who_has_crashed_is_not_waited_for(make_node: MakeNode, order: str) -> None:
    nodes = [make_node(kind=HandledNetPodman), make_node("crun", kind=HandledNetPodman)]
    serve_nodes(nodes, link_nodes(nodes)[0])
    mesh = Replaced(nodes, 2, notes=_NOTES)
    init = int(nodes[1]("inspect", "--format", "{{.State.Pid}}", "job1"))
    with ThreadPoolExecutor() as pool:
        if order.startswith("while"):
            stop = pool.submit(mesh.stop, 0)
            wait_for("the other to wait", lambda: _members(nodes[0]) == {"0": "arrived"})
            os.kill(init, signal.SIGKILL)
        else:
            os.kill(init, signal.SIGKILL)
            wait_for("its end", lambda: not nodes[1].is_running("job1"))
            stop = pool.submit(mesh.stop, 0)
        _finish(stop)
    reason = attempt(nodes[0])["reason"]
    assert "1" in reason, reason
    assert "has ended without a checkpoint: " in reason, reason
    assert "is killed: its stop signal has no effect on it" in nodes[0].agent_log()
    assert epochs(nodes[0])[0] == []
    assert not nodes[0].is_running("job0")


@pytest.mark.parametrize("policy", ["last", "alone"])
def test_who_is_stopped_alone_is_waited_for_by_nobody(make_node: MakeNode, policy: str) -> None:
    node = make_node(kind=HandledNetPodman)
    limit_members(node)
    mesh = Replaced([node], 2, notes=_NOTES | {"on_member_stop": policy, "gang_gather_s": "3", "tcp": "close"})
    before = mesh.state_of("job1")
    mesh.stop(0)
    assert "1 (never joined) did not reach 'arrived' within 3 s (gang_gather_s)" in node.agent_log()
    is_dumped = "was checkpointed as it was stopped" in node.agent_log()
    assert is_dumped == (policy == "alone")
    assert mesh.state_of("job1") == before
    assert epochs(node)[0] == []
