"""What is to become of each socket of a container: the policy of a container as it is written, and what it decides.

    auto                     kept are connections to members of the gang; others end
    established              all are kept where the restored container has the address that it had; else they end
    close                    all end
    refuse                   a dump is refused while there are any
    PEER=established|close|refuse    for some of them, in front of all that; the first that fits counts

PEER is an address or a network (10.0.0.0/8), a port of the other end (:5432), both (10.0.0.0/8:5432, [fd00::/8]:5432),
or `gang`. Connections of a container to itself are kept whatever is written.
"""

import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import NamedTuple, Protocol

from ocihook.errors import ConfigError

IPAddress = IPv4Address | IPv6Address

GANG = "gang"
_MAX_RULES = 64
_MAX_PORT = 0xFFFF
_PEER = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:./]+)\]|(?P<plain>[0-9.]+(?:/[0-9]+)?))?(?::(?P<port>[0-9]{1,5}))?")


class Mode(StrEnum):
    """What to do with connections."""

    AUTO = "auto"
    ESTABLISHED = "established"
    CLOSE = "close"
    REFUSE = "refuse"


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
    Fate.CLOSED: "ends when the container is restored (ECONNRESET); left running, it goes on",
    Fate.REFUSED: "refuses a dump",
}


class Endpoint(Protocol):
    """A socket, of a process or of an image."""

    @property
    def is_connection(self) -> bool:
        """Tell whether it is a TCP connection."""

    @property
    def local(self) -> IPAddress:
        """Its own address; of IPv4 in an IPv6 socket the IPv4 address."""

    @property
    def remote(self) -> IPAddress:
        """The other end's."""

    @property
    def remote_port(self) -> int:
        """The other end's port; 0: it is not connected."""


class Rule(NamedTuple):
    """What to do with connections to some peers."""

    mode: Mode
    network: IPv4Network | IPv6Network | None = None  # None: any
    port: int = 0  # of the other end; 0: any
    is_gang: bool = False

    def fits(self, sock: Endpoint, gang: Collection[IPAddress]) -> bool:
        """Tell whether a connection is meant."""
        if self.is_gang:
            return sock.remote in gang
        return self.port in (0, sock.remote_port) and (self.network is None or sock.remote in self.network)


class TcpPolicy(NamedTuple):
    """A policy that has been read."""

    mode: Mode = Mode.AUTO
    rules: tuple[Rule, ...] = ()

    def mode_for(self, sock: Endpoint, gang: Collection[IPAddress]) -> Mode:
        """Return what is wanted for a connection."""
        return next((rule.mode for rule in self.rules if rule.fits(sock, gang)), self.mode)


def parse(text: str, where: str) -> TcpPolicy:
    """Read a policy.

    Raises:
        ConfigError: naming what of it is wrong.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _MAX_RULES:
        raise ConfigError(f"{where}: {len(parts)} rules are too many", hint=f"{_MAX_RULES} may be")
    rules = tuple(_rule(part, where) for part in parts if "=" in part)
    modes = [part for part in parts if "=" not in part]
    for mode in modes:
        if mode not in tuple(Mode):
            hint = f"it is one of {', '.join(Mode)}, or PEER=established, PEER=close, PEER=refuse"
            raise ConfigError(f"{where}: {mode!r} says nothing about connections", hint=hint)
    if len(modes) > 1:
        raise ConfigError(f"{where}: {' and '.join(map(repr, modes))} cannot both hold")
    return TcpPolicy(Mode(modes[0]) if modes else Mode.AUTO, rules)


def _rule(text: str, where: str) -> Rule:
    peer, _, word = (part.strip() for part in text.partition("="))
    if word not in (Mode.ESTABLISHED, Mode.CLOSE, Mode.REFUSE):
        raise ConfigError(f"{where}: {text!r}: {word!r} is none of established, close, refuse")
    if peer == GANG:
        return Rule(Mode(word), is_gang=True)
    match = _PEER.fullmatch(peer)
    if not match:
        match = _PEER.fullmatch(f"[{peer}]")  # an address of IPv6 without a port
    try:
        if not match or not peer:
            raise ValueError("no such peer")
        address, port = match["six"] or match["plain"], int(match["port"] or 0)
        network = ip_network(address) if address else None
        if (match["port"] is not None and not port) or port > _MAX_PORT:
            raise ValueError("no such port")
    except ValueError as error:
        hint = "it is an address, a network (its first address), :PORT, both, or gang"
        raise ConfigError(f"{where}: {peer!r} names no peer: {error}", hint=hint) from error
    return Rule(Mode(word), network, port)


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
    mode = policy.mode_for(sock, gang)
    if mode is Mode.REFUSE:
        return Fate.REFUSED
    if mode is not Mode.CLOSE and sock.remote in gang:
        return Fate.MOVES
    return Fate.KEPT_IF_SAME if mode is Mode.ESTABLISHED else Fate.CLOSED


def asked(policy: TcpPolicy, options: Collection[str]) -> TcpPolicy:
    """Return the policy of a container for a call of its runtime: what its user asks for there by name, holds.

    Args:
        policy: the container's.
        options: that the runtime was called with, by name.
    """
    return TcpPolicy(Mode.ESTABLISHED) if "tcp-established" in options else policy


def refused(sockets: Sequence[Endpoint], policy: TcpPolicy, own: Collection[IPAddress]) -> list[Endpoint]:
    """Return the connections for which a dump is refused."""
    return [sock for sock in sockets if fate(sock, policy, own) is Fate.REFUSED]
