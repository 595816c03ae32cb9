"""The coordinator: gangs by their names, requests of members as JSON, and what is durable of their attempts."""

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ocihook.errors import GangError, plain
from ocihook.gang.cut import End, contradictions, described
from ocihook.gang.epochs import Epochs, all_gangs
from ocihook.gang.protocol import CHOICE, REMEMBERED, Answer, Attempt, Claim, Gang, Join, Phase, State
from ocihook.packs.frame import as_object
from ocihook.session.record import from_json, to_json

LONGEST_WAIT_S = 2.0  # that a request waits for other members; then the member asks again
LONGEST_WATCH_S = 5.0  # that a node's waits for a call
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_VERBS = ("join", "meet", "vote", "leave", "watch")


class Coordinator:
    """All gangs that one coordinator serves; may be asked by many threads."""

    def __init__(self, root: Path) -> None:
        """Begin with what is on disk.

        Args:
            root: below which each gang has a directory.
        """
        self._root = root
        self._gangs: dict[tuple[str, str], Gang] = {}
        self._changed = threading.Condition()

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
        with self._changed:
            try:
                if is_watch:
                    return {"calls": self._watch(request, until)}
                if request.get("verb") == "complete":
                    epochs = Epochs(self._root, str(request["namespace"]), str(request["gang"]))
                    which = int(request["epoch"]), str(request["attempt"]), str(request["member"])
                    return {"is_known": epochs.note_complete(*which, node)}
                gang = self._gang(str(request["namespace"]), str(request["gang"]))
                answer = _ask(gang, node, request)
                self._changed.notify_all()
                while answer.state is State.WAIT and (left_s := until - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                    answer = _ask(gang, node, request)
            except _MALFORMED as error:
                raise GangError(f"not a valid request of a member: {error!r}") from error
            except OSError as error:
                raise GangError(f"the coordinator cannot store anything: {plain(error)}") from error
        return {name: value for name, value in to_json(answer._asdict()).items() if value}

    def _watch(self, request: Mapping[str, Any], until: float) -> list[list[str]]:
        """Return namespaces and names of gangs whose members are called, and to which attempts: not what was seen."""
        seen = {(str(namespace), str(name)): str(attempt) for namespace, name, attempt in request["gangs"]}
        while True:
            known = {key: self._gangs[key].calls() for key in seen if key in self._gangs}
            calls = [[*key, attempt] for key, attempt in known.items() if attempt not in ("", seen[key])]
            if calls or (left_s := until - time.monotonic()) <= 0:
                return calls
            self._changed.wait(left_s)

    def status(self) -> list[dict[str, Any]]:
        """Return what is known of all gangs."""
        with self._changed:
            return [self._status_of(epochs) for epochs in all_gangs(self._root)]

    def _status_of(self, epochs: Epochs) -> dict[str, Any]:
        gang = self._gangs.get((epochs.namespace, epochs.name))
        attempt = gang.attempt if gang else None
        found: dict[str, Any] = {"namespace": epochs.namespace, "gang": epochs.name, "epochs": [], "incomplete": {}}
        for record in (epochs.read(epoch) for epoch in epochs.decided()):
            missing = [name for name, member in record["members"].items() if not member.get("is_complete")]
            if record["act"] == "dump" and missing:
                found["incomplete"][str(record["epoch"])] = missing
            elif record["act"] == "dump":
                found["epochs"].append(record["epoch"])
        if attempt is not None:
            found["attempt"] = {
                "epoch": attempt.epoch,
                "act": attempt.join.act,
                "size": attempt.join.size,
                "state": "over" if attempt.reason else "decided" if attempt.is_decided else "open",
                "reason": attempt.reason,
                "members": {name: _phase_of(attempt, seat.reached) for name, seat in sorted(attempt.seats.items())},
            }
        return found

    def _gang(self, namespace: str, name: str) -> Gang:
        if (namespace, name) not in self._gangs:
            epochs = Epochs(self._root, namespace, name)
            decide = partial(_decide, epochs)
            gang = Gang(epochs.take, decide, epoch=epochs.last, decided=epochs.sessions(REMEMBERED))
            self._gangs[namespace, name] = gang
        return self._gangs[namespace, name]


def _phase_of(attempt: Attempt, reached: int) -> str:
    return "joined" if reached < 0 else attempt.phases[reached].value


def _ask(gang: Gang, node: str, request: Mapping[str, Any]) -> Answer:
    claim = Claim(str(request["member"]), str(request["session"]), node, int(request.get("epoch", 0)))
    verb = request["verb"]
    if verb == "join":
        return gang.join(claim, from_json(Join, request["join"]), str(request.get("called", "")))
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
