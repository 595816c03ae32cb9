"""Whether this kernel marks the pages that a process writes to (soft-dirty bits): found by a test, never by version.

Many kernels are built without them, and those of arm64 do not have them. Such a kernel still accepts a 4 in clear_refs
and does nothing (seen with 6.18): so a write that succeeds proves nothing, only the bits themselves do; and whoever has
to believe in them without having them, as a test does, needs no more than the note.

The result is noted, as CRIU notes what it knows of the kernel in criu.kdat: the kernel is asked once per boot.
"""

import contextlib
import ctypes
import json
import mmap
import os
import re
from pathlib import Path

from ocihook import wire
from ocihook.linux.files import replace_file
from ocihook.linux.patience import Patience
from ocihook.linux.workers import call_each

NOTE_NAME = "soft-dirty.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLEAR = b"4\n"  # proc_pid_clear_refs(5)
_BIT = 1 << 55  # of an entry of proc_pid_pagemap(5)
_ENTRY_BYTES = 8
_TEST_S = 10.0  # it takes a millisecond
# The bits of a mapping are those of all mappings that it was merged from, since Linux 6.19 and 6.18.37 ("mm: propagate
# VM_SOFTDIRTY on merge", commit bf14d4a05387): before, what is mapped anew may seem clean.
KEPT_SINCE = (6, 18, 37)


def works(runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> bool:
    """Return whether soft-dirty bits can be relied on; False also if that cannot be found out."""
    noted = _noted(runtime_dir)
    if noted is not None:
        return noted
    found = measure()
    if found is not None:
        with contextlib.suppress(OSError):  # not root, or there is no directory yet: it is asked again
            note(runtime_dir, works=found)
    return bool(found)


def measure() -> bool | None:
    """Return what this kernel shows, whatever is noted; None if it cannot be found out."""
    try:
        [outcome] = call_each(_marks_what_is_written, [mmap.PAGESIZE], Patience(timeout_s=_TEST_S))
    except OSError:  # no process, no descriptor
        return None
    return outcome if isinstance(outcome, bool) else None


def outlive_merging() -> bool:
    """Return whether the bits of a process can be relied on that runs, maps and unmaps meanwhile: by version."""
    numbers = re.findall(r"[0-9]+", os.uname().release.partition("-")[0])
    return tuple(map(int, numbers[:3])) >= KEPT_SINCE


def clear(pid: int) -> None:
    """Clear the bits of a process.

    Raises:
        OSError: if the kernel refuses that, or the process is gone.
    """
    Path(f"/proc/{pid}/clear_refs").write_bytes(_CLEAR)


def note(runtime_dir: Path, *, works: bool) -> None:
    """Note a result for this boot and kernel.

    Raises:
        OSError: from the file system.
    """
    value = {**_kernel(), "works": works}
    replace_file(runtime_dir / NOTE_NAME, json.dumps(value).encode(), mode=0o600, durable=False)


def _noted(runtime_dir: Path) -> bool | None:
    """Return what was noted on this boot; None if nothing was."""
    try:
        value = json.loads((runtime_dir / NOTE_NAME).read_bytes())
        found = value.pop("works")
        return found if isinstance(found, bool) and value == _kernel() else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _kernel() -> dict[str, str]:
    return {"boot_id": _BOOT_ID.read_text().strip(), "kernel": os.uname().release}


def _marks_what_is_written(page_bytes: int) -> bool:
    """Return whether of two pages, once cleared, exactly the one is marked that is written to.

    In a process of its own, since what is cleared are the bits of all its memory.
    """
    with mmap.mmap(-1, 2 * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages[0] = pages[page_bytes] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        before = _marks(address, page_bytes)
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(_CLEAR)
        cleared = _marks(address, page_bytes)
        pages[0] = 2
        return (before, cleared, _marks(address, page_bytes)) == ([True, True], [False, False], [True, False])


def _marks(address: int, page_bytes: int) -> list[bool]:
    """Return for each of two pages of this process whether it is marked."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        data = os.pread(file.fileno(), 2 * _ENTRY_BYTES, address // page_bytes * _ENTRY_BYTES)
    return [bool(int.from_bytes(data[at : at + _ENTRY_BYTES], "little") & _BIT) for at in (0, _ENTRY_BYTES)]
