"""Whether a checkpoint archive can be restored on this node, before anybody tries."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook.config import Settings, load_settings
from ocihook.criu.version import find_program
from ocihook.cuda.driver import CudaDriver
from ocihook.errors import ConfigError, OcihookError
from ocihook.ops.archive import Inspection, inspect_archive
from ocihook.ops.compatibility import check_criu, check_machine, missing_features
from ocihook.ops.doctor.finding import Finding, Status
from ocihook.ops.gpu import read_node
from ocihook.ops.gpu_map import check_gpus, choose_gpu_map
from ocihook.ops.transfer import find_stored


class _Checkpoint:
    """An archive, and what is in the store of it."""

    def __init__(self, path: Path) -> None:
        try:
            self.settings = load_settings()
        except ConfigError:  # a restore goes ahead with the defaults, too
            self.settings = Settings()
        self.inspection: Inspection = inspect_archive(path)
        self.findings: list[Finding] = []
        self.host: Mapping[str, str] = {}
        self.gpu: Mapping[str, Any] = {}
        self.image_bytes = 0
        manifest, thin = self.inspection.manifest, self.inspection.thin
        if manifest is not None:
            self.host, self.gpu = manifest.host, manifest.gpu
            self.image_bytes = sum(image.size_bytes for image in manifest.packed_images)
        elif thin is not None:
            try:
                stored, where = find_stored(self.settings, thin)
                self.host, self.gpu, self.image_bytes = stored.host, stored.gpu, stored.image_bytes
                self.findings.append(Finding("store", Status.OK, f"checkpoint {thin.checkpoint_id} is in {where}"))
            except (OcihookError, OSError) as error:
                hint = getattr(error, "hint", "") or "see `ocihook store list`"
                self.findings.append(Finding("store", Status.FAIL, str(error.args[0]), hint))


def check_archive(path: Path) -> list[Finding]:
    """Return what stands against a restore of an archive here. Its memory is not read: `archive verify` does that.

    Raises:
        ArchiveError: if it is no archive.
        OSError: if it cannot be read.
    """
    checkpoint = _Checkpoint(path)
    return [*checkpoint.findings, *_check_host(checkpoint), *_check_gpus(checkpoint), *_check_room(checkpoint)]


def _check_host(checkpoint: _Checkpoint) -> Iterator[Finding]:
    host = checkpoint.host
    criu = find_program("criu")
    try:
        check_machine(host)
        check_criu(host, criu.version_text if criu else "")
    except OcihookError as error:
        yield Finding("host", Status.FAIL, str(error.args[0]), error.hint)
        return
    if not host.get("machine"):
        yield Finding("host", Status.SKIP, "the archive does not tell where it was made")
        return
    yield Finding("host", Status.OK, f"made on {host['machine']} by CRIU {host.get('criu') or 'of unknown version'}")
    missing = missing_features(host)
    if missing:
        detail = f"this node's processors lack {', '.join(missing)}: programs that chose code by them die on SIGILL"
        yield Finding("cpu", Status.FAIL, detail, "restore on a node with the same processors, or newer ones")


def _check_gpus(checkpoint: _Checkpoint) -> Iterator[Finding]:
    gpu = checkpoint.gpu
    if not gpu:
        yield Finding("gpus", Status.OK, "none are needed")
        return
    try:
        CudaDriver()
        version, gpus = read_node()
        wanted = checkpoint.settings.policy.gpu_map
        gpu_map = choose_gpu_map(gpu, gpus, given_minors=(), wanted=wanted)
        check_gpus(gpu, gpus, version, gpu_map)
    except OcihookError as error:
        yield Finding("gpus", Status.FAIL, str(error.args[0]), error.hint)
    else:
        moved = ", ".join(f"{old} becomes {new}" for old, new in gpu_map) or "the same"
        yield Finding("gpus", Status.OK, f"driver {version}; {len(gpu['devices'])} GPUs: {moved}")


def _check_room(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """Page images are written where the engine unpacks the archive, which is below /var as a rule."""
    place = next(p for p in (Path("/var/lib/containers"), Path("/var/lib/containerd"), Path("/var")) if p.exists())
    free = shutil.disk_usage(place).free
    need = checkpoint.inspection.archive_bytes + checkpoint.image_bytes
    detail = f"{need >> 20} MiB are needed where the engine unpacks it; {place} has {free >> 20} MiB"
    yield Finding("room", Status.OK if free > need else Status.WARN, detail, "" if free > need else "make room there")
