"""What becomes of each socket of a container, by its policy: decided here for dumps, restores and people alike."""

from collections.abc import Collection, Sequence
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, TypeVar

from ocihook.tcp_policy import Mode, Rule, TcpPolicy, parse

__all__ = ["IN_WORDS", "Endpoint", "Fate", "IPAddress", "TcpPolicy", "asked", "fate", "parse", "refused"]

IPAddress = IPv4Address | IPv6Address


class Fate(StrEnum):
    """What becomes of a socket."""

    STAYS = "stays"  # it has no address that could change
    MOVES = "moves"  # kept; its addresses become those of the restored container, and of the gang's members
    KEPT_IF_SAME = "kept-if-same"  # kept if the restored container has the address that it had, else closed
    CLOSED = "closed"
    REFUSED = "refused"  # the dump is


# In words, after the name of a socket.
IN_WORDS = {
    Fate.STAYS: "is kept",
    Fate.MOVES: "is kept, at whatever address the container is restored",
    Fate.KEPT_IF_SAME: "is kept where the container is restored at the same address; else it ends (ECONNRESET)",
    Fate.CLOSED: "ends when the container is restored (ECONNRESET); left running, it lives on",
    Fate.REFUSED: "refuses a dump",
}


class Endpoint(Protocol):
    """A socket, of a process or of an image."""

    @property
    def is_connection(self) -> bool:
        """Return whether it is a TCP connection."""

    @property
    def local(self) -> IPAddress:
        """Its own address; of IPv4 in an IPv6 socket the IPv4 address."""

    @property
    def remote(self) -> IPAddress:
        """The other end's."""

    @property
    def remote_port(self) -> int:
        """The other end's port; 0: it is not connected."""


E = TypeVar("E", bound=Endpoint)


def fate(sock: Endpoint, policy: TcpPolicy, own: Collection[IPAddress], gang: Collection[IPAddress] = ()) -> Fate:
    """Decide what becomes of a socket.

    Args:
        sock: of the container.
        policy: the container's.
        own: addresses that the container has when it is dumped.
        gang: those of the members of its gang, at the same time.
    """
    has_address = not (sock.local.is_unspecified or sock.local.is_loopback)
    if not sock.is_connection:
        return Fate.MOVES if has_address else Fate.STAYS
    if sock.remote.is_loopback:
        return Fate.STAYS
    if sock.remote in own or sock.remote == sock.local:
        return Fate.MOVES
    mode = next((rule.mode for rule in policy.rules if _fits(rule, sock, gang)), policy.mode)
    if mode is Mode.REFUSE:
        return Fate.REFUSED
    if mode is not Mode.CLOSE and sock.remote in gang:
        return Fate.MOVES
    return Fate.KEPT_IF_SAME if mode is Mode.ESTABLISHED else Fate.CLOSED


def _fits(rule: Rule, sock: Endpoint, gang: Collection[IPAddress]) -> bool:
    """Return whether a rule matches a connection."""
    if rule.is_gang:
        return sock.remote in gang
    return rule.port in (0, sock.remote_port) and (rule.network is None or sock.remote in rule.network)


def asked(policy: TcpPolicy, options: Collection[str]) -> TcpPolicy:
    """Return the policy of a container for a call of its runtime: an option given there by name wins.

    Args:
        policy: the container's.
        options: that the runtime was called with, by name.
    """
    return TcpPolicy(Mode.ESTABLISHED) if "tcp-established" in options else policy


def refused(
    sockets: Sequence[E], policy: TcpPolicy, own: Collection[IPAddress], gang: Collection[IPAddress] = ()
) -> list[E]:
    """Return the connections for which a dump is refused."""
    return [sock for sock in sockets if fate(sock, policy, own, gang) is Fate.REFUSED]
