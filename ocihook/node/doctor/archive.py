"""Whether a checkpoint can be restored on this node, before anybody tries: an archive, or an image directory."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import Any

from ocihook.archive.repack import inspect_archive
from ocihook.checkpoints.pulling import find_stored
from ocihook.config import Settings, load_settings
from ocihook.container.descriptors import check_image_files
from ocihook.container.engine_archive import read_document
from ocihook.criu.files import options_for
from ocihook.criu.images import (
    INVENTORY_NAME,
    PAGES_NAME,
    check_named,
    check_page_sizes,
    read_bounded,
    read_pagemaps,
)
from ocihook.criu.needs import is_wanted, read_needs
from ocihook.criu.version import TIMEOUT_S, find_program, parse_version
from ocihook.errors import ArchiveError, ConfigError, OcihookError
from ocihook.gpu.driver import CudaDriver
from ocihook.gpu.mapping import check_gpus, choose_gpu_map
from ocihook.gpu.processes import read_node
from ocihook.images.compatibility import check_criu, check_machine, missing_features
from ocihook.linux.patience import ENDLESS
from ocihook.node.doctor.machine import image_set_places
from ocihook.packs.packed_manifest import (
    DESCRIPTORS_NAME,
    OtherImage,
    PackedImage,
    PackedManifest,
    read_manifest,
)
from ocihook.preflight.checks import alike_as_one, run
from ocihook.preflight.finding import Finding, Status, without_commands
from ocihook.preflight.restores import CHECKS
from ocihook.preflight.target import observe_restore
from ocihook.store.stored_manifest import StoredImage
from ocihook.store.thin import Thin, read_thin

_OF_CONTAINER = re.compile(r"/userdata/|/_data$")  # podman's own files of a container, and named volumes
_ANOTHER = "use another copy of the checkpoint"
_CONNECTIONS = "tcp-stream-*.img"  # one for each established connection (criu/sk-tcp.c)


class _Checkpoint:
    """An archive or an image directory, and what is in the store of it."""

    def __init__(self, path: Path) -> None:
        try:
            self.settings = load_settings()
        except ConfigError:  # a restore goes ahead with the defaults, too
            self.settings = Settings()
        self.expected = {INVENTORY_NAME}
        manifest, thin = self._read(path)
        self.findings: list[Finding] = []
        self.host: Mapping[str, str] = {}
        self.gpu: Mapping[str, Any] = {}
        self.image_bytes = 0
        if manifest is not None:
            self.host, self.gpu = manifest.host, manifest.gpu
            self.image_bytes = sum(image.size_bytes for image in manifest.packed_images)
            self._take_images(manifest.packed_images, manifest.other_images)
            self.expected |= {pack.name for pack in manifest.packs}
        elif thin is not None:
            try:
                stored, where = find_stored(self.settings, thin)
                self.host, self.gpu, self.image_bytes = stored.host, stored.gpu, stored.image_bytes
                self._take_images(stored.images, stored.other_images)
                self.findings.append(Finding("store", Status.OK, f"checkpoint {thin.checkpoint_id} is in {where}"))
            except (OcihookError, OSError) as error:
                hint = getattr(error, "hint", "") or "see `ocihook store list`"
                self.findings.append(Finding("store", Status.FAIL, str(error.args[0]), hint))

    def _take_images(self, pages: Iterable[PackedImage | StoredImage], others: Iterable[OtherImage]) -> None:
        self.sizes |= {image.name: image.size_bytes for image in pages}
        self.expected |= {image.name for image in others}

    def _read(self, path: Path) -> tuple[PackedManifest | None, Thin | None]:
        if path.is_dir():
            if not (path / INVENTORY_NAME).is_file():
                raise ArchiveError(
                    f"{path} has none of CRIU's images", hint="name an archive, or what CRIU has written"
                )
            check_image_files(path)
            self.unpacked_at, self.archive_bytes = path, 0
            self.engine = self.image = self.image_id = self.runtime = ""
            self.sizes = {entry.name: entry.stat().st_size for entry in path.iterdir()}
            self.images = {name: read_bounded(path / name) for name in filter(is_wanted, self.sizes)}
            self.config: Mapping[str, Any] = {}
            self.pagemaps = read_pagemaps(path)
            return read_manifest(path), read_thin(path)
        inspection = inspect_archive(path)
        facts = inspection.facts
        self.engine, self.image, self.runtime = facts.container.engine, facts.image, facts.runtime
        self.image_id = facts.image_id
        self.images, self.config = dict(inspection.images), _spec_of(path)
        self.sizes, self.pagemaps = dict(facts.sizes), dict(inspection.pagemaps)
        self.expected.add(DESCRIPTORS_NAME)
        # Page images are written where the engine unpacks the archive.
        places = map(Path, (*image_set_places(self.engine)[:1], "/var"))
        self.unpacked_at = next(place for place in places if place.exists())
        self.archive_bytes = inspection.archive_bytes
        return inspection.manifest, inspection.thin


def _spec_of(path: Path) -> Mapping[str, Any]:
    """Return the runtime's configuration of the container, {} if the engine has not archived it."""
    try:
        return read_document(path, "spec.dump")
    except ArchiveError:
        return {}


def check_archive(path: Path) -> list[Finding]:
    """Return what stands against a restore of an archive, or of an image directory, here.

    Its memory is not read: `archive verify` does that.

    Raises:
        OcihookError: if it is neither, or damaged.
        OSError: if it cannot be read.
    """
    checkpoint = _Checkpoint(path)
    checks = (_check_images, _check_host, _check_image, _check_connections, _check_needs, _check_gpus, _check_room)
    return list(
        map(without_commands, [*checkpoint.findings, *(found for check in checks for found in check(checkpoint))])
    )


def _check_images(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """All is there, and memory has the size that CRIU has written down."""
    missing = sorted(checkpoint.expected - checkpoint.sizes.keys())
    if missing:
        yield Finding("images", Status.FAIL, f"{', '.join(missing)} is missing: it is incomplete", _ANOTHER)
        return
    try:
        check_page_sizes(checkpoint.pagemaps, checkpoint.sizes)
        check_named(checkpoint.pagemaps, filter(PAGES_NAME.fullmatch, checkpoint.sizes))
    except OcihookError as error:
        yield Finding("images", Status.FAIL, str(error.args[0]), error.hint or _ANOTHER)
    else:
        yield Finding("images", Status.OK, "all are there; `ocihook archive verify` reads their content")


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


def _check_image(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """The archive has what has changed since; the engine takes the rest from the image."""
    image, engine = checkpoint.image, checkpoint.engine
    if not image or not engine:
        return
    found = _has_image(engine, image)
    if found and checkpoint.image_id and _has_image(engine, checkpoint.image_id) is False:
        detail = f"{engine}'s {image} is another image by now: the container was made from {checkpoint.image_id[:12]}"
        remedy = f"podman save {checkpoint.image_id[:12]} where it was made, podman load here"
        yield Finding("image", Status.FAIL, detail, remedy)
    elif found is None:
        yield Finding("image", Status.SKIP, f"whether {engine} has {image} is not known")
    elif found:
        yield Finding("image", Status.OK, f"{engine} has {image}")
    elif image.startswith("localhost/"):
        detail = f"{engine} does not have {image}, which was built on a node and is in no registry"
        yield Finding("image", Status.FAIL, detail, f"bring it here: podman save {quote(image)}, podman load")
    else:
        detail = f"{engine} does not have {image}: a restore pulls it first, and fails if it cannot"
        pull = "crictl pull" if engine != "podman" else "podman pull"
        yield Finding("image", Status.WARN, detail, f"{pull} {quote(image)}")


def _has_image(engine: str, image: str) -> bool | None:
    """Return whether an engine has an image; None if it cannot be asked."""
    if engine == "containerd":
        listed = _run("ctr", "-n", "k8s.io", "images", "ls", "-q")
        return image in listed.stdout.splitlines() if listed and listed.returncode == 0 else None
    podman = _run("podman", "image", "exists", "--", image)  # CRI-O and podman share their storage
    if podman and podman.returncode in (0, 1):
        return podman.returncode == 0
    crictl = _run("crictl", "inspecti", "-q", "--", image) if engine == "cri-o" else None
    return crictl.returncode == 0 if crictl else None


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    program = find_program(command[0])
    if program is None:
        return None
    try:
        return subprocess.run(
            [program.path, *command[1:]], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _check_connections(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """A restore needs an option for established connections; a dump with tcp-close has none."""
    if not any(fnmatch(name, _CONNECTIONS) for name in checkpoint.sizes):
        return
    options = options_for(Path(checkpoint.runtime).name)
    detail = "the checkpoint has established TCP connections"
    if options.has("tcp-established", "tcp-close"):
        kind = "tcp-close" if options.has("tcp-close") else "tcp-established"
        yield Finding("tcp-established", Status.OK, f"{detail}; {options.file} has {kind}")
    elif checkpoint.engine == "podman":
        remedy = f"podman container restore --tcp-established, or {options.add('tcp-close')} to have them closed"
        yield Finding("tcp-established", Status.WARN, f"{detail}: without an option its restore fails", remedy)
    else:
        remedy = f"{options.add('tcp-close')}, or tcp-established where the address stays"
        yield Finding("tcp-established", Status.FAIL, f"{detail}, and no option says what becomes of them", remedy)


def _check_needs(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """Run the checks that a restore runs, as far as the container is known that it would make."""
    criu = find_program("criu")
    try:
        needs = read_needs(checkpoint.images, checkpoint.sizes)
    except OcihookError as error:
        yield Finding("images", Status.FAIL, str(error.args[0]), error.hint or _ANOTHER)
        return
    seen = observe_restore(
        needs,
        criu=parse_version(criu.version_text) if criu else (),
        options=options_for(Path(checkpoint.runtime).name),
        config=_with_lasting_binds(checkpoint.config, checkpoint.engine),
        has_root=False,
    )
    yield from alike_as_one(run(seen, CHECKS))


def _with_lasting_binds(config: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """Return a configuration with only those bind mounts that the next container has again: of podman, by their paths.

    What an engine makes for each container has another path then, as what a kubelet makes for a pod.
    """
    own = (*(f"{place}/" for place in image_set_places(engine)), "/run/", "/var/run/")
    rows = [row for row in config.get("mounts") or () if isinstance(row, Mapping)]
    sources = {str(row.get("source")): row for row in rows}
    kept = [row for source, row in sources.items() if not source.startswith(own) and not _OF_CONTAINER.search(source)]
    return {**config, "mounts": kept if engine == "podman" else []}


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
    yield Finding("room", Status.OK if free > need else Status.WARN, detail, "" if free > need else "free space there")
