"""Forked workers: every task once, and no worker left behind whichever way the work ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook.errors import GivenUp, IntegrityError, OcihookError
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.linux.workers import WorkerDied, call_each, run_forked, start_call
from tests.open_files import nothing_left_open
from tests.unit.test_ptrace import wait_until

Worker = Callable[[int, Iterator[int]], Iterator[object]]


def echo(number: int, tasks: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    for task in tasks:
        yield number, task, os.getpid()


_others: set[int] = set()


def children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture(autouse=True)
def children_of_others() -> None:
    """Note what earlier tests in this process have left: it is not the workers'."""
    _others.clear()
    _others.update(children())


def no_children_left() -> bool:
    return children() <= _others


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("workers", [0, 1, 2, 4, 16])
@pytest.mark.parametrize("tasks", [0, 1, 2, 5, 1000])
def test_each_task_goes_to_exactly_one_worker(tasks: int, workers: int) -> None:
    results = list(run_forked(echo, tasks=tasks, workers=workers))
    assert sorted(task for _, task, _ in results) == list(range(tasks))
    assert {number for number, _, _ in results} <= set(range(max(1, min(workers, tasks))))
    forked = {pid for _, _, pid in results} - {os.getpid()}
    assert not forked if workers <= 1 or tasks <= 1 else forked
    assert no_children_left()


def test_descriptors_are_returned() -> None:
    with nothing_left_open():
        list(run_forked(echo, tasks=10, workers=3))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_of_a_worker_is_raised_with_all_it_says(workers: int) -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            if task == 2:
                raise IntegrityError("page 7 is damaged", hint="use another copy")
            yield task

    with pytest.raises(IntegrityError, match="page 7") as caught:
        list(run_forked(worker, tasks=8, workers=workers))
    assert caught.value.hint == "use another copy"
    assert no_children_left()


def test_an_operating_system_error_keeps_its_number() -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            os.open("/no/such/file", os.O_RDONLY)
            yield task

    with pytest.raises(FileNotFoundError) as caught:
        list(run_forked(worker, tasks=2, workers=2))
    assert caught.value.filename == "/no/such/file"


def test_an_error_that_does_not_pickle_becomes_a_sentence() -> None:
    class Odd(Exception):
        def __init__(self, task: int, why: str) -> None:
            super().__init__(f"odd thing {why}, {task}")

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            raise Odd(task, "here")
        yield 0

    with pytest.raises(OcihookError, match="Odd: odd thing here"):
        list(run_forked(worker, tasks=2, workers=2))


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
def test_an_error_too_long_for_the_pipe_is_cut(letter: str) -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for _task in tasks:
            raise ValueError(letter * 100_000)
        yield 0

    with pytest.raises(OcihookError, match=f"ValueError: {letter}") as caught:
        list(run_forked(worker, tasks=2, workers=2))
    assert len(str(caught.value)) < 1000


def test_a_result_too_large_for_the_pipe_is_an_error() -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[bytes]:
        for _task in tasks:
            yield bytes(5000)

    with pytest.raises(OcihookError, match="too large"):
        list(run_forked(worker, tasks=2, workers=2))


def test_a_killed_worker_is_noticed() -> None:
    def worker(number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            if task == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield task

    with pytest.raises(
        WorkerDied, match=r"worker . ended with signal SIGKILL\. The kernel does that where memory runs out"
    ):
        list(run_forked(worker, tasks=6, workers=2))
    assert no_children_left()


def test_a_worker_that_exits_is_noticed() -> None:
    def worker(number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            if task == 3:
                raise SystemExit(0)
            yield task

    with pytest.raises(WorkerDied, match="exit status 1"):
        list(run_forked(worker, tasks=6, workers=2))


def test_workers_are_killed_when_the_caller_stops_early() -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for _task in tasks:
            yield os.getpid()
            signal.pause()

    results = run_forked(worker, tasks=2, workers=2)
    pids = {next(results), next(results)}
    assert all(is_alive(pid) for pid in pids)
    results.close()
    assert not any(is_alive(pid) for pid in pids)


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from ocihook.linux.workers import run_forked
def worker(number, tasks):
    for task in tasks:
        yield os.getpid()
        signal.pause()
for pid in run_forked(worker, tasks=2, workers=2):
    print(pid, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_calls_are_made_at_once_and_answered_in_order(tmp_path: Path) -> None:
    def square(number: int) -> int:
        (tmp_path / str(number)).touch()
        while len(list(tmp_path.iterdir())) < 3:  # none returns before all are made
            time.sleep(0.01)
        return number * number

    assert call_each(square, [3, 1, 2], Patience(timeout_s=60)) == [9, 1, 4]
    assert no_children_left()


def test_a_call_that_fails_does_not_disturb_the_others() -> None:
    def call(number: int) -> int:
        if number == 1:
            raise IntegrityError("one", hint="two")
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    zero, one, two = call_each(call, [0, 1, 2], Patience(timeout_s=60))
    assert zero == 0
    assert isinstance(one, IntegrityError)
    assert str(one) == "one. Two"
    assert isinstance(two, WorkerDied)


def test_a_call_that_does_not_return_is_killed() -> None:
    (never,) = call_each(lambda _: signal.pause(), [None], Patience(timeout_s=0.5))
    assert isinstance(never, TimeoutError)
    assert no_children_left()


def test_what_was_there_in_time_is_not_lost_with_what_was_not() -> None:
    with start_call(lambda number: number, 1) as quick, start_call(lambda _: signal.pause(), None) as never:
        assert quick.outcome(ENDLESS) == 1
        assert isinstance(never.outcome(Patience(timeout_s=0)), TimeoutError)
    assert no_children_left()


def test_a_large_result() -> None:
    assert call_each(lambda size: b"x" * size, [5 << 20], Patience(timeout_s=60)) == [b"x" * (5 << 20)]


def test_a_call_that_somebody_else_waited_for_kills_nobody() -> None:
    with start_call(lambda _: 7, None) as call:
        os.waitpid(call.pid, 0)
        assert call.outcome(ENDLESS) == 7
    assert no_children_left()


def test_what_must_not_be_left_half_done_outlives_its_parent(tmp_path: Path) -> None:
    """A call's process dies with its parent, but not inside `outliving_parent`."""
    program = """
import os, signal, sys, time
from pathlib import Path
from ocihook.linux.workers import outliving_parent, start_call
def work(directory):
    with outliving_parent():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.2)
        (directory / "done").touch()
    (directory / "lived on").touch()
with start_call(work, Path(sys.argv[1])):
    time.sleep(60)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=False, timeout=60)
    wait_until((tmp_path / "done").exists)
    time.sleep(0.3)
    assert not (tmp_path / "lived on").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_who_is_killed_when_the_last_result_is_there_has_given_up(workers: int) -> None:
    """All results may come at once; whoever waits for them may have died since."""
    waiting = subprocess.Popen(["sleep", "infinity"])
    process = Process.find(waiting.pid)
    assert process is not None
    patience, came = Patience({"the runtime": process}), 0

    def take_all() -> None:
        nonlocal came
        for _ in run_forked(echo, tasks=2, workers=workers, patience=patience):
            came += 1
            if came == 2:
                waiting.kill()
                waiting.wait()

    with pytest.raises(GivenUp, match="the runtime"):
        take_all()
    patience.close()
    assert came == 2
