"""Connections under traffic: not a byte is lost, doubled, changed or moved when their containers are."""

import json
import os

import pytest

from integration.journals import sessions
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.net.pair import NAMES, Pair

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_both_ends_at_new_addresses(make_node: MakeNode, runtime: str) -> None:
    pair = Pair(make_node(runtime))
    rounds = 100 if IS_NIGHTLY else 2
    for number in range(1, rounds + 1):
        old = dict(pair.places)
        pair.checkpoint()
        pair.assert_whole()
        pair.remove()
        pair.remove_places()
        pair.make_places(number, is_plugged=False)
        pairs = [f"{a}={b}" for name in NAMES for a, b in zip(old[name], pair.places[name], strict=True)]
        if number == 1:  # as for a node without ocihook; then nothing but their addresses tells which are members
            pair.move_archives(pairs)
            pair.node.configure_policy(tcp="established")
        else:
            pair.node.configure_policy(address_map=",".join(pairs))
        pair.restore()
        pair.assert_flows()
        pair.assert_nothing_is_left()


def test_left_running(make_node: MakeNode) -> None:
    """Each is dumped while it talks to the other, which sees a pause and no end."""
    pair = Pair(make_node())
    for _ in range(20 if IS_NIGHTLY else 3):
        pair.checkpoint("--leave-running")
        pair.assert_flows()
    phases = {phase["name"].split(" (")[0] for session in sessions(pair.node.namespace) for phase in session["phases"]}
    assert {"network held", "connections stalled"} <= phases
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_the_old_address_comes_back_early(make_node: MakeNode, runtime: str) -> None:
    """With its MAC address, while the peer sends: whoever makes the network holds it until ocihook does."""
    pair = Pair(make_node(runtime), tcp="established")
    node = pair.node
    mac = json.loads(node.inside("server", "ip", "-json", "link", "show", "eth0"))[0]["address"]
    node.checkpoint("server", pair.archives["server"])
    node.remove("server")
    node.remove_place("server")
    node.make_place("server", pair.places["server"], mac=mac, is_held=True)
    wait_for("the peer to send again", lambda: node.kept_out("server") > 0)
    node.act_at("pre-restore", node.lets_in("server"))
    node.restore(pair.archives["server"])
    pair.assert_flows()
    pair.assert_nothing_is_left()


def test_what_is_no_connection_passes_a_hold(make_node: MakeNode) -> None:
    """Datagrams, and what tells an address that another host has from one that is free."""
    pair = Pair(make_node())
    node = pair.node
    node.inside("client", "ip", "addr", "add", "fd77::99/64", "dev", "eth0", "nodad")
    datagram = f'socket.socket(2, 2).sendto(b"x", ("{pair.places["client"].four}", 9))'
    steps = [
        *(f"ip addr add fd77::{host}/64 dev eth0" for host in (98, 99)),
        "while ip -6 addr show dev eth0 tentative -dadfailed | grep -q inet6; do sleep 0.1; done",
        f"python3 -c 'import socket; {datagram}'",
    ]
    script = node.scratch / "held"
    script.write_text("\n".join(["set -e", "nft list ruleset | grep '@held drop'", *steps, ""]))
    node.act_at("pre-dump", f"nsenter --net=/run/netns/server sh {script}")
    node.checkpoint("server", pair.archives["server"], "--leave-running")
    shown = json.loads(node.inside("server", "ip", "-json", "-6", "addr", "show", "dev", "eth0"))
    found = {one["local"]: one.get("dadfailed", False) for one in shown[0]["addr_info"]}
    assert (found["fd77::98"], found["fd77::99"]) == (False, True)
    pair.assert_flows()
    pair.assert_nothing_is_left()
