"""install and uninstall as commands: what they refuse, and where they say what."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.cli.install import install, uninstall
from ocihook.errors import UnsupportedError


def test_a_tree_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(install, ["--root", str(tmp_path / "typo")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [install, uninstall])
def test_only_root_changes_the_node(monkeypatch: pytest.MonkeyPatch, command: object) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("ocihook.cli.install.plan_install", lambda *_: [])
    monkeypatch.setattr("ocihook.cli.install.plan_uninstall", lambda *_: [])
    result = CliRunner().invoke(command, [])  # type: ignore[arg-type]
    assert isinstance(result.exception, UnsupportedError)
    assert result.exception.hint == "use sudo, --root DIR, or --dry-run"


def test_scripts_of_others_are_noted_beside_the_result(tmp_path: Path) -> None:
    conf = tmp_path / "etc/criu/runc.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("action-script /usr/bin/other\n")
    result = CliRunner().invoke(install, ["--root", str(tmp_path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["dry_run"] is False
    assert result.stderr == f"note: {conf} also names /usr/bin/other: it stays, and runs too\n"
    assert conf.read_text().endswith("# END ocihook\naction-script /usr/bin/other\n")


def test_a_dry_run_shows_the_diff_of_every_file_and_changes_none(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/systemd/system").mkdir(parents=True)
    planned = CliRunner().invoke(install, ["--root", str(tmp_path), "--dry-run"]).stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "usr"]
    done = CliRunner().invoke(install, ["--root", str(tmp_path)]).stdout.splitlines()
    assert [line.removeprefix("+++ ") for line in planned.splitlines() if line.startswith("+++")] == [
        line.removeprefix("wrote ") for line in done
    ]
    for path in (line.removeprefix("wrote ") for line in done):
        assert all(f"+{line}\n" in planned for line in Path(path).read_text().splitlines())
