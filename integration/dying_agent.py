"""An agent that is killed, with all its processes, right before its n-th step.

    dying_agent.py N

A step is whatever changes something (steps.py); a log in the runtime directory counts them across all sessions.
"""

import sys
from pathlib import Path

from integration import patient_agent
from integration.steps import Steps
from ocihook import wire

LOG = Path(wire.RUNTIME_DIR) / "steps"

if __name__ == "__main__":
    Path(wire.RUNTIME_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
    Steps(LOG, last=int(sys.argv[1]))
    patient_agent.main()
