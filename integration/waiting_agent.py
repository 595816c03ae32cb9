"""An agent that packs until CRIU is gone: longer than any hook waits."""

import time

from integration import patient_agent
from ocihook.session.participant import Act

_progress = Act.progress


def wait_and_check(act: Act, done_bytes: int) -> None:
    while act.journal.criu.is_alive():
        time.sleep(0.01)
    _progress(act, done_bytes)


Act.progress = wait_and_check  # type: ignore[method-assign, assignment]
patient_agent.main()
