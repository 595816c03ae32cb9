"""Reads the sockets in CRIU's images, with every length and count bounded; rewrites them with other addresses.

An entry of files.img that is a socket has an inet_sk_entry (proto/sk-inet.proto). Its addresses are words of 32 bits
in network byte order: one for IPv4, four for IPv6. What a connection had sent and received is
in tcp-stream-INO.img (criu/sk-tcp.c).
"""

import os
import socket
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ocihook.criu.images import COMMON_MAGIC, decode, frames
from ocihook.errors import ImageError, printable
from ocihook.linux.files import replace_file

if TYPE_CHECKING:
    from google.protobuf.message import Message

FILES_NAME = "files.img"
FILES_MAGIC = 0x56303138
_TCP_STREAM_MAGIC = 0x51465506
MAX_FILES_BYTES = 64 << 20  # some 400,000 open files
_STREAM_BYTES = 4096  # magics and entry of a stream; the queues come behind, and are not read
_WORD_BYTES = 4
_WORDS = {socket.AF_INET: 1, socket.AF_INET6: 4}
_MAX_NAME = 15  # of an interface (IFNAMSIZ)
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in an IPv6 socket (RFC 4291, 2.5.5.2)
_HEAD = struct.Struct("=10I")
_U32 = 1 << 32
_STATES = (
    "",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "CLOSING",
    "NEW_SYN_RECV",
)  # include/net/tcp_states.h; of UDP, too
ESTABLISHED = 1

IPAddress = IPv4Address | IPv6Address


class Ends(NamedTuple):
    """The two addresses of a socket, as they lie in memory: 4 bytes each, or 16."""

    local: bytes
    remote: bytes


class InetSocket(NamedTuple):
    """One socket of the IP families. The first ten fields are those of inet_sk_entry, in its order."""

    id: int
    inode: int
    family: int
    kind: int  # SOCK_STREAM, ...
    protocol: int
    state: int
    local_port: int
    remote_port: int  # 0: it is not connected
    flags: int
    backlog: int
    ends: Ends
    device: str = ""  # that it is bound to
    interface: str = ""  # of its link-local address
    shutdown: int = 0  # 1: for reading, 2: for writing, 3: both
    namespace: int = 0  # CRIU's number for the network namespace that it is in
    is_six_only: bool = False  # it takes no IPv4 (IPV6_V6ONLY)

    @property
    def head(self) -> bytes:
        """The first ten fields as they lie in memory."""
        return _HEAD.pack(*self[:10])

    @property
    def local(self) -> IPAddress:
        """Its own address; of IPv4 in an IPv6 socket the IPv4 address."""
        return plain_address(self.ends.local)

    @property
    def remote(self) -> IPAddress:
        """The other end's."""
        return plain_address(self.ends.remote)

    @property
    def is_connection(self) -> bool:
        """Return whether it is a TCP socket with another end: of these CRIU keeps queues and sequence numbers."""
        return self.kind == socket.SOCK_STREAM and self.protocol == socket.IPPROTO_TCP and self.remote_port != 0

    @property
    def state_name(self) -> str:
        """Its state, as in tcp(7)."""
        return _STATES[self.state]

    def __str__(self) -> str:
        known = {socket.IPPROTO_TCP: "TCP", socket.IPPROTO_UDP: "UDP", socket.IPPROTO_ICMP: "ICMP"}
        name = known.get(self.protocol, f"protocol {self.protocol}")
        far = f" -> {_endpoint(self.remote, self.remote_port)}" if self.remote_port else ""
        state = f" {self.state_name}" if self.protocol == socket.IPPROTO_TCP else ""
        device = f" on {self.device}" if self.device else ""
        return f"{name} {_endpoint(self.local, self.local_port)}{far}{state}{device}"


def _endpoint(address: IPAddress, port: int) -> str:
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


@lru_cache(maxsize=4096)
def plain_address(raw: bytes) -> IPAddress:
    """Return an address; of IPv4 in an IPv6 socket the IPv4 address."""
    return ip_address(raw[12:] if raw[:12] == _MAPPED else raw)


def raw_address(address: IPAddress, like: bytes) -> bytes:
    """Return an address in the form of `like`: plain, or IPv4 in an IPv6 socket.

    Raises:
        ValueError: if such a socket cannot have it.
    """
    if len(like) == 16 and address.version == 4:
        return _MAPPED + address.packed
    if len(address.packed) != len(like):
        raise ValueError(f"{address} is no address for a socket of IPv4")
    return address.packed


class FilesImage:
    """A files.img."""

    def __init__(self, data: bytes) -> None:
        """Read one.

        Raises:
            ImageError: if it is damaged, larger than any that CRIU writes, or has what CRIU never writes.
        """
        if len(data) > MAX_FILES_BYTES:
            raise ImageError(f"{FILES_NAME} is larger than {MAX_FILES_BYTES} bytes")
        self._data = data
        self.sockets: list[InetSocket] = []
        self._places: dict[int, tuple[int, Message]] = {}  # where the entries of sockets begin, by their ids
        for position, encoded in frames(data, FILES_NAME, (COMMON_MAGIC, FILES_MAGIC)):
            entry = decode("file_entry", encoded, FILES_NAME, position)
            if entry.HasField("isk"):
                found = _socket(entry.isk, position)  # type: ignore[attr-defined]
                if found.id in self._places:
                    raise ImageError(f"{FILES_NAME} has two sockets with the id {found.id}")
                self._places[found.id] = position, entry
                self.sockets.append(found)

    @classmethod
    def read(cls, directory: Path) -> "FilesImage":
        """Read the one of an image set.

        Raises:
            ImageError: if it is damaged.
            OSError: if it is missing, or cannot be read.
        """
        with (directory / FILES_NAME).open("rb") as file:
            return cls(file.read(min(os.fstat(file.fileno()).st_size, MAX_FILES_BYTES) + 1))

    def moved(self, moves: Mapping[int, Ends]) -> bytes:
        """Return the image with sockets, by their ids, at other addresses; all else is byte for byte the same."""
        pieces, done = [], 0
        for number in sorted(moves, key=lambda number: self._places[number][0]):
            position, entry = self._places[number]
            size = int.from_bytes(self._data[position - 4 : position], "little")
            for field, raw in zip(("src_addr", "dst_addr"), moves[number], strict=True):
                words = getattr(entry.isk, field)  # type: ignore[attr-defined]
                words[:] = struct.unpack(f"={len(raw) // _WORD_BYTES}I", raw)
            encoded = entry.SerializeToString()
            pieces += [self._data[done : position - 4], len(encoded).to_bytes(4, "little"), encoded]
            done = position + size
        return b"".join([*pieces, self._data[done:]])


def _socket(entry: "Message", position: int) -> InetSocket:
    """Return the socket of an entry, after checking that CRIU could have written every number in it."""
    e = entry
    head = (e.id, e.ino, e.family, e.type, e.proto, e.state, e.src_port, e.dst_port, e.flags, e.backlog)  # type: ignore[attr-defined]
    found = InetSocket(
        *head,
        Ends(_address(e.src_addr, e.family, position), _address(e.dst_addr, e.family, position)),  # type: ignore[attr-defined]
        device=_name(e.opts.so_bound_dev, position),  # type: ignore[attr-defined]
        interface=_name(e.ifname, position),  # type: ignore[attr-defined]
        shutdown=e.shutdown,  # type: ignore[attr-defined]
        namespace=e.ns_id,  # type: ignore[attr-defined]
        is_six_only=e.v6only,  # type: ignore[attr-defined]
    )
    if max(found.local_port, found.remote_port, found.protocol) > 0xFFFF or found.state >= len(_STATES):
        raise ImageError(f"{FILES_NAME} is damaged at byte {position}: no socket has such a port, protocol or state")
    return found


def _address(words: Iterable[int], family: int, position: int) -> bytes:
    found = list(words)
    if len(found) != _WORDS.get(socket.AddressFamily(family) if family in _WORDS else socket.AF_UNSPEC):
        raise ImageError(
            f"{FILES_NAME} is damaged at byte {position}: an address of family {family} is of other length"
        )
    return struct.pack(f"={len(found)}I", *found)


def _name(name: str | bytes, position: int) -> str:
    if isinstance(name, bytes) or len(name) > _MAX_NAME or printable(name) != name:
        raise ImageError(f"{FILES_NAME} is damaged at byte {position}: no interface has such a name")
    return name


def move_files(directory: Path, image: FilesImage, moves: Mapping[int, Ends]) -> None:
    """Rewrite files.img of an image set with sockets at other addresses; it is never missing meanwhile."""
    path = directory / FILES_NAME
    replace_file(path, image.moved(moves), mode=path.stat().st_mode & 0o777)


class Stream(NamedTuple):
    """What a connection has sent and received, as its image says; numbers are sequence numbers of TCP."""

    unacknowledged: int  # the oldest byte that the peer has not acknowledged
    queued_bytes: int  # not acknowledged, or never sent
    next_sent: int  # the first byte that was never sent
    next_received: int  # the first byte that has not arrived


def read_stream(directory: Path, sock: InetSocket) -> Stream | None:
    """Return the state of a connection; None if the image set has none: it was dumped with `tcp-close`.

    Raises:
        ImageError: if it is damaged.
    """
    name = f"tcp-stream-{sock.inode:x}.img"
    try:
        with (directory / name).open("rb") as file:
            data = file.read(_STREAM_BYTES)
    except FileNotFoundError:
        return None
    position, encoded = next(frames(_first(data), name, (COMMON_MAGIC, _TCP_STREAM_MAGIC)), (0, b""))
    entry = decode("tcp_stream_entry", encoded, name, position)
    first, unsent = entry.outq_seq - entry.outq_len, entry.outq_seq - entry.unsq_len  # type: ignore[attr-defined]
    return Stream(first % _U32, entry.outq_len, unsent % _U32, entry.inq_seq)  # type: ignore[attr-defined]


def _first(data: bytes) -> bytes:
    """Return an image up to its first message: what comes behind it may be no message."""
    size = int.from_bytes(data[8:12], "little")
    return data[: 12 + size]
