"""Locks that CRIU has left are reported by what they block, in real networks, and the remedies remove them."""

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from integration.namespace import Namespace
from ocihook.node.doctor import left_locks, machine
from ocihook.preflight.finding import Finding, Status

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("nft"), reason="needs root and nft")

# criu/net.c, nftables_lock_network_internal, and criu/netfilter.c, nftables_init_connection_lock
CLOSED = """
table inet CRIU-closed {
 chain output { type filter hook output priority 0; policy drop; meta mark 0x0000c114 accept; }
 chain input { type filter hook input priority 0; policy drop; meta mark 0x0000c114 accept; }
}"""
BY_CONNECTION = """
table inet CRIU-NAME {
 set conns4 { type ipv4_addr . inet_service . ipv4_addr . inet_service; ELEMENTS }
 set conns6 { type ipv6_addr . inet_service . ipv6_addr . inet_service; }
 chain output {
  type filter hook output priority 0; policy accept; meta mark 0x0000c114 accept;
  ip saddr . tcp sport . ip daddr . tcp dport @conns4 drop
  ip6 saddr . tcp sport . ip6 daddr . tcp dport @conns6 drop
 }
}"""
EMPTY = BY_CONNECTION.replace("ELEMENTS", "")
HELD = BY_CONNECTION.replace(
    "ELEMENTS", "elements = { 10.0.0.1 . 80 . 10.0.0.2 . 4000, 10.0.0.2 . 4000 . 10.0.0.1 . 80 };"
).replace("NAME", "held")
CHAIN = """*filter
:CRIU - [0:0]
-I INPUT -j CRIU
-I OUTPUT -j CRIU
-A CRIU -m mark --mark 0xc114 -j ACCEPT
-A CRIU -j DROP
COMMIT
"""

_TALK = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
with socket.create_connection(listener.getsockname(), timeout=1):
    print("passes")
"""


class Network:
    """A network of its own, and the command that enters it."""

    def __init__(self) -> None:
        self.namespace = Namespace("ip link set lo up", own_network=True)
        self.inside = ("nsenter", "-t", str(self.namespace.pid), "-n")

    def nft(self, text: str) -> None:
        self.namespace.run("nft", text)

    def findings(self) -> list[Finding]:
        return list(machine.about_locks(left_locks.left_locks(*self.inside), Status.FAIL, *self.inside))

    def passes(self) -> bool:
        return self.namespace.run(sys.executable, "-c", _TALK, check=False) == "passes\n"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(left_locks, "command_line", lambda _: [])  # other tests run CRIU at this moment
    made = Network()
    yield made
    made.namespace.close()


def test_tables_that_block_nothing_are_not_reported_as_locks(network: Network) -> None:
    for number in range(3):
        network.nft(EMPTY.replace("NAME", str(number)))
    assert network.passes()
    assert network.findings() == []
    assert [lock.is_empty for lock in left_locks.left_locks(*network.inside)] == [True] * 3
    network.nft(HELD)
    assert left_locks.remove_empty(*network.inside) == [f"removed table inet CRIU-{number}" for number in range(3)]
    (held,) = left_locks.left_locks(*network.inside)
    assert (held.name, held.entries) == ("table inet CRIU-held", 2)


def test_a_table_with_connections_names_how_many_and_how_to_remove_it(network: Network) -> None:
    network.nft(HELD)
    (finding,) = network.findings()
    assert (finding.check, finding.status) == ("connections-blocked", Status.WARN)
    assert "2 entries" in finding.detail
    assert_remedy_helps(network, finding.remedy.rpartition(": ")[2])


@pytest.mark.parametrize("kind", ["table", "chain"])
def test_a_network_that_is_locked(network: Network, kind: str) -> None:
    if kind == "table":
        network.nft(CLOSED)
    elif shutil.which("iptables-restore"):
        network.namespace.run("sh", "-c", f"iptables-restore --noflush <<'END'\n{CHAIN}END")
    else:
        pytest.skip("needs iptables")
    assert not network.passes()
    (finding,) = network.findings()
    assert (finding.check, finding.status) == ("network-lock-left", Status.FAIL)
    assert "no packet passes" in finding.detail
    assert_remedy_helps(network, finding.remedy)
    assert network.passes()


def assert_remedy_helps(network: Network, commands: str) -> None:
    for command in commands.split("; "):
        assert command.startswith(" ".join(network.inside))
        network.namespace.run(*command.removeprefix(" ".join(network.inside)).split())
    assert network.findings() == []
