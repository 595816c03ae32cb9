"""An agent that kills CRIU in the middle of the long work of one stage, once.

killing_agent.py STAGE
"""

import sys
import time
from pathlib import Path
from signal import SIGKILL

from ocihook import wire
from ocihook.agent import server
from ocihook.ops import dump, restore
from ocihook.ops.dump import while_criu_lives
from ocihook.ops.journal import Journal
from ocihook.store.packing import Progress

STAGE = sys.argv[1]
MARK = Path(wire.RUNTIME_DIR) / "killed"  # sessions are processes of their own


def while_it_is_killed(journal: Journal) -> Progress:
    check = while_criu_lives(journal)

    def kill_and_check(done: int) -> None:
        if journal.stage == STAGE and not MARK.exists():
            MARK.touch()
            journal.criu.send(SIGKILL)
            while journal.criu.is_alive():
                time.sleep(0.001)
        check(done)

    return kill_and_check


dump.while_criu_lives = while_it_is_killed
restore.while_criu_lives = while_it_is_killed  # type: ignore[attr-defined]
server.main()
