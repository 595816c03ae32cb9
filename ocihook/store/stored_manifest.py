"""The manifest of a stored checkpoint: its commit record, which names the one before it in its domain.

It says what the checkpoint is, and not where: packs may be rewritten by a prune, and then its layout is, too
(extents.py). What it holds is fixed by the digest of its page ids.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ocihook.errors import IntegrityError
from ocihook.model import ContainerRef
from ocihook.packs.domain_names import DOMAIN_NAME
from ocihook.packs.frame import as_name, as_number, as_object, as_text, decode_frame, encode_frame, load_json
from ocihook.packs.packed_manifest import (
    DESCRIPTORS_NAME,
    PROCESS,
    OtherImage,
    as_gpu,
    as_other_image,
    as_page_number,
    check_memory,
    other_images,
)

CHECKPOINT_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")
VERSION, VERSION_WITH_BELONGINGS = 1, 2  # without belongings, version 1 is written: earlier releases read it
BELONGINGS_NAME = "belongings.tar"  # a part; what is in it: belongings/saving.py, checkpoints/belongings.py

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SEED = re.compile(r"[0-9a-f]{16}")
_IMAGE = re.compile(r"pages-[0-9]{1,10}\.img")


class Link(NamedTuple):
    """A checkpoint by its id and by the BLAKE2b-256 of its manifest."""

    id: str
    digest: str


class StoredImage(NamedTuple):
    """A page image; its pages lie in packs."""

    name: str
    size_bytes: int


class StoredRegion(NamedTuple):
    """Memory of a process that did not go through CRIU; its pages lie in packs. As PackedRegion."""

    process: str
    start: int
    size_bytes: int
    number: int  # among the process's regions: identifies it in the next checkpoint, where its address may differ

    @property
    def name(self) -> str:
        """What it is called in a layout."""
        return f"memory {self.number} of process {self.process}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """Everything that is fixed about a stored checkpoint."""

    id: str
    sequence: int  # in its domain; clocks go backwards, this does not
    previous: Link | None  # None: the first of its domain
    created: str  # RFC 3339, UTC
    writer: str
    domain: str
    seed: int  # of the domain's page ids where it was made: with another, it has come from another node
    container: ContainerRef
    host: Mapping[str, str]
    images: tuple[StoredImage, ...]
    regions: tuple[StoredRegion, ...] = ()
    gpu: Mapping[str, Any] = field(default_factory=dict)  # what the container had of GPUs (gpu/mapping.py)
    other_images: tuple[OtherImage, ...]
    page_ids_digest: str  # BLAKE2b-256 of the ids of all pages by `seed`, image after image
    added_bytes: int  # that its packs take, of pages that were nowhere before
    belongings_bytes: int = 0  # of BELONGINGS_NAME: of a container that was checkpointed when it was stopped; 0: none

    @property
    def image_bytes(self) -> int:
        """Bytes of all its page images."""
        return sum(image.size_bytes for image in self.images)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def parts(self) -> tuple[StoredImage | StoredRegion, ...]:
        """Everything whose pages are in packs, in the order of its layout and of its page ids."""
        belongings = [StoredImage(BELONGINGS_NAME, self.belongings_bytes)] if self.belongings_bytes else []
        return (*self.images, *self.regions, *belongings)


def digest(data: bytes) -> str:
    """Return a BLAKE2b-256 in hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def encode_stored(manifest: StoredManifest) -> bytes:
    """Return the record's content."""
    body = {
        "id": manifest.id,
        "sequence": manifest.sequence,
        "previous": list(manifest.previous) if manifest.previous else None,
        "created": manifest.created,
        "writer": manifest.writer,
        "domain": manifest.domain,
        "seed": f"{manifest.seed:016x}",
        "container": manifest.container.to_json(),
        "host": dict(manifest.host),
        "images": [list(image) for image in manifest.images],
        "regions": [list(region) for region in manifest.regions],
        "gpu": manifest.gpu,
        "other_images": [list(image) for image in manifest.other_images if image.name != DESCRIPTORS_NAME],
        "other_files": [list(image) for image in manifest.other_images if image.name == DESCRIPTORS_NAME],
        "page_ids_digest": manifest.page_ids_digest,
        "added_bytes": manifest.added_bytes,
    }
    version = VERSION
    if manifest.belongings_bytes:
        version, body["belongings_bytes"] = VERSION_WITH_BELONGINGS, manifest.belongings_bytes
    return encode_frame("checkpoint", version, json.dumps(body, separators=(",", ":")).encode())


def decode_stored(data: bytes) -> StoredManifest:
    """Read a record; every name and number in it is checked.

    Raises:
        IntegrityError: if it is damaged, malformed or of an unknown version.
    """
    _, body = decode_frame("checkpoint", (VERSION, VERSION_WITH_BELONGINGS), data)
    try:
        return _from_json(load_json(body))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(f"the checkpoint's manifest is malformed: {error!r}") from error


def _from_json(value: Any) -> StoredManifest:  # noqa: ANN401 - anything that JSON can say
    previous = value["previous"]
    manifest = StoredManifest(
        id=as_name(value["id"], CHECKPOINT_ID),
        sequence=as_number(value["sequence"]),
        previous=Link(as_name(previous[0], CHECKPOINT_ID), as_name(previous[1], _DIGEST)) if previous else None,
        created=as_text(value["created"]),
        writer=as_text(value["writer"]),
        domain=as_name(value["domain"], DOMAIN_NAME),
        seed=int(as_name(value["seed"], _SEED), 16),
        container=ContainerRef.from_json(value["container"]),
        host={as_text(key): as_text(text) for key, text in as_object(value["host"]).items()},
        images=tuple(StoredImage(as_name(name, _IMAGE), as_number(size)) for name, size in value["images"]),
        regions=tuple(
            StoredRegion(as_name(process, PROCESS), as_page_number(start), as_page_number(size), as_number(number))
            for process, start, size, number in value["regions"]
        ),
        gpu=as_gpu(value["gpu"]),
        other_images=tuple(
            as_other_image(name, size, found, pattern)
            for pattern, listed in other_images(value).items()
            for name, size, found in listed
        ),
        page_ids_digest=as_name(value["page_ids_digest"], _DIGEST),
        added_bytes=as_number(value["added_bytes"]),
        belongings_bytes=as_page_number(value.get("belongings_bytes", 0)),
    )
    check_memory(part.size_bytes for part in manifest.parts)
    return manifest
