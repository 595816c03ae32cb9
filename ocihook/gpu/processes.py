"""The CUDA processes of a container: found, locked, checkpointed and resumed, all of them at once.

Every call to the driver is made in a process of its own with a time limit: it does not return while the process that
it is about stands still. A call that only asks ends with its caller; one that changes a process is not interrupted,
and its caller checks afterwards whether anybody still waits.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from ocihook.errors import CudaError, CudaLockTimeout, OcihookError, TraceError, plain
from ocihook.gpu.driver import CudaDriver, CudaState, GpuMap
from ocihook.gpu.nvml import Gpu, read_gpus
from ocihook.gpu.process import CudaProcess
from ocihook.gpu.signs import Signs, count_device_files, read_signs
from ocihook.linux.memory import Span, anonymous_spans, map_present, prefault, shared_spans, subtract
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants, thread_ids
from ocihook.linux.ptrace import HeldThread, find_call_instruction
from ocihook.linux.workers import call_each, start_call
from ocihook.memory.regions import COPY_TIMEOUT_S, CheckpointedProcess
from ocihook.session.timing import Spans, measured

CALL_TIMEOUT_S = 20.0  # for what takes milliseconds
_FIRST_LOCK_S = 0.5
_LONGEST_LOCK_S = 5.0
_GANG_PAUSE_S = 0.05
# Smaller mappings are left to CRIU. The driver's own is larger than any context, which takes 300 MiB and more.
_MIN_REGION_BYTES = 1 << 20
_MADV_HUGEPAGE = 14
_LARGE_BYTES = 32 << 20
# NVML counts whole pages of 2 MiB, of which a piece fills half or more (integration/gpu/results/odd-sizes-580.json).
_LARGEST_NVML_EXCESS = 2

log = logging.getLogger(__name__)


def find_gpu_processes(init_pid: int) -> list[Signs]:
    """Return the signs of those processes of a container that use NVIDIA's driver; the others are not touched."""
    found = (read_signs(pid) for pid in descendants(init_pid))
    return [signs for signs in found if signs.has_driver or signs.device_files]


def read_node(patience: Patience) -> tuple[str, list[Gpu]]:
    """Return the driver's version and the node's GPUs.

    Raises:
        CudaUnsupported: if NVML does not answer.
        GivenUp: if its caller has given up.
    """
    (outcome,) = call_each(lambda _: read_gpus(), [None], patience.within(CALL_TIMEOUT_S))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def states(driver: CudaDriver, processes: Sequence[Process], patience: Patience) -> dict[Process, CudaState | None]:
    """Return the driver's state of each process; None for one without CUDA, or that has ended.

    Raises:
        CudaError: if the driver does not answer.
        GivenUp: if its caller has given up.
    """
    outcomes = call_each(lambda process: driver.state(process.pid), processes, patience.within(CALL_TIMEOUT_S))
    found: dict[Process, CudaState | None] = {}
    for process, outcome in zip(processes, outcomes, strict=True):
        if not isinstance(outcome, Exception):
            found[process] = outcome
        elif process.is_alive():
            raise _as_cuda_error(outcome, process, "state")
        else:
            found[process] = None
    return found


class Agree(Protocol):
    """Reports whether all members of a gang are locked, in an attempt that all of them make."""

    def __call__(self, attempt: int, *, is_locked: bool) -> bool:
        """Ask, if this member is locked or not."""


def lock_all(
    driver: CudaDriver,
    processes: Sequence[Process],
    patience: Patience,
    timeout_s: float,
    spans: Spans | None = None,
    *,
    agree: Agree | None = None,
) -> None:
    """Lock every process, or none.

    Ranks of a job wait for one another inside CUDA: one that is locked can keep another from coming to its lock. So
    the attempts are short, and when one fails all are unlocked for a moment. One process alone waits for nobody: it is
    given all time at once, since a lock that is tried again queues behind the work that came meanwhile.

    Members of a gang wait for one another, too: with `agree` all try at the same moments, with equal pauses.

    Raises:
        CudaLockTimeout: if their CUDA calls do not end in time.
        CudaError: on anything else. All are unlocked again.
        GivenUp: if its caller has given up; what is locked by then is left so.
    """
    patience = patience.within(timeout_s)
    attempt_s = timeout_s if len(processes) == 1 and agree is None else min(_FIRST_LOCK_S, timeout_s)

    def lock(process: Process) -> None:
        with measured(spans, "lock", process):
            driver.lock(process.pid, attempt_s)

    for attempt in count(1):
        failures = _on_each(lock, processes, attempt_s + CALL_TIMEOUT_S, "lock")
        patience.check()
        worst = next((f for f in failures.values() if not isinstance(f, CudaLockTimeout)), None)
        if not worst and (agree(attempt, is_locked=not failures) if agree else not failures):
            return
        resume_all(driver, processes)
        if worst or patience.is_over:
            others = CudaLockTimeout("the CUDA calls of other members of the gang did not end in time")
            raise worst or next(iter(failures.values()), others)
        # Ranks of one container meet each other elsewhere after any pause; members of a gang all after the same one.
        patience.sleep(_GANG_PAUSE_S if agree else random.uniform(0.01, 0.1))  # noqa: S311
        attempt_s = max(0.1, min(attempt_s * 1.5, _LONGEST_LOCK_S, patience.left_s))


def driver_threads(driver: CudaDriver, processes: Sequence[Process], patience: Patience) -> dict[Process, int]:
    """Return the thread of each process that does the driver's work, and must run for it.

    Raises:
        CudaError: if the driver does not answer.
        GivenUp: if its caller has given up.
        TraceError: if it names one that is not the process's: the driver's call would not return.
    """
    patience = patience.within(CALL_TIMEOUT_S)
    outcomes = call_each(lambda process: driver.restore_thread_id(process.pid), processes, patience)
    threads = {}
    for process, outcome in zip(processes, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise _as_cuda_error(outcome, process, "restore thread")
        if outcome not in thread_ids(process.pid):
            raise TraceError(f"thread {outcome}, which the driver names, is not of process {process.pid}")
        threads[process] = outcome
    return threads


def checkpoint_all(
    driver: CudaDriver,
    threads: Mapping[Process, int],
    patience: Patience,
    spans: Spans | None = None,
    *,
    workers: int = 1,
) -> list[CheckpointedProcess]:
    """Checkpoint every locked process; return where the driver put what.

    Args:
        driver: to ask.
        threads: of the processes, the driver's. All others must be held: what is new in memory is the driver's then.
        patience: how long to wait until the driver can begin with a process; from then on it is not interrupted.
        spans: gets how long each took.
        workers: how many processes may work at once, for all of them together.

    Raises:
        CudaError: if one cannot be checkpointed, keeps device files, or ends. Others may be checkpointed by then.
        TraceError: if the driver's thread is traced by somebody else.
        GivenUp: if its caller has given up; others may be checkpointed by then.
    """

    def checkpoint(process: Process) -> list[Span]:
        with measured(spans, "checkpoint", process) as span:
            found = _checkpoint(driver, process, threads[process], max(1, workers // len(threads)), patience, spans)
            span["bytes"] = sum(part.size_bytes for part in found)
        return found

    outcomes = call_each(checkpoint, list(threads), Patience(timeout_s=COPY_TIMEOUT_S))
    patience.check()
    checkpointed = []
    for (process, thread), outcome in zip(threads.items(), outcomes, strict=True):
        if not process.is_alive():
            raise CudaError(
                f"process {process.pid} ended while the driver copied GPU memory",
                hint="if the kernel killed it, out of memory: raise the container's memory limit, or free memory",
            )
        if isinstance(outcome, Exception):
            raise _as_cuda_error(outcome, process, "checkpoint")
        left = count_device_files(process.pid)
        if left:
            raise CudaError(
                f"process {process.pid} has {left} device files open after its checkpoint, which CRIU cannot dump",
                hint="close what uses the GPU outside CUDA (graphics, NVML of an older driver)",
            )
        checkpointed.append(CheckpointedProcess(process, thread, tuple(outcome)))
    return checkpointed


def _checkpoint(
    driver: CudaDriver, process: Process, thread: int, workers: int, patience: Patience, measurements: Spans | None
) -> list[Span]:
    before = anonymous_spans(process.pid)
    _checkpoint_prefaulted(driver, process, thread, workers, patience, measurements)
    spans = subtract(anonymous_spans(process.pid), before)
    return [span for span in spans if span.size_bytes >= _MIN_REGION_BYTES]


def _checkpoint_prefaulted(
    driver: CudaDriver, process: Process, able: int, workers: int, patience: Patience, measurements: Spans | None
) -> None:
    """Checkpoint, and have the driver's mapping filled before the driver writes into it, in huge pages if there are.

    Left alone, the driver has the kernel fill it as it makes it, on its one thread.
    """
    instruction = find_call_instruction(process.pid)
    try:
        thread = HeldThread(able, patience)
    except OSError as error:
        raise TraceError(f"thread {able} of process {process.pid} cannot be held: {plain(error)}") from error

    def fill(address: int, size_bytes: int) -> None:
        if _has_huge_pages():
            try:
                thread.make_call("madvise", instruction, address, size_bytes, _MADV_HUGEPAGE)
            except OSError as error:  # it is only slower then
                log.warning("process %d: no huge pages: %s", process.pid, error)
        with measured(measurements, "prefault", process) as measurement:
            measurement["bytes"] = size_bytes
            prefault(process, Span(address, address + size_bytes), workers=workers)

    with start_call(driver.checkpoint, process.pid) as call:
        try:
            thread.watch_mappings(call.pid, _LARGE_BYTES, fill)
        finally:
            thread.stop()
            thread.release()
        outcome = call.outcome(ENDLESS)  # it has ended
    if isinstance(outcome, Exception):
        raise outcome


def populate(processes: Sequence[Process], workers: int, spans: Spans | None = None) -> None:
    """Put the shared memory of restored processes into their page tables, which are empty, on all cores.

    The driver has pinned memory as shared memory, and faults in each page of it on its one thread.
    """
    for process in processes:
        with contextlib.suppress(OSError), measured(spans, "populate", process) as span:
            found = [part for part in shared_spans(process.pid) if part.size_bytes >= _LARGE_BYTES]
            span["bytes"] = sum(part.size_bytes for part in found)
            for part in found:
                map_present(process, part, workers=workers)


def _has_huge_pages() -> bool:
    """Return whether the node has huge pages for those who ask."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def check_contents(checkpointed: Sequence[CheckpointedProcess], held_bytes: Mapping[int, int]) -> None:
    """Check that the GPU memory of each process is in its checkpoint.

    Args:
        checkpointed: what the driver was seen to allocate.
        held_bytes: GPU memory by pid, as NVML counted it before.

    Raises:
        CudaError: if there is less than half; such a checkpoint would be restored without GPU memory.
    """
    for process, _, spans in checkpointed:
        found = sum(span.size_bytes for span in spans)
        if found * _LARGEST_NVML_EXCESS < held_bytes.get(process.pid, 0):
            raise CudaError(
                f"the checkpoint of process {process.pid} has {found} bytes of the {held_bytes[process.pid]} that it "
                "held on the GPU"
            )


def held_by(gpus: Sequence[Gpu], pids: Sequence[int]) -> dict[int, int]:
    """Return how many bytes each process holds on all GPUs together."""
    return {pid: sum(gpu.held_bytes.get(pid, 0) for gpu in gpus) for pid in pids}


def resume_all(
    driver: CudaDriver, processes: Sequence[Process], gpu_map: GpuMap = (), spans: Spans | None = None
) -> None:
    """Bring every process back to running, from whatever state it is in.

    Raises:
        CudaError: if one does not come back; all others have.
    """

    def set_running(process: Process) -> None:
        CudaProcess(driver, process.pid).set_running(gpu_map, lambda verb: measured(spans, verb, process))

    failures = _on_each(set_running, processes, COPY_TIMEOUT_S, "restore")
    if failures:
        raise next(iter(failures.values()))


def _on_each(
    function: Callable[[Process], Any], processes: Sequence[Process], timeout_s: float, verb: str
) -> dict[Process, OcihookError]:
    """Call `function` with every process at once, and do not interrupt it; return the errors.

    A process that has ended is not an error.
    """
    outcomes = call_each(function, processes, Patience(timeout_s=timeout_s))
    return {
        process: _as_cuda_error(outcome, process, verb)
        for process, outcome in zip(processes, outcomes, strict=True)
        if isinstance(outcome, Exception) and process.is_alive()
    }


def _as_cuda_error(error: Exception, process: Process, verb: str) -> OcihookError:
    if isinstance(error, OcihookError):
        return error
    hint = "is the container frozen, or its process stopped by a debugger?" if isinstance(error, TimeoutError) else ""
    return CudaError(f"CUDA {verb} of process {process.pid}: {error}", hint=hint)
