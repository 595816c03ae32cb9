"""Host memory in a restore: most of it goes past CRIU, from packs, the store or page images, on all cores at once.

All is verified as it is written, while nothing runs yet: a damaged checkpoint fails the restore there at the latest.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from ocihook.config import Policy
from ocihook.criu.images import check_page_images
from ocihook.errors import ImageError, OcihookError, PreflightError, plain
from ocihook.images.direct import LEAST_WORKERS, Direct, cut_pagemaps, plan, put_back, read_cut, write_plain
from ocihook.linux.cgroup import memory_headroom_bytes
from ocihook.linux.files import identity, same_directory
from ocihook.linux.memory import available_bytes, free_swap_bytes
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants, pid_below
from ocihook.memory.half_restored import forget_half_restored, note_half_restored
from ocihook.packs.pages import Target, scattered
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Participant, Restore
from ocihook.session.timing import opener

_GIB = 1 << 30

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CutPagemaps(Effect, kind="cut-pagemaps"):
    """Pagemaps do not name the memory that goes past CRIU, for as long as the restore lasts."""

    directory: Path
    identity: list[int]
    names: list[str]  # of the pagemaps

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Put them back as they were."""
        directory = same_directory(self.directory, self.identity)
        if directory:
            put_back(directory)


class HostMemory(Participant):
    """Writes most of the processes' memory, past CRIU."""

    def check(self, restore: Restore) -> None:
        """Choose what goes past CRIU; refuse a restore that there is too little memory for."""
        if left_to_criu(restore.policy, restore.call().workers, is_packed=True):
            return
        packed = restore.checkpoint.image_names if restore.checkpoint else ()
        try:
            with restore.journal.phase("read pagemaps"):
                cuts = plan(restore.directory, packed)
        except (ImageError, OSError) as error:  # the next reader of the images refuses them, or can do with them
            log.warning("all memory goes through CRIU: %s", plain(error))
            return
        if left_to_criu(restore.policy, restore.call().workers, is_packed=False):
            cuts = [cut for cut in cuts if cut.direct.pages_name in packed]
        restore.cuts = cuts
        if restore.cuts:
            _check_room(restore)

    def before_processes(self, restore: Restore) -> str:
        """Cut the pagemaps, once all page images are there."""
        if not restore.cuts:
            return ""
        names = [cut.name for cut in restore.cuts]
        cut = CutPagemaps(directory=Path(restore.image_dir), identity=identity(restore.directory), names=names)
        restore.journal.add(cut)
        try:
            with restore.journal.phase("cut pagemaps"):
                cut_pagemaps(restore.directory, restore.cuts, restore.patience)
                check_page_images(restore.directory)
        except OSError as error:
            put_back(restore.directory)
            if restore.checkpoint is not None:
                raise
            restore.journal.forget(cut)
            log.warning("all memory goes through CRIU: %s", plain(error))
            return ""
        size = sum(cut.direct.parts.size_bytes for cut in restore.cuts)
        return f"{size} bytes of host memory go past CRIU"

    def needs_processes(self, restore: Restore) -> bool:
        """Return whether memory goes past CRIU."""
        return restore.journal.find(CutPagemaps) is not None

    def processes_made(self, restore: Restore) -> None:
        """Note the first process, which all others will descend from: should CRIU be killed, they go."""
        if restore.journal.find(CutPagemaps) is not None:
            note_half_restored(restore)

    def processes_wait(self, restore: Restore) -> str:
        """Write what CRIU did not know of."""
        cut = restore.journal.find(CutPagemaps)
        with restore.journal.phase("read pagemaps") if cut is not None else contextlib.nullcontext():
            found = read_cut(restore.directory)
        if cut is not None and cut.names != [f"pagemap-{direct.pid}.img" for direct in found]:
            raise OcihookError("the pagemaps in the image directory were changed by somebody else during the restore")
        if not found:
            return ""
        note_half_restored(restore)  # also where CRIU made no namespaces
        size = _fill(restore, found)
        return f"{size} bytes of host memory written past CRIU"

    def running(self, restore: Restore) -> None:
        """Let the processes live: they have all their memory now."""
        forget_half_restored(restore)


def left_to_criu(policy: Policy, workers: int, *, is_packed: bool) -> str:
    """Return why all memory goes through CRIU on this node, "" if it does not.

    Args:
        policy: of the container.
        workers: processes that unpack at a time.
        is_packed: it comes out of packs, or of the store.
    """
    if policy.host_memory != "direct":
        return f'host_memory is "{policy.host_memory}"'
    if not is_packed and workers < LEAST_WORKERS:
        return f"it is not packed, and with fewer than {LEAST_WORKERS} workers CRIU reads its own page images as fast"
    return ""


def _check_room(restore: Restore) -> None:
    """Refuse a restore that there is too little memory for, as far as that is known: else the kernel kills something.

    Under runc CRIU is in the container's cgroup by now; under crun only the node's memory is known.

    Raises:
        PreflightError: to refuse it; nothing was started.
    """
    need = sum(cut.direct.parts.size_bytes for cut in restore.cuts)
    need += restore.checkpoint.region_bytes if restore.checkpoint else 0
    swap = free_swap_bytes()
    room = memory_headroom_bytes(restore.criu_pid)
    reason = ""
    if need > available_bytes() + swap:
        reason = f"the node has {_gib(available_bytes() + swap)} left: free memory on the node"
    elif room is not None and need > room + swap:
        reason = f"the container's memory limit leaves {_gib(room + swap)}: raise the limit"
    if not reason:
        return
    error = f"the restore takes {_gib(need)} of memory, {reason}"
    if restore.policy.preflight == "refuse":
        raise PreflightError(error, hint="the annotation ocihook.io/preflight=warn takes the risk")
    log.warning("preflight: %s", error)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"


def _fill(restore: Restore, found: list[Direct]) -> int:
    """Write memory into the new processes, which wait in CRIU's restorer; return the bytes.

    Raises:
        OcihookError: to let the restore fail; CRIU then kills them.
    """
    init_pid = restore.init_pid
    processes = {pid_below(init_pid, pid).split("/")[0]: p for pid in descendants(init_pid) if (p := Process.find(pid))}
    missing = {str(direct.pid) for direct in found} - set(processes)
    if missing:
        raise OcihookError(
            f"CRIU has restored no process {', '.join(sorted(missing))}, whose memory is in the checkpoint"
        )
    with restore.journal.phase("memory write back") as phase, restore.journal.spans(phase) as spans:
        targets = {one.pages_name: scattered(opener(spans, processes[str(one.pid)]), one.parts) for one in found}
        try:
            _write(restore, targets)
        except OSError as error:
            raise OcihookError(f"memory cannot be written into the restored processes: {plain(error)}") from error
        phase["bytes"] = sum(one.parts.size_bytes for one in found)
    return int(phase["bytes"])


def _write(restore: Restore, targets: dict[str, Target]) -> None:
    checkpoint, workers = restore.checkpoint, restore.call().workers
    packed = {name: targets.pop(name) for name in checkpoint.image_names if name in targets} if checkpoint else {}
    if checkpoint is not None and packed:
        checkpoint.write_parts(packed, workers=workers, patience=restore.patience, progress=restore.progress)
    write_plain(restore.directory, targets, workers=workers, patience=restore.patience, progress=restore.progress)
