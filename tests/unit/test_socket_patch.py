"""Sockets are moved in the memory of a real process that has them as CRIU does, all or none."""

import os
import time

import pytest

from ocihook.criu.socket_images import Ends, InetSocket
from ocihook.criu.socket_patch import Move, patch_sockets
from ocihook.errors import UnsupportedError
from ocihook.linux.memory import read_mappings
from ocihook.linux.procfs import Process
from tests.fakes.sockets import fake_criu, make_socket, raw

FOUR = make_socket(1, "10.0.0.1", "10.0.0.2")
SIX = make_socket(2, "fd00::1", "fd00::2")
MAPPED = make_socket(3, "10.0.0.1", "10.0.0.2", mapped=True)
MOVES = [
    Move(FOUR, Ends(raw("10.9.0.1"), raw("10.9.0.2"))),
    Move(SIX, Ends(raw("fd09::1"), SIX.ends.remote)),
    Move(MAPPED, Ends(raw("10.9.0.1", mapped=True), raw("10.9.0.2", mapped=True))),
]


def test_all_are_moved_again_and_again() -> None:
    """A stage that was interrupted starts over: some are moved already."""
    other = make_socket(4, "10.0.0.1", "10.0.0.3")
    with fake_criu([FOUR, SIX, MAPPED, other]) as criu:
        assert patch_sockets(criu.process, MOVES[:1]) > 0
        patch_sockets(criu.process, MOVES)
        patch_sockets(criu.process, MOVES)
        found = criu.ends()
    wanted = [*(move.ends for move in MOVES), other.ends]
    assert [
        [end.startswith(raw_end.hex()) for end, raw_end in zip(*pair, strict=True)]
        for pair in zip(found, wanted, strict=True)
    ] == [[True, True]] * 4


def assert_refused(sockets: list[InetSocket], *, count: int = 0, pointer: int = 0) -> None:
    with fake_criu(sockets, count=count, pointer=pointer) as criu:
        with pytest.raises(UnsupportedError, match=r"not in CRIU's memory exactly once.*10\.0\.0\.1:5001") as caught:
            patch_sockets(criu.process, MOVES)
        assert "archive move" in caught.value.hint
        if not pointer:
            assert [end[0][: 2 * len(s.ends.local)] for end, s in zip(criu.ends(), sockets, strict=True)] == [
                s.ends.local.hex() for s in sockets
            ]


def test_one_that_is_missing_or_there_twice() -> None:
    assert_refused([SIX, MAPPED])
    assert_refused([FOUR, SIX, MAPPED, FOUR])


def test_structs_that_do_not_match() -> None:
    assert_refused([FOUR._replace(ends=Ends(raw("10.0.0.7"), FOUR.ends.remote)), SIX, MAPPED])
    assert_refused([FOUR, SIX, MAPPED], count=2)


@pytest.mark.parametrize("where", ["nowhere", "start", "end", "top", "odd"])
def test_no_pointer_is_followed_out_of_the_memory_that_was_searched(where: str) -> None:
    spans = [m.span for m in read_mappings(os.getpid()) if m.name == "[stack]"]
    pointers = {"nowhere": 8, "start": 1 << 46, "end": spans[0].end - 4, "top": (1 << 64) - 4, "odd": (1 << 40) + 2}
    assert_refused([FOUR, SIX, MAPPED], pointer=pointers[where])


def test_a_process_that_is_gone_or_another_one() -> None:
    with fake_criu([FOUR]) as criu:
        later = Process(criu.process.pid, criu.process.start_ticks + 1)
        with pytest.raises(UnsupportedError, match="CRIU has ended"):
            patch_sockets(later, MOVES[:1])
        gone = criu.process
    with pytest.raises(UnsupportedError, match="CRIU's memory cannot be written"):
        patch_sockets(gone, MOVES[:1])
    assert patch_sockets(gone, []) == 0


def test_ten_thousand_take_one_pass() -> None:
    """The time is a bound that a search for each would miss by far."""
    sockets = [
        make_socket(number % 5000, "10.0.0.1", "10.0.0.2", id=number, inode=number) for number in range(1, 10_001)
    ]
    moves = [Move(sock, Ends(raw("10.9.0.1"), raw("10.9.0.2"))) for sock in sockets]
    with fake_criu(sockets) as criu:
        began = time.process_time()
        patch_sockets(criu.process, moves)
        took_s = time.process_time() - began
        assert {end[0][:8] for end in criu.ends()} == {raw("10.9.0.1").hex()}
    assert took_s < 5
