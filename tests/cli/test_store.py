"""`ocihook store` and `ocihook wait`, on a store with a complete and a pending checkpoint."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ocihook.checkpoints.pending import Failure, write_failure
from ocihook.cli import store as module
from ocihook.cli.main import cli
from ocihook.config import Settings
from ocihook.errors import IntegrityError
from ocihook.store.thin import Thin, write_thin
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.unit.test_store_crash import Node


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path / "node")
    monkeypatch.setattr(
        module,
        "load_settings",
        lambda: Settings(store_dir=str(made.store_dir), history_dir=str(tmp_path / "history"), workers=1),
    )
    made.dump(made.new)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def as_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.output)
    return value


def test_list_and_wait(node: Node) -> None:
    first, second = as_json("store", "list")["checkpoints"]
    assert (first["state"], second["state"]) == ("complete", "pending")
    assert first["container"] == first["member"] == "team/pod/trainer"
    assert first["owner"] == "pod"
    assert "pending, 0 %" in run("store", "list").output
    waited = run("wait", second["id"])
    assert waited.exit_code == 0
    assert "complete" in waited.output
    assert as_json("wait")["complete"] == []
    second = as_json("store", "list")["checkpoints"][1]
    assert second["state"] == "complete"
    assert second["added_bytes"] < first["added_bytes"]
    assert node.contents() == [node.old, node.new]


def test_what_cannot_be_stored_is_told_with_reason_and_remedy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from ocihook.cli import sessions

    monkeypatch.setattr(sessions, "load_settings", lambda: Settings(store_dir=str(node.store_dir)))
    monkeypatch.setattr(sessions, "open_journals", list)
    (pending,) = node.domain.pending_dir.iterdir()
    failure = Failure("store-full", "No space\x1b left", "make room, then `ocihook wait`", attempts=3)
    write_failure(node.domain, pending.name, failure)
    _, row = as_json("store", "list")["checkpoints"]
    assert (row["state"], row["code"], row["attempts"]) == ("pending", "store-full", 3)
    sentence = f"{pending.name} is pending (3 attempts): No space\\x1b left. Make room, then `ocihook wait`\n"
    assert run("store", "list").output.endswith(sentence)
    assert run("ps").output.endswith(sentence)
    (row,) = as_json("ps")["pending"]
    assert row["remedy"] == "make room, then `ocihook wait`"
    # Neither does damage, or a key that is gone, hide it.
    next(node.domain.checkpoints_dir.glob("*.manifest")).write_bytes(b"")
    listed = run("store", "list")
    assert isinstance(listed.exception, IntegrityError)
    assert sentence in listed.output


def test_waiting_for_what_is_not_there(node: Node) -> None:
    result = run("wait", "20200101T000000Z-00000000")
    assert str(result.exception).endswith("has no checkpoint 20200101T000000Z-00000000")


def test_status(node: Node) -> None:
    node.complete()
    (usage,) = as_json("store", "status")["domains"].values()
    assert usage["checkpoints"] == 2
    assert usage["raw_bytes"] == len(node.old) + len(node.new)
    assert usage["stored_bytes"] < usage["raw_bytes"]
    assert usage["rubbish_bytes"] == 0
    assert "team" in run("store", "status").output


def test_verify(node: Node) -> None:
    node.complete()
    assert "every byte right" in run("store", "verify", "--read-data").output
    pack = min(node.domain.packs_dir.iterdir())
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    assert "all records right" in run("store", "verify").output
    result = run("store", "verify", "--read-data")
    assert "the chunk at byte 16 is damaged" in result.output
    assert "is damaged, see above" in str(result.exception)


def test_prune(node: Node) -> None:
    node.complete()
    first, second = (row["id"] for row in as_json("store", "list")["checkpoints"])
    assert as_json("store", "prune")["pruned"][0]["removed"] == []
    assert as_json("store", "prune", "--keep-last", "1", "--keep-within", "1h")["pruned"][0]["removed"] == []
    assert f"would remove {first}" in run("store", "prune", "--keep-last", "1", "--dry-run").output
    assert len(as_json("store", "list")["checkpoints"]) == 2
    assert as_json("store", "prune", "--max-size", "1K")["pruned"][0]["removed"] == [first]
    assert as_json("store", "prune", "--keep-last", "1")["pruned"][0]["removed"] == []
    assert [row["id"] for row in as_json("store", "list")["checkpoints"]] == [second]
    assert node.contents() == [node.new]


def test_prune_by_the_configuration_and_of_archives(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.complete()
    archives = tmp_path / "checkpoints"
    archives.mkdir()
    make_image_set(tmp_path / "images", {1: mixed_pages(5)})
    for number in range(4):
        path = archives / f"checkpoint-{number}.tar"
        make_archive(path, tmp_path / "images", "containerd")
        os.utime(path, (1000 + number, 1000 + number))
    os.utime(archives / "checkpoint-3.tar")  # the engine may still be at it
    (archives / "other.tar").write_bytes(b"no archive")
    os.utime(archives / "other.tar", (1, 1))
    settings = Settings(store_dir=str(node.store_dir), keep_last=1, archive_dir=str(archives))
    monkeypatch.setattr(module, "load_settings", lambda: settings)
    store, kubelet = as_json("store", "prune")["pruned"]
    assert len(store["removed"]) == 1
    assert kubelet["removed"] == ["checkpoint-1.tar", "checkpoint-0.tar"]
    assert sorted(path.name for path in archives.iterdir()) == ["checkpoint-2.tar", "checkpoint-3.tar", "other.tar"]
    assert node.contents() == [node.new]


@pytest.mark.parametrize(("option", "value"), [("--keep-within", "3y"), ("--max-size", "many"), ("--keep-within", "")])
def test_numbers_that_are_none(node: Node, option: str, value: str) -> None:
    result = run("store", "prune", option, value)
    assert result.exit_code == 2
    assert "is not a number with one of the units" in result.output


def test_push_and_pull(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    result = run("store", "push", "--all")
    assert str(result.exception).startswith("no remote is configured. Set [agent] remote")
    settings = Settings(store_dir=str(node.store_dir), remote=str(remote), workers=1)
    monkeypatch.setattr(module, "load_settings", lambda: settings)
    node.complete()
    first, second = (row["id"] for row in as_json("store", "list")["checkpoints"])
    assert as_json("store", "push")["checkpoints"] == []
    node.domain.pushes.note(first)
    (row,) = as_json("store", "push")["checkpoints"]
    assert (row["checkpoint_id"], row["moved_bytes"]) == (first, row["pack_bytes"])
    assert f"{second}: " in run("store", "push", second).output
    assert [row["moved_bytes"] for row in as_json("store", "push", "--all")["checkpoints"]] == [0, 0]
    assert [row["id"] for row in as_json("store", "list", "--remote")["checkpoints"]] == [first, second]
    monkeypatch.setattr(module, "load_settings", lambda: Settings(store_dir=str(tmp_path / "other")))
    assert f"{second}: " in run("store", "pull", second, "--from", str(remote)).output
    write_thin(node.images, Thin("team", first), durable=False)
    for path in node.images.glob("pages-*"):
        path.unlink()
    make_archive(tmp_path / "thin.tar", node.images, "containerd")
    (row,) = as_json("store", "pull", str(tmp_path / "thin.tar"), "--from", str(remote))["checkpoints"]
    assert row["checkpoint_id"] == first
    assert {row["id"] for row in as_json("store", "list")["checkpoints"]} == {first, second}
    missing = run("store", "pull", "20200101T000000Z-00000000", "--from", str(remote))
    assert str(missing.exception) == f"{remote} has no checkpoint 20200101T000000Z-00000000"
    assert (
        f"would remove {first}" in run("store", "prune", "--keep-last=1", "--remote", str(remote), "--dry-run").output
    )
    bounded = Settings(store_dir=str(node.store_dir), keep_last=1, max_store_bytes=1)
    monkeypatch.setattr(module, "load_settings", lambda: bounded)  # of the store, and nothing of the remote
    assert as_json("store", "prune", "--remote", str(remote))["pruned"][0]["removed"] == []
    (pruned,) = as_json("store", "prune", "--keep-last", "1", "--remote", str(remote))["pruned"]
    assert pruned["removed"] == [first]


def test_repair(node: Node) -> None:
    for path in node.domain.index_dir.iterdir():
        path.write_bytes(b"")
    assert as_json("store", "repair")["done"] == ["domain team: rebuilt the index: 60 pages of 1 packs"]
    node.complete()
    assert node.contents() == [node.old, node.new]


def test_pins_uses_and_pushes_are_shown(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node.complete()
    first, second = (row["id"] for row in as_json("store", "list")["checkpoints"])
    assert run("store", "pin", first).exit_code == 0
    node.domain.pushes.note(first)
    node.domain.pushes.note(second)
    waiting = node.domain.pushes.read(first)
    assert waiting is not None
    node.domain.pushes.failed(waiting, "no route to host", time.time())
    with node.domain.using(second):
        rows = as_json("store", "list")["checkpoints"]
        told = run("store", "list").output
    assert [(row["is_pinned"], row["is_used"], row["push"]["attempts"]) for row in rows] == [
        (True, False, 1),
        (False, True, 0),
    ]
    assert "pinned" in told
    assert "in use" in told
    assert "to be pushed" in told
    status = as_json("store", "status")
    assert {push["checkpoint_id"]: push["error"] for push in status["pushes"]} == {
        first: "no route to host",
        second: "",
    }
    assert (
        f"{first} in domain team was not pushed: no route to host; 1 attempts, the next in"
        in run("store", "status").output
    )
    assert status["total_bytes"] == sum(u["stored_bytes"] + u["index_bytes"] for u in status["domains"].values())
    settings = Settings(store_dir=str(node.store_dir), max_store_bytes=1)
    monkeypatch.setattr(module, "load_settings", lambda: settings)
    assert "max_store_bytes is 1 B" in run("store", "status").output
    assert as_json("store", "prune")["pruned"][0]["removed"] == []
    assert run("store", "unpin", first).exit_code == 0
    assert as_json("store", "prune", "--dry-run")["pruned"][0]["removed"] == [first]
    assert as_json("store", "prune")["pruned"][0]["removed"] == [first]
    assert "has no checkpoint" in str(run("store", "unpin", first).exception)


@pytest.mark.parametrize(
    "option", [("--keep-last", "-1"), ("--max-size", "9" * 400), ("--keep-within", "9" * 30 + "w")]
)
def test_a_prune_takes_no_number_that_makes_no_sense(node: Node, option: tuple[str, str]) -> None:
    before = as_json("store", "list")["checkpoints"]
    assert run("store", "prune", *option).exit_code == 2
    assert as_json("store", "list")["checkpoints"] == before
