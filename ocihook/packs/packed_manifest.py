"""The manifest: the commit record of a packed image set. A manifest that exists is complete.

A frame (frame.py) of JSON (docs/formats.md has the keys).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128

from ocihook.errors import IntegrityError, StoreError
from ocihook.linux.files import replace_file
from ocihook.model import ContainerRef
from ocihook.packs.frame import (
    as_list,
    as_name,
    as_number,
    as_object,
    as_text,
    decode_frame,
    encode_frame,
    load_json,
    read_record,
)
from ocihook.packs.pack import PAGE_BYTES, PackInfo

MANIFEST_NAME = "ocihook.manifest"
PACK_PREFIX = "ocihook-"
REGION_PACK_PREFIX = "ocihook-region-"
PACK_NAME = re.compile(r"ocihook-(region-)?[0-9]{1,4}\.pack")
VERSIONS = (1, 2)  # 2: with regions; an image set without any is written as 1

# Of all memory of a checkpoint, zero pages too: more than nodes have, and little enough to iterate over.
MAX_MEMORY_BYTES = 8 << 40
MAX_MANIFEST_BYTES = 8 << 20  # 3 TiB of memory, or 9000 processes; bounds the memory that reading takes
_PAGES_NAME = re.compile(r"pages-[0-9]{1,10}\.img")
_OTHER_NAME = re.compile(r"[A-Za-z0-9_@.:-]{1,250}\.img")
# What runc and crun write beside CRIU's images: the names of the first descriptors. Without it they restore nothing.
DESCRIPTORS_NAME = "descriptors.json"
NETWORK_NAME = "ocihook-network.img"  # what the container's network was (net/note.py)
_DESCRIPTORS = re.compile(re.escape(DESCRIPTORS_NAME))
_DIGEST = re.compile(r"[0-9a-f]{32}")
PROCESS = re.compile(r"[0-9]{1,10}(/[0-9]{1,10})*")


class Segment(NamedTuple):
    """A row of chunks in one pack that holds the next part of an image."""

    pack: str
    first_chunk: int
    chunks: int


class PackedImage(NamedTuple):
    """A page image that was packed."""

    name: str
    size_bytes: int
    segments: tuple[Segment, ...]


class PackedRegion(NamedTuple):
    """A part of a process's memory that did not go through CRIU, whose images have the mapping, but not its pages."""

    process: str  # its pid as the container's init sees it; of an inner pid namespace all pids from there, with /
    start: int  # address
    size_bytes: int
    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"memory of process {self.process} at {self.start:#x}"


class OtherImage(NamedTuple):
    """An image that was left as CRIU wrote it. CRIU takes a missing one as empty, so it is recorded here.

    Or DESCRIPTORS_NAME, which a record has under a key of its own, which older readers ignore.
    """

    name: str
    size_bytes: int
    digest: str  # XXH3-128, hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedManifest:
    """Everything that belongs to one packed image set."""

    created: str  # RFC 3339, UTC
    writer: str  # name and version of what wrote it
    container: ContainerRef
    host: Mapping[str, str]  # kernel, machine, criu: what a restore may need to know
    packed_images: tuple[PackedImage, ...]
    other_images: tuple[OtherImage, ...]
    packs: tuple[PackInfo, ...]
    regions: tuple[PackedRegion, ...] = ()
    gpu: Mapping[str, Any] = field(default_factory=dict)  # what the container had of GPUs (gpu/mapping.py)

    @property
    def image_sizes(self) -> dict[str, int]:
        """Bytes of every image, packed or not, by name."""
        packed = {image.name: image.size_bytes for image in self.packed_images}
        return packed | {image.name: image.size_bytes for image in self.other_images}

    @property
    def image_bytes(self) -> int:
        """Bytes of all page images before packing."""
        return sum(image.size_bytes for image in self.packed_images)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all page images and regions before packing."""
        return self.image_bytes + sum(region.size_bytes for region in self.regions)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size_bytes for pack in self.packs)


def encode_manifest(manifest: PackedManifest) -> bytes:
    """Return the file's content."""
    with_regions = {
        "regions": [
            {
                "process": r.process,
                "start": r.start,
                "size_bytes": r.size_bytes,
                "segments": [list(s) for s in r.segments],
            }
            for r in manifest.regions
        ],
        "gpu": manifest.gpu,
    }
    version = 2 if manifest.regions or manifest.gpu else 1
    body = json.dumps(
        {
            "created": manifest.created,
            "writer": manifest.writer,
            "container": manifest.container.to_json(),
            "host": dict(manifest.host),
            "packed_images": [
                {"name": i.name, "size_bytes": i.size_bytes, "segments": [list(s) for s in i.segments]}
                for i in manifest.packed_images
            ],
            "other_images": [i._asdict() for i in manifest.other_images if i.name != DESCRIPTORS_NAME],
            "other_files": [i._asdict() for i in manifest.other_images if i.name == DESCRIPTORS_NAME],
            "packs": [{**p._asdict(), "table_checksum": f"{p.table_checksum:016x}"} for p in manifest.packs],
            **(with_regions if version > 1 else {}),
        },
        separators=(",", ":"),
    ).encode()
    return encode_frame("manifest", version, body)


def decode_manifest(data: bytes) -> PackedManifest:
    """Read a manifest's content; every name and number in it is checked.

    Raises:
        IntegrityError: if it is damaged, malformed, or of a version that this program does not know.
    """
    version, body = decode_frame("manifest", VERSIONS, data)
    try:
        return _from_json(load_json(body), version)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(f"the manifest is malformed: {error!r}") from error


def _from_json(value: Any, version: int) -> PackedManifest:  # noqa: ANN401 - anything that JSON can say
    images = tuple(
        PackedImage(
            as_name(i["name"], _PAGES_NAME),
            as_number(i["size_bytes"]),
            tuple(Segment(as_name(p, PACK_NAME), as_number(f), as_number(c)) for p, f, c in i["segments"]),
        )
        for i in value["packed_images"]
    )
    regions = tuple(
        PackedRegion(
            as_name(r["process"], PROCESS),
            as_page_number(r["start"]),
            as_page_number(r["size_bytes"]),
            tuple(Segment(as_name(p, PACK_NAME), as_number(f), as_number(c)) for p, f, c in r["segments"]),
        )
        for r in (value["regions"] if version > 1 else ())
    )
    gpu = as_gpu(value["gpu"]) if version > 1 else {}
    others = tuple(
        as_other_image(i["name"], i["size_bytes"], i["digest"], pattern)
        for pattern, listed in other_images(value).items()
        for i in listed
    )
    packs = tuple(
        PackInfo(
            as_name(p["name"], PACK_NAME),
            as_number(p["size_bytes"]),
            as_number(p["chunks"]),
            int(as_name(p["table_checksum"], re.compile(r"[0-9a-f]{16}")), 16),
        )
        for p in value["packs"]
    )
    names = [i.name for i in images] + [o.name for o in others] + [p.name for p in packs]
    if len(set(names)) != len(names):
        raise ValueError("a name occurs twice")
    host = value["host"]
    if not isinstance(host, dict):
        raise ValueError("host is not an object")
    check_memory([i.size_bytes for i in images] + [r.size_bytes for r in regions])
    container = ContainerRef.from_json(value["container"])
    for text in (*host, *host.values(), *container.to_json().values()):
        as_text(text)
    return PackedManifest(
        created=as_text(value["created"]),
        writer=as_text(value["writer"]),
        container=container,
        host=host,
        packed_images=images,
        other_images=others,
        packs=packs,
        regions=regions,
        gpu=gpu,
    )


def other_images(value: Mapping[str, Any]) -> dict[re.Pattern[str], Any]:
    """Return what a record says of images that were not packed, by the names that are allowed there."""
    return {_OTHER_NAME: value["other_images"], _DESCRIPTORS: value.get("other_files", [])}


def as_other_image(name: object, size_bytes: object, digest: object, pattern: re.Pattern[str]) -> OtherImage:
    """Return an image that was not packed; else a ValueError."""
    return OtherImage(as_name(name, pattern), as_number(size_bytes), as_name(digest, _DIGEST))


def as_page_number(value: object) -> int:
    """Return a size or an address of whole pages; else a ValueError."""
    number = as_number(value)
    if number % PAGE_BYTES:
        raise ValueError(f"{number} is not a multiple of a page")
    return number


def check_memory(sizes: Iterable[int]) -> None:
    """Check that the parts of a checkpoint are not more memory than any has; else a ValueError."""
    size = sum(sizes)
    if size > MAX_MEMORY_BYTES:
        raise ValueError(f"it claims {size} bytes of memory, more than the {MAX_MEMORY_BYTES} that are read")


def as_gpu(value: object) -> dict[str, Any]:
    """Return what a container had of GPUs, {} if nothing; else a ValueError, TypeError or KeyError."""
    gpu = as_object(value)
    if not gpu:
        return gpu
    as_text(gpu["driver"])
    as_number(gpu.get("processes", 0))
    for device in as_list(gpu["devices"]):
        for key in ("uuid", "name"):
            as_text(as_object(device)[key])
        for number in (device["held_bytes"], device.get("minor", 0), device.get("total_bytes", 0)):
            as_number(number)
    for process, held in as_object(gpu.get("held", {})).items():
        as_name(process, PROCESS)
        for size in as_object(held).values():
            as_number(size)
    for process, thread in as_object(gpu.get("threads", {})).items():
        as_name(process, PROCESS)
        as_name(str(thread) if type(thread) is int else thread, PROCESS)
    return gpu


def digest_file(path: Path) -> str:
    """Return the XXH3-128 of a file's content, as OtherImage has it."""
    digest = xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def write_manifest(directory: Path, manifest: PackedManifest, *, durable: bool) -> None:
    """Commit: from here on, the packs are the checkpoint.

    Raises:
        StoreError: if it would be too large to be read again.
        OSError: from the file system, a full one included.
    """
    data = encode_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise StoreError(f"the manifest would be larger than {MAX_MANIFEST_BYTES} bytes")
    replace_file(directory / MANIFEST_NAME, data, mode=0o600, durable=durable)


def read_manifest(directory: Path) -> PackedManifest | None:
    """Return the manifest of an image set, or None if it was never packed.

    Raises:
        IntegrityError: if there is one that cannot be used.
    """
    data = read_record(directory / MANIFEST_NAME, MAX_MANIFEST_BYTES, "manifest")
    return None if data is None else decode_manifest(data)
