"""A member of a gang in its dump or restore: it joins, meets the others, votes, and leaves if it fails."""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ocihook.errors import GangError, OcihookError, plain, printable
from ocihook.gang.link import Line, Link, unreachable
from ocihook.gang.protocol import CHOICE, Answer, Join, Phase, State
from ocihook.linux.patience import Patience
from ocihook.model import GangRef
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.record import from_json, to_json

_RETRY_S = 0.1  # between attempts to reach a coordinator
_CALL_AFTER_S = 2.0  # within which others come by themselves
_LEAVE_S = 5.0  # to report to a coordinator that a member has left; else the others time out
# For what takes as long as a member has memory; less than TCP waits for an answer (tcp_retries2, some 15 minutes).
_WORK_LIMIT_S = 500.0
_AT_WORK = (Phase.DRAINED, Phase.HELD, Phase.DUMPED, Phase.RESTORED)  # reached after such work
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GangFacts(Facts):
    """The gang that the container is a member of, and the attempt that it takes part in."""

    gang_ref: GangRef | None = None
    gang_epoch: int = 0


@dataclass(kw_only=True)
class GangJoined(Effect, kind="gang-joined"):
    """The container takes part in a dump or restore of its gang; the others wait for it."""

    holds_container = False

    gang: GangRef
    link: Link
    session: str
    epoch: int = 0  # 0: it was about to join
    attempt: str = ""  # its id
    timeout_s: float = 60.0

    @cached_property
    def line(self) -> Line:
        """Its connection, as long as the process lasts."""
        return Line(self.link)

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Leave: the attempt is over for all, unless all have reached its end."""
        reason = "its dump or restore has failed"
        verdict = journal.verdict_of(journal.stage) if journal.stage else None
        if verdict is not None and verdict[0] != 0:
            reason = verdict[1]
        with_reason = {"verb": "leave", "reason": journal.to_json().get("error") or reason}
        try:
            self.ask(with_reason, Patience(), _LEAVE_S)
        except (OcihookError, OSError) as error:  # the others wait in vain, up to their limit
            log.warning(
                "container %s: that it has left gang %s could not be reported: %s",
                journal.container,
                self.gang,
                plain(error),
            )

    def ask(self, request: Mapping[str, Any], patience: Patience, timeout_s: float) -> Answer:
        """Ask the coordinator as this member, until it can be reached, or for so long.

        Raises:
            GangError: if it cannot be reached, or refuses.
            GivenUp: as soon as nobody waits for it any more.
        """
        who = {
            "namespace": self.gang.namespace,
            "gang": self.gang.name,
            "member": self.gang.member,
            "session": self.session,
            "epoch": self.epoch,
        }
        limit = patience.within(timeout_s)
        while True:
            try:
                answer = self.line.ask({**who, "wait_s": limit.left_s, **request}, patience)
                return _read_answer(answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise GangError(f"{self.link} gave a malformed answer: {error!r}") from error
            except OSError as error:
                if limit.is_over:
                    raise unreachable(self.link, error) from error
            limit.sleep(_RETRY_S)

    def wait(self, request: Mapping[str, Any], phase: str, patience: Patience, *, calls: bool = False) -> Answer:
        """Ask until the answer is not to wait; if that takes too long, end the attempt.

        Args:
            request: what is asked.
            phase: that it waits for.
            patience: with whoever waits for it.
            calls: call those that are missing, after a while.

        Raises:
            GangError: if the attempt is over.
            GivenUp: as soon as nobody waits for it any more.
        """
        limit_s = max(self.timeout_s, _WORK_LIMIT_S) if phase in _AT_WORK else self.timeout_s
        limit = patience.within(limit_s)
        first = {"wait_s": limit.within(_CALL_AFTER_S).left_s} if calls else {}
        answer = self.ask({**request, **first}, patience, limit.left_s)
        while True:
            if answer.state is State.WAIT and limit.is_over:  # all may arrive at this very moment
                reason = f"within {limit_s:g} s" + ("" if phase in _AT_WORK else " (gang_timeout_s)")
                answer = self.ask({"verb": "leave", "reason": reason, "waited_for": phase}, Patience(), _LEAVE_S)
            if answer.state is State.OVER:
                raise GangError(
                    f"gang {self.gang}: attempt {self.epoch} is over for all members: {answer.reason}",
                    hint="all of them are as they were before it",
                )
            if answer.state is not State.WAIT:
                return answer
            answer = self.ask({**request, "calls": calls}, patience, limit.left_s)

    def enter(self, act: str, patience: Patience, called: str = "") -> None:
        """Join an attempt: the one that the member was called to, or whichever is open.

        Raises:
            GangError: if it cannot be joined, or there is no coordinator.
            GivenUp: as soon as nobody waits for it any more.
        """
        wanted = to_json(Join(act, self.gang.size, self.gang.epoch, self.gang.attempt))
        answer = self.ask({"verb": "join", "join": wanted, "called": called}, patience, self.timeout_s)
        if answer.state is not State.MET:
            raise GangError(f"gang {self.gang}: {answer.reason}")
        self.epoch, self.attempt = answer.epoch, answer.attempt


def _read_answer(answer: Mapping[str, Any]) -> Answer:
    """Read what a coordinator says; what it leaves out has its default."""
    given = {**Answer._field_defaults, **answer, "state": State(answer["state"])}
    read = from_json(Answer, [given[name] for name in Answer._fields])
    return read._replace(reason=printable(read.reason))


class Attendance:
    """A container's part in an attempt of its gang, as participants use it (session/participant.py)."""

    def __init__(self, journal: Journal, patience: Patience, effect: GangJoined) -> None:
        self._journal, self._patience, self._effect = journal, patience, effect
        self.ref = effect.gang
        self.here = 0  # members of this node, once all have met

    @property
    def epoch(self) -> int:
        """The number of the attempt."""
        return self._effect.epoch

    @property
    def attempt(self) -> str:
        """The id of the attempt."""
        return self._effect.attempt

    def meet(
        self, phase: str, message: object = None, about: Collection[str] = (), *, calls: bool = False
    ) -> Mapping[str, str]:
        """Reach a phase, and wait until all members have; return what they have published under the keys of `about`.

        Args:
            phase: that is reached.
            message: what it publishes.
            about: keys of what it wants to know.
            calls: call those that have not joined after a while.

        Raises:
            GangError: if the attempt is over.
            GivenUp: as soon as nobody waits for it any more.
        """
        request = {"verb": "meet", "phase": phase, "message": to_json(message), "about": list(about)}
        with self._journal.phase(f"gang {phase}"):
            answer = self._effect.wait(request, phase, self._patience, calls=calls)
        self.here = answer.here
        return answer.told

    def agree(self, attempt: int, *, is_locked: bool) -> bool:
        """Vote on whether all members are locked; return whether they are. Else all try again, at the same moment.

        Raises:
            GangError: if the attempt is over.
            GivenUp: as soon as nobody waits for it any more.
        """
        request = {"verb": "vote", "ballot": attempt, "is_locked": is_locked}
        return self._effect.wait(request, Phase.LOCKED, self._patience).state is State.MET

    def end(self) -> None:
        """Stop taking part: all have reached the end, and nobody waits."""
        self._effect.line.close()
        self._journal.forget(self._effect)


def join(
    journal: Journal, patience: Patience, gang: GangRef, act: str, *, link: Link, timeout_s: float, called: str = ""
) -> Attendance:
    """Take part in an attempt of the container's gang: in the one that it was called to, or in whichever is open.

    Raises:
        GangError: if the container cannot join it, or there is no coordinator.
        GivenUp: as soon as nobody waits for it any more.
    """
    session = _session(journal.session_id)
    effect = journal.add(GangJoined(gang=gang, link=link, session=session, timeout_s=timeout_s))
    effect.enter(act, patience, called)
    journal.note(GangFacts(gang_ref=gang, gang_epoch=effect.epoch))
    return Attendance(journal, patience, effect)


def choose_dump(gang: GangRef, dumps: Sequence[str], patience: Patience, *, link: Link, timeout_s: float) -> str:
    """Return which dump of a gang its members are restored from: the last that all of them have; "" if there is none.

    Args:
        gang: with the member that asks.
        dumps: that it has, the oldest first, as GangNote names them. Without any it waits for nobody.
        patience: with whoever waits for it.
        link: to the coordinator.
        timeout_s: for all members to ask.

    Raises:
        GangError: if not all members ask in time, or there is no coordinator.
        GivenUp: as soon as nobody waits for it any more.
    """
    member = GangJoined(gang=gang, link=link, session=_session(secrets.token_hex(8)), timeout_s=timeout_s)
    member.enter("choose", patience)
    request = {"verb": "meet", "phase": Phase.CHOSEN, "message": list(dumps), "about": [CHOICE]}
    if not dumps:
        member.ask({**request, "wait_s": 0}, patience, timeout_s)
        return ""
    return member.wait(request, Phase.CHOSEN, patience).told.get(CHOICE, "")


def _session(name: str) -> str:
    return f"{_BOOT_ID.read_text().strip()}/{name}"


def find_attendance(journal: Journal, patience: Patience) -> Attendance | None:
    """Return the part that a container has in an attempt, since an earlier stage; None if it has none."""
    effect = journal.find(GangJoined)
    return None if effect is None else Attendance(journal, patience, effect)
