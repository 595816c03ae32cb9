"""The history of sessions: bounded, found by any name, with totals that outlive the records; and spans of workers."""

import os
from pathlib import Path
from typing import Any

import pytest

from ocihook.errors import StoreError, StoreFull
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.workers import call_each
from ocihook.session import history
from ocihook.session.journal import Journal
from ocihook.session.timing import Spans, measured

DONE = {"status": 0, "message": "", "began": 1.0, "seconds": 0.5}
VETO = {**DONE, "status": 1}


def record(ended: float = 10.0, act: str = "dump", **changes: Any) -> dict[str, Any]:
    stages = {"dump": ("pre-dump", "post-dump"), "restore": ("pre-restore", "post-resume")}[act]
    return {
        "began": ended - 2.0,
        "ended": ended,
        "container": {"id": "ab" * 32, "name": "web", "pod_name": "p", "pod_namespace": "n"},
        "stages": dict.fromkeys(stages, DONE),
        "phases": [{"name": "pack", "began": ended - 1, "seconds": 0.3, "bytes": 4096}],
        "facts": {"checkpoint": "20260101T000000Z-00000001", "raw_bytes": 4096, "stored_bytes": 1024},
        **changes,
    }


def test_it_is_bounded_and_its_totals_are_not(tmp_path: Path) -> None:
    for number in range(5):
        history.keep(tmp_path, f"{number}-1", record(10.0 + number / 1000), limit=3)
    history.keep(tmp_path, "4-1", record(10.004), limit=3)  # once more, as an agent does that was killed over it
    assert [found["id"] for found in history.read(tmp_path)] == ["2-1", "3-1", "4-1"]
    total = history.totals(tmp_path)["acts"]["dump"]
    assert total["outcomes"] == {"done": {"count": 5, "last": 10.004}}
    assert total["bytes"] == {"raw": 5 * 4096, "stored": 5 * 1024}
    assert total["phases"]["pack"]["bytes"] == 5 * 4096
    assert sum(total["phases"]["pack"]["buckets"]) == 5
    (tmp_path / "totals").write_text("{")
    assert history.totals(tmp_path)["acts"] == {}
    next(tmp_path.glob("*.json")).write_text("[]")
    assert [found["id"] for found in history.read(tmp_path)] == ["3-1", "4-1"]


@pytest.mark.parametrize(
    ("changes", "outcome", "code"),
    [
        ({}, "done", ""),
        ({"stages": {"pre-dump": VETO}, "error": "no", "error_code": "preflight"}, "refused", "preflight"),
        ({"stages": {"pre-dump": DONE, "post-dump": VETO}, "error": "no", "error_code": "store"}, "failed", "store"),
        ({"stages": {"pre-dump": DONE}}, "failed", "criu"),
        ({"error": "full", "error_code": "store-full", "outcome": "degraded"}, "degraded", "store-full"),
        ({"act": "restore", "stages": {"pre-restore": DONE}}, "failed", "criu"),
        ({"act": "store", "stages": {}}, "done", ""),
    ],
)
def test_outcomes_and_causes(tmp_path: Path, changes: dict[str, Any], outcome: str, code: str) -> None:
    found = record(**{key: value for key, value in changes.items() if key != "act"})
    found |= {key: value for key, value in changes.items() if key == "act"}
    assert (history.outcome_of(found), history.error_of(found)[0]) == (outcome, code)
    assert bool(history.error_of(found)[1]) == bool(code)
    history.keep(tmp_path, "1-1", found, limit=1)
    causes = history.totals(tmp_path)["acts"][history.act_of(found)]["causes"]
    assert causes == ({code: 1} if code else {})


def test_a_session_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    history.keep(tmp_path, "1-1", record(10.0), limit=9)
    history.keep(tmp_path, "2-2", record(20.0, "restore"), limit=9)
    records = history.read(tmp_path)
    for name, wanted in (
        (None, "2-2"),
        ("1-1", "1-1"),
        ("20260101T000000Z-00000001", "1-1"),
        ("web", "2-2"),
        ("n/p/web", "2-2"),
        ("ab" * 6, "2-2"),
    ):
        assert history.find(records, name)["id"] == wanted
    for name, found in (("no", records), ("ab", records), (None, [])):
        with pytest.raises(StoreError, match="the history has no session"):
            history.find(found, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_who_may_not_read_it_does_not_take_it_for_empty(tmp_path: Path) -> None:
    history.keep(tmp_path / "history", "1-1", record(), limit=1)
    assert history.read(tmp_path / "none") == []

    def read_as_nobody(_: None) -> object:
        os.chdir(tmp_path)  # so that it is not the way there that is closed
        os.setuid(65534)
        return history.read(Path("history"))

    tmp_path.chmod(0o755)
    (outcome,) = call_each(read_as_nobody, [None], Patience(timeout_s=60))
    assert isinstance(outcome, PermissionError)


def test_an_error_that_was_met_is_the_cause(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "run", Process(1, 1))
    journal.begin_stage("pre-dump")
    journal.note_error(StoreFull("no room", hint="make some"), "failed")
    journal.end_stage("pre-dump", 1, "no room")
    directory = tmp_path / "history"
    journal.finish(lambda session_id, whole: history.keep(directory, session_id, whole, limit=9))
    assert not journal.path.exists()
    (found,) = history.read(directory)
    assert history.error_of(found) == ("store-full", "no room. Make some")


def test_a_history_that_cannot_be_written_keeps_no_session_open(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "run", Process(1, 1))
    (tmp_path / "file").touch()
    journal.finish(lambda session_id, whole: history.keep(tmp_path / "file", session_id, whole, limit=9))
    assert not journal.path.exists()


def test_spans_of_workers_also_of_those_that_fail(tmp_path: Path) -> None:
    processes = [Process(os.getpid(), 1), Process(os.getppid(), 2)]
    journal = Journal.create(tmp_path, Process(1, 1))

    def work(process: Process) -> None:
        with measured(spans, "lock", process) as span:
            span["bytes"] = 7
            if process == processes[1]:
                raise OSError(5, "no")

    with journal.phase("gpu lock") as phase, journal.spans(phase) as spans:
        outcomes = call_each(work, processes, Patience(timeout_s=60))
    assert [type(outcome) for outcome in outcomes] == [type(None), OSError]
    found = {span["pid"]: span for span in journal.to_json()["spans"]}
    assert found[os.getpid()]["bytes"] == 7
    assert "failed" not in found[os.getpid()]
    assert found[os.getppid()]["failed"] is True
    assert {span["phase"] for span in found.values()} == {"gpu lock"}


def test_spans_of_one_worker_for_one_process_are_one() -> None:
    spans = Spans()
    for began in (3.0, 1.0, 2.0):
        spans.add({"name": "move", "pid": 1, "began": began, "seconds": 0.5, "bytes": 4})
    (span,) = spans.collect()
    assert (span["began"], span["seconds"], span["bytes"], span["worker"]) == (1.0, 2.5, 12, 0)
    spans.close()
