"""What goes wrong while connections are held or move: the other end sees a pause, and nothing is left behind."""

import pytest

from integration.net.conftest import MakeNode
from integration.net.pair import Pair


def back_at_the_same_address(pair: Pair) -> None:
    """Make the server's node anew, which cannot be reached until the container is restored."""
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
    """Under runc CRIU leaves its own, too."""
    pair = Pair(make_node(runtime), tcp="established")
    pair.node.checkpoint("server", pair.archives["server"])
    back_at_the_same_address(pair)
    pair.node.act_at("post-restore", "exit 1")
    pair.node.restore(pair.archives["server"], check=False)
    assert not pair.node.is_running("server")
    pair.assert_nothing_is_left()
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
