"""What can be done with a checkpoint archive away from its engine: look, verify, pack, unpack, compare."""

import contextlib
import filecmp
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ocihook.criu.images import (
    PAGE_BYTES,
    PAGES_NAME,
    DumpStats,
    Pagemap,
    Process,
    check_page_images,
    parse_dump_stats,
    parse_processes,
    read_pagemaps,
)
from ocihook.engine.archive import IMAGE_DIRECTORY, ArchiveFacts, Member, read_facts, read_members, write_archive
from ocihook.errors import ArchiveError, ImageError, OcihookError
from ocihook.linux.files import sync_directory
from ocihook.ops.image_set import open_packs, pack_image_set, read_packed, rehydrate_image_set, verify_image_set
from ocihook.store.manifest import MANIFEST_NAME, PACK_NAME, Manifest, decode_manifest, read_manifest
from ocihook.store.packing import Packs, Progress, no_progress

_COPY_BYTES = 1 << 20


class ProcessMemory(NamedTuple):
    """One dumped process and the memory of its own in the checkpoint."""

    process: Process
    memory_bytes: int


class Inspection(NamedTuple):
    """Everything that can be told of an archive without reading its memory."""

    facts: ArchiveFacts
    manifest: Manifest | None
    processes: list[ProcessMemory]
    stats: DumpStats | None
    archive_bytes: int


class MemoryDiff(NamedTuple):
    """How the memory of one pagemap differs, in pages, compared by virtual address."""

    name: str
    same: int
    changed: int
    only_in_first: int
    only_in_second: int


class ArchiveDiff(NamedTuple):
    """How two archives differ."""

    images: list[tuple[str, str]]  # name; same, changed, only in first, only in second
    memory: list[MemoryDiff]


def list_archives(paths: list[Path]) -> list[tuple[Path, ArchiveFacts | OcihookError]]:
    """Return the facts of each archive, or why it has none; directories stand for the files in them."""
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]
    found: list[tuple[Path, ArchiveFacts | OcihookError]] = []
    for file in files:
        try:
            found.append((file, read_facts(file)))
        except OcihookError as error:
            found.append((file, error))
    return found


def is_packed(facts: ArchiveFacts) -> bool:
    """Tell whether the memory in an archive is packed."""
    return MANIFEST_NAME in facts.sizes


def memory_bytes(path: Path) -> int:
    """Return the bytes of all page images in an archive, unpacked: what progress is counted in.

    Raises:
        OcihookError: if the archive is damaged.
    """
    for member in read_members(path):
        if member.image_name == MANIFEST_NAME and member.data is not None:
            return decode_manifest(member.data.read()).raw_bytes
    return sum(size for name, size in read_facts(path).sizes.items() if PAGES_NAME.fullmatch(name))


def inspect_archive(path: Path) -> Inspection:
    """Look into an archive.

    Raises:
        OcihookError: if it, or what it holds, is damaged.
    """
    facts = read_facts(path)
    with tempfile.TemporaryDirectory(prefix="ocihook-inspect-") as scratch:
        directory = Path(scratch)
        stats = None
        for member in read_members(path):
            name = member.image_name
            if name in {MANIFEST_NAME, "pstree.img"} or name.startswith("pagemap-"):
                _extract(member, directory / name)
            elif member.info.name.removeprefix("./") == "stats-dump" and member.data is not None:
                stats = parse_dump_stats(member.data.read(1 << 16))
        pagemaps = read_pagemaps(directory)
        pstree = directory / "pstree.img"
        processes = [
            ProcessMemory(process, _present_bytes(pagemaps.get(f"pagemap-{process.pid}.img")))
            for process in (parse_processes(pstree.read_bytes()) if pstree.exists() else [])
        ]
        manifest = read_manifest(directory)
    return Inspection(facts, manifest, processes, stats, path.stat().st_size)


def _present_bytes(pagemap: Pagemap | None) -> int:
    return pagemap.present_bytes if pagemap else 0


def verify_archive(path: Path, *, workers: int, progress: Progress = no_progress) -> Manifest | None:
    """Read an archive to its end and check everything in it that can be checked; None if it is not packed.

    Raises:
        OcihookError: naming what is missing or damaged.
    """
    with _scratch_beside(path) as directory:
        _extract_image_set(path, directory)
        manifest = verify_image_set(directory, workers=workers, progress=progress)
        if manifest is None:
            check_page_images(directory)
        return manifest


def pack_archive(
    source: Path, target: Path, *, compression: str, force: bool, workers: int, progress: Progress = no_progress
) -> Manifest:
    """Write a packed archive from a plain one, as if it had been dumped with ocihook.

    Raises:
        OcihookError: if it is packed already, has nothing to pack, or is damaged; `target` is then as it was.
    """
    facts = read_facts(source)
    if is_packed(facts):
        raise ArchiveError(f"{source} is packed already")
    with _scratch_beside(target) as directory:
        _extract_image_set(source, directory)
        host = {"kernel": "", "machine": "", "criu": ""}
        manifest = pack_image_set(
            directory, container=facts.container, host=host, workers=workers, durable=False, progress=progress
        )
        if manifest is None:
            raise ArchiveError(
                f"{source} has no memory that could be packed", hint="CRIU itself may have compressed it"
            )
        packed_names = {image.name for image in manifest.packed_images}
        added = [*sorted(pack.name for pack in manifest.packs), MANIFEST_NAME]
        _rewrite(source, target, directory, packed_names.__contains__, added, compression=compression, force=force)
        return manifest


def unpack_archive(
    source: Path, target: Path, *, compression: str, force: bool, workers: int, progress: Progress = no_progress
) -> list[str]:
    """Write a plain archive from a packed one, its images byte for byte as CRIU wrote them; return their names.

    Raises:
        OcihookError: if it is not packed, or damaged; `target` is then as it was.
    """
    if not is_packed(read_facts(source)):
        raise ArchiveError(f"{source} is not packed")
    with _scratch_beside(target) as directory:
        _extract_image_set(source, directory)
        names = rehydrate_image_set(directory, workers=workers, progress=progress)

        def is_ours(name: str) -> bool:
            return name == MANIFEST_NAME or PACK_NAME.fullmatch(name) is not None

        _rewrite(source, target, directory, is_ours, names, compression=compression, force=force)
        return names


def _rewrite(
    source: Path,
    target: Path,
    directory: Path,
    is_dropped: Callable[[str], bool],
    added: list[str],
    *,
    compression: str,
    force: bool,
) -> None:
    """Copy an archive without some images, and with others from `directory`."""
    if target.exists() and not force:
        raise ArchiveError(f"{target} exists", hint="name another output, or use --force")
    partial = target.with_name(f".{target.name}.partial")
    mode = source.stat().st_mode & 0o777
    try:
        with write_archive(partial, compression) as tar:
            template = tarfile.TarInfo()
            for member in read_members(source):
                if member.image_name and is_dropped(member.image_name):
                    template = member.info
                else:
                    tar.addfile(member.info, cast("IO[bytes] | None", member.data))
            for name in added:
                _add(tar, directory / name, template)
        partial.chmod(mode)
        fd = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.replace(target)
        sync_directory(target.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, path: Path, template: tarfile.TarInfo) -> None:
    """Add a file of the image set, owned and dated as the one whose place it takes."""
    info = tarfile.TarInfo(IMAGE_DIRECTORY + path.name)
    info.size = path.stat().st_size
    info.mode, info.mtime = 0o600, template.mtime
    info.uid, info.gid, info.uname, info.gname = template.uid, template.gid, template.uname, template.gname
    with path.open("rb") as file:
        tar.addfile(info, file)


@contextlib.contextmanager
def _scratch_beside(path: Path) -> Iterator[Path]:
    """Yield a private directory on the file system that has room for archives."""
    with tempfile.TemporaryDirectory(prefix=".ocihook-", dir=path.absolute().parent) as scratch:
        yield Path(scratch)


def _extract_image_set(path: Path, directory: Path) -> None:
    """Write the flat files of an image set into `directory`, which must be new and private."""
    for member in read_members(path):
        if member.image_name:
            _extract(member, directory / member.image_name)


def _extract(member: Member, path: Path) -> None:
    if member.data is None:
        raise ArchiveError(f"member {member.info.name!r} is not a file")
    with path.open("xb") as file:
        while data := member.data.read(_COPY_BYTES):
            file.write(data)


def diff_archives(first: Path, second: Path) -> ArchiveDiff:
    """Compare two archives, packed or plain: their images by content, their memory page by page.

    Raises:
        OcihookError: if one is damaged.
    """
    with _scratch_beside(first) as a, _scratch_beside(second) as b:
        sets = []
        for archive, directory in ((first, a), (second, b)):
            _extract_image_set(archive, directory)
            sets.append(_ImageSet(directory))
        try:
            return ArchiveDiff(list(_diff_images(a, b)), list(_diff_memory(*sets)))
        finally:
            for image_set in sets:
                image_set.close()


class _ImageSet:
    """The memory of an extracted image set, packed or not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pagemaps = read_pagemaps(directory)
        manifest = read_packed(directory)
        self._packs: Packs | None = open_packs(directory, manifest) if manifest else None
        if manifest is None:
            check_page_images(directory)

    def pages(self, pagemap_name: str) -> Iterator[tuple[int, bytes]]:
        """Yield (virtual address, content) of each page that a pagemap has, in its order."""
        pagemap = self.pagemaps[pagemap_name]
        if pagemap.is_compressed:
            raise ImageError(f"{pagemap.pages_name} is compressed by CRIU itself and cannot be compared")
        content = self._content(pagemap.pages_name)
        window, position = b"", 0
        for run in pagemap.runs:
            for number in range(run.pages if run.is_present else 0):
                if position == len(window):
                    window, position = next(content), 0
                yield run.vaddr + number * PAGE_BYTES, window[position : position + PAGE_BYTES]
                position += PAGE_BYTES

    def _content(self, name: str) -> Iterator[bytes]:
        if self._packs is not None:
            yield from self._packs.read_pages(name)
            return
        with (self.directory / name).open("rb") as file:
            while window := file.read(_COPY_BYTES):
                yield window

    def close(self) -> None:
        if self._packs is not None:
            self._packs.close()


def _diff_images(a: Path, b: Path) -> Iterator[tuple[str, str]]:
    def is_compared(name: str) -> bool:
        return name != MANIFEST_NAME and not PACK_NAME.fullmatch(name) and not PAGES_NAME.fullmatch(name)

    for name in sorted({path.name for directory in (a, b) for path in directory.iterdir()}):
        if not is_compared(name):
            continue
        if not (b / name).exists():
            yield name, "only in first"
        elif not (a / name).exists():
            yield name, "only in second"
        else:
            yield name, "same" if filecmp.cmp(a / name, b / name, shallow=False) else "changed"


def _diff_memory(first: _ImageSet, second: _ImageSet) -> Iterator[MemoryDiff]:
    for name in sorted(first.pagemaps.keys() | second.pagemaps.keys()):
        a = first.pages(name) if name in first.pagemaps else iter(())
        b = second.pages(name) if name in second.pagemaps else iter(())
        yield MemoryDiff(name, *_merge(a, b))


def _merge(a: Iterator[tuple[int, bytes]], b: Iterator[tuple[int, bytes]]) -> tuple[int, int, int, int]:
    """Count pages (same, changed, only in a, only in b); both come in ascending order of address."""
    same = changed = only_a = only_b = 0
    left, right = next(a, None), next(b, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left[0] < right[0]):
            only_a += 1
            left = next(a, None)
        elif left is None or right[0] < left[0]:
            only_b += 1
            right = next(b, None)
        else:
            is_same = left[1] == right[1]
            same, changed = same + is_same, changed + (not is_same)
            left, right = next(a, None), next(b, None)
    return same, changed, only_a, only_b


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
        "raw_bytes": manifest.raw_bytes if manifest else pages_bytes,
        "stored_bytes": manifest.stored_bytes if manifest else pages_bytes,
        "manifest": None
        if manifest is None
        else {"created": manifest.created, "writer": manifest.writer, "host": dict(manifest.host)},
        "processes": [{**p.process._asdict(), "memory_bytes": p.memory_bytes} for p in inspection.processes],
        "stats": inspection.stats._asdict() if inspection.stats else None,
    }
