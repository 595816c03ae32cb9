"""How the members of a gang act as one: what a coordinator knows of an attempt, without sockets, clocks or files.

An attempt at a dump or a restore has an *epoch*, a number that no other attempt of the gang has. Its members meet in
phases: one is met when every member has reached it, and a member that has reached one has reached all before it.
Anything that goes wrong ends the attempt for all. The last phase is the *decision*: it is durable before any member
learns it, and nothing can end the attempt after it.

A member that is dumped alone, as it is stopped, may *call* the others. Nobody can be reached on a node, so nodes ask
whether an attempt calls; a member that is dumped because of that joins this attempt, or none.

A dump never loses to a choice. Job controllers create pods while the old ones end, and the new ones ask which dump they
are restored from: they ask again once the dump is over and its containers have ended, as their lists were too old.

A node reports each member that has ended without a dump, and a dump that waits for it is over at once. A container that
is stopped is *ending* from its dump until its node reports its end.

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
_NONE: Mapping[str, str] = {}
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
    life: str = ""  # its container; "": the node does not say


class Life(NamedTuple):
    """One container of a member, on one node."""

    member: str
    container: str
    node: str


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
    again: bool = False  # over for a dump that is under way: settle, then ask anew
    short: bool = False  # over as members are missing that do not come
    joined: int = 0  # members that have, as long as others are missing
    ended: str = ""  # those that are missing, if all of them have ended without a dump


@dataclass
class Seat:
    """A member in an attempt."""

    session: str
    node: str
    reached: int = -1  # the last phase, by its place
    voted: int = 0  # the last ballot
    life: str = ""  # its container


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
    is_short: bool = False  # over as members are missing that do not come
    is_displaced: bool = False  # over as a dump has begun
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

    @property
    def over(self) -> Answer:
        """The answer to its members when it is over."""
        return Answer(State.OVER, self.epoch, self.reason, again=self.is_displaced, short=self.is_short)

    def unseat(self, member: str) -> Seat:
        """Let another container of a member take its seat, which is returned: nothing that it has published counts."""
        seat = self.seats.pop(member)
        self.on_node[seat.node] -= 1
        for place in range(seat.reached + 1):
            self.reached[place] -= 1
        self.messages.pop(member, None)
        return seat

    def missing(self, place: int, known: Iterable[str] = (), ended: Mapping[str, str] = _NONE) -> list[str]:
        """Return who has not reached a phase, by name or by number.

        Args:
            place: of the phase.
            known: the members of an earlier attempt.
            ended: why members that have ended without a dump did so.
        """
        late = sorted(name for name, seat in self.seats.items() if seat.reached < place)
        more = [f"{len(late) - _SHOWN} more"] if len(late) > _SHOWN else []
        gone = [name for name in sorted(ended) if name not in self.seats]
        absent = list(islice(self._absent(set(known)), _SHOWN)) or gone[:_SHOWN]
        unknown = self.join.size - len(self.seats) - len(absent)
        others = [f"{unknown} {'more ' if absent else ''}that never joined"] if unknown else []
        return [*late[:_SHOWN], *more, *(f"{name} ({_fate(ended.get(name))})" for name in absent), *others]

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
        self._over: dict[str, Answer] = {}  # by session
        self._dumped = epoch  # no dump was begun after this one
        self._ended: dict[str, str] = {}  # why, by member: ended without a dump, and not seen since
        self._unrestored: dict[str, str] = {}  # why, by member: of those that have chosen last
        self.ending: set[Life] = set()  # containers that are being stopped, until their node reports their end

    def join(
        self,
        claim: Claim,
        wanted: Join,
        called: str = "",
        silence_s: float = 0.0,
        *,
        stops: bool = False,
        after: int | None = None,
    ) -> Answer:
        """Let a member take part in the attempt that is open, or open one.

        A member that does not fit the open attempt shows that this can no longer succeed: it ends. Another one is open
        then, but for members that are restored from different epochs: all of them fail. But a choice ends no dump, and
        a dump of one container of a member none of another: it waits.

        Args:
            claim: who comes.
            wanted: what for.
            called: id of the attempt that it was called to. It fits that one and ends none.
            silence_s: for how long nobody of the open attempt has asked anything: too long, and it is over, as those
                who live ask again and again.
            stops: its container is being stopped, and ends.
            after: the epoch that `settle` has told a member that comes for a choice; None: it has not asked.

        Raises:
            ValueError: if it is not possible at all.
        """
        if wanted.act not in PHASES or wanted.size < 2:
            raise ValueError(f"a {wanted.act} of {wanted.size} members")
        known = self._known(claim)
        if known is not None:
            return known
        self._unrestored.pop(claim.member, None)
        if wanted.act != "choose":  # who chooses does not run yet
            self._ended.pop(claim.member, None)
        if stops and claim.life:
            self.ending.add(Life(claim.member, claim.life, claim.node))
        if not called:
            self._give_up(silence_s)
        refusal = self._refusal(claim, wanted, called, after)
        if refusal is not None:
            return refusal
        self._make_room(claim, wanted)
        attempt = self._open
        if claim.session in self._over:
            return self._over[claim.session]._replace(epoch=0)
        if attempt is not None and len(attempt.seats) == wanted.size:
            others = ", ".join(sorted(attempt.seats)[:_SHOWN])
            return Answer(State.OVER, reason=f"the gang has its {wanted.size} members without {claim.member}: {others}")
        if attempt is None:
            attempt = self._begin_attempt(wanted)
        attempt.seats[claim.member] = Seat(claim.session, claim.node, life=claim.life)
        attempt.on_node[claim.node] += 1
        return Answer(State.MET, attempt.epoch, attempt=attempt.id)

    def _known(self, claim: Claim) -> Answer | None:
        """Return the answer to a member that has asked before."""
        if claim.session in self._over:
            return self._over[claim.session]._replace(epoch=0)
        if self.attempt is not None and _has_seat(self.attempt, claim):
            return Answer(State.MET, self.attempt.epoch, attempt=self.attempt.id)
        return None

    def _refusal(self, claim: Claim, wanted: Join, called: str, after: int | None) -> Answer | None:
        """Return the answer to a member that does not join now, and ends nothing."""
        attempt = self._open
        if called and (attempt is None or attempt.id != called or claim.member in attempt.seats):
            return Answer(State.OVER, reason=f"the attempt that {claim.member} was called to is over, or has it")
        if wanted.act == "choose" and (_is_dump(attempt) or (after is not None and after < self._dumped)):
            reason = f"a dump of the gang, attempt {self._dumped}, has begun"
            return self._over.setdefault(claim.session, Answer(State.OVER, reason=reason, again=True))
        if wanted.act == "restore" and self._unrestored:
            return Answer(State.OVER, reason="; ".join(map(_unrestored, [*self._unrestored.items()][:_SHOWN])))
        if attempt is not None and _is_of_another(attempt, claim, wanted):
            return Answer(State.WAIT, reason=f"another container of {claim.member} is in attempt {attempt.epoch}")
        return None

    def _make_room(self, claim: Claim, wanted: Join) -> None:
        """End the open attempt if a member does not fit it; of two that choose for one member the last one counts."""
        attempt = self._open
        if attempt is None:
            return
        if wanted.act == attempt.join.act == "choose" and claim.member in attempt.seats:
            former = attempt.unseat(claim.member)
            self._over[former.session] = Answer(State.OVER, attempt.epoch, f"{claim.member} has come again")
        if reason := _contradiction(attempt, claim, wanted):
            self._end(attempt, reason, is_displaced=attempt.join.act == "choose" and wanted.act == "dump")
            if attempt.join.act == wanted.act and attempt.join.source != wanted.source:  # which is stale is unknown
                self._over[claim.session] = attempt.over

    def _begin_attempt(self, wanted: Join) -> Attempt:
        attempt_id = self._begin(self.epoch + 1)
        self.epoch += 1
        self._retire()
        self._dumped = self.epoch if wanted.act == "dump" else self._dumped
        if wanted.act == "choose":
            self._unrestored.clear()
        self.attempt = Attempt(self.epoch, wanted, id=attempt_id)
        return self.attempt

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
        if attempt is None or attempt.epoch != claim.epoch or claim.session in self._over:
            return self._earlier(claim)
        if attempt.reason or not _has_seat(attempt, claim):
            lacks = Answer(State.OVER, claim.epoch, f"it has no {claim.member} of session {claim.session}")
            return attempt.over if attempt.reason else lacks
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
            lacks = Answer(State.OVER, claim.epoch, f"it has no {claim.member} that votes")
            return attempt.over if attempt.reason else lacks
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
            missing = ", ".join(attempt.missing(attempt.phases.index(waited_for), known, self._ended))
            reason = f"{missing} did not reach '{waited_for}' {reason}"
        self._end(attempt, f"{claim.member}: {reason}", is_short=waited_for is Phase.ARRIVED)
        return attempt.over

    def settle(self, silence_s: float = 0.0, own: tuple[str, str] = ("", "")) -> Answer:
        """Let a member that comes for a choice wait until no dump is under way, and who is stopped has ended.

        Args:
            silence_s: as `join` has it.
            own: the member, and its node, which knows itself whether an earlier container of it is being stopped there.
        """
        self._give_up(silence_s)
        if _is_dump(self._open):
            return Answer(State.WAIT, self.epoch, f"attempt {self.epoch}, a dump, is under way")
        ending = {life.member for life in self.ending if (life.member, life.node) != own}
        if ending:
            names = ", ".join(sorted(ending)[:_SHOWN])
            return Answer(State.WAIT, self.epoch, f"containers of {names} are being stopped")
        return Answer(State.MET, self.epoch)

    def report_end(self, life: Life, why: str) -> Answer:
        """Take a node's report that a container has ended; if it was not dumped, an open dump without it is over.

        Args:
            life: which.
            why: it has ended without a dump; "": it was dumped.
        """
        self.ending.discard(life)
        attempt = self._open
        seat = attempt.seats.get(life.member) if attempt is not None else None
        is_next = attempt is not None and attempt.join.act == "choose"  # who chooses does not run yet
        is_other = seat is not None and not is_next and (seat.life, seat.node) != (life.container, life.node)
        if why and not is_other:
            self._ended[life.member] = why = printable(why)[:_MAX_REASON]
            if attempt is not None and _is_dump(attempt):
                self._end(attempt, f"{life.member} {_fate(why)}", is_short=True)
        return Answer(State.MET)

    def report_unrestored(self, life: Life, why: str) -> Answer:
        """Take a node's report that a container which has chosen is not restored: no restore of the others succeeds."""
        attempt = self._open
        seat = attempt.seats.get(life.member) if attempt is not None else None
        if seat is None or (seat.life, seat.node) == (life.container, life.node):
            self._unrestored[life.member] = why = printable(why)[:_MAX_REASON]
            if attempt is not None and attempt.join.act == "restore":
                self._end(attempt, _unrestored((life.member, why)))
        return Answer(State.MET)

    def is_at_dump(self, life: Life) -> bool:
        """Return whether a container takes part in an open dump."""
        attempt = self._open
        seat = attempt.seats.get(life.member) if attempt is not None and _is_dump(attempt) else None
        return seat is not None and (seat.life, seat.node) == (life.container, life.node)

    def forget(self, life: Life) -> None:
        """Take a container for ended whose node has not reported that in time: it may be lost."""
        self.ending.discard(life)

    def calls(self) -> str:
        """Return the id of the attempt that calls members which have not joined; "" if none does."""
        attempt = self._open
        is_calling = attempt is not None and attempt.is_called and len(attempt.seats) < attempt.join.size
        return attempt.id if attempt is not None and is_calling else ""

    def missed(self) -> dict[str, str]:
        """Return what is known of members that no dump gets: that they are being stopped, or have ended without one."""
        stopping = {life.member: "is being stopped" for life in self.ending}
        return {**stopping, **{name: _fate(why) for name, why in self._ended.items()}}

    @property
    def standing(self) -> tuple[object, ...]:
        """All that members may wait for: as long as it is the same, who was told to wait would be told so again."""
        attempt, ending = self.attempt, sorted(self.ending)
        if attempt is None:
            return (*ending,)
        met = sum(map(attempt.is_met, range(len(attempt.phases))))
        return attempt.epoch, met, attempt.ballot, attempt.reason, len(self._over), *ending

    @property
    def _open(self) -> Attempt | None:
        """The attempt that may still come to either end."""
        attempt = self.attempt
        return None if attempt is None or attempt.reason or attempt.is_decided else attempt

    def _standing(self, attempt: Attempt, place: int, about: Iterable[str] = ()) -> Answer:
        if attempt.reason:
            return attempt.over
        if not attempt.is_met(place):
            ended = ", ".join(self._all_ended(attempt))
            return Answer(State.WAIT, attempt.epoch, ballot=attempt.ballot, joined=len(attempt.seats), ended=ended)
        told = attempt.told.get(attempt.phases[place], {})
        return Answer(State.MET, attempt.epoch, told={key: told[key] for key in about if key in told})

    def _all_ended(self, attempt: Attempt) -> list[str]:
        """Return who has ended without a dump, if no other member of a dump is missing."""
        gone = sorted(self._ended.keys() - attempt.seats.keys())
        is_all = _is_dump(attempt) and 0 < len(gone) >= attempt.join.size - len(attempt.seats)
        return [f"{name} {_fate(self._ended[name])}" for name in gone[:_SHOWN]] if is_all else []

    def _give_up(self, silence_s: float) -> None:
        """End the open attempt if its members have asked nothing for too long."""
        attempt = self._open
        if attempt is not None and silence_s > (GATHERING_S if attempt.is_gathering else AT_WORK_S):
            self._end(attempt, f"its members have asked nothing for {silence_s:.0f} s")

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

    def _end(self, attempt: Attempt, reason: str, *, is_short: bool = False, is_displaced: bool = False) -> None:
        if not attempt.reason:
            attempt.reason = printable(reason)[:_MAX_REASON]
            attempt.is_short, attempt.is_displaced = is_short, is_displaced
            self._remember(attempt, attempt.over)

    def _retire(self) -> None:
        """Close a decided attempt: a member of it that comes late does not open another one."""
        if self.attempt is not None and self.attempt.is_decided:
            ended = Answer(State.OVER, self.attempt.epoch, f"attempt {self.attempt.epoch} has ended")
            self._remember(self.attempt, ended)

    def _remember(self, attempt: Attempt, over: Answer) -> None:
        self._over |= {seat.session: over for seat in attempt.seats.values()}
        for session in list(self._over)[: -max(_KEPT_OVER, len(attempt.seats))]:
            del self._over[session]

    def _earlier(self, claim: Claim) -> Answer:
        """Answer a member of an attempt that is not the one known: it was decided, or it is over."""
        decided = self._decided.get(claim.epoch)
        if decided is not None and decided.sessions.get(claim.member) == claim.session:
            return Answer(State.MET, claim.epoch, told=decided.told)
        unknown = Answer(State.OVER, reason=f"attempt {claim.epoch} is no longer known (its coordinator was restarted)")
        return self._over.get(claim.session, unknown)._replace(epoch=claim.epoch)


def _has_seat(attempt: Attempt, claim: Claim) -> bool:
    seat = attempt.seats.get(claim.member)
    return seat is not None and (seat.session, seat.node) == (claim.session, claim.node)


def _is_dump(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.join.act == "dump"


def _is_of_another(attempt: Attempt, claim: Claim, wanted: Join) -> bool:
    """Return whether another container of the member takes part in an open dump, to which this one comes, too."""
    seat = attempt.seats.get(claim.member)
    is_other = seat is not None and bool(seat.life and claim.life) and seat.life != claim.life
    return is_other and _is_dump(attempt) and wanted.act == "dump"


def _fate(why: str | None) -> str:
    """Return what became of a member that is missing, in words."""
    return "never joined" if why is None else f"has ended without a checkpoint: {why}"


def _unrestored(member: tuple[str, str]) -> str:
    return f"{member[0]} is not restored: {member[1]}"


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
