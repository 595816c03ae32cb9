"""Connections over paths that lose packets and translate addresses, and many at a time."""

from functools import partial

from integration.journals import sessions
from integration.net.conftest import MakeNode
from integration.net.engine import BRIDGE, NetPodman, Place
from integration.net.pair import NAMES, Pair
from integration.net.traffic import assert_flows

OUTSIDE = Place.of(8, 1)
INSIDE, GATEWAY = "10.78.0.2", "10.78.0.1"
MANY = 500
FILES = "--ulimit=nofile=8192:8192"
SLOWLY = ("-r", "0.02")
_LOSES = """table bridge loss {
    chain forward { type filter hook forward priority 0; meta l4proto tcp numgen random mod 100 < 4 counter drop; }
}"""
_TRANSLATES = """table ip translated {
    chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
    chain in { type nat hook prerouting priority -100; iifname "eth0" tcp dport 7000 dnat to %s; }
}"""


def test_a_path_that_loses_packets(make_node: MakeNode) -> None:
    """Whatever was acknowledged selectively, or came out of order, is sent again after a restore."""
    pair = Pair(make_node())
    node = pair.node
    node.run("ip", "netns", "exec", BRIDGE, "nft", _LOSES)
    pair.assert_flows()
    pair.checkpoint("--leave-running")
    pair.assert_flows()
    old = dict(pair.places)
    pair.checkpoint()
    pair.assert_whole()
    pair.remove()
    pair.remove_places()
    pair.make_places(1, is_plugged=False)
    moves = [f"{a}={b}" for name in NAMES for a, b in zip(old[name], pair.places[name], strict=True)]
    node.configure_policy(address_map=",".join(moves))
    pair.restore()
    pair.assert_flows()
    pair.assert_nothing_is_left()
    assert "counter packets 0 " not in node.run("ip", "netns", "exec", BRIDGE, "nft", "list", "ruleset")


def make_inside(node: NetPodman, *, is_plugged: bool = True) -> None:
    """Make a network behind the node `router`, which translates its addresses; it is reached once `inner` is up."""
    ip = ["ip", "-n", "inside"]
    for command in (
        ["ip", "netns", "add", "inside"],
        [*ip, "link", "set", "lo", "up"],
        [*ip, "link", "add", "eth0", "type", "veth", "peer", "name", "inner", "netns", "router"],
        [*ip, "addr", "add", f"{INSIDE}/24", "dev", "eth0"],
        [*ip, "link", "set", "eth0", "up"],
        ["ip", "-n", "router", "addr", "add", f"{GATEWAY}/24", "dev", "inner"],
        ["ip", "-n", "router", "link", "set", "inner", "up" if is_plugged else "down"],
        [*ip, "route", "add", "default", "via", GATEWAY],
    ):
        node.run(*command)


def test_a_path_that_translates_addresses(make_node: MakeNode) -> None:
    """Connections in both directions through a router whose conntrack knows them, while the network is made anew."""
    node = make_node()
    router = node.make_place("router", Place.of(7, 1))
    node.make_place("outside", OUTSIDE)
    node.inside("router", "nft", _TRANSLATES % INSIDE)
    node.inside("router", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    make_inside(node)
    outside = node.spawn_peer("outside", "member", f"{OUTSIDE.four}/7000")
    node.start_peer("job", "inside", "member", f"{INSIDE}/7000", f"{OUTSIDE.four}/7000", tcp="established")
    caller = node.spawn_peer("outside", "client", "-k", "2", f"{router.four}/7000")
    peers = {"outside": outside.read_text, "caller": caller.read_text}

    def flows() -> None:
        assert_flows(peers, connections=1)
        assert_flows({"job": partial(node.said, "job")}, connections=2)

    flows()
    archive = node.scratch / "job.tar"
    node.checkpoint("job", archive, "--leave-running")
    flows()
    node.checkpoint("job", archive)
    node.remove("job")
    node.run("ip", "-n", "router", "link", "delete", "inner")
    node.run("ip", "netns", "delete", "inside")
    make_inside(node, is_plugged=False)
    node.restore(archive)
    node.run("ip", "-n", "router", "link", "set", "inner", "up")
    flows()
    assert all(session["effects"] == [] for session in sessions(node.namespace))


def test_many_on_loopback(make_node: MakeNode) -> None:
    """Both ends are in the container, each with data on its way."""
    node = make_node()
    node.make_place("job", Place.of(1, 1))
    node.start_peer(
        "job",
        "job",
        "member",
        *SLOWLY,
        "127.0.0.1/7000",
        *["127.0.0.1/7000"] * MANY,
        options=[FILES],
        tcp="established",
    )
    flows = partial(assert_flows, {"job": partial(node.said, "job")}, connections=MANY, enough_bytes=500)
    flows()
    archive = node.scratch / "job.tar"
    node.checkpoint("job", archive, "--leave-running")
    flows()
    node.checkpoint("job", archive)
    node.remove("job")
    node.restore(archive)
    flows()
    assert node.holds("job") == []


def test_many_between_nodes(make_node: MakeNode) -> None:
    node = make_node()
    places = {name: node.make_place(name, Place.of(0, host)) for host, name in enumerate(NAMES, 1)}
    target = f"{places['server'].four}/7000"
    node.start_peer("server", "server", "server", *SLOWLY, target, options=[FILES], tcp="established")
    node.start_peer("client", "client", "client", *SLOWLY, *[target] * MANY, options=[FILES])
    peers = {name: partial(node.said, name) for name in NAMES}
    flows = partial(assert_flows, peers, connections=MANY, enough_bytes=500)
    flows()
    archive = node.scratch / "server.tar"
    node.checkpoint("server", archive, "--leave-running")
    flows()
    node.unplug("server")
    node.checkpoint("server", archive)
    node.remove("server")
    node.restore(archive)
    node.plug("server")
    flows()
    assert node.holds("server") == []
