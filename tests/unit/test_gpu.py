"""Locking the CUDA processes of a container, and what an error of the driver's says to do."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ocihook.errors import CudaError, CudaLockTimeout
from ocihook.gpu.driver import CudaDriver, CudaState, GpuMap
from ocihook.gpu.processes import lock_all
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process


class Driver:
    """Writes down how long each lock may take; what is asked for more than once is granted the last time."""

    def __init__(self, log: Path, attempts: int) -> None:
        self.log = log
        self.attempts = attempts

    def lock(self, pid: int, timeout_s: float) -> None:
        with self.log.open("a") as log:
            log.write(f"{pid} {timeout_s}\n")
        if len(self.asked()) < self.attempts:
            raise CudaLockTimeout("busy", result="CUDA_ERROR_NOT_READY")

    def state(self, pid: int) -> CudaState:
        assert pid
        return CudaState.RUNNING

    def asked(self) -> list[float]:
        return [float(line.split()[1]) for line in self.log.read_text().splitlines()]


def lock(driver: Driver, pids: Sequence[int], timeout_s: float) -> list[float]:
    processes = [process for pid in pids if (process := Process.find(pid))]
    assert len(processes) == len(pids)
    lock_all(cast("CudaDriver", driver), processes, Patience(), timeout_s)
    return driver.asked()


def test_one_process_is_given_all_time_at_once(tmp_path: Path) -> None:
    assert lock(Driver(tmp_path / "log", 1), [os.getpid()], 30) == [30]


def test_one_that_does_not_come_to_rest_is_asked_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "log", 1000)
    with pytest.raises(CudaLockTimeout):
        lock(driver, [os.getpid()], 1e-9)
    assert driver.asked() == [1e-9]


def test_several_are_given_a_little_and_more_each_time(tmp_path: Path) -> None:
    """Ranks wait for one another: all are unlocked in between."""
    asked = lock(Driver(tmp_path / "log", 5), [os.getpid(), os.getppid()], 30)
    assert asked[:4] == [0.5, 0.5, 0.75, 0.75]


def test_members_of_a_gang_try_until_all_are_locked(tmp_path: Path) -> None:
    driver, votes = Driver(tmp_path / "log", 2), []

    def agree(attempt: int, *, is_locked: bool) -> bool:
        votes.append((attempt, is_locked))
        return attempt == 3

    processes = [process for pid in (os.getpid(),) if (process := Process.find(pid))]
    lock_all(cast("CudaDriver", driver), processes, Patience(), 30, agree=agree)
    assert votes == [(1, False), (2, True), (3, True)]  # the second time another member was not
    assert driver.asked() == [0.5, 0.75, 1.125]


def test_the_time_is_up_for_a_gang_that_does_not_lock(tmp_path: Path) -> None:
    processes = [process for pid in (os.getpid(),) if (process := Process.find(pid))]
    driver = cast("CudaDriver", Driver(tmp_path / "log", 1))
    with pytest.raises(CudaLockTimeout, match="other members of the gang"):
        lock_all(driver, processes, Patience(), 1e-9, agree=lambda _attempt, *, is_locked: not is_locked)


@pytest.mark.parametrize(
    ("verb", "result", "gpu_map", "hint"),
    [
        ("restore", "INVALID_VALUE", [("GPU-00", "GPU-01")], "the GPU map .* must name every GPU"),
        ("restore", "INVALID_VALUE", [], "had opened GPU memory of another one .CUDA IPC"),
        ("lock", "INVALID_VALUE", [], "^$"),
        ("checkpoint", "NOT_SUPPORTED", [], "managed memory, or a pool .*cudaMemPoolAttrReleaseThreshold"),
        ("checkpoint", "UNKNOWN", [], "has failed before, .*: start it again"),
        ("restore", "NOT_SUPPORTED", [], "NCCL over P2P"),
        ("restore", "UNKNOWN", [], "^$"),
    ],
)
def test_what_an_error_says_to_do(verb: str, result: str, gpu_map: GpuMap, hint: str) -> None:
    """A plain failure of CUDA IPC blames no GPU map that nobody gave."""
    code = SimpleNamespace(name=f"CUDA_ERROR_{result}")
    api = SimpleNamespace(
        CUcheckpointRestoreArgs=SimpleNamespace,
        CUcheckpointLockArgs=SimpleNamespace,
        **{f"cuCheckpointProcess{name}": lambda *_: (code,) for name in ("Lock", "Checkpoint", "Restore")},
    )
    driver = CudaDriver.__new__(CudaDriver)
    driver._api = api  # type: ignore[assignment]
    driver._pair = lambda old, new: (old, new)  # type: ignore[method-assign]
    calls = {
        "restore": lambda: driver.restore(7, gpu_map),
        "lock": lambda: driver.lock(7, 1),
        "checkpoint": lambda: driver.checkpoint(7),
    }
    with pytest.raises(CudaError) as caught:
        calls[verb]()
    assert re.search(hint, caught.value.hint)
