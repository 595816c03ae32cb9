"""A failing exit waits for its report; signals, other exits and a killed tracer leave the process as it is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook.linux.delayed_exit import DelayedExit
from ocihook.linux.procfs import status_fields, tracer_pid

_TIMEOUT_S = 60
# Exits with the status that it reads; `thread` has another thread than the first do that.
_PROGRAM = """
import os, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda *_: print("signal", flush=True))
print("ready", flush=True)
status = int(sys.stdin.readline())
if "thread" in sys.argv:
    threading.Thread(target=os._exit, args=(status,)).start()
    threading.Event().wait()
sys.exit(status)
"""


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Victim:
    """A process that exits when it is told to."""

    def __init__(self, *words: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", _PROGRAM, *words], stdin=pipe, stdout=pipe, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def exit(self, status: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{status}\n")
        self.process.stdin.flush()

    def wait_for_tracer(self) -> None:
        wait_for(lambda: tracer_pid(self.pid))

    def is_stopped(self) -> bool:
        return status_fields(self.pid)["State"].startswith("t")


@pytest.fixture(params=["alone", "thread"])
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    made = Victim(request.param)
    yield made
    made.process.kill()
    made.process.communicate(timeout=_TIMEOUT_S)


def test_a_failing_exit_waits(victim: Victim) -> None:
    delayed = DelayedExit(victim.pid, lambda: True)
    victim.wait_for_tracer()
    victim.exit(3)
    delayed.wait()
    assert victim.is_stopped()
    assert victim.process.poll() is None
    delayed.close()
    assert victim.process.wait(_TIMEOUT_S) == 3


@pytest.mark.parametrize("status", [0, 3])
def test_other_exits_do_not(victim: Victim, tmp_path: Path, status: int) -> None:
    def is_wanted() -> bool:
        (tmp_path / "asked").touch()
        return False

    delayed = DelayedExit(victim.pid, is_wanted)
    victim.wait_for_tracer()
    victim.exit(status)
    assert victim.process.wait(_TIMEOUT_S) == status
    assert (tmp_path / "asked").exists() == bool(status)
    delayed.close()


def test_the_process_outlives_its_tracer(victim: Victim) -> None:
    delayed = DelayedExit(victim.pid, lambda: True)
    victim.wait_for_tracer()
    os.kill(tracer_pid(victim.pid) or 0, signal.SIGKILL)
    wait_for(lambda: tracer_pid(victim.pid) == 0)
    victim.exit(3)
    assert victim.process.wait(_TIMEOUT_S) == 3
    delayed.close()


def test_signals_arrive(victim: Victim) -> None:
    delayed = DelayedExit(victim.pid, lambda: False)
    victim.wait_for_tracer()
    os.kill(victim.pid, signal.SIGUSR1)
    assert victim.process.stdout is not None
    assert victim.process.stdout.readline() == "signal\n"
    os.kill(victim.pid, signal.SIGSTOP)
    wait_for(victim.is_stopped)
    os.kill(victim.pid, signal.SIGCONT)
    wait_for(lambda: not victim.is_stopped())
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.process.wait(_TIMEOUT_S) == -signal.SIGKILL
    delayed.close()


def test_a_process_that_has_exited(victim: Victim) -> None:
    victim.exit(0)
    victim.process.wait(_TIMEOUT_S)
    DelayedExit(victim.pid, lambda: True).close()
