"""Checks of what waits in Unix and netlink sockets, and of the groups of netlink: CRIU cannot dump some of it."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ocihook.linux.socket_queues import Queue
from ocihook.preflight import descriptors, files
from ocihook.preflight.check import Check
from ocihook.preflight.files import TTY_MAJORS
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation

_HEADER_BYTES = 32  # by which CRIU's buffer is smaller than SO_SNDBUF (criu/sk-queue.c)
_OF_EACH_FILE = ("anonymous-file", "device", "tun", "pidfd", "timer-clock", "bpf-map", "lost-namespace", "ghost-file")
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
        elif not queue.has_port:
            detail = f"{who} has a netlink socket that is in a group and not bound, which CRIU cannot dump"
            yield fail(detail, "have the application bind it (bind(2) with port 0), or close it before the dump")


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


def _unix_empty(seen: Observation) -> Iterator[Problem]:
    """CRIU takes a datagram without bytes for the end of a queue (criu/sk-queue.c)."""
    for who, queue in _queues(seen):
        if queue.has_empty:
            detail = f"{who} has an unread datagram without bytes in a Unix socket: CRIU drops it and all behind it"
            yield warn(detail, "have the application read it before the dump")


def _sent(find: Callable[[Observation], Iterable[Problem]]) -> Callable[[Observation], Iterator[Problem]]:
    """Return a check of open files as one of those that are on their way: CRIU dumps them alike."""

    def find_sent(seen: Observation) -> Iterator[Problem]:
        sent = {
            one.pid: tuple(file for queue in one.queues.values() for file in queue.in_flight) for one in seen.processes
        }
        if any(sent.values()):
            processes = tuple(replace(one, files=sent[one.pid]) for one in seen.processes)
            for problem in find(replace(seen, processes=processes)):
                yield problem._replace(detail=f"{problem.detail} (on its way in a Unix socket)", remedy=_READ)

    return find_sent


def _terminal(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        if file.is_device and os.major(file.device) in TTY_MAJORS:
            yield fail(f"{seen.who(file.pid)} is sent a terminal, which CRIU cannot dump", _READ)


CHECKS = (
    Check(name="netlink-unread", find=_netlink_unread),
    Check(name="netlink-groups", find=_netlink_groups),
    Check(name="unix-credentials", find=_unix_credentials),
    Check(name="unix-large", find=_unix_large),
    Check(name="unread-datagrams", find=_unix_empty),
    Check(name="terminal", find=_sent(_terminal)),
    *(replace(one, find=_sent(one.find)) for one in (*files.CHECKS, *descriptors.CHECKS) if one.name in _OF_EACH_FILE),
)
