"""Has threads wait on after a restore: CRIU ends a poll, nanosleep or futex that waits at a dump with EINTR.

Such a call the kernel resumes by itself (ERESTART_RESTARTBLOCK), so that without a signal handler no program ever sees
EINTR of it, and many take that for the end: `script` kills its shell. CRIU cannot set what the kernel resumes from, and
writes EINTR (compel/arch/x86/src/lib/infect.c). Here the images get what CRIU writes for all other calls: the thread is
before the call, and makes it again.
"""

from pathlib import Path

from google.protobuf.message import Message

from ocihook.criu.images import COMMON_MAGIC, messages, parse_processes, read_bounded
from ocihook.linux.files import replace_file

_CORE_MAGIC = 0x55053847  # criu/include/magic.h
_MAGICS = (COMMON_MAGIC, _CORE_MAGIC)
_KINDS = ("core_entry", "core_entry")
_EINTR = (1 << 64) - 4
_INSTRUCTION_BYTES = 2  # `syscall`
_NATIVE = 1  # of 64 bits; others have other numbers
# arch/x86/entry/syscalls/syscall_64.tbl: the calls that return ERESTART_RESTARTBLOCK and never EINTR itself
_POLL, _NANOSLEEP, _FUTEX, _CLOCK_NANOSLEEP = 7, 35, 202, 230
_RESUMED = {_POLL, _NANOSLEEP, _FUTEX, _CLOCK_NANOSLEEP}


def continue_waits(directory: Path) -> int:
    """Have the threads of an image set wait on; return how many.

    A poll or futex begins its time again. A sleep takes what was left, where the program asked for that; else all.

    Raises:
        ImageError: if an image is damaged.
        OSError: from the file system.
    """
    continued = 0
    for process in parse_processes((directory / "pstree.img").read_bytes()):
        cores = {tid: core for tid in process.tids if (core := _read(directory / _name(tid)))}
        for_all = _pending(cores[process.pid].tc.signals_s) if process.pid in cores else set()  # type: ignore[attr-defined]
        for tid, core in cores.items():
            if _continue(core, for_all):
                _write(directory / _name(tid), core)
                continued += 1
    return continued


def _name(tid: int) -> str:
    return f"core-{tid}.img"


def _read(path: Path) -> Message | None:
    """Return what the image has of a thread; None if it has no image, as a child that has ended."""
    if not path.exists():
        return None
    return next(messages(read_bounded(path), path.name, _MAGICS, _KINDS), None)


def _write(path: Path, core: Message) -> None:
    body = core.SerializeToString()
    head = b"".join(number.to_bytes(4, "little") for number in (*_MAGICS, len(body)))
    replace_file(path, head + body, mode=path.stat().st_mode & 0o777, durable=False)


def _continue(core: Message, for_all: set[int]) -> bool:
    """Put a thread before the call that it was interrupted in; return whether it was, and no signal is to end it."""
    registers = core.thread_info.gpregs  # type: ignore[attr-defined]
    call = registers.orig_ax
    if registers.mode != _NATIVE or registers.ax != _EINTR or call not in _RESUMED or _is_signalled(core, for_all):
        return False
    if call == _NANOSLEEP and registers.si:  # the kernel wrote there what was left
        registers.di = registers.si
    if call == _CLOCK_NANOSLEEP and registers.r10:
        registers.dx = registers.r10
    registers.ax = call
    registers.ip -= _INSTRUCTION_BYTES
    return True


def _is_signalled(core: Message, for_all: set[int]) -> bool:
    """Return whether a signal that is not blocked is pending; for_all: those of its process."""
    own = core.thread_core  # type: ignore[attr-defined]
    blocked = core.tc.blk_sigset if core.HasField("tc") else own.blk_sigset  # type: ignore[attr-defined]
    return any(not blocked >> number - 1 & 1 for number in for_all | _pending(own.signals_p))


def _pending(queue: Message) -> set[int]:
    """Return the numbers of signals: what a siginfo_t begins with."""
    return {int.from_bytes(one.siginfo[:4], "little") for one in queue.signals}  # type: ignore[attr-defined]
