"""What a dump notes of a container's network beside CRIU's images: addresses that it had, and what CRIU does not keep.

Its name is that of an image, so it is packed, stored, archived and verified as one. It is a frame (packs/frame.py) with
JSON; docs/formats.md has its fields.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface
from pathlib import Path

from ocihook.errors import IntegrityError, printable
from ocihook.linux.files import replace_file
from ocihook.net.lost_options import TcpOptions
from ocihook.net.memberships import Membership
from ocihook.net.netlink import Link, Route
from ocihook.packs.frame import decode_frame, encode_frame, load_json, read_record
from ocihook.packs.packed_manifest import NETWORK_NAME
from ocihook.session.record import from_json, to_json

__all__ = ["NETWORK_NAME", "NetworkNote", "decode_note", "read_note", "write_note"]

_KIND, _VERSION = "network", 1
_TEXT_CHARACTERS = 160  # of a name: IFNAMSIZ escaped, or a pid in each namespace
_MAX_BYTES = 16 << 20  # 100,000 sockets with options

IPAddress = IPv4Address | IPv6Address


@dataclass(frozen=True, kw_only=True)
class NetworkNote:
    """A container's network at its dump."""

    links: tuple[Link, ...]
    routes: tuple[Route, ...] = ()
    options: Mapping[str, TcpOptions] = field(default_factory=dict)  # of TCP sockets, by inode
    of_link: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # IPv4 addresses of that scope, by interface
    memberships: tuple[Membership, ...] = ()  # of multicast groups
    is_node: bool = False  # it was the node's own network
    ended: tuple[int, ...] = ()  # ids of sockets that `relocate` has ended, and that a restore has to destroy

    @property
    def addresses(self) -> dict[str, list[IPAddress]]:
        """The addresses by interface, in their order."""
        return {link.name: [ip_interface(text).ip for text in link.addresses] for link in self.links}

    @property
    def link_local(self) -> dict[str, list[IPAddress]]:
        """Those of IPv4 that hold on the link only, in their order; of IPv6, sockets have their interface."""
        return {name: [ip_interface(text).ip for text in texts] for name, texts in self.of_link.items()}

    @property
    def own(self) -> frozenset[IPAddress]:
        """All addresses."""
        every = (*self.addresses.values(), *self.link_local.values())
        return frozenset(address for found in every for address in found)


def write_note(directory: Path, note: NetworkNote) -> None:
    """Put a note into an image set, in place of any that is there.

    Raises:
        OSError: if it cannot be written.
    """
    body = json.dumps(to_json(note), indent=1).encode()
    replace_file(directory / NETWORK_NAME, encode_frame(_KIND, _VERSION, body), mode=0o600)


def read_note(directory: Path) -> NetworkNote | None:
    """Return the note of an image set; None if there is none.

    Raises:
        IntegrityError: if it is damaged.
    """
    data = read_record(directory / NETWORK_NAME, _MAX_BYTES, "note about the network")
    return None if data is None else decode_note(data)


def decode_note(data: bytes) -> NetworkNote:
    """Read a note; as `read_note`."""
    _, body = decode_frame(_KIND, (_VERSION,), data)
    try:
        note = from_json(NetworkNote, load_json(body))
        note.own  # noqa: B018 - an address that is none is a ValueError
        [int(inode) for inode in note.options]
        _check_texts(note)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"the note about the network is malformed: {error}") from error
    return note


def _check_texts(note: NetworkNote) -> None:
    """Check that what messages name can be printed, and is no longer than any kernel has it; else a ValueError."""
    names = [*(link.name for link in note.links), *note.of_link]
    names += [options.congestion for options in note.options.values()]
    for one in note.memberships:
        names += [one.pid, one.interface]
        [ip_address(text) for text in (one.group, *one.sources)]
    for text in names:
        if len(text) > _TEXT_CHARACTERS or printable(text) != text:
            raise ValueError(f"{reprlib.repr(text)} is no name that a kernel knows")
