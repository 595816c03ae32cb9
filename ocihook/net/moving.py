"""What becomes of each socket of a checkpoint where it is restored: it stays, it moves to other addresses, or it ends.

A connection ends by having both its ends on the loopback device, where nobody but the kernel answers. The first packet
that it sends after the restore is answered with a reset, so its process reads what had arrived and then gets
ECONNRESET, as if the peer had died. A socket that CRIU would restore as closed gives an end of file instead, which
looks like a complete answer. Nothing but addresses changes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address

from ocihook.criu.socket_images import ESTABLISHED, Ends, InetSocket, raw_address
from ocihook.criu.socket_patch import Move
from ocihook.errors import UnsupportedError
from ocihook.net.addresses import AddressMap
from ocihook.net.policy import Fate, IPAddress, TcpPolicy, fate

_SHOWN = 5  # sockets that an error names
_LOCAL, _FIRST_REMOTE = IPv4Address("127.0.0.1"), IPv4Address("127.0.0.2")
_LAST_REMOTE = IPv4Address("127.255.255.254")
_SIX = ip_address("::1")

Tuple = tuple[IPAddress, int, IPAddress, int]  # addresses and ports of a connection


@dataclass(frozen=True)
class Plan:
    """What becomes of the sockets of a checkpoint."""

    moves: list[Move] = field(default_factory=list)  # of all whose addresses change, those that end among them
    kept: list[Move] = field(default_factory=list)  # connections with others that live on, wherever they are then
    closed: list[Move] = field(default_factory=list)

    @property
    def to_destroy(self) -> list[Move]:
        """Those that end by SOCK_DESTROY: they send nothing when they are restored, or not by the loopback device."""
        return [move for move in self.closed if move.sock.state != ESTABLISHED or move.sock.device]


def make_plan(
    sockets: Sequence[InetSocket],
    policy: TcpPolicy,
    addresses: AddressMap,
    *,
    own: Collection[IPAddress],
    gang: Collection[IPAddress] = (),
) -> Plan:
    """Decide what becomes of each socket.

    Args:
        sockets: of the checkpoint.
        policy: the container's.
        addresses: what becomes of its addresses, and of those of the gang.
        own: addresses that it had.
        gang: those of the members of its gang, as they were.

    Raises:
        UnsupportedError: naming the sockets that need an address without a new one.
    """
    plan, closed, lost = Plan(), [], []
    for sock in sockets:
        what = fate(sock, policy, own, gang)
        if what is Fate.STAYS:
            continue
        if what is Fate.MOVES or (what is Fate.KEPT_IF_SAME and _is_same(sock, addresses)):
            if {sock.local, sock.remote} & addresses.gaps.keys():
                lost.append(sock)
                continue
            move = Move(sock, _moved(sock, addresses))
            plan.moves.extend([move] if move.ends != sock.ends else [])
            plan.kept.extend([move] if sock.is_connection else [])
        else:
            closed.append(sock)
    if lost:
        raise _gaps(lost, addresses.gaps)
    taken = {_tuple_of(sock, sock.ends) for sock in sockets} | {_tuple_of(*move) for move in plan.moves}
    plan.closed.extend(_ended(closed, taken))
    plan.moves.extend(plan.closed)
    return plan


def _is_same(sock: InetSocket, addresses: AddressMap) -> bool:
    return sock.local not in addresses.gaps and addresses[sock.local] == sock.local


def _moved(sock: InetSocket, addresses: AddressMap) -> Ends:
    return Ends(
        raw_address(addresses[sock.local], sock.ends.local), raw_address(addresses[sock.remote], sock.ends.remote)
    )


def _gaps(lost: Sequence[InetSocket], gaps: Mapping[IPAddress, str]) -> UnsupportedError:
    reasons = {
        address: gaps[address] for sock in lost[:_SHOWN] for address in (sock.local, sock.remote) if address in gaps
    }
    named = "; ".join(map(str, lost[:_SHOWN])) + (f"; and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
    why = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    return UnsupportedError(
        f"{len(lost)} sockets need an address that has no new one ({named}): {why}",
        hint="restore where the same interfaces have as many addresses, or name the new ones with "
        "`ocihook archive move ARCHIVE --address OLD=NEW`",
    )


def _tuple_of(sock: InetSocket, ends: Ends) -> Tuple:
    moved = sock._replace(ends=ends)
    return moved.local, sock.local_port, moved.remote, sock.remote_port


def _ended(closed: Iterable[InetSocket], taken: set[Tuple]) -> Iterator[Move]:
    """Yield connections on the loopback device: no two the same, and none what another one has as its far end."""
    for sock in closed:
        for local, remote in _loopbacks(sock):
            one = (local, sock.local_port, remote, sock.remote_port)
            if (
                one not in taken
                and (remote, sock.remote_port, local, sock.local_port) not in taken
                and one[:2] != one[2:]
            ):
                taken.add(one)
                yield Move(sock, Ends(raw_address(local, sock.ends.local), raw_address(remote, sock.ends.remote)))
                break
        else:
            raise UnsupportedError(f"{sock} cannot be closed: connections of the same ports are in its way")


def _loopbacks(sock: InetSocket) -> Iterator[tuple[IPAddress, IPAddress]]:
    """Yield pairs of loopback addresses that a socket may have; IPv6 has one address, and an IPv6 socket takes IPv4."""
    if sock.local.version == 6:
        yield _SIX, _SIX
    if not sock.is_six_only:
        for number in range(int(_FIRST_REMOTE), int(_LAST_REMOTE) + 1):
            yield _LOCAL, IPv4Address(number)
