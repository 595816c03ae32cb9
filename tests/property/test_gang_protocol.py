"""The protocol of gangs, explored: messages in every order, lost, late and repeated; deaths; restarted coordinators."""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ocihook.gang.protocol import PHASES, Answer, Attempt, Claim, Gang, Join, Phase, State

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
    end: str = ""  # met, over, dead
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
            ended = bool(attempt.reason), attempt.is_decided, attempt.is_called
            now = attempt.epoch, attempt.join, seats, counted, ended
        durable = tuple(sorted((e, tuple(s)) for e, s in gang._decided.items()))
        return gang.epoch, now, durable, frozenset(gang._over), self.players, self.sent, self.faults, self.log


def make_gang(epoch: int = 0, decided: dict[int, list[str]] | None = None) -> Gang:
    return Gang(str, lambda _: "", epoch=epoch, decided=decided or {})


def clone(gang: Gang) -> Gang:
    other = make_gang(gang.epoch, {**gang._decided})  # type: ignore[dict-item]
    other._over = dict(gang._over)
    a = gang.attempt
    if a is not None:
        seats = {name: copy.copy(seat) for name, seat in a.seats.items()}
        counted = a.ballot, a.ayes, a.noes, a.skipped, a.reason, a.is_decided, a.is_called, a.id
        other.attempt = Attempt(a.epoch, a.join, seats, {}, {}, list(a.reached), *counted)
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
    ) -> None:
        self.act, self.names, self.lockers, self.ballots = act, names, frozenset(lockers), ballots
        self.callers, self.listeners = callers, listeners  # who calls others; who is dumped only if it is called
        self.last = len(PHASES[act]) - 1
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
            anew = make_gang(state.gang.epoch, {**state.gang._decided})  # type: ignore[dict-item]
            yield state._replace(gang=anew, faults=state.faults - 1)

    def request_of(self, player: Player) -> Sent | None:
        return player.request(self.act, self.lockers, self.callers, self.listeners)

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
        if player.end in ("met", "over") and not before.end and before.epoch:
            log = tuple(sorted({*log, (before.epoch, player.end)}))
        return state._replace(players=players, faults=state.faults - cost, log=log)

    def deliver(self, state: Model, request: Sent) -> Iterator[Model]:
        gang = clone(state.gang)
        answer = self.ask(gang, request)
        if request[-1]:  # who was called ends nothing
            before, after = state.gang.attempt, gang.attempt
            assert (before and (before.id, before.reason)) == (after and (after.id, after.reason)), state
        yield state._replace(gang=gang)  # and the answer is lost
        for number, player in enumerate(state.players):
            if self.request_of(player) == request:
                yield self.replaced(state._replace(gang=gang), number, (self.heard(player, answer), 0))

    def ask(self, gang: Gang, request: Sent) -> Answer:
        name, session, epoch, what, ballot, is_locked, called = request
        claim = Claim(name, session, epoch=epoch)
        if what == "join":
            return gang.join(claim, Join(self.act, len(self.names)), called)
        if what == "call":
            return gang.meet(claim, Phase.ARRIVED, calls=True)
        if what == "leave":
            return gang.leave(claim, "failed")
        if what == "vote":
            return gang.vote(claim, ballot, is_locked=is_locked)
        return gang.meet(claim, Phase(what))

    def heard(self, player: Player, answer: Answer) -> Player:
        if answer.state is State.WAIT:
            return player
        if answer.state is State.AGAIN:
            is_far = answer.ballot > self.ballots  # as far as is looked
            return player._replace(ballot=answer.ballot, votes_aye=False, end="dead" if is_far else "")
        if answer.state is State.OVER or player.is_leaving or player.place == self.last:
            return player._replace(end="over" if answer.state is State.OVER else "met")
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


class Unbound(Explorer):
    """Has a coordinator that lets members which were called join whatever is open, or open another one."""

    def ask(self, gang: Gang, request: Sent) -> Answer:
        return super().ask(gang, (*request[:-1], ""))


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
