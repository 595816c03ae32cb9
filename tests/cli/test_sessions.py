"""`ocihook ps`: who, when, the outcome and why, in the columns of a terminal."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.cli import sessions as module
from ocihook.config import Settings
from ocihook.model import ContainerRef
from ocihook.session import history

NAME = "team-of-machine-learning/trainer-of-the-large-model-7d9c5b8f4-x2x9z/trainer"
CAUSE = "/tmp/a was mounted into the container after it was made, or by a hook. Unmount it there, or mount it through"


def record(began: float, **changes: object) -> dict[str, object]:
    namespace, pod, name = NAME.split("/")
    container = ContainerRef(id="ab" * 32, name=name, pod_name=pod, pod_namespace=namespace).to_json()
    known: dict[str, object] = {"began": began, "ended": began + 12.5, "phases": [], "spans": []}
    known |= {"container": container, "stages": {"post-dump": {"status": 0}}}
    return known | {"facts": {"raw_bytes": 3 << 30, "stored_bytes": 1 << 30}} | changes


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    settings = Settings(store_dir=str(tmp_path / "store"), history_dir=str(tmp_path / "history"))
    monkeypatch.setattr(module, "load_settings", lambda: settings)
    monkeypatch.setattr(module, "open_journals", list)
    began = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
    history.keep(tmp_path / "history", "1234567-1234567890", record(began), limit=9)
    failed = record(began + 60, error=CAUSE, error_code="criu-mount", outcome="failed")
    history.keep(tmp_path / "history", "1234568-1234567891", failed, limit=9)
    done = CliRunner().invoke(module.ps, ["--all"])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_columns_fit_and_nothing_is_lost(told: list[str]) -> None:
    assert max(map(len, told)) <= 100
    assert told[0].split() == ["SESSION", "BEGAN", "CONTAINER", "ACT", "STATE", "RAW", "STORED", "TIME"]
    at, end = told[0].index("CONTAINER"), told[0].index("ACT")
    rows = [line for line in told[1:] if not line.startswith(("1234568-1234567891:", "    Unmount"))]
    assert "".join(line[at:end].strip() for line in rows).count(NAME) == 2
    assert told[1].startswith("1234567-1234567890")
    for word in ("03-04 05:06:07", "dump", "done", "3.0 GiB", "1.0 GiB", "12.5 s"):
        assert word in told[1]


def test_the_cause_is_told(told: list[str]) -> None:
    assert "failed:" in "".join(told)
    first = next(number for number, line in enumerate(told) if line.startswith("1234568-1234567891: "))
    assert " ".join(line.strip() for line in told[first:]) == f"1234568-1234567891: {CAUSE}"
