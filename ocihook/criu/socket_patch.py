"""Moves sockets to other addresses in the memory of a CRIU that has read files.img and waits in its stage pre-restore.

CRIU makes every process from that memory, so they all inherit what is written here; the images stay as they are.
protobuf-c keeps an inet_sk_entry as a C struct in the order of the .proto file: what all messages begin with, ten
numbers of 32 bits (`InetSocket.head`), then a count and a pointer for each of the two addresses. The numbers are known
from the image, so they are searched for, and what is found must be right to the last word: a CRIU with other structs
has none, and nothing is written.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ocihook.criu.socket_images import Ends, InetSocket
from ocihook.errors import UnsupportedError, reason
from ocihook.linux.memory import memory_path, read_mappings
from ocihook.linux.procfs import Process

_ADDRESSES = struct.Struct("=QQQQ")  # n_src_addr, *src_addr, n_dst_addr, *dst_addr
_HEAD_BYTES = 40
_KEY = struct.Struct("=Q")  # the first two of the ten numbers
_WORD_BYTES = 4
_MAX_SEARCHED_BYTES = 1 << 30  # CRIU has some MiB, and 2 KiB for each open file
_SHOWN = 5  # sockets that an error names
_ELF_64 = b"\x7fELF\x02"
_HINT = (
    "restore at the addresses that it had, or give `ocihook archive move` the new ones and restore what it writes: "
    "that needs nothing of CRIU's memory"
)


class Move(NamedTuple):
    """A socket that is to be somewhere else."""

    sock: InetSocket
    ends: Ends


class _Block(NamedTuple):
    """One mapping, as it was."""

    start: int
    data: bytearray

    def has(self, address: int, size_bytes: int) -> bool:
        return self.start <= address and address + size_bytes <= self.start + len(self.data)

    def at(self, address: int, size_bytes: int) -> bytes:
        return bytes(self.data[address - self.start : address - self.start + size_bytes])


class _Found(NamedTuple):
    """Where the two addresses of a socket lie."""

    local_at: int
    remote_at: int


def patch_sockets(criu: Process, moves: Sequence[Move]) -> int:
    """Move sockets; return the bytes of memory that were searched. Those that were moved before stay so.

    Raises:
        UnsupportedError: naming those that were not found exactly once, or if that memory cannot be read; nothing was
            written.
    """
    if not moves:
        return 0
    memory = _open(criu)
    try:
        blocks = list(_read(memory, criu.pid))
        found = _find(blocks, {move.sock.head: move for move in moves})
        wrong = [move.sock for move in moves if len(found.get(move.sock.head, ())) != 1]
        if wrong:
            named = "; ".join(map(str, wrong[:_SHOWN])) + (f"; and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN))
            raise UnsupportedError(
                f"{len(wrong)} of {len(moves)} sockets are not in CRIU's memory exactly once, as CRIU's own builds "
                f"have them: {named}",
                hint=_HINT,
            )
        for move in moves:
            (place,) = found[move.sock.head]
            for address, raw in zip(place, move.ends, strict=True):
                os.pwrite(memory, raw, address)
    except OSError as error:
        raise _refused(error) from error
    finally:
        os.close(memory)
    return sum(len(block.data) for block in blocks)


def _open(criu: Process) -> int:
    """Open CRIU's memory; check that it still is the same process."""
    try:
        with open(f"/proc/{criu.pid}/exe", "rb") as program:
            if program.read(len(_ELF_64)) != _ELF_64:
                raise UnsupportedError("CRIU is no program of 64 bits: its memory is laid out otherwise", hint=_HINT)
        memory = os.open(memory_path(criu.pid), os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error) from error
    if not criu.is_alive():  # its pid may have been reused
        os.close(memory)
        raise UnsupportedError("CRIU has ended")
    return memory


def _refused(error: OSError) -> UnsupportedError:
    return UnsupportedError(f"CRIU's memory cannot be written: {reason(error)}", hint=_HINT)


def _read(memory: int, pid: int) -> Iterator[_Block]:
    """Yield mappings that malloc may use, in the order of addresses: private, writable, anonymous, not a stack."""
    left_bytes = _MAX_SEARCHED_BYTES
    for mapping in read_mappings(pid):
        if mapping.mode == "rw-p" and mapping.inode == 0 and mapping.name in ("", "[heap]"):
            left_bytes -= mapping.span.size_bytes
            if left_bytes < 0:
                raise UnsupportedError(f"CRIU has more than {_MAX_SEARCHED_BYTES} bytes of memory", hint=_HINT)
            data = bytearray(mapping.span.size_bytes)
            read = os.preadv(memory, [data], mapping.span.start)
            yield _Block(mapping.span.start, data[: read - read % _KEY.size])


def _find(blocks: Sequence[_Block], wanted: Mapping[bytes, Move]) -> dict[bytes, list[_Found]]:
    """Return where the addresses of each socket lie, by its head.

    One pass for any number of sockets: malloc aligns to 8 bytes, and so the ten numbers are aligned, too.
    """
    keys = {_KEY.unpack_from(head)[0] for head in wanted}
    found: dict[bytes, list[_Found]] = {}
    starts = [block.start for block in blocks]
    for block in blocks:
        places = [number * _KEY.size for number, word in enumerate(memoryview(block.data).cast("Q")) if word in keys]
        for place in places:
            head = bytes(block.data[place : place + _HEAD_BYTES])
            if head in wanted and place + _HEAD_BYTES + _ADDRESSES.size <= len(block.data):
                fields = _ADDRESSES.unpack_from(block.data, place + _HEAD_BYTES)
                if _is_right(fields, wanted[head], blocks, starts):
                    found.setdefault(head, []).append(_Found(fields[1], fields[3]))
    return found


def _is_right(fields: tuple[int, ...], move: Move, blocks: Sequence[_Block], starts: Sequence[int]) -> bool:
    """Return whether both counts are the image's, and the words behind both pointers too, or already the new ones."""
    for count, pointer, old, new in zip(fields[::2], fields[1::2], move.sock.ends, move.ends, strict=True):
        if count != len(old) // _WORD_BYTES or pointer % _WORD_BYTES:
            return False
        block = blocks[bisect_right(starts, pointer) - 1]  # before all blocks: index -1, which does not have it
        if not block.has(pointer, len(old)) or block.at(pointer, len(old)) not in (old, new):
            return False
    return True
