"""An agent that stops CRIU (SIGSTOP), once, at the end of a stage.

stopping_agent.py STAGE
"""

import os
import signal
import sys

from integration import patient_agent
from ocihook import wire
from ocihook.agent.session import Session

_handle = Session.handle


def handle_and_stop(self: Session, request: wire.Request) -> tuple[int, str]:
    is_first = self.journal.verdict_of(request.stage) is None  # CRIU <= 4.1.1 calls each stage twice
    verdict = _handle(self, request)
    if is_first and request.stage == sys.argv[1]:
        os.kill(request.criu_pid, signal.SIGSTOP)
    return verdict


Session.handle = handle_and_stop  # type: ignore[method-assign]
patient_agent.main()
