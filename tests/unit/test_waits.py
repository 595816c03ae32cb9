"""Threads that a dump interrupts in a call wait on after the restore, in the images."""

import struct
from pathlib import Path
from typing import Any

import pytest

from ocihook.criu.proto import message_class
from ocihook.criu.waits import continue_waits
from tests.fakes.images import make_image_set

EINTR = (1 << 64) - 4
POLL, SELECT, NANOSLEEP, FUTEX, CLOCK_NANOSLEEP, EPOLL_WAIT = 7, 23, 35, 202, 230, 232
AFTER = {"ip": 0x1002, "ax": EINTR, "di": 1, "si": 2, "dx": 3, "r10": 4}
SIGTERM = {"signals": [{"siginfo": struct.pack("<i", 15) + bytes(124)}]}
HEAD = struct.pack("<II", 0x54564319, 0x55053847)


def write_core(directory: Path, tid: int, registers: dict[str, int], **fields: Any) -> None:
    """Write a thread's image, with a field that ocihook does not know."""
    core = message_class("core_entry")(thread_info={"gpregs": {**AFTER, **registers}}, **fields)
    data = core.SerializeToString() + b"\x08\x01"  # mtype: X86_64
    (directory / f"core-{tid}.img").write_bytes(HEAD + struct.pack("<I", len(data)) + data)


def read_core(directory: Path, tid: int) -> tuple[Any, bytes]:
    """Return the registers and all of a thread's image."""
    data = (directory / f"core-{tid}.img").read_bytes()
    core: Any = message_class("core_entry").FromString(data[12:])
    return core.thread_info.gpregs, data


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An image set of one process."""
    make_image_set(tmp_path / "images", {7: b""})
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (POLL, {}),
        (FUTEX, {}),
        (NANOSLEEP, {"di": 2}),
        (CLOCK_NANOSLEEP, {"dx": 4}),
    ],
)
def test_a_call_is_made_again(images: Path, call: int, changed: dict[str, int]) -> None:
    """A sleep takes what the kernel has written as left."""
    write_core(images, 7, {"orig_ax": call})
    assert continue_waits(images) == 1
    registers, data = read_core(images, 7)
    wanted = AFTER | {"ip": 0x1000, "ax": call} | changed
    assert {name: getattr(registers, name) for name in AFTER} == wanted
    assert b"\x08\x01" in data[12:], "what is not known stays"


@pytest.mark.parametrize(
    ("registers", "fields"),
    [
        ({"orig_ax": EPOLL_WAIT}, {}),  # the kernel itself ends it with EINTR
        ({"orig_ax": POLL, "mode": 2}, {}),  # of 32 bits: another call
        ({"orig_ax": POLL, "ax": 0}, {}),
        ({"orig_ax": SELECT, "ax": SELECT}, {}),
        ({"orig_ax": POLL}, {"tc": {"blk_sigset": 0, "signals_s": SIGTERM}}),
        ({"orig_ax": POLL}, {"tc": {"blk_sigset": 0}, "thread_core": {"signals_p": SIGTERM}}),
    ],
)
def test_nothing_else_is_changed(images: Path, registers: dict[str, int], fields: dict[str, Any]) -> None:
    write_core(images, 7, registers, **fields)
    before = read_core(images, 7)[1]
    assert continue_waits(images) == 0
    assert read_core(images, 7)[1] == before


def test_a_blocked_signal_ends_no_call(images: Path) -> None:
    write_core(images, 7, {"orig_ax": POLL}, tc={"blk_sigset": 1 << 14, "signals_s": SIGTERM})
    assert continue_waits(images) == 1


def test_of_a_sleep_nothing_is_known_where_the_program_did_not_ask(images: Path) -> None:
    write_core(images, 7, {"orig_ax": NANOSLEEP, "si": 0})
    assert continue_waits(images) == 1
    assert read_core(images, 7)[0].di == 1


def test_a_thread_blocks_signals_of_its_own(images: Path) -> None:
    """A signal for the process ends the calls of the threads that do not block it."""
    pstree = message_class("pstree_entry")(pid=7, ppid=0, pgid=7, sid=7, threads=[7, 8, 9]).SerializeToString()
    head = struct.pack("<III", 0x54564319, 0x50273030, len(pstree))
    (images / "pstree.img").write_bytes(head + pstree)
    write_core(images, 7, {"orig_ax": POLL}, tc={"blk_sigset": 1 << 14, "signals_s": SIGTERM})
    write_core(images, 8, {"orig_ax": POLL}, thread_core={"blk_sigset": 0})
    write_core(images, 9, {"orig_ax": POLL}, thread_core={"blk_sigset": 1 << 14})
    assert continue_waits(images) == 2
    assert [read_core(images, tid)[0].ax for tid in (7, 8, 9)] == [POLL, EINTR, POLL]


def test_an_ended_child_has_no_image(images: Path) -> None:
    (images / "core-7.img").unlink()
    assert continue_waits(images) == 0
