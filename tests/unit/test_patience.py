"""A caller that no longer waits ends every wait: sleeping, asking, reading, workers, calls, locks, held threads."""

import contextlib
import fcntl
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from ocihook.errors import CudaError, CudaLockTimeout, GivenUp, StoreError
from ocihook.gpu import processes as gpu
from ocihook.gpu import room
from ocihook.gpu.driver import CudaDriver, CudaState
from ocihook.gpu.nvml import Gpu
from ocihook.linux.files import try_lock
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import HeldThread, held
from ocihook.linux.workers import call_each, run_forked
from ocihook.store.domain import Domain
from tests.open_files import nothing_left_open, open_files
from tests.unit.test_linux import is_removed
from tests.unit.test_ptrace import wait_until

LONG_S = 600  # nothing here takes as long
POLL = {"x86_64": ("7", "271"), "aarch64": ("73",)}.get(os.uname().machine, ())  # numbers of poll(2) and ppoll(2)


class Waiting:
    """A process that waits for something, until it is killed."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(["sleep", str(LONG_S)])
        process = Process.find(self.popen.pid)
        assert process is not None
        self.process = process

    def patience(self, timeout_s: float | None = None) -> Patience:
        return Patience({"the runtime": self.process}, timeout_s=timeout_s)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()

    @contextlib.contextmanager
    def ends_when(self, is_so: Callable[[], bool]) -> Iterator[None]:
        """Have it killed from elsewhere as soon as something is so; the block is to raise that it was."""

        def end() -> None:
            assert Patience(timeout_s=60).until(is_so)
            self.popen.kill()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(GivenUp, match=rf"the runtime \(pid {self.popen.pid}\) was killed meanwhile"):
            yield
        thread.join()
        self.popen.wait()


@pytest.fixture
def runtime() -> Iterator[Waiting]:
    waiting = Waiting()
    yield waiting
    waiting.end()


def waits_in_poll() -> Callable[[], bool]:
    """Return what tells whether the thread that asks for it now waits in poll(2), or what libc makes of it."""
    tid = threading.get_native_id()
    return lambda: Path(f"/proc/{tid}/syscall").read_text().split()[0] in POLL


def test_a_sleep_ends_with_whoever_waits(runtime: Waiting) -> None:
    with runtime.ends_when(waits_in_poll()):
        runtime.patience().sleep(LONG_S)


def test_so_does_waiting_until_something_is_so(runtime: Waiting) -> None:
    asked: list[int] = []
    with runtime.ends_when(lambda: len(asked) > 2):
        runtime.patience().until(lambda: asked.append(1) is not None)  # type: ignore[func-returns-value]


def test_so_does_waiting_for_a_pipe(runtime: Waiting) -> None:
    reader, writer = os.pipe()
    with runtime.ends_when(waits_in_poll()):
        runtime.patience().ready(reader)
    os.write(writer, b"x")
    with pytest.raises(GivenUp):  # though it could be read
        runtime.patience().ready(reader)
    assert Patience().ready(reader)
    os.close(writer)
    assert os.read(reader, 2) == b"x"
    assert Patience().ready(reader)  # its end
    os.close(reader)


def test_what_is_so_at_once_is_not_waited_for(runtime: Waiting) -> None:
    assert runtime.patience(0).until(lambda: True)
    assert not runtime.patience(0).until(lambda: False)
    runtime.end()
    with pytest.raises(GivenUp):
        runtime.patience().until(lambda: True)


def test_deadlines(runtime: Waiting) -> None:
    assert runtime.patience().left_s == math.inf
    assert not runtime.patience().is_over
    over = runtime.patience(0)
    assert (over.left_s, over.is_over) == (0, True)
    over.check()  # they still wait
    over.sleep(LONG_S)
    reader, writer = os.pipe()
    assert not over.ready(reader)
    os.write(writer, b"x")
    assert over.ready(reader)
    for fd in (reader, writer):
        os.close(fd)
    assert over.within(LONG_S).is_over
    assert 0 < runtime.patience(LONG_S).within(2 * LONG_S).left_s <= LONG_S
    assert 0 < runtime.patience().within(LONG_S).left_s <= LONG_S
    patience = runtime.patience()
    assert patience.within(0).is_over
    assert not patience.is_over


def test_a_shorter_one_watches_the_same(runtime: Waiting) -> None:
    patience = runtime.patience().within(LONG_S)
    patience.check()
    runtime.end()
    with pytest.raises(GivenUp):
        patience.check()


def test_nobody_never_gives_up() -> None:
    Patience().check()
    Patience().sleep(0)
    assert ENDLESS.left_s == math.inf


def test_who_has_ended_before_or_whose_pid_is_anothers_has_given_up(runtime: Waiting) -> None:
    other = Process(runtime.process.pid, runtime.process.start_ticks - 1)
    with pytest.raises(GivenUp, match="CRIU"):
        Patience({"the runtime": runtime.process, "CRIU": other}).check()
    runtime.end()
    with pytest.raises(GivenUp, match="the runtime"):
        runtime.patience().check()


def test_forked_processes_share_it(runtime: Waiting) -> None:
    patience = runtime.patience()
    reader, writer = os.pipe()

    def wait(_: None) -> None:
        os.write(writer, b"x")
        patience.sleep(LONG_S)

    def end() -> None:
        os.read(reader, 1)
        runtime.popen.kill()

    thread = threading.Thread(target=end)
    thread.start()
    (outcome,) = call_each(wait, [None], Patience(timeout_s=60))
    thread.join()
    assert isinstance(outcome, GivenUp)
    for fd in (reader, writer):
        os.close(fd)


def test_closed_it_holds_nothing(runtime: Waiting) -> None:
    with nothing_left_open():
        before = open_files().items()
        patience = runtime.patience()
        assert len(open_files().items() - before) == 1
        patience.close()
        patience.close()
    runtime.end()
    patience.check()


# --- what waits with it


def test_workers_that_hang_are_killed(runtime: Waiting) -> None:
    reader, writer = os.pipe()

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            yield task
            os.write(writer, os.getpid().to_bytes(4, "little"))
            signal.pause()

    def end() -> None:
        pids.extend(int.from_bytes(os.read(reader, 4), "little") for _ in range(2))
        runtime.popen.kill()

    pids: list[int] = []
    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(GivenUp, match="the runtime"):
        list(run_forked(worker, tasks=4, workers=2, patience=runtime.patience()))
    thread.join()
    assert [Process.find(pid) for pid in pids] == [None, None]
    with pytest.raises(GivenUp, match="not done in time"):
        list(run_forked(worker, tasks=4, workers=2, patience=Patience(timeout_s=0.1)))
    for fd in (reader, writer):
        os.close(fd)


def test_one_worker_alone_is_stopped_between_its_results(runtime: Waiting) -> None:
    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            if task == 2:
                runtime.end()
            yield task

    found: list[int] = []
    with pytest.raises(GivenUp):
        found.extend(run_forked(worker, tasks=4, workers=1, patience=runtime.patience()))
    assert found == [0, 1]


class HangingDriver:
    """Its calls do not return."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def state(self, _pid: int) -> CudaState:
        os.write(self.writer, os.getpid().to_bytes(4, "little"))
        signal.pause()
        return CudaState.RUNNING


def test_a_driver_that_does_not_answer(runtime: Waiting) -> None:
    reader, writer = os.pipe()
    driver = cast("CudaDriver", HangingDriver(writer))
    pids: list[int] = []

    def end() -> None:
        pids.append(int.from_bytes(os.read(reader, 4), "little"))
        runtime.popen.kill()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(GivenUp, match="the runtime"):
        gpu.states(driver, [runtime.process], runtime.patience())
    thread.join()
    assert Process.find(pids[0]) is None
    for fd in (reader, writer):
        os.close(fd)


def test_locks_that_are_tried_again(runtime: Waiting, tmp_path: Path) -> None:
    """An attempt is not interrupted; after it there is no wait for another."""
    (tmp_path / "attempts").touch()

    class Driver:
        def state(self, _pid: int) -> CudaState:
            return CudaState.RUNNING

        def lock(self, _pid: int, _timeout_s: float) -> None:
            with (tmp_path / "attempts").open("a") as file:
                file.write("x")
            raise CudaLockTimeout("busy", result="CUDA_ERROR_NOT_READY")

    processes = [process for pid in (os.getpid(), os.getppid()) if (process := Process.find(pid))]
    with runtime.ends_when(lambda: (tmp_path / "attempts").stat().st_size >= 4):
        gpu.lock_all(cast("CudaDriver", Driver()), processes, runtime.patience(), LONG_S)


def test_room_on_a_gpu(runtime: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    full = Gpu(uuid="GPU-0", name="", minor=0, total_bytes=8, free_bytes=1)

    def read_node(_patience: Patience) -> tuple[str, list[Gpu]]:
        looks.append(1)
        return "580", [full]

    def take_room(patience: Patience) -> None:
        with room.room(["GPU-0"], lambda _gpus: {"GPU-0": 2}, tmp_path, patience):
            raise AssertionError("there is no room")

    monkeypatch.setattr(room, "read_node", read_node)
    with runtime.ends_when(lambda: len(looks) > 1):
        take_room(runtime.patience())
    with pytest.raises(CudaError, match="1 bytes free, 2 are needed"):
        take_room(Patience(timeout_s=0))


def test_locks_of_a_store(runtime: Waiting, tmp_path: Path) -> None:
    patience = runtime.patience()
    domain = Domain.open(tmp_path, "team", patience=patience, create=True)
    with Domain.open(tmp_path, "team").alone(), runtime.ends_when(waits_in_poll()), domain.shared():
        pass
    with Domain.open(tmp_path, "team").alone(), pytest.raises(StoreError, match="in use"):  # noqa: SIM117
        with Domain.open(tmp_path, "team", patience=Patience(timeout_s=0)).shared():
            pass


def test_the_mark_of_a_checkpoint(runtime: Waiting, tmp_path: Path) -> None:
    """It is held alone only briefly; but a process that holds it may hang."""
    domain = Domain.open(tmp_path, "team", patience=runtime.patience(), create=True)
    with domain.marks.unless_used("c") as is_free, runtime.ends_when(waits_in_poll()):
        assert is_free
        domain.marks.begin_use("c")
    hurried = Domain.open(tmp_path, "team", patience=Patience(timeout_s=0)).marks
    with domain.marks.unless_used("c"), pytest.raises(StoreError, match="checkpoint c is in use"):
        hurried.begin_use("c")
    fd = hurried.begin_use("c")
    with domain.marks.unless_used("c") as is_free:
        assert not is_free
    os.close(fd)


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def frozen() -> Iterator[Waiting]:
    """A process in a freezer of cgroup v1, where a thread that is to be held stops only when it is thawed."""
    if os.geteuid() != 0 or not (FREEZER / "cgroup.procs").exists():
        pytest.skip("needs root and cgroup v1")
    directory = FREEZER / f"ocihook-patience-{os.getpid()}"
    directory.mkdir()
    waiting = Waiting()
    (directory / "cgroup.procs").write_text(str(waiting.popen.pid))
    (directory / "freezer.state").write_text("FROZEN")
    assert Patience(timeout_s=60).until(lambda: (directory / "freezer.state").read_text() == "FROZEN\n")
    yield waiting
    (directory / "freezer.state").write_text("THAWED")
    waiting.end()
    wait_until(lambda: is_removed(directory))


def test_a_frozen_thread_that_does_not_stop(runtime: Waiting, frozen: Waiting) -> None:
    patience = runtime.patience()

    def hold(tid: int) -> None:
        HeldThread(tid, patience)

    def is_traced() -> bool:
        return "TracerPid:\t0" not in Path(f"/proc/{frozen.popen.pid}/status").read_text()

    with runtime.ends_when(is_traced):
        (outcome,) = call_each(hold, [frozen.popen.pid], Patience(timeout_s=60))
        if isinstance(outcome, Exception):
            raise outcome
    assert not is_traced()  # its tracer has ended


def test_threads_that_stop_are_held_as_before(runtime: Waiting) -> None:
    with held(runtime.popen.pid, Patience(timeout_s=60)) as threads:
        assert [thread.tid for thread in threads] == [runtime.popen.pid]
        assert Path(f"/proc/{runtime.popen.pid}/stat").read_text().rpartition(")")[2].split()[0] == "t"


def test_a_lock_of_files_is_tried(tmp_path: Path) -> None:
    fds = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    assert try_lock(fds[0], fcntl.LOCK_EX)
    assert not try_lock(fds[1], fcntl.LOCK_SH)
    os.close(fds[0])
    assert try_lock(fds[1], fcntl.LOCK_SH)
    os.close(fds[1])
