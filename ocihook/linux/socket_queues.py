"""Queues of Unix and netlink sockets: what waits to be read, and what CRIU would read with it (criu/sk-queue.c)."""

import array
import contextlib
import fcntl
import select
import socket
import struct
import termios
from typing import NamedTuple

from ocihook.linux.sockets import Socket, copies, describe

_SO_PASSPIDFD = 76
_SOL_NETLINK, _LIST_MEMBERSHIPS = 270, 9
_MAX_GROUPS_BYTES = 1 << 10


class Queue(NamedTuple):
    """The state of one Unix or netlink socket."""

    kind: int = 0  # SOCK_STREAM, ...
    is_netlink: bool = False
    unread_bytes: int = 0  # in a Unix socket; of datagrams the first one's
    has_unread: bool = False
    names_senders: bool = False  # what is read comes with its sender's credentials (SO_PASSCRED, SO_PASSPIDFD)
    send_buffer_bytes: int = 0  # SO_SNDBUF
    group_words: int = 0  # of netlink: how many words of 32 groups CRIU would have to dump


def sockets_and_queues(pid: int) -> tuple[tuple[Socket, ...], dict[int, Queue]]:
    """Return the sockets of a process, and by inode the queues of those of Unix and netlink; as `sockets`."""
    found, waiting = [], {}
    for inode, sock in copies(pid):
        with contextlib.suppress(OSError):
            found.append(describe(pid, inode, sock))
            if sock.family == socket.AF_UNIX:
                waiting[inode] = _unix(sock)
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
    return Queue(sock.type, False, unread[0], unread[0] > 0, names, size)


def _netlink(sock: socket.socket) -> Queue:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    has_unread = any(event & select.POLLIN for _, event in poll.poll(0))
    bits = sock.getsockopt(_SOL_NETLINK, _LIST_MEMBERSHIPS, _MAX_GROUPS_BYTES)
    words = struct.unpack(f"={len(bits) // 4}I", bits[: len(bits) // 4 * 4])
    return Queue(sock.type, True, 0, has_unread, group_words=len(words) - (words[-1:] == (0,)))
