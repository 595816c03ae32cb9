"""Two containers of one job, on two nodes, under traffic: dumped at one moment, and restored at other addresses."""

from integration.net.conftest import MakeNode
from integration.net.pair import NAMES, Pair


def test_both_members_move_to_new_addresses(make_node: MakeNode) -> None:
    node = make_node()
    pair = Pair(node, gang="job", gang_size="2")
    pair.checkpoint()
    assert "CRIU" not in str(node.tables("client"))
    pair.remove()
    pair.remove_places()
    pair.make_places(1)
    pair.restore()
    pair.assert_flows()
    for name in NAMES:
        assert node.tables(name) == []
