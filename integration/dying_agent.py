"""An agent that is killed, with all its processes, right before or after its n-th write to a journal.

    dying_agent.py N before|after

A counter in the runtime directory counts writes across all sessions of this agent.
"""

import os
import signal
import sys
import time
from pathlib import Path

from ocihook import wire
from ocihook.agent import server
from ocihook.session.journal import Journal

FATAL_WRITE, WHEN = int(sys.argv[1]), sys.argv[2]
COUNTER = Path(wire.RUNTIME_DIR) / "writes"
MAIN_PID = os.getpid()
_save = Journal.save


def dying_write(journal: Journal) -> None:
    number = (int(COUNTER.read_text()) if COUNTER.exists() else 0) + 1
    COUNTER.write_text(str(number))
    if number == FATAL_WRITE and WHEN == "before":
        die()
    _save(journal)
    if number == FATAL_WRITE and WHEN == "after":
        die()


def die() -> None:
    os.kill(MAIN_PID, signal.SIGKILL)
    time.sleep(60)  # a session dies with the agent


Journal.save = dying_write  # type: ignore[method-assign, assignment]
server.main()
