"""A CRIU that does not notice that its container was killed is ended; one that is about to end by itself is not."""

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.linux.procfs import Process, descendants, status_fields
from ocihook.session.failure import Attempt
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts
from ocihook.stages import lost_container
from ocihook.stages.detached import KeptFromEnd
from ocihook.stages.lost_container import FailedRestore, LostContainer
from tests.unit.test_ptrace import wait_until

_PTRACE_SEIZE = 0x4206  # linux/ptrace.h
_EXIT = {"x86_64": 60, "aarch64": 93}  # of one thread alone


@pytest.fixture
def container() -> Iterator[Process]:
    """The first process of a PID namespace, in which another one runs that this process traces, as CRIU would."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    command = ["unshare", "--pid", "--fork", "sh", "-c", "sleep 600 & wait"]
    with subprocess.Popen(command) as outside:
        wait_until(lambda: len(descendants(outside.pid)) == 3)
        _, init, inner = descendants(outside.pid)
        assert ctypes.CDLL(None, use_errno=True).ptrace(_PTRACE_SEIZE, inner, None, None) == 0
        found = Process.find(init)
        assert found is not None
        try:
            yield found
        finally:
            found.send(signal.SIGKILL)
            os.waitpid(inner, 0x40000000)  # __WALL: its tracer waits for it first
            outside.wait(60)
    assert found.is_ending()


@pytest.fixture
def criu() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as program:
        found = Process.find(program.pid)
        assert found is not None
        yield found
        program.kill()


def journal_of(tmp_path: Path, criu: Process, init: Process | None, *, leave_running: bool = False) -> Journal:
    journal = Journal.create(tmp_path, criu)
    journal.note(dataclasses.replace(CallFacts(), init=init, leave_running=leave_running))
    return journal


def test_it_ends_together_with_a_container_that_was_killed(
    tmp_path: Path, container: Process, criu: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process cannot end before its tracer has waited for the others."""
    lost = LostContainer(journal_of(tmp_path, criu, container))
    monkeypatch.setattr(lost_container, "_NOTICES_S", 0.0)
    assert lost.may_be()
    assert lost.end_criu() is None
    container.send(signal.SIGKILL)
    wait_until(container.is_ending)
    assert container.is_alive(), "it waits for the other one"
    why = lost.end_criu()
    assert why is not None
    assert f"process {container.pid} of the container was killed" in str(why)
    wait_until(lambda: not criu.is_alive())


def test_it_has_time_to_notice(tmp_path: Path, container: Process, criu: Process) -> None:
    lost = LostContainer(journal_of(tmp_path, criu, container))
    container.send(signal.SIGKILL)
    wait_until(container.is_ending)
    assert lost.end_criu() is None
    assert criu.is_alive()


def test_a_process_whose_first_thread_has_ended_is_not_ending() -> None:
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"ctypes.CDLL(None).syscall({_EXIT[os.uname().machine]}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as program:
        process = Process.find(program.pid)
        assert process is not None
        wait_until(lambda: status_fields(program.pid)["State"].startswith("Z"))
        assert process.is_alive()
        assert not process.is_ending()
        program.kill()
        wait_until(process.is_ending)
    assert process.is_ending()


@pytest.mark.parametrize(
    ("leave_running", "verdict", "is_kept", "may_be"),
    [
        (False, None, False, True),
        (True, None, True, True),
        (False, 0, False, False),  # CRIU kills it by itself
        (False, 1, False, True),
        (True, 0, False, True),
        (True, 0, True, False),  # CRIU waits for us
        (True, 1, True, True),
    ],
)
def test_when_it_could_happen(
    tmp_path: Path, *, leave_running: bool, verdict: int | None, is_kept: bool, may_be: bool
) -> None:
    me = Process.find(os.getpid())
    assert me is not None
    journal = journal_of(tmp_path, me, me, leave_running=leave_running)
    if is_kept:
        journal.add(KeptFromEnd(init=me, work_directory=tmp_path, work_identity=[], image_identity=[]))
    if verdict is not None:
        journal.begin_stage("post-dump")
        journal.end_stage("post-dump", verdict, "")
    assert LostContainer(journal).may_be() == may_be


def test_nothing_is_looked_at_in_a_restore(tmp_path: Path, criu: Process) -> None:
    lost = LostContainer(journal_of(tmp_path, criu, None))
    assert not lost.may_be()
    assert lost.end_criu() is None
    assert criu.is_alive()


@pytest.mark.parametrize(
    ("log", "has_failed"),
    [
        (
            "(00.04) Error (criu/cr-restore.c:2293): Killing processes because of failure on restore.\nThe Network ...",
            True,
        ),
        ("(00.04) pie: 6: Error (criu/pie/restorer.c:346): Unable to restore capabilities: -1", False),
        ("", False),
    ],
)
def test_a_restore_that_has_failed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, *, has_failed: bool
) -> None:
    """CRIU waits for a process that waits for CRIU."""
    monkeypatch.setattr(lost_container, "_NOTICES_S", 0.0)
    path = tmp_path / "restore.log"
    path.write_text(log)
    with path.open("a") as file, subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()]) as program:
        found = Process.find(program.pid)
        assert found is not None
        journal = journal_of(tmp_path, found, None)
        failed, attempt = FailedRestore(journal), Attempt(found, None)
        assert not failed.may_be()
        journal.begin_stage("pre-restore")
        journal.end_stage("pre-restore", 0, "")
        assert failed.may_be()
        assert attempt.has_given_up is has_failed
        if has_failed:
            failed.end_criu()
            assert program.wait(60) == -signal.SIGKILL
        attempt.close()
        program.kill()


def test_a_restore_that_has_failed_has_time_to_end(tmp_path: Path, criu: Process) -> None:
    FailedRestore(journal_of(tmp_path, criu, None)).end_criu()
    assert criu.is_alive()
