"""Lets one dump of a container run at a time: its gang or a stop may ask for one while its engine's is under way.

Engines serve their own calls one after another. containerd still fails one of two checkpoints by its CRI at once: it
makes both archives in one directory, which each call empties before the runtime is called.
"""

from collections.abc import Iterator

from ocihook.container.runtime_call import find_runtime_call
from ocihook.errors import IdentificationError, UnsupportedError
from ocihook.session.journal import Journal, other_journals
from ocihook.session.participant import Dump, Participant
from ocihook.stages.stopped import is_stopped


class OneAtATime(Participant):
    """Refuses the later one of two dumps; that of a container which is being stopped waits for the earlier one."""

    def refuse(self, dump: Dump) -> None:
        """Refuse the dump, or wait, while an earlier one of the same container is under way.

        Raises:
            UnsupportedError: if an engine asks for a second checkpoint.
            GivenUp: if the caller does not wait any longer.
        """
        if is_stopped(dump):
            dump.patience.until(lambda: not any(_earlier(dump)))
            return
        for journal in _earlier(dump):
            raise UnsupportedError(
                f"another checkpoint of this container is under way (session {journal.session_id})",
                hint="try again once it has ended: `ocihook ps`",
            )


def _earlier(dump: Dump) -> Iterator[Journal]:
    """Yield the sessions of earlier dumps of the container whose CRIU has not ended."""
    mine = dump.journal.criu
    for journal in other_journals(dump.journal):
        theirs = journal.criu
        is_earlier = (theirs.start_ticks, theirs.pid) < (mine.start_ticks, mine.pid)
        if is_earlier and theirs.is_alive() and _dumps(theirs.pid) == dump.container.id:
            yield journal


def _dumps(criu_pid: int) -> str:
    """Return the container that a CRIU dumps, "" if it dumps none: its session may not have noted that yet."""
    try:
        call = find_runtime_call(criu_pid)
    except (IdentificationError, OSError):  # it has just ended
        return ""
    return call.container_id if call is not None and call.verb == "checkpoint" else ""
