"""An agent that stops in the middle of the long work of one stage, once, until it may continue, or the act is over.

holding_agent.py STAGE
"""

import sys
import time
from pathlib import Path

from integration import patient_agent
from ocihook import wire
from ocihook.session.participant import Act

STAGE = sys.argv[1]
HELD, GO = Path(wire.RUNTIME_DIR) / "held", Path(wire.RUNTIME_DIR) / "go"

_progress = Act.progress


def hold_and_go_on(act: Act, done_bytes: int) -> None:
    if act.journal.stage == STAGE and not HELD.exists():
        HELD.touch()
        while not GO.exists():
            act.patience.check()
            time.sleep(0.01)
    _progress(act, done_bytes)


Act.progress = hold_and_go_on  # type: ignore[method-assign, assignment]
patient_agent.main()
