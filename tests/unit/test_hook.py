"""The hook starts fast because it imports next to nothing."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook import wire
from ocihook.hook import client
from ocihook.hook.client import _without_agent, main
from ocihook.linux.procfs import Process
from ocihook.session.journal import Journal

PROJECT = Path(__file__).parents[2]
# What an interpreter without `site` has loaded by itself, and what the hook adds.
ALLOWED = {"ocihook", "ocihook.hook", "ocihook.hook.client", "ocihook.wire", "_socket", "os", "sys", "time"}


def test_the_hook_imports_nothing_slow() -> None:
    def modules(code: str) -> set[str]:
        command = [
            sys.executable,
            "-IS",
            "-c",
            f"import sys; sys.path.insert(0, {str(PROJECT)!r}); {code}print(*sys.modules)",
        ]
        return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())

    assert modules("import ocihook.hook.client; ") - modules("import os; ") <= ALLOWED


@pytest.mark.parametrize(
    ("stage", "names", "status", "message"),
    [
        ("pre-restore", ["ocihook.manifest"], 1, "no agent unpacks.*nothing was started"),
        ("pre-restore", ["ocihook.thin"], 1, "no agent unpacks.*nothing was started"),
        ("pre-restore", ["pages-1.img", "ocihook-0.pack"], 1, "no agent unpacks.*nothing was started"),
        ("pre-restore", ["pages-1.img"], 0, "nothing was done"),
        ("post-dump", ["pages-1.img"], 0, "complete but not packed"),
        ("post-dump", ["pages-1.img", "ocihook-region-3.pack"], 1, "incomplete.*the dump fails, the container runs on"),
        ("post-dump", ["pages-1.img", "ocihook-0.pack"], 1, "incomplete.*the dump fails, the container runs on"),
        ("post-dump", ["pages-1.img", "ocihook.manifest.partial"], 1, "incomplete"),
        ("post-dump", ["ocihook.manifest", "ocihook-0.pack"], 1, "incomplete"),
        ("post-dump", ["ocihook.thin"], 1, "incomplete"),
        ("post-dump", ["ocihook.staged"], 1, "incomplete"),
        ("post-restore", ["ocihook-region-0.pack"], 1, "memory cannot be written.*the restore fails"),
        ("post-resume", [], 0, "nothing was done"),
    ],
)
def test_without_an_agent_nothing_is_taken_for_complete(
    tmp_path: Path, stage: str, names: list[str], status: int, message: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    found, text = _without_agent(stage, str(tmp_path), "gone", is_at_work=False)
    assert found == status
    assert re.search(message, text)


@pytest.mark.parametrize("names", [[], ["pages-1.img"], ["pages-1.img", "ocihook-0.pack"]])
@pytest.mark.parametrize("stage", ["post-dump", "pre-restore"])
def test_an_agent_that_is_still_at_work_fails_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, names: list[str]
) -> None:
    """Nobody knows what it has done a moment later."""
    image_dir = make_image_dir(tmp_path, names)
    with listening(tmp_path, monkeypatch, stage, image_dir):
        monkeypatch.setattr(client, "VERDICT_S", 0.1)
        assert main() == 1


@pytest.mark.parametrize(
    ("names", "status"), [(["pages-1.img"], 0), (["pages-1.img", "ocihook-0.pack", "ocihook-1.pack"], 1)]
)
def test_agents_that_die_over_a_dump_leave_it_whole_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], status: int
) -> None:
    image_dir = make_image_dir(tmp_path, names)
    monkeypatch.setattr(client, "RETRY_S", 0)
    with listening(tmp_path, monkeypatch, "post-dump", image_dir) as listener:

        def die(number: int) -> None:
            for _ in range(number):
                listener.accept()[0].close()

        agent = threading.Thread(target=die, args=(client.ATTEMPTS,))
        agent.start()
        assert main() == status
        agent.join()


def make_image_dir(tmp_path: Path, names: list[str]) -> Path:
    directory = tmp_path / "images"
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    return directory


@contextlib.contextmanager
def listening(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, stage: str, image_dir: Path
) -> Iterator[socket.socket]:
    """Give the socket of an agent that says nothing; the environment is a hook's at a stage."""
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("CRTOOLS_SCRIPT_ACTION", stage)
    monkeypatch.setenv("CRTOOLS_IMAGE_DIR", str(image_dir))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / wire.SOCKET_NAME))
        listener.listen()
        yield listener


def run_action(tmp_path: Path, stage: str) -> str:
    """Run the action script as a child of this process, which stands for CRIU; return what it has Python print."""
    action, python = tmp_path / "criu-action", tmp_path / "python"
    python.write_text("#!/bin/sh\necho called\n")
    python.chmod(0o755)
    text = (PROJECT / "ocihook/hook/criu-action").read_text()
    text = text.replace("@PYTHONS@", f"/missing/python3 '{python}'").replace(wire.RUNTIME_DIR, str(tmp_path))
    action.write_text(text)
    environment = {"CRTOOLS_SCRIPT_ACTION": stage, "CRTOOLS_IMAGE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", action], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("stage", ["setup-namespaces", "post-restore"])
def test_the_action_passes_on_only_where_there_is_gpu_memory(tmp_path: Path, stage: str) -> None:
    assert run_action(tmp_path, stage) == ""
    (tmp_path / "ocihook-region-7.pack").touch()
    assert run_action(tmp_path, stage) == "called"


@pytest.mark.parametrize("stage", ["pre-dump", "post-dump", "pre-restore", "orphan-pts-master"])
def test_the_action_removes_the_link_to_no_parent_and_no_other(tmp_path: Path, stage: str) -> None:
    """Also in stages of which nothing else is passed on, and whoever is to answer."""
    link, previous = tmp_path / "parent", tmp_path / "previous"
    previous.mkdir()
    link.symlink_to("/")
    run_action(tmp_path, stage)
    assert not link.is_symlink()
    for target in ("previous", "missing", "../.."):
        link.symlink_to(target)
        run_action(tmp_path, stage)
        assert str(link.readlink()) == target
        link.unlink()
    link.mkdir()
    run_action(tmp_path, stage)
    assert link.is_dir()


def test_the_action_asks_again_only_what_was_not_answered(tmp_path: Path) -> None:
    """CRIU adds up what its starts return: after a veto they may ask again, but none may pass for another CRIU."""
    criu = Process.find(os.getpid())
    assert criu is not None
    for other in (criu._replace(start_ticks=criu.start_ticks - 1), criu._replace(pid=criu.pid + 1)):
        answered(tmp_path, other, 0)
        assert run_action(tmp_path, "pre-dump") == "called"
    journal = answered(tmp_path, criu, 1)
    assert run_action(tmp_path, "pre-dump") == "called"
    journal.finish()
    journal = answered(tmp_path, criu, 0)
    assert run_action(tmp_path, "pre-dump") == ""
    assert run_action(tmp_path, "post-dump") == "called"
    journal.begin_stage("post-dump")
    assert run_action(tmp_path, "post-dump") == "called"
    journal.finish()
    assert run_action(tmp_path, "pre-dump") == "called"
    assert not list((tmp_path / "sessions").glob(f"{criu.pid}-{criu.start_ticks}*"))


def answered(runtime_dir: Path, criu: Process, status: int) -> Journal:
    journal = Journal.create(runtime_dir, criu)
    journal.begin_stage("pre-dump")
    journal.end_stage("pre-dump", status, "")
    return journal
