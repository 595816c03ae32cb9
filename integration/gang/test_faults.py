"""Agents that are killed, members that are slow, foreign or of another epoch, two gangs at once: all or none."""

import os
import re
import shlex
import signal
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from integration.gang.mesh import Members, Mesh, failures, succeeded
from integration.gang.nodes import attempt, epochs, limit_members, link_nodes, serve_nodes
from integration.namespace import CommandError, wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman
from integration.net.traffic import assert_flows
from integration.podman.test_faults import end_agent, start_agent
from ocihook.gang.cut import End, connection_ends, contradictions
from tests.fakes.authority import Authority

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
MEETING_AGENT = Path(__file__).parents[1] / "meeting_agent.py"
_SLOW_S = 20.0  # that a member takes longer than until all others wait for it
_REFUSED_S = 2  # that members wait for one that cannot come

Death = tuple[str, str]  # the phase, and whether an agent dies before its member reaches it, or behind the meeting
_TIMES = ("before", "behind")
_DUMP = [(phase, when) for phase in ("arrived", "drained", "held", "dumped") for when in _TIMES]
_RESTORE = [(phase, when) for phase in ("addresses", "restored", "released") for when in _TIMES]
_DECIDED = (("dumped", "behind"), ("released", "behind"))
# With one node it is the agent that coordinates; with two the coordinator is a service of its own.
_DEATHS: dict[int, tuple[list[Death], list[Death]]] = {
    1: ([("held", "behind"), ("dumped", "before"), ("dumped", "behind")], [("restored", "before"), _DECIDED[1]]),
    2: ([("arrived", "behind"), ("drained", "before")], [("addresses", "behind"), ("released", "before")]),
}


def two_nodes(make_node: MakeNode) -> list[NetPodman]:
    nodes = [make_node(), make_node("crun")]
    serve_nodes(nodes, link_nodes(nodes)[0])
    return nodes


def kills_agent(node: NetPodman, death: Death, act: Callable[[], dict[str, str | Exception]]) -> bool:
    """Do something in which the node's agent is killed; all must fail or none. Return whether none has."""
    killed = node.namespace.path("/run/ocihook/killed")
    killed.unlink(missing_ok=True)
    start_agent(node, MEETING_AGENT, "kill", *death)
    results = act()
    failed = failures(results)
    assert killed.exists(), failed
    assert len(failed) in (0, len(results)), failed
    assert not (failed and death in _DECIDED), failed
    return not failed


@pytest.mark.parametrize("count", [1, 2])
def test_an_agent_is_killed_at_any_meeting(make_node: MakeNode, count: int) -> None:
    nodes = two_nodes(make_node) if count == 2 else [make_node()]
    if count == 1:
        limit_members(nodes[0])
    mesh, node = Mesh(nodes, 2), nodes[-1]
    before = mesh.state()
    of_dump, of_restore = (_DUMP, _RESTORE) if IS_NIGHTLY else _DEATHS[count]
    for death in of_dump:
        kills_agent(node, death, lambda: mesh.checkpoint("--leave-running"))
        mesh.assert_flows()
        mesh.assert_nothing_is_left()
        assert mesh.state() == before
    for net, death in enumerate(of_restore, 1):
        succeeded(mesh.checkpoint())
        mesh.move(net)
        if not kills_agent(node, death, mesh.restore):
            mesh.assert_nothing_is_left()
            assert not any(engine.is_running(name) for name, engine in mesh.engines.items())
            mesh.remove()
            succeeded(mesh.restore())
        mesh.assert_flows()
        mesh.assert_nothing_is_left()


def test_a_slow_member_and_another_gang(make_node: MakeNode) -> None:
    """All wait for the one that is slow; another gang on the same nodes does not."""
    node = make_node()
    limit_members(node)
    slow, quick = Mesh([node], 2, gang="slow"), Mesh([node], 2, gang="quick", first_host=3)
    with ThreadPoolExecutor() as pool:
        for dump in [pool.submit(mesh.checkpoint) for mesh in (slow, quick)]:
            succeeded(dump.result())
        slow.move(1)
        quick.move(1)
        start_agent(node, MEETING_AGENT, "hold", "restored", "slow1")
        restore = pool.submit(slow.restore)
        wait_for("the other to wait", lambda: attempt(node, "slow")["members"].get("slow0") == "restored")
        succeeded(quick.restore())
        quick.assert_flows()
        time.sleep(_SLOW_S)  # waits: longer than a timer of TCP, and than the hold lasts unless it is renewed
        assert attempt(node, "slow")["members"]["slow1"] == "addresses"
        node.namespace.path("/run/ocihook/go").touch()
        succeeded(restore.result())
    for mesh in (slow, quick):
        mesh.assert_flows()
        mesh.assert_nothing_is_left()


def test_a_foreign_node_and_a_stale_epoch(make_node: MakeNode) -> None:
    nodes = [make_node(), make_node("crun")]
    url = serve_nodes(nodes, link_nodes(nodes)[0]).url
    mesh = Mesh(nodes, 2)
    before = mesh.state()
    foreign = Authority("10.78.0.1").give(nodes[1].scratch / "foreign", "node1")
    limit_members(nodes[0], _REFUSED_S, coordinator=url, tls=nodes[0].scratch / "tls")
    limit_members(nodes[1], coordinator=url, tls=foreign)
    failed = failures(mesh.checkpoint("--leave-running"))
    assert "1 that never joined did not reach 'arrived'" in failed["job0"]
    assert "certificate verify failed" in failed["job1"]
    mesh.assert_flows()
    mesh.assert_nothing_is_left()
    assert mesh.state() == before

    limit_members(nodes[0], coordinator=url, tls=nodes[0].scratch / "tls")
    limit_members(nodes[1], coordinator=url, tls=nodes[1].scratch / "tls")
    succeeded(mesh.checkpoint("--leave-running"))
    stale, newest = nodes[0].scratch / "stale.tar", mesh.archives["job0"]
    newest.rename(stale)
    mesh.assert_received()
    succeeded(mesh.checkpoint())
    wrong, _ = contradictions({"job0": ends_in(stale), "job1": ends_in(mesh.archives["job1"])})
    assert wrong  # what the check of a cut is for: these two were not dumped at one moment
    mesh.move(1)
    mesh.archives["job0"] = stale
    failed = failures(mesh.restore())
    assert all("is restored from epoch" in said for said in failed.values()), failed
    assert len(failed) == len(nodes)
    mesh.assert_nothing_is_left()
    mesh.remove()
    mesh.archives["job0"] = newest
    succeeded(mesh.restore())
    mesh.assert_flows()
    mesh.assert_nothing_is_left()


def ends_in(archive: Path) -> list[End]:
    """Return the ends of connections that an archive has."""
    with tempfile.TemporaryDirectory() as images:
        with tarfile.open(archive) as tar:
            for member in tar:
                if re.fullmatch(r"checkpoint/(files|tcp-stream-\w+)\.img", member.name):
                    member.name = Path(member.name).name
                    tar.extract(member, images, filter="data")
        return list(connection_ends(Path(images)))


def test_an_epoch_with_a_member_that_is_not_packed_is_not_complete(make_node: MakeNode) -> None:
    """It is packed when all are dumped, and run on. Nothing takes the others' checkpoints for one of the gang."""
    node = make_node()
    limit_members(node)
    mesh = Mesh([node], 2, notes={"on_pack_error": "fail"})
    packed, spoilt = mesh.names
    podman = ("--podman", shlex.join(["podman", *node.options()]))
    start_agent(node, MEETING_AGENT, "spoil", "dumped", spoilt)
    failed = failures(mesh.checkpoint("--leave-running"))
    assert list(failed) == [spoilt]
    assert "o space left" in failed[spoilt]
    assert epochs(node) == ([], {"1": [spoilt]})
    with pytest.raises(CommandError, match=f"lacks 1 members beside {packed}"):
        node.ocihook("gang", "verify", str(mesh.archives[packed]))
    there = node.scratch / "epochs"
    with pytest.raises(CommandError, match=f"gang job is not checkpointed: {spoilt}: .*o space left"):
        node.ocihook("gang", "checkpoint", "job", str(there / "2"), "--leave-running", *podman)
    assert list(there.iterdir()) == []
    assert epochs(node) == ([], {"1": [spoilt], "2": [spoilt]})
    assert f"job: epoch 2 is not complete: {spoilt}" in node.ocihook("gang", "status")
    mesh.assert_flows()
    end_agent(node)
    node.ocihook("gang", "checkpoint", "job", str(there / "3"), "--leave-running", *podman)
    assert epochs(node) == ([3], {"1": [spoilt], "2": [spoilt]})
    mesh.assert_flows()
    mesh.assert_nothing_is_left()


def test_a_connection_that_is_not_accepted_yet(make_node: MakeNode) -> None:
    """It would be lost, so there is no dump; one that has been lost already keeps nobody from a dump."""
    node = make_node()
    limit_members(node)
    gang = Members([node], 2, "job")
    server, client = gang.names
    address = f"{gang.places[server].four}/7000"
    node.start_peer(server, server, "server", address, **gang.notes)
    node("kill", "--signal", "STOP", server)  # the kernel makes its connections
    node.start_peer(client, client, "client", address, **gang.notes)
    before = gang.state()
    failed = failures(gang.checkpoint("--leave-running"))
    wanted = f"{server} has not accepted the connection from {client} yet ({gang.places[client].four} port "
    assert all(wanted in said and "try again" in said for said in failed.values()), failed
    assert len(failed) == len(gang.names)
    assert attempt(node)["state"] == "over"
    gang.assert_nothing_is_left()
    assert gang.state() == before
    node("kill", "--signal", "CONT", server)
    assert_flows({name: partial(node.said, name) for name in gang.names}, connections=1)
    succeeded(gang.checkpoint("--leave-running"))
    assert "1 connections" in gang.verify()

    node.unplug(client)  # it does not hear that the other has ended, and is made again
    node.remove(server)
    node.remove_place(server)
    node.make_place(server, gang.places[server])
    node.start_peer(server, server, "server", address, **gang.notes)
    succeeded(gang.checkpoint("--leave-running"))
    assert "0 connections" in gang.verify()
    assert "ESTAB" in node.inside(client, "ss", "-tn", "dst", gang.places[server].four)


@pytest.mark.parametrize("phase", ["arrived", "drained", "held", "dumped"] if IS_NIGHTLY else ["drained", "dumped"])
def test_a_member_is_killed(make_node: MakeNode, phase: str) -> None:
    """As for want of memory: it is gone, the other runs on as it did, and hears of it; what is dumped is complete."""
    node = make_node()
    limit_members(node)
    mesh = Mesh([node], 2)
    other, victim = mesh.names
    before, init = mesh.state()[other], int(node("inspect", "--format", "{{.State.Pid}}", victim))
    start_agent(node, MEETING_AGENT, "hold", phase, victim)
    with ThreadPoolExecutor() as pool:
        dump = pool.submit(mesh.checkpoint, "--leave-running")
        wait_for(f"the other to wait for {victim}", lambda: attempt(node)["members"].get(other) == phase)
        wait_for(f"{victim} to have only that left to do", node.namespace.path("/run/ocihook/held").exists)
        os.kill(init, signal.SIGKILL)
        node.namespace.path("/run/ocihook/go").touch()
        failed = failures(dump.result())
    wait_for(f"{victim} to be over", lambda: not node.is_running(victim))
    is_dumped = phase == "dumped"
    assert failed.keys() == (set() if is_dumped else {*mesh.names}), failed
    assert is_dumped or f"is over for all members: {victim}: " in failed[other]
    mesh.assert_nothing_is_left()
    assert mesh.state_of(other) == before
    assert epochs(node) == ([1] if is_dumped else [], {})
