"""The frame from which a thread restores itself, field by field; that it does, test_ptrace.py shows."""

import struct

import pytest

from ocihook.linux.sigframe import build_frame

AVX_512, AMX = 0xE7 | 1 << 9, 3 << 17
SMALL, LARGE = 2816, 2816 + 8192  # bytes of the state without and with AMX's tiles
STACK = 0x7FFE12345678


def registers(code_segment: int = 0x33) -> list[int]:
    """Return all registers, each with a value of its own."""
    values = [0x1000 + number for number in range(27)]
    values[17], values[19], values[20] = code_segment, STACK, 0x2B
    return values


def state(features: int, in_use: int, size: int) -> bytes:
    """Return extended state as ptrace gives it."""
    data = bytearray(index % 251 for index in range(size))
    struct.pack_into("<QQ", data, 464, features, 0)
    struct.pack_into("<Q", data, 512, in_use)
    return bytes(data)


@pytest.mark.parametrize(
    ("features", "in_use", "size", "kept"),
    [
        (AVX_512, 3, SMALL, SMALL),
        (AVX_512 | AMX, AVX_512, LARGE, SMALL),  # the kernel takes tiles of those alone who have asked for them
        (AVX_512 | AMX, AVX_512 | AMX, LARGE, LARGE),
    ],
)
def test_frame(features: int, in_use: int, size: int, kept: int) -> None:
    values, floating = registers(), state(features, in_use, size)
    frame = build_frame(values, 0xABCD, floating, 0x7F0000000123)
    assert frame is not None
    assert frame.address + len(frame.data) <= STACK - 128, "the red zone is the thread's"
    assert frame.address % 16 == 8
    assert struct.unpack_from("<Q", frame.data) == (0x7F0000000123,)
    general = struct.unpack_from("<18Q", frame.data, 48)
    r8_to_15, rdi_rsi, rbp_rbx = (9, 8, 7, 6, 3, 2, 1, 0), (14, 13), (4, 5)
    assert general == tuple(values[at] for at in (*r8_to_15, *rdi_rsi, *rbp_rbx, 12, 10, 11, 19, 16, 18))
    assert struct.unpack_from("<4H", frame.data, 192) == (0x33, 0, 0, 0x2B)
    (floating_at,) = struct.unpack_from("<Q", frame.data, 232)
    assert floating_at % 64 == 0
    assert struct.unpack_from("<Q", frame.data, 304) == (0xABCD,)
    found = frame.data[floating_at - frame.address :]
    tiles = 1 << 18 if kept < size else 0
    assert struct.unpack_from("<IIQI", found, 464) == (0x46505853, kept + 4, features & ~tiles, kept)
    assert found[:464] + found[512:] == floating[:464] + floating[512:kept] + struct.pack("<I", 0x46505845)


@pytest.mark.parametrize(("code_segment", "size"), [(0x23, SMALL), (0x33, 512), (0x33, 0)])
def test_what_cannot_be_restored_has_none(code_segment: int, size: int) -> None:
    floating = state(AVX_512, 3, SMALL)[:size]
    assert build_frame(registers(code_segment), 0, floating, 1) is None
