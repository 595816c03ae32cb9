"""The order of a dump and a restore: every participant gets the same calls, and is undone when one refuses."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ocihook.criu import ending
from ocihook.errors import GivenUp, OcihookError
from ocihook.linux.files import identity
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import HeldThread
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.participant import Participant
from ocihook.session.record import from_json, to_json
from ocihook.stages import dump, order, restore
from ocihook.stages.detached import KeptFromEnd
from ocihook.wire import KEPT_NAME
from tests.unit.test_session import Node

DUMP = ("refuse", "needs_tasks", "prepare", "hold", "after_images", "container_runs")
RESTORE = (
    *("check", "before_processes", "recall", "processes_made"),
    *("processes_wait", "about_to_run", "running"),
)


@dataclass(kw_only=True)
class Made(Effect, kind="made"):
    who: str
    undone: ClassVar[list[str]] = []

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        self.undone.append(self.who)


class Recorder:
    """Two participants that note what they are asked; one may fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.failing: tuple[str, str] | None = None
        self.error: Exception = OcihookError("no")

    def participants(self) -> list[Participant]:
        return [self._make("outer"), self._make("inner")]

    def _make(self, who: str) -> Participant:
        def called(name: str, answer: Any) -> Any:
            def call(attempt: Any) -> Any:
                self.calls.append((who, name))
                if name == "prepare":
                    attempt.journal.add(Made(who=who))
                if self.failing == (who, name):
                    raise self.error
                return answer

            return call

        participant = Participant()
        texts = {"after_images", "container_runs", "before_processes", "processes_wait"}
        for name in (*DUMP, *RESTORE):
            answer = f"{who}'s." if name in texts else name == "needs_tasks" and who == "inner"
            setattr(participant, name, called(name, answer))
        return participant


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    for module in (dump, restore):
        monkeypatch.setattr(module, "participants", found.participants)
    Made.undone.clear()
    return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container_pid: int) -> Node:
    return Node(tmp_path, monkeypatch, container_pid)


def calls(names: tuple[str, ...], *who: str) -> list[tuple[str, str]]:
    return [(one, name) for name in names for one in who]


def test_a_dump_goes_inwards_then_outwards(node: Node, recorder: Recorder) -> None:
    assert node.stage("pre-dump") == (0, "")
    assert recorder.calls == [
        *calls(("refuse", "needs_tasks", "prepare"), "outer", "inner"),
        *calls(("hold",), "inner", "outer"),
    ]
    recorder.calls.clear()
    assert node.stage("post-dump") == (0, "inner's. outer's.")
    assert recorder.calls == calls(("after_images",), "inner", "outer")
    node.session.finish()
    assert Made.undone == ["inner", "outer"]


def test_nobody_waits_at_the_end_for_an_earlier_dump(
    node: Node, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (ending.NAME, KEPT_NAME):
        os.mkfifo(name)
    assert node.stage("pre-dump") == (0, "")
    assert not Path(ending.NAME).exists()
    assert not Path(KEPT_NAME).exists()
    assert recorder.calls


def test_a_container_runs_before_what_could_wait_is_done(
    node: Node, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("pre-dump", "post-dump"):
        assert node.stage(stage)[0] == 0
    recorder.calls.clear()
    place = identity(node.directory)
    kept = KeptFromEnd(init=node.journal.criu, work_directory=node.directory, work_identity=place, image_identity=place)
    node.journal.add(kept)
    released: list[bool] = []
    monkeypatch.setattr(KeptFromEnd, "release", lambda _self, _journal: released.append(True))
    assert node.stage("detached") == (0, "inner's. outer's.")
    assert recorder.calls == calls(("container_runs",), "inner", "outer")
    assert Made.undone == ["inner", "outer"]
    assert released == [True]
    node.journal.forget(kept)


def test_a_container_that_is_killed_meanwhile_is_not_waited_for(node: Node) -> None:
    """CRIU does not take notice of the end of a process that it has traced, while it waits itself."""
    victim = subprocess.Popen(["sleep", "600"])
    reader, writer = os.pipe()
    criu_pid = os.fork()
    if criu_pid == 0:
        HeldThread(victim.pid, ENDLESS)
        os.write(writer, b"!")
        signal.pause()
    try:
        assert os.read(reader, 1) == b"!"
        criu, init = Process.find(criu_pid), Process.find(victim.pid)
        assert criu
        assert init
        place = identity(node.directory)
        kept = KeptFromEnd(init=init, work_directory=node.directory, work_identity=place, image_identity=place)
        assert not kept.has_detached(criu)
        victim.kill()
        assert ENDLESS.within(60).until(lambda: Process.find(victim.pid) is None)
        assert kept.has_detached(criu)
    finally:
        os.kill(criu_pid, signal.SIGKILL)
        os.waitpid(criu_pid, 0)
        victim.kill()
        victim.wait()
        os.close(reader)
        os.close(writer)


def test_a_restore_goes_inwards_then_outwards(node: Node, recorder: Recorder) -> None:
    for stage in ("pre-restore", "setup-namespaces", "post-restore", "pre-resume", "post-resume"):
        assert node.stage(stage)[0] == 0
    assert recorder.calls == [
        *calls(("check", "before_processes"), "outer", "inner"),
        *calls(("processes_made",), "inner", "outer"),
        *calls(("recall",), "outer", "inner"),
        *calls(("processes_wait", "about_to_run", "running"), "inner", "outer"),
    ]


@pytest.mark.parametrize("is_needed", [True, False])
def test_criu_asks_before_processes_run_only_if_anybody_needs_that(
    node: Node, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, *, is_needed: bool
) -> None:
    def passed() -> set[str]:
        return {path.suffix for path in node.journal.path.parent.glob(f"{node.journal.path.stem}.*")} - {".json"}

    monkeypatch.setattr(Participant, "needs_processes", lambda *_: is_needed)
    assert node.stage("pre-restore")[0] == 0
    assert passed() == ({".pre-restore"} if is_needed else {".pre-restore", ".setup-namespaces", ".post-restore"})
    node.journal.finish()
    assert passed() == set()


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        (("inner", "refuse"), []),
        (("outer", "prepare"), ["outer"]),
        (("inner", "prepare"), ["inner", "outer"]),
        (("outer", "hold"), ["inner", "outer"]),
    ],
)
def test_who_refuses_has_all_undone(
    node: Node, recorder: Recorder, failing: tuple[str, str], undone: list[str]
) -> None:
    recorder.failing = failing
    assert node.stage("pre-dump")[0] == 1
    assert Made.undone == undone
    assert node.journal.effects == []
    assert recorder.calls[-1] == failing


def test_what_can_be_given_is_given_to_a_restored_container(node: Node, recorder: Recorder) -> None:
    recorder.failing = ("inner", "running")
    status, message = node.stage("post-resume")
    assert (status, "no" in message) == (0, True)
    assert recorder.calls == calls(("running",), "inner", "outer")


def test_a_runtime_that_ends_before_criu_has_given_up(node: Node, recorder: Recorder) -> None:
    recorder.failing, recorder.error = ("inner", "hold"), GivenUp("the runtime (pid 1) was killed meanwhile")
    node.journal._data["runtime"] = list(Process(node.journal.criu.pid, 1))  # of an earlier process
    status, message = node.stage("pre-dump")
    assert status == 1
    assert "was killed meanwhile. The dump is refused" in message
    assert Made.undone == ["outer"], "nobody else is asked once nobody waits"


def kinds(base: Any) -> Iterator[Any]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_facts_have_names_of_their_own() -> None:
    assert order.participants()
    names = Counter(field.name for kind in kinds(Facts) for field in fields(kind))
    assert [name for name, count in names.items() if count > 1] == []


def test_effects_come_back_as_they_went(node: Node) -> None:
    for kind in list(kinds(Effect)):
        if kind.__module__.startswith("ocihook."):
            assert kind.kind in Effect._kinds
    effect = node.journal.add(Made(who="me"))
    assert from_json(Made, to_json(effect)) == effect
    assert node.reload().effects == [effect]
