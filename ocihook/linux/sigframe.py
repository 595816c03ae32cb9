"""The frame from which a thread restores itself: what the kernel puts on a stack for a signal handler.

A thread whose registers were changed makes one system call and returns into the code that every libc has at the end of
a handler. That calls rt_sigreturn(2), and the kernel takes all registers and the signal mask from the frame. No other
process is needed for it. The layout is that of x86-64, the only machine that this is written for.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

# What every libc returns to from a handler: mov $15, %rax (or %eax); syscall. 15 is rt_sigreturn.
RESTORERS = (b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05", b"\xb8\x0f\0\0\0\x0f\x05")
CALL_AND_RETURN = b"\x0f\x05\xc3"  # syscall; ret

# Indices into NT_PRSTATUS, arch/x86/include/asm/user_64.h.
STACK_POINTER, _CODE_SEGMENT, _FLAGS, _STACK_SEGMENT = 19, 17, 18, 20
_CODE_SEGMENT_64_BIT = 0x33
_RED_ZONE_BYTES = 128  # below the stack pointer: a function's own (System V ABI)

# struct rt_sigframe, arch/x86/include/uapi/asm/{ucontext,sigcontext}.h: where the handler returns to; flags and link;
# the alternate stack; r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags; segments, error, trap, mask, cr2;
# floating-point state; signal mask; siginfo, which nobody reads.
_FRAME = struct.Struct("<Q QQ QIxxxxQ 18Q 4H 4Q Q 64x Q 128x")
_IN_ORDER = (9, 8, 7, 6, 3, 2, 1, 0, 14, 13, 4, 5, 12, 10, 11, STACK_POINTER, 16, _FLAGS)
_UC_FLAGS = 7  # extended floating-point state; the stack segment is to be taken as it is
_KEEP_STACK = 3  # no valid mode of an alternate stack: the kernel leaves the present one as it is

# The extended state as ptrace(2) gives it and a frame has it, arch/x86/include/uapi/asm/sigcontext.h.
_FEATURES_AT, _SOFTWARE_AT, _IN_USE_AT = 464, 464, 512
_SOFTWARE = struct.Struct("<IIQI28x")  # magic, size with the second magic, features, size
_MAGIC, _MAGIC_AT_END = 0x46505853, 0x46505845
_LEAST_STATE_BYTES = 576
_TILES = 1 << 18  # Intel's AMX: at the end, and only in frames of processes that have requested it from the kernel
_TILES_BYTES = 8192


class Frame(NamedTuple):
    """A frame and where it must lie; the stack pointer is that address when the call is made."""

    address: int
    data: bytes


def build_frame(registers: Sequence[int], mask: int, state: bytes, restorer: int) -> Frame | None:
    """Build the frame that restores a thread's state, below what it has on its stack.

    Args:
        registers: to be restored, in the order of NT_PRSTATUS.
        mask: the thread's signal mask.
        state: its floating-point state, NT_X86_XSTATE.
        restorer: address of one of RESTORERS.

    Returns:
        None for a thread that no such frame restores: one of a 32-bit program, or without extended state.
    """
    if registers[_CODE_SEGMENT] != _CODE_SEGMENT_64_BIT or len(state) < _LEAST_STATE_BYTES:
        return None
    (features,) = struct.unpack_from("<Q", state, _FEATURES_AT)
    (in_use,) = struct.unpack_from("<Q", state, _IN_USE_AT)
    if features & _TILES and not in_use & _TILES:
        state, features = state[:-_TILES_BYTES], features & ~_TILES
    floating = bytearray(state + struct.pack("<I", _MAGIC_AT_END))
    _SOFTWARE.pack_into(floating, _SOFTWARE_AT, _MAGIC, len(floating), features, len(state))
    floating_at = (registers[STACK_POINTER] - _RED_ZONE_BYTES - len(floating)) & ~63  # as XRSTOR wants it
    address = ((floating_at - _FRAME.size) & ~15) - 8  # as if it had been called
    head = _FRAME.pack(
        *(restorer, _UC_FLAGS, 0, 0, _KEEP_STACK, 0),
        *(registers[index] for index in _IN_ORDER),
        *(registers[_CODE_SEGMENT], 0, 0, registers[_STACK_SEGMENT]),
        *(0, 0, 0, 0, floating_at, mask),
    )
    return Frame(address, head + bytes(floating_at - address - len(head)) + floating)
