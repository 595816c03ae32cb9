"""Writes to a process's memory from without, as marked as what it writes itself: `python overwrite.py PID`."""

import os
import re
import sys
from pathlib import Path

_STEP = 1 << 20
_WORD = 8


def overwrite(pid: int) -> None:
    """Change a word in each MiB of the largest private mapping."""
    lines = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p ", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    start, end = max(((int(a, 16), int(b, 16)) for a, b in lines), key=lambda span: span[1] - span[0])
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for at in range(start, end, _STEP):
            os.pwrite(memory.fileno(), os.urandom(_WORD), at)


if __name__ == "__main__":
    overwrite(int(sys.argv[1]))
