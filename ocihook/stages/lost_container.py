"""Ends a CRIU that does not notice that the container it dumps was killed: it would wait for it for ever.

The first process of a PID namespace ends once all others are waited for, and only CRIU can wait for those that it
traces. CRIU, in turn, waits for the first process alone while that makes a call for it. So neither ends, nor the engine
(seen with CRIU 4.1.1, when the kernel ended a container at its memory limit as CRIU put its parasite there).

The same happens to a restore that fails when CRIU traces the processes that it has made, as for capabilities: it kills
the first one and waits for that alone (criu/cr-restore.c, restore_root_task; 4.1.1 and 4.2).
"""

import signal
import time

from ocihook.criu.explain import Explanation, container_killed
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts
from ocihook.stages.detached import is_kept_from_end

_NOTICES_S = 10.0  # it does so at once, or never


class FailedRestore:
    """Ends a CRIU whose restore has failed and that does not end: by then nothing of it is of use."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._since_s = 0.0  # when CRIU was first seen to have failed, by the monotonic clock; 0: it has not been

    def may_be(self) -> bool:
        """Return whether it could happen now: CRIU restores."""
        return self._journal.verdict_of("pre-restore") is not None

    def end_criu(self) -> None:
        """Kill CRIU if it has had time to end; it has failed."""
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if now_s - self._since_s >= _NOTICES_S:
            self._journal.criu.send(signal.SIGKILL)


class LostContainer:
    """Looks whether CRIU holds a container that was killed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._since_s = 0.0  # when it was first seen to end, by the monotonic clock; 0: it has not been

    def may_be(self) -> bool:
        """Return whether it could happen now: CRIU is at work on a container whose end is not its own doing."""
        journal, call = self._journal, self._journal.facts(CallFacts)
        verdict = journal.verdict_of("post-dump")
        is_dumped = verdict is not None and verdict[0] == 0
        is_at_work = call.leave_running and not is_kept_from_end(journal) if is_dumped else True
        return call.init is not None and is_at_work

    def end_criu(self) -> Explanation | None:
        """Kill CRIU if its container was, and it has had time to notice; return why, None if there is no reason."""
        init = self._journal.facts(CallFacts).init
        if init is None or not init.is_ending():
            self._since_s = 0.0
            return None
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if now_s - self._since_s < _NOTICES_S or not self._journal.criu.send(signal.SIGKILL):
            return None
        return container_killed(init.pid)
