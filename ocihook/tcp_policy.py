"""The policy of a container about its TCP connections, as it is written in the configuration and in annotations.

    auto                     kept are connections to members of the gang; others end
    established              all are kept where the restored container has the address that it had; else they end
    close                    all end
    refuse                   a dump is refused while there are any
    PEER=established|close|refuse    for some of them, in front of all that; the first that fits counts

PEER is an address or a network (10.0.0.0/8), a port of the other end (:5432), both (10.0.0.0/8:5432, [fd00::/8]:5432),
or `gang`. Connections of a container to itself are kept whatever is written.
"""

import re
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple

from ocihook.errors import ConfigError

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


class Rule(NamedTuple):
    """What to do with connections to some peers."""

    mode: Mode
    network: IPv4Network | IPv6Network | None = None  # None: any
    port: int = 0  # of the other end; 0: any
    is_gang: bool = False


class TcpPolicy(NamedTuple):
    """A policy that has been read."""

    mode: Mode = Mode.AUTO
    rules: tuple[Rule, ...] = ()


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
