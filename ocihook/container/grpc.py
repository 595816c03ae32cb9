"""One gRPC call over a Unix socket, as containerd serves the CRI: to load a gRPC library takes longer than the call.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK), gRPC's PROTOCOL-HTTP2.md, protobuf's encoding.md.
"""

import socket
import struct
import time
from collections.abc import Iterator

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8  # types of frames
_ACK = _END_STREAM = 1  # flags
_END_HEADERS, _PADDED = 4, 8
_HEAD_BYTES, _MESSAGE_HEAD_BYTES = 9, 5
_MAX_BYTES = 4 << 20  # of an answer, as gRPC's own limit
_INITIAL_WINDOW, _DEFAULT_WINDOW = 4, 65535  # a setting, and what a connection has without more
# HPACK: indexed fields of the static table (:method POST, :scheme http), then literals that are not indexed.
_METHOD_AND_SCHEME, _PATH, _AUTHORITY, _CONTENT_TYPE, _NEW_NAME = b"\x83\x86", b"\x04", b"\x01", b"\x0f\x10", b"\x00"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf
_CONTINUED = 0x80  # of a varint's byte
_MAX_SHIFT = 63

Field = tuple[int, bytes]


def call(path: str, method: str, request: bytes, timeout_s: float) -> bytes:
    """Call a method, and return its answer.

    Args:
        path: of the socket.
        method: `/package.Service/Method`.
        request: the encoded message.
        timeout_s: for all of it.

    Raises:
        OSError: if there is no complete answer in time, or the server refuses the call.
        ValueError: if what answers does not speak HTTP/2.
    """
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(_opening(method, request))
        received = _Received(connection, deadline_s)
        while not received.is_complete:
            received.read_frame()
    return received.message()


class _Received:
    """The part of an answer that has arrived."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._body = bytearray()
        self.is_complete = False

    def read_frame(self) -> None:
        """Read one frame, and acknowledge it where the server waits for that."""
        head = self._read(_HEAD_BYTES)
        kind, flags, payload = head[3], head[4], self._read(int.from_bytes(head[:3]))
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _DATA:
            padding = payload[0] if flags & _PADDED else 0
            self._body += payload[1 : len(payload) - padding] if flags & _PADDED else payload
        elif kind in (_RESET, _GO_AWAY):
            raise ConnectionError("the server has ended the call")
        self.is_complete = kind in (_DATA, _HEADERS) and bool(flags & _END_STREAM)

    def message(self) -> bytes:
        """Return the message of the answer; one without any is a refusal, with its reason in compressed headers."""
        size = int.from_bytes(self._body[1:_MESSAGE_HEAD_BYTES])
        message = bytes(self._body[_MESSAGE_HEAD_BYTES:])
        if len(self._body) < _MESSAGE_HEAD_BYTES or self._body[0] or len(message) != size:
            raise ConnectionError("the server has refused the call")
        return message

    def _read(self, size: int) -> bytes:
        if size + len(self._body) > _MAX_BYTES:
            raise ValueError(f"an answer of more than {_MAX_BYTES} bytes")
        found = b""
        while len(found) < size:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            self._connection.settimeout(left_s)
            part = self._connection.recv(size - len(found))
            if not part:
                raise ConnectionError("the server has closed the connection")
            found += part
        return found


def _opening(method: str, request: bytes) -> bytes:
    """Return all that a client sends for one call, with room for an answer of any size that is read."""
    headers = _METHOD_AND_SCHEME + _PATH + _text(method) + _AUTHORITY + _text("localhost")
    headers += _CONTENT_TYPE + _text("application/grpc") + _NEW_NAME + _text("te") + _text("trailers")
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _MAX_BYTES)),
            _frame(_WINDOW, 0, 0, struct.pack(">I", _MAX_BYTES - _DEFAULT_WINDOW)),
            _frame(_HEADERS, _END_HEADERS, 1, headers),
            _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(request)) + request),
        )
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    """Return a string of HPACK, which is short: its length takes one byte."""
    return bytes((len(text),)) + text.encode()


def encode_text(number: int, text: str) -> bytes:
    """Return a string field of a protobuf message; field and text are short, so that key and length take one byte each.

    Args:
        number: of the field, less than 16.
        text: of less than 128 bytes.
    """
    data = text.encode()
    return bytes((number << 3 | _LENGTH, len(data))) + data


def fields(message: bytes) -> Iterator[Field]:
    """Yield number and content of those fields of a protobuf message that are strings or messages.

    Raises:
        ValueError: if it is no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind not in (_FIXED64, _LENGTH, _FIXED32):
            raise ValueError(f"a field of wire type {kind}")
        size, at = _varint(message, at) if kind == _LENGTH else (8 if kind == _FIXED64 else 4, at)
        if at + size > len(message):
            raise ValueError("a field is cut off")
        if kind == _LENGTH:
            yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where the next one begins."""
    value = 0
    for shift in range(0, _MAX_SHIFT + 1, 7):
        if at >= len(message):
            raise ValueError("a number is cut off")
        value |= (message[at] & ~_CONTINUED) << shift
        at += 1
        if not message[at - 1] & _CONTINUED:
            return value, at
    raise ValueError("a number of more than 64 bits")
