"""Whether what the members of a gang have dumped fits together: both ends of each connection, by sequence numbers.

An end may have sent what the other has not received; it comes again. It may never have received what the other has not
sent: una <= rcv_nxt of the peer <= snd_nxt, as RFC 9293, 3.3.1 calls them.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.socket_images import FilesImage, read_stream

_U32 = 1 << 32
_ESTABLISHED = 1
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


def contradictions(ends: Mapping[str, Iterable[End]]) -> tuple[list[str], int]:
    """Return what does not fit together, in words, and how many connections do.

    Args:
        ends: of all members.
    """
    found = {(end[:2], end[2:4]): (member, end) for member, has in ends.items() for end in has}
    wrong, fitting = [], 0
    for (here, there), (member, end) in found.items():
        if (there, here) in found:
            peer, other = found[there, here]
            is_closing = end.state != _ESTABLISHED or other.state != _ESTABLISHED  # an end of it has a number, too
            if _is_within(end, other.next_received, int(is_closing)):
                fitting += 1
            else:
                wrong.append(
                    f"{peer} has received up to {other.next_received} of what {member} sent from {end}: "
                    f"{end.unacknowledged} to {end.next_sent}"
                )
    return wrong, fitting // 2


def _is_within(end: End, received: int, slack: int) -> bool:
    sent = (end.next_sent - end.unacknowledged) % _U32
    return (received - end.unacknowledged + slack) % _U32 <= sent + 2 * slack


def described(wrong: Iterable[str]) -> str:
    """Return contradictions as one sentence, the first of them."""
    found = list(wrong)
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{len(found)} ends of connections do not belong to one moment: {'; '.join(found[:_SHOWN])}{more}"
