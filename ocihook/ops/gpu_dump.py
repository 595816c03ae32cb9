"""The GPU part of a dump: lock, checkpoint and move out before CRIU begins, give back and resume when it is done."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ocihook.config import Policy
from ocihook.cuda.driver import CudaDriver, CudaState
from ocihook.cuda.nvml import Gpu
from ocihook.errors import CudaError, IntegrityError, OcihookError
from ocihook.linux.cgroup import wait_until_let_go, wait_until_thawed
from ocihook.linux.files import identity, same_directory
from ocihook.linux.mounts import unpin_directory
from ocihook.linux.procfs import Process, pid_below
from ocihook.model import ContainerRef
from ocihook.ops import gpu_memory
from ocihook.ops.criu_files import CriuOptions, loaded_plugin, options_for
from ocihook.ops.deleted_files import file_refusals
from ocihook.ops.gpu import (
    CheckpointedProcess,
    check_contents,
    checkpoint_all,
    driver_threads,
    end,
    find_gpu_processes,
    held_by,
    lock_all,
    resume_all,
    states,
    wait_for_room,
)
from ocihook.ops.image_set import MovedRegions, discard_packs, discard_regions
from ocihook.ops.journal import Journal
from ocihook.ops.preflight import Situation, heed, memory_refusals, refusals
from ocihook.ops.spans import Spans
from ocihook.ops.staging import stage_in_memory
from ocihook.ops.standstill import Hold, standing_still
from ocihook.store.manifest import read_manifest
from ocihook.store.packing import Progress

EFFECT = "gpu-checkpointed"

log = logging.getLogger(__name__)


def checkpoint_gpus(
    journal: Journal,
    init_pid: int,
    image_dir: str,
    directory: Path,
    progress: Progress,
    hold: Hold,
    *,
    memory_room_bytes: int = 0,
) -> None:
    """Take the GPU away from every CUDA process of a container, whose tasks must be able to run.

    Afterwards each is checkpointed, and its GPU memory is in packs in `directory`, or in its own memory if the policy
    wants it to go through CRIU. The journal has an effect that brings all back.

    Args:
        journal: of the dump.
        init_pid: of the container's init.
        hold: gets all threads that must not run until all is back.
        image_dir: where packs go, as the journal is to name it.
        directory: the same; with `memory_room_bytes`, a place in the store.
        progress: told the bytes of packs done.
        memory_room_bytes: packs may stay in memory, if they take no more than this.

    Raises:
        OcihookError: to refuse the dump; every process runs on as if nothing had been.
    """
    signs = find_gpu_processes(init_pid)
    if not signs:
        return
    policy = Policy(**journal.facts["policy"])
    processes = [process for s in signs if (process := Process.find(s.pid))]
    driver = CudaDriver()
    with journal.phase("gpu preflight"):
        known = states(driver, processes)
        in_packs = policy.mode != "off" and policy.gpu_memory == "packs"
        packs_dir = directory if policy.mode != "off" else None
        situation = Situation.read(init_pid, signs, known, packs_dir=packs_dir, plugin=_plugin(journal))
        heed([*refusals(situation), *file_refusals(init_pid, _criu_options(journal))], policy.gpu_preflight)
    # What somebody else has locked or checkpointed is left to them: CRIU leaves it as it is, too.
    ours = [process for process, state in known.items() if state is CudaState.RUNNING]
    if not ours:
        return
    names = {process: pid_below(init_pid, process.pid) for process in ours}
    journal.push(
        EFFECT,
        processes=[[*process, names[process]] for process in ours],
        need={},
        directory=image_dir,
        identity=identity(directory),
        moved=False,
    )
    journal.note(pids={name: process.pid for process, name in names.items()})
    try:
        with journal.phase("gpu lock") as phase, journal.spans(phase) as spans:
            lock_all(driver, ours, policy.gpu_lock_timeout_s, spans)
        with journal.phase("gpu read again"):  # what they hold is what is restored from now on, and not before
            situation = situation.read_again()
            heed(memory_refusals(situation), policy.gpu_preflight)
            _note_held(journal, situation, names)
        held_bytes = held_by(situation.gpus, [process.pid for process in ours])
        threads = driver_threads(driver, ours)
        journal.amend(EFFECT, threads=[threads[process] for process in ours])
        inner = {names[process]: pid_below(init_pid, thread) for process, thread in threads.items()}
        journal.note(gpu={**journal.facts["gpu"], "threads": inner})
        with journal.phase("gpu checkpoint") as phase, journal.spans(phase) as spans:
            hold.add(threads)
            checkpointed = checkpoint_all(driver, threads, spans, workers=int(journal.facts.get("workers", 1)))
            check_contents(checkpointed, held_bytes)
            phase["bytes"] = sum(part.size_bytes for one in checkpointed for part in one.spans)
        if in_packs:
            _move_out(journal, checkpointed, names, directory, memory_room_bytes, progress)
    except BaseException:
        effect = journal.effect(EFFECT)
        assert effect is not None
        _bring_back(effect, journal, None)
        journal.pop(EFFECT)
        raise


def _note_held(journal: Journal, situation: Situation, names: Mapping[Process, str]) -> None:
    """Record the GPU memory that locked processes hold: what has to be free before they get it back."""
    journal.amend(EFFECT, need=need_by_gpu(situation.gpus, [process.pid for process in names]))
    held = {name: held_on(situation.gpus, process.pid) for process, name in names.items()}
    journal.note(gpu={**_gpu_facts(situation), "held": held})


def _plugin(journal: Journal) -> Path | None:
    """Return CRIU's own CUDA plugin, if CRIU is about to load it."""
    return loaded_plugin(journal.container.runtime if journal.container else "", journal.facts.get("criu_config", ""))


def _criu_options(journal: Journal) -> CriuOptions:
    """Return what CRIU is told for this dump."""
    runtime = journal.container.runtime if journal.container else ""
    return options_for(runtime, journal.facts.get("criu_config", ""), frozenset(journal.facts.get("criu_asked", ())))


def need_by_gpu(gpus: Sequence[Gpu], pids: list[int]) -> dict[str, int]:
    """Return by UUID how many bytes processes hold together."""
    need = {gpu.uuid: sum(gpu.held_bytes.get(pid, 0) for pid in pids) for gpu in gpus}
    return {uuid: size for uuid, size in need.items() if size}


def held_on(gpus: Sequence[Gpu], pid: int) -> dict[str, int]:
    """Return by UUID how many bytes a process holds."""
    return {gpu.uuid: size for gpu in gpus if (size := gpu.held_bytes.get(pid, 0))}


def _gpu_facts(situation: Situation) -> dict[str, Any]:
    """Return what a restore has to know: the driver, and the GPUs that any process has open."""
    minors = {minor for signs in situation.processes for minor in signs.gpu_minors}
    pids = sorted(situation.cuda_pids)
    devices = [
        {**gpu.to_json(), "held_bytes": sum(gpu.held_bytes.get(pid, 0) for pid in pids)}
        for gpu in situation.gpus
        if gpu.minor in minors
    ]
    return {"driver": situation.driver_version, "devices": devices, "processes": len(pids)}


def _move_out(
    journal: Journal,
    checkpointed: list[CheckpointedProcess],
    names: Mapping[Process, str],
    directory: Path,
    memory_room_bytes: int,
    progress: Progress,
) -> None:
    discard_packs(directory)  # whatever lies there is of an earlier dump into the same directory
    discard_regions(directory)
    size = sum(part.size_bytes for one in checkpointed for part in one.spans)
    if memory_room_bytes and stage_in_memory(directory, size, memory_room_bytes):
        journal.amend(EFFECT, identity=identity(directory))
        journal.note(staged_in_memory=True)
    with journal.phase("gpu move out") as phase, journal.spans(phase) as spans:
        moved = gpu_memory.move_out(
            checkpointed,
            names,
            directory,
            container=journal.container or ContainerRef(id=""),
            gpu=journal.facts["gpu"],
            workers=int(journal.facts.get("workers", 1)),
            durable=not journal.facts.get("leave_running"),
            progress=progress,
            spans=spans,
        )
        phase["bytes"] = moved.raw_bytes
        try:
            gpu_memory.pin(moved, directory, journal.pins)
        except OSError as error:
            log.warning("GPU memory goes through CRIU, which is slower: %s", error)
            unpin_directory(journal.pins)
            discard_regions(directory)
            return
    with journal.phase("gpu release") as phase, journal.spans(phase) as spans:
        journal.amend(EFFECT, moved=True)
        gpu_memory.release(checkpointed, spans)


def moved_regions(journal: Journal) -> MovedRegions | None:
    """Return what a dump has moved past CRIU, for the manifest of its image set; None if it has no GPU at all.

    Raises:
        OcihookError: if the record of it is gone; the image set is incomplete then.
    """
    gpu = journal.facts.get("gpu")
    if gpu is None:
        return None
    effect = journal.effect(EFFECT)
    if effect is None or not effect["moved"]:
        return MovedRegions((), (), gpu)
    moved = read_manifest(journal.pins)
    if moved is None:
        raise IntegrityError(f"{journal.pins}, which tells what GPU memory was moved, is gone")
    # One that has ended since is in CRIU's images at most as a zombie, which could not be given its memory.
    alive = {name for pid, ticks, name in effect["processes"] if Process(pid, ticks).is_alive()}
    regions = tuple(region for region in moved.regions if region.process in alive)
    return MovedRegions(regions, moved.packs if regions else (), gpu)


def resume(effect: Mapping[str, Any], journal: Journal, timeout_s: float | None) -> None:
    """Give the processes their memory and their GPU back: the inverse of `checkpoint_gpus`. May run twice.

    Raises:
        OcihookError: if a process stands still, or a GPU is full; it can be tried again.
    """
    processes = [Process(pid, ticks) for pid, ticks, _ in effect["processes"]]
    known = zip(processes, effect.get("threads", ()), strict=False)  # not known yet: nothing is checkpointed yet
    threads = {process: thread for process, thread in known if process.is_alive()}
    for process in processes:
        wait_until_let_go(process, timeout_s)
    with standing_still(journal, threads, timeout_s):
        _bring_back(effect, journal, timeout_s)


def _bring_back(effect: Mapping[str, Any], journal: Journal, timeout_s: float | None) -> None:
    """Do what `resume` does, of processes that no tracer but this one holds."""
    processes = {name: Process(pid, ticks) for pid, ticks, name in effect["processes"]}
    alive = {name: process for name, process in processes.items() if process.is_alive()}
    if alive:
        try:
            _resume(effect, journal, alive, timeout_s)
        except (IntegrityError, CudaError) as error:
            if isinstance(error, CudaError) and not error.result:
                raise  # not the driver's last word
            end(list(alive.values()))
            journal.note_error(error, "failed")
            log.error(
                "container %s: its GPU state cannot be given back and is lost, its processes were killed: %s",
                journal.container,
                error,
            )
    unpin_directory(journal.pins)
    directory = same_directory(Path(effect["directory"]), effect["identity"])
    if directory:
        discard_regions(directory)


def _resume(effect: Mapping[str, Any], journal: Journal, alive: Mapping[str, Process], timeout_s: float | None) -> None:
    driver = CudaDriver()
    if effect["moved"]:  # this it can be given while its engine still has it frozen
        with journal.phase("gpu give back") as phase, journal.spans(phase) as spans:
            phase["bytes"] = _give_back(journal, alive, spans)
    for process in alive.values():
        wait_until_thawed(process, timeout_s)
    left = [process for process in alive.values() if process.is_alive()]
    with journal.phase("gpu resume") as phase, journal.spans(phase) as spans:
        if CudaState.CHECKPOINTED in states(driver, left).values():
            wait_for_room(effect["need"])
        resume_all(driver, left, spans=spans)


def _give_back(journal: Journal, alive: Mapping[str, Process], spans: Spans) -> int:
    """Write all moved memory back; if a process ends meanwhile, all that of the others again."""
    while True:
        try:
            workers = int(journal.facts.get("workers", 1))
            return gpu_memory.write_back(journal.pins, alive, workers=workers, spans=spans)
        except OSError as error:
            left = {name: process for name, process in alive.items() if process.is_alive()}
            if len(left) == len(alive):
                raise OcihookError(f"GPU memory cannot be given back: {error}") from error
            alive = left
