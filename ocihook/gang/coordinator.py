"""The coordinator: gangs by their names, requests of members as JSON, and what is durable of their attempts."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import GangError, plain
from ocihook.gang.cut import End, contradictions, described
from ocihook.gang.epochs import Epochs, all_gangs
from ocihook.gang.protocol import (
    CHOICE,
    LONGEST_WAIT_S,
    REMEMBERED,
    Answer,
    Attempt,
    Claim,
    Gang,
    Join,
    Life,
    Phase,
    State,
)
from ocihook.packs.frame import as_object
from ocihook.session.record import from_json, to_json

LONGEST_WATCH_S = 5.0  # that a node's waits for a call
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_VERBS = ("join", "meet", "vote", "leave", "settle", "ended", "unrestored", "watch")
_OF_MEMBERS = ("meet", "vote")  # who asks these takes part
_LONGEST_END_S = 7200.0  # that a node may say the end of a container takes
_Key = tuple[str, str]  # a gang's namespace and name


class _End(NamedTuple):
    """When a container is to have ended that is being stopped."""

    within_s: float  # of what it has asked last
    at: float  # by the monotonic clock


class _Served:
    """A gang, and those who wait in it: woken when its standing has changed, and only then."""

    def __init__(self, gang: Gang, epochs: Epochs, note_call: Callable[[str], None]) -> None:
        self.gang, self.epochs, self._note_call = gang, epochs, note_call
        self.changed = threading.Condition()
        self._heard = time.monotonic()  # when somebody asked who takes part
        self._ends: dict[Life, _End] = {}

    def ask(self, node: str, request: Mapping[str, Any]) -> Answer:
        """Ask once, with the lock of `changed`."""
        before, now = self.gang.standing, time.monotonic()
        try:
            self._forget_late(now)
            answer = _ask(self.gang, node, request, now - self._heard)
            is_in = answer.state is State.MET and request["verb"] == "join"
            if is_in or (request["verb"] in _OF_MEMBERS and answer.state is not State.OVER):
                self._heard = now
            self._note_end(Life(str(request["member"]), str(request.get("life", "")), node), request, now)
            return answer
        finally:
            if self.gang.standing != before:
                self.changed.notify_all()
            self._note_call(self.gang.calls())

    def wait(self, until: float, *, is_settling: bool) -> bool:
        """Wait for a change, with the lock of `changed`; who settles, until a container is late to end, too."""
        ends = [until, *(end.at for life, end in self._ends.items() if not self.gang.is_at_dump(life))]
        return self.changed.wait((min(ends) if is_settling else until) - time.monotonic())

    def _forget_late(self, now: float) -> None:
        """Forget containers that were to end by now: a node that is lost does not report it."""
        for life in list(self.gang.ending):
            if now >= self._ends.setdefault(life, _End(0.0, now)).at and not self.gang.is_at_dump(life):
                self.gang.forget(life)
        self._ends = {life: end for life, end in self._ends.items() if life in self.gang.ending}

    def _note_end(self, life: Life, request: Mapping[str, Any], now: float) -> None:
        """Note when a container is late to end, of whose dump this is: counted from what it has asked last."""
        if life in self.gang.ending:
            known = self._ends.get(life, _End(0.0, now))
            within_s = min(float(request.get("ends_within_s", known.within_s)), _LONGEST_END_S)
            self._ends[life] = _End(within_s, now + within_s)


class _Calls:
    """Which attempts call members, and who watches for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[_Key, str] = {}
        self._watching: defaultdict[_Key, set[threading.Event]] = defaultdict(set)

    def note(self, key: _Key, attempt: str) -> None:
        """Note which attempt of a gang calls; "": none does. Those who watch this gang are woken if it is another."""
        with self._lock:
            if attempt != self._calls.get(key, ""):
                self._calls[key] = attempt
                for watching in self._watching.get(key, ()):
                    watching.set()

    def watch(self, seen: Mapping[_Key, str], until: float) -> list[list[str]]:
        """Wait until a gang calls; return namespaces, names and attempts of those that do: not what was seen."""
        woken = threading.Event()
        with self._lock:
            for key in seen:
                self._watching[key].add(woken)
        try:
            while True:
                woken.clear()
                known = [(key, self._calls.get(key, "")) for key in seen]
                calls = [[*key, attempt] for key, attempt in known if attempt not in ("", seen[key])]
                if calls or not woken.wait(max(0.0, until - time.monotonic())):
                    return calls
        finally:
            with self._lock:
                for key in seen:
                    self._watching[key].discard(woken)
                    if not self._watching[key]:
                        del self._watching[key]


class Coordinator:
    """All gangs that one coordinator serves; may be asked by many threads."""

    def __init__(self, root: Path) -> None:
        """Begin with what is on disk.

        Args:
            root: below which each gang has a directory.
        """
        self._root = root
        self._served: dict[_Key, _Served] = {}
        self._lock = threading.Lock()  # of these
        self._calls = _Calls()

    def handle(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a member, or a node that watches gangs; wait for a while if others are missing, or nobody calls.

        Args:
            node: that sends the request, as the transport authenticated it.
            request: of the member.

        Raises:
            GangError: if the request is malformed, or nothing can be stored.
        """
        is_watch = request.get("verb") == "watch"
        longest_s = LONGEST_WATCH_S if is_watch else LONGEST_WAIT_S
        wait_s = request.get("wait_s", longest_s)
        until = time.monotonic() + (min(longest_s, wait_s) if isinstance(wait_s, int | float) else 0.0)
        try:
            if is_watch:
                gangs = request["gangs"]
                seen = {(str(namespace), str(name)): str(attempt) for namespace, name, attempt in gangs}
                return {"calls": self._calls.watch(seen, until)}
            key = str(request["namespace"]), str(request["gang"])
            served = self._find(key)
            if request.get("verb") == "complete":
                with served.changed:
                    return {"is_known": served.epochs.note_complete(*_completed(request), node)}
            with served.changed:
                answer = served.ask(node, request)
                is_settling = request.get("verb") == "settle"
                while answer.state is State.WAIT and served.wait(until, is_settling=is_settling):
                    answer = served.ask(node, request)
        except _MALFORMED as error:
            raise GangError(f"not a valid request of a member: {error!r}") from error
        except OSError as error:
            raise GangError(f"the coordinator cannot store anything: {plain(error)}") from error
        return {name: value for name, value in to_json(answer._asdict()).items() if value}

    def status(self) -> list[dict[str, Any]]:
        """Return what is known of all gangs."""
        return [self._status_of(epochs) for epochs in all_gangs(self._root)]

    def _status_of(self, epochs: Epochs) -> dict[str, Any]:
        found: dict[str, Any] = {"namespace": epochs.namespace, "gang": epochs.name, "epochs": [], "incomplete": {}}
        for epoch, missing in epochs.dumps():
            if missing:
                found["incomplete"][str(epoch)] = missing
            else:
                found["epochs"].append(epoch)
        served = self._served.get((epochs.namespace, epochs.name))
        if served is not None:
            with served.changed:
                found["missed"] = served.gang.missed()
                if served.gang.attempt is not None:
                    found["attempt"] = _describe(served.gang.attempt)
        return found

    def _find(self, key: _Key) -> _Served:
        with self._lock:
            if key not in self._served:
                epochs = Epochs(self._root, *key)
                decided = epochs.latest(REMEMBERED)
                gang = Gang(epochs.take, partial(_decide, epochs), epoch=epochs.last, decided=decided)
                self._served[key] = _Served(gang, epochs, partial(self._calls.note, key))
            return self._served[key]


def _completed(request: Mapping[str, Any]) -> tuple[int, str, str]:
    return int(request["epoch"]), str(request["attempt"]), str(request["member"])


def _describe(attempt: Attempt) -> dict[str, Any]:
    return {
        "epoch": attempt.epoch,
        "act": attempt.join.act,
        "size": attempt.join.size,
        "state": "over" if attempt.reason else "decided" if attempt.is_decided else "open",
        "reason": attempt.reason,
        "members": {name: _phase_of(attempt, seat.reached) for name, seat in sorted(attempt.seats.items())},
    }


def _phase_of(attempt: Attempt, reached: int) -> str:
    return "joined" if reached < 0 else attempt.phases[reached].value


def _ask(gang: Gang, node: str, request: Mapping[str, Any], silence_s: float) -> Answer:
    verb, life = request["verb"], str(request.get("life", ""))
    if verb == "settle":
        return gang.settle(silence_s, (str(request["member"]), node))
    if verb in ("ended", "unrestored"):
        report = gang.report_end if verb == "ended" else gang.report_unrestored
        return report(Life(str(request["member"]), life, node), str(request.get("why", "")))
    claim = Claim(str(request["member"]), str(request["session"]), node, int(request.get("epoch", 0)), life)
    if verb == "join":
        after = request.get("after")
        return gang.join(
            claim,
            from_json(Join, request["join"]),
            str(request.get("called", "")),
            silence_s,
            stops="ends_within_s" in request,
            after=None if after is None else int(after),
        )
    if verb == "vote":
        return gang.vote(claim, int(request["ballot"]), is_locked=request["is_locked"] is True)
    if verb == "leave":
        phase = request.get("waited_for")
        return gang.leave(claim, str(request["reason"]), Phase(phase) if phase else None)
    if verb == "meet":
        about, calls = map(str, request.get("about", ())), request.get("calls") is True
        return gang.meet(claim, Phase(request["phase"]), request.get("message"), about, calls=calls)
    raise ValueError(f"{verb!r} is not one of {', '.join(_VERBS)}")


def _decide(epochs: Epochs, attempt: Attempt) -> str:
    """Store an attempt whose members have all reached its end; return why it is not valid."""
    said = attempt.messages
    if attempt.join.act == "choose":
        return _decide_choice(epochs, attempt)
    fitting = 0
    if attempt.join.act == "dump":
        try:
            ends = {name: [from_json(End, end) for end in (said.get(name) or {})["ends"]] for name in attempt.seats}
        except _MALFORMED as error:
            return f"a member's list of connections is malformed: {error!r}"
        wrong, fitting = contradictions(ends)
        if wrong:
            return described(wrong)
    try:
        members = {
            name: {
                **as_object((said.get(name) or {}).get("checkpoint", {})),
                "session": seat.session,
                "node": seat.node,
            }
            for name, seat in sorted(attempt.seats.items())
        }
    except _MALFORMED as error:
        return f"a member did not tell of its checkpoint: {error!r}"
    record = {
        "act": attempt.join.act,
        "attempt": attempt.id,
        "source": attempt.join.source,
        "connections": fitting,
        "members": members,
    }
    return _keep(epochs, attempt, record)


def _decide_choice(epochs: Epochs, attempt: Attempt) -> str:
    """Choose the last dump that every member can be restored from, if there is one: what one lacks is not complete."""
    offers: list[list[str]] = []
    for name in sorted(attempt.seats):
        dumps = attempt.messages.get(name)
        if not isinstance(dumps, list) or not all(isinstance(dump, str) for dump in dumps):
            return f"{name} did not tell what it can be restored from"
        offers.append(dumps)
    common = {*offers[0]}.intersection(*offers)
    chosen = next((dump for dump in reversed(offers[0]) if dump in common), "")  # any member's order is as good
    attempt.told[Phase.CHOSEN] = {CHOICE: chosen}
    members = {name: {"session": seat.session, "node": seat.node} for name, seat in sorted(attempt.seats.items())}
    return _keep(epochs, attempt, {"act": "choose", "attempt": attempt.id, "chosen": chosen, "members": members})


def _keep(epochs: Epochs, attempt: Attempt, record: Mapping[str, Any]) -> str:
    try:
        epochs.keep(attempt.epoch, {**record, "decided": time.time()})
    except OSError as error:
        return f"the coordinator cannot store it: {plain(error)}"
    return ""
