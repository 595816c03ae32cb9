"""The GPU part of a dump: lock, checkpoint and move out before CRIU begins, give back and resume when it is done."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.checkpoints.stage import stage_in_memory
from ocihook.criu.files import loaded_plugin
from ocihook.errors import CudaError, IntegrityError, OcihookError, plain
from ocihook.gpu.driver import CudaDriver, CudaState
from ocihook.gpu.nvml import Gpu as Device
from ocihook.gpu.preflight import Situation, heed, memory_refusals, refusals
from ocihook.gpu.processes import (
    check_contents,
    checkpoint_all,
    driver_threads,
    lock_all,
    resume_all,
    states,
)
from ocihook.gpu.room import room
from ocihook.gpu.signs import Signs
from ocihook.images.image_set import MovedRegions, discard_packs, discard_regions
from ocihook.linux.cgroup import wait_until_let_go, wait_until_thawed
from ocihook.linux.files import identity, same_directory
from ocihook.linux.mounts import unpin_directory
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, pid_below
from ocihook.memory import regions
from ocihook.memory.clean_pages import readable_bytes
from ocihook.memory.half_restored import kill
from ocihook.memory.regions import COPY_TIMEOUT_S, CheckpointedProcess
from ocihook.memory.standstill import freeze_apart, standing_still
from ocihook.packs.packed_manifest import read_manifest
from ocihook.session.effect import Effect, Facts
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump
from ocihook.session.timing import Spans
from ocihook.wire import DETACHED_STAGE

# How far it has come with the processes of a container: their memory may be written only while it is MOVED.
TAKEN = "taken"  # locked, or checkpointed with their memory in place
MOVED = "moved"  # checkpointed; their memory is in packs, and may be gone from them
RETURNED = "returned"  # it is back; the driver may be at it
RESUMED = "resumed"  # all have their GPU; packs may be left

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GpuFacts(Facts):
    """What the container has of GPUs."""

    gpu: dict[str, Any] | None = None  # as manifests keep it: driver, devices, who held what, the driver's threads
    pids: dict[str, int] = field(default_factory=dict)  # by the names of the processes inside
    staged_in_memory: bool = False


class Taken(NamedTuple):
    """A process whose GPU is taken away."""

    process: Process
    name: str  # its pid in the container
    thread: int  # the driver's own; 0: not known
    held: dict[str, int]  # bytes on each GPU that it gets back, by UUID


@dataclass(frozen=True, kw_only=True)
class RoomFacts(Facts):
    """What a container waits for that has no room on a GPU."""

    waits_for: str | None = None


def needed(processes: Iterable[Taken], gpus: Iterable[Device]) -> dict[str, int]:
    """Return by UUID the bytes that processes which live need beside what they hold: a checkpointed one holds none."""
    held = {gpu.uuid: gpu.held_bytes for gpu in gpus}
    need: Counter[str] = Counter()
    for taken in processes:
        if taken.process.is_alive():
            for uuid, size in taken.held.items():
                need[uuid] += max(0, size - held.get(uuid, {}).get(taken.process.pid, 0))
    return dict(need)


@dataclass(kw_only=True)
class GpuCheckpointed(Effect, kind="gpu-checkpointed"):
    """CUDA processes are locked, or checkpointed; their GPU memory is in their own, or in packs."""

    processes: list[Taken]
    directory: Path | None = None  # with the packs
    identity: list[int] = field(default_factory=list)
    progress: str = TAKEN

    @property
    def alive(self) -> dict[str, Process]:
        """The processes that have not ended, by their names."""
        return {taken.name: taken.process for taken in self.processes if taken.process.is_alive()}

    def undo(self, journal: Journal, patience: Patience) -> None:
        """Give the processes their memory and their GPU back, and wait until there is room for it.

        A deadline of zero is for CRIU, which waits for this stage: without room the processes stay held.

        Raises:
            OcihookError: if a process stands still, or a GPU is full; it can be tried again.
        """
        for process in self.alive.values():
            wait_until_let_go(process, patience)
        threads = {taken.process: taken.thread for taken in self.processes if taken.thread and taken.process.is_alive()}

        def find_room() -> None:
            with self._room(journal, patience if patience.left_s else ENDLESS):
                pass

        with standing_still(journal, threads, patience, find_room):
            self._bring_back(journal, patience)

    @contextlib.contextmanager
    def _room(self, journal: Journal, patience: Patience) -> Iterator[None]:
        """Wait for room on the GPUs, and show in the journal that the container waits for it."""

        def tell(missing: CudaError) -> None:
            sentence = f"the container stands still until there is room: {missing}"
            log.warning("container %s: %s", journal.container, sentence)
            journal.note(RoomFacts(waits_for=sentence))

        uuids = {uuid for taken in self.processes for uuid in taken.held if self.progress != RESUMED}
        with room(uuids, lambda gpus: needed(self.processes, gpus), journal.runtime_dir, patience, tell):
            journal.note(RoomFacts())
            yield

    def _bring_back(self, journal: Journal, patience: Patience) -> None:
        alive = self.alive
        self._tell_of_the_dead(journal)
        if alive and self.progress != RESUMED:
            try:
                self._resume(journal, alive, patience)
            except (IntegrityError, CudaError) as error:
                if isinstance(error, CudaError) and not error.result:
                    raise  # not the driver's last word
                kill(list(alive.values()))
                journal.note_error(error, "failed")
                log.error(
                    "container %s: its GPU state cannot be given back and is lost, its processes were killed: %s",
                    journal.container,
                    error,
                )
        self._reached(RESUMED, journal)
        unpin_directory(journal.pins)
        directory = same_directory(self.directory, self.identity) if self.directory else None
        if directory and journal.stage != DETACHED_STAGE:  # where they are about to be a checkpoint
            discard_regions(directory)

    def _resume(self, journal: Journal, alive: Mapping[str, Process], patience: Patience) -> None:
        driver = CudaDriver()
        if self.progress == MOVED:  # this they can be given while their engine still has them frozen
            with journal.phase("gpu give back") as phase, journal.spans(phase) as spans:
                phase["bytes"] = _give_back(journal, alive, spans)
            self._reached(RETURNED, journal)
        for process in alive.values():
            wait_until_thawed(process, patience)
        left = [process for process in alive.values() if process.is_alive()]
        with journal.phase("gpu resume") as phase, journal.spans(phase) as spans, self._room(journal, ENDLESS):
            resume_all(driver, left, spans=spans)

    def _tell_of_the_dead(self, journal: Journal) -> None:
        """Report which processes ended before they had their GPU back, unless the dump was to end them."""
        ended = [taken.process.pid for taken in self.processes if not taken.process.is_alive()]
        verdict = journal.verdict_of("post-dump")
        is_meant = not journal.facts(CallFacts).leave_running and verdict is not None and verdict[0] == 0
        if ended and not is_meant and self.progress != RESUMED:
            who = f"processes {', '.join(map(str, ended))} of container {journal.container}"
            error = CudaError(f"{who} ended before they had their GPUs back")
            if not self.alive:
                error.hint = "the container has died: start it again, or restore a checkpoint of it"
                journal.note_error(error, "failed")
            log.error("%s", error)

    def _reached(self, progress: str, journal: Journal) -> None:
        self.progress = progress
        journal.save()


def _give_back(journal: Journal, alive: Mapping[str, Process], spans: Spans) -> int:
    """Write all moved memory back; if a process ends meanwhile, all that of the others again."""
    while True:
        try:
            workers = journal.facts(CallFacts).workers
            patience = Patience(timeout_s=COPY_TIMEOUT_S)
            return regions.write_back(journal.pins, alive, workers=workers, patience=patience, spans=spans)
        except OSError as error:
            left = {name: process for name, process in alive.items() if process.is_alive()}
            if len(left) == len(alive):
                raise OcihookError(f"GPU memory cannot be given back: {plain(error)}") from error
            alive = left


def lock_gpus(dump: Dump, signs: Sequence[Signs]) -> GpuCheckpointed | None:
    """Refuse what could not be restored; lock every CUDA process of a container, whose tasks must be able to run.

    Args:
        dump: gets the effect that gives everything back.
        signs: of the processes that have to do with NVIDIA.

    Returns:
        The effect; None if there is no process to lock.

    Raises:
        OcihookError: to refuse the dump.
    """
    journal, policy = dump.journal, dump.policy
    processes = [process for s in signs if (process := Process.find(s.pid))]
    driver = CudaDriver()
    with journal.phase("gpu preflight"):
        known = states(driver, processes, dump.patience)
        runtime, call = dump.container.runtime, dump.call()
        packs_dir = dump.place if policy.mode != "off" else None
        plugin = loaded_plugin(runtime, call.criu_config)
        situation = Situation.read(dump.init_pid, signs, known, dump.patience, packs_dir=packs_dir, plugin=plugin)
        heed(refusals(situation), policy.preflight)
    # What others have locked or checkpointed is left to them: CRIU leaves it as it is, too.
    ours = [process for process, state in known.items() if state is CudaState.RUNNING]
    if not ours:
        return None
    names = {process: pid_below(dump.init_pid, process.pid) for process in ours}
    effect = GpuCheckpointed(processes=[Taken(process, names[process], 0, {}) for process in ours])
    journal.add(effect)
    with journal.phase("gpu lock") as phase, journal.spans(phase) as spans:
        agree = dump.gang.agree if call.gang else None
        lock_all(driver, ours, dump.patience, policy.gpu_lock_timeout_s, spans, agree=agree)
    with journal.phase("gpu read again"):  # what they hold is what is restored from now on, and not before
        situation = situation.read_again(dump.patience)
        heed(memory_refusals(situation), policy.preflight)
    held = {process: held_on(situation.gpus, process.pid) for process in ours}
    threads = driver_threads(driver, ours, dump.patience)
    effect.processes = [Taken(process, names[process], threads[process], held[process]) for process in ours]
    inner = {names[process]: pid_below(dump.init_pid, thread) for process, thread in threads.items()}
    by_name = {names[process]: held[process] for process in ours}
    facts = {**_gpu_facts(situation), "held": by_name, "threads": inner}
    journal.note(GpuFacts(gpu=facts, pids={name: process.pid for process, name in names.items()}))
    return effect


def checkpoint_gpus(dump: Dump, effect: GpuCheckpointed) -> None:
    """Checkpoint processes that are locked, and move their GPU memory into packs.

    Not if it is to go through CRIU, nor if a snapshot is taken, which has it like all other memory of the processes.

    Raises:
        OcihookError: to refuse the dump.
    """
    journal, policy = dump.journal, dump.policy
    names = {taken.process: taken.name for taken in effect.processes}
    threads = {taken.process: taken.thread for taken in effect.processes}
    held_bytes = {taken.process.pid: sum(taken.held.values()) for taken in effect.processes}
    driver = CudaDriver()
    with journal.phase("gpu checkpoint") as phase, journal.spans(phase) as spans:
        dump.hold.add(threads, dump.patience)
        checkpointed = checkpoint_all(driver, threads, dump.patience, spans, workers=dump.call().workers)
        check_contents(checkpointed, held_bytes)
        phase["bytes"] = sum(part.size_bytes for one in checkpointed for part in one.spans)
    if policy.mode != "off" and policy.gpu_memory == "packs" and not dump.takes_snapshot:
        _move_out(dump, effect, checkpointed, names)


def keep_still(journal: Journal) -> None:
    """Freeze the processes without a GPU, which CRIU is about to release, whatever their engine thaws."""
    taken = journal.find(GpuCheckpointed)
    if taken is None:
        return
    try:
        freeze_apart(journal, [process.pid for process in taken.alive.values()], undone_last=True)
    except (OcihookError, OSError) as error:
        log.warning("container %s: its engine could let it run without its GPU: %s", journal.container, error)


def held_on(gpus: Sequence[Device], pid: int) -> dict[str, int]:
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
    dump: Dump, effect: GpuCheckpointed, checkpointed: list[CheckpointedProcess], names: Mapping[Process, str]
) -> None:
    journal, directory, name = dump.journal, dump.place, dump.place_name
    discard_packs(directory)  # whatever lies there is of an earlier dump into the same directory
    discard_regions(directory)
    size = sum(part.size_bytes for one in checkpointed for part in one.spans)
    room = dump.call().memory_room_bytes
    # Host memory comes to the same place.
    whole = max(size, readable_bytes(dump.init_pid)) if dump.reads_memory else size
    if dump.memory and room and any(stage_in_memory(dump.memory, wanted, room) for wanted in (whole, size)):
        directory = name = dump.memory
        facts = journal.facts(GpuFacts)
        journal.note(GpuFacts(gpu=facts.gpu, pids=facts.pids, staged_in_memory=True))
    effect.directory, effect.identity = name, identity(directory)
    journal.save()
    with journal.phase("gpu move out") as phase, journal.spans(phase) as spans:
        moved = regions.move_out(
            checkpointed,
            names,
            directory,
            container=dump.container,
            gpu=journal.facts(GpuFacts).gpu or {},
            workers=dump.call().workers,
            durable=not dump.call().leave_running,
            patience=dump.patience,
            progress=dump.progress,
            spans=spans,
        )
        phase["bytes"] = moved.raw_bytes
        try:
            regions.pin(moved, directory, journal.pins)
        except OSError as error:
            log.warning("GPU memory goes through CRIU, which is slower: %s", error)
            unpin_directory(journal.pins)
            discard_regions(directory)
            return
    dump.patience.check()
    with journal.phase("gpu release") as phase, journal.spans(phase) as spans:
        effect.progress = MOVED
        journal.save()
        regions.release(checkpointed, dump.patience, spans)


def moved_regions(journal: Journal) -> MovedRegions | None:
    """Return what a dump has moved past CRIU, for the manifest of its image set; None if it has no GPU at all.

    Raises:
        OcihookError: if the record of it is gone; the image set is incomplete then.
    """
    gpu = journal.facts(GpuFacts).gpu
    if gpu is None:
        return None
    effect = journal.find(GpuCheckpointed)
    if effect is None or effect.progress == TAKEN:
        return MovedRegions((), (), gpu)
    moved = read_manifest(journal.pins)
    if moved is None:
        raise IntegrityError(f"{journal.pins}, the record of what GPU memory was moved, is gone")
    # One that has ended since is in CRIU's images at most as a zombie, which could not be given its memory.
    regions = tuple(region for region in moved.regions if region.process in effect.alive)
    return MovedRegions(regions, moved.packs if regions else (), gpu)
