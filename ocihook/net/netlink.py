"""What the kernel reports of a network namespace over netlink: its sockets, links, addresses and routes.

Messages are pyroute2's, which is imported here only, and late: it takes 0.1 s and 20 MiB (`load_messages`). They go
over a plain socket with a time-out. See sock_diag(7) and rtnetlink(7).
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface, ip_network
from typing import Any, NamedTuple

from ocihook.errors import printable
from ocihook.net.namespace import NetNamespace

ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2 = 1, 2, 4, 5  # include/net/tcp_states.h
TIME_WAIT, CLOSE, LISTEN = 6, 7, 10
STATES = (
    *("", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT"),
    *("CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
MPTCP = 262  # IPPROTO_MPTCP; Python has it from 3.12 on
PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE, MPTCP)

IPAddress = IPv4Address | IPv6Address
_Message = Any  # of pyroute2, which has no types

_TIMEOUT_S = 10.0  # for the kernel to answer
_BUFFER_BYTES = 1 << 18
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_GET_LINK, _GET_ADDRESS, _GET_ROUTE = 18, 22, 26  # RTM_GETLINK and so on
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300  # NLM_F_*
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_NO_SUCH_KIND = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT)  # of a kernel without that protocol
_REQUEST_PROTOCOL = 3  # INET_DIAG_REQ_PROTOCOL: of more than 8 bits
_ALL_STATES = (1 << len(STATES)) - 1
_SHOW_UNIX = 4 | 8 | 16  # UDIAG_SHOW_PEER, _ICONS and _RQLEN
_UP = 1  # IFF_UP
_LOOPBACK = 772  # ARPHRD_LOOPBACK
_UNICAST, _MAIN_TABLE, _LINK_SCOPE = 1, 254, 253  # RTN_UNICAST, RT_TABLE_MAIN, RT_SCOPE_LINK


class InetSocket(NamedTuple):
    """A TCP, UDP, UDP-Lite or MPTCP socket, of whatever process."""

    inode: int  # 0: no process has it (TIME_WAIT, not yet accepted)
    family: int
    protocol: int
    state: int
    local: IPAddress  # of IPv4 in an IPv6 socket the IPv4 address
    local_port: int
    remote: IPAddress
    remote_port: int  # 0: it is not connected
    device: int  # index of the link that it is bound to; 0: of none
    receive_queue: int  # bytes; of a listener, how many nobody has accepted
    send_queue: int  # bytes that are unacknowledged, or unsent
    cookie: int

    @property
    def is_connection(self) -> bool:
        """Return whether it is a TCP connection that a process has."""
        is_tcp = self.protocol in (socket.IPPROTO_TCP, MPTCP)
        return is_tcp and self.inode != 0 and self.state not in (CLOSE, LISTEN, TIME_WAIT)

    def __str__(self) -> str:
        """Return it as people write it."""
        name = {6: "TCP", 17: "UDP", 136: "UDP-Lite", MPTCP: "MPTCP"}.get(self.protocol, str(self.protocol))
        far = f" -> {endpoint(self.remote, self.remote_port)}" if self.remote_port else ""
        return f"{name} {endpoint(self.local, self.local_port)}{far}"


class UnixSocket(NamedTuple):
    """A Unix socket."""

    peer: int  # inode at the other end; 0 if there is none
    clients: tuple[int, ...]  # of a listener: who is connected and not accepted yet, 0 for one that has closed
    unread_bytes: int  # that it has sent and nobody has read


class Link(NamedTuple):
    """A network interface."""

    name: str
    ifindex: int
    mac: str  # "" if it has none
    kind: str  # veth, bridge, ...; "" for a device
    mtu: int
    is_up: bool
    is_loopback: bool
    addresses: tuple[str, ...]  # with their prefix lengths, those of the link's own scope left out; in their order


class Route(NamedTuple):
    """A route of the main table."""

    destination: str  # 0.0.0.0/0 or ::/0 for the default
    gateway: str  # "" if it needs none
    device: int  # index; 0: of several


def load_messages() -> None:
    """Import what is otherwise imported late: once, for all processes that are forked from this one."""
    from pyroute2.netlink.diag import inet_diag_msg  # noqa: F401
    from pyroute2.netlink.rtnl import ifaddrmsg, ifinfmsg, rtmsg  # noqa: F401


def endpoint(address: IPAddress, port: int) -> str:
    """Return an address with a port as people write it."""
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def inet_sockets(namespace: NetNamespace, protocols: Sequence[int] = PROTOCOLS) -> list[InetSocket]:
    """Return the sockets of a namespace.

    Raises:
        OSError: if it is gone, cannot be entered, or the kernel does not answer.
    """
    from pyroute2.netlink.diag import inet_diag_msg

    found = []
    with _open(namespace, _SOCK_DIAG) as diag:
        for protocol in protocols:
            for family in (socket.AF_INET, socket.AF_INET6):
                try:
                    answers = list(_ask(diag, _inet_request(family, protocol), _SOCK_DIAG_BY_FAMILY, inet_diag_msg))
                except OSError as error:
                    if error.errno not in _NO_SUCH_KIND:
                        raise
                else:
                    found += [_inet_socket(answer, protocol) for answer in answers]
    return found


def _inet_request(family: int, protocol: int) -> _Message:
    from pyroute2.netlink.diag import inet_diag_req

    class Request(inet_diag_req):  # type: ignore[misc]  # which lacks its attributes
        nla_map = ((_REQUEST_PROTOCOL, "INET_DIAG_REQ_PROTOCOL", "uint32"),)

    request = Request()
    request["sdiag_family"], request["sdiag_protocol"] = family, protocol & 0xFF
    request["idiag_states"] = _ALL_STATES
    if protocol > 0xFF:
        request["attrs"] = [("INET_DIAG_REQ_PROTOCOL", protocol)]
    return request


def _inet_socket(answer: _Message, protocol: int) -> InetSocket:
    local, remote = (_plain(ip_address(answer[name])) for name in ("idiag_src", "idiag_dst"))
    return InetSocket(
        inode=answer["idiag_inode"],
        family=answer["idiag_family"],
        protocol=protocol,
        state=answer["idiag_state"],
        local=local,
        local_port=answer["idiag_sport"],
        remote=remote,
        remote_port=answer["idiag_dport"],
        device=answer["idiag_if"],
        receive_queue=answer["idiag_rqueue"],
        send_queue=answer["idiag_wqueue"] if answer["idiag_state"] != LISTEN else 0,
        cookie=answer["idiag_cookie"],
    )


def _plain(address: IPAddress) -> IPAddress:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def destroy(namespace: NetNamespace, sockets: Sequence[InetSocket]) -> int:
    """End connections with ECONNABORTED for whoever has them (SOCK_DESTROY); return how many were still there.

    Raises:
        OSError: if the kernel does not do that (CONFIG_INET_DIAG_DESTROY), or as `inet_sockets`.
    """
    from pyroute2.netlink import nlmsg

    ended = 0
    with _open(namespace, _SOCK_DIAG) as diag:
        for sock in sockets:
            request = _inet_request(sock.family, sock.protocol)
            request["idiag_sport"], request["idiag_dport"] = sock.local_port, sock.remote_port
            for name, address in (("idiag_src", sock.local), ("idiag_dst", sock.remote)):
                request[name] = _words(address, sock.family)
            request["idiag_if"], request["idiag_cookie"] = sock.device, sock.cookie
            try:
                list(_ask(diag, request, _SOCK_DESTROY, nlmsg, flags=_REQUEST | _ACK))
            except FileNotFoundError:
                continue
            ended += 1
    return ended


def _words(address: IPAddress, family: int) -> tuple[int, ...]:
    raw = address.packed
    if family == socket.AF_INET6 and len(raw) == 4:
        raw = bytes(10) + b"\xff\xff" + raw
    return struct.unpack(">4I", raw.ljust(16, b"\0"))


def unix_sockets(namespace: NetNamespace) -> dict[int, UnixSocket]:
    """Return the Unix sockets of a namespace by their inodes; as `inet_sockets`."""
    from pyroute2.netlink.diag import unix_diag_msg, unix_diag_req

    class Answer(unix_diag_msg):  # type: ignore[misc]  # which has clients as text
        nla_map = (
            (2, "UNIX_DIAG_PEER", "uint32"),
            (3, "UNIX_DIAG_ICONS", "cdata"),
            (4, "UNIX_DIAG_RQLEN", "unix_diag_rqlen"),
        )

    request = unix_diag_req()
    request["sdiag_family"], request["udiag_states"] = socket.AF_UNIX, 0xFFFFFFFF
    request["udiag_show"] = _SHOW_UNIX
    with _open(namespace, _SOCK_DIAG) as diag:
        answers = _ask(diag, request, _SOCK_DIAG_BY_FAMILY, Answer)
        return {answer["udiag_ino"]: _unix_socket(answer) for answer in answers}


def _unix_socket(answer: _Message) -> UnixSocket:
    clients = answer.get("UNIX_DIAG_ICONS") or b""
    lengths = answer.get("UNIX_DIAG_RQLEN")  # of a listener the second is how long its queue may be
    unread_bytes = lengths["udiag_wqueue"] if lengths and answer["udiag_state"] != LISTEN else 0
    return UnixSocket(answer.get("UNIX_DIAG_PEER") or 0, struct.unpack(f"={len(clients) // 4}I", clients), unread_bytes)


def links(namespace: NetNamespace, *, is_of_link: bool = False) -> list[Link]:
    """Return the interfaces of a namespace with their addresses, or with those of the link's own scope only.

    Raises:
        OSError: as `inet_sockets`.
    """
    from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
    from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

    with _open(namespace, socket.NETLINK_ROUTE) as route:
        addresses: dict[int, list[str]] = {}
        interfaces = list(_ask(route, ifinfmsg(), _GET_LINK, ifinfmsg))
        for answer in _ask(route, ifaddrmsg(), _GET_ADDRESS, ifaddrmsg):
            if answer["scope"] == _LINK_SCOPE if is_of_link else answer["scope"] < _LINK_SCOPE:
                address = answer.get("IFA_LOCAL") or answer.get("IFA_ADDRESS")
                addresses.setdefault(answer["index"], []).append(str(ip_interface(f"{address}/{answer['prefixlen']}")))
        return [_link(answer, addresses.get(answer["index"], [])) for answer in interfaces]


def _link(answer: _Message, addresses: list[str]) -> Link:
    info = answer.get("IFLA_LINKINFO")
    name = answer.get(
        "IFLA_IFNAME"
    )  # of a container: any bytes but spaces, slashes and colons; pyroute2 may leave them
    return Link(
        name=printable(name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name),
        ifindex=answer["index"],
        mac=answer.get("IFLA_ADDRESS") or "",
        kind=(info.get("IFLA_INFO_KIND") or "") if info else "",
        mtu=answer.get("IFLA_MTU") or 0,
        is_up=bool(answer["flags"] & _UP),
        is_loopback=answer["ifi_type"] == _LOOPBACK,
        addresses=tuple(addresses),
    )


def routes(namespace: NetNamespace) -> list[Route]:
    """Return the unicast routes of a namespace's main table; as `inet_sockets`."""
    from pyroute2.netlink.rtnl.rtmsg import rtmsg

    with _open(namespace, socket.NETLINK_ROUTE) as route:
        answers = _ask(route, rtmsg(), _GET_ROUTE, rtmsg)
        return [_route(a) for a in answers if a["type"] == _UNICAST and a["table"] == _MAIN_TABLE]


def _route(answer: _Message) -> Route:
    anywhere = "::" if answer["family"] == socket.AF_INET6 else "0.0.0.0"  # noqa: S104 - a destination
    destination = ip_network(f"{answer.get('RTA_DST') or anywhere}/{answer['dst_len']}")
    return Route(str(destination), answer.get("RTA_GATEWAY") or "", answer.get("RTA_OIF") or 0)


def _open(namespace: NetNamespace, protocol: int) -> socket.socket:
    """Return a netlink socket of a namespace: it stays there, whoever uses it."""

    def make() -> socket.socket:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)

    made = make() if namespace.is_ours else namespace.run(make)
    made.settimeout(_TIMEOUT_S)
    return made


def _ask(
    netlink: socket.socket,
    request: _Message,
    kind: int,
    answer: Callable[..., _Message],
    *,
    flags: int = _REQUEST | _DUMP,
) -> Iterator[_Message]:
    """Yield the kernel's answers to a request.

    Raises:
        OSError: if it refuses, or gives none in time.
    """
    request["header"]["type"], request["header"]["flags"] = kind, flags
    request["header"]["sequence_number"] = 1
    request.encode()
    netlink.send(bytes(request.data))
    while True:
        data = netlink.recv(_BUFFER_BYTES)  # waits: as long as the socket's own time-out
        position = 0
        while position + _HEADER.size <= len(data):
            size, found, *_ = _HEADER.unpack_from(data, position)
            if found == _DONE:
                return
            if found == _ERROR:
                code = -struct.unpack_from("=i", data, position + _HEADER.size)[0]
                if code:
                    raise OSError(code, f"the kernel refused a netlink request: {os.strerror(code)}")
                return
            message = answer(data, offset=position)
            message.decode()
            yield message
            position += (size + 3) & ~3
