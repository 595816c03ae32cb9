"""Which address becomes which, of a container that is restored where it has others, and of peers that move with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from ocihook.errors import ConfigError, UnsupportedError
from ocihook.net.policy import IPAddress

Interfaces = Mapping[str, Sequence[IPAddress]]  # their addresses, in order, by name; the loopback device is none

_SHOWN = 8  # addresses that a reason names


@dataclass(frozen=True)
class AddressMap:
    """New addresses by old ones; an address in neither belongs to nothing that moves, and stays."""

    pairs: Mapping[IPAddress, IPAddress]
    gaps: Mapping[IPAddress, str] = field(default_factory=dict)  # old ones without a new one, and why

    def __getitem__(self, old: IPAddress) -> IPAddress:
        return self.pairs.get(old, old)

    def with_peers(self, peers: Mapping[IPAddress, IPAddress]) -> "AddressMap":
        """Return the same with the addresses of others.

        Raises:
            UnsupportedError: naming what is contradicted.
        """
        for old, new in peers.items():
            if self.pairs.get(old, new) != new:
                raise UnsupportedError(f"{old} is to become {new}, but it has become {self.pairs[old]} on this node")
        both = {**self.pairs, **peers}
        return AddressMap(_one_to_one(both), {old: why for old, why in self.gaps.items() if old not in peers})


def map_addresses(old: Interfaces, new: Interfaces) -> AddressMap:
    """Return what becomes of a container's own addresses, by the names of its interfaces and the order on each.

    One that is there again stays; the others of an interface and a family are paired in order if there are as many.

    Raises:
        UnsupportedError: if two of them would become the same one.
    """
    pairs: dict[IPAddress, IPAddress] = {}
    gaps: dict[IPAddress, str] = {}
    for name, addresses in old.items():
        for version in (4, 6):
            had = [address for address in addresses if address.version == version]
            has = [address for address in new.get(name, ()) if address.version == version]
            stay = set(had) & set(has)
            leave = [address for address in had if address not in stay]
            come = [address for address in has if address not in stay]
            fits = len(leave) == len(come)
            paired = dict(zip(leave, come, strict=True)) if fits else {}
            why = _why(name, leave, come, is_there=name in new)
            for address in had:
                to = address if address in stay else paired.get(address)
                if to is None:
                    gaps.setdefault(address, why)
                elif pairs.setdefault(address, to) != to:
                    gaps[address] = f"it was on two interfaces, one of which has {pairs[address]} now, and {name} {to}"
    for address in gaps.keys() & pairs.keys():
        del pairs[address]
    return AddressMap(_one_to_one(pairs), gaps)


def _why(name: str, leave: Sequence[IPAddress], come: Sequence[IPAddress], *, is_there: bool) -> str:
    if not is_there:
        return f"there is no interface {name} where it is restored"
    had, has = _named(leave), _named(come)
    return f"{name} had {had}, and has {has} where it is restored"


def _named(addresses: Sequence[IPAddress]) -> str:
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    return (", ".join(map(str, addresses[:_SHOWN])) or "none") + more


def _one_to_one(pairs: Mapping[IPAddress, IPAddress]) -> Mapping[IPAddress, IPAddress]:
    """Return the same.

    Raises:
        UnsupportedError: if two addresses would become one.
    """
    olds: dict[IPAddress, IPAddress] = {}
    for old, new in pairs.items():
        if olds.setdefault(new, old) != old:
            raise UnsupportedError(f"{olds[new]} and {old} cannot both become {new}")
    return pairs


def parse_pairs(texts: Iterable[str], where: str) -> dict[IPAddress, IPAddress]:
    """Read addresses as OLD=NEW.

    Raises:
        ConfigError: naming what is wrong, or contradicts another.
    """
    pairs: dict[IPAddress, IPAddress] = {}
    for text in texts:
        parts = text.split("=")
        try:
            old, new = (_plain(ip_address(part.strip())) for part in parts)
        except ValueError as error:
            raise ConfigError(f"{where}: {text!r} must be OLD=NEW, two IP addresses") from error
        if old.version != new.version:
            raise ConfigError(f"{where}: {text!r}: both must be of IPv{old.version}")
        if old.is_loopback or old.is_unspecified or old.is_multicast or new.is_loopback or new.is_unspecified:
            raise ConfigError(f"{where}: {text!r}: an address that an interface can have on a network must be given")
        if pairs.setdefault(old, new) != new:
            raise ConfigError(f"{where}: {old} cannot become both {pairs[old]} and {new}")
    return pairs


def _plain(address: IPAddress) -> IPAddress:
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address
