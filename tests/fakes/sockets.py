"""files.img as CRIU writes it, with sockets, and a process that has it in memory as CRIU has."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Any

from ocihook.criu.proto import message_class
from ocihook.criu.socket_images import Ends, FilesImage, InetSocket
from ocihook.linux.procfs import Process

_MAGICS = struct.pack("<II", 0x54564319, 0x56303138)
_REGULAR, _SOCKET = 1, 4
MAPPED = bytes(10) + b"\xff\xff"
_OPTIONS = dict.fromkeys(
    ("so_sndbuf", "so_rcvbuf", "so_snd_tmo_sec", "so_snd_tmo_usec", "so_rcv_tmo_sec", "so_rcv_tmo_usec"), 0
)
_OWNER = dict.fromkeys(("uid", "euid", "signum", "pid_type", "pid"), 0)


def raw(address: str, *, mapped: bool = False) -> bytes:
    """Return an address as a socket has it."""
    packed = ip_address(address).packed
    return MAPPED + packed if mapped else packed


def make_socket(
    number: int,
    local: str,
    remote: str = "",
    *,
    mapped: bool = False,
    state: int = 1,
    remote_port: int = -1,
    **more: Any,
) -> InetSocket:
    """Return a socket; without `remote` it listens."""
    is_six = mapped or ":" in local
    far = remote or ("::" if is_six else "0.0.0.0")
    fields = {
        "id": number,
        "inode": 1000 + number,
        "family": socket.AF_INET6 if is_six else socket.AF_INET,
        "kind": socket.SOCK_STREAM,
        "protocol": socket.IPPROTO_TCP,
        "state": state if remote else 10,
        "local_port": 5000 + number,
        "remote_port": (80 if remote else 0) if remote_port < 0 else remote_port,
        "flags": 2,
        "backlog": 0,
    }
    known = {name: more.pop(name) for name in tuple(more) if name in fields}
    ends = Ends(raw(local, mapped=mapped), raw(far, mapped=mapped and bool(remote)))
    return InetSocket(**(fields | known), ends=ends, **more)


def entry(sock: InetSocket) -> bytes:
    """Return the message for a socket, framed."""
    names = ("id", "ino", "family", "type", "proto", "state", "src_port", "dst_port", "flags", "backlog")
    isk: dict[str, Any] = dict(zip(names, sock, strict=False))
    words = [struct.unpack(f"={len(end) // 4}I", end) for end in sock.ends]
    isk |= {"src_addr": words[0], "dst_addr": words[1], "fown": _OWNER, "v6only": sock.is_six_only}
    isk |= {"opts": {**_OPTIONS, **({"so_bound_dev": sock.device} if sock.device else {})}}
    return framed(message_class("file_entry")(type=_SOCKET, id=sock.id, isk=isk).SerializeToString())


def framed(message: bytes) -> bytes:
    """Return a message as an image has it."""
    return struct.pack("<I", len(message)) + message


def files_image(sockets: Iterable[InetSocket]) -> bytes:
    """Return a files.img with these sockets, and other files between them."""
    # A field that is not known here, as files of other kinds have one.
    other = message_class("file_entry")(type=_REGULAR, id=9).SerializeToString() + b"\x8a\x01\x04\x08\x09\x10\x00"
    return _MAGICS + framed(other) + b"".join(entry(sock) + framed(other) for sock in sockets)


def read(sockets: Iterable[InetSocket]) -> FilesImage:
    """Return the same, read."""
    return FilesImage(files_image(sockets))


# Has inet_sk_entry structs as protobuf-c makes them: what all messages begin with, then the fields of the .proto file.
_PROGRAM = """
import ctypes, json, sys
libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; libc.malloc.argtypes = [ctypes.c_size_t]
def put(data):
    at = libc.malloc(len(data)); ctypes.memmove(at, data, len(data)); return at
places = []
for head, local, remote, count, pointer in json.loads(sys.stdin.readline()):
    ends = [put(bytes.fromhex(end)) for end in (local, remote)]
    places.append(ends)
    counts = [count or len(end) // 8 for end in (local, remote)]
    at = put(bytes(160))  # written in parts, so that nothing else in this process has the whole of it
    ctypes.memmove(at + 24, bytes.fromhex(head), 40)
    (ctypes.c_uint64 * 4).from_address(at + 64)[:] = counts[0], pointer or ends[0], counts[1], ends[1]
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([[ctypes.string_at(at, n).hex() for at, n in zip(ends, (16, 16))] for ends in places]), flush=True)
"""


class FakeCriu:
    """A process with the structs of sockets in its memory."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        found = Process.find(program.pid)
        assert found
        self.process = found

    def ends(self) -> list[list[str]]:
        """Return the 16 bytes at each address of each socket, in hexadecimal; the process ends."""
        output, _ = self._program.communicate("\n", timeout=60)
        ends: list[list[str]] = json.loads(output.splitlines()[-1])
        return ends


@contextlib.contextmanager
def fake_criu(sockets: Iterable[InetSocket], *, count: int = 0, pointer: int = 0) -> Iterator[FakeCriu]:
    """Start one.

    Args:
        sockets: that it has.
        count: of words that each address is said to have; 0: as many as it has.
        pointer: to each own address; 0: where it is.
    """
    structs = [[s.head.hex(), s.ends.local.hex(), s.ends.remote.hex(), count, pointer] for s in sockets]
    command = [sys.executable, "-IS", "-c", _PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(json.dumps(structs) + "\n")
            program.stdin.flush()
            assert program.stdout.readline() == "ready\n"
            yield FakeCriu(program)
        finally:
            program.kill()
