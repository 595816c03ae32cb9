"""Checks of sockets: kinds and states that CRIU cannot dump, and the fate of each connection."""

import contextlib
import platform
import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface
from pathlib import Path

from ocihook.errors import OcihookError
from ocihook.linux.sockets import Socket
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import MPTCP, InetSocket, UnixSocket
from ocihook.net.policy import IN_WORDS, Fate, fate, parse
from ocihook.net.survey import Survey
from ocihook.preflight.check import Check, before
from ocihook.preflight.finding import Problem, Repair, Status, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen

_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET)
_IP = (socket.AF_INET, socket.AF_INET6)
_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE, MPTCP, 0)
_PING = (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6)
_NONLOCAL_BIND = "/proc/sys/net/ipv4/ip_nonlocal_bind"
_BROADCASTS = (ip_address("255.255.255.255"), ip_address("127.255.255.255"))  # that every network has
_CLOSE = "have the application close it before the dump"
_READ = "have the application read it before the dump"
_STATUS = {Fate.REFUSED: Status.FAIL, Fate.CLOSED: Status.WARN, Fate.KEPT_IF_SAME: Status.WARN}


def _kernel_6_16(seen: Observation) -> Iterator[Problem]:
    internet = [sock for sock in seen.sockets if sock.family in (*_IP, socket.AF_PACKET)]
    if internet and seen.hides_socket_options:
        version = ".".join(map(str, seen.criu)) or "before 4.2"
        detail = f"{seen.who(internet[0].pid)} has an Internet socket; CRIU {version} cannot dump it on Linux "
        yield fail(f"{detail}{platform.release()}", "install CRIU 4.2 or later")


def _socket_kind(seen: Observation) -> Iterator[Problem]:
    for sock in seen.sockets:
        who = seen.who(sock.pid)
        if sock.family not in _FAMILIES:
            yield fail(f"{who} has a socket of family {sock.family}, which CRIU cannot dump", _CLOSE)
        elif sock.family in _IP and sock.kind != socket.SOCK_RAW and sock.protocol not in (*_PROTOCOLS, *_PING):
            yield fail(f"{who} has a socket of protocol {sock.protocol}, which CRIU cannot dump", _CLOSE)


def _ping(seen: Observation) -> Iterator[Problem]:
    for sock in seen.sockets:
        if sock.family in _IP and sock.kind == socket.SOCK_DGRAM and sock.protocol in _PING:
            detail = (
                f"{seen.who(sock.pid)} has a socket for ping (SOCK_DGRAM of ICMP), which CRIU before 4.2 cannot dump"
            )
            yield fail(detail, "install CRIU 4.2 or later, or have the application close it before the dump")


def _mptcp(seen: Observation) -> Iterator[Problem]:
    for sock in seen.sockets:
        if sock.is_multipath:
            remedy = "GODEBUG=multipathtcp=0 for Go programs; sysctl net.mptcp.enabled=0"
            yield fail(f"{seen.who(sock.pid)} uses multipath TCP, which CRIU cannot dump", remedy)


def _udp_corked(seen: Observation) -> Iterator[Problem]:
    for sock in seen.sockets:
        if sock.is_corked:
            detail = f"{seen.who(sock.pid)} has a UDP socket that holds back what it sends (UDP_CORK)"
            yield fail(detail, "have the application take UDP_CORK off before the dump")


def _tcp(seen: Observation) -> Iterator[Socket]:
    return (sock for sock in seen.sockets if sock.family in _IP and sock.protocol == socket.IPPROTO_TCP)


def _tcp_established(seen: Observation) -> Iterator[Problem]:
    for sock in _tcp(seen):
        if not sock.is_connected:
            continue
        detail = f"{seen.who(sock.pid)} has an established TCP connection, and no option says how to dump it"
        if seen.container:
            yield fail(detail, f"ocihook install{_by_podman(seen)}", Repair.INSTALL)
        else:
            yield fail(detail, f"{seen.options.add('tcp-close')}, or tcp-established where the address stays")


def _tcp_address(seen: Observation) -> Iterator[Problem]:
    """Of a process that is in no container: for one in a container ocihook's policy decides."""
    for sock in _tcp(seen):
        if sock.is_connected and seen.container is None:
            address = f"the address {sock.address} (tcp-established)"
            detail = f"{seen.who(sock.pid)} has an established TCP connection; a restore needs {address}"
            yield warn(detail, "tcp-close closes connections and needs no address")


def _tcp_in_flight(seen: Observation) -> Iterator[Problem]:
    for sock in _tcp(seen):
        if sock.waiting:
            detail = f"{seen.who(sock.pid)} has not accepted {sock.waiting} connections yet"
            yield fail(detail, seen.options.add("skip-in-flight"))


def _tcp_in_flight_lost(seen: Observation) -> Iterator[Problem]:
    for sock in _tcp(seen):
        if sock.waiting:
            detail = f"{seen.who(sock.pid)} has not accepted {sock.waiting} connections yet: a restore loses them"
            yield warn(detail, "have it accept them before the dump")


def _by_podman(seen: Observation) -> str:
    """Return podman's own options for open connections, as words after a remedy; other engines offer none."""
    if seen.engine != "podman":
        return ""
    return (
        "; or by podman: `container checkpoint --tcp-established`, then `container restore` with the same, or with "
        "--tcp-close where it has that"
    )


def _address_gone(seen: Observation) -> Iterator[Problem]:
    for sock in _tcp(seen) if seen.container is None else ():
        if sock.is_listening and not sock.waiting and not _is_everywhere(sock.address):
            detail = f"{seen.who(sock.pid)} listens on {sock.address}, which a restore elsewhere does not have"
            yield warn(detail, "have it listen on all addresses")


def _never_there(seen: Observation) -> Iterator[Problem]:
    """CRIU binds a socket before it sets the option that lets it have an address of no interface (criu/sk-inet.c)."""
    bound = [sock for sock in seen.sockets if sock.is_bound_anywhere and not _is_everywhere(sock.address)]
    survey = seen.survey() if bound else None
    if survey is None or _may_bind_anywhere(survey.namespace):
        return
    for sock in bound:
        if ip_address(sock.address) not in survey.own:
            detail = (
                f"{seen.who(sock.pid)} is bound to {sock.address}, which no interface has (IP_FREEBIND, IP_TRANSPARENT)"
            )
            remedy = f"nsenter -t {seen.init_pid} -n sysctl net.ipv4.ip_nonlocal_bind=1, here and where it is restored"
            yield fail(f"{detail}: CRIU dumps and does not restore that", remedy)


def _may_bind_anywhere(namespace: NetNamespace) -> bool:
    return namespace.run(lambda: Path(_NONLOCAL_BIND).read_text().strip() == "1")


def _udp_broadcast(seen: Observation) -> Iterator[Problem]:
    """CRIU connects a socket before it allows it to send to all (criu/sk-inet.c)."""
    sending = [sock for sock in seen.sockets if sock.broadcasts_to]
    survey = seen.survey() if sending else None
    links = survey.links if survey else ()
    to_all = {ip_interface(text).network.broadcast_address for link in links for text in link.addresses}
    for sock in sending:
        if ip_address(sock.broadcasts_to) in {*to_all, *_BROADCASTS}:
            detail = f"{seen.who(sock.pid)} has a UDP socket connected to the broadcast address {sock.broadcasts_to}"
            yield fail(
                f"{detail}: CRIU dumps and does not restore that", "have the application use sendto for broadcasts"
            )


def _socket_place(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        for sock in process.sockets:
            is_bound = sock.family == socket.AF_UNIX and (sock.is_listening or sock.kind == socket.SOCK_DGRAM)
            if is_bound and sock.address and _is_read_only(process, sock.address):
                detail = (
                    f"{seen.who(process.pid)} is bound to the Unix socket {sock.address}, whose mount is read-only now"
                )
                yield fail(
                    f"{detail}: CRIU dumps and does not restore that",
                    "mount it writable before the dump, or have the application close the socket",
                )


def _is_read_only(process: ProcessSeen, path: str) -> bool:
    above = [mount for mount in process.mounts if mount.place == "/" or path.startswith(f"{mount.place}/")]
    return bool(above) and "ro" in max(above, key=lambda mount: len(mount.place)).options


def _lost_network(seen: Observation) -> Iterator[Problem]:
    """CRIU lists the sockets of the network namespaces in which a process of the container is."""
    joined = {process.namespaces.get("net") for process in seen.processes}
    for sock in seen.sockets:
        if sock.network and sock.network not in joined:
            detail = f"{seen.who(sock.pid)} has a socket of a network ({sock.network}) in which no process of it is"
            yield fail(f"{detail}: CRIU cannot dump that", _CLOSE)


def _unread_datagrams(seen: Observation) -> Iterator[Problem]:
    for sock in seen.sockets:
        if sock.unread_bytes:
            kind = "packets" if sock.family == socket.AF_PACKET else "datagrams"
            detail = f"{seen.who(sock.pid)} has unread {kind} in a socket ({sock.address or 'not bound'})"
            yield warn(f"{detail}, which CRIU drops", "have the application read them, or its peers send again")


def _kept_connections(seen: Observation) -> Iterator[Socket]:
    """Yield the connections that a restore keeps: of a container the policy decides."""
    special = [sock for sock in _tcp(seen) if sock.upper or sock.is_zero_copy or sock.has_urgent]
    survey = seen.survey() if special and seen.container else None
    ended = set() if survey is None else {one.inode for one, decided in _fates(seen, survey) if decided is Fate.CLOSED}
    return (sock for sock in special if sock.inode not in ended)


def _kernel_tls(seen: Observation) -> Iterator[Problem]:
    for sock in _kept_connections(seen):
        if sock.upper == "tls":
            detail = f"{seen.who(sock.pid)} has a connection that the kernel encrypts (kTLS)"
            yield fail(
                f"{detail}: a restore has it without its keys",
                "turn kTLS off in the application (KTLS in OpenSSL's Options, ssl_conf_command of nginx), or close it",
            )


def _connection_state(seen: Observation) -> Iterator[Problem]:
    for sock in _kept_connections(seen):
        if sock.has_urgent and not sock.has_urgent_inline:
            detail = f"{seen.who(sock.pid)} has an unread urgent byte (MSG_OOB) in a connection: a restore loses it"
            if _unread_bytes(seen, sock) > sock.before_urgent_bytes + 1:
                yield fail(f"{detail}, and the data behind it", _READ)
            else:
                yield warn(detail, _READ)
        if sock.is_zero_copy:
            detail = f"{seen.who(sock.pid)} has a connection that sends without copies (SO_ZEROCOPY)"
            yield warn(
                f"{detail}: after a restore its notifications count from 0 again, and those of before are lost",
                "have the application send without MSG_ZEROCOPY, or connect anew after a restore",
            )


def _unread_bytes(seen: Observation, sock: Socket) -> int:
    """Return what the kernel lists as unread: what a socket itself counts ends before an urgent byte."""
    survey = seen.survey()
    found = {one.inode: one.receive_queue for one in survey.sockets} if survey else {}
    return found.get(sock.inode, 0)


def _urgent_inline(seen: Observation) -> Iterator[Problem]:
    """CRIU cannot read beyond an urgent byte, whatever is to become of the connection."""
    for sock in _tcp(seen):
        if sock.has_urgent_inline:
            detail = f"{seen.who(sock.pid)} has an unread urgent byte among other data (MSG_OOB, SO_OOBINLINE)"
            yield fail(f"{detail}, which CRIU cannot dump", _READ)


def _is_everywhere(address: str) -> bool:
    """Return whether each network has an address: that of all interfaces, and those of the loopback device."""
    return ip_address(address).is_unspecified or ip_address(address).is_loopback


def _connection(seen: Observation) -> Iterator[Problem]:
    """Name the fate that the policy has for each connection of a container.

    A dump refuses by itself what the policy does not want (net/dump.py), for then it knows the members of a gang.
    """
    survey = seen.survey() if seen.container else None
    for sock, decided in _fates(seen, survey) if survey else ():
        remedy = "set ocihook.io/tcp to the fate that it shall have" if decided in _STATUS else ""
        yield Problem(_STATUS.get(decided, Status.OK), f"{sock} {IN_WORDS[decided]}", remedy)


def _fates(seen: Observation, survey: Survey) -> Iterator[tuple[InetSocket, Fate]]:
    """Yield each connection of a container and what the policy makes of it; none if the policy is wrong."""
    with contextlib.suppress(OcihookError):  # reported by the check of the policy
        policy = parse(seen.policy().tcp, "tcp")
        for sock in survey.connections:
            yield sock, fate(sock, policy, survey.own)


def _unix_of(seen: Observation) -> Iterator[tuple[Socket, UnixSocket]]:
    """Yield each Unix socket once, with what the kernel lists of it."""
    ours = {sock.inode: sock for sock in seen.sockets if sock.family == socket.AF_UNIX}
    return ((sock, seen.unix.get(inode, UnixSocket(0, (), 0))) for inode, sock in ours.items())


def _unix_in_flight(seen: Observation) -> Iterator[Problem]:
    for sock, found in _unix_of(seen):
        if any(client not in seen.unix or seen.unix[client].unread_bytes for client in found.clients):
            detail = f"{seen.who(sock.pid)} has not accepted a Unix connection yet that its client has used or closed"
            yield fail(detail, "have the application accept connections, or close its listening socket")


def _peer(seen: Observation, sock: Socket) -> int:
    return seen.unix.get(sock.inode, UnixSocket(0, (), 0)).peer


def _peers_outside(seen: Observation) -> Iterator[Socket]:
    ours = {sock.inode for sock in seen.sockets}
    return (sock for sock, found in _unix_of(seen) if found.peer and found.peer not in ours)


def _unix_connected(seen: Observation) -> Iterator[Problem]:
    for sock in _peers_outside(seen):
        if sock.kind != socket.SOCK_DGRAM:
            detail = f"{seen.who(sock.pid)} is connected by a Unix socket to a process outside, which CRIU cannot dump"
            yield fail(detail, _CLOSE)


def _unix_peer(seen: Observation) -> Iterator[Problem]:
    """CRIU knows the sockets of its container's network namespaces only."""
    for sock in _peers_outside(seen):
        if sock.kind == socket.SOCK_DGRAM and _peer(seen, sock) not in seen.unix:
            detail = f"{seen.who(sock.pid)} sends to a Unix socket of another network namespace, which CRIU cannot dump"
            yield fail(detail, "have the application close it before the dump, or run the container in that network")


def _unix_external(seen: Observation) -> Iterator[Problem]:
    yield from _unix_connected(seen)
    for sock in _peers_outside(seen):
        if sock.kind == socket.SOCK_DGRAM and _peer(seen, sock) in seen.unix:
            detail = f"{seen.who(sock.pid)} sends to a Unix socket of a process outside, as for logging"
            yield fail(detail, seen.options.add("ext-unix-sk"))


CHECKS = (
    Check(name="kernel-6.16", find=_kernel_6_16, criu=before(4, 2)),
    Check(name="socket-kind", find=_socket_kind),
    Check(name="socket-kind", find=_ping, criu=before(4, 2)),
    Check(name="mptcp", find=_mptcp),
    Check(name="udp-corked", find=_udp_corked),
    Check(name="tcp-established", find=_tcp_established, unless=("tcp-close", "tcp-established")),
    Check(name="tcp-established", find=_tcp_address, only_with=("tcp-established",), unless=("tcp-close",)),
    Check(name="tcp-in-flight", find=_tcp_in_flight, unless=("skip-in-flight",)),
    Check(name="tcp-in-flight", find=_tcp_in_flight_lost, only_with=("skip-in-flight",)),
    Check(name="address-gone", find=_address_gone),
    Check(name="address-gone", find=_never_there),
    Check(name="udp-broadcast", find=_udp_broadcast),
    Check(name="socket-place", find=_socket_place),
    Check(name="lost-namespace", find=_lost_network),
    Check(name="unread-datagrams", find=_unread_datagrams),
    Check(name="kernel-tls", find=_kernel_tls, only_with=("tcp-established",), unless=("tcp-close",)),
    Check(name="urgent-inline", find=_urgent_inline, only_with=("tcp-established",)),
    Check(name="connection-state", find=_connection_state, only_with=("tcp-established",), unless=("tcp-close",)),
    Check(name="unix-in-flight", find=_unix_in_flight),
    Check(name="unix-peer", find=_unix_peer),
    Check(name="unix-external", find=_unix_external, unless=("ext-unix-sk",)),
    Check(name="unix-half", find=_unix_connected, only_with=("ext-unix-sk",)),
)
# What doctor adds: in a dump the network's participant decides, which knows more.
CONNECTIONS = Check(name="connection", find=_connection, only_with=("tcp-established",), unless=("tcp-close",))
