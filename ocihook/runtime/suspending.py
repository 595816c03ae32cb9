"""Takes the GPU from a restored container before it is stopped, where the driver takes the node down otherwise.

With the open driver 595.71.05 a host stopped some 35 s after a restored CUDA process had been killed, four times of
four; one that was checkpointed first could be killed (github.com/NVIDIA/cuda-checkpoint/issues/53).
"""

import logging
from collections.abc import Sequence

from ocihook.config import Settings
from ocihook.errors import OcihookError, plain
from ocihook.gpu.driver import CudaDriver, CudaState
from ocihook.gpu.preflight import restore_refusals
from ocihook.gpu.processes import find_gpu_processes, held_by, read_node, states
from ocihook.linux.cgroup import find_freezer, memory_headroom_bytes
from ocihook.linux.memory import available_bytes
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.workers import call_each
from ocihook.runtime.containers import Kept

_LIMIT_S = 30.0  # for all of it: an engine waits for its `kill`

log = logging.getLogger(__name__)


def suspend_gpus(kept: Kept, settings: Settings) -> str:
    """Checkpoint the CUDA processes of a restored container that is about to be stopped; nothing runs on after that.

    Returns:
        Why it is stopped with its GPU all the same; "" if it is not, or need not be.
    """
    init = kept.init
    if not settings.suspend_before_kill or init is None or not init.is_alive():
        return ""
    processes = [process for signs in find_gpu_processes(init.pid) if (process := Process.find(signs.pid))]
    if not processes:
        return ""
    try:
        return _suspend(init, processes, settings)
    except OcihookError as error:
        return plain(error)


def is_on_list(version: str, listed: str) -> bool:
    """Return whether a driver is on a list: 595.71.05 is on `595` and on `580.1,595.71`."""
    return any(f"{version}.".startswith(f"{one}.") for one in listed.split(",") if one)


def _suspend(init: Process, processes: Sequence[Process], settings: Settings) -> str:
    patience = Patience(timeout_s=_LIMIT_S)
    freezer = find_freezer(init.pid)
    version, gpus = read_node(patience)
    if not is_on_list(version, settings.suspend_before_kill):
        return ""
    if freezer is not None and freezer.is_frozen():
        return f"it is frozen, and driver {version} is not safe"  # the driver's calls would not return
    need = sum(held_by(gpus, [process.pid for process in processes]).values())
    if reasons := restore_refusals(need, available_bytes(), memory_headroom_bytes(init.pid)):
        return reasons[0]
    driver = CudaDriver()
    known = states(driver, processes, patience)

    def suspend(process: Process) -> None:
        if known[process] is CudaState.RUNNING:
            driver.lock(process.pid, patience.left_s)
        driver.checkpoint(process.pid)

    left = [process for process, state in known.items() if state in {CudaState.RUNNING, CudaState.LOCKED}]
    outcomes = call_each(suspend, left, patience)
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    log.info("GPUs of processes %s were suspended, %d of %d failed", left, len(failed), len(left))
    return plain(failed[0]) if failed else ""
