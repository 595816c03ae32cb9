"""The network's part of a dump: unwanted connections are refused, traffic is held, and what CRIU loses is noted.

Before the images: packets in flight arrive, then no packet of TCP moves. After them the container is frozen: should
CRIU be killed from there on, nothing uses a connection before it is out of repair mode.
"""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface
from typing import ClassVar, NamedTuple

from ocihook.criu.parent_images import run_id
from ocihook.criu.socket_images import FilesImage, read_stream
from ocihook.errors import OcihookError, PreflightError, plain
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.net.hold import TrafficHeld, Waiting, hold, remove_table
from ocihook.net.lost_options import TcpOptions, read_options, tcp_sockets
from ocihook.net.memberships import read_memberships
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import InetSocket, links, routes
from ocihook.net.nftables import RulesRefused
from ocihook.net.note import NETWORK_NAME, NetworkNote, write_note
from ocihook.net.policy import TcpPolicy, asked, parse, refused
from ocihook.net.repair import InRepair
from ocihook.net.survey import Survey
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump

DRAIN_S = 0.2  # for packets in flight; most networks answer within a few milliseconds
_SHOWN = 3  # connections that an error names
_MOST_TABLE = 31  # characters of its family and name (criu/netfilter.c, nftables_get_table)
_UNACKED = slice(24, 28)  # tcpi_unacked of struct tcp_info (linux/tcp.h): segments without an answer

log = logging.getLogger(__name__)


class Options(NamedTuple):
    """What sockets have that their images lack, by inode."""

    tcp: dict[str, TcpOptions]
    reusable: tuple[int, ...]  # that have SO_REUSEADDR


def refuse(dump: Dump) -> None:
    """Refuse connections that the policy wants a dump to be refused for.

    Raises:
        PreflightError: naming them.
    """
    survey = Survey.of(descendants(dump.init_pid))
    if survey is None:
        return
    gang = {ip_address(text) for text in dump.gang_addresses}
    unwanted = refused(survey.connections, policy_of(dump), survey.own, gang)
    if unwanted:
        raise PreflightError(
            f"the container's policy refuses a dump with its {len(unwanted)} open connections ({named(unwanted)})",
            hint="end them, or set ocihook.io/tcp to what is to become of them",
        )
    dump.has_connections = bool(survey.connections)


def policy_of(dump: Dump) -> TcpPolicy:
    """Return the wanted policy; an option that the user gave the engine comes first."""
    return asked(parse(dump.policy.tcp, "tcp"), dump.call().criu_asked)


def named(sockets: Sequence[InetSocket]) -> str:
    """Return sockets in words, the first of them by name."""
    more = f" and {len(sockets) - _SHOWN} more" if len(sockets) > _SHOWN else ""
    return ", ".join(map(str, sockets[:_SHOWN])) + more


def hold_network(dump: Dump) -> None:
    """Note what the network is, then let packets in flight arrive, and hold the rest."""
    pids = descendants(dump.init_pid)
    survey, init = Survey.of(pids), Process.find(dump.init_pid)
    if survey is None or init is None:
        (dump.directory / NETWORK_NAME).unlink(missing_ok=True)  # of an earlier dump into the same directory
        return
    options = _options(pids)
    note = NetworkNote(
        links=tuple(survey.links),
        routes=tuple(routes(survey.namespace)),
        options=options.tcp,
        of_link=_link_local(survey),
        memberships=tuple(read_memberships(pids)),
        is_node=survey.namespace.is_ours,
    )
    write_note(dump.directory, note)
    if not survey.connections:
        return
    dump.journal.add(InRepair(init=init, reusable=options.reusable))
    if survey.namespace.is_ours:  # there CRIU locks each connection by itself
        return
    try:
        with dump.journal.phase("drain"):
            hold(dump.journal, survey.namespace, init=init, drain=True)
            _wait_for_answers(dump, pids)
        dump.gang.meet("drained")
        hold(dump.journal, survey.namespace)
    except RulesRefused as error:  # CRIU has a lock of its own, from a little later on
        log.warning("container %s: its traffic is not held: %s", dump.container, error)


def _link_local(survey: Survey) -> dict[str, tuple[str, ...]]:
    """Return the addresses of IPv4 that hold on the link only, by interface."""
    found = {
        link.name: tuple(text for text in link.addresses if ip_interface(text).version == 4)
        for link in links(survey.namespace, is_of_link=True)
    }
    return {name: texts for name, texts in found.items() if texts}


def _options(pids: Sequence[int]) -> Options:
    tcp, reusable = {}, []
    for inode, sock in tcp_sockets(pids):
        tcp[str(inode)] = read_options(sock)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            reusable.append(inode)
    return Options(tcp, tuple(reusable))


def _wait_for_answers(dump: Dump, pids: Sequence[int]) -> None:
    """Wait until all that was sent is acknowledged, for a short time: what is not comes again later."""

    def has_all() -> bool:
        return not any(_unacknowledged(sock) for _, sock in tcp_sockets(pids))

    dump.patience.within(DRAIN_S).until(has_all)


def _unacknowledged(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.stop)
    is_listening = info[0] == 10  # TCP_LISTEN, of which this is how many wait to be accepted
    return 0 if is_listening else int.from_bytes(info[_UNACKED], "little")


def freeze_for_repair(dump: Dump) -> None:
    """Keep the container from running before its connections are out of repair mode, even if CRIU is killed."""
    effect, held = dump.journal.find(InRepair), dump.journal.find(TrafficHeld)
    if effect is None:
        return
    freezer = dump.freezer
    # What is about to be killed could not be, in a frozen cgroup of version 1.
    if freezer is not None and (freezer.version != 1 or dump.call().leave_running):
        effect.is_frozen = True
        dump.journal.save()
        freezer.freeze(None)
    if held is not None and dump.call().leave_running:
        held.waiting = _waiting(dump)
        dump.journal.save()


@dataclass(kw_only=True)
class CriuLockLeft(Effect, kind="criu-lock-left"):
    """CRIU leaves the table by which it locks the node's network, though it blocks nothing.

    A CRIU needs memory for each table of its network, as part of the container that it restores.
    """

    ends_with_stage: ClassVar[bool] = False
    holds_container: ClassVar[bool] = False
    table: str

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Remove it."""
        try:
            remove_table(NetNamespace.of(os.getpid()), self.table)
        except (OcihookError, OSError) as error:
            log.warning("CRIU's table %s, which blocks nothing, is not removed: %s", self.table, plain(error))


def note_lock_left(dump: Dump) -> None:
    """Have CRIU's lock removed after a dump that stops a container without connections in the node's network."""
    has_connections = dump.journal.find(InRepair) is not None
    if has_connections or dump.call().leave_running or not NetNamespace.of(dump.init_pid).is_ours:
        return
    if name := run_id(dump.directory):
        table = f"inet CRIU-{name}"[:_MOST_TABLE].removeprefix("inet ")
        dump.journal.add(CriuLockLeft(table=table))


def _waiting(dump: Dump) -> tuple[Waiting, ...]:
    """Return the connections with unacknowledged data, as CRIU's images have them."""
    found = []
    try:
        for sock in FilesImage.read(dump.directory).sockets:
            stream = read_stream(dump.directory, sock) if sock.is_connection else None
            if stream is not None and stream.queued_bytes:
                ends = str(sock.local), sock.local_port, str(sock.remote), sock.remote_port
                found.append(Waiting(*ends, stream.unacknowledged))
    except (OcihookError, OSError) as error:
        log.warning("container %s: its senders are not woken: %s", dump.container, plain(error))
    return tuple(found)
