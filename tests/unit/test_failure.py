"""What is left of a failed dump: its cause in the journal, CRIU's log, a line where the engine shows errors."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.criu.explain import explain
from ocihook.linux.procfs import Process
from ocihook.session import failure, history
from ocihook.session.failure import Attempt, keep_log, message_of, record_failure
from ocihook.session.journal import Journal

LOG = Path(__file__).parents[1] / "data/criu-logs/dump-flock.log"
# A runtime whose child has CRIU's log open, as its arguments would have it: `runc checkpoint c`.
_RUNTIME = """
import os, signal
child = os.fork()
if child == 0:
    log = open("dump.log", "a")
    log.flush()
    print(os.getpid(), flush=True)
    signal.pause()
os.wait()
signal.pause()
"""


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that looks like runc; its first line of output is the pid of its CRIU."""
    (tmp_path / "checkpoint").write_text(_RUNTIME)
    process = subprocess.Popen(
        ["runc", "checkpoint", "c"],
        executable=sys.executable,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def criu_of(runtime: subprocess.Popen[str]) -> Process:
    assert runtime.stdout is not None
    criu = Process.find(int(runtime.stdout.readline()))
    assert criu is not None
    return criu


def test_a_log_is_read_though_it_was_removed(runtime: subprocess.Popen[str], tmp_path: Path) -> None:
    criu = criu_of(runtime)
    attempt = Attempt(criu, Process.find(runtime.pid))
    assert attempt.explain() == (None, "")
    (tmp_path / "dump.log").write_text(LOG.read_text())
    (tmp_path / "dump.log").unlink()
    criu.send(signal.SIGKILL)
    explanation, text = attempt.explain()
    assert explanation is not None
    assert (explanation.name, text) == ("file-locks", LOG.read_text())
    attempt.close()
    assert attempt.explain() == (None, "")


def test_engine_is_told_once_and_not_held_up(runtime: subprocess.Popen[str]) -> None:
    """A reader of the runtime's errors gets one line, and reaches their end."""
    attempt = Attempt(criu_of(runtime), Process.find(runtime.pid))
    attempt.report("the reason")
    attempt.report("the reason, again")
    os.killpg(runtime.pid, signal.SIGKILL)
    assert runtime.stderr is not None
    assert runtime.stderr.read() == "ocihook: the reason\n"
    attempt.close()


def test_runtime_is_released_when_nothing_is_to_be_said(runtime: subprocess.Popen[str]) -> None:
    attempt = Attempt(criu_of(runtime), Process.find(runtime.pid))
    assert attempt.runtime >= 0
    attempt.release()
    os.killpg(runtime.pid, signal.SIGKILL)
    assert runtime.stderr is not None
    assert runtime.stderr.read() == ""
    attempt.close()


def test_nobody_is_told_whose_dump_is_no_runtimes() -> None:
    process = Process.find(os.getpid())
    assert process is not None
    attempt = Attempt(process, None)
    assert attempt.runtime == -1
    attempt.report("the reason")
    attempt.close()


def test_journal_says_why_and_where_the_log_is(tmp_path: Path) -> None:
    explanation = explain(LOG.read_text())
    assert explanation is not None
    journal = Journal.create(tmp_path, Process(11, 1))
    journal.begin_stage("pre-dump")
    kept = keep_log(tmp_path / "logs", journal.session_id, LOG.read_text())
    assert Path(kept).read_text() == LOG.read_text()
    assert Path(kept).stat().st_mode & 0o777 == 0o600
    record_failure(journal, explanation, kept)
    record = Journal.load(journal.path).to_json()
    assert record["facts"]["failure"] == {**explanation._asdict(), "log": kept}
    assert history.error_of(record | {"ended": 1.0}) == ("criu-file-locks", str(explanation))
    assert message_of(journal, explanation) == f"the dump failed: {explanation}"


def test_logs_that_are_kept_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "LOGS_KEPT", 2)
    kept = [keep_log(tmp_path, f"{pid}-1", "text") for pid in (11, 12, 13)]
    assert sorted(map(str, tmp_path.iterdir())) == sorted(kept[1:])
    (tmp_path / "file").touch()
    assert keep_log(tmp_path / "file", "14-1", "text") == ""


def test_of_a_long_log_both_ends_are_kept(runtime: subprocess.Popen[str], tmp_path: Path) -> None:
    attempt = Attempt(criu_of(runtime), Process.find(runtime.pid))
    middle = "(00.1) a line\n" * 40_000
    (tmp_path / "dump.log").write_text(f"begin\n{middle}{LOG.read_text()}")
    explanation, text = attempt.explain()
    assert explanation is not None
    assert explanation.name == "file-locks"
    assert text.startswith("begin\n")
    assert "bytes are left out" in text
    assert len(text) < 257 << 10
    attempt.close()
