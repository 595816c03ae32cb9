"""An agent that stops in the middle of the long work of one stage, once, until it may continue, or the act is over.

holding_agent.py STAGE [stop]

Where a snapshot is taken that is in `detached` when all stand still and are forked; in `snapshot`, before any is read.
With `stop` its engine is stopped (SIGSTOP) when they are forked: else it may have ended before `snapshot`.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration import patient_agent
from ocihook import wire
from ocihook.linux.procfs import parent_pid
from ocihook.memory import snapshot
from ocihook.session.participant import Act

STAGE = sys.argv[1]
HELD, GO = Path(wire.RUNTIME_DIR) / "held", Path(wire.RUNTIME_DIR) / "go"

_progress = Act.progress
_fork_all, _read = snapshot._fork_all, snapshot.Snapshot.read


def _hold(check: Callable[[], object] = lambda: None) -> None:
    if not HELD.exists():
        HELD.touch()
        while not GO.exists():
            check()
            time.sleep(0.01)


def hold_and_go_on(act: Act, done_bytes: int) -> None:
    if act.journal.stage == STAGE:
        _hold(act.patience.check)
    _progress(act, done_bytes)


def fork_and_hold(instructions: Any, hold: Any, effect: Any, journal: Any) -> Any:  # noqa: ANN401 - as the real one
    forks = _fork_all(instructions, hold, effect, journal)
    if "stop" in sys.argv:
        os.kill(parent_pid(parent_pid(journal.criu.pid)), signal.SIGSTOP)
    if STAGE == wire.DETACHED_STAGE:
        _hold()
    return forks


def hold_and_read(self: snapshot.Snapshot, *arguments: Any) -> snapshot.Copied:  # noqa: ANN401 - likewise
    if STAGE == wire.SNAPSHOT_STAGE:
        _hold()
    return _read(self, *arguments)


Act.progress = hold_and_go_on  # type: ignore[method-assign, assignment]
snapshot._fork_all = fork_and_hold
snapshot.Snapshot.read = hold_and_read  # type: ignore[method-assign, assignment]
patient_agent.main()
