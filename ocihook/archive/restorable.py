"""Archives of engines on this node that a container can resume from by the runtime handler: found, and laid out.

What an engine has saved beside memory is brought as that of a stop is (belongings/bringing.py), so it is written anew
in that form: changes of the rootfs (podman and CRI-O: whole files and `deleted.files`; containerd: an OCI layer with
whiteouts, compressed), and of podman /dev/shm and volumes that end with the container. containers/common
pkg/checkpoint/metadata has the names.
"""

import json
import logging
import posixpath
import re
import tarfile
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ocihook.archive.repack import ImageSet, read_origin
from ocihook.belongings.bringing import check_members, read_members
from ocihook.belongings.filesystems import ROOTFS
from ocihook.belongings.saving import OPAQUE, XATTR
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR
from ocihook.checkpoints.origin import ORIGIN_NAME, Origin, decode_origin
from ocihook.container.engine_archive import Member, compression_of, decompress, read_document, read_facts
from ocihook.container.spec import SpecFacts, spec_facts
from ocihook.errors import IntegrityError, OcihookError, UnsupportedError, plain
from ocihook.session.record import to_json
from ocihook.store.stored_manifest import BELONGINGS_NAME
from ocihook.store.thin import THIN_NAME, Thin, decode_thin

_ROOTFS_DIFF, _DELETED, _SHM = "rootfs-diff.tar", "deleted.files", "devshm-checkpoint.tar"
_VOLUME = re.compile(r"volumes/([0-9a-f]{64})\.tar")
_SHM_PREFIX = f"volumes/{urllib.parse.quote('/dev/shm', safe='')}"  # noqa: S108 - a name, nothing is made there
_WHITEOUT, _OPAQUE_NAME = ".wh.", ".wh..wh..opq"  # OCI image-spec, layer.md
_MAX_DELETED_BYTES = 64 << 20

log = logging.getLogger(__name__)


class Archived(NamedTuple):
    """A checkpoint in an engine's archive."""

    path: Path
    origin: Origin
    thin: Thin | None  # its memory is in a store

    @property
    def id(self) -> str:
        """By which it is asked for."""
        return self.thin.checkpoint_id if self.thin else self.origin.id


def find_archives(paths: Iterable[Path]) -> Iterator[Archived]:
    """Yield the archives that the handler can restore from: none that is damaged, or was made without ocihook."""
    for path in paths:
        try:
            _, origin, thin = read_origin(path)
        except (OcihookError, OSError) as error:
            log.warning("nothing is restored from %s: %s", path, plain(error))
            continue
        if origin is not None:
            yield Archived(path, origin, thin)


def lay_out_archive(path: Path, checkpoint_id: str, directory: Path, max_bytes: int) -> Origin:
    """Write into an empty directory what a runtime restores from, as checkpoints/belongings.py does.

    Args:
        path: of the archive.
        checkpoint_id: what it is to be.
        directory: gets IMAGES_DIR, with packs or the record of a thin checkpoint, BELONGINGS_NAME and FACTS_NAME.
        max_bytes: what changes of the rootfs that are compressed may take.

    Returns:
        What the dump has noted.

    Raises:
        OcihookError: if it is damaged, hostile, or another checkpoint by now.
        OSError: from the file system, a full one included.
    """
    images = directory / IMAGES_DIR
    images.mkdir(mode=0o700)
    extracted = directory / "engine"
    extracted.mkdir(mode=0o700)
    image_set = ImageSet(path, images, in_place=False, pages=True)
    trees: dict[str, Path] = {}  # by the name in the archive

    def visit(member: Member) -> None:
        if image_set.take(member):
            return
        if member.data is not None and (
            member.name in (_ROOTFS_DIFF, _DELETED, _SHM) or _VOLUME.fullmatch(member.name)
        ):
            target = extracted / urllib.parse.quote(member.name, safe="")
            with target.open("xb") as file:
                while data := member.data.read(1 << 20):
                    file.write(data)
            trees[member.name] = target

    read_facts(path, visit)
    note = images / ORIGIN_NAME
    if not note.exists():
        raise IntegrityError(f"{path} is not the archive of checkpoint {checkpoint_id} any more")
    origin = decode_origin(note.read_bytes())
    thin = images / THIN_NAME
    if checkpoint_id != (decode_thin(thin.read_bytes()).checkpoint_id if thin.exists() else origin.id):
        raise IntegrityError(f"{path} is not the archive of checkpoint {checkpoint_id} any more")
    deleted = _deleted(trees.pop(_DELETED, None))
    by_prefix = {prefix: tree for name, tree in trees.items() if (prefix := _prefix(name, origin.volumes))}
    for prefix, tree in by_prefix.items():
        if compression_of(tree) != "none":
            by_prefix[prefix] = decompress(tree, tree.with_suffix(".plain"), max_bytes)
    write_belongings(directory / BELONGINGS_NAME, by_prefix, deleted)
    (directory / FACTS_NAME).write_bytes(json.dumps(to_json(_facts(path, origin))).encode())
    return origin


def _facts(path: Path, origin: Origin) -> SpecFacts:
    """Return what an archive says of the bundle: the engine has what a note of an earlier release lacks."""
    if origin.spec.program is not None:
        return origin.spec
    try:
        config = read_document(path, "spec.dump")
        facts = spec_facts(config, Path(origin.container.bundle))
        return origin.spec._replace(rights=origin.spec.rights or facts.rights, program=facts.program)
    except OcihookError as error:
        log.warning("%s does not say what its container was allowed: %s", path, plain(error))
        return origin.spec


def _prefix(name: str, volumes: Mapping[str, str]) -> str:
    """Return what a tree's names begin with among belongings, "" if it is not brought."""
    if name == _ROOTFS_DIFF:
        return ROOTFS
    found = _VOLUME.fullmatch(name)
    if found is None:
        return _SHM_PREFIX
    return f"volumes/{urllib.parse.quote(volumes[found[1]], safe='')}" if found[1] in volumes else ""


def _deleted(path: Path | None) -> list[str]:
    """Return what podman or CRI-O says that the container has removed from its rootfs."""
    if path is None:
        return []
    if path.stat().st_size > _MAX_DELETED_BYTES:
        raise IntegrityError(f"{_DELETED} is larger than {_MAX_DELETED_BYTES} bytes")
    try:
        names = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{_DELETED} is not JSON: {error}") from error
    if names is None:  # Go's empty array
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise IntegrityError(f"{_DELETED} is not an array of names")
    return names


def write_belongings(target: Path, trees: Mapping[str, Path], deleted: Iterable[str]) -> None:
    """Write trees of an engine's archive as one tar that can be brought.

    Args:
        target: is written.
        trees: plain tars, by what their names begin with in it; of ROOTFS with the whiteouts of an OCI layer.
        deleted: names in the rootfs that are gone.

    Raises:
        IntegrityError: if one is damaged or hostile.
        OSError: from the file system, a full one included.
    """
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
        for name in deleted:
            _add_gone(tar, f"{ROOTFS}/{_plain(name)}")
        for prefix, tree in trees.items():
            _add_tree(tar, prefix, tree, with_whiteouts=prefix == ROOTFS)
    check_members(target)


def _add_tree(tar: tarfile.TarFile, prefix: str, tree: Path, *, with_whiteouts: bool) -> None:
    names = [_plain(info.name) for info, _ in read_members(tree)]
    opaque = {posixpath.dirname(name) for name in names if posixpath.basename(name) == _OPAQUE_NAME and with_whiteouts}
    if missing := sorted(opaque - {*names}):
        raise UnsupportedError(f"the archive says that {missing[0]} was replaced, and does not have the new one")
    with tree.open("rb") as content:
        for info, _ in read_members(tree):
            name = _plain(info.name)
            last = posixpath.basename(name)
            if with_whiteouts and last.startswith(_WHITEOUT):
                if last != _OPAQUE_NAME:
                    _add_gone(tar, f"{prefix}/{posixpath.join(posixpath.dirname(name), last.removeprefix(_WHITEOUT))}")
                continue
            if info.issparse():
                raise IntegrityError(f"{name!r} in the archive is a sparse file, as no engine writes it")
            info.name = f"{prefix}/{name}".rstrip("/")
            if info.islnk():
                info.linkname = f"{prefix}/{_plain(info.linkname)}"
            kept = {key: text for key, text in info.pax_headers.items() if key.startswith(XATTR) or key == "mtime"}
            info.pax_headers = {**kept, OPAQUE: "y"} if info.isdir() and name in opaque else kept
            content.seek(info.offset_data)
            tar.addfile(info, content if info.isreg() else None)


def _add_gone(tar: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type = tarfile.CHRTYPE  # 0:0, as belongings/saving.py has it
    tar.addfile(info)


def _plain(name: str) -> str:
    """Return a name relative to the tree, spelled in one way; what leads out of there is refused when it is brought."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))
