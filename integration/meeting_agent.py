"""An agent that is killed, keeps a member waiting, or has it fail, at a meeting of a gang.

meeting_agent.py kill PHASE before|behind    killed, once, when a member is about to reach the phase, or all have
meeting_agent.py hold PHASE MEMBER           that member does not reach the phase before /run/ocihook/go is there
meeting_agent.py spoil PHASE MEMBER          that member's memory cannot be packed once all have reached the phase
"""

import errno
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from signal import SIGKILL
from typing import NoReturn

from integration import patient_agent
from ocihook import wire
from ocihook.gang.membership import Attendance
from ocihook.stages import page_images

WHAT, PHASE, WHEN = sys.argv[1:]
AGENT = os.getpid()  # sessions are processes of their own
GO, KILLED = Path(wire.RUNTIME_DIR) / "go", Path(wire.RUNTIME_DIR) / "killed"

_meet = Attendance.meet


def _die() -> None:
    KILLED.touch()
    os.kill(AGENT, SIGKILL)
    while True:  # a session ends with its agent
        time.sleep(0.01)


def _spoil(*_: object, **_options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def meet(
    self: Attendance, phase: str, message: object = None, about: Collection[str] = (), *, calls: bool = False
) -> Mapping[str, str]:
    is_it = phase == PHASE
    if is_it and (WHAT, WHEN) == ("kill", "before"):
        _die()
    while is_it and WHAT == "hold" and self.ref.member == WHEN and not GO.exists():
        self._patience.check()
        time.sleep(0.01)
    met = _meet(self, phase, message, about, calls=calls)
    if is_it and (WHAT, WHEN) == ("kill", "behind"):
        _die()
    if is_it and WHAT == "spoil" and self.ref.member == WHEN:
        page_images.pack_image_set = _spoil  # type: ignore[attr-defined]
    return met


Attendance.meet = meet  # type: ignore[method-assign]
patient_agent.main()
