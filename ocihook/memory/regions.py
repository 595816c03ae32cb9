"""The memory path: what the driver put into a process's memory goes into packs and back, past CRIU and in parallel.

CRIU moves it at 1.4 to 2 GB/s on one thread. Here all cores read it straight from the process; then the process is
made to drop it, so that CRIU finds a mapping without pages. The packs are pinned: they hold the only copy until it is
back in the process or the process is gone, and an engine that removes a failed checkpoint must not take it along.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocihook import __version__
from ocihook.errors import OcihookError, TraceError
from ocihook.images.image_set import open_packs
from ocihook.linux.memory import Span
from ocihook.linux.mounts import pin_file
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import HeldThread, find_call_instruction
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef
from ocihook.packs.packed_manifest import (
    REGION_PACK_PREFIX,
    PackedManifest,
    PackedRegion,
    read_manifest,
    write_manifest,
)
from ocihook.packs.packing import pack
from ocihook.packs.pages import BATCH_BYTES, Progress, Source, Target, no_progress
from ocihook.session.timing import Spans, measured, opener

COPY_TIMEOUT_S = 1800.0  # for what moves all memory of the GPUs, at 1 GiB/s and less
_MADV_DONTNEED = 4
_RELEASE_BYTES = 1 << 30  # at a time: a call that takes so long as all of it would hold its thread for seconds


class CheckpointedProcess(NamedTuple):
    """A process whose GPU memory is in its own memory now, in these spans."""

    process: Process
    thread: int  # the driver's own; no other one may run
    spans: tuple[Span, ...]


def move_out(  # noqa: PLR0913 - what is moved, what is said of it, and how
    checkpointed: Sequence[CheckpointedProcess],
    names: Mapping[Process, str],
    directory: Path,
    *,
    container: ContainerRef,
    gpu: Mapping[str, Any],
    workers: int,
    durable: bool,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
    spans: Spans | None = None,
) -> PackedManifest:
    """Copy the spans of checkpointed processes into packs in `directory`; they stay in the processes, too.

    Returns:
        What was moved. It is not the image set's manifest: CRIU has not written that set yet.

    Raises:
        OSError: from the file system, a full one included.
        OcihookError: on anything else that makes it impossible.
    """
    found = [(process, span) for process, _, its_spans in checkpointed for span in its_spans]
    sources = [Source(opener(spans, process), span.start, span.size_bytes) for process, span in found]
    rows, packs = pack(
        sources,
        directory,
        prefix=REGION_PACK_PREFIX,
        workers=workers,
        durable=durable,
        patience=patience,
        progress=progress,
    )
    for process, _ in found:
        if not process.is_alive():
            raise OcihookError(f"process {process.pid} ended while its memory was read")
    regions = [
        PackedRegion(names[process], span.start, span.size_bytes, row)
        for (process, span), row in zip(found, rows, strict=True)
    ]
    return PackedManifest(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        writer=f"ocihook {__version__}",
        container=container,
        host={},
        packed_images=(),
        other_images=(),
        packs=tuple(packs),
        regions=tuple(regions),
        gpu=gpu,
    )


def pin(moved: PackedManifest, directory: Path, pins: Path) -> None:
    """Keep the packs of `directory` alive in `pins`, with what is in them.

    Raises:
        OSError: if they cannot be mounted there.
    """
    pins.mkdir(mode=0o700)
    for info in moved.packs:
        pin_file(directory / info.name, pins / info.name)
    write_manifest(pins, moved, durable=False)  # neither they nor the process outlive a power loss


def release(checkpointed: Sequence[CheckpointedProcess], patience: Patience, spans: Spans | None = None) -> None:
    """Make every process drop its spans, which read as zeros then. One that has begun is not interrupted.

    Raises:
        TraceError: if one cannot be made to; it may have dropped some.
        GivenUp: if its caller has given up; likewise.
    """

    def let_go(one: CheckpointedProcess) -> None:
        with measured(spans, "release", one.process):
            _release(one, patience)

    outcomes = call_each(let_go, checkpointed, Patience(timeout_s=COPY_TIMEOUT_S))
    patience.check()
    for (process, *_), outcome in zip(checkpointed, outcomes, strict=True):
        if isinstance(outcome, Exception) and process.is_alive():
            raise TraceError(f"process {process.pid} did not release its memory: {outcome}") from outcome


def _release(checkpointed: CheckpointedProcess, patience: Patience) -> None:
    process, able, spans = checkpointed
    if not spans:
        return
    instruction = find_call_instruction(process.pid)
    thread = HeldThread(able, patience)
    try:
        for span in spans:
            for start in range(span.start, span.end, _RELEASE_BYTES):
                size = min(_RELEASE_BYTES, span.end - start)
                thread.make_call("madvise", instruction, start, size, _MADV_DONTNEED)
    finally:
        thread.release()


def write_back(
    directory: Path,
    processes: Mapping[str, Process],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
    spans: Spans | None = None,
) -> int:
    """Write the regions of a manifest in `directory` into processes that stand still or wait for the driver.

    Args:
        directory: with manifest and packs.
        processes: by the names that the regions have for them. Regions of others are left out.
        workers: processes to use.
        patience: how long to wait.
        progress: called with the bytes done.
        spans: gets how long each worker was at each process.

    Returns:
        Bytes of the regions written.

    Raises:
        IntegrityError: if a pack is damaged.
        OSError: if a process has not mapped a region, or is gone.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return 0
    regions = [region for region in manifest.regions if region.process in processes]
    targets = {r.name: Target(opener(spans, processes[r.process]), r.start, None, BATCH_BYTES) for r in regions}
    packs = open_packs(directory, manifest)
    try:
        packs.write(targets, workers=workers, patience=patience, progress=progress)
    finally:
        packs.close()
    return sum(region.size_bytes for region in regions)
