"""An agent that is killed, keeps a member waiting, or has it fail, at a meeting of a gang.

meeting_agent.py kill PHASE before|behind    killed, once, when a member is about to reach the phase, or all have
meeting_agent.py hold PHASE MEMBER           that member does not reach the phase before /run/ocihook/go is there, and
                                             makes /run/ocihook/held when it has nothing else left to do
meeting_agent.py deafen PHASE MEMBER         that member reaches the phase, and hears of no other before that
meeting_agent.py spoil PHASE MEMBER          that member's memory cannot be packed once all have reached the phase
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import NoReturn, TypeVar

from integration import patient_agent
from ocihook import wire
from ocihook.gang.membership import Attendance, Gather
from ocihook.gang.protocol import Phase
from ocihook.linux.patience import Patience
from ocihook.session.record import to_json
from ocihook.stages import page_images

WHAT, PHASE, WHEN = sys.argv[1:]
AGENT = os.getpid()  # sessions are processes of their own
GO, HELD, KILLED = (Path(wire.RUNTIME_DIR) / name for name in ("go", "held", "killed"))

_T = TypeVar("_T")

_meet, _agree = Attendance.meet, Attendance.agree


def _die() -> None:
    KILLED.touch()
    os.kill(AGENT, SIGKILL)
    while True:  # a session ends with its agent
        time.sleep(0.01)


def _spoil(*_: object, **_options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _wait(patience: Patience) -> None:
    while not GO.exists():
        patience.check()
        time.sleep(0.01)


def _attend(attendance: Attendance, phase: str, act: Callable[[], _T]) -> _T:
    is_it = phase == PHASE
    is_member = is_it and attendance.ref.member == WHEN
    if is_it and (WHAT, WHEN) == ("kill", "before"):
        _die()
    if is_member and WHAT == "hold":
        HELD.touch()
        _wait(attendance._patience)
    met = act()
    if is_it and (WHAT, WHEN) == ("kill", "behind"):
        _die()
    if is_member and WHAT == "spoil":
        page_images.pack_image_set = _spoil  # type: ignore[attr-defined]
    return met


def meet(
    self: Attendance,
    phase: str,
    message: object = None,
    about: Collection[str] = (),
    *,
    calls: bool = False,
    gather: Gather | None = None,
) -> Mapping[str, str]:
    if WHAT == "deafen" and (phase, self.ref.member) == (PHASE, WHEN):
        request = {"verb": "meet", "phase": phase, "message": to_json(message), "wait_s": 0}
        self._effect.ask(request, self._patience, self._effect.timeout_s)
        _wait(self._patience)
    return _attend(self, phase, partial(_meet, self, phase, message, about, calls=calls, gather=gather))


def agree(self: Attendance, attempt: int, *, is_locked: bool) -> bool:
    return _attend(self, Phase.LOCKED, partial(_agree, self, attempt, is_locked=is_locked))


Attendance.meet = meet  # type: ignore[method-assign]
Attendance.agree = agree  # type: ignore[method-assign]
patient_agent.main()
