"""An agent that kills CRIU, or the runtime that called it, in the middle of the long work of one stage, once.

killing_agent.py STAGE [runtime]
"""

import sys
import time
from pathlib import Path
from signal import SIGKILL

from integration import patient_agent
from ocihook import wire
from ocihook.session.participant import Act

STAGE = sys.argv[1]
MARK = Path(wire.RUNTIME_DIR) / "killed"  # sessions are processes of their own


_progress = Act.progress


def kill_and_go_on(act: Act, done_bytes: int) -> None:
    journal = act.journal
    if journal.stage == STAGE and not MARK.exists():
        MARK.touch()
        victim = journal.runtime if "runtime" in sys.argv else journal.criu
        assert victim is not None
        victim.send(SIGKILL)
        while victim.is_alive():
            time.sleep(0.001)
    _progress(act, done_bytes)


Act.progress = kill_and_go_on  # type: ignore[method-assign, assignment]
patient_agent.main()
