"""The GPU part of a restore: check before it, fill memory while all tasks wait, resume when they run."""

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ocihook.container.runtime_call import DeviceNode, find_runtime_call, read_nvidia_devices
from ocihook.errors import CudaError, IdentificationError, OcihookError, plain
from ocihook.gpu.driver import CudaDriver, CudaState
from ocihook.gpu.dump import GpuFacts, Taken, needed
from ocihook.gpu.mapping import check_gpus, choose_gpu_map
from ocihook.gpu.preflight import heed, restore_refusals
from ocihook.gpu.processes import find_gpu_processes, populate, read_node, resume_all, states
from ocihook.gpu.room import ROOM_TIMEOUT_S, room
from ocihook.linux.cgroup import memory_headroom_bytes, wait_until_let_go, wait_until_thawed
from ocihook.linux.files import make_device
from ocihook.linux.memory import available_bytes
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, descendants, pid_below, thread_ids
from ocihook.memory.half_restored import kill
from ocihook.memory.standstill import standing_still
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Checkpoint, Restore

_GPU = re.compile(r"nvidia[0-9]+")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TargetFacts(Facts):
    """Which GPUs a restored container gets."""

    gpu_map: list[tuple[str, str]] = field(default_factory=list)  # UUIDs: that it had, that it gets; []: the same
    need: dict[str, int] = field(default_factory=dict)  # bytes that each must have free, by UUID
    devices: list[DeviceNode] = field(default_factory=list)  # that its configuration gives it


@dataclass(kw_only=True)
class GpuRestored(Effect, kind="gpu-restored"):
    """Restored processes wait for their GPU."""

    processes: list[Taken]
    init: Process | None

    def undo(self, journal: Journal, patience: Patience) -> None:
        """Give them their GPU: what was begun is finished, as nothing else lets the container go on.

        Raises:
            FreezeError: if a process stands still; it can be tried again.
        """
        try:
            self.resume(journal, patience)
        except CudaError as error:
            given_up = self.give_up(error, journal)
            journal.note_error(given_up, "failed")
            log.error("%s", given_up)

    def resume(self, journal: Journal, patience: Patience) -> None:
        """Give every process that is checkpointed its GPU back; those that run already are left alone.

        Raises:
            CudaError: if one does not get it.
        """
        for taken in self.processes:
            wait_until_let_go(taken.process, patience)
        threads = {taken.process: taken.thread for taken in self.processes if taken.thread and taken.process.is_alive()}
        with standing_still(journal, threads, patience):
            for taken in self.processes:
                wait_until_thawed(taken.process, patience)
            driver, targets = CudaDriver(), journal.facts(TargetFacts)
            found = states(driver, [taken.process for taken in self.processes if taken.process.is_alive()], ENDLESS)
            waiting = [process for process, state in found.items() if state not in {None, CudaState.RUNNING}]
            if not waiting:
                return
            with journal.phase("gpu resume") as phase, journal.spans(phase) as spans:
                is_away = CudaState.CHECKPOINTED in found.values()
                if is_away:
                    populate(waiting, journal.facts(CallFacts).workers, spans)
                with self._room(journal, targets) if is_away else contextlib.nullcontext():
                    resume_all(driver, waiting, targets.gpu_map, spans)

    def _room(self, journal: Journal, targets: TargetFacts) -> AbstractContextManager[None]:
        uuids = {uuid for taken in self.processes for uuid in taken.held} or set(targets.need)
        within = ENDLESS.within(ROOM_TIMEOUT_S)
        # Checkpoints of earlier versions do not know what each process held.
        return room(uuids, lambda gpus: needed(self.processes, gpus) or targets.need, journal.runtime_dir, within)

    def give_up(self, error: CudaError, journal: Journal) -> CudaError:
        """Do with the container what its policy says, and return the error that reports it."""
        if journal.facts(CallFacts).policy.on_gpu_restore_error == "keep":
            return CudaError(
                f"{error}. Its processes wait for their GPU state (on_gpu_restore_error = 'keep'): remove the container"
            )
        kill([*([self.init] if self.init else []), *(taken.process for taken in self.processes)])
        return CudaError(f"{error}. Its processes were killed: without their GPU state they cannot go on")


def check_gpu_node(restore: Restore, checkpoint: Checkpoint) -> None:
    """Check that this node has what the container's GPU part needs, and record which GPUs it gets.

    Raises:
        OcihookError: to refuse the restore; nothing was started.
    """
    gpu = checkpoint.gpu
    if not gpu:
        return
    with restore.journal.phase("gpu check"):
        CudaDriver()
        version, gpus = read_node(restore.patience)
    devices: list[DeviceNode] = []
    with contextlib.suppress(IdentificationError, OSError):
        call = find_runtime_call(restore.criu_pid)
        if call is not None and call.bundle:
            devices = read_nvidia_devices(restore.criu_pid, call.bundle)
    minors = {device.minor for device in devices if _GPU.fullmatch(device.name)}
    gpu_map = choose_gpu_map(gpu, gpus, given_minors=minors, wanted=restore.policy.gpu_map)
    need = check_gpus(gpu, gpus, version, gpu_map)
    targets = TargetFacts(gpu_map=[(old, new) for old, new in gpu_map], need=need, devices=devices)
    restore.journal.note(GpuFacts(gpu=dict(gpu)), targets)


def check_memory(restore: Restore, need_bytes: int) -> None:
    """Refuse a restore that there is too little memory for, as far as that is known: else the kernel kills something.

    Under runc CRIU is in the container's cgroup by now; under crun only the node's memory is known.

    Raises:
        PreflightError: to refuse it; nothing was started.
    """
    reasons = restore_refusals(need_bytes, available_bytes(), memory_headroom_bytes(restore.criu_pid))
    heed(reasons if need_bytes else [], restore.policy.preflight)


def fill_memory(restore: Restore, checkpoint: Checkpoint) -> int:
    """Write memory that went past CRIU into the new processes, which wait in CRIU's restorer; return the bytes.

    Raises:
        OcihookError: to let the restore fail; CRIU then kills them.
    """
    init_pid, journal = restore.init_pid, restore.journal
    processes = {pid_below(init_pid, pid): p for pid in descendants(init_pid) if (p := Process.find(pid))}
    missing = set(checkpoint.region_processes) - set(processes)
    if missing:
        raise OcihookError(
            f"CRIU has restored no process {', '.join(sorted(missing))}, whose GPU memory is in the checkpoint"
        )
    workers = restore.call().workers
    with journal.phase("gpu write back") as phase, journal.spans(phase) as spans:
        try:
            size = checkpoint.write_regions(
                processes, workers=workers, patience=restore.patience, progress=restore.progress, spans=spans
            )
        except OSError as error:
            raise OcihookError(f"GPU memory cannot be written into the restored processes: {plain(error)}") from error
        phase["bytes"] = size
    return size


def resume_gpus(restore: Restore) -> None:
    """Give every checkpointed process of a restored container its GPU back.

    Raises:
        OcihookError: if one does not get it; what became of the container is in the error.
    """
    init_pid, journal = restore.init_pid, restore.journal
    signs = find_gpu_processes(init_pid)
    if not signs:
        return
    processes = [process for s in signs if s.has_driver and (process := Process.find(s.pid))]
    _make_devices(restore)
    gpu = journal.facts(GpuFacts).gpu
    taken = [_taken(restore, gpu or {}, process) for process in processes]
    journal.note(GpuFacts(gpu=gpu, pids={one.name: one.process.pid for one in taken}))
    effect = journal.add(GpuRestored(processes=taken, init=restore.init))
    try:
        effect.resume(journal, ENDLESS)
    except CudaError as error:
        raise effect.give_up(error, journal) from error
    finally:
        journal.forget(effect)


def _taken(restore: Restore, gpu: Mapping[str, Any], process: Process) -> Taken:
    """Return a restored process; the checkpoint knows it, and the driver's thread, by their pids in the container."""
    name = pid_below(restore.init_pid, process.pid)
    inner = gpu.get("threads", {}).get(name)
    thread = next((tid for tid in thread_ids(process.pid) if pid_below(restore.init_pid, tid) == inner), 0)
    targets = dict(restore.journal.facts(TargetFacts).gpu_map)
    held = {targets.get(uuid, uuid): int(size) for uuid, size in gpu.get("held", {}).get(name, {}).items()}
    return Taken(process, name, thread, held)


def _make_devices(restore: Restore) -> None:
    """Put the device files that the container is given into its /dev, where CRIU has put those that it had."""
    for name, major, minor in restore.journal.facts(TargetFacts).devices:
        try:
            if make_device(restore.init_pid, name, os.makedev(major, minor)):
                log.info("container %s: made /dev/%s", restore.journal.container, name)
        except OSError as error:  # a container that never had a /dev of its own has the node's
            log.warning("container %s: /dev/%s cannot be made: %s", restore.journal.container, name, error)
