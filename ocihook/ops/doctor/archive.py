"""Whether a checkpoint can be restored on this node, before anybody tries: an archive, or an image directory."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook.config import Settings, load_settings
from ocihook.criu.version import find_program
from ocihook.cuda.driver import CudaDriver
from ocihook.errors import ArchiveError, ConfigError, OcihookError
from ocihook.linux.patience import ENDLESS
from ocihook.ops.archive import inspect_archive
from ocihook.ops.compatibility import check_criu, check_machine, missing_features
from ocihook.ops.doctor.finding import Finding, Status
from ocihook.ops.gpu import read_node
from ocihook.ops.gpu_map import check_gpus, choose_gpu_map
from ocihook.ops.transfer import find_stored
from ocihook.store.manifest import Manifest, read_manifest
from ocihook.store.thin import Thin, read_thin


class _Checkpoint:
    """An archive or an image directory, and what is in the store of it."""

    def __init__(self, path: Path) -> None:
        try:
            self.settings = load_settings()
        except ConfigError:  # a restore goes ahead with the defaults, too
            self.settings = Settings()
        manifest, thin = self._read(path)
        self.findings: list[Finding] = []
        self.host: Mapping[str, str] = {}
        self.gpu: Mapping[str, Any] = {}
        self.image_bytes = 0
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

    def _read(self, path: Path) -> tuple[Manifest | None, Thin | None]:
        if path.is_dir():
            if not (path / "inventory.img").is_file():
                raise ArchiveError(
                    f"{path} has none of CRIU's images", hint="name an archive, or what CRIU has written"
                )
            self.unpacked_at, self.archive_bytes = path, 0
            return read_manifest(path), read_thin(path)
        # Page images are written where the engine unpacks the archive, which is below /var as a rule.
        places = (Path("/var/lib/containers"), Path("/var/lib/containerd"), Path("/var"))
        self.unpacked_at = next(place for place in places if place.exists())
        inspection = inspect_archive(path)
        self.archive_bytes = inspection.archive_bytes
        return inspection.manifest, inspection.thin


def check_archive(path: Path) -> list[Finding]:
    """Return what stands against a restore of an archive, or of an image directory, here.

    Its memory is not read: `archive verify` does that.

    Raises:
        OcihookError: if it is neither, or damaged.
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
        yield Finding("host", Status.SKIP, "the archive does not say where it was made")
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
        version, gpus = read_node(ENDLESS)
        wanted = checkpoint.settings.policy.gpu_map
        gpu_map = choose_gpu_map(gpu, gpus, given_minors=(), wanted=wanted)
        check_gpus(gpu, gpus, version, gpu_map)
    except OcihookError as error:
        yield Finding("gpus", Status.FAIL, str(error.args[0]), error.hint)
    else:
        moved = ", ".join(f"{old} becomes {new}" for old, new in gpu_map) or "the same"
        yield Finding("gpus", Status.OK, f"driver {version}; {len(gpu['devices'])} GPUs: {moved}")


def _check_room(checkpoint: _Checkpoint) -> Iterator[Finding]:
    place = checkpoint.unpacked_at
    free = shutil.disk_usage(place).free
    need = checkpoint.archive_bytes + checkpoint.image_bytes
    where = "where the engine unpacks it" if checkpoint.archive_bytes else "there for page images"
    detail = f"{need >> 20} MiB are needed {where}; {place} has {free >> 20} MiB"
    yield Finding("room", Status.OK if free > need else Status.WARN, detail, "" if free > need else "make room there")
