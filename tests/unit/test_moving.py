"""Addresses and sockets in a restore: maps with gaps and conflicts, connections that move or end."""

from ipaddress import ip_address

import pytest

from ocihook.criu.socket_images import InetSocket
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.net.addresses import AddressMap, Interfaces, map_addresses, parse_pairs
from ocihook.net.kick import Sender, unreachable
from ocihook.net.moving import Plan, make_plan
from ocihook.net.policy import IPAddress, parse
from tests.fakes.sockets import make_socket

OWN, NEW, PEER, STRANGER = (ip_address(text) for text in ("10.0.0.1", "10.9.0.1", "10.0.0.2", "192.0.2.7"))


def interfaces(**named: str) -> Interfaces:
    return {name: [ip_address(text) for text in texts.split()] for name, texts in named.items()}


def test_addresses_are_paired_by_interface_and_order() -> None:
    old = interfaces(eth0="10.0.0.1 10.0.0.5 fd00::1", net1="172.16.0.1")
    new = interfaces(net1="172.16.0.9", eth0="fd09::1 10.9.0.1 10.9.0.5")
    found = map_addresses(old, new)
    assert {str(a): str(b) for a, b in found.pairs.items()} == {
        "10.0.0.1": "10.9.0.1",
        "10.0.0.5": "10.9.0.5",
        "fd00::1": "fd09::1",
        "172.16.0.1": "172.16.0.9",
    }
    assert not found.gaps
    assert found[STRANGER] == STRANGER


def test_one_that_is_there_again_stays_whatever_comes_or_goes() -> None:
    found = map_addresses(interfaces(eth0="10.0.0.1 10.0.0.5"), interfaces(eth0="10.0.0.7 10.0.0.5"))
    assert found[ip_address("10.0.0.5")] == ip_address("10.0.0.5")
    assert found[OWN] == ip_address("10.0.0.7")


@pytest.mark.parametrize(
    ("here", "why"),
    [
        ({"eth1": "10.9.0.1"}, "there is no interface eth0"),
        ({"eth0": ""}, "eth0 had 10.0.0.1, and has none"),
        ({"eth0": "10.9.0.1 10.9.0.2"}, "eth0 had 10.0.0.1, and has 10.9.0.1, 10.9.0.2"),
        ({"eth0": "fd00::1"}, "eth0 had 10.0.0.1, and has none"),
    ],
)
def test_a_gap_refuses_only_what_needs_the_address(here: dict[str, str], why: str) -> None:
    found = map_addresses(interfaces(eth0="10.0.0.1"), interfaces(**here))
    with pytest.raises(UnsupportedError, match=r"1 sockets need .*\(TCP 10\.0\.0\.1:5001 LISTEN\).*" + why):
        make_plan([make_socket(1, "10.0.0.1")], parse("auto", ""), found, own={OWN})
    anywhere = [
        make_socket(1, "0.0.0.0"),
        make_socket(2, "127.0.0.1", "127.0.0.1"),
        make_socket(3, "10.0.0.1", "192.0.2.7"),
    ]
    plan = make_plan(anywhere, parse("auto", ""), found, own={OWN})
    assert [move.sock.id for move in plan.moves] == [move.sock.id for move in plan.closed] == [3]


def test_conflicts_are_refused_by_name() -> None:
    twice = map_addresses(interfaces(eth0="10.0.0.1", net1="10.0.0.1"), interfaces(eth0="10.9.0.1", net1="10.8.0.1"))
    assert OWN in twice.gaps
    with pytest.raises(UnsupportedError, match=r"10\.0\.0\.1 and 10\.0\.0\.5 cannot both become 10\.9\.0\.1"):
        map_addresses(interfaces(eth0="10.0.0.1", net1="10.0.0.5"), interfaces(eth0="10.9.0.1", net1="10.9.0.1"))
    found = AddressMap({OWN: NEW})
    with pytest.raises(UnsupportedError, match=r"10\.0\.0\.1 is to become 10\.8\.0\.1, but"):
        found.with_peers({OWN: ip_address("10.8.0.1")})
    with pytest.raises(UnsupportedError, match="cannot both become"):
        found.with_peers({PEER: NEW})
    filled = AddressMap({}, {OWN: "none"}).with_peers({OWN: NEW})
    assert (filled[OWN], filled.gaps) == (NEW, {})


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1",
        "10.0.0.1=",
        "=",
        "a=b",
        "10.0.0.1=10.0.0.2=10.0.0.3",
        "10.0.0.1=fd00::1",
        "127.0.0.1=10.0.0.1",
        "10.0.0.1=::",
    ],
)
def test_pairs_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        parse_pairs([text], "here")


def test_pairs() -> None:
    assert parse_pairs(["10.0.0.1=10.9.0.1", "::ffff:10.0.0.2=10.9.0.2"], "here") == {
        OWN: NEW,
        PEER: ip_address("10.9.0.2"),
    }
    with pytest.raises(ConfigError, match="cannot become both"):
        parse_pairs(["10.0.0.1=10.9.0.1", "10.0.0.1=10.9.0.2"], "here")


def plan(*sockets: InetSocket, policy: str = "auto", new: IPAddress = NEW, peer: str = "") -> Plan:
    addresses = AddressMap({OWN: new}).with_peers({PEER: ip_address(peer)} if peer else {})
    return make_plan(sockets, parse(policy, ""), addresses, own={OWN}, gang={PEER} if peer else ())


def ends(found: Plan) -> list[str]:
    return [f"{m.sock._replace(ends=m.ends)}".removesuffix(" ESTABLISHED") for m in found.moves]


def test_the_gang_moves_and_strangers_end() -> None:
    friend, mapped = make_socket(1, "10.0.0.1", "10.0.0.2"), make_socket(2, "10.0.0.1", "10.0.0.2", mapped=True)
    stranger, six = make_socket(3, "10.0.0.1", "192.0.2.7"), make_socket(4, "fd00::1", "fd00::2")
    found = plan(friend, mapped, stranger, six, peer="10.9.0.2")
    assert ends(found) == [
        "TCP 10.9.0.1:5001 -> 10.9.0.2:80",
        "TCP 10.9.0.1:5002 -> 10.9.0.2:80",
        "TCP 127.0.0.1:5003 -> 127.0.0.2:80",
        "TCP [::1]:5004 -> [::1]:80",
    ]
    assert [m.sock.id for m in found.kept] == [1, 2]
    assert [len(m.ends.local) for m in found.moves] == [4, 16, 4, 16]


def test_kept_by_policy_where_the_address_stays() -> None:
    stranger = make_socket(3, "10.0.0.1", "192.0.2.7")
    assert ends(plan(stranger, policy="established", new=OWN)) == []
    assert [m.sock.id for m in plan(stranger, policy="established").closed] == [3]
    assert [m.sock.id for m in plan(stranger, policy="auto", new=OWN).closed] == [3]


def test_connections_that_end_are_never_each_others_far_end() -> None:
    """Many connections of a server have its port, and all of a client may have the port of a service."""
    alike = [make_socket(n, "10.0.0.1", "192.0.2.7", local_port=80, remote_port=80) for n in range(1, 4)]
    six = [make_socket(n, "fd00::1", "fd00::2", local_port=80, remote_port=90) for n in range(5, 8)]
    mirror = make_socket(9, "127.0.0.2", "127.0.0.1", local_port=80, remote_port=80)
    found = plan(*alike, *six, mirror)
    tuples = [(m.ends.local, m.sock.local_port, m.ends.remote, m.sock.remote_port) for m in found.closed]
    assert len(set(tuples)) == len(tuples) == 6
    assert "TCP 127.0.0.1:80 -> 127.0.0.2:80" not in ends(found)
    assert all(sock.remote.is_loopback for sock in (m.sock._replace(ends=m.ends) for m in found.closed))
    only_six = [sock._replace(is_six_only=True) for sock in six]
    with pytest.raises(UnsupportedError, match=r"cannot be closed: connections of the same ports"):
        plan(*only_six)


def test_what_ends_by_sock_destroy_only() -> None:
    half, bound = (
        make_socket(1, "10.0.0.1", "192.0.2.7", state=5),
        make_socket(2, "10.0.0.1", "192.0.2.7", device="eth0"),
    )
    found = plan(half, bound, make_socket(3, "10.0.0.1", "192.0.2.7"))
    assert [m.sock.id for m in found.to_destroy] == [1, 2]


def test_an_icmp_message_that_wakes_is_about_the_oldest_byte() -> None:
    message = unreachable(Sender(OWN, 5001, PEER, 80, 0x01020304))
    assert message[:2] == bytes([3, 1])
    assert message[8:9] == b"\x45"
    assert message[20:28] == OWN.packed + PEER.packed
    assert message[28:] == bytes.fromhex("1389 0050 01020304")
    total = sum(int.from_bytes(message[at : at + 2], "big") for at in range(0, len(message), 2))
    assert total % 0xFFFF == 0  # RFC 1071
    six = unreachable(Sender(ip_address("fd00::1"), 5001, ip_address("fd00::2"), 80, 7))
    assert six[0] == 1
    assert six[-8:] == bytes.fromhex("1389 0050 00000007")
