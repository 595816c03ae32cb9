"""Locking the CUDA processes of a container, what their checkpoints hold, room on GPUs, and the driver's errors."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.errors import CudaError, CudaLockTimeout, CudaUnsupported
from ocihook.gpu import driver as driver_module
from ocihook.gpu import library, room
from ocihook.gpu.driver import CudaDriver, CudaState, GpuMap
from ocihook.gpu.dump import Taken, needed
from ocihook.gpu.nvml import Gpu
from ocihook.gpu.processes import check_contents, lock_all
from ocihook.linux.memory import Span
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.memory.regions import CheckpointedProcess

MIB = 1 << 20


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


def check(found_bytes: int, held_bytes: int) -> None:
    """Check a checkpoint in which the driver was seen to allocate so much."""
    span = Span(1 << 32, (1 << 32) + found_bytes)
    process = Process(7, 1)
    check_contents([CheckpointedProcess(process, 7, (span,) if found_bytes else ())], {7: held_bytes})


@given(st.lists(st.integers(MIB + 1, 64 * MIB), min_size=1), st.integers(0, 512))
def test_pieces_of_any_size_are_no_missing_memory(pieces: list[int], context_mib: int) -> None:
    """NVML counts whole pages of 2 MiB for each."""
    held = context_mib * MIB + sum(-(-piece // (2 * MIB)) * 2 * MIB for piece in pieces)
    check(context_mib * MIB + sum(pieces), held)


@given(st.integers(1, 1 << 40))
def test_memory_that_is_missing(held: int) -> None:
    for found in {0, (held - 1) // 2}:
        with pytest.raises(CudaError, match=f"has {found} bytes of the {held} that it held on the GPU"):
            check(found, held)


def gpu(*, free_bytes: int, held_bytes: dict[int, int] | None = None) -> Gpu:
    return Gpu(uuid="GPU-0", name="", minor=0, total_bytes=80, free_bytes=free_bytes, held_bytes=held_bytes or {})


def test_what_is_needed_is_what_processes_do_not_hold() -> None:
    mine = Process.find(os.getpid())
    assert mine is not None
    ended = Process(mine.pid, mine.start_ticks + 1)
    processes = [Taken(mine, "1", 0, {"GPU-0": 30}), Taken(ended, "2", 0, {"GPU-0": 40})]
    assert needed(processes, [gpu(free_bytes=0)]) == {"GPU-0": 30}
    assert needed(processes, [gpu(free_bytes=0, held_bytes={mine.pid: 30})]) == {"GPU-0": 0}
    assert needed(processes[1:], [gpu(free_bytes=0)]) == {}


def test_room_that_is_missing_names_its_users() -> None:
    assert room.missing_room({"GPU-0": 30}, [gpu(free_bytes=30)]) is None
    missing = room.missing_room({"GPU-0": 31}, [gpu(free_bytes=30, held_bytes={9: 50})])
    assert missing is not None
    assert re.search("has 30 bytes free, 31 are needed. End what uses it: processes 9", str(missing))


def test_two_containers_do_not_count_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "read_node", lambda _patience: ("580", [gpu(free_bytes=50)]))

    def take(*uuids: str) -> None:
        with room.room(uuids, lambda _gpus: {"GPU-0": 50}, tmp_path, Patience(timeout_s=0)):
            pass

    with room.room(["GPU-0"], lambda _gpus: {"GPU-0": 50}, tmp_path, Patience()):
        take("GPU-1")
        with pytest.raises(CudaError, match="GPU-0 is given to another container"):
            take("GPU-1", "GPU-0")
    take("GPU-1", "GPU-0")


def test_bindings_that_cannot_restore_are_refused_when_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-bindings 13.3.0 is such a one: a dump is refused, and not the restore after it."""
    incomplete = SimpleNamespace(**dict.fromkeys(set(driver_module._NEEDED) - {"CUcheckpointRestoreArgs"}))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=incomplete))
    monkeypatch.setattr(driver_module, "has_driver", lambda: True)
    with pytest.raises(CudaUnsupported, match=r"have no CUcheckpointRestoreArgs.*!=13\.3\.0"):
        CudaDriver()
    monkeypatch.setattr(library, "KERNEL_DRIVER", (Path("/"),))
    driver_module.load_bindings()  # an agent serves containers without a GPU all the same
