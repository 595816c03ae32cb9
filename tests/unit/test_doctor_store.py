"""What doctor says of the store."""

from pathlib import Path

import pytest

from ocihook.checkpoints.pending import Failure, write_failure
from ocihook.config import Settings
from ocihook.node.doctor import store as module
from ocihook.preflight.finding import Status
from tests.fakes.keys import make_keys
from tests.unit.test_store_crash import Node


def findings(monkeypatch: pytest.MonkeyPatch, node: Node, **settings: str) -> dict[str, tuple[Status, str]]:
    monkeypatch.setattr(module, "load_settings", lambda: Settings(store_dir=str(node.store_dir), **settings))  # type: ignore[arg-type]
    return {
        found.check: (found.status, f"{found.detail}. {found.remedy}") for check in module.CHECKS for found in check()
    }


def test_a_store_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "node")
    assert findings(monkeypatch, node) == {}
    assert findings(monkeypatch, node, remote="s3://bucket") == {"remote": (Status.OK, "s3://bucket. ")}


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(tmp_path)
    node = Node(tmp_path / "node", keys)
    assert findings(monkeypatch, node, key_file=keys.file) == {}
    status, text = findings(monkeypatch, node)["store keys"]
    assert status is Status.FAIL
    assert "domain team is encrypted: checkpoints of domain team can be neither made nor restored. configure" in text
    plain = Node(tmp_path / "plain")
    status, text = findings(monkeypatch, plain, key_file=keys.file)["store keys"]
    assert status is Status.FAIL
    assert text.endswith("mode store refuses its dumps. ocihook store rekey")


def test_a_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "node")
    status, text = findings(monkeypatch, node, remote=str(tmp_path / "gone"))["remote"]
    assert status is Status.FAIL
    assert text.endswith("nothing is pushed to it, or pulled. mount it")
    node.domain.pushes.note(node.domain.checkpoint_ids()[0])
    status, text = findings(monkeypatch, node, remote=str(tmp_path))["remote"]
    assert status is Status.WARN
    assert text.endswith("; 1 checkpoints are to be pushed. ocihook store push")


def test_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "node")
    node.dump(node.new)
    (pending,) = node.domain.pending_dir.iterdir()
    (pending / "pages-1.img").unlink()
    status, text = findings(monkeypatch, node)["store"]
    assert status is Status.WARN
    assert text.startswith(f"checkpoint {pending.name} is lost: ")
    assert text.endswith(": a restore of it fails. ocihook store prune")


def test_what_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "node")
    node.dump(node.new)
    assert findings(monkeypatch, node) == {}
    (pending,) = node.domain.pending_dir.iterdir()
    write_failure(node.domain, pending.name, Failure("key-missing", "no key", "see key_file", attempts=1))
    status, text = findings(monkeypatch, node)["store pending"]
    assert status is Status.FAIL
    assert text == f"checkpoint {pending.name} of team/pod/trainer could not be stored: no key. see key_file"
