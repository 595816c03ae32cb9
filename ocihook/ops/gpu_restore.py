"""The GPU part of a restore: check before it, fill memory while all tasks wait, resume when they run."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ocihook.cuda.driver import CudaDriver, CudaState
from ocihook.errors import CudaError, IdentificationError, OcihookError
from ocihook.linux.cgroup import wait_until_let_go, wait_until_thawed
from ocihook.linux.files import make_device
from ocihook.linux.procfs import Process, descendants, pid_below, thread_ids
from ocihook.oci.runtime import DeviceNode, find_runtime_call, read_nvidia_devices
from ocihook.ops.gpu import end, find_gpu_processes, read_node, resume_all, states, wait_for_room
from ocihook.ops.gpu_map import check_gpus, choose_gpu_map
from ocihook.ops.journal import Journal
from ocihook.ops.standstill import standing_still

EFFECT = "gpu-restored"
HALF_RESTORED = "half-restored"
_GPU = re.compile(r"nvidia[0-9]+")

log = logging.getLogger(__name__)


def check_node(journal: Journal, gpu: Mapping[str, Any], criu_pid: int) -> None:
    """Check that this node has what the container's GPU part needs, and record which GPUs it gets.

    Args:
        journal: gets the map and what each GPU must have free.
        gpu: what a manifest says of the GPUs; nothing to do if that is nothing.
        criu_pid: names the runtime, and so the devices that the new container is given.

    Raises:
        OcihookError: to refuse the restore; nothing was started.
    """
    if not gpu:
        return
    CudaDriver()
    version, gpus = read_node()
    devices: list[DeviceNode] = []
    with contextlib.suppress(IdentificationError, OSError):
        call = find_runtime_call(criu_pid)
        if call is not None and call.bundle:
            devices = read_nvidia_devices(criu_pid, call.bundle)
    minors = {device.minor for device in devices if _GPU.fullmatch(device.name)}
    policy: Mapping[str, Any] = journal.facts.get("policy", {})
    gpu_map = choose_gpu_map(gpu, gpus, given_minors=minors, wanted=str(policy.get("gpu_map", "")))
    need = check_gpus(gpu, gpus, version, gpu_map)
    given = [list(device) for device in devices]
    journal.note(gpu=dict(gpu), gpu_map=[list(pair) for pair in gpu_map], need=need, devices=given)


def note_half_restored(journal: Journal, init_pid: int) -> None:
    """Record what CRIU has made so far, before it makes more: the container's init, and helpers of its own.

    If CRIU is killed they stay, and so does what init makes of itself: waiting for CRIU for ever, or, once CRIU has let
    go, running without a GPU. No engine knows of them.
    """
    pids = [init_pid, *(pid for pid in descendants(journal.criu.pid) if _is_criu(pid, journal.criu.pid))]
    processes = [process for pid in pids if (process := Process.find(pid)) and process != journal.criu]
    journal.push(HALF_RESTORED, processes=[list(process) for process in processes])


def _is_criu(pid: int, criu_pid: int) -> bool:
    """Tell whether a process has CRIU's executable, as no action script has."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").samefile(f"/proc/{criu_pid}/exe")
    return False


def end_half_restored(effect: Mapping[str, Any], journal: Journal, _timeout_s: float | None) -> None:
    """Kill what CRIU has left of a restore. May run twice; CRIU ends its processes itself while it lives."""
    if journal.criu.is_alive():
        return
    pids = [pid for pid, ticks in effect["processes"] if Process(pid, ticks).is_alive()]
    left = [process for root in pids for pid in descendants(root) if (process := Process.find(pid))]
    end(left)
    if left:
        log.error(
            "container %s: CRIU did not come to the end of its restore, the %d processes that it left were killed; "
            "the checkpoint is as it was: restore it again",
            journal.container,
            len(left),
        )


def fill_memory(journal: Journal, init_pid: int, names: Iterable[str], write: Callable[..., int]) -> int:
    """Write regions into the new processes, which wait in CRIU's restorer; return the bytes.

    Args:
        journal: gets the phase.
        init_pid: of the container.
        names: of the processes that regions belong to, as their manifest has them.
        write: writes all regions into processes, by these names; `spans` gets how long that took.

    Raises:
        OcihookError: to let the restore fail; CRIU then kills them.
    """
    processes = {pid_below(init_pid, pid): p for pid in descendants(init_pid) if (p := Process.find(pid))}
    missing = set(names) - set(processes)
    if missing:
        raise OcihookError(
            f"CRIU has restored no process {', '.join(sorted(missing))}, whose GPU memory is in the checkpoint"
        )
    with journal.phase("gpu write back") as phase, journal.spans(phase) as spans:
        try:
            phase["bytes"] = write(processes, spans=spans)
        except OSError as error:
            raise OcihookError(f"GPU memory cannot be written into the restored processes: {error}") from error
    return int(phase["bytes"])


def resume_gpus(journal: Journal, init_pid: int) -> None:
    """Give every checkpointed process of a restored container its GPU back; those that run already are left alone.

    Raises:
        OcihookError: if one does not get it; what became of the container is in the error.
    """
    signs = find_gpu_processes(init_pid)
    if not signs:
        return
    processes = [process for s in signs if s.has_driver and (process := Process.find(s.pid))]
    _make_devices(journal, init_pid)
    journal.note(pids={pid_below(init_pid, process.pid): process.pid for process in processes})
    journal.push(
        EFFECT,
        processes=[list(process) for process in processes],
        init=list(Process.find(init_pid) or ()),
        threads=[_driver_thread(journal, init_pid, process) for process in processes],
    )
    effect = journal.effect(EFFECT)
    assert effect is not None
    try:
        with standing_still(journal, _threads(effect), None):
            _resume(effect, journal)
    except CudaError as error:
        raise _given_up(error, effect, journal) from error
    finally:
        journal.pop(EFFECT)


def _driver_thread(journal: Journal, init_pid: int, process: Process) -> int:
    """Return the driver's thread, which the checkpoint knows by its number in the container; 0: unknown."""
    inner = journal.facts.get("gpu", {}).get("threads", {}).get(pid_below(init_pid, process.pid))
    return next((tid for tid in thread_ids(process.pid) if pid_below(init_pid, tid) == inner), 0)


def _threads(effect: Mapping[str, Any]) -> dict[Process, int]:
    known = zip(effect["processes"], effect.get("threads", ()), strict=False)  # of an agent that held none
    return {process: thread for ids, thread in known if thread and (process := Process(*ids)).is_alive()}


def _make_devices(journal: Journal, init_pid: int) -> None:
    """Put the device files that the container is given into its /dev, where CRIU has put those that it had."""
    for name, major, minor in journal.facts.get("devices", ()):
        try:
            if make_device(init_pid, name, os.makedev(major, minor)):
                log.info("container %s: made /dev/%s", journal.container, name)
        except OSError as error:  # a container that never had a /dev of its own has the node's
            log.warning("container %s: /dev/%s cannot be made: %s", journal.container, name, error)


def resume(effect: Mapping[str, Any], journal: Journal, timeout_s: float | None) -> None:
    """Do what `resume_gpus` was to do when it was interrupted. May run twice.

    Raises:
        FreezeError: if a process stands still; it can be tried again.
    """
    for ids in effect["processes"]:
        wait_until_let_go(Process(*ids), timeout_s)
    try:
        with standing_still(journal, _threads(effect), timeout_s):
            for ids in effect["processes"]:
                wait_until_thawed(Process(*ids), timeout_s)
            _resume(effect, journal)
    except CudaError as error:
        given_up = _given_up(error, effect, journal)
        journal.note_error(given_up, "failed")
        log.error("%s", given_up)


def _resume(effect: Mapping[str, Any], journal: Journal) -> None:
    processes = [process for ids in effect["processes"] if (process := Process(*ids)).is_alive()]
    driver = CudaDriver()
    known = states(driver, processes)
    waiting = [process for process, state in known.items() if state not in {None, CudaState.RUNNING}]
    if not waiting:
        return
    with journal.phase("gpu resume") as phase, journal.spans(phase) as spans:
        if CudaState.CHECKPOINTED in known.values():
            wait_for_room(journal.facts.get("need", {}))
        resume_all(driver, waiting, [(old, new) for old, new in journal.facts.get("gpu_map", ())], spans)


def _given_up(error: CudaError, effect: Mapping[str, Any], journal: Journal) -> CudaError:
    """Do with the container what its policy says, and return the error that tells."""
    if journal.facts.get("policy", {}).get("on_gpu_restore_error") == "keep":
        return CudaError(f"{error}. Its processes wait for their GPU state for ever, as the policy wants it")
    end([Process(*ids) for ids in (effect["init"], *effect["processes"]) if ids])
    return CudaError(f"{error}. Its processes were killed: without their GPU state they cannot go on")
