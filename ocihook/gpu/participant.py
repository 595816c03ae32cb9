"""GPU state: taken from a container before its dump, given back after it; written and resumed in a restore."""

import logging
from typing import TYPE_CHECKING

from ocihook.errors import OcihookError
from ocihook.gpu.dump import GpuCheckpointed, GpuFacts, checkpoint_gpus, keep_still, lock_gpus, moved_regions
from ocihook.gpu.processes import find_gpu_processes
from ocihook.gpu.restore import (
    TargetFacts,
    check_gpu_node,
    check_memory,
    fill_memory,
    resume_gpus,
)
from ocihook.memory.half_restored import note_half_restored
from ocihook.memory.standstill import freeze_restored
from ocihook.session.participant import CallFacts, Dump, Participant, Restore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ocihook.gpu.signs import Signs

log = logging.getLogger(__name__)


class Gpu(Participant):
    """Moves GPU state out, and back in."""

    def __init__(self) -> None:
        self._signs: Sequence[Signs] = ()
        self._taken: GpuCheckpointed | None = None

    def refuse(self, dump: Dump) -> None:
        """Find the processes that use NVIDIA's driver; nothing is refused yet."""
        self._signs = find_gpu_processes(dump.init_pid)
        dump.has_gpu = bool(self._signs)

    def needs_tasks(self, dump: Dump) -> bool:
        """Return whether there are any: the driver's calls return only where tasks run."""
        return dump.has_gpu

    def prepare(self, dump: Dump) -> None:
        """Refuse what could not be restored; lock."""
        self._taken = lock_gpus(dump, self._signs) if self._signs else None
        if self._taken is not None:
            dump.gpu_bytes = sum(sum(taken.held.values()) for taken in self._taken.processes)

    def hold(self, dump: Dump) -> None:
        """Checkpoint, and move GPU memory out."""
        if self._taken is not None:
            checkpoint_gpus(dump, self._taken)

    def after_images(self, dump: Dump) -> str:
        """Return what the checkpoint has beside CRIU's images; what runs on does not before it has its GPU."""
        dump.moved = moved_regions(dump.journal)
        if dump.journal.facts(CallFacts).leave_running:
            keep_still(dump.journal)
        return ""

    def check(self, restore: Restore) -> None:
        """Check GPUs and memory of this node."""
        if restore.checkpoint is not None:
            check_gpu_node(restore, restore.checkpoint)
            check_memory(restore, restore.checkpoint.region_bytes)

    def needs_processes(self, restore: Restore) -> bool:
        """Return whether memory went past CRIU."""
        return bool(restore.checkpoint and restore.checkpoint.region_processes)

    def processes_made(self, restore: Restore) -> None:
        """Note the first process, which all others will descend from: should CRIU be killed, they go."""
        if restore.journal.knows(TargetFacts):
            note_half_restored(restore)

    def processes_wait(self, restore: Restore) -> str:
        """Write GPU memory: here, and not just before tasks run, where CRIU takes no veto."""
        checkpoint = restore.checkpoint
        size = fill_memory(restore, checkpoint) if checkpoint and checkpoint.region_processes else 0
        return f"container {restore.journal.container}: {size} bytes of GPU memory written" if size else ""

    def about_to_run(self, restore: Restore) -> None:
        """Freeze a container that would run without its GPU, if possible; most programs survive that run."""
        threads = (restore.journal.facts(GpuFacts).gpu or {}).get("threads")
        if threads:
            try:
                freeze_restored(restore, threads)
            except (OcihookError, OSError) as error:
                log.warning("container %s runs before it has its GPUs: %s", restore.journal.container, error)

    def running(self, restore: Restore) -> None:
        """Resume CUDA."""
        resume_gpus(restore)
