"""The network's part of a restore: sockets are moved in CRIU's memory, traffic is held until all of them can answer.

pre-restore: where the container is about to be is known from its bundle, and what becomes of each socket from its
policy. post-restore: what CRIU has lost is put back, and traffic passes again, as the last thing that may fail.
post-resume: senders that wait for a timer are woken.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_interface
from typing import NamedTuple

from ocihook.container.runtime_call import RuntimeCall, find_network_namespace, find_runtime_call
from ocihook.criu.socket_images import FilesImage, InetSocket, plain_address, read_stream
from ocihook.criu.socket_patch import Move, patch_sockets
from ocihook.errors import OcihookError, plain
from ocihook.linux.procfs import descendants
from ocihook.net.addresses import AddressMap, Interfaces, map_addresses, parse_pairs
from ocihook.net.hold import forget_hold, hold, release
from ocihook.net.kick import Sender, wake
from ocihook.net.lost_options import TcpOptions, put_back, tcp_sockets, use_whole_segments
from ocihook.net.memberships import Membership, rejoin
from ocihook.net.moving import Plan, make_plan
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import InetSocket as NetlinkSocket
from ocihook.net.netlink import Route, destroy, inet_sockets, links, routes
from ocihook.net.nftables import RulesRefused
from ocihook.net.note import NetworkNote, read_note
from ocihook.net.old_addresses import carriers, strayed
from ocihook.net.policy import IPAddress, asked, parse
from ocihook.net.stall import Place, Watch, place_of
from ocihook.session.effect import Facts
from ocihook.session.participant import Restore

_MAX_I32, _MAX_U32 = (1 << 31) - 1, (1 << 32) - 1
_SHOWN = 3  # connections that a message names
_SOON_S = 0.01  # that tasks are kept from running, to see that their connections go on: a round trip

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NetworkFacts(Facts):
    """What is still to be done for the sockets of a container that is being restored."""

    network: NetNamespace | None = None
    moved_addresses: dict[str, str] = field(default_factory=dict)  # of the container itself
    senders: list[tuple[Place, int]] = field(default_factory=list)  # with the number of the oldest unacknowledged byte
    to_destroy: list[Place] = field(default_factory=list)
    tcp_options: list[tuple[Place, TcpOptions]] = field(default_factory=list)
    memberships: list[Membership] = field(default_factory=list)  # of multicast groups, that are to be joined again
    routes: list[Route] = field(default_factory=list)  # that the container's network had at the dump
    released_at: float = 0.0  # seconds since 1970


class Moving(NamedTuple):
    """What is about to be done with the sockets of a checkpoint."""

    sockets: Sequence[InetSocket]
    namespace: NetNamespace | None  # None: CRIU makes it
    note: NetworkNote | None
    own: AddressMap  # the container's own addresses
    plan: Plan


def prepare(restore: Restore) -> Moving | None:
    """Decide what becomes of each socket, and hold traffic; None if there is nothing to decide.

    Raises:
        OcihookError: to refuse the restore, naming the sockets; nothing was started.
    """
    call = find_runtime_call(restore.criu_pid)
    if call is None:  # somebody's own `criu restore`
        return None
    try:
        image = FilesImage.read(restore.directory)
    except FileNotFoundError:
        return None
    # With `podman container restore --tcp-close` CRIU makes them, closed, and asks for no address.
    sockets = [sock for sock in image.sockets if not (sock.is_connection and "tcp-close" in call.options)]
    if not sockets:
        return None
    moving = _plan(restore, call, sockets)
    namespace = moving.namespace
    if namespace and not namespace.is_ours and any(sock.is_connection for sock in sockets):
        _hold(restore, namespace, moving.plan)
    return moving


def _plan(restore: Restore, call: RuntimeCall, sockets: Sequence[InetSocket]) -> Moving:
    note = read_note(restore.directory)
    path = find_network_namespace(restore.criu_pid, call.bundle)
    namespace = NetNamespace.of(restore.criu_pid) if path is None else NetNamespace.at(path) if path else None
    own = _own_addresses(sockets, namespace, note)
    peers = parse_pairs(filter(None, restore.policy.address_map.split(",")), "address_map")
    peers |= _addresses_of_gang(restore, own, sockets, note)
    policy = asked(parse(restore.policy.tcp, "tcp"), call.options)
    plan = make_plan(sockets, policy, own.with_peers(peers), own=own.pairs.keys() | own.gaps.keys(), gang=peers.keys())
    return Moving(sockets, namespace, note, own, plan)


def move_sockets(restore: Restore, moving: Moving) -> str:
    """Move sockets in CRIU's memory; note what is still to be done for them. Return what to report.

    Raises:
        OcihookError: to refuse the restore, naming the sockets; nothing was started.
    """
    _, namespace, note, own, plan = moving
    with restore.journal.phase("move sockets"):
        patch_sockets(restore.journal.criu, plan.moves)
    restore.journal.note(
        NetworkFacts(
            network=namespace,
            moved_addresses={str(old): str(new) for old, new in own.pairs.items() if old != new},
            senders=list(_senders(restore, plan)),
            to_destroy=[*map(_place, plan.to_destroy), *_ended_before(moving)],
            routes=list(note.routes) if note else [],
            tcp_options=list(_options(moving.sockets, plan, note, namespace)) if note else [],
            memberships=list(note.memberships) if note else [],
        )
    )
    return _told(restore, plan)


def _addresses_of_gang(
    restore: Restore, own: AddressMap, sockets: Iterable[InetSocket], note: NetworkNote | None
) -> dict[IPAddress, IPAddress]:
    """Publish to the gang where this member is, and return where those are that it is connected with."""
    # Link-local addresses stay here: two members may have the same.
    stay = {address for found in note.link_local.values() for address in found} if note else set()
    mine = {
        str(old): str(new)
        for old, new in own.pairs.items()
        if old not in stay and (old.version == 4 or not old.is_link_local)
    }
    peers = {str(sock.remote) for sock in sockets if sock.is_connection}
    found = restore.gang.meet("addresses", mine, peers)
    return parse_pairs((f"{old}={new}" for old, new in found.items() if new), "the gang")


def _hold(restore: Restore, namespace: NetNamespace, plan: Plan) -> None:
    """Hold traffic: without it connections that end would do so too early; for others CRIU's own lock will do."""
    try:
        hold(restore.journal, namespace, with_loopback=True)
    except RulesRefused as error:
        if plan.closed:
            raise
        log.warning("container %s: its traffic is not held: %s", restore.journal.container, error)


def _own_addresses(
    sockets: Sequence[InetSocket], namespace: NetNamespace | None, note: NetworkNote | None
) -> AddressMap:
    """Return what becomes of the container's own addresses."""
    if namespace is None:  # CRIU makes a new namespace, with the addresses of the old one
        had = note.own if note else frozenset(_locals(sockets))
        return AddressMap({address: address for address in had})
    here = addresses_of(namespace)
    if note is not None:
        own = map_addresses(note.addresses, here)
    else:  # dumped without ocihook: what its sockets have, if the container has as many addresses here
        own = map_addresses({"": _locals(sockets)}, {"": [a for addresses in here.values() for a in addresses]})
    return _with_link_local(own, sockets, namespace, note.link_local if note else {})


def _with_link_local(
    own: AddressMap, sockets: Sequence[InetSocket], namespace: NetNamespace, four: Interfaces
) -> AddressMap:
    """Return the same with the link-local addresses that sockets have: each becomes that of the same interface here.

    Args:
        own: what becomes of the others.
        sockets: of the checkpoint; those of IPv6 have their interface.
        namespace: where they are restored.
        four: the addresses of IPv4 that held on a link only.
    """
    had: dict[str, list[IPAddress]] = {}
    for sock in sockets:
        if sock.interface and sock.local.is_link_local and sock.local not in had.setdefault(sock.interface, []):
            had[sock.interface].append(sock.local)
    used = {sock.local for sock in sockets}
    for name, addresses in four.items():
        if used.intersection(addresses):
            had.setdefault(name, []).extend(addresses)
    if not had:
        return own
    own_links = map_addresses(had, addresses_of(namespace, is_of_link=True))
    both = own.with_peers(own_links.pairs)
    return AddressMap(both.pairs, {**both.gaps, **own_links.gaps})


def _locals(sockets: Iterable[InetSocket]) -> list[IPAddress]:
    """Return the addresses that sockets have of their own, other than on the loopback device."""
    found = (sock.local for sock in sockets if not sock.interface)
    return list(dict.fromkeys(a for a in found if not (a.is_loopback or a.is_unspecified or a.is_multicast)))


def addresses_of(namespace: NetNamespace, *, is_of_link: bool = False) -> Interfaces:
    """Return the addresses of a namespace by interface, or those that hold on the link only; none is of loopback alone.

    Raises:
        OSError: if it is gone, cannot be entered, or the kernel does not answer.
    """
    return {
        link.name: [ip_interface(text).ip for text in link.addresses]
        for link in links(namespace, is_of_link=is_of_link)
    }


def _place(move: Move) -> Place:
    sock, (local, remote) = move.sock, map(plain_address, move.ends)
    return Place(str(local), sock.local_port, str(remote) if sock.remote_port else "", sock.remote_port)


def _ended_before(moving: Moving) -> Iterator[Place]:
    """Yield connections that `ocihook archive move` has ended and nothing but SOCK_DESTROY resets."""
    ended = moving.note.ended if moving.note else ()
    for sock in moving.sockets:
        if sock.id in ended and sock.is_connection:
            yield _place(Move(sock, sock.ends))


def _senders(restore: Restore, plan: Plan) -> Iterator[tuple[Place, int]]:
    for move in plan.kept:
        stream = read_stream(restore.directory, move.sock)
        if stream is not None and stream.queued_bytes:
            yield _place(move), stream.unacknowledged


def _options(
    sockets: Sequence[InetSocket], plan: Plan, note: NetworkNote, namespace: NetNamespace | None
) -> Iterator[tuple[Place, TcpOptions]]:
    """Yield the options that sockets had and CRIU does not give them, of those that have an address or a port."""
    wanted = {int(inode): options for inode, options in note.options.items() if _is_possible(options)}
    usual = namespace.run(_usual_congestion) if namespace and wanted else ""
    moves = {move.sock.id: move for move in plan.moves}
    for sock in sockets:
        options = wanted.get(sock.inode)
        if options is not None and sock.local_port and options != TcpOptions(0, 0, usual):
            yield _place(moves.get(sock.id, Move(sock, sock.ends))), options


def _is_possible(options: TcpOptions) -> bool:
    return 0 <= options.user_timeout_ms <= _MAX_I32 and 0 <= options.notsent_lowat_bytes <= _MAX_U32


def _usual_congestion() -> str:
    with socket.socket() as sock:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _told(restore: Restore, plan: Plan) -> str:
    parts = []
    if plan.closed:
        named = ", ".join(str(move.sock) for move in plan.closed[:_SHOWN])
        parts.append(f"{len(plan.closed)} connections end ({named}{', ...' if len(plan.closed) > _SHOWN else ''})")
    if len(plan.moves) > len(plan.closed):
        parts.append(f"{len(plan.moves) - len(plan.closed)} sockets have moved to other addresses")
    return f"container {restore.journal.container}: {'; '.join(parts)}" if parts else ""


def release_sockets(restore: Restore) -> str:
    """Put back what CRIU has lost, end what nothing else ends, and let traffic pass. Return what to report.

    Raises:
        OcihookError, OSError: to let the restore fail; CRIU then kills the processes.
    """
    facts = restore.journal.facts(NetworkFacts)
    if not restore.journal.knows(NetworkFacts):
        return ""
    lost = _put_back(restore.init_pid, facts.tcp_options)
    lost += rejoin(descendants(restore.init_pid), facts.memberships)
    if facts.to_destroy and facts.network is not None:
        places = set(facts.to_destroy)
        destroy(facts.network, [s for s in inet_sockets(facts.network, [socket.IPPROTO_TCP]) if _place_of(s) in places])
    restore.gang.meet("restored")
    restore.journal.note(replace(facts, released_at=time.time()))
    release(restore.journal)
    return f"container {restore.journal.container}: not restored: {', '.join(lost)}" if lost else ""


def _place_of(sock: NetlinkSocket) -> Place:
    return Place(str(sock.local), sock.local_port, str(sock.remote), sock.remote_port)


def _put_back(init_pid: int, wanted: Iterable[tuple[Place, TcpOptions]]) -> list[str]:
    """Give sockets of restored processes what they had; return what they cannot have here."""
    options = dict(wanted)
    lost = []
    for _, sock in tcp_sockets(descendants(init_pid)):
        place = place_of(sock)
        if place.remote_port:
            use_whole_segments(sock)
        if place in options:
            lost += [
                f"{name} of the connection from port {place.local_port}" for name in put_back(sock, options[place])
            ]
    return lost


def wake_senders(restore: Restore) -> None:
    """Wake connections that wait for a timer, and record how long they have stalled if all go on at once.

    CRIU has ended their repair mode, and their peers need not wait until tasks run.
    """
    with _wake(restore) as watch:
        if watch.go_on(_SOON_S):
            facts = restore.journal.facts(NetworkFacts)
            watch.record(restore.journal, facts.released_at)
            restore.journal.note(replace(facts, senders=[]))


def end_release(restore: Restore) -> None:
    """Wake those connections again that did not go on; record how long they stalled; report what has old addresses."""
    journal = restore.journal
    facts = journal.facts(NetworkFacts)
    with _wake(restore) as watch:
        watch.record(journal, facts.released_at)
    forget_hold(journal)
    for found in _old_addresses(restore.init_pid, facts):
        log.warning("container %s: %s", journal.container, found)


def _wake(restore: Restore) -> Watch:
    """Wake senders; return what watches them: without connections if none wait, or they cannot be woken."""
    facts = restore.journal.facts(NetworkFacts)
    if facts.network is not None and facts.senders:
        try:
            wake(facts.network, [_sender(place, number) for place, number in facts.senders], restore.init_pid)
            places = {place for place, _ in facts.senders}
            return Watch(descendants(restore.init_pid), places, is_restored=True)
        except (OcihookError, OSError) as error:  # they resume by themselves, a second or more later
            log.warning("container %s: its connections are not woken: %s", restore.journal.container, plain(error))
    return Watch((), ())


def _old_addresses(init_pid: int, facts: NetworkFacts) -> Iterator[str]:
    """Yield what of the container has addresses that it has no more, in words."""
    if init_pid:
        yield from carriers(init_pid, facts.moved_addresses)
    if facts.network is not None:
        with contextlib.suppress(OSError):
            yield from strayed(facts.routes, routes(facts.network), facts.moved_addresses)


def _sender(place: Place, number: int) -> Sender:
    return Sender(ip_address(place.local), place.local_port, ip_address(place.remote), place.remote_port, number)
