"""How the members of a gang act as one: what a coordinator knows of an attempt, without sockets, clocks or files.

An attempt at a dump or a restore has an *epoch*, a number that no other attempt of the gang has. Its members meet in
phases: one is met when every member has reached it, and a member that has reached one has reached all before it.
Anything that goes wrong ends the attempt for all. The last phase is the *decision*: it is durable before any member
learns it, and nothing can end the attempt after it.

A member that is dumped alone, as it is stopped, may *call* the others. Nobody can be reached on a node, so nodes ask
whether an attempt calls; a member that is dumped because of that joins this attempt, or none.

Locks of GPUs are voted on. A rank inside a collective cannot be locked while another one is, so all try at the same
moment; the ballot is repeated until it is unanimous.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from ocihook.errors import printable

_MAX_REASON = 2000
_SHOWN = 8  # members that a reason names
REMEMBERED = 8  # decided attempts whose members may still ask
LONGEST_WAIT_S = 10.0  # that a request waits for other members; then the member asks again
GATHERING_S = 3 * LONGEST_WAIT_S  # after which members are dead that should ask whether others have come
AT_WORK_S = 1000.0  # after which they are when their work may keep them: twice what one waits for another's
_KEPT_OVER = 4096  # sessions of attempts that are over, to know them again when they come late


class Phase(StrEnum):
    """What all members have done when they meet."""

    ARRIVED = "arrived"  # each is in pre-dump
    LOCKED = "locked"  # no CUDA call is under way in any of them: voted on
    DRAINED = "drained"  # what was on its way between them has arrived
    HELD = "held"  # no packet moves: CRIU may begin
    DUMPED = "dumped"  # all images are complete, and nobody has gone on
    ADDRESSES = "addresses"  # each is in pre-restore, and has published its old and new addresses
    RESTORED = "restored"  # all sockets are made: each can answer
    RELEASED = "released"  # traffic passes everywhere
    CHOSEN = "chosen"  # each has said which dumps it could be restored from


PHASES: Mapping[str, Sequence[Phase]] = {
    "dump": (Phase.ARRIVED, Phase.LOCKED, Phase.DRAINED, Phase.HELD, Phase.DUMPED),
    "restore": (Phase.ADDRESSES, Phase.RESTORED, Phase.RELEASED),
    "choose": (Phase.CHOSEN,),
}
CHOICE = "dump"  # the key by which the choice is told
TOLD = (Phase.ARRIVED, Phase.ADDRESSES)  # phases in which members publish, by keys, what others may ask about
_BALLOT = PHASES["dump"].index(Phase.LOCKED)


class State(StrEnum):
    """What a member that asks does next."""

    WAIT = "wait"  # others are missing: ask again
    MET = "met"
    AGAIN = "again"  # not all could lock: another ballot
    OVER = "over"  # the attempt has ended: run on, or do not run


class Claim(NamedTuple):
    """Who sends a request, and about which attempt."""

    member: str
    session: str  # of the member: one dump or restore, at one CRIU
    node: str = ""  # that sends for the member; the transport authenticates it, nobody claims it
    epoch: int = 0


class Join(NamedTuple):
    """What a member wants to take part in."""

    act: str  # dump, restore, or choose: which dump is to be restored
    size: int  # of the gang
    source: int = 0  # the epoch that is restored
    attempt: str = ""  # its id


class Answer(NamedTuple):
    """What the coordinator answers."""

    state: State
    epoch: int = 0
    reason: str = ""  # why the attempt is over
    told: Mapping[str, str] = {}  # of what was asked about
    ballot: int = 1
    attempt: str = ""  # its id, which no other has, whoever coordinates
    here: int = 0  # members of the same node, once all have joined


@dataclass
class Seat:
    """A member in an attempt."""

    session: str
    node: str
    reached: int = -1  # the last phase, by its place
    voted: int = 0  # the last ballot


@dataclass
class Attempt:
    """A dump or restore of a gang, under way or decided."""

    epoch: int
    join: Join
    seats: dict[str, Seat] = field(default_factory=dict)
    messages: dict[str, Any] = field(default_factory=dict)  # of members in the last phase
    told: dict[Phase, dict[str, str]] = field(default_factory=dict)
    reached: list[int] = field(default_factory=list)  # how many members, by phase
    ballot: int = 1
    ayes: int = 0
    noes: int = 0
    skipped: int = 0  # members that have nothing to lock
    reason: str = ""  # why it is over
    is_decided: bool = False
    is_called: bool = False  # those that have not joined are to be dumped now
    id: str = ""
    on_node: Counter[str] = field(default_factory=Counter)  # how many members, by node

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * len(self.phases)

    @property
    def phases(self) -> Sequence[Phase]:
        """Its phases, in their order."""
        return PHASES[self.join.act]

    def reach(self, seat: Seat, place: int) -> None:
        """Record that a member has reached a phase, and so all before it."""
        for at in range(seat.reached + 1, place + 1):
            self.reached[at] += 1
        seat.reached = max(seat.reached, place)

    def hear(self, member: str, phase: Phase, message: object) -> None:
        """Record what a member publishes. Where two disagree about a key its value is unknown: ""."""
        if phase == self.phases[-1]:
            self.messages[member] = message
        elif phase in TOLD and isinstance(message, Mapping):
            told = self.told.setdefault(phase, {})
            for key, value in message.items():
                told[str(key)] = str(value) if told.get(str(key), str(value)) == str(value) else ""

    def is_met(self, place: int) -> bool:
        """Return whether all members have reached a phase."""
        return self.reached[place] == self.join.size

    @property
    def is_gathering(self) -> bool:
        """Whether all who have joined wait for those that have not."""
        return self.reached[0] == len(self.seats) < self.join.size

    def missing(self, place: int, known: Iterable[str] = ()) -> list[str]:
        """Return who has not reached a phase, by name or by number.

        Args:
            place: of the phase.
            known: the members of an earlier attempt.
        """
        late = sorted(name for name, seat in self.seats.items() if seat.reached < place)
        more = [f"{len(late) - _SHOWN} more"] if len(late) > _SHOWN else []
        absent = list(islice(self._absent(set(known)), _SHOWN))
        unknown = self.join.size - len(self.seats) - len(absent)
        others = [f"{unknown} {'more ' if absent else ''}that never joined"] if unknown else []
        return [*late[:_SHOWN], *more, *(f"{name} (never joined)" for name in absent), *others]

    def _absent(self, known: set[str]) -> Iterator[str]:
        """Yield who has not joined: known from before if nobody else has come, or by the indexes that all have."""
        size = self.join.size
        if len(known) == size and known >= self.seats.keys():
            yield from sorted(known - self.seats.keys())
        elif all(name.isascii() and name.isdigit() and int(name[:9]) < size for name in self.seats):
            yield from (name for name in map(str, range(size)) if name not in self.seats)

    def vote(self, seat: Seat, ballot: int, *, is_locked: bool) -> None:
        """Count a vote, once."""
        if seat.reached < _BALLOT and ballot == self.ballot and seat.voted < ballot:
            seat.voted = ballot
            self.ayes += is_locked
            self.noes += not is_locked
            self.count()

    def count(self) -> None:
        """End the ballot if all have voted."""
        if self.is_met(_BALLOT) or self.ayes + self.noes + self.skipped < self.join.size:
            return
        if self.noes:
            self.ballot, self.ayes, self.noes = self.ballot + 1, 0, 0
            return
        for seat in self.seats.values():
            self.reach(seat, _BALLOT)


class Decided(NamedTuple):
    """What members of a decided attempt may still ask about."""

    sessions: Mapping[str, str]  # by member
    told: Mapping[str, str] = {}


Begin = Callable[[int], str]
Decide = Callable[[Attempt], str]


class Gang:
    """One gang as its coordinator knows it: at most one attempt at a time."""

    def __init__(self, begin: Begin, decide: Decide, *, epoch: int = 0, decided: Mapping[int, Decided]) -> None:
        """Begin with what is durable.

        Args:
            begin: makes durable that an epoch is taken; returns an id for the attempt.
            decide: makes an attempt durable whose end all members have reached; returns why it cannot.
            epoch: the last that was taken.
            decided: the attempts that were decided before, by epoch.
        """
        self._begin, self._decide = begin, decide
        self.epoch = epoch
        self.attempt: Attempt | None = None
        self._decided = dict(decided)
        self._over: dict[str, str] = {}  # why, by session

    def join(self, claim: Claim, wanted: Join, called: str = "", silence_s: float = 0.0) -> Answer:
        """Let a member take part in the attempt that is open, or open one.

        A member that does not fit the open attempt shows that this can no longer succeed: it ends. Another one is open
        then, but for members that are restored from different epochs: all of them fail.

        Args:
            claim: who comes.
            wanted: what for.
            called: id of the attempt that it was called to. It fits that one and ends none.
            silence_s: for how long nobody of the open attempt has asked anything: too long, and it is over, as those
                who live ask again and again.

        Raises:
            ValueError: if it is not possible at all.
        """
        if wanted.act not in PHASES or wanted.size < 2:
            raise ValueError(f"a {wanted.act} of {wanted.size} members")
        if claim.session in self._over:
            return Answer(State.OVER, reason=self._over[claim.session])
        if self.attempt is not None and _has_seat(self.attempt, claim):  # it has asked before
            return Answer(State.MET, self.attempt.epoch, attempt=self.attempt.id)
        attempt = self._open
        if called and (attempt is None or attempt.id != called or claim.member in attempt.seats):
            return Answer(State.OVER, reason=f"the attempt that {claim.member} was called to is over, or has it")
        if attempt is not None and silence_s > (GATHERING_S if attempt.is_gathering else AT_WORK_S) and not called:
            self._end(attempt, f"nobody of it was heard of for {silence_s:.0f} s")
            attempt = None
        if attempt is not None and (reason := _contradiction(attempt, claim, wanted)):
            self._end(attempt, reason)
            if attempt.join.act == wanted.act and attempt.join.source != wanted.source:  # nobody knows which is stale
                self._over[claim.session] = attempt.reason
                return Answer(State.OVER, reason=attempt.reason)
            attempt = None
        if attempt is not None and len(attempt.seats) == wanted.size:
            others = ", ".join(sorted(attempt.seats)[:_SHOWN])
            return Answer(State.OVER, reason=f"the gang has its {wanted.size} members without {claim.member}: {others}")
        if attempt is None:
            attempt_id = self._begin(self.epoch + 1)
            self.epoch += 1
            self._retire()
            attempt = self.attempt = Attempt(self.epoch, wanted, id=attempt_id)
        attempt.seats[claim.member] = Seat(claim.session, claim.node)
        attempt.on_node[claim.node] += 1
        return Answer(State.MET, attempt.epoch, attempt=attempt.id)

    def meet(
        self, claim: Claim, phase: Phase, message: object = None, about: Iterable[str] = (), *, calls: bool = False
    ) -> Answer:
        """Let a member reach a phase, or ask again whether all have.

        Args:
            claim: who comes.
            phase: to which.
            message: in the last phase what is to be stored; in one of TOLD what it publishes, texts by keys.
            about: keys of all members' that this one wants to know: few, so that answers stay short in a large gang.
            calls: it has waited, and wants those dumped that have not joined.
        """
        attempt = self.attempt
        if attempt is None or attempt.epoch != claim.epoch:
            return self._earlier(claim)
        if attempt.reason or not _has_seat(attempt, claim):
            return Answer(
                State.OVER, claim.epoch, attempt.reason or f"it has no {claim.member} of session {claim.session}"
            )
        place = attempt.phases.index(phase)
        seat = attempt.seats[claim.member]
        attempt.is_called |= calls and attempt.join.act == "dump"
        if seat.reached < place:
            attempt.hear(claim.member, phase, message)
            if seat.reached < _BALLOT <= place and attempt.join.act == "dump":
                attempt.skipped += 1
            attempt.reach(seat, place)
            if attempt.skipped:
                attempt.count()
            if attempt.is_met(place) and place == len(attempt.phases) - 1:
                self._settle(attempt)
        return self._standing(attempt, place, about)._replace(here=attempt.on_node[claim.node])

    def vote(self, claim: Claim, ballot: int, *, is_locked: bool) -> Answer:
        """Take a member's vote on whether all of it is locked, or return the ballot's result again."""
        attempt = self.attempt
        if attempt is None or attempt.epoch != claim.epoch:
            return self._earlier(claim)
        if attempt.reason or not _has_seat(attempt, claim) or attempt.join.act != "dump":
            return Answer(State.OVER, claim.epoch, attempt.reason or f"it has no {claim.member} that votes")
        attempt.vote(attempt.seats[claim.member], ballot, is_locked=is_locked)
        if attempt.seats[claim.member].reached < _BALLOT and ballot < attempt.ballot:
            return Answer(State.AGAIN, claim.epoch, ballot=attempt.ballot)
        return self._standing(attempt, _BALLOT)

    def leave(self, claim: Claim, reason: str, waited_for: Phase | None = None) -> Answer:
        """End the attempt for all, unless it is decided: then the answer is that all have met.

        Args:
            claim: who leaves.
            reason: why.
            waited_for: the phase that it has waited for in vain; the reason then begins with who is missing.
        """
        attempt = self.attempt
        if attempt is None or attempt.epoch != claim.epoch:
            return self._earlier(claim)
        if not _has_seat(attempt, claim):
            return Answer(State.OVER, claim.epoch, attempt.reason or f"it has no {claim.member} of this session")
        if attempt.is_decided:
            return Answer(State.MET, claim.epoch)
        if waited_for is not None:
            known = self._decided[max(self._decided)].sessions if self._decided else {}
            missing = ", ".join(attempt.missing(attempt.phases.index(waited_for), known))
            reason = f"{missing} did not reach '{waited_for}' {reason}"
        self._end(attempt, f"{claim.member}: {reason}")
        return Answer(State.OVER, claim.epoch, attempt.reason)

    def calls(self) -> str:
        """Return the id of the attempt that calls members which have not joined; "" if none does."""
        attempt = self._open
        is_calling = attempt is not None and attempt.is_called and len(attempt.seats) < attempt.join.size
        return attempt.id if attempt is not None and is_calling else ""

    @property
    def standing(self) -> tuple[object, ...]:
        """All that members may wait for: as long as it is the same, who was told to wait would be told so again."""
        attempt = self.attempt
        if attempt is None:
            return ()
        met = sum(map(attempt.is_met, range(len(attempt.phases))))
        return attempt.epoch, met, attempt.ballot, attempt.reason

    @property
    def _open(self) -> Attempt | None:
        """The attempt that may still come to either end."""
        attempt = self.attempt
        return None if attempt is None or attempt.reason or attempt.is_decided else attempt

    @staticmethod
    def _standing(attempt: Attempt, place: int, about: Iterable[str] = ()) -> Answer:
        if attempt.reason:
            return Answer(State.OVER, attempt.epoch, attempt.reason)
        if not attempt.is_met(place):
            return Answer(State.WAIT, attempt.epoch, ballot=attempt.ballot)
        told = attempt.told.get(attempt.phases[place], {})
        return Answer(State.MET, attempt.epoch, told={key: told[key] for key in about if key in told})

    def _settle(self, attempt: Attempt) -> None:
        """Decide: from here on nothing can end the attempt."""
        reason = self._decide(attempt)
        if reason:
            self._end(attempt, reason)
        else:
            attempt.is_decided = True
            sessions = {name: seat.session for name, seat in attempt.seats.items()}
            self._decided[attempt.epoch] = Decided(sessions, attempt.told.get(Phase.CHOSEN, {}))
            for epoch in sorted(self._decided)[:-REMEMBERED]:
                del self._decided[epoch]

    def _end(self, attempt: Attempt, reason: str) -> None:
        if not attempt.reason:
            attempt.reason = printable(reason)[:_MAX_REASON]
            self._remember(attempt, attempt.reason)

    def _retire(self) -> None:
        """Close a decided attempt: a member of it that comes late does not open another one."""
        if self.attempt is not None and self.attempt.is_decided:
            self._remember(self.attempt, f"attempt {self.attempt.epoch} has ended")

    def _remember(self, attempt: Attempt, reason: str) -> None:
        self._over |= {seat.session: reason for seat in attempt.seats.values()}
        for session in list(self._over)[: -max(_KEPT_OVER, len(attempt.seats))]:
            del self._over[session]

    def _earlier(self, claim: Claim) -> Answer:
        """Answer a member of an attempt that is not the one known: it was decided, or it is over."""
        decided = self._decided.get(claim.epoch)
        if decided is not None and decided.sessions.get(claim.member) == claim.session:
            return Answer(State.MET, claim.epoch, told=decided.told)
        reason = (
            self._over.get(claim.session) or f"attempt {claim.epoch} is no longer known (its coordinator was restarted)"
        )
        return Answer(State.OVER, claim.epoch, reason)


def _has_seat(attempt: Attempt, claim: Claim) -> bool:
    seat = attempt.seats.get(claim.member)
    return seat is not None and (seat.session, seat.node) == (claim.session, claim.node)


def _contradiction(attempt: Attempt, claim: Claim, wanted: Join) -> str:
    """Return why an open attempt cannot succeed any more, now that somebody has come who wants something."""
    if attempt.join.act != wanted.act:
        return f"{claim.member} has come for a {wanted.act} while others were at a {attempt.join.act}"
    if attempt.join.size != wanted.size:
        return f"{claim.member} says that the gang has {wanted.size} members, others say {attempt.join.size}"
    if (attempt.join.source, attempt.join.attempt) != (wanted.source, wanted.attempt):
        another = " of another coordinator" if attempt.join.source == wanted.source else ""
        return (
            f"{claim.member} is restored from epoch {wanted.source}, others from epoch {attempt.join.source}{another}"
        )
    if claim.member in attempt.seats:
        return f"{claim.member} has come again: its earlier {wanted.act} has ended, or two containers have that name"
    return ""
