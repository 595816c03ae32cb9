"""Checks of what waits in Unix and netlink sockets, and of the groups of netlink: CRIU cannot dump some of it."""

import socket
from collections.abc import Iterator

from ocihook.linux.socket_queues import Queue
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail
from ocihook.preflight.observation import Observation

_HEADER_BYTES = 32  # by which CRIU's buffer is smaller than SO_SNDBUF (criu/sk-queue.c)
_READ = "try again, or have the application read it before the dump"


def _queues(seen: Observation) -> Iterator[tuple[str, Queue]]:
    """Yield each queue once, with the process that has it."""
    owners = {inode: (process.pid, queue) for process in seen.processes for inode, queue in process.queues.items()}
    return ((seen.who(pid), queue) for pid, queue in owners.values())


def _netlink_unread(seen: Observation) -> Iterator[Problem]:
    for who, queue in _queues(seen):
        if queue.is_netlink and queue.has_unread:
            yield fail(f"{who} has a netlink socket with unread messages, which CRIU cannot dump", _READ)


def _netlink_groups(seen: Observation) -> Iterator[Problem]:
    for who, queue in _queues(seen):
        if queue.group_words > 1:
            detail = f"{who} has a netlink socket of a family with groups above 32, which CRIU cannot dump"
            yield fail(detail, "have the application close it, or leave its groups, before the dump")


def _unix_credentials(seen: Observation) -> Iterator[Problem]:
    for who, queue in _queues(seen):
        if not queue.is_netlink and queue.has_unread and queue.names_senders:
            detail = f"{who} has unread data in a Unix socket that names its sender (SO_PASSCRED), as D-Bus has it"
            yield fail(f"{detail}: CRIU cannot dump that", _READ)


def _unix_large(seen: Observation) -> Iterator[Problem]:
    for who, queue in _queues(seen):
        room_bytes = queue.send_buffer_bytes - _HEADER_BYTES
        if not queue.is_netlink and queue.kind == socket.SOCK_DGRAM and queue.unread_bytes > room_bytes:
            detail = (
                f"{who} has an unread datagram of {queue.unread_bytes} bytes in a Unix socket, more than its SO_SNDBUF"
            )
            yield fail(f"{detail}: CRIU cannot dump that", _READ)


CHECKS = (
    Check(name="netlink-unread", find=_netlink_unread),
    Check(name="netlink-groups", find=_netlink_groups),
    Check(name="unix-credentials", find=_unix_credentials),
    Check(name="unix-large", find=_unix_large),
)
