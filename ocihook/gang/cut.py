"""Whether what the members of a gang have dumped fits together: both ends of each connection, by sequence numbers.

An end may have sent what the other has not received; it comes again. It may never have received what the other has not
sent: una <= rcv_nxt of the peer <= snd_nxt, as RFC 9293, 3.3.1 calls them.

An end that no process has is in no dump. It waits to be accepted, or was closed and has still something to say; the
kernel knows of it, and without it the other end would wait for ever. An end whose other one the kernel does not know
either has lost it before the dump.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.socket_images import FilesImage, read_stream
from ocihook.net.netlink import ESTABLISHED, FIN_WAIT1, FIN_WAIT2, LISTEN
from ocihook.net.survey import Survey

_U32 = 1 << 32
_SYN_RECV, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 3, 8, 9, 11  # include/net/tcp_states.h
_NOT_ACCEPTED = (ESTABLISHED, _SYN_RECV, _CLOSE_WAIT)  # what has been closed is in none of these
_NOT_HEARD = (FIN_WAIT1, _LAST_ACK, _CLOSING)  # its peer has not acknowledged that it was closed
_STILL_HEARS = (ESTABLISHED, FIN_WAIT1, FIN_WAIT2)  # it does not know that its peer has closed
_AGAIN = "try again (--tries)"
_SHOWN = 3


class End(NamedTuple):
    """One end of a connection at its dump."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    state: int  # include/net/tcp_states.h
    unacknowledged: int
    next_sent: int
    next_received: int
    is_dumped: bool = True  # else no process has it

    def __str__(self) -> str:
        return f"{self.local} port {self.local_port} to {self.remote} port {self.remote_port}"


def connection_ends(directory: Path) -> Iterator[End]:
    """Yield the ends that an image set has of connections with others.

    Raises:
        ImageError: if an image is damaged.
        OSError: if one cannot be read.
    """
    try:
        image = FilesImage.read(directory)
    except FileNotFoundError:  # the container has no files open
        return
    for sock in image.sockets:
        if sock.is_connection and not sock.remote.is_loopback:
            stream = read_stream(directory, sock)
            if stream is not None:
                ends = str(sock.local), sock.local_port, str(sock.remote), sock.remote_port
                numbers = stream.unacknowledged, stream.next_sent, stream.next_received
                yield End(*ends, sock.state, *numbers)


def ends_of_nobody(survey: Survey) -> Iterator[End]:
    """Yield the ends of connections to a container that no process has: not yet accepted by it, or closed and unheard.

    In a pod a container that is no member may have closed one, too. What waits for another listener is left out.

    Raises:
        OSError: if the kernel does not say.
    """
    ports = {sock.local_port for sock in survey.sockets if sock.state == LISTEN}
    for sock in survey.of_nobody:
        if sock.state in _NOT_HEARD or (sock.state in _NOT_ACCEPTED and sock.local_port in ports):
            ends = str(sock.local), sock.local_port, str(sock.remote), sock.remote_port
            yield End(*ends, sock.state, 0, 0, 0, is_dumped=False)


class _Connection(NamedTuple):
    """What members have at the two ends of a connection; of several, where two networks have the same addresses."""

    here: list[tuple[str, End]]
    there: list[tuple[str, End]]


def contradictions(ends: Mapping[str, Iterable[End]]) -> tuple[list[str], int]:
    """Return what does not fit together, in words, and how many connections do.

    Members in networks of their own may have the same addresses. So an end has found its other one when their numbers
    fit; those that are left on both sides do not belong to one moment.

    Args:
        ends: of all members.
    """
    connections: dict[tuple[tuple[str, int], ...], _Connection] = {}
    for member, has in ends.items():
        for end in has:
            here, there = end[:2], end[2:4]
            found = connections.setdefault((min(here, there), max(here, there)), _Connection([], []))
            (found.here if here < there else found.there).append((member, end))
    wrong: list[str] = []
    fitting = 0
    for found in connections.values():
        left = []
        for one in found.here:
            fit = next((other for other in found.there if not _misfit(one, other)), None)
            if fit is None:
                left.append(one)
            else:
                found.there.remove(fit)
                fitting += one[1].is_dumped and fit[1].is_dumped
        for one, other in zip(left, found.there, strict=False):
            wrong += _misfit(one, other)
    return wrong, fitting


def _misfit(*sides: tuple[str, End]) -> list[str]:
    """Return in words why two ends are not those of one connection that goes on."""
    found = []
    is_closing = any(end.state != ESTABLISHED for _, end in sides)  # an end of it has a number, too
    for (member, end), (peer, other) in (sides, sides[::-1]):
        if not end.is_dumped:
            continue
        if other.state in _NOT_ACCEPTED and not other.is_dumped:
            found.append(f"{peer} has not accepted the connection from {member} yet ({end}): {_AGAIN}")
        elif not other.is_dumped and end.state in _STILL_HEARS:
            found.append(f"{member} has not got all yet that {peer} sent before it closed ({end}): {_AGAIN}")
        elif other.is_dumped and not _is_within(end, other.next_received, int(is_closing)):
            found.append(
                f"{peer} has received up to {other.next_received} of what {member} sent from {end}: "
                f"{end.unacknowledged} to {end.next_sent}"
            )
    return found


def _is_within(end: End, received: int, slack: int) -> bool:
    sent = (end.next_sent - end.unacknowledged) % _U32
    return (received - end.unacknowledged + slack) % _U32 <= sent + 2 * slack


def described(wrong: Iterable[str]) -> str:
    """Return contradictions as one sentence, the first of them."""
    found = list(wrong)
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} ends of connections do not belong to one moment: {'; '.join(found[:_SHOWN])}{more}"
