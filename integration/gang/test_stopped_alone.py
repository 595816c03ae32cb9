"""A member that is evicted alone: those on other nodes are checkpointed with it, and run on; all continue from that."""

import json

from integration.gang.handled import HandledNetPodman
from integration.gang.mesh import Mesh, succeeded
from integration.gang.nodes import epochs, link_nodes, serve_nodes
from integration.namespace import wait_for
from integration.net.conftest import MakeNode

_NOTES = {
    "checkpoint_on_stop": "true",
    "on_member_stop": "checkpoint",
    "restore_from": "latest",
    "on_restore_error": "fail",
}


def test_members_of_other_nodes_are_checkpointed_with_one_that_is_stopped(make_node: MakeNode) -> None:
    nodes = [make_node(kind=HandledNetPodman), make_node(kind=HandledNetPodman)]
    serve_nodes(nodes, link_nodes(nodes)[0])
    mesh = Mesh(nodes, 2, notes=_NOTES)
    stopped, other = mesh.names
    before = mesh.engines[other]("inspect", "--format", "{{.State.Pid}}", other)
    mesh.engines[stopped]("stop", "--time", "600", stopped)
    assert "was checkpointed as it was stopped" in nodes[0].agent_log(), nodes[0].agent_log()
    wait_for("both to be stored, and reported", lambda: len(epochs(nodes[0])[0]) == 1)
    (epoch,), incomplete = epochs(nodes[0])
    assert incomplete == {}
    rows = [row for node in nodes for row in json.loads(node.ocihook("store", "list", "--json"))["checkpoints"]]
    assert [row["gang"].split("/")[:2] for row in rows] == 2 * [["job", str(epoch)]]
    after = mesh.engines[other]("inspect", "--format", "{{.State.Pid}} {{.State.Status}}", other)
    assert after == f"{before.strip()} running\n", after
    places = mesh.engines[other].namespace.path("/var/lib/ocihook/store/stopping")
    wait_for("the other's dump to be over", lambda: not list(places.iterdir()))
    mesh.move(1)
    succeeded(mesh.run())
    mesh.assert_flows()
    mesh.assert_nothing_is_left()
