"""`ocihook timeline --gang`: all members in one picture, those of other nodes, too."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.cli import timeline as module
from ocihook.config import Settings
from ocihook.model import ContainerRef
from ocihook.session import history

BEGAN = 1_772_000_000.0


class Node:
    """One with a history."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._monkeypatch = directory, monkeypatch

    def keep(self, member: str, late_s: float, *, epoch: int = 7, gang: str = "job", error: str = "") -> None:
        """Keep a dump of a member that began so much later than the first."""
        began = BEGAN + late_s
        container = ContainerRef(id=f"{member:0<64}", name=member, engine="podman", runtime="runc")
        facts = {"gang_ref": ["", gang, member, 3, epoch], "gang_epoch": epoch}
        stages = {"pre-dump": {"began": began + 0.5, "seconds": 1.0, "status": 0, "message": ""}}
        stages["post-dump"] = {"began": began + 2, "seconds": 0.5, "status": int(bool(error)), "message": error}
        phases = [{"name": "gang held", "began": began + 1, "seconds": 0.25, "bytes": 0}]
        record = {"container": container.to_json(), "began": began, "ended": began + 3, "facts": facts}
        record |= {"stages": stages, "phases": phases, "spans": [], "error": error}
        history.keep(self._directory, f"{member}-{epoch}", record, limit=99)

    def run(self, *words: str, status: int = 0) -> str:
        """Return what the command prints there."""
        self._monkeypatch.setattr(module, "load_settings", lambda: Settings(history_dir=str(self._directory)))
        self._monkeypatch.setattr(module, "open_journals", list)
        done = CliRunner().invoke(module.timeline, [*words])
        assert done.exit_code == status, done.output
        return done.output if status == 0 else str(done.exception) + done.output


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Two nodes with three members, and what else was there."""
    here, there = (Node(tmp_path / name, monkeypatch) for name in ("here", "there"))
    here.keep("rank0", -100, epoch=6)
    here.keep("rank0", 0)
    here.keep("stranger", 0, gang="other")
    here.keep("rank2", 0.25)
    there.keep("rank1", 1, error="the disk is full")
    return [here, there]


def test_members_are_one_below_the_other(nodes: list[Node], tmp_path: Path) -> None:
    here, _ = nodes
    said = here.run("--gang", "job")
    assert "dump of gang job: session epoch 7, 3.250 s, done" in said
    lanes = [line for line in said.splitlines() if line.startswith(("rank", "stranger"))]
    assert list(dict.fromkeys(line.split(":")[0] for line in lanes)) == ["rank0", "rank2"]
    html = tmp_path / "gang.html"
    here.run("--gang", "job", "--html", str(html))
    page = html.read_text()
    assert "<h1>dump of gang job</h1>" in page
    for lane in ("rank0: stages", "rank0: ocihook", "rank2: stages", "rank2: ocihook"):
        assert lane in page
    assert "stranger" not in page
    names = {
        event["args"]["name"]
        for event in json.loads(here.run("--gang", "job", "--chrome"))["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {"rank0: stages", "rank2: ocihook"} <= names


def test_members_of_other_nodes_are_added(nodes: list[Node], tmp_path: Path) -> None:
    here, there = nodes
    other = tmp_path / "there.json"
    other.write_text(there.run("--gang", "job", "--json"))
    found = json.loads(here.run("--gang", "job", "--add", str(other), "--json"))
    assert (found["began"], found["seconds"], found["error"]) == (BEGAN, 4.0, "the disk is full")
    starts = [(bar["lane"], bar["start_s"]) for bar in found["bars"] if bar["name"] == "post-dump"]
    assert starts == [("rank0: stages", 2.0), ("rank1: stages", 3.0), ("rank2: stages", 2.25)]
    assert [bar["lane"] for bar in found["bars"] if bar["failed"]] == ["rank1: stages"]
    html = tmp_path / "gang.html"
    here.run("--gang", "job", "--add", str(other), "--html", str(html))
    assert all(f"rank{number}: stages" in html.read_text() for number in range(3))


def test_what_does_not_belong_together_is_refused(nodes: list[Node], tmp_path: Path) -> None:
    here, there = nodes
    there.keep("rank1", 200, epoch=8)
    other = tmp_path / "there.json"
    other.write_text(there.run("--gang", "job", "--json"))
    refused = here.run("--gang", "job", "--add", str(other), status=1)
    assert "dump of gang job, epoch 8 is not dump of gang job, epoch 7" in refused
    other.write_text('{"bars": 1}')
    assert "is no timeline as JSON" in here.run("--gang", "job", "--add", str(other), status=2)
    assert "--add goes with --gang" in here.run("--add", str(other), status=2)
    assert "no dump or restore of gang 'none'" in here.run("--gang", "none", status=1)
