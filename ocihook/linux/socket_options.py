"""Options of sockets that CRIU does not restore (criu/sockets.c, sk-inet.c, sk-tcp.c), as plain numbers.

They are read and set on a copy of a descriptor, which is the same socket. Numbers: asm-generic/socket.h, linux/in.h,
linux/in6.h, linux/tcp.h, linux/udp.h, linux/netlink.h, linux/if_packet.h.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Mapping

_libc = ctypes.CDLL(None, use_errno=True)
_DOMAIN, _PROTOCOL, _PEERCRED = 39, 38, 17
_NETLINK, _PACKET = 270, 263  # SOL_...
_TCP_CLOSE, _TCP_LISTEN = 7, 10
_FAMILY_BYTES = 2  # of an address without a name: unix(7)
_UCRED = struct.Struct("=iII")

_ANY = {
    "SO_TIMESTAMP": 29, "SO_TIMESTAMPNS": 35, "SO_TIMESTAMPING": 37, "SO_RXQ_OVFL": 40, "SO_PEEK_OFF": 42,
    "SO_LOCK_FILTER": 44, "SO_SELECT_ERR_QUEUE": 45, "SO_BUSY_POLL": 46, "SO_MAX_PACING_RATE": 47, "SO_ZEROCOPY": 60,
    "SO_TIMESTAMP_NEW": 63, "SO_TIMESTAMPNS_NEW": 64, "SO_PREFER_BUSY_POLL": 69, "SO_TXREHASH": 74, "SO_RCVMARK": 75,
    "SO_PASSPIDFD": 76, "SO_RCVPRIORITY": 82, "SO_PASSRIGHTS": 83,
}  # fmt: skip
_IP = {
    "IP_RECVOPTS": 6, "IP_RETOPTS": 7, "IP_MTU_DISCOVER": 10, "IP_RECVERR": 11, "IP_RECVTTL": 12, "IP_RECVTOS": 13,
    "IP_PASSSEC": 18, "IP_TRANSPARENT": 19, "IP_RECVORIGDSTADDR": 20, "IP_MINTTL": 21, "IP_CHECKSUM": 23,
    "IP_BIND_ADDRESS_NO_PORT": 24, "IP_RECVFRAGSIZE": 25, "IP_MULTICAST_IF": 32, "IP_MULTICAST_TTL": 33,
    "IP_MULTICAST_LOOP": 34, "IP_MULTICAST_ALL": 49, "IP_UNICAST_IF": 50, "IP_LOCAL_PORT_RANGE": 51,
}  # fmt: skip
_IPV6 = {
    "IPV6_FLOWINFO": 11, "IPV6_UNICAST_HOPS": 16, "IPV6_MULTICAST_IF": 17, "IPV6_MULTICAST_HOPS": 18,
    "IPV6_MULTICAST_LOOP": 19, "IPV6_MTU_DISCOVER": 23, "IPV6_RECVERR": 25, "IPV6_MULTICAST_ALL": 29,
    "IPV6_FLOWINFO_SEND": 33, "IPV6_RECVHOPLIMIT": 51, "IPV6_RECVPATHMTU": 60, "IPV6_DONTFRAG": 62,
    "IPV6_RECVTCLASS": 66, "IPV6_TCLASS": 67, "IPV6_AUTOFLOWLABEL": 70, "IPV6_ADDR_PREFERENCES": 72,
    "IPV6_MINHOPCOUNT": 73, "IPV6_RECVORIGDSTADDR": 74, "IPV6_TRANSPARENT": 75, "IPV6_UNICAST_IF": 76,
    "IPV6_RECVFRAGSIZE": 77,
}  # fmt: skip
# TCP_USER_TIMEOUT, TCP_NOTSENT_LOWAT and TCP_CONGESTION are among what net/lost_options.py puts back.
_TCP = {
    "TCP_SYNCNT": 7, "TCP_LINGER2": 8, "TCP_DEFER_ACCEPT": 9, "TCP_THIN_LINEAR_TIMEOUTS": 16, "TCP_FASTOPEN": 23,
    "TCP_SAVE_SYN": 27, "TCP_FASTOPEN_CONNECT": 30, "TCP_INQ": 36, "TCP_TX_DELAY": 37,
}  # fmt: skip
_TCP_AT_REST = {"TCP_MAXSEG": 2, "TCP_WINDOW_CLAMP": 10}  # of a connection these are the kernel's own
_UDP = {"UDP_ENCAP": 100, "UDP_NO_CHECK6_TX": 101, "UDP_NO_CHECK6_RX": 102, "UDP_SEGMENT": 103, "UDP_GRO": 104}
_OF_NETLINK = {
    "NETLINK_PKTINFO": 3, "NETLINK_BROADCAST_ERROR": 4, "NETLINK_NO_ENOBUFS": 5, "NETLINK_LISTEN_ALL_NSID": 8,
    "NETLINK_CAP_ACK": 10, "NETLINK_EXT_ACK": 11, "NETLINK_GET_STRICT_CHK": 12,
}  # fmt: skip
_OF_PACKET = {"PACKET_QDISC_BYPASS": 20, "PACKET_IGNORE_OUTGOING": 23, "PACKET_VNET_HDR_SZ": 24}

_LEVELS: Mapping[int, Mapping[str, int]] = {
    socket.SOL_SOCKET: _ANY,
    socket.IPPROTO_IP: _IP,
    socket.IPPROTO_IPV6: _IPV6,
    socket.IPPROTO_TCP: _TCP | _TCP_AT_REST,
    socket.IPPROTO_UDP: _UDP,
    _NETLINK: _OF_NETLINK,
    _PACKET: _OF_PACKET,
}
OPTIONS: Mapping[str, tuple[int, int]] = {  # level and number, by name
    name: (level, number) for level, names in _LEVELS.items() for name, number in names.items()
}

_value, _length = ctypes.c_int(), ctypes.c_uint32()
_value_at, _length_at = ctypes.byref(_value), ctypes.byref(_length)
_info = ctypes.create_string_buffer(16)


def _get(fd: int, level: int, number: int) -> int | None:
    _value.value, _length.value = 0, 4
    return _value.value if _libc.getsockopt(fd, level, number, _value_at, _length_at) == 0 else None


def read_options(fd: int) -> dict[str, str]:
    """Return the options of a socket by name, those that this kernel and kind of socket have."""
    found = {}
    for level, names in _levels(fd):
        for name, number in names.items():
            if (value := _get(fd, level, number)) is not None:
                found[name] = str(value)
    return found


def _levels(fd: int) -> list[tuple[int, Mapping[str, int]]]:
    """Return which options a socket may have."""
    family, protocol = _get(fd, socket.SOL_SOCKET, _DOMAIN), _get(fd, socket.SOL_SOCKET, _PROTOCOL)
    levels: list[tuple[int, Mapping[str, int]]] = [(socket.SOL_SOCKET, _ANY)]
    if family in (socket.AF_INET, socket.AF_INET6):
        levels.append((socket.IPPROTO_IP, _IP))
    if family == socket.AF_INET6:
        levels.append((socket.IPPROTO_IPV6, _IPV6))
    if protocol == socket.IPPROTO_TCP and family in (socket.AF_INET, socket.AF_INET6):
        levels.append((socket.IPPROTO_TCP, _TCP | _TCP_AT_REST if _is_at_rest(fd) else _TCP))
    if protocol == socket.IPPROTO_UDP and family in (socket.AF_INET, socket.AF_INET6):
        levels.append((socket.IPPROTO_UDP, _UDP))
    if family == socket.AF_NETLINK:
        levels.append((_NETLINK, _OF_NETLINK))
    if family == socket.AF_PACKET:
        levels.append((_PACKET, _OF_PACKET))
    return levels


def _is_at_rest(fd: int) -> bool:
    """Return whether a TCP socket is no connection: struct tcp_info begins with its state."""
    _length.value = 1
    is_known = _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, _info, _length_at) == 0
    return is_known and _info.raw[0] in (_TCP_CLOSE, _TCP_LISTEN)


def peer_ids(fd: int) -> tuple[int, int] | None:
    """Return user and group of the process at the other end of a named Unix socket, as they were then.

    None: it is not connected, or has no name at either end. Those of a socketpair(2) no program asks for.
    """
    if _get(fd, socket.SOL_SOCKET, _DOMAIN) != socket.AF_UNIX or not (
        _has_name(_libc.getsockname, fd) or _has_name(_libc.getpeername, fd)
    ):
        return None
    _length.value = _UCRED.size
    if _libc.getsockopt(fd, socket.SOL_SOCKET, _PEERCRED, _info, _length_at) != 0:
        return None
    pid, user, group = _UCRED.unpack_from(_info.raw)
    return (user, group) if pid > 0 else None


def _has_name(call: Callable[..., int], fd: int) -> bool:
    _length.value = len(_info)
    return call(fd, _info, _length_at) == 0 and _length.value > _FAMILY_BYTES


def set_option(fd: int, name: str, value: int) -> None:
    """Set an option.

    Raises:
        OSError: if the kernel refuses.
        KeyError: if there is no such option.
    """
    level, number = OPTIONS[name]
    wanted = ctypes.c_int(value)
    if _libc.setsockopt(fd, level, number, ctypes.byref(wanted), 4) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
