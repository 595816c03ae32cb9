"""The protocol of gangs, explored: messages in every order, lost, late and repeated; deaths; restarted coordinators."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from ocihook.gang.protocol import (
    AT_WORK_S,
    CHOICE,
    GATHERING_S,
    PHASES,
    Answer,
    Attempt,
    Claim,
    Decide,
    Decided,
    Gang,
    Join,
    Life,
    Phase,
    State,
)

Sent = tuple[str, str, int, str, int, bool, str]  # member, session, epoch, what, ballot, is_locked, called


class Player(NamedTuple):
    """A member as membership.py plays it: what it asks now, and how far it has come."""

    name: str
    life: int = 0  # of its sessions
    epoch: int = 0
    place: int = -1  # that it asks for; -1: it joins
    ballot: int = 1
    votes_aye: bool = False
    is_leaving: bool = False
    end: str = ""  # met and what was chosen; over, dead
    called: str = ""  # to which attempt

    @property
    def session(self) -> str:
        return f"{self.name}{self.life}"

    def request(self, act: str, lockers: frozenset[str], callers: str = "", listeners: str = "") -> Sent | None:
        if self.end or (self.name in listeners and not self.called):
            return None
        if self.is_leaving:
            what = "leave"
        elif self.place < 0:
            what = "join"
        else:
            what = "call" if self.place == 0 and self.name in callers else PHASES[act][self.place]
        if what == Phase.LOCKED and self.name in lockers:
            return (self.name, self.session, self.epoch, "vote", self.ballot, self.votes_aye, "")
        return (self.name, self.session, self.epoch, what, 0, False, self.called if what == "join" else "")


class Model(NamedTuple):
    """All that there is: the coordinator, what is durable, its members, and everything ever sent."""

    gang: Gang
    players: tuple[Player, ...]
    sent: frozenset[Sent]
    faults: int  # that may still happen
    log: tuple[tuple[int, str], ...] = ()  # what members were told in the end: epoch and met or over

    @property
    def key(self) -> object:
        gang = self.gang
        attempt = gang.attempt
        now = None
        if attempt is not None:
            seats = tuple(sorted((n, s.session, s.reached, s.voted) for n, s in attempt.seats.items()))
            counted = attempt.ballot, attempt.ayes, attempt.noes, attempt.skipped, tuple(attempt.reached)
            ended = bool(attempt.reason), attempt.is_short, attempt.is_displaced, attempt.is_decided, attempt.is_called
            now = attempt.epoch, attempt.join, seats, counted, ended
        durable = tuple(sorted((e, *sorted(d.sessions.items())) for e, d in gang._decided.items()))
        lives = gang._dumped, frozenset(gang._ended), frozenset(gang.ending)
        return gang.epoch, now, durable, frozenset(gang._over), lives, self.players, self.sent, self.faults, self.log


def decide(attempt: Attempt) -> str:
    if attempt.join.act == "choose":
        attempt.told[Phase.CHOSEN] = {CHOICE: f" {attempt.epoch}"}
    return ""


def refuse(attempt: Attempt) -> str:
    return f"no space for {attempt.epoch}"


def make_gang(epoch: int = 0, decided: Mapping[int, Decided] | None = None, how: Decide = decide) -> Gang:
    return Gang(str, how, epoch=epoch, decided=decided or {})


def clone(gang: Gang, how: Decide = decide) -> Gang:
    other = make_gang(gang.epoch, gang._decided, how)
    other._over, other._ended, other.ending = dict(gang._over), dict(gang._ended), set(gang.ending)
    other._dumped = gang._dumped
    if gang.attempt is not None:
        other.attempt = attempt = copy.copy(gang.attempt)
        attempt.seats = {name: copy.copy(seat) for name, seat in attempt.seats.items()}
        attempt.told, attempt.reached = dict(attempt.told), list(attempt.reached)
        attempt.messages, attempt.on_node = {}, Counter(attempt.on_node)
    return other


class Explorer:
    """Looks at every state that can be reached, and asserts what must hold in each."""

    def __init__(
        self,
        act: str,
        names: str,
        *,
        faults: int,
        lockers: str = "",
        ballots: int = 1,
        callers: str = "",
        listeners: str = "",
        wants: Mapping[str, Join] | None = None,
    ) -> None:
        self.act, self.names, self.lockers, self.ballots = act, names, frozenset(lockers), ballots
        self.callers, self.listeners = callers, listeners  # who calls others; who is dumped only if it is called
        self.wants = wants or {}  # what sessions want that the others do not
        self.start = Model(make_gang(), tuple(map(Player, names)), frozenset(), faults)
        self.ends: set[tuple[str, ...]] = set()

    def run(self) -> int:
        seen, todo = {self.start.key}, [self.start]
        while todo:
            state = todo.pop()
            self.check(state)
            for following in self.steps(state):
                if following.key not in seen:
                    seen.add(following.key)
                    todo.append(following)
        return len(seen)

    def met(self) -> set[tuple[str, ...]]:
        """Return the ends that have been reached in which all have met."""
        self.run()
        return {end for end in self.ends if all(one.startswith("met") for one in end)}

    def steps(self, state: Model) -> Iterator[Model]:
        for number, player in enumerate(state.players):
            for changed in self.choices(player, state.faults):
                yield self.replaced(state, number, changed)
            called = state.gang.calls() if player.name in self.listeners and not player.called else ""
            if called and not player.end:  # its node asks, and may hear the same again
                yield self.replaced(state, number, (player._replace(called=called), 0))
            request = self.request_of(player)
            if request is not None and request not in state.sent:
                yield state._replace(sent=state.sent | {request})
        for request in state.sent:
            yield from self.deliver(state, request)
        if state.faults:  # the coordinator begins anew with what is durable
            anew = make_gang(state.gang.epoch, state.gang._decided)
            yield state._replace(gang=anew, faults=state.faults - 1)

    def request_of(self, player: Player) -> Sent | None:
        return player.request(self.wanted(player.session).act, self.lockers, self.callers, self.listeners)

    def wanted(self, session: str) -> Join:
        return self.wants.get(session, Join(self.act, len(self.names)))

    def choices(self, player: Player, faults: int) -> Iterator[tuple[Player, int]]:
        is_voting = not player.end and player.place == 1 and self.act == "dump" and player.name in self.lockers
        if is_voting and not player.votes_aye and not player.is_leaving:
            yield player._replace(votes_aye=True), 0
        if not faults:
            return
        if not player.end:
            yield player._replace(end="dead"), 1
            if not player.is_leaving:
                yield player._replace(is_leaving=True), 1  # it fails, or has waited for long enough
        if player.end in ("dead", "over"):
            yield Player(player.name, player.life + 1), 1

    @staticmethod
    def replaced(state: Model, number: int, changed: tuple[Player, int]) -> Model:
        player, cost = changed
        players = (*state.players[:number], player, *state.players[number + 1 :])
        before = state.players[number]
        log = state.log
        if player.end not in ("", "dead") and not before.end and before.epoch:
            log = tuple(sorted({*log, (before.epoch, player.end)}))
        return state._replace(players=players, faults=state.faults - cost, log=log)

    def deliver(self, state: Model, request: Sent) -> Iterator[Model]:
        for silence_s, how, cost in self.circumstances(state, request):
            gang = clone(state.gang, how)
            answer = self.ask(gang, request, silence_s)
            after = state._replace(gang=gang, faults=state.faults - cost)
            if request[-1]:  # who was called ends nothing
                before, now = state.gang.attempt, gang.attempt
                assert (before and (before.id, before.reason)) == (now and (now.id, now.reason)), state
            yield after  # and the answer is lost
            for number, player in enumerate(state.players):
                if self.request_of(player) == request:
                    yield self.replaced(after, number, (self.heard(player, answer), 0))

    def circumstances(self, state: Model, request: Sent) -> Iterator[tuple[float, Decide, int]]:
        """Yield how long nobody has asked, what deciding comes to, and how many faults that is."""
        yield 0.0, decide, 0
        attempt = state.gang.attempt
        if request[3] == "join" and attempt is not None:
            alive = {player.session for player in state.players if not player.end}
            is_wrong = any(seat.session in alive for seat in attempt.seats.values())  # a clock that jumps
            if state.faults >= is_wrong:
                yield math.inf, decide, is_wrong

    def ask(self, gang: Gang, request: Sent, silence_s: float = 0.0) -> Answer:
        name, session, epoch, what, ballot, is_locked, called = request
        claim = Claim(name, session, epoch=epoch)
        if what == "join":
            return gang.join(claim, self.wanted(session), called, silence_s)
        if what == "call":
            return gang.meet(claim, Phase.ARRIVED, calls=True)
        if what == "leave":
            return gang.leave(claim, "failed")
        if what == "vote":
            return gang.vote(claim, ballot, is_locked=is_locked)
        return gang.meet(claim, Phase(what), about=[CHOICE])

    def heard(self, player: Player, answer: Answer) -> Player:
        if answer.state is State.WAIT:
            return player
        if answer.state is State.AGAIN:
            is_far = answer.ballot > self.ballots  # as far as is looked
            return player._replace(ballot=answer.ballot, votes_aye=False, end="dead" if is_far else "")
        if answer.state is State.OVER:
            return player._replace(end="over")
        if player.is_leaving and self.act == "choose":  # who has failed does not ask what was chosen
            return player._replace(end="dead")
        if player.is_leaving or player.place == len(PHASES[self.wanted(player.session).act]) - 1:
            return player._replace(end=f"met{answer.told.get(CHOICE, '')}")
        return player._replace(place=player.place + 1, epoch=answer.epoch)

    def check(self, state: Model) -> None:
        told = dict.fromkeys((epoch for epoch, _ in state.log), frozenset[str]())
        for epoch, end in state.log:
            told[epoch] |= {end}
        assert all(len(ends) == 1 for ends in told.values()), f"one went on, another did not: {state}"
        for player in state.players:
            assert not player.called or player.epoch in (0, int(player.called)), (
                f"in an attempt that did not call: {state}"
            )
            peers = [other for other in state.players if other.epoch == player.epoch and other is not player]
            if player.place > 0 and not player.end:  # it has passed the phase before
                assert all(p.place >= player.place - 1 or p.end or p.is_leaving for p in peers), state
                if self.act == "dump" and player.place > 1:
                    locked = [p for p in peers if p.name in self.lockers and not p.end and p.place == 1]
                    assert all(p.votes_aye for p in locked), f"one checkpoints, another is not locked: {state}"
        self.ends.add(tuple(player.end for player in state.players))


@pytest.mark.parametrize("act", ["dump", "restore"])
def test_no_two_members_are_told_different_ends(act: str) -> None:
    explorer = Explorer(act, "ab", faults=2)
    assert explorer.run() > 1000
    assert ("met", "met") in explorer.ends
    assert ("over", "over") in explorer.ends
    assert ("dead", "over") in explorer.ends


@pytest.mark.parametrize(("faults", "ballots"), [(0, 2), (1, 1)])
def test_no_gpu_is_checkpointed_before_all_are_locked(faults: int, ballots: int) -> None:
    explorer = Explorer("dump", "ab", faults=faults, lockers="ab", ballots=ballots)
    assert explorer.run() > 1000
    assert ("met", "met") in explorer.ends


def test_a_member_without_a_gpu_holds_up_no_ballot() -> None:
    explorer = Explorer("dump", "ab", faults=0, lockers="a", ballots=2)
    explorer.run()
    assert ("met", "met") in explorer.ends


def test_three_members_come_to_one_end() -> None:
    explorer = Explorer("restore", "abc", faults=1)
    explorer.run()
    assert ("met", "met", "met") in explorer.ends


def test_a_member_that_calls_gets_the_others() -> None:
    explorer = Explorer("dump", "ab", faults=2, callers="a", listeners="b")
    assert explorer.run() > 1000
    assert ("met", "met") in explorer.ends
    assert ("over", "over") in explorer.ends


def test_a_member_that_two_call_comes_to_one_of_them() -> None:
    explorer = Explorer("dump", "abc", faults=0, callers="ab", listeners="c")
    explorer.run()
    assert ("met", "met", "met") in explorer.ends


def test_nobody_is_dumped_that_nobody_calls() -> None:
    explorer = Explorer("dump", "ab", faults=2, listeners="b")
    explorer.run()
    assert {end for _, end in explorer.ends} <= {"", "dead"}


@pytest.mark.parametrize(
    ("act", "wanted"),
    [
        ("dump", Join("dump", 3)),
        ("dump", Join("restore", 2)),
        ("restore", Join("restore", 2, 7)),
        ("choose", Join("dump", 2)),
    ],
)
def test_members_that_contradict_one_another_come_to_no_common_end(act: str, wanted: Join) -> None:
    explorer = Explorer(act, "ab", faults=2, wants={"b0": wanted})
    assert explorer.met(), "in other lives"
    assert ("over", "over") in explorer.ends
    assert not Explorer(act, "ab", faults=0, wants={"b0": wanted}).met()


def test_all_are_told_the_same_choice() -> None:
    explorer = Explorer("choose", "ab", faults=2)
    assert explorer.run() > 1000
    assert {("met 1", "met 1"), ("met 2", "met 2"), ("over", "over")} <= explorer.ends
    Explorer("choose", "abc", faults=1).run()


class Full(Explorer):
    """Has a coordinator that may be unable to store what is decided."""

    def circumstances(self, state: Model, request: Sent) -> Iterator[tuple[float, Decide, int]]:
        yield from super().circumstances(state, request)
        if state.faults:
            yield 0.0, refuse, 1


@pytest.mark.parametrize("act", ["dump", "restore", "choose"])
def test_what_cannot_be_stored_has_happened_to_nobody(act: str) -> None:
    explorer = Full(act, "ab", faults=2)
    assert explorer.met(), "at another time"
    assert ("over", "over") in explorer.ends


@pytest.mark.parametrize("act", ["dump", "restore"])
@pytest.mark.parametrize("order", ["ab", "ba", "cd"])
def test_who_died_while_it_waited_holds_up_nobody(act: str, order: str) -> None:
    """Its node has lost power: nobody has left. All come again, in any order, or others in their place."""
    gang, wanted = make_gang(), Join(act, 2)
    assert gang.join(Claim("a", "a0"), wanted).epoch == 1
    assert gang.meet(Claim("a", "a0", epoch=1), PHASES[act][0]).state is State.WAIT
    claims = [Claim(name, f"{name}1", epoch=2) for name in order]
    for claim, silence_s in zip(claims, (GATHERING_S + 1, 0), strict=True):
        assert gang.join(claim._replace(epoch=0), wanted, silence_s=silence_s).epoch == 2
    for phase in PHASES[act]:
        states = [gang.meet(claim, phase).state for claim in claims]
        assert states == [State.WAIT, State.MET]
    assert gang.meet(Claim("a", "a0", epoch=1), PHASES[act][0]).state is State.OVER


@pytest.mark.parametrize(("silence_s", "state"), [(AT_WORK_S - 1, State.OVER), (AT_WORK_S + 1, State.MET)])
def test_members_at_work_may_be_silent_for_longer(silence_s: float, state: State) -> None:
    gang, wanted = make_gang(), Join("dump", 2)
    for name in "ab":
        gang.join(Claim(name, name), wanted)
    for name in "ab":
        gang.meet(Claim(name, name, epoch=1), Phase.ARRIVED)
    assert gang.join(Claim("c", "c"), wanted, silence_s=silence_s).state is state
    assert gang.meet(Claim("a", "a", epoch=1), Phase.ARRIVED).state is (
        State.MET if state is State.OVER else State.OVER
    )


class Watched(Explorer):
    """Whoever was told to wait is told so again, as long as the gang's standing is the same: nobody need wake it."""

    def deliver(self, state: Model, request: Sent) -> Iterator[Model]:
        for after in super().deliver(state, request):
            if after.gang.standing == state.gang.standing:
                for player in state.players:
                    mine = self.request_of(player)
                    if mine is not None and self.waits(state, mine):
                        assert self.ask(clone(after.gang), mine).state is State.WAIT, (state, request, mine)
            yield after

    def waits(self, state: Model, request: Sent) -> bool:
        gang = clone(state.gang)
        return self.ask(gang, request).state is State.WAIT and state._replace(gang=gang).key == state.key


@pytest.mark.parametrize(
    ("act", "names", "lockers", "faults"), [("restore", "abc", "", 0), ("dump", "ab", "a", 0), ("restore", "ab", "", 2)]
)
def test_nobody_waits_for_what_does_not_change_the_standing(act: str, names: str, lockers: str, faults: int) -> None:
    assert Watched(act, names, faults=faults, lockers=lockers, ballots=2).met()


class Unbound(Explorer):
    """Has a coordinator that lets members which were called join whatever is open, or open another one."""

    def ask(self, gang: Gang, request: Sent, silence_s: float = 0.0) -> Answer:
        return super().ask(gang, (*request[:-1], ""), silence_s)


def test_the_explorer_finds_a_member_in_an_attempt_that_did_not_call_it() -> None:
    with pytest.raises(AssertionError):
        Unbound("dump", "ab", faults=2, callers="a", listeners="b").run()


class Forgetful(Explorer):
    """Has a coordinator that restarts without what it decided."""

    def steps(self, state: Model) -> Iterator[Model]:
        state.gang._decided.clear()
        yield from super().steps(state)


def test_the_explorer_finds_a_coordinator_that_forgets() -> None:
    with pytest.raises(AssertionError, match="one went on, another did not"):
        Forgetful("restore", "ab", faults=2).run()


class Replaced(Explorer):
    """Has two containers of each member: one is stopped or has crashed, the other comes for a choice at any time."""

    def __init__(self, names: str, *, crashed: str = "") -> None:
        super().__init__("dump", names, faults=0)
        players = [Player(name, end="dead" if name in crashed else "") for name in names]
        self.start = self.start._replace(players=(*players, *(Player(name.upper(), place=-2) for name in names)))
        self.last: list[Model] = []

    def wanted(self, session: str) -> Join:
        return Join("choose" if session[0].isupper() else "dump", len(self.names))

    def steps(self, state: Model) -> Iterator[Model]:
        found = False
        for following in map(self.pruned, super().steps(state)):
            found |= following.key != state.key
            yield following
        if not found:
            self.last.append(state)

    def pruned(self, state: Model) -> Model:
        """Return a state in which only what opens attempts comes late: the others' messages are explored above."""
        current = {self.request_of(player) for player in state.players}
        late = {request for request in state.sent if request[3] == "join" and request[0].isupper()}
        return state._replace(sent=state.sent & (late | current))

    def request_of(self, player: Player) -> Sent | None:
        is_new = player.name.isupper()
        if not is_new and player.end in ("met", "over", "dead"):  # its node deletes it
            return (player.name, player.session, 0, "end", 0, player.end == "met", "")
        if is_new and player.place == -2 and not player.end:
            return (player.name, player.session, 0, "settle", player.life, False, "")
        if is_new and player.place == -1 and not player.end:
            return (player.name, player.session, player.epoch, "join", 0, False, "")
        return super().request_of(player)

    def ask(self, gang: Gang, request: Sent, silence_s: float = 0.0) -> Answer:
        name, session, epoch, what, _, is_dumped, _ = request
        claim = Claim(name.lower(), session, epoch=epoch, life=session)
        before = gang.attempt
        was_open = before is not None and before.join.act == "dump" and not (before.reason or before.is_decided)
        if what == "settle":
            answer = gang.settle()
        elif what == "end":
            answer = gang.report_end(Life(claim.member, session, ""), "" if is_dumped else "exit code 1")
            assert not was_open or is_dumped or (before and before.reason), "a dump waits for who has ended"
        elif what == "join" and name.isupper():
            answer = gang.join(claim._replace(epoch=0), self.wanted(session), after=epoch)
        elif what == "join":
            answer = gang.join(claim, self.wanted(session), stops=True)
        else:
            answer = super().ask(gang, (claim.member, *request[1:]), silence_s)
        if name.isupper() and was_open and before is not None:
            assert not before.reason, "a dump has lost to a choice"
            assert gang.attempt is before, "a dump has lost to a choice"
        return answer

    def heard(self, player: Player, answer: Answer) -> Player:
        if player.end:
            return player._replace(end=f"{player.end}, deleted")
        if answer.ended:  # it waits a little longer, and leaves
            return player._replace(is_leaving=True)
        if answer.again:
            return Player(player.name, player.life + 1, place=-2)
        if player.place == -2 and answer.state is State.MET:
            return player._replace(place=-1, epoch=answer.epoch, ballot=answer.epoch)  # after which it has looked
        heard = super().heard(player, answer)
        return heard._replace(place=4) if heard.place == 1 else heard  # who has dumped has passed all phases

    def check(self, state: Model) -> None:
        attempt = state.gang.attempt
        if attempt is not None and attempt.is_decided and attempt.join.act == "choose":
            looked = [
                player.ballot for player in state.players if player.epoch == attempt.epoch and player.name.isupper()
            ]
            assert min(looked) >= state.gang._dumped or attempt.epoch < state.gang._dumped, "of lists that are too old"
        self.ends.add(tuple(player.end for player in state.players))


@pytest.mark.parametrize("crashed", ["", "a"])
def test_who_comes_for_a_choice_waits_for_dumps_and_ends(crashed: str) -> None:
    """Old containers are dumped and end, new ones come, in every order: nothing is lost, no member waits in vain."""
    explorer = Replaced("ab", crashed=crashed)
    assert explorer.run() > 1000
    assert explorer.last
    for state in explorer.last:
        old, new = state.players[:2], state.players[2:]
        assert {one.end for one in old} <= ({"met, deleted"} if not crashed else {"over, deleted", "dead, deleted"})
        assert len({one.end for one in new}) == 1, state
        assert new[0].end.startswith("met"), state


class Hasty(Replaced):
    """Does not ask whether a dump has begun since it has looked for its own."""

    def ask(self, gang: Gang, request: Sent, silence_s: float = 0.0) -> Answer:
        if request[3] == "join" and request[0].isupper():
            request = (*request[:2], math.inf, *request[3:])  # type: ignore[assignment]
        return super().ask(gang, request, silence_s)


def test_the_explorer_finds_a_choice_of_lists_that_are_too_old() -> None:
    explorer = Hasty("ab")
    with pytest.raises(AssertionError):
        explorer.run()


def test_a_coordinator_that_begins_anew_lets_nobody_choose_of_lists_that_are_too_old() -> None:
    """It has forgotten who is being stopped, but not that a dump was decided since a member has looked."""
    gang = make_gang()
    looked = gang.settle()
    for name in "ab":
        gang.join(Claim(name, name, life=name), Join("dump", 2), stops=True)
    for name in "ab":
        gang.meet(Claim(name, name, epoch=1, life=name), Phase.DUMPED)
    anew = make_gang(gang.epoch, gang._decided)
    late = Claim("a", "new")
    assert anew.join(late, Join("choose", 2), after=looked.epoch).again
    settled = anew.settle()
    assert (settled.state, settled.epoch) == (State.MET, 1)
    assert anew.join(late._replace(session="newer"), Join("choose", 2), after=settled.epoch).state is State.MET


def test_a_dump_of_one_container_waits_for_that_of_another_of_its_member() -> None:
    gang, wanted = make_gang(), Join("dump", 2)
    old, new = Claim("a", "a0", life="old"), Claim("a", "a1", life="new")
    assert gang.join(old, wanted, stops=True).epoch == 1
    assert gang.join(new, wanted, stops=True).state is State.WAIT
    assert gang.attempt is not None
    assert not gang.attempt.reason
    gang.leave(old._replace(epoch=1), "it has failed")
    assert gang.join(new, wanted, stops=True).epoch == 2
    assert gang.join(new._replace(session="a2"), wanted).epoch == 3, "the same container: its earlier dump has ended"


def test_of_two_containers_that_come_for_a_choice_the_last_one_counts() -> None:
    gang, wanted = make_gang(), Join("choose", 2)
    for session in ("a0", "a1"):
        assert gang.join(Claim("a", session), wanted, after=0).epoch == 1
    gang.meet(Claim("a", "a1", epoch=1), Phase.CHOSEN)
    assert gang.meet(Claim("a", "a0", epoch=1), Phase.CHOSEN).state is State.OVER
    gang.join(Claim("b", "b0"), wanted, after=0)
    assert gang.meet(Claim("b", "b0", epoch=1), Phase.CHOSEN).state is State.MET


def test_a_member_that_has_ended_is_named_and_not_waited_for() -> None:
    gang, wanted = make_gang(), Join("dump", 3)
    gang.report_end(Life("2", "x", "n2"), "exit code 1")
    for name in "01":
        gang.join(Claim(name, name), wanted, stops=True)
        answer = gang.meet(Claim(name, name, epoch=1), Phase.ARRIVED)
        assert answer.ended == ("2 has ended without a checkpoint: exit code 1" if name == "1" else "")
    over = gang.leave(Claim("0", "0", epoch=1), "within 2 s", Phase.ARRIVED)
    assert over.short
    assert "2 (has ended without a checkpoint: exit code 1) did not reach 'arrived' within 2 s" in over.reason
    assert gang.join(Claim("2", "2"), wanted).state is State.MET, "it was made again"
    gang.join(Claim("0", "00"), wanted)
    gang.join(Claim("1", "11"), wanted)
    assert gang.meet(Claim("0", "00", epoch=2), Phase.ARRIVED).ended == ""


def test_who_is_not_restored_is_waited_for_by_nobody() -> None:
    gang, wanted = make_gang(), Join("restore", 3, 1)
    gang.join(Claim("a", "a0"), wanted)
    gang.report_unrestored(Life("b", "x", ""), "the remote is away")
    over = gang.meet(Claim("a", "a0", epoch=1), Phase.ADDRESSES)
    assert (over.state, over.reason) == (State.OVER, "b is not restored: the remote is away")
    assert gang.join(Claim("c", "c0"), wanted).reason == over.reason, "it comes later"
    gang.join(Claim("a", "a1"), Join("choose", 3))
    assert gang.join(Claim("a", "a2"), wanted).state is State.MET, "all choose again"


def test_an_end_of_an_earlier_container_ends_no_dump_of_the_next() -> None:
    gang, wanted = make_gang(), Join("dump", 2)
    gang.join(Claim("a", "a1", "n1", life="new"), wanted)
    for life in (Life("a", "old", "n1"), Life("a", "new", "n2")):  # late; forged by another node
        gang.report_end(life, "exit code 1")
        assert gang.meet(Claim("a", "a1", "n1", 1), Phase.ARRIVED).state is State.WAIT
    gang.report_end(Life("a", "new", "n1"), "exit code 1")
    assert gang.meet(Claim("a", "a1", "n1", 1), Phase.ARRIVED).short


def test_a_container_whose_node_is_lost_is_waited_for_until_it_is_forgotten() -> None:
    gang = make_gang()
    gang.join(Claim("a", "a0", "n1", life="x"), Join("dump", 2), stops=True)
    gang.leave(Claim("a", "a0", "n1", epoch=1), "failed")
    assert "containers of a are being stopped" in gang.settle().reason
    assert gang.settle(own=("a", "n2")).state is State.WAIT
    assert gang.settle(own=("a", "n1")).state is State.MET, "it is restarted, and its node knows whether it has ended"
    gang.report_end(Life("a", "x", "n2"), "")  # another node cannot say so
    (life,) = gang.ending
    gang.forget(life)
    assert gang.settle().state is State.MET


class Job:
    """A job of three as its controllers treat it: containers are stopped, crash, end and are made in a given order."""

    def __init__(self) -> None:
        self.gang = make_gang()
        self.epochs: dict[str, int] = {}  # of members' last dumps
        self.chosen: dict[str, str] = {}
        self.stopping: dict[str, Claim] = {}
        self.asking: dict[
            str, Claim
        ] = {}  # who comes for a choice; its epoch: after which it has looked, or that it is in

    def stop(self, name: str) -> None:
        claim = Claim(name, f"stop {name}", f"node {name}", life=f"old {name}")
        self.stopping[name] = claim._replace(epoch=self.gang.join(claim, Join("dump", 3), stops=True).epoch)

    def crash(self, name: str) -> None:
        self.gang.report_end(Life(name, f"old {name}", f"node {name}"), "exit code 1")

    def end(self, name: str) -> None:
        why = "" if name in self.epochs else "it was stopped"
        self.gang.report_end(Life(name, f"old {name}", f"node {name}"), why)

    def make(self, name: str) -> None:
        self.asking[name] = Claim(name, f"make {name} ", f"node of new {name}", life=f"new {name}")

    def go_on(self) -> None:
        """Let all ask again who wait, until nothing changes."""
        for phase in (Phase.ARRIVED, Phase.DUMPED):
            states = {name: self.gang.meet(claim, phase) for name, claim in self.stopping.items()}
            for name, answer in states.items():
                if answer.ended:
                    self.gang.leave(self.stopping[name], "within 2 s", phase)
                if phase is Phase.DUMPED and self.gang.meet(self.stopping[name], phase).state is State.MET:
                    self.epochs[name] = self.stopping[name].epoch
            if any(answer.state is State.OVER for answer in states.values()):
                self.stopping.clear()
        for name, claim in [*self.asking.items(), *self.asking.items()]:
            settled = self.gang.settle(own=(name, claim.node))
            if settled.state is State.MET and not claim.epoch:
                session = f"{claim.session}+"
                joined = self.gang.join(claim._replace(session=session), Join("choose", 3), after=settled.epoch)
                self.asking[name] = claim._replace(session=session, epoch=joined.epoch)
            answer = self.gang.meet(self.asking[name], Phase.CHOSEN, about=[CHOICE])
            if answer.again:
                self.asking[name] = claim._replace(epoch=0)
            if answer.state is State.MET:
                self.chosen[name] = answer.told[CHOICE]


_ORDERS = {
    "a JobSet is made anew after a failure: its workers before its leader has ended": (
        "crash 2, stop 1, stop 0, end 1, make 1, make 2, end 0, make 0",
        0,
    ),
    "a JobSet is made anew after a failure that comes while all are stopped": (
        "stop 0, stop 1, crash 2, make 2, end 0, make 0, end 1, make 1",
        0,
    ),
    "a JobSet whose member was evicted calls the others, and all are made anew": (
        "stop 0, stop 1, stop 2, end 1, end 2, make 1, make 2, end 0, make 0",
        3,
    ),
    "Kueue admits a JobSet again while its pods end": (
        "stop 0, make 0, stop 1, make 1, make 2, stop 2, end 0, end 1, end 2",
        3,
    ),
    "all are made before any is stopped": ("make 0, make 1, stop 0, stop 1, stop 2, make 2, end 2, end 1, end 0", 3),
}


@pytest.mark.parametrize("name", _ORDERS)
def test_orders_in_which_controllers_were_seen_to_act(name: str) -> None:
    order, dumped = _ORDERS[name]
    job = Job()
    for step in order.split(", "):
        what, member = step.split()
        getattr(job, what)(member)
        job.go_on()
    job.go_on()
    assert len(job.epochs) == dumped
    assert len(set(job.epochs.values())) <= 1
    assert set(job.chosen) == {"0", "1", "2"}
    assert len(set(job.chosen.values())) == 1
    assert all(int(chosen) > job.epochs.get(member, 0) for member, chosen in job.chosen.items()), (
        "they looked too early"
    )
