"""A coordinator, asked by members over its transports; what it keeps, and what it refuses."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ocihook import __version__
from ocihook.checkpoints.gang_note import GangNote, read_note, write_note
from ocihook.cli import gang as command
from ocihook.config import Settings
from ocihook.container.identity import gang_ref
from ocihook.errors import ConfigError, DumpUnderWay, GangError, IntegrityError, MembersMissing
from ocihook.gang import coordinator as coordinator_module
from ocihook.gang.certificates import ServerTls, client_tls
from ocihook.gang.completion import report_complete
from ocihook.gang.coordinator import Coordinator
from ocihook.gang.cut import End, contradictions, ends_of_nobody
from ocihook.gang.epochs import Epochs
from ocihook.gang.link import Link
from ocihook.gang.membership import Attendance, Choice, Coming, GangJoined, Gather, find_attendance, join
from ocihook.gang.participant import Membership
from ocihook.gang.protocol import GATHERING_S, PHASES, Answer, Claim, Decided, Gang, Join, Phase, State
from ocihook.gang.server import MAX_REQUEST_BYTES, serve
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef, GangRef
from ocihook.net.survey import Survey
from ocihook.session.journal import Journal
from ocihook.session.participant import Restore
from tests.fakes.authority import Authority

LIMIT_S = 30.0


class Serving:
    """A coordinator that serves in a thread; a socket that is closed ends nobody, as each test has its own."""

    def __init__(self, directory: Path, tls: ServerTls | None = None, tls_dir: Path = Path()) -> None:
        self.root = directory / "gangs"
        if tls is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(directory / "gang.sock"))
            listener.listen()
            self.link = Link(socket=str(directory / "gang.sock"))
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            self.link = Link(f"https://127.0.0.1:{listener.getsockname()[1]}", str(tls_dir))
        threading.Thread(target=serve, args=(listener, self.root, tls), daemon=True).start()

    def member(self, journal: Journal, name: str, *, timeout_s: float = LIMIT_S, act: str = "dump") -> Attendance:
        gang = GangRef("", "job", name, 2, 1 if act == "restore" else 0)
        return join(journal, Patience(timeout_s=LIMIT_S), gang, act, link=self.link, timeout_s=timeout_s)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return Serving(tmp_path)


@pytest.fixture
def journals(tmp_path: Path) -> list[Journal]:
    pids = [Process(1000 + number, number) for number in range(4)]
    return [Journal.create(tmp_path / f"node{pid.pid}", pid) for pid in pids]


def both(members: list[Attendance], phase: str, messages: Mapping[int, object], *about: str) -> list[Any]:
    with ThreadPoolExecutor() as pool:
        met = [pool.submit(member.meet, phase, messages.get(n), about) for n, member in enumerate(members)]
        return [one.exception() or one.result() for one in met]


def end(number: int, received: int = 100, sent: int = 100) -> End:
    return (
        End("10.0.0.1", 1, "10.0.0.2", 2, 1, sent, sent, received)
        if number == 0
        else End("10.0.0.2", 2, "10.0.0.1", 1, 1, sent, sent, received)
    )


def test_what_all_members_have_dumped_is_kept(serving: Serving, journals: list[Journal]) -> None:
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    told = {n: {f"10.0.0.{n}": "x", "10.0.0.9": str(n)} for n in (0, 1)}
    assert both(members, "arrived", told, "10.0.0.1", "10.0.0.9", "10.0.0.7") == [{"10.0.0.1": "x", "10.0.0.9": ""}] * 2
    said = {n: {"ends": [end(n)], "checkpoint": {"container": str(n)}} for n in (0, 1)}
    assert both(members, "dumped", said) == [{}, {}]
    record = Epochs(serving.root, "", "job").read(1)
    assert (record["act"], record["connections"]) == ("dump", 1)
    assert [member["container"] for member in record["members"].values()] == ["0", "1"]
    effect = journals[0].find(GangJoined)
    assert effect is not None
    effect.undo(journals[0], Patience())  # too late to end anything
    again = find_attendance(journals[1], Patience(timeout_s=LIMIT_S))
    assert again is not None
    assert again.meet("dumped") == {}


def test_an_epoch_is_complete_once_all_members_say_so(serving: Serving, journals: list[Journal]) -> None:
    def status() -> tuple[list[int], dict[str, list[str]]]:
        (found,) = Coordinator(serving.root).status()
        return found["epochs"], found["incomplete"]

    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    said = {n: {"ends": [], "checkpoint": {"container": str(n), "is_complete": n == 0}} for n in (0, 1)}
    both(members, "dumped", said)
    attempt = members[0].attempt
    assert status() == ([], {"1": ["b"]})
    known = {"verb": "complete", "namespace": "", "gang": "job", "epoch": 1, "attempt": attempt, "member": "b"}
    for wrong in ({"gang": "other"}, {"epoch": 2}, {"attempt": attempt[::-1]}, {"member": "c"}):
        assert serving.link.ask(known | wrong, Patience(timeout_s=LIMIT_S)) == {"is_known": False}
    assert not Epochs(serving.root, "", "job").note_complete(1, attempt, "b", "another node")
    dumped = ContainerRef(id="1", engine="podman", name="b", gang=f"job/1/{attempt}", gang_member="b")
    assert not report_complete(dumped, Link(socket="/nowhere"), Patience(timeout_s=0))
    assert status() == ([], {"1": ["b"]})
    for _ in range(2):
        assert report_complete(dumped, serving.link, Patience(timeout_s=LIMIT_S))
    assert status() == ([1], {})


def test_ends_that_do_not_fit_end_the_attempt(serving: Serving, journals: list[Journal]) -> None:
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    said = {n: {"ends": [end(n, received=100 + 50 * n)], "checkpoint": {}} for n in (0, 1)}
    failures = both(members, "dumped", said)
    assert all("b has received up to 150" in str(failure) for failure in failures)
    assert Epochs(serving.root, "", "job").decided() == []


def test_one_fails_and_all_hear_why(serving: Serving, journals: list[Journal]) -> None:
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    effect = journals[1].find(GangJoined)
    assert effect is not None
    journals[1].note_error(GangError("the disk\nis \x1b[31mfull\0"), "failed")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(members[0].meet, "held")
        effect.undo(journals[1], Patience())
        with pytest.raises(GangError, match=r"over for all members: b: the disk\\nis \\x1b\[31mfull\\x00"):
            waiting.result(LIMIT_S)
    with pytest.raises(GangError, match="over"):
        members[1].meet("held")


def test_the_limit_names_who_is_missing(serving: Serving, journals: list[Journal]) -> None:
    alone = serving.member(journals[0], "a", timeout_s=0.1)
    with pytest.raises(GangError, match=r"a: 1 that never joined did not reach 'arrived' within 0.1 s"):
        alone.meet("arrived")
    members = [serving.member(journals[1], "a", timeout_s=0.1), serving.member(journals[2], "b")]
    with pytest.raises(GangError, match="b did not reach 'locked'"):
        members[0].meet("locked")


@pytest.mark.parametrize(
    ("earlier", "size", "late", "missing"),
    [
        ("", 3, "x", "2 that never joined"),
        ("", 3, "1", "0 (never joined), 2 (never joined)"),
        ("", 12, "3", "".join(f"{n} (never joined), " for n in "01245678") + "3 more that never joined"),
        ("", 3, "3", "2 that never joined"),  # which is no index
        ("xyz", 3, "y", "x (never joined), z (never joined)"),
        ("012", 3, "0", "1 (never joined), 2 (never joined)"),
        ("xyz", 3, "w", "2 that never joined"),  # names have changed
        ("xyz", 4, "y", "3 that never joined"),
    ],
)
def test_the_limit_names_who_has_not_joined(earlier: str, size: int, late: str, missing: str) -> None:
    decided = {4: Decided({"old": "s"}), 5: Decided(dict.fromkeys(earlier, "s"))} if earlier else {}
    gang = Gang(str, lambda _: "", epoch=5, decided=decided)
    claim = Claim(late, "new", epoch=gang.join(Claim(late, "new"), Join("dump", size)).epoch)
    assert gang.meet(claim, Phase.ARRIVED).state is State.WAIT
    said = gang.leave(claim, "within 1 s", Phase.ARRIVED).reason
    assert said == f"{late}: {missing} did not reach 'arrived' within 1 s"


def test_a_member_whose_node_has_lost_power_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(coordinator_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))
    coordinator = Coordinator(tmp_path)

    def ask(member: str, **said: object) -> dict[str, Any]:
        who = {"namespace": "", "gang": "job", "member": member, "session": member, "wait_s": 0}
        return coordinator.handle("", {**who, **said})

    def join(member: str) -> int:
        epoch: int = ask(member, verb="join", join=["dump", 2, 0])["epoch"]
        return epoch

    assert join("a") == 1
    for _ in range(4):  # as long as it asks it is alive
        assert ask("a", verb="meet", phase="arrived", epoch=1)["state"] == "wait"
        now_s[0] += GATHERING_S - 1
    now_s[0] += 2
    assert join("b") == join("c") == 2
    over = ask("a", verb="meet", phase="arrived", epoch=1)
    assert (over["state"], over["reason"]) == ("over", "its members have asked nothing for 31 s")


def test_a_restarted_coordinator_knows_what_was_chosen(tmp_path: Path) -> None:
    def ask(coordinator: Coordinator, member: str, **said: object) -> dict[str, Any]:
        who = {"namespace": "", "gang": "job", "member": member, "session": member, "wait_s": 0, "epoch": 1}
        return coordinator.handle("", {**who, **said})

    first, met = (
        Coordinator(tmp_path),
        {"verb": "meet", "phase": "chosen", "message": ["x 1", "x 2"], "about": ["dump"]},
    )
    for member in "ab":
        ask(first, member, verb="join", join=["choose", 2, 0])
    assert ask(first, "a", **met)["state"] == "wait"
    answer = ask(first, "b", **met)
    assert answer["told"] == ask(Coordinator(tmp_path), "a", **met)["told"] == {"dump": "x 2"}


def test_locks_are_voted_on_until_all_are_locked(serving: Serving, journals: list[Journal]) -> None:
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]

    def vote(ballot: int, *votes: bool) -> list[bool]:
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(m.agree, ballot, is_locked=v) for m, v in zip(members, votes, strict=True)]
            return [one.result(LIMIT_S) for one in asked]

    assert vote(1, True, False) == [False, False]
    assert vote(2, True, True) == [True, True]


def test_who_is_stopped_alone_calls_the_others(serving: Serving, journals: list[Journal]) -> None:
    """The other's node hears to which attempt, once; what it dumps then joins this one, and no later one."""

    def calls(seen: str = "", *, wait_s: float = LIMIT_S) -> list[list[str]]:
        gangs = [["", "job", seen], ["", "other", ""]]
        answer = serving.link.ask({"verb": "watch", "gangs": gangs, "wait_s": wait_s}, Patience(timeout_s=LIMIT_S))
        found: list[list[str]] = answer["calls"]
        return found

    def join_called(journal: Journal, to: str) -> Attendance:
        gang = GangRef("", "job", "b", 2, 0)
        return join(journal, Patience(), gang, "dump", link=serving.link, timeout_s=LIMIT_S, coming=Coming(to))

    assert calls(wait_s=0) == []
    alone = serving.member(journals[0], "a")
    assert calls(wait_s=0) == []
    with ThreadPoolExecutor() as pool:
        met = pool.submit(alone.meet, "arrived", calls=True)
        until = Patience(timeout_s=LIMIT_S)
        while not (heard := calls()) and not until.is_over:
            pass
        assert heard == [["", "job", alone.attempt]]
        assert calls(alone.attempt, wait_s=0) == []
        with pytest.raises(GangError, match="the attempt that b was called to is over"):
            join_called(journals[2], "another")
        other = join_called(journals[1], alone.attempt)
        assert other.epoch == alone.epoch
        assert calls(wait_s=0) == []
        assert other.meet("arrived") == met.result(LIMIT_S) == {}
    with pytest.raises(GangError, match="or has it"):
        join_called(journals[3], alone.attempt)
    assert both([alone, other], "held", {}) == [{}, {}]


def test_a_restarted_coordinator_knows_what_was_decided(tmp_path: Path) -> None:
    who = {"namespace": "ns", "gang": "job", "epoch": 1}
    dumped = {**who, "verb": "meet", "phase": "released"}
    first = Coordinator(tmp_path)
    for name in "ab":
        wanted = {**who, "verb": "join", "join": ["restore", 2, 7]}
        assert first.handle("", {**wanted, "member": name, "session": name})["epoch"] == 1
    with ThreadPoolExecutor() as pool:
        for answer in pool.map(lambda n: first.handle("", {**dumped, "member": n, "session": n}), "ab"):
            assert answer["state"] == "met"
    second = Coordinator(tmp_path)
    assert second.handle("", {**dumped, "member": "a", "session": "a"})["state"] == "met"
    assert second.handle("", {**dumped, "member": "a", "session": "other"})["state"] == "over"
    assert second.handle("", {**who, "verb": "leave", "reason": "", "member": "b", "session": "b"})["state"] == "met"
    joined = {**who, "verb": "join", "join": ["dump", 2, 0], "member": "a", "session": "new"}
    assert second.handle("", joined)["epoch"] == 2


def test_nobody_is_woken_for_what_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often the coordinator looks grows with the members, not with their square; other gangs do not count."""
    asked: Counter[tuple[str, str]] = Counter()
    ask = coordinator_module._ask

    def count(gang: Gang, node: str, request: Mapping[str, Any], silence_s: float) -> Answer:
        asked[request["gang"], request["member"]] += 1
        return ask(gang, node, request, silence_s)

    monkeypatch.setattr(coordinator_module, "_ask", count)
    monkeypatch.setattr(coordinator_module, "LONGEST_WAIT_S", LIMIT_S)
    coordinator, members = Coordinator(tmp_path), [str(number) for number in range(64)]

    def dump(gang: str, member: str) -> list[str]:
        who = {"namespace": "", "gang": gang, "member": member, "session": f"{gang} {member}"}
        epoch = coordinator.handle("", {**who, "verb": "join", "join": ["dump", 64, 0]})["epoch"]
        said = {**who, "epoch": epoch, "verb": "meet", "message": {"ends": []}}
        return [coordinator.handle("", {**said, "phase": phase})["state"] for phase in PHASES["dump"]]

    with ThreadPoolExecutor(130) as pool:
        others = [pool.submit(dump, "other", member) for member in members[1:]]
        mine = [pool.submit(dump, "job", member) for member in members]
        assert all(one.result(LIMIT_S) == ["met"] * 5 for one in mine)
        before = asked.total()
        dump("other", members[0])
        assert all(one.result(LIMIT_S) == ["met"] * 5 for one in others)
    most = 1 + 2 * len(PHASES["dump"])  # it joins; in each phase it asks, and is woken once
    assert max(asked.values()) <= most
    assert asked.total() <= 2 * 64 * most
    assert before <= 64 * most + 63 * 2, "the others are at their first meeting, and were not woken"


def test_two_restore_different_epochs(serving: Serving, journals: list[Journal]) -> None:
    first = serving.member(journals[0], "a", act="restore")
    gang = GangRef("", "job", "b", 2, 9)
    why = "b is restored from epoch 9, others from epoch 1"
    for _ in range(2):  # also if it has not had the answer
        with pytest.raises(GangError, match=why):
            join(journals[1], Patience(), gang, "restore", link=serving.link, timeout_s=LIMIT_S)
    with pytest.raises(GangError, match=why):
        first.meet("addresses")
    both_again = [
        serving.member(journal, name, act="restore") for journal, name in zip(journals[2:], "ab", strict=True)
    ]
    assert both(both_again, "addresses", {}) == [{}, {}]


@pytest.mark.parametrize(
    "request_",
    [
        {"verb": "join"},
        {"namespace": "../x", "gang": "job", "verb": "join"},
        {"namespace": "", "gang": "..", "verb": "join"},
        {"namespace": "", "gang": "job", "member": "a", "session": "s", "verb": "dance"},
        {
            "namespace": "",
            "gang": "job",
            "member": "a",
            "session": "s",
            "verb": "join",
            "join": [1, "x", 0],
        },
        {
            "namespace": "",
            "gang": "job",
            "member": "a",
            "session": "s",
            "verb": "join",
            "join": ["x", 2, 0],
        },
        {"namespace": "", "gang": "job", "member": "a", "session": "s", "verb": "join", "epoch": 1e999},
        {"namespace": "", "gang": "job", "member": "a", "session": "s", "verb": "vote", "ballot": 1e999},
        {"namespace": "", "gang": "job", "member": "a", "wait_s": 10**400, "verb": 900 * "["},
        {"verb": "watch"},
        {"verb": "watch", "gangs": [["", "job"]]},
        {"verb": "watch", "gangs": 5, "wait_s": "x"},
    ],
)
def test_what_is_no_request_is_refused(serving: Serving, request_: dict[str, object]) -> None:
    with pytest.raises(GangError, match="refuses"):
        serving.link.ask(request_, Patience(timeout_s=LIMIT_S))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"5000", 5000 * b"[" + 80000 * b" " + 5000 * b"]", b'{"epoch": NaN}', b"\xff"]
)
def test_what_is_no_json_of_a_member_is_refused(serving: Serving, body: bytes) -> None:
    connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(serving.link.socket)
    connection.request("POST", "/", body)
    response = connection.getresponse()
    assert response.status == 400
    assert json.loads(response.read())["error"]
    connection.close()


@pytest.mark.parametrize("said", ["text", 5, [1], {"checkpoint": 5}, {"checkpoint": "text"}])
def test_what_a_member_says_amiss_ends_the_attempt(serving: Serving, journals: list[Journal], said: object) -> None:
    """No member may continue as if all had completed when nothing was kept."""
    members = [serving.member(journals[n], name, act="restore") for n, name in enumerate("ab")]
    found = both(members, "released", {0: said, 1: {}})
    assert all(isinstance(one, GangError) and "did not tell of its checkpoint" in str(one) for one in found)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"state": "met", "told": "text"}',
        b'{"state": "met", "epoch": "x"}',
        b'{"state": 5}',
        5000 * b"[" + 80000 * b" " + 5000 * b"]",
    ],
)
def test_an_answer_that_is_none_is_one_clear_error(tmp_path: Path, journals: list[Journal], answer: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "gang.sock"))
    listener.listen()

    def serve_once() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            size = 0
            while line := lines.readline().strip():
                name, _, value = line.partition(b": ")
                size = int(value) if name.lower() == b"content-length" else size
            lines.read(size)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)

    thread = threading.Thread(target=serve_once)
    thread.start()
    link, gang = Link(socket=str(tmp_path / "gang.sock")), GangRef("", "job", "a", 2, 0)
    with pytest.raises(GangError, match="a malformed answer"):
        join(journals[0], Patience(timeout_s=LIMIT_S), gang, "dump", link=link, timeout_s=LIMIT_S)
    thread.join()
    listener.close()


def test_a_request_is_read_whole_before_it_is_refused(serving: Serving) -> None:
    connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(serving.link.socket)
    connection.request("POST", "/", b"x" * (MAX_REQUEST_BYTES + 1))
    response = connection.getresponse()
    assert response.status == 413
    assert "error" in json.loads(response.read())
    connection.close()


def test_nobody_but_root_is_answered_on_a_node(serving: Serving) -> None:
    Path(serving.link.socket).chmod(0o777)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            serving.link.ask(None, Patience(timeout_s=LIMIT_S))
        except (GangError, OSError) as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 4096).decode()
    assert "is not root" in said or "Permission denied" in said


def test_nodes_are_who_their_certificates_say(tmp_path: Path, journals: list[Journal]) -> None:
    ours, theirs = Authority(), Authority()
    tls = ServerTls(ours.give(tmp_path / "coordinator", "coordinator"))
    serving = Serving(tmp_path, tls, ours.give(tmp_path / "node1", "node1"))
    members = [serving.member(journals[0], "a")]
    serving.link = serving.link._replace(tls_dir=str(ours.give(tmp_path / "node2", "node2")))
    members.append(serving.member(journals[1], "b"))
    effect = journals[0].find(GangJoined)
    assert effect is not None
    foreign = Attendance(journals[0], Patience(timeout_s=LIMIT_S), replace(effect, link=serving.link))
    with pytest.raises(GangError, match="it has no a of session"):  # another node speaks for that member
        foreign.meet("held")
    assert both(members, "held", {}) == [{}, {}]
    stranger = serving.link._replace(tls_dir=str(theirs.give(tmp_path / "stranger", "node1")))
    with pytest.raises(GangError, match=r"cannot be reached:.*certificate verify failed.*See .* the certificates"):
        stranger.ask(None, Patience(timeout_s=LIMIT_S))
    serving.link = stranger
    with pytest.raises(GangError, match="cannot be reached"):  # at once
        serving.member(journals[2], "c", timeout_s=1e6)
    shutil.copy(tmp_path / "node1/ca.crt", tmp_path / "stranger/ca.crt")  # it knows whom to trust, and nobody knows it
    with pytest.raises(OSError):  # noqa: PT011 - in words of TLS, or of TCP if those were not read in time
        stranger.ask(None, Patience(timeout_s=LIMIT_S))
    with pytest.raises(ConfigError, match=r"tls\.crt, tls\.key and ca\.crt"):
        client_tls(tmp_path / "nothing")


def test_a_coordinator_by_another_name_is_not_asked(tmp_path: Path) -> None:
    """It has a certificate of the same authority, as every node has."""
    authority = Authority()
    tls = ServerTls(authority.give(tmp_path / "coordinator", "coordinator", host="127.0.0.2"))
    serving = Serving(tmp_path, tls, authority.give(tmp_path / "node", "node"))
    with pytest.raises(GangError, match=r"cannot be reached:.*certificate is not valid for '127\.0\.0\.1'"):
        serving.link.ask(None, Patience(timeout_s=LIMIT_S))


def test_certificates_may_change_while_a_coordinator_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Authority(), Authority()
    directory = old.give(tmp_path / "coordinator", "coordinator")
    serving = Serving(tmp_path, ServerTls(directory), old.give(tmp_path / "old", "node"))
    renewed = serving.link._replace(tls_dir=str(new.give(tmp_path / "new", "node")))
    assert serving.link.ask(None, Patience(timeout_s=LIMIT_S)) == {"version": __version__, "gangs": []}
    shutil.copytree(new.give(tmp_path / "next", "coordinator"), directory, dirs_exist_ok=True)
    with pytest.raises(GangError, match="certificate verify failed"):
        serving.link.ask(None, Patience(timeout_s=LIMIT_S))
    assert renewed.ask(None, Patience(timeout_s=LIMIT_S)) == {"version": __version__, "gangs": []}
    shutil.copy(tmp_path / "old/tls.crt", directory)  # and its key is not there yet
    assert renewed.ask(None, Patience(timeout_s=LIMIT_S)) == {"version": __version__, "gangs": []}
    assert "what was read before is used further" in caplog.text


def test_a_member_keeps_its_connection(
    serving: Serving, journals: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[http.client.HTTPConnection] = []
    connect = Link.connect

    def count(link: Link) -> http.client.HTTPConnection:
        made.append(connect(link))
        return made[-1]

    monkeypatch.setattr(Link, "connect", count)
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    for phase in PHASES["dump"][:3]:
        assert both(members, phase, {}) == [{}, {}]
    assert len(made) == 2
    made[0].sock.shutdown(socket.SHUT_RDWR)  # as after a coordinator's restart, or a long time at work
    assert both(members, "held", {}) == [{}, {}]
    assert len(made) == 3
    effect = journals[0].find(GangJoined)
    assert effect is not None
    with pytest.raises(GangError, match="refuses"):
        effect.ask({"verb": "dance"}, Patience(), LIMIT_S)
    both([members[1]], "held", {})
    assert effect.ask({"verb": "meet", "phase": "held"}, Patience(), LIMIT_S).state is State.MET
    assert len(made) == 4, "who was refused has a new one, as not all of its request may have been read"


def test_sequence_numbers_go_round() -> None:
    top = (1 << 32) - 10
    first = End("10.0.0.1", 1, "10.0.0.2", 2, 1, top, 20, 500)
    second = End("10.0.0.2", 2, "10.0.0.1", 1, 1, 500, 500, 5)
    assert contradictions({"a": [first], "b": [second]}) == ([], 1)
    wrong, _ = contradictions({"a": [first], "b": [second._replace(next_received=21)]})
    assert len(wrong) == 1
    assert contradictions({"a": [first], "b": []}) == ([], 0)


def test_an_end_that_nobody_has_yet_is_missed() -> None:
    mine = End("10.0.0.1", 1, "10.0.0.2", 2, 1, 10, 20, 30)
    queued = End("10.0.0.2", 2, "10.0.0.1", 1, 3, 0, 0, 0, is_dumped=False)
    (wrong,), fitting = contradictions({"a": [mine], "b": [queued]})
    assert wrong.startswith(
        "b has not accepted the connection from a yet (10.0.0.1 port 1 to 10.0.0.2 port 2): try again"
    )
    closed = queued._replace(state=4)
    (wrong,), _ = contradictions({"a": [mine], "b": [closed]})
    assert wrong.startswith("a has not got all yet that b sent before it closed (10.0.0.1 port 1 to 10.0.0.2 port 2)")
    assert contradictions({"a": [mine._replace(state=8)], "b": [closed]}) == ([], 0)
    assert fitting == 0
    accepted = End("10.0.0.2", 2, "10.0.0.1", 1, 1, 30, 30, 20)
    assert contradictions({"a": [mine], "b": [queued, accepted]}) == ([], 1)
    assert contradictions({"a": [], "b": [queued]}) == ([], 0)


def test_two_networks_may_have_the_same_addresses() -> None:
    """Those are together whose numbers fit; one whose peer is no member stays alone."""
    firsts = [End("10.0.0.1", 1, "10.0.0.2", 2, 1, n, n + 10, n + 50) for n in (1000, 2000)]
    seconds = [End("10.0.0.2", 2, "10.0.0.1", 1, 1, n + 50, n + 60, n + 5) for n in (2000, 1000)]
    ends = {"a": firsts[:1], "b": firsts[1:], "c": seconds[:1], "d": seconds[1:]}
    assert contradictions(ends) == ([], 2)
    assert contradictions({**ends, "d": []}) == ([], 1)
    wrong, fitting = contradictions({**ends, "d": [seconds[1]._replace(next_received=3000)]})
    assert wrong == ["d has received up to 3000 of what a sent from 10.0.0.1 port 1 to 10.0.0.2 port 2: 1000 to 1010"]
    assert fitting == 1


def test_who_waits_to_be_accepted_is_seen_in_the_kernel() -> None:
    def of_nobody() -> list[End]:
        survey = Survey.of([os.getpid()])
        assert survey is not None
        return [end for end in ends_of_nobody(survey) if end.local_port == port]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            end = End("127.0.0.1", port, "127.0.0.1", client.getsockname()[1], 1, 0, 0, 0, is_dumped=False)
            assert of_nobody() == [end]
            listener.accept()[0].close()  # what it had to say is acknowledged
            assert Patience(timeout_s=LIMIT_S).until(lambda: of_nobody() == [])


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_note(tmp_path) is None
    note = GangNote(gang=GangRef("ns", "job", "a", 2, 5))
    write_note(tmp_path, note)
    assert read_note(tmp_path) == note
    write_note(tmp_path, GangNote(gang=GangRef("ns", "job", "a", 1, 5)))
    with pytest.raises(IntegrityError, match="epoch 5 of 1 members"):
        read_note(tmp_path)


def test_a_gang_is_named_by_annotations() -> None:
    container = ContainerRef(id="c" * 64, name="worker", pod_name="job-0", pod_namespace="team")

    def ref(**annotations: str) -> GangRef | None:
        return gang_ref({f"ocihook.io/{k.replace('_', '-')}": v for k, v in annotations.items()}, container)

    assert ref() is None
    assert ref(gang="job", gang_size="4") == GangRef("team", "job", "job-0/worker", 4)
    assert ref(gang="job", gang_size="4", gang_index="03") == GangRef("team", "job", "3", 4)
    for wrong in ({"gang": "job"}, {"gang": "a/b", "gang_size": "2"}, {"gang": "job", "gang_size": "1"}):
        with pytest.raises(ConfigError, match=r"ocihook\.io/gang"):
            ref(**wrong)
    with pytest.raises(ConfigError, match="less than 2"):
        ref(gang="job", gang_size="2", gang_index="2")


def test_the_command_needs_a_place_and_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_settings", lambda: Settings(tls_dir=str(tmp_path / "tls")))
    done = CliRunner().invoke(command.coordinator, ["--listen", "127.0.0.1:0"])
    assert isinstance(done.exception, ConfigError)
    Authority().give(tmp_path / "tls", "coordinator")
    done = CliRunner().invoke(command.coordinator, ["--listen", "127.0.0.1"])
    assert "Name HOST:PORT" in str(done.exception)


def test_the_command_shows_gangs(serving: Serving, journals: list[Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_settings", lambda: Settings(gang_dir=str(serving.root)))
    monkeypatch.setattr(Link, "of", lambda _: serving.link)
    serving.member(journals[0], "a")
    effect = journals[0].find(GangJoined)
    assert effect is not None
    assert "joined" in CliRunner().invoke(command.gang, ["status"]).output
    effect.undo(journals[0], Patience())
    assert "attempt 1: a: its dump or restore has failed" in CliRunner().invoke(command.gang, ["status"]).output
    monkeypatch.setattr(Link, "of", lambda _: Link(socket=str(serving.root / "none")))
    assert json.loads(CliRunner().invoke(command.gang, ["status", "--json"]).output)["gangs"][0]["gang"] == "job"


def test_a_restored_member_joins_the_gang_of_its_own_namespace(
    tmp_path: Path, serving: Serving, journals: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever namespace its checkpoint was made in, or says that it was: a gang of that name elsewhere is another."""
    write_note(tmp_path, GangNote(gang=GangRef("victims", "job", "a", 2, 5, "0" * 16)))
    joined = []

    def note_join(_act: object, gang: GangRef, what: str) -> Attendance:
        joined.append((gang, what))
        return join(journals[0], Patience(), gang, what, link=serving.link, timeout_s=LIMIT_S)

    monkeypatch.setattr("ocihook.gang.participant._join", note_join)
    container = ContainerRef(id="c" * 64, pod_namespace="team", pod_name="p", name="main")
    journals[0].identify(container, "")
    restore = Restore(
        journal=journals[0],
        patience=Patience(),
        criu_pid=0,
        init_pid=0,
        image_dir="",
        directory=tmp_path,
        settings=Settings(),
    )
    Membership().check(restore)
    assert joined == [(GangRef("team", "job", "a", 2, 5, "0" * 16), "restore")]
    theirs = GangRef("victims", "job", "b", 2, 5, "0" * 16)
    other = join(journals[1], Patience(), theirs, "restore", link=serving.link, timeout_s=LIMIT_S)
    assert other.epoch == 1, "the first of their gang"
    shown = serving.link.ask(None, Patience(timeout_s=LIMIT_S))["gangs"]
    assert {(row["namespace"], *row["attempt"]["members"]) for row in shown} == {("team", "a"), ("victims", "b")}


def test_an_agent_has_at_hand_what_members_need_once_there_are_any(tmp_path: Path) -> None:
    code = (
        f"import sys; from pathlib import Path; from ocihook.agent import server; from ocihook.config import Settings; "
        f"from ocihook.gang.epochs import Epochs; root = {str(tmp_path)!r}; "
        "has = lambda: {'http.client', 'pyroute2.netlink.rtnl.ifinfmsg'} & set(sys.modules); "
        "server.load_for_members(Settings(gang_dir=root)); assert not has(), has(); "
        "Epochs(Path(root), '', 'job').take(1); "
        "server.load_for_members(Settings(gang_dir=root)); assert len(has()) == 2, has()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S * 2)


def test_one_number_of_two_coordinators_is_not_one_dump(serving: Serving, journals: list[Journal]) -> None:
    first, second = (GangRef("", "job", name, 2, 5, attempt * 16) for name, attempt in (("a", "0"), ("b", "f")))
    alone = join(journals[0], Patience(), first, "restore", link=serving.link, timeout_s=LIMIT_S)
    join(journals[1], Patience(), second, "restore", link=serving.link, timeout_s=LIMIT_S)
    with pytest.raises(GangError, match="b is restored from epoch 5, others from epoch 5 of another coordinator"):
        alone.meet("addresses")


def stopped(serving: Serving, journal: Journal, name: str, *, ends_within_s: float = LIMIT_S) -> Attendance:
    gang, coming = GangRef("", "job", name, 2), Coming("", f"container {name}", ends_within_s)
    patience = Patience(timeout_s=LIMIT_S)
    return join(journal, patience, gang, "dump", link=serving.link, timeout_s=LIMIT_S, coming=coming)


def report_end(serving: Serving, name: str, why: str = "") -> None:
    request = {"verb": "ended", "namespace": "", "gang": "job", "member": name, "life": f"container {name}", "why": why}
    serving.link.ask(request, Patience(timeout_s=LIMIT_S))


def choice(serving: Serving, name: str) -> Choice:
    return Choice(GangRef("", "job", name, 2), Patience(timeout_s=LIMIT_S), link=serving.link, timeout_s=LIMIT_S)


def test_who_chooses_waits_for_a_dump_and_for_the_ends_behind_it(serving: Serving, journals: list[Journal]) -> None:
    hasty = choice(serving, "a")
    hasty.settle()
    members = [stopped(serving, journal, name) for journal, name in zip(journals, "ab", strict=False)]
    with pytest.raises(DumpUnderWay, match="a dump of the gang, attempt 1, has begun"):
        hasty.ask(["job/1/x"])
    with ThreadPoolExecutor() as pool:
        settled = pool.submit(hasty.settle)
        assert both(members, "dumped", {n: {"ends": [], "checkpoint": {}} for n in (0, 1)}) == [{}, {}]
        report_end(serving, "a")
        assert not settled.done(), "b has not ended"
        report_end(serving, "b")
        settled.result(LIMIT_S)
    other = choice(serving, "b")
    other.settle()
    with ThreadPoolExecutor() as pool:
        chosen = [pool.submit(one.ask, ["job/1/x"]) for one in (hasty, other)]
        assert [one.result(LIMIT_S) for one in chosen] == ["job/1/x"] * 2


def test_who_chooses_does_not_wait_for_a_node_that_is_lost(serving: Serving, journals: list[Journal]) -> None:
    member = stopped(serving, journals[0], "a", ends_within_s=0.1)
    with pytest.raises(MembersMissing, match=r"within 0.1 s \(gang_gather_s\)"):
        member.meet("arrived", gather=Gather(LIMIT_S, 0.1, ""))
    choice(serving, "b").settle()  # within the time of the test: nothing is reported


def test_a_dump_is_over_when_a_member_ends(serving: Serving, journals: list[Journal]) -> None:
    member = stopped(serving, journals[0], "a")
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(member.meet, "arrived")
        report_end(serving, "b", "exit code 7")
        with pytest.raises(MembersMissing, match="b has ended without a checkpoint: exit code 7"):
            meeting.result(LIMIT_S)
    (known,) = serving.link.ask(None, Patience(timeout_s=LIMIT_S))["gangs"]
    assert known["missed"] == {"a": "is being stopped", "b": "has ended without a checkpoint: exit code 7"}


def test_members_that_come_one_after_the_other_are_all_waited_for(serving: Serving, journals: list[Journal]) -> None:
    gather = Gather(LIMIT_S, 4.0, "")
    three = [GangRef("", "job", name, 3) for name in "abc"]
    link, patience = serving.link, Patience(timeout_s=LIMIT_S)
    members = [
        join(journal, patience, gang, "dump", link=link, timeout_s=LIMIT_S)
        for journal, gang in zip(journals[:2], three[:2], strict=True)
    ]
    with ThreadPoolExecutor() as pool:
        met = [pool.submit(member.meet, "arrived", gather=gather) for member in members]
        time.sleep(2.5)  # waits: for less than the gap
        members.append(join(journals[2], patience, three[2], "dump", link=link, timeout_s=LIMIT_S))
        time.sleep(2.5)  # waits: until the gap behind the second is over
        met.append(pool.submit(members[2].meet, "arrived", gather=gather))
        assert [one.result(LIMIT_S) for one in met] == [{}] * 3


def test_an_earlier_release_of_a_node_ends_no_dump_either(serving: Serving, journals: list[Journal]) -> None:
    members = [serving.member(journal, name) for journal, name in zip(journals, "ab", strict=False)]
    with pytest.raises(GangError, match="a dump of the gang, attempt 1, has begun"):
        serving.member(journals[2], "c", act="choose")
    assert both(members, "dumped", {n: {"ends": [], "checkpoint": {}} for n in (0, 1)}) == [{}, {}]


def test_an_earlier_release_of_the_coordinator_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Earlier(Coordinator):
        def handle(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
            if request["verb"] == "settle":
                raise GangError("not a valid request of a member: 'settle' is not one of join, meet")
            return super().handle(node, {key: value for key, value in request.items() if key != "after"})

    monkeypatch.setattr("ocihook.gang.server.Coordinator", Earlier)
    serving = Serving(tmp_path)
    asking = [choice(serving, name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        for one in asking:
            one.settle()
        chosen = [pool.submit(one.ask, ["job/1/x"]) for one in asking]
        assert [one.result(LIMIT_S) for one in chosen] == ["job/1/x"] * 2


def test_a_malformed_end_changes_nothing(serving: Serving, journals: list[Journal]) -> None:
    member = stopped(serving, journals[0], "a")
    for request in ({"why": "x"}, {"member": "b"}):
        with pytest.raises(GangError):
            serving.link.ask({"verb": "ended", "namespace": "", **request}, Patience(timeout_s=LIMIT_S))
    report_end(serving, "a", "")  # after it was dumped: the dump goes on
    assert member.attempt
    other = stopped(serving, journals[1], "b")
    assert both([member, other], "dumped", {n: {"ends": [], "checkpoint": {}} for n in (0, 1)}) == [{}, {}]


def test_members_that_have_chosen_wait_for_one_that_fetches(serving: Serving, journals: list[Journal]) -> None:
    def restored(journal: Journal, name: str) -> Attendance:
        gang, patience = GangRef("", "job", name, 2, 1, "x"), Patience(timeout_s=LIMIT_S)
        coming = Coming(has_chosen=True)
        return join(journal, patience, gang, "restore", link=serving.link, timeout_s=0.1, coming=coming)

    first = restored(journals[0], "a")
    with ThreadPoolExecutor() as pool:
        met = pool.submit(first.meet, "addresses")
        time.sleep(0.5)  # waits: for longer than gang_timeout_s
        assert not met.done()
        assert restored(journals[1], "b").meet("addresses") == {}
        assert met.result(LIMIT_S) == {}


def test_members_that_have_chosen_hear_of_one_that_cannot_fetch(serving: Serving, journals: list[Journal]) -> None:
    gang, patience = GangRef("", "job", "a", 2, 1, "x"), Patience(timeout_s=LIMIT_S)
    coming = Coming(has_chosen=True)
    first = join(journals[0], patience, gang, "restore", link=serving.link, timeout_s=0.1, coming=coming)
    request = {"verb": "unrestored", "namespace": "", "gang": "job", "member": "b", "life": "x", "why": "it is damaged"}
    serving.link.ask(request, patience)
    with pytest.raises(GangError, match="b is not restored: it is damaged"):
        first.meet("addresses")
