"""What goes wrong while connections are held or move: the other end sees a pause, and nothing is left behind."""

import struct
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.net.pair import Pair
from integration.podman.test_faults import end_dying_agent, kill_at_any_step, start_dying_agent
from ocihook.criu.socket_images import Ends
from tests.fakes.sockets import entry, framed, make_socket

SOCKET = make_socket(1 << 20, "10.77.0.2", "10.77.0.1")  # its number is no other's
# The agent with its sessions, the runtime and CRIU; and with them what would become the next agent.
KILL = "a=$(cat /run/ocihook/agent.lock); kill -9 -$a {} $(awk '/^PPid/ {{print $2}}' /proc/$PPID/status) $PPID"
KILL_ALL = KILL.format("$(cat /proc/$a/task/$a/children)")


def back_at_the_same_address(pair: Pair) -> None:
    """Recreate the server's node, which cannot be reached until the container is restored."""
    node = pair.node
    node.remove("server")
    node.remove_place("server")
    node.make_place("server", pair.places["server"], is_plugged=False)


def restore_server(pair: Pair) -> None:
    pair.node.restore(pair.archives["server"])
    pair.node.plug("server")
    pair.assert_flows()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_restore_that_fails_leaves_no_lock_and_then_succeeds(make_node: MakeNode, runtime: str) -> None:
    """Under runc CRIU leaves its own, too. Nor does the kernel answer meanwhile that there is no such connection."""
    pair = Pair(make_node(runtime), tcp="established")
    pair.node.checkpoint("server", pair.archives["server"])
    back_at_the_same_address(pair)
    pair.node.act_at("post-restore", "exit 1")
    pair.node.restore(pair.archives["server"], check=False)
    assert not pair.node.is_running("server")
    pair.assert_nothing_is_left()
    assert "@awaited" in pair.node.inside("server", "nft", "list", "ruleset")
    pair.node.remove("server")
    pair.node.act_no_more()
    restore_server(pair)
    pair.assert_nothing_is_left()


def test_criu_killed_in_post_dump(make_node: MakeNode) -> None:
    """Its sockets are in repair mode, and the container is frozen until they are not."""
    pair = Pair(make_node())
    pair.node.act_at("post-dump", "kill -9 $PPID")
    pair.node.checkpoint("server", pair.archives["server"], "--leave-running", check=False)
    pair.assert_flows()
    pair.assert_nothing_is_left()
    pair.node.act_no_more()
    pair.node.checkpoint("server", pair.archives["server"], "--leave-running")
    pair.assert_flows()


def test_the_runtime_is_killed_while_traffic_is_held(make_node: MakeNode) -> None:
    pair = Pair(make_node())
    pair.node.act_at("pre-dump", "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)")
    pair.node.checkpoint("server", pair.archives["server"], "--leave-running", check=False)
    pair.assert_flows()
    pair.assert_nothing_is_left()


def test_another_agent_ends_what_all_others_have_left(make_node: MakeNode) -> None:
    """No further stage calls one: the container would stay frozen, its connections in repair."""
    pair = Pair(make_node())
    node = pair.node
    node.act_at("post-dump", KILL.format(""))
    node.checkpoint("server", pair.archives["server"], "--leave-running", check=False)
    sessions = node.namespace.path("/run/ocihook/sessions")
    wait_for("the session to be ended", lambda: not list(sessions.glob("*.json")))
    pair.assert_flows()
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("stage", ["pre-dump", "post-dump"])
def test_all_are_killed_while_traffic_is_held(make_node: MakeNode, stage: str) -> None:
    """Traffic continues by itself, except for a container that is frozen: its connections are in repair.

    CRIU's own lock goes, too, without any agent: others in that network are no longer cut off.
    """
    pair = Pair(make_node())
    node = pair.node
    source = node.namespace.path("/opt/ocihook/ocihook/net/hold.py")
    usual = source.read_text()
    assert "\nHOLD_LIMIT_S = 30 " in usual
    source.write_text(usual.replace("\nHOLD_LIMIT_S = 30 ", "\nHOLD_LIMIT_S = 3 "))
    node.act_at(stage, KILL_ALL)
    node.checkpoint("server", pair.archives["server"], "--leave-running", check=False)
    assert list(node.namespace.path("/run/ocihook/sessions").glob("*.json"))  # nobody is left to end it
    assert node.holds("server")

    def passes() -> bool:
        return "elements = " not in node.inside("server", "nft", "list", "ruleset")

    wait_for("the hold to end by itself", passes)
    wait_for("CRIU's lock to go", lambda: not any("CRIU" in line for line in node.holds("server")))
    if stage == "pre-dump":
        pair.assert_flows()
    node.act_no_more()
    node.ocihook("recover", check=False)
    pair.assert_nothing_is_left()
    pair.assert_flows()


def test_agent_killed_at_any_step_of_a_dump_that_leaves_it_running(make_node: MakeNode) -> None:
    pair = Pair(make_node())

    def dump(last: int, _: int) -> tuple[list[str], list[str]]:
        start_dying_agent(pair.node, last)
        pair.node.checkpoint("server", pair.archives["server"], "--leave-running")
        steps = end_dying_agent(pair.node)
        pair.assert_flows()
        pair.assert_nothing_is_left()
        return steps, []

    kill_at_any_step(dump, rounds=6)


def test_agent_killed_at_any_step_while_a_container_moves(make_node: MakeNode) -> None:
    """From its dump to its restore, where the peer still looks for it."""
    pair = Pair(make_node(), tcp="established")

    def round_trip(last_of_dump: int, last_of_restore: int) -> tuple[list[str], list[str]]:
        start_dying_agent(pair.node, last_of_dump)
        pair.node.checkpoint("server", pair.archives["server"])
        dump = end_dying_agent(pair.node)
        back_at_the_same_address(pair)
        start_dying_agent(pair.node, last_of_restore)
        pair.node.restore(pair.archives["server"])
        pair.node.plug("server")
        restore = end_dying_agent(pair.node)
        pair.assert_flows()
        pair.assert_nothing_is_left()
        return dump, restore

    kill_at_any_step(round_trip, rounds=6)


def test_edited_files_image_refuses_the_restore(make_node: MakeNode) -> None:
    """What CRIU itself cannot read it refuses before it asks anybody. The whole one is restored then."""
    pair = Pair(make_node(), tcp="established", mode="off")
    node, whole, edited = pair.node, pair.archives["server"], pair.node.scratch / "edited.tar"
    node.checkpoint("server", whole)
    back_at_the_same_address(pair)

    def assert_refused(data: bytes) -> None:
        add_to_files_image(whole, edited, data)
        assert "rror" in node.restore(edited, check=False)
        assert not node.is_running("server")
        pair.assert_nothing_is_left()
        node.remove("server")

    for unreadable in (struct.pack("<I", 0xFFFFFFFF), framed(b"\xff" * 8), entry(SOCKET) * 2):
        assert_refused(unreadable)
    for said, data in {
        "no socket has such a port": entry(SOCKET._replace(local_port=1 << 16)),
        "is of other length": entry(SOCKET._replace(ends=Ends(SOCKET.ends.local * 1000, SOCKET.ends.remote))),
    }.items():
        assert_refused(data)
        message = last_session(node.namespace, "pre-restore")["stages"]["pre-restore"]["message"]
        assert said in message
        assert message.endswith("The restore is refused, nothing was started")
    restore_server(pair)


def add_to_files_image(archive: Path, edited: Path, data: bytes) -> None:
    """Rewrite an archive with this appended to CRIU's list of files."""
    with tarfile.open(archive) as old, tarfile.open(edited, "w") as new:
        for member in old:
            content = old.extractfile(member).read() if member.isreg() else b""  # type: ignore[union-attr]
            content += data if member.name.endswith("checkpoint/files.img") else b""
            member.size = len(content)
            new.addfile(member, BytesIO(content))
