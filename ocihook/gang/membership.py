"""A member of a gang in its dump or restore: it joins, meets the others, votes, and leaves if it fails."""

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import DumpUnderWay, GangError, MembersMissing, OcihookError, plain, printable
from ocihook.gang.link import Line, Link, unreachable
from ocihook.gang.protocol import CHOICE, Answer, Join, Phase, State
from ocihook.linux.patience import Patience
from ocihook.model import GangRef
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.record import from_json, to_json

_RETRY_S = 0.1  # between attempts to reach a coordinator
_CALL_AFTER_S = 2.0  # within which others come by themselves
_SETTLE_S = 1000.0  # for a dump that is under way: as long as a member at its work may be silent
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
    life: str = ""  # the container that takes part
    has_chosen: bool = False  # a restore: all have chosen what is restored, and come as soon as they have got it
    ends_within_s: float = 0.0  # a dump of a container that is stopped: how long it takes at most to end after it

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
            GivenUp: once its caller has given up.
        """
        who = {
            "namespace": self.gang.namespace,
            "gang": self.gang.name,
            "member": self.gang.member,
            "session": self.session,
            "epoch": self.epoch,
            "life": self.life,
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

    def wait(
        self,
        request: Mapping[str, Any],
        phase: str,
        patience: Patience,
        *,
        calls: bool = False,
        gather: "Gather | None" = None,
    ) -> Answer:
        """Ask until the answer is not to wait; if that takes too long, end the attempt.

        Args:
            request: what is asked.
            phase: that it waits for.
            patience: with whoever waits for it.
            calls: call those that are missing, after a while.
            gather: how long it waits for members to join, if not as for other phases.

        Raises:
            MembersMissing: if the attempt is over as members do not come.
            DumpUnderWay: if a choice is over as a dump has begun.
            GangError: if it is over for another reason.
            GivenUp: once its caller has given up.
        """
        waiting = _Waiting(gather or self._limits(phase), patience)
        first = {"wait_s": patience.within(_CALL_AFTER_S).left_s} if calls else {}
        answer = self.ask({"wait_s": waiting.left_s, **request, **first}, patience, waiting.longest_s)
        while True:
            waiting.hear(answer)
            if answer.state is State.WAIT and waiting.is_over:  # all may arrive at this very moment
                leave = {"verb": "leave", "reason": waiting.reason, "waited_for": phase}
                answer = self.ask(leave, Patience(), _LEAVE_S)
            if answer.state is State.OVER:
                raise _error_of(
                    answer,
                    f"gang {self.gang}: attempt {self.epoch} is over for all members: {answer.reason}",
                    hint="all of them are as they were before it",
                )
            if answer.state is not State.WAIT:
                return answer
            answer = self.ask({"wait_s": waiting.left_s, **request, "calls": calls}, patience, waiting.longest_s)

    def _limits(self, phase: str) -> "Gather":
        if phase in _AT_WORK or (phase == Phase.ADDRESSES and self.has_chosen):
            return Gather(max(self.timeout_s, _WORK_LIMIT_S), 0.0, "")
        return Gather(self.timeout_s, 0.0, "gang_timeout_s")

    def enter(self, act: str, patience: Patience, called: str = "", after: int | None = None) -> None:
        """Join an attempt: the one that the member was called to, or whichever is open.

        Args:
            act: that it takes part in.
            patience: with the caller.
            called: to which attempt.
            after: as `settle` has returned it, of who comes for a choice.

        Raises:
            DumpUnderWay: if it comes for a choice, and a dump has begun since it has looked for its own.
            GangError: if it cannot be joined, or there is no coordinator.
            GivenUp: once its caller has given up.
        """
        wanted = to_json(Join(act, self.gang.size, self.gang.epoch, self.gang.attempt))
        request: dict[str, Any] = {"verb": "join", "join": wanted, "called": called}
        request |= {"ends_within_s": self.ends_within_s} if self.ends_within_s else {}
        request |= {} if after is None else {"after": after}
        limit = patience.within(self.timeout_s + _WORK_LIMIT_S)  # for the dump of an earlier container of the member
        while (answer := self.ask(request, patience, self.timeout_s)).state is State.WAIT and not limit.is_over:
            pass
        if answer.state is not State.MET:
            raise _error_of(answer, f"gang {self.gang}: {answer.reason}")
        self.epoch, self.attempt = answer.epoch, answer.attempt

    def settle(self, patience: Patience) -> int | None:
        """Wait until no dump of the gang is under way, and who is being stopped has ended; return the epoch until then.

        It waits for a container on a lost node as long as that node has announced, and not longer. It returns None if
        the coordinator cannot be asked, or is of an earlier release.

        Raises:
            GivenUp: as soon as the caller no longer waits.
        """
        who = {"namespace": self.gang.namespace, "gang": self.gang.name, "member": self.gang.member}
        limit, said = patience.within(_SETTLE_S), ""
        try:
            while True:
                answer = _read_answer(self.line.ask({"verb": "settle", **who}, patience))
                if answer.state is not State.WAIT:
                    return answer.epoch
                if answer.reason != said:
                    said = answer.reason
                    log.info("gang %s: before it is chosen what to restore: %s", self.gang, said)
                if limit.is_over:
                    return None
        except (GangError, OSError, KeyError, TypeError, ValueError, AttributeError):
            return None  # to join says why, if there is no coordinator


class Gather(NamedTuple):
    """How long a member waits for the others."""

    longest_s: float
    gap_s: float  # since the last one has joined; 0: that does not count
    setting: str  # which says so; "": none


class _Waiting:
    """How long one waits for others in a phase, as it learns of them."""

    def __init__(self, limits: Gather, patience: Patience) -> None:
        self.longest_s = limits.longest_s
        self._limits, self._joined = limits, 0
        self._longest = self._limit = patience.within(limits.longest_s)
        self.reason = self._within(limits.longest_s, limits.setting)
        self._gap_s = limits.gap_s

    @staticmethod
    def _within(seconds: float, setting: str) -> str:
        return f"within {seconds:g} s" + (f" ({setting})" if setting else "")

    def hear(self, answer: Answer) -> None:
        """Wait longer where another member has joined, and no longer for those that have ended."""
        if answer.state is not State.WAIT or not answer.joined:  # of a coordinator that does not count them
            return
        if answer.ended and self._gap_s != _CALL_AFTER_S:
            self._gap_s, self._joined = _CALL_AFTER_S, 0
        if self._gap_s and answer.joined > self._joined:
            self._joined = answer.joined
            self._limit = self._longest.within(self._gap_s)
            setting = "" if answer.ended else "gang_gather_s"
            self.reason = self._within(self._gap_s, setting)

    @property
    def left_s(self) -> float:
        """Seconds until one waits no longer, as far as is known; it need not hear of the others before."""
        first_s = _CALL_AFTER_S if self._gap_s and not self._joined else self._limit.left_s
        return min(first_s, self._limit.left_s)

    @property
    def is_over(self) -> bool:
        """Return whether one has waited for long enough."""
        return self._limit.is_over


def _error_of(answer: Answer, message: str, hint: str = "") -> GangError:
    """Return the error for an attempt that is over."""
    kind = DumpUnderWay if answer.again else MembersMissing if answer.short else GangError
    return kind(message, hint=hint)


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
        self,
        phase: str,
        message: object = None,
        about: Collection[str] = (),
        *,
        calls: bool = False,
        gather: Gather | None = None,
    ) -> Mapping[str, str]:
        """Reach a phase, and wait until all members have; return what they have published under the keys of `about`.

        Args:
            phase: that is reached.
            message: what it publishes.
            about: keys of what it wants to know.
            calls: call those that have not joined after a while.
            gather: how long it waits for members to join, if not as for other phases.

        Raises:
            MembersMissing: if it is over as members do not come.
            GangError: if the attempt is over.
            GivenUp: once its caller has given up.
        """
        request = {"verb": "meet", "phase": phase, "message": to_json(message), "about": list(about)}
        with self._journal.phase(f"gang {phase}"):
            answer = self._effect.wait(request, phase, self._patience, calls=calls, gather=gather)
        self.here = answer.here
        return answer.told

    def agree(self, attempt: int, *, is_locked: bool) -> bool:
        """Vote on whether all members are locked; return whether they are. Else all try again, at the same moment.

        Raises:
            GangError: if the attempt is over.
            GivenUp: once its caller has given up.
        """
        request = {"verb": "vote", "ballot": attempt, "is_locked": is_locked}
        return self._effect.wait(request, Phase.LOCKED, self._patience).state is State.MET

    def end(self) -> None:
        """Stop taking part: all have reached the end, and nobody waits."""
        self._effect.line.close()
        self._journal.forget(self._effect)


class Coming(NamedTuple):
    """How a container comes to an attempt."""

    called: str = ""  # to which attempt by its id; "": to whichever is open
    container: str = ""  # its id
    ends_within_s: float = 0.0  # after the attempt, if it is stopped; else 0
    has_chosen: bool = False  # it is restored, and all have chosen from what


_COMING = Coming()


def join(
    journal: Journal,
    patience: Patience,
    gang: GangRef,
    act: str,
    *,
    link: Link,
    timeout_s: float,
    coming: Coming = _COMING,
) -> Attendance:
    """Take part in an attempt of the container's gang: in the one that it was called to, or in whichever is open.

    Raises:
        GangError: if the container cannot join it, or there is no coordinator.
        GivenUp: once its caller has given up.
    """
    session = _session(journal.session_id)
    ends_within_s = coming.ends_within_s
    effect = journal.add(
        GangJoined(
            gang=gang,
            link=link,
            session=session,
            timeout_s=timeout_s,
            life=coming.container,
            ends_within_s=ends_within_s,
            has_chosen=coming.has_chosen,
        )
    )
    effect.enter(act, patience, coming.called)
    journal.note(GangFacts(gang_ref=gang, gang_epoch=effect.epoch))
    return Attendance(journal, patience, effect)


class Choice:
    """A member that asks which dump of its gang it is restored from."""

    def __init__(self, gang: GangRef, patience: Patience, *, link: Link, timeout_s: float) -> None:
        """Begin.

        Args:
            gang: with the member that asks.
            patience: with the caller.
            link: to the coordinator.
            timeout_s: for the next member to ask.
        """
        self._gang, self._patience, self._link, self._timeout_s = gang, patience, link, timeout_s
        self._after: int | None = None

    def settle(self) -> None:
        """Wait until no dump of the gang is under way: before one looks for what there is to be chosen.

        Raises:
            GivenUp: once its caller has given up.
        """
        self._after = self._member().settle(self._patience)

    def ask(self, dumps: Sequence[str]) -> str:
        """Return the dump that all members are restored from: the last that all of them have; "" without one.

        Args:
            dumps: that this one has, the oldest first, as GangNote names them. Without any it does not wait.

        Raises:
            DumpUnderWay: if one has begun meanwhile: settle, and look again for what there is.
            GangError: if not all members ask in time, or there is no coordinator.
            GivenUp: once its caller has given up.
        """
        member = self._member()
        member.enter("choose", self._patience, after=self._after)
        request = {"verb": "meet", "phase": Phase.CHOSEN, "message": list(dumps), "about": [CHOICE]}
        if not dumps:
            member.ask({**request, "wait_s": 0}, self._patience, self._timeout_s)
            return ""
        gather = Gather(max(self._timeout_s, _WORK_LIMIT_S), self._timeout_s, "gang_timeout_s")
        return member.wait(request, Phase.CHOSEN, self._patience, gather=gather).told.get(CHOICE, "")

    def _member(self) -> GangJoined:
        session = _session(secrets.token_hex(8))
        return GangJoined(gang=self._gang, link=self._link, session=session, timeout_s=self._timeout_s)


def _session(name: str) -> str:
    return f"{_BOOT_ID.read_text().strip()}/{name}"


def find_attendance(journal: Journal, patience: Patience) -> Attendance | None:
    """Return the part that a container has in an attempt, since an earlier stage; None if it has none."""
    effect = journal.find(GangJoined)
    return None if effect is None else Attendance(journal, patience, effect)
