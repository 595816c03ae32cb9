"""When memory is read from a snapshot, which may be lost: never where a stop rests on its checkpoint."""

from collections.abc import Collection
from pathlib import Path

import pytest

from ocihook.config import Policy
from ocihook.gang import participant as gang
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef, GangRef
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump
from ocihook.stages import awaited_memory
from ocihook.stages.awaited_memory import ChosenSnapshot

JOB = GangRef("", "job", "a", 2)


class Meeting:
    """A gang of two; the other member has said what it wants to say."""

    epoch, attempt, here = 1, "0" * 16, 2

    def __init__(self, other: dict[str, str]) -> None:
        self.told = other

    def meet(
        self,
        _phase: str,
        message: dict[str, str],
        about: Collection[str] = (),
        *,
        calls: bool = False,
        gather: object = None,
    ) -> dict[str, str]:
        assert not calls
        assert gather is None, "it is not stopped"
        self.told = message | self.told
        return {key: value for key, value in self.told.items() if key in about}


def dump_of(directory: Path, *, leave_running: bool = True) -> Dump:
    process = Process.find(1)
    assert process is not None
    journal = Journal.create(directory / "run", process)
    journal.identify(ContainerRef(id="c" * 64, name="c"), str(directory))
    policy = Policy(mode="store")
    journal.note(CallFacts(leave_running=leave_running, policy=policy, gang=JOB, store=(str(directory), "", "")))
    dump = Dump(
        journal=journal, patience=Patience(), criu_pid=0, init_pid=0, image_dir=str(directory), directory=directory
    )
    dump.reads_memory = True
    return dump


@pytest.fixture(autouse=True)
def _room_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_memory, "lacking", lambda *_: "")
    monkeypatch.setattr(awaited_memory, "keep_from_end", lambda _: True)


def test_none_for_a_member_of_a_gang_of_which_another_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all are dumped that one is gone, and the others' memory must not be lost any more."""
    for number, leave_running in enumerate((True, False)):
        other = Meeting({})
        monkeypatch.setattr(gang, "_join", lambda *_, other=other, **__: other)
        (tmp_path / str(number)).mkdir()
        gang.Membership().refuse(dump_of(tmp_path / str(number), leave_running=leave_running))

        met = Meeting(other.told)
        monkeypatch.setattr(gang, "_join", lambda *_, met=met, **__: met)
        (tmp_path / f"{number}-ours").mkdir()
        dump = dump_of(tmp_path / f"{number}-ours")
        gang.Membership().refuse(dump)
        ChosenSnapshot().hold(dump)
        assert dump.takes_snapshot is leave_running
        assert not set(dump.gang_addresses)


@pytest.mark.parametrize("running", [True, False])
def test_none_for_what_does_not_run_on(tmp_path: Path, *, running: bool) -> None:
    dump = dump_of(tmp_path, leave_running=running)
    ChosenSnapshot().hold(dump)
    assert dump.takes_snapshot is running
