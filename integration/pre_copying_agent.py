"""An agent on a kernel without soft-dirty bits: which pages are dirty it finds by comparing all of them.

    pre_copying_agent.py [FAULT | N]

changes: when memory of all processes has been read, the second is killed, and the third becomes another program
(mappings.c). full: the disk is, as soon as memory is read that all stand still for. dies: it is killed when memory has
been read. N: it is killed before its N-th step.
"""

import errno
import os
import sys
import time
from pathlib import Path
from signal import SIGKILL, SIGUSR2
from typing import Any

from xxhash import xxh3_64_intdigest

from integration import patient_agent
from integration.dying_agent import LOG
from integration.steps import Steps
from ocihook import wire
from ocihook.linux import page_moves, soft_dirty
from ocihook.linux.memory import ProcessMemory, Span
from ocihook.linux.page_scan import anonymous_bytes, scan_private
from ocihook.linux.procfs import Process, command_line
from ocihook.memory import clean_pages, pre_copy
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.packing import pack

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
AGENT = os.getpid()
_BATCH_BYTES = 1 << 20
_known: dict[int, dict[int, int]] = {}  # checksums of pages by address, by process


def _checksums(pid: int) -> dict[int, int]:
    process = Process.find(pid)
    assert process is not None
    memory, found = pre_copy._MovingMemory(process), {}
    buffer = bytearray(_BATCH_BYTES)
    for run in scan_private(pid):
        for start in range(run.start, run.end, _BATCH_BYTES):
            size = min(_BATCH_BYTES, run.end - start)
            view = memoryview(buffer)[:size]
            memory.read_into(view, start)
            for at in range(0, size, PAGE_BYTES):
                found[start + at] = xxh3_64_intdigest(view[at : at + PAGE_BYTES])
    return found


def _clear(pid: int) -> None:
    _known[pid] = _checksums(pid)


def _scan_dirty(pid: int) -> list[Span]:
    known = _known[pid]
    return [
        Span(address, address + PAGE_BYTES)
        for address, checksum in _checksums(pid).items()
        if known.get(address) != checksum
    ]


class _Uncounted:
    """Calls are counted only where the kernel can."""

    count = 0

    def __init__(self, process: Process) -> None:
        ProcessMemory(process)

    def close(self) -> None:
        """Nothing is held."""


def _change(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as the real one takes it
    packed = pack(*arguments, **options)
    killed, changed = list(_known)[1:3]
    others = [one for pid in (killed, changed) if (one := Process.find(pid))]
    others[0].send(SIGKILL)
    others[1].send(SIGUSR2)
    while others[0].is_alive() or "other" not in command_line(changed) or anonymous_bytes(changed) < 64 << 20:
        time.sleep(0.01)
    return packed


def _die(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - likewise
    pack(*arguments, **options)
    os.kill(AGENT, SIGKILL)
    time.sleep(3600)  # sessions end with it


def _fill(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - likewise
    packed = pack(*arguments, **options)
    if options.get("first"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return packed


FACTS: list[tuple[Any, str, Any]] = [
    (soft_dirty, "measure", lambda: True),
    (soft_dirty, "outlive_merging", lambda: True),
    (soft_dirty, "clear", _clear),
    (pre_copy, "scan_dirty", _scan_dirty),
]
if not page_moves.works():
    FACTS += [(page_moves, "works", lambda: True), (pre_copy, "MoveCounter", _Uncounted)]
FAULTS = {
    "changes": (pre_copy, "pack", _change),
    "dies": (pre_copy, "pack", _die),
    "full": (clean_pages, "pack", _fill),
}

if __name__ == "__main__":
    for fact in FACTS:
        setattr(*fact)
    if FAULT in FAULTS:
        setattr(*FAULTS[FAULT])
    if FAULT.isdigit():
        Path(wire.RUNTIME_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
        Steps(LOG, last=int(FAULT))
    patient_agent.main()
