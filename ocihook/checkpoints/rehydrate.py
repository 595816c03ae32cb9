"""Reads a checkpoint from the store: into page images, into processes, or packed into an image set."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from ocihook import __version__
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.packs.pack import PAGE_BYTES, PackInfo
from ocihook.packs.packed_manifest import (
    PACK_PREFIX,
    REGION_PACK_PREFIX,
    PackedImage,
    PackedManifest,
    PackedRegion,
    Segment,
    write_manifest,
)
from ocihook.packs.packing import pack
from ocihook.packs.pages import Parts, Progress, Source, Target, no_progress
from ocihook.packs.runs import ALL, RunPages, file_targets
from ocihook.session.timing import Spans, opener
from ocihook.store.assemble import assemble, open_part
from ocihook.store.domain import Domain
from ocihook.store.extents import ZERO, Layout
from ocihook.store.stored_manifest import StoredImage, StoredManifest, StoredRegion


def rehydrate_stored(
    domain: Domain,
    manifest: StoredManifest,
    directory: Path,
    *,
    with_regions: bool = True,
    only: Mapping[str, Parts] = ALL,
    workers: int,
    progress: Progress = no_progress,
) -> None:
    """Write a stored checkpoint's page images into `directory`, every page verified on the way.

    With `with_regions`, what is written into processes later is verified, too. Of images in `only` just these parts are
    written and verified.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the file system, a full one included.
    """
    with domain.using(manifest.id):
        layout = domain.layout(manifest)
        targets: dict[str, Target | None] = {}
        if with_regions:
            targets |= dict.fromkeys(region.name for region in manifest.regions)
        targets |= file_targets(directory, {image.name: image.size_bytes for image in manifest.images}, only)
        assemble(layout, domain.packs, targets, workers=workers, patience=domain.patience, progress=progress)


def stored_region_bytes(domain: Domain, manifest: StoredManifest) -> int:
    """Return how many bytes of memory went past CRIU, without zero pages.

    Raises:
        IntegrityError: if the layout is damaged.
    """
    if not manifest.regions:
        return 0
    images = domain.layout(manifest).images
    extents = chain.from_iterable(images[region.name] for region in manifest.regions)
    return sum(extent.pages for extent in extents if extent.pack != ZERO) * PAGE_BYTES


def write_stored_regions(
    domain: Domain,
    manifest: StoredManifest,
    processes: Mapping[str, Process],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
    spans: Spans | None = None,
) -> int:
    """Write a stored checkpoint's regions into processes, by the names that it has for them; return the bytes.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: if a process has not mapped a region, or is gone.
    """
    targets = {
        region.name: Target(opener(spans, processes[region.process]), region.start) for region in manifest.regions
    }
    write_stored_parts(domain, manifest, targets, workers=workers, patience=patience, progress=progress)
    return sum(region.size_bytes for region in manifest.regions)


def write_stored_parts(
    domain: Domain,
    manifest: StoredManifest,
    targets: Mapping[str, Target],
    *,
    workers: int,
    patience: Patience = ENDLESS,
    progress: Progress = no_progress,
) -> None:
    """Write parts of a stored checkpoint's page images and regions, by their names, into processes.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: if a process has not mapped them, or is gone.
    """
    with domain.using(manifest.id):
        assemble(domain.layout(manifest), domain.packs, targets, workers=workers, patience=patience, progress=progress)


def _open(layout: Layout, name: str, domain: Domain) -> RunPages:
    return RunPages(open_part(layout, name, domain.packs))


def pack_stored(
    domain: Domain, manifest: StoredManifest, directory: Path, *, workers: int, progress: Progress = no_progress
) -> PackedManifest:
    """Write a stored checkpoint's memory into packs and a manifest in `directory`, as a dump inline would have.

    Raises:
        IntegrityError: naming what is missing or damaged.
        OSError: from the file system, a full one included.
    """
    with domain.using(manifest.id):
        layout = domain.layout(manifest)
        sources = {
            part: Source(partial(_open, layout, part.name, domain), 0, part.size_bytes) for part in manifest.parts
        }

        def packed(
            parts: Sequence[StoredImage | StoredRegion], prefix: str
        ) -> tuple[list[tuple[Segment, ...]], list[PackInfo]]:
            chosen = [sources[part] for part in parts]
            return pack(chosen, directory, prefix=prefix, workers=workers, durable=False, progress=progress)

        image_rows, image_packs = packed(manifest.images, PACK_PREFIX)
        region_rows, region_packs = packed(manifest.regions, REGION_PACK_PREFIX)
    made = PackedManifest(
        created=manifest.created,
        writer=f"ocihook {__version__}",
        container=manifest.container,
        host=manifest.host,
        packed_images=tuple(
            PackedImage(image.name, image.size_bytes, row)
            for image, row in zip(manifest.images, image_rows, strict=True)
        ),
        other_images=manifest.other_images,
        packs=(*image_packs, *region_packs),
        regions=tuple(
            PackedRegion(region.process, region.start, region.size_bytes, row)
            for region, row in zip(manifest.regions, region_rows, strict=True)
        ),
        gpu=manifest.gpu,
    )
    write_manifest(directory, made, durable=False)
    return made
