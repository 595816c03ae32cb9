"""Queues of Unix and netlink sockets: what waits to be read, and what CRIU would read with it (criu/sk-queue.c)."""

import array
import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.linux.open_files import OpenFile, describe_file
from ocihook.linux.sockets import Socket, copies, describe

_SO_PEEK_OFF, _SO_PASSPIDFD = 42, 76
_SOL_NETLINK, _LIST_MEMBERSHIPS = 270, 9
_MAX_GROUPS_BYTES = 1 << 10
_MOST_SENT = 253  # descriptors in a message (SCM_MAX_FD)
_INT = array.array("i")
_SENT = re.compile(r"^scm_fds:\s+(\d+)", re.MULTILINE)  # descriptors in flight (net/unix/af_unix.c)


class Queue(NamedTuple):
    """The state of one Unix or netlink socket."""

    kind: int = 0  # SOCK_STREAM, ...
    is_netlink: bool = False
    unread_bytes: int = 0  # in a Unix socket; of datagrams the first one's
    has_unread: bool = False
    has_empty: bool = False  # of datagrams: the first one has no bytes
    names_senders: bool = False  # what is read comes with its sender's credentials (SO_PASSCRED, SO_PASSPIDFD)
    send_buffer_bytes: int = 0  # SO_SNDBUF
    group_words: int = 0  # of netlink: how many words of 32 groups CRIU would have to dump
    has_port: bool = True  # of netlink: it is bound
    in_flight: tuple[OpenFile, ...] = ()  # descriptors in the first message of a Unix socket (SCM_RIGHTS)


def sockets_and_queues(pid: int) -> tuple[tuple[Socket, ...], dict[int, Queue]]:
    """Return the sockets of a process, and by inode the queues of those of Unix and netlink; as `sockets`."""
    found, waiting = [], {}
    for inode, sock in copies(pid):
        with contextlib.suppress(OSError):
            found.append(describe(pid, inode, sock))
            if sock.family == socket.AF_UNIX:
                waiting[inode] = _unix(sock)._replace(in_flight=tuple(_in_flight(pid, sock)))
            elif sock.family == socket.AF_NETLINK:
                waiting[inode] = _netlink(sock)
    return tuple(found), waiting


def _unix(sock: socket.socket) -> Queue:
    names = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED) != 0
    with contextlib.suppress(OSError):  # an older kernel
        names = names or sock.getsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD) != 0
    unread = array.array("i", [0])
    with contextlib.suppress(OSError):  # it listens
        fcntl.ioctl(sock, termios.FIONREAD, unread)
    size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    has_empty = sock.type != socket.SOCK_STREAM and not unread[0] and _polls(sock) == select.POLLIN
    return Queue(sock.type, False, unread[0], unread[0] > 0, has_empty, names, size)


def _polls(sock: socket.socket) -> int:
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return sum(event for _, event in poll.poll(0))


def _in_flight(pid: int, sock: socket.socket) -> Iterator[OpenFile]:
    """Yield the descriptors of the first message, which it keeps; later ones cannot be seen without taking that."""
    with contextlib.suppress(OSError):  # an older kernel, or it was read meanwhile
        counted = _SENT.search(Path(f"/proc/self/fdinfo/{sock.fileno()}").read_text())
        if counted is None or counted[1] == "0" or sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF) >= 0:
            return
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        _, messages, _, _ = sock.recvmsg(
            1, socket.CMSG_SPACE(_MOST_SENT * _INT.itemsize), flags
        )  # waits: no (MSG_DONTWAIT)
        for fd in (fd for _, kind, data in messages if kind == socket.SCM_RIGHTS for fd in _descriptors(data)):
            try:
                yield describe_file(pid, fd)
            finally:
                os.close(fd)


def _descriptors(data: bytes) -> Iterable[int]:
    return array.array("i", data[: len(data) // _INT.itemsize * _INT.itemsize])


def _netlink(sock: socket.socket) -> Queue:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    has_unread = any(event & select.POLLIN for _, event in poll.poll(0))
    bits = sock.getsockopt(_SOL_NETLINK, _LIST_MEMBERSHIPS, _MAX_GROUPS_BYTES)
    words = struct.unpack(f"={len(bits) // 4}I", bits[: len(bits) // 4 * 4])
    port = sock.getsockname()[0]
    return Queue(
        sock.type,
        True,
        0,
        has_unread,
        group_words=len(words) - (words[-1:] == (0,)),
        has_port=port != 0 or not any(words),
    )
