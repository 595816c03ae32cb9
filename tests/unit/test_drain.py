"""What is removed is not in use any more: CRIU that may call the hook, sessions, the agent."""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ocihook.errors import AgentError
from ocihook.linux.procfs import command_line
from ocihook.node import drain
from ocihook.node.drain import wait_until_unused

IS_CRIU = drain._is_criu_at_work


@contextmanager
def process_named(*words: str, program: Path = Path("/bin/sh")) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that reads commands from us until it is ended, with `words` as its command line."""
    process = subprocess.Popen(words, executable=program, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        while not command_line(process.pid):  # Popen returns in the middle of its exec
            pass
        yield process
    process.wait(60)


@pytest.fixture(autouse=True)
def only_our_processes(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The machine may be at work with CRIU of its own."""
    ours: set[int] = set()
    monkeypatch.setattr(drain, "_is_criu_at_work", lambda pid: pid in ours and IS_CRIU(pid))
    return ours


@pytest.mark.parametrize(
    "title", [("criu: dump --rpc -t 7",), ("criu", "restore", "-d"), ("/usr/sbin/criu", "swrk", "3")]
)
def test_criu_is_known_under_every_title(monkeypatch: pytest.MonkeyPatch, title: tuple[str, ...]) -> None:
    monkeypatch.setattr(drain, "command_line", lambda _pid: list(title))
    monkeypatch.setattr(drain, "_runs_criu", lambda _pid: True)
    assert IS_CRIU(1)


def test_criu_at_work_is_waited_for(tmp_path: Path, only_our_processes: set[int]) -> None:
    program, launcher = Path(shutil.copy("/bin/sh", tmp_path / "criu")), tmp_path / "criu-action"
    launcher.touch()
    with (
        process_named("/usr/sbin/criu", "-s", "swrk", program=program) as criu,
        process_named("criu", "-s", "service", program=program) as service,
        process_named("criu", "-s", "dump") as other,  # whoever likes to be called so, as in a container
    ):
        only_our_processes |= {criu.pid, service.pid, other.pid}
        with pytest.raises(AgentError, match=rf"in use after 0 s: CRIU \(pid {criu.pid}\)\. New dumps .* do not call"):
            wait_until_unused(tmp_path, launchers=[launcher], timeout_s=0)
        wait_until_unused(tmp_path, launchers=[tmp_path / "gone"], timeout_s=0)
        criu.kill()
        criu.wait(60)
        wait_until_unused(tmp_path, launchers=[launcher], timeout_s=0)


def test_criu_of_another_root_is_not_waited_for(tmp_path: Path, only_our_processes: set[int]) -> None:
    """As in a container, or on a node in a mount namespace, whose launcher is another file under the same name."""
    program, launcher = Path(shutil.copy("/bin/sh", tmp_path / "criu")), tmp_path / "bin/criu-action"
    launcher.parent.mkdir()
    launcher.touch()
    script = 'mount -t tmpfs tmpfs "${1%/*}" && touch "$1" && exec -a criu "$2" -s dump'
    words = ["unshare", "--mount", "bash", "-c", script, "bash", str(launcher), str(program)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as criu:
        while command_line(criu.pid)[:1] != ["criu"]:
            assert criu.poll() is None
        only_our_processes.add(criu.pid)
        wait_until_unused(tmp_path, launchers=[launcher], timeout_s=0)
        criu.kill()


def test_open_sessions_are_waited_for(tmp_path: Path) -> None:
    journal = tmp_path / "sessions/1-2.json"
    journal.parent.mkdir()
    journal.touch()
    with pytest.raises(AgentError, match="session 1-2"):
        wait_until_unused(tmp_path, timeout_s=0)
    journal.unlink()
    wait_until_unused(tmp_path / "missing", timeout_s=0)
    assert not (tmp_path / "missing").exists()


def test_the_agent_is_told_to_leave_and_nobody_else(tmp_path: Path) -> None:
    code = (
        "import fcntl, signal, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); import os;"
        "lock.write(str(os.getpid())); lock.flush(); print('ready', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "agent.lock"), "ocihook"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        wait_until_unused(tmp_path, timeout_s=60)
        assert agent.wait(60) == -15
    with process_named("sh", "-s") as other, (tmp_path / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a recovery has it; the pid is of an agent long gone
        lock.write(str(other.pid))
        lock.flush()
        with pytest.raises(AgentError, match="does not end"):
            wait_until_unused(tmp_path, timeout_s=0.2)
        assert other.poll() is None
