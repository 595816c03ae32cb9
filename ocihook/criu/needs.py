"""Needs of an image set on the node of its restore, as far as CRIU's small images show them."""

import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ocihook.criu.images import COMMON_MAGIC, decode, messages
from ocihook.criu.proto import message_class

# Which images are read, with the second of their magics (criu/include/magic.h).
_FDINFO, _CORE, _MM, _REMAPS, _MOUNTS, _PIPES, _FILES, _MEMFDS, _PSTREE = (
    *(0x56213732, 0x55053847, 0x57492820, 0x59133954, 0x55563928, 0x56453709, 0x56303138, 0x48453499, 0x50273030),
)
_MOST_BYTES = 32 << 20  # of a message: an address space of 65530 mappings takes 4 MiB
_U32, _TWO_MAGICS, _INVENTORY_HEAD = struct.Struct("<I"), struct.Struct("<II"), struct.Struct("<II")
NAMES = re.compile(
    r"(?:inventory|files|pstree|remap-fpath|memfd|pipes-data)\.img|(?:mm|core|fdinfo|mountpoints)-[0-9]{1,10}\.img"
)
TMPFS = re.compile(r"tmpfs-(?:dev-)?[0-9]{1,10}\.tar\.gz\.img")
_MAP_DROPPABLE, _MAP_HUGETLB, _HUGE_SHIFT = 0x08, 0x40000, 26  # linux/mman.h
_DEFAULT_HUGE = 21  # of a mapping that names no size: 2 MiB, as on x86-64 and aarch64
_TYPE = 0xF  # of a mapping: MAP_TYPE
_NO_SECCOMP = 0
_Message = Any  # of CRIU, which has no types


class NeededFile(NamedTuple):
    """A file that was open or mapped, and is to be opened again by its name."""

    path: str  # in the container
    flags: int
    size: int | None
    mode: int | None
    mount: int


class NeededMount(NamedTuple):
    """A mount of the container."""

    place: str
    is_external: bool  # the runtime makes it: a bind mount


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Needs of an image set."""

    files: tuple[NeededFile, ...] = ()
    mounts: Mapping[int, NeededMount] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()  # as the container sees them; threads, too
    highest_descriptor: int = -1
    rings: frozenset[tuple[int, int]] = frozenset()  # of asynchronous I/O: requests, and bytes of the ring
    memfd_modes: frozenset[int] = frozenset()
    huge_bytes: Mapping[int, int] = field(default_factory=dict)  # memory in huge pages, by their size
    advice: frozenset[int] = frozenset()  # of madvise(2)
    is_droppable: bool = False  # some memory (MAP_DROPPABLE)
    largest_pipe_bytes: int = 0
    profiles: frozenset[str] = frozenset()  # of the security module
    security_module: int = 0  # 0: none, 1: SELinux, 2: AppArmor (inventory.proto)
    has_filters: bool = False  # of seccomp
    has_tmpfs: bool = False  # whose content is in a tar
    closes_tcp: bool = False  # it was made with tcp-close
    has_uprobes: bool = False  # it was made with allow-uprobes
    plugins: tuple[str, ...] = ()


def is_wanted(name: str) -> bool:
    """Return whether an image says what a restore needs."""
    return NAMES.fullmatch(name) is not None


def read_needs(images: Mapping[str, bytes], names: Iterable[str] = ()) -> Needs:
    """Return what an image set needs.

    Args:
        images: those that are wanted, by name.
        names: of all images.

    Raises:
        ImageError: if one is damaged.
    """
    inventory = _inventory(images.get("inventory.img", b""))
    remapped = {entry.orig_id for entry in _of(images, "remap-fpath", _REMAPS, "remap_file_path_entry")}
    cores = list(_of(images, "core", _CORE, "core_entry"))
    areas = list(_of(images, "mm", _MM, "mm_entry"))
    processes = list(_of(images, "pstree", _PSTREE, "pstree_entry"))
    memfds = list(_of(images, "memfd", _MEMFDS, "memfd_inode_entry"))
    vmas = [vma for mm in areas for vma in mm.vmas]
    return Needs(
        files=tuple(_files(images, remapped)),
        mounts={m.mnt_id: _mount(m) for m in _of(_first_mounts(images), "mountpoints", _MOUNTS, "mnt_entry")},
        pids=frozenset(pid for process in processes for pid in (process.pid, *_threads(process))),
        highest_descriptor=max((one.fd for one in _of(images, "fdinfo", _FDINFO, "fdinfo_entry")), default=-1),
        rings=frozenset((ring.nr_req, ring.ring_len) for mm in areas for ring in mm.aios),
        memfd_modes=frozenset(one.mode for one in memfds if one.HasField("mode")),
        huge_bytes=_huge(vmas),
        advice=frozenset(bit for vma in vmas for bit in range(64) if vma.madv >> bit & 1),
        is_droppable=any(vma.flags & _TYPE == _MAP_DROPPABLE for vma in vmas),
        largest_pipe_bytes=max(_pipes(images.get("pipes-data.img", b"")), default=0),
        profiles=frozenset(c.thread_core.creds.lsm_profile for c in cores) - {""},
        security_module=inventory.lsmtype,
        has_filters=any(core.thread_core.seccomp_mode != _NO_SECCOMP for core in cores),
        has_tmpfs=any(TMPFS.fullmatch(name) for name in names),
        closes_tcp=inventory.tcp_close,
        has_uprobes=inventory.allow_uprobes,
        plugins=tuple(inventory.plugins_entry.plugins),
    )


def _inventory(data: bytes) -> _Message:
    """Return the inventory; an empty one if it is missing. It begins with one magic."""
    if not data:
        return message_class("inventory_entry")(img_version=0)
    return decode("inventory_entry", data[_INVENTORY_HEAD.size :], "inventory.img", _INVENTORY_HEAD.size)


def _of(images: Mapping[str, bytes], kind: str, magic: int, message: str) -> Iterator[Any]:
    """Yield the messages of all images of a kind."""
    for name, data in images.items():
        if re.split(r"-[0-9]|\.", name)[0] == kind:
            yield from messages(data, name, (COMMON_MAGIC, magic), (message, message), limit_bytes=_MOST_BYTES)


def _files(images: Mapping[str, bytes], remapped: Collection[int]) -> Iterator[NeededFile]:
    """Yield files that a restore opens by their names: not those that CRIU has in the image, or the runtime opens."""
    for entry in _of(images, "files", _FILES, "seen_file_entry"):
        reg = entry.reg
        if entry.HasField("reg") and reg.id not in remapped and not reg.ext:
            size, mode = (getattr(reg, name) if reg.HasField(name) else None for name in ("size", "mode"))
            yield NeededFile(os.fsdecode(reg.name), reg.flags, size, mode, reg.mnt_id)


def _first_mounts(images: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the image of the first process's mounts: in other mount namespaces paths may lead elsewhere."""
    names = [name for name in images if name.startswith("mountpoints-")]
    first = min(names, key=lambda name: int(re.findall(r"\d+", name)[0]), default="")
    return {first: images[first]} if first else {}


def _mount(entry: _Message) -> NeededMount:
    place = os.fsdecode(entry.mountpoint).removeprefix(".")
    return NeededMount(place if place.startswith("/") else f"/{place}", entry.ext_mount or bool(entry.ext_key))


def _threads(process: Any) -> Sequence[int]:  # noqa: ANN401 - a message
    """Return the threads of a process; for a zombie CRIU writes any numbers (criu/pstree.c, dump_pstree)."""
    return process.threads if process.pid in process.threads else ()


def _huge(vmas: Iterable[Any]) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for vma in vmas:
        if vma.flags & _MAP_HUGETLB:
            size = 1 << (vma.flags >> _HUGE_SHIFT & 0x3F or _DEFAULT_HUGE)
            found[size] = found.get(size, 0) + vma.end - vma.start
    return found


def _pipes(data: bytes) -> Iterator[int]:
    """Yield the sizes of pipes: each message is followed by the bytes that were in the pipe."""
    position = _TWO_MAGICS.size
    while position + _U32.size <= len(data):
        (size,) = _U32.unpack_from(data, position)
        position += _U32.size
        entry: Any = decode("pipe_data_entry", data[position : position + size], "pipes-data.img", position)
        position += size + entry.bytes
        yield entry.size
