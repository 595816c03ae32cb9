"""An agent whose workers wait before they read a snapshot; that finds a full disk then, or no room for one before.

snapshot_agent.py [full | no-room]

It makes `held` in the runtime directory, and waits for `go`.
"""

import errno
import sys
import time
from pathlib import Path
from typing import Any

from integration import patient_agent
from ocihook import wire
from ocihook.memory import left_out, snapshot
from ocihook.packs.packing import pack
from ocihook.stages import awaited_memory

RUN = Path(wire.RUNTIME_DIR)
_read_into = snapshot._Pages.read_into


def _wait(self: snapshot._Pages, view: memoryview, offset: int) -> int:
    if self._notes >= 0:  # else all stands still
        (RUN / "held").touch()
        while not (RUN / "go").exists():
            time.sleep(0.01)
    return _read_into(self, view, offset)


def _fill(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - likewise
    pack(*arguments, **options)
    raise OSError(errno.ENOSPC, "No space left on device")


awaited_memory._WAIT_S = 1.0
snapshot._Pages.read_into = _wait  # type: ignore[method-assign]
if "full" in sys.argv:
    left_out.pack = _fill  # type: ignore[attr-defined, assignment]
if "no-room" in sys.argv:
    awaited_memory.lacking = lambda *_: "there is no room"  # type: ignore[attr-defined]
patient_agent.main()
