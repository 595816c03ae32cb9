"""install and uninstall as commands: what they refuse, and where they say what."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ocihook.checkpoints import complete as ops
from ocihook.checkpoints.pending import pending_ids
from ocihook.cli import install as module
from ocihook.cli.install import install, uninstall
from ocihook.config import Settings
from ocihook.errors import ConfigError, UnsupportedError
from tests.unit.test_store_crash import Node, fail_with


def test_a_tree_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(install, ["--root", str(tmp_path / "typo")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [install, uninstall])
def test_only_root_changes_the_node(monkeypatch: pytest.MonkeyPatch, command: object) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("ocihook.cli.install.plan_install", lambda *_, **__: [])
    monkeypatch.setattr("ocihook.cli.install.plan_uninstall", lambda *_: [])
    result = CliRunner().invoke(command, [])  # type: ignore[arg-type]
    assert isinstance(result.exception, UnsupportedError)
    assert result.exception.hint == "use sudo, --root DIR, or --dry-run"


def test_memory_is_tracked_where_the_kernel_can_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is a tree here; and it is another boot where `works` changes."""
    works = True
    monkeypatch.setattr("ocihook.linux.soft_dirty.works", lambda: works)
    monkeypatch.setattr("ocihook.node.install.NODE", tmp_path)
    conf = tmp_path / "etc/criu/runc.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("shell-job\n")

    def run(*options: str) -> str:
        result = CliRunner().invoke(install, ["--root", str(tmp_path), *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    def is_tracking() -> bool:
        return {"track-mem", "prev-images-dir /"} <= set(conf.read_text().splitlines())

    run("--refresh")
    assert conf.read_text() == "shell-job\n"  # there was nothing to refresh
    assert "+prev-images-dir /\n" in run("--track-memory", "--dry-run")
    assert conf.read_text() == "shell-job\n"
    run("--track-memory")
    assert is_tracking()
    assert "in order" in run("--refresh")
    assert "nothing to change" in run("--track-memory")
    run()
    assert not is_tracking()
    run("--track-memory")
    works = False
    assert "-track-mem\n" in run("--refresh", "--dry-run")
    assert is_tracking()
    run("--refresh")
    assert not is_tracking()
    before = conf.read_text()
    assert before.endswith("shell-job\n")
    for options in (["--track-memory"], ["--track-memory", "--dry-run"]):
        with pytest.raises(UnsupportedError, match=r"would then refuse every dump and restore; nothing was changed"):
            run(*options)
    assert conf.read_text() == before
    works = True
    run("--refresh")
    assert conf.read_text() == before  # who wants it again says so
    monkeypatch.undo()
    result = CliRunner().invoke(install, ["--root", str(tmp_path), "--track-memory"])
    assert "is not known" in str(result.exception)
    assert conf.read_text() == before
    assert CliRunner().invoke(install, ["--refresh", "--runtime"]).exit_code == 2


def test_uninstall_stores_what_is_pending_and_tells_of_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path / "node")
    settings = Settings(store_dir=str(node.store_dir), history_dir=str(tmp_path / "history"), workers=1)
    monkeypatch.setattr(module, "load_settings", lambda: settings)
    monkeypatch.setattr(module, "_check_root", lambda _root: None)
    monkeypatch.setattr(module, "plan_uninstall", lambda *_: [])
    monkeypatch.setattr(module, "apply_uninstall", lambda *_, **__: None)

    def told(*arguments: str) -> str:
        result = CliRunner().invoke(uninstall, arguments)
        assert result.exit_code == 0
        return result.stderr

    node.dump(node.new)
    (checkpoint_id,) = pending_ids(node.domain)
    assert told("--dry-run") == ""
    assert told("--root", str(tmp_path)) == ""
    assert "is not complete: it was not stored in time. It stays in the store" in told("--timeout", "0")
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_store", fail_with(OSError(28, "No space left on device")))
        sentence = told()
    assert sentence.startswith(f"note: checkpoint {checkpoint_id} of team/pod/trainer is not complete: ")
    assert (
        "No space left on device. It stays in the store; nothing completes it unless ocihook is installed" in sentence
    )
    assert pending_ids(node.domain) == [checkpoint_id]
    assert told() == ""
    assert node.contents() == [node.old, node.new]

    node.dump(node.old)
    (lost,) = pending_ids(node.domain)
    (node.domain.pending_dir / lost / "pages-1.img").unlink()
    assert f"checkpoint {lost} of team/pod/trainer is not complete: checkpoint {lost}" in told()
    assert pending_ids(node.domain) == [lost]
    monkeypatch.setattr(module, "load_settings", fail_with(ConfigError("config.toml is not TOML")))
    assert told() == "note: whether checkpoints are pending is not known: config.toml is not TOML\n"


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
