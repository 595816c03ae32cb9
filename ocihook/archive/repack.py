"""What can be done with a checkpoint archive without its engine: inspect, verify, pack, unpack."""

import contextlib
import errno
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ocihook.checkpoints.complete import store_image_set, wait_complete
from ocihook.checkpoints.listing import check_complete
from ocihook.checkpoints.origin import MAX_ORIGIN_BYTES, ORIGIN_NAME, Origin, decode_origin
from ocihook.checkpoints.rehydrate import pack_stored, rehydrate_stored
from ocihook.config import Settings
from ocihook.container.engine_archive import (
    IMAGE_DIRECTORY,
    ArchiveFacts,
    Member,
    read_facts,
    read_members,
    write_archive,
)
from ocihook.criu.images import (
    INVENTORY_NAME,
    PAGES_NAME,
    DumpStats,
    Pagemap,
    Process,
    check_named,
    check_page_sizes,
    parse_dump_stats,
    parse_pagemap,
    parse_processes,
    read_pagemap,
    read_pagemaps,
)
from ocihook.criu.mappings import MM_NAME, AddressSpace, parse_address_space
from ocihook.criu.needs import is_wanted
from ocihook.criu.socket_images import FILES_NAME, FilesImage, InetSocket
from ocihook.errors import (
    ArchiveKindError,
    ImageError,
    OcihookError,
    OutputExists,
    StoreFull,
    UnsupportedError,
)
from ocihook.images.direct import MemoryImages, Way, find_ways
from ocihook.images.image_set import (
    check_other_images,
    check_regions,
    pack_image_set,
    rehydrate_image_set,
    verify_image_set,
)
from ocihook.linux.files import sync_directory
from ocihook.packs.pack import PackFile
from ocihook.packs.packed_manifest import (
    DESCRIPTORS_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    NETWORK_NAME,
    PACK_NAME,
    PackedManifest,
    decode_manifest,
    read_manifest,
)
from ocihook.packs.pages import Progress, no_progress
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.thin import THIN_NAME, Thin, decode_thin, read_thin, write_thin
from ocihook.store.verify import verify_checkpoint

_STORE = Store.of(Settings())
_COPY_BYTES = 1 << 20  # whole pages
_MAX_SMALL_BYTES = 64 << 20  # far above any pagemap or list of processes; a limit for hostile ones
_MAX_KEPT_BYTES = 256 << 20
_COMPRESSED_MARGIN_BYTES = 1 << 20
_PAGEMAP_NAME = re.compile(r"pagemap-[A-Za-z0-9-]{1,40}\.img")
_OF_PROCESS = re.compile(r"pagemap-([0-9]{1,10})\.img")


class ProcessMemory(NamedTuple):
    """One dumped process and its private memory in the checkpoint."""

    process: Process
    memory_bytes: int


class Inspection(NamedTuple):
    """Everything that is known of an archive without reading its memory."""

    facts: ArchiveFacts
    manifest: PackedManifest | None
    processes: list[ProcessMemory]
    pagemaps: Mapping[str, Pagemap]  # by file name
    stats: DumpStats | None
    thin: Thin | None
    archive_bytes: int
    sockets: list[InetSocket]
    ways: Sequence[Way]  # how the memory of processes comes back in a restore
    network: bytes | None  # the note about the network, if there is one (net/note.py)
    images: Mapping[str, bytes]  # that say what a restore needs (criu/needs.py)


def list_archives(paths: list[Path]) -> list[tuple[Path, ArchiveFacts | OcihookError | OSError]]:
    """Return the facts of each archive, or why it has none; directories stand for the files in them."""
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]
    found: list[tuple[Path, ArchiveFacts | OcihookError | OSError]] = []
    for file in files:
        try:
            facts, origin, thin = read_origin(file)
            checkpoint = thin.checkpoint_id if thin else origin.id if origin else ""
            found.append((file, facts._replace(checkpoint=checkpoint if origin else "")))
        except (OcihookError, OSError) as error:
            found.append((file, error))
    return found


def read_origin(path: Path) -> tuple[ArchiveFacts, Origin | None, Thin | None]:
    """Return the facts of an archive, what its dump has noted, and which checkpoint of a store has its memory.

    Raises:
        ArchiveError: if it is damaged, hostile, or not a checkpoint archive.
        IntegrityError: if the note, or the record of the checkpoint, is damaged.
    """
    found: dict[str, bytes] = {}
    limits = {ORIGIN_NAME: MAX_ORIGIN_BYTES, THIN_NAME: _MAX_SMALL_BYTES}

    def visit(member: Member) -> None:
        if member.image_name in limits:
            found[member.image_name] = member.content(limits[member.image_name])

    facts = read_facts(path, visit)
    origin = decode_origin(found[ORIGIN_NAME]) if ORIGIN_NAME in found else None
    return facts, origin, decode_thin(found[THIN_NAME]) if THIN_NAME in found else None


def is_packed(facts: ArchiveFacts) -> bool:
    """Return whether the memory in an archive is packed."""
    return MANIFEST_NAME in facts.sizes


def is_thin(facts: ArchiveFacts) -> bool:
    """Return whether the memory of an archive is in a store."""
    return THIN_NAME in facts.sizes


def memory_bytes(path: Path) -> int:
    """Return the bytes of all page images in an archive, unpacked: what progress is counted in.

    Raises:
        OcihookError: if the archive is damaged.
    """
    total = 0
    for member in read_members(path):
        if member.image_name == MANIFEST_NAME:
            return decode_manifest(member.content(MAX_MANIFEST_BYTES)).raw_bytes
        if PAGES_NAME.fullmatch(member.image_name):
            total += member.info.size
    return total


def inspect_archive(path: Path) -> Inspection:
    """Inspect an archive.

    Raises:
        OcihookError: if it, or what it holds, is damaged.
    """
    found: dict[str, Any] = {}
    readers: dict[str, tuple[int, Callable[[bytes], object]]] = {
        MANIFEST_NAME: (MAX_MANIFEST_BYTES, decode_manifest),
        THIN_NAME: (_MAX_SMALL_BYTES, decode_thin),
        "pstree.img": (_MAX_SMALL_BYTES, parse_processes),
        "stats-dump": (_MAX_SMALL_BYTES, parse_dump_stats),
        FILES_NAME: (_MAX_SMALL_BYTES, lambda data: FilesImage(data).sockets),
        NETWORK_NAME: (_MAX_SMALL_BYTES, bytes),
    }
    pagemaps: dict[str, Pagemap] = {}
    private: dict[int, bytes] = {}  # pagemaps of processes
    spaces: dict[int, AddressSpace] = {}
    small: dict[str, bytes] = {}

    def keep(name: str, content: bytes) -> bytes:
        """Keep an image that says what a restore needs, unless a hostile archive has too much of them."""
        if is_wanted(name) and sum(map(len, small.values())) + len(content) <= _MAX_KEPT_BYTES:
            small[name] = content
        return content

    def visit(member: Member) -> None:
        name = member.image_name or ("stats-dump" if member.name == "stats-dump" else "")
        if name in readers:
            limit_bytes, read = readers[name]
            found[name] = read(keep(name, member.content(limit_bytes)))
        elif _PAGEMAP_NAME.fullmatch(name):
            content = member.content(_MAX_SMALL_BYTES)
            pagemaps[name] = parse_pagemap(content, name)
            if number := _OF_PROCESS.fullmatch(name):
                private[int(number[1])] = content
        elif number := MM_NAME.fullmatch(name):
            spaces[int(number[1])] = parse_address_space(keep(name, member.content(_MAX_SMALL_BYTES)), name)
        elif is_wanted(name):
            keep(name, member.content(_MAX_SMALL_BYTES))

    facts = read_facts(path, visit)
    memory = {name: pagemap.present_bytes for name, pagemap in pagemaps.items()}
    processes = [
        ProcessMemory(process, memory.get(f"pagemap-{process.pid}.img", 0)) for process in found.get("pstree.img", ())
    ]
    manifest, stats, thin = (found.get(name) for name in (MANIFEST_NAME, "stats-dump", THIN_NAME))
    sockets, network = found.get(FILES_NAME, []), found.get(NETWORK_NAME)
    pages_names = [pagemap.pages_name for pagemap in pagemaps.values()]
    images = MemoryImages(
        spaces,
        {process.pid: process.ppid for process in found.get("pstree.img", ())},
        {pid: content for pid, content in private.items() if pid in spaces},
        pages_names,
    )
    ways = find_ways(images, packed=set(pages_names) - facts.sizes.keys())
    return Inspection(
        facts, manifest, processes, pagemaps, stats, thin, path.stat().st_size, sockets, ways, network, small
    )


def read_thin_archive(path: Path) -> Thin:
    """Return which checkpoint a thin archive stands for.

    Raises:
        ArchiveError: if it is malformed.
        ArchiveKindError: if it is not thin.
    """
    thin = inspect_archive(path).thin
    if thin is None:
        raise ArchiveKindError(f"{path} is not thin: its memory is in it", hint="name a checkpoint, or a thin archive")
    return thin


class _Place(NamedTuple):
    """Where the bytes of an image lie: a file of its own, or a part of an archive that is not compressed."""

    path: Path
    offset: int
    size_bytes: int


class ImageSet:
    """An image set extracted from an archive: small images into a private directory, large ones only if necessary."""

    def __init__(self, archive: Path, directory: Path, *, in_place: bool, pages: bool, packs: bool = True) -> None:
        """Prepare to extract the members of an archive.

        Args:
            archive: the archive.
            directory: new, empty and private; only flat names of images are written to it.
            in_place: leave page images and packs in the archive where they can be read there.
            pages: whether page images are wanted.
            packs: whether packs are.
        """
        self.directory = directory
        self.places: dict[str, _Place] = {}
        self._pagemaps: dict[str, tuple[str, Pagemap]] = {}  # with their names, by page image
        self._archive = archive
        self._in_place = in_place
        self._pages = pages
        self._packs = packs

    def take(self, member: Member) -> bool:
        """Extract a member if it is a wanted image; return whether it was.

        Raises:
            ImageError: if it is a page image that is not as large as its pagemap says.
        """
        name = member.image_name
        is_pages = PAGES_NAME.fullmatch(name) is not None
        is_pack = PACK_NAME.fullmatch(name) is not None
        if not name or (is_pages and not self._pages) or (is_pack and not self._packs):
            return False
        if is_pages:
            self._check_pages(member)
        if self._in_place and member.offset is not None and (is_pages or is_pack):
            self.places[name] = _Place(self._archive, member.offset, member.info.size)
        else:
            _extract(member, self.directory / name)
            self.places[name] = _Place(self.directory / name, 0, member.info.size)
            if _PAGEMAP_NAME.fullmatch(name):
                pagemap = read_pagemap(self.directory / name)
                self._pagemaps[pagemap.pages_name] = name, pagemap
        return True

    def _check_pages(self, member: Member) -> None:
        """Compare a page image with its pagemap before it is read: a sparse one can claim anything."""
        name = member.image_name
        if name not in self._pagemaps:  # an archive in no particular order
            for other in read_members(self._archive):
                if _PAGEMAP_NAME.fullmatch(other.image_name):
                    pagemap = parse_pagemap(other.content(_MAX_SMALL_BYTES), other.image_name)
                    self._pagemaps[pagemap.pages_name] = other.image_name, pagemap
        if name not in self._pagemaps:
            raise ImageError(f"{self._archive} has no pagemap that names {name}", hint="use another copy of it")
        pagemap_name, pagemap = self._pagemaps[name]
        check_page_sizes({pagemap_name: pagemap}, {name: member.info.size})
        if pagemap.is_compressed and member.info.size > 2 * pagemap.present_bytes + _COMPRESSED_MARGIN_BYTES:
            raise ImageError(f"{name} has {member.info.size} bytes for {pagemap.present_bytes} bytes of memory")

    def complete(self) -> None:
        """Extract what CRIU itself had compressed in an otherwise packed set: the packs lack these page images."""
        manifest = read_manifest(self.directory)
        opaque = {image.name for image in manifest.other_images} if manifest else set()
        missing = {name for name in opaque if PAGES_NAME.fullmatch(name) and not (self.directory / name).exists()}
        for member in read_members(self._archive) if missing else ():
            if member.image_name in missing:
                _extract(member, self.directory / member.image_name)

    @property
    def packs(self) -> dict[str, PackFile]:
        """The packs, by name."""
        return {name: PackFile(*place) for name, place in self.places.items() if PACK_NAME.fullmatch(name)}


def _extract(member: Member, path: Path) -> None:
    if member.info.size > shutil.disk_usage(path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with path.open("xb") as file:
        for data in _pieces(member):
            file.write(data)


def _pieces(member: Member) -> Iterator[bytes]:
    while member.data is not None and (data := member.data.read(_COPY_BYTES)):
        yield data


def verify_archive(
    path: Path, *, workers: int, store: Store = _STORE, progress: Progress = no_progress
) -> PackedManifest | StoredManifest | None:
    """Read an archive to its end and check everything in it that can be checked; None if it is not packed.

    For a thin one, also check what is in the store.

    Raises:
        OcihookError: naming what is missing or damaged.
    """
    with scratch_directory(place_to_read(path)) as scratch:
        images = ImageSet(path, scratch, in_place=True, pages=False)

        def visit(member: Member) -> None:
            if not images.take(member) and PAGES_NAME.fullmatch(member.image_name):
                progress(member.info.size)  # there is nothing to check the content against

        facts = read_facts(path, visit)
        images.complete()
        thin = read_thin(scratch)
        if thin is not None:
            domain = store.open(thin.domain)
            check_complete(domain, thin.checkpoint_id)
            stored = domain.read(thin.checkpoint_id)
            check_other_images(scratch, stored.other_images)
            pagemaps = read_pagemaps(scratch)
            check_page_sizes(pagemaps, {**facts.sizes, **{i.name: i.size_bytes for i in stored.images}})
            check_named(pagemaps, (image.name for image in stored.images))
            check_regions(scratch, stored.regions)
            with domain.shared():
                verify_checkpoint(domain, stored, progress)
            return stored
        manifest = verify_image_set(scratch, workers=workers, progress=progress, elsewhere=images.packs)
        if manifest is None:
            pagemaps = read_pagemaps(scratch)
            check_page_sizes(pagemaps, facts.sizes)
            check_named(pagemaps, filter(PAGES_NAME.fullmatch, facts.sizes))
            for name in (INVENTORY_NAME, DESCRIPTORS_NAME):
                if name not in facts.sizes:
                    raise ImageError(f"{path} has no {name}, without which no runtime restores it")
        return manifest


def pack_archive(
    source: Path,
    target: Path,
    *,
    compression: str,
    force: bool,
    workers: int,
    into_store: Store | None = None,
    store: Store = _STORE,
    progress: Progress = no_progress,
) -> None:
    """Write a packed archive from a plain or thin one, as if it had been dumped with ocihook.

    Args:
        source: the archive.
        target: is written.
        compression: of the target.
        force: whether the target may exist.
        workers: processes to use.
        into_store: put the memory into this store; the target is a thin archive then.
        store: that a thin one is in.
        progress: called with the bytes of memory done.

    Raises:
        OcihookError: if it is packed already, has nothing to pack, or is damaged; `target` is then as it was.
    """
    with _output(source, target, force=force) as output:
        images = ImageSet(source, output.scratch, in_place=False, pages=True)

        def visit(member: Member) -> None:
            if member.image_name == MANIFEST_NAME or (member.image_name == THIN_NAME and into_store):
                raise ArchiveKindError(f"{source} is packed already", hint="use it as it is")
            images.take(member)

        facts = read_facts(source, visit)
        if is_thin(facts):
            _pack_thin(output, store, compression=compression, workers=workers, progress=progress)
            return
        if into_store is not None:
            stored = store_image_set(
                into_store, output.scratch, facts.container, created=facts.created, workers=workers, progress=progress
            )
            write_thin(output.scratch, Thin(stored.domain, stored.id), durable=True)
            output.write(compression, dropped={image.name for image in stored.images}, added=[THIN_NAME])
            return
        host = {"kernel": "", "machine": "", "criu": ""}
        manifest = pack_image_set(
            output.scratch, container=facts.container, host=host, workers=workers, durable=False, progress=progress
        )
        if manifest is None:
            raise ArchiveKindError(
                f"{source} has no memory that could be packed", hint="CRIU itself may have compressed it"
            )
        added = [*sorted(pack.name for pack in manifest.packs), MANIFEST_NAME]
        output.write(compression, dropped={image.name for image in manifest.packed_images}, added=added)


def _pack_thin(output: "_Output", store: Store, *, compression: str, workers: int, progress: Progress) -> None:
    thin = read_thin(output.scratch)
    assert thin is not None
    domain = store.open(thin.domain)
    stored = wait_complete(domain, thin.checkpoint_id, workers=workers)
    check_other_images(output.scratch, stored.other_images)
    check_regions(output.scratch, stored.regions)
    manifest = pack_stored(domain, stored, output.scratch, workers=workers, progress=progress)
    added = [*sorted(pack.name for pack in manifest.packs), MANIFEST_NAME]
    output.write(compression, dropped=set(), added=added)


def unpack_archive(
    source: Path,
    target: Path,
    *,
    compression: str,
    force: bool,
    workers: int,
    store: Store = _STORE,
    progress: Progress = no_progress,
) -> None:
    """Write a plain archive from a packed or thin one, its images byte for byte as CRIU wrote them.

    The arguments are those of `pack_archive`, and the store that a thin one is in.

    Raises:
        OcihookError: if it is not packed, damaged, or has GPU state; `target` is then as it was.
    """
    with _output(source, target, force=force) as output:
        images = ImageSet(source, output.scratch, in_place=True, pages=False)
        facts = read_facts(source, images.take)
        images.complete()
        thin = read_thin(output.scratch)
        if thin is not None:
            domain = store.open(thin.domain)
            stored = wait_complete(domain, thin.checkpoint_id, workers=workers)
            _refuse_gpu_state(source, stored.gpu)
            check_other_images(output.scratch, stored.other_images)
            check_regions(output.scratch, stored.regions)
            rehydrate_stored(domain, stored, output.scratch, workers=workers, progress=progress)
            names = [image.name for image in stored.images]
        else:
            manifest = read_manifest(output.scratch)
            _refuse_gpu_state(source, manifest.gpu if manifest else {})
            names = rehydrate_image_set(output.scratch, workers=workers, progress=progress, elsewhere=images.packs)
            if not is_packed(facts):
                raise ArchiveKindError(f"{source} is not packed", hint="use it as it is")
        output.write(compression, dropped=set(names), added=names)


def replace_images(
    source: Path, target: Path, change: Callable[[Path], Iterable[str]], *, compression: str, force: bool
) -> None:
    """Rewrite an archive with small images changed; its memory stays as it is, packed or not.

    Args:
        source: the archive.
        target: is written.
        change: given a directory with all images but those of memory, changes some and returns their names.
        compression: of the target.
        force: whether the target may exist.

    Raises:
        OcihookError: if the archive is damaged, or as `change` does; `target` is then as it was.
    """
    with _output(source, target, force=force) as output:
        images = ImageSet(source, output.scratch, in_place=True, pages=False, packs=False)
        read_facts(source, images.take)
        images.complete()
        output.replace(compression, set(change(output.scratch)))


def _refuse_gpu_state(source: Path, gpu: Mapping[str, Any]) -> None:
    if gpu:
        raise UnsupportedError(
            f"{source} has GPU state, which nothing but ocihook can restore",
            hint="restore it as it is, on a node with ocihook",
        )


class _Output(NamedTuple):
    """An archive that is being written from `source` to `target`."""

    source: Path
    target: Path
    scratch: Path  # private, on the file system of the target, with the images that are to be added

    def write(self, compression: str, *, dropped: set[str], added: list[str]) -> None:
        """Copy the source without its packs, its manifest and the images `dropped`, then add files of the scratch."""

        def is_dropped(name: str) -> bool:
            return name in dropped or name in {MANIFEST_NAME, THIN_NAME} or PACK_NAME.fullmatch(name) is not None

        self._write(compression, is_dropped, added)

    def replace(self, compression: str, names: set[str]) -> None:
        """Copy the source with the images `names` as they are in the scratch."""
        self._write(compression, names.__contains__, sorted(names))

    def _write(self, compression: str, is_dropped: Callable[[str], bool], added: list[str]) -> None:
        partial = self.scratch / ".output"  # no image's name begins with a dot
        template = tarfile.TarInfo()
        with write_archive(partial, compression) as tar:
            for member in read_members(self.source):
                if is_dropped(member.image_name):
                    template = member.info
                else:
                    tar.addfile(member.info, cast("IO[bytes] | None", member.data))
            for name in added:
                _add(tar, self.scratch / name, template)
        partial.chmod(self.source.stat().st_mode & 0o777)
        fd = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.replace(self.target)
        sync_directory(self.target.absolute().parent)


@contextlib.contextmanager
def _output(source: Path, target: Path, *, force: bool) -> Iterator[_Output]:
    if target.exists() and not force:
        raise OutputExists(f"{target} exists", hint="name another output, or use --force")
    with scratch_directory(target.absolute().parent) as scratch:
        yield _Output(source, target, scratch)


def _add(tar: tarfile.TarFile, path: Path, template: tarfile.TarInfo) -> None:
    """Add a file of the image set, with owner and times of the one that it replaces."""
    info = tarfile.TarInfo(IMAGE_DIRECTORY + path.name)
    info.size = path.stat().st_size
    info.mode, info.mtime = 0o600, template.mtime
    info.uid, info.gid, info.uname, info.gname = template.uid, template.gid, template.uname, template.gname
    with path.open("rb") as file:
        tar.addfile(info, file)


@contextlib.contextmanager
def scratch_directory(place: Path) -> Iterator[Path]:
    """Yield a private directory in `place`; raise a clear error if the file system there has no room.

    Raises:
        StoreFull: if the context ends for lack of room.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".ocihook-", dir=place) as scratch:
            yield Path(scratch)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no space left in {place} for what is written and the images it is made of",
                hint="free space there, or name another place",
            ) from error
        raise


def place_to_read(path: Path) -> Path:
    """Return where images of an archive may be put: beside it if possible, or else in the temporary directory."""
    parent = path.absolute().parent
    return parent if os.access(parent, os.W_OK) else Path(tempfile.gettempdir())


def to_json(inspection: Inspection) -> Mapping[str, Any]:
    """Return an inspection for programs."""
    facts, manifest = inspection.facts, inspection.manifest
    pages_bytes = sum(size for name, size in facts.sizes.items() if PAGES_NAME.fullmatch(name))
    return {
        "container": facts.container.to_json(),
        "image": facts.image,
        "runtime": facts.runtime,
        "created": facts.created,
        "archive_bytes": inspection.archive_bytes,
        "packed": manifest is not None,
        "thin": inspection.thin._asdict() if inspection.thin else None,
        "raw_bytes": manifest.raw_bytes if manifest else pages_bytes,
        "stored_bytes": manifest.stored_bytes if manifest else pages_bytes,
        "manifest": None
        if manifest is None
        else {"created": manifest.created, "writer": manifest.writer, "host": dict(manifest.host)},
        "gpu": {**manifest.gpu, "memory_bytes": manifest.raw_bytes - manifest.image_bytes}
        if manifest and manifest.gpu
        else None,
        "processes": [
            {"pid": process.pid, "ppid": process.ppid, "threads": len(process.tids), "memory_bytes": memory_bytes}
            for process, memory_bytes in inspection.processes
        ],
        "stats": inspection.stats._asdict() if inspection.stats else None,
    }
