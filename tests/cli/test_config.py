"""`ocihook config show`: what holds, and where it comes from."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.cli import config as module
from ocihook.config import ALLOWED, TABLES, Policy, Settings, load_with_sources


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "load_with_sources", lambda: load_with_sources(tmp_path))
    directory = tmp_path / "etc/ocihook"
    (directory / "config.d").mkdir(parents=True)
    return directory


def shown() -> dict[str, dict[str, object]]:
    done = CliRunner().invoke(module.config, ["show", "--json"])
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)["settings"]}


def test_every_setting_is_shown_with_its_default(etc: Path) -> None:
    rows = shown()
    agent = {f"agent.{f.name}" for f in dataclasses.fields(Settings) if f.name not in TABLES}
    policy = {f"policy.{f.name}" for f in dataclasses.fields(Policy)}
    assert set(rows) == agent | policy | {f"policy.allowed.{key}" for key in ALLOWED}
    assert all(row["file"] is None and row["value"] == row["default"] for row in rows.values())
    assert " default" in CliRunner().invoke(module.config, ["show"]).stdout


def test_the_file_and_the_line_that_count(etc: Path) -> None:
    (etc / "config.toml").write_text(
        '[agent]\nworkers = 2  # two\n\n[policy]\n"mode" = "store"\nallowed = {mode = false}\n'
        '[restore_from]\nteam-b = ["team-a"]\n'
    )
    (etc / "config.d/20-more.toml").write_text("# ours\n[agent]\nworkers = 3\n[policy.allowed]\ngpu_map = true\n")
    rows = shown()
    found = {name: (row["value"], row["file"], row["line"]) for name, row in rows.items() if row["file"]}
    assert found == {
        "agent.workers": (3, f"{etc}/config.d/20-more.toml", 3),
        "policy.mode": ("store", f"{etc}/config.toml", 5),
        "policy.allowed.mode": (False, f"{etc}/config.toml", None),  # in a table of one line
        "policy.allowed.gpu_map": (True, f"{etc}/config.d/20-more.toml", 5),
        "restore_from.team-b": (["team-a"], f"{etc}/config.toml", 8),
    }
    assert rows["agent.workers"]["default"] == 0
    words = CliRunner().invoke(module.config, ["show"]).stdout.split()  # a long path takes two lines
    assert "20-more.toml,line3" in "".join(words)
