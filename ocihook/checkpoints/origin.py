"""What a dump notes of its container beside CRIU's images: by which id it is asked for, and what it was made with.

An engine's archive has that, too, but not all of it, and each engine in its own words. The note's name is that of an
image, so it is packed, stored, archived and verified as one. docs/formats.md has its fields.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ocihook.container.spec import SpecFacts
from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.model import ContainerRef
from ocihook.packs.frame import as_name, as_text, decode_frame, encode_frame, load_json
from ocihook.session.record import from_json, to_json
from ocihook.store.stored_manifest import CHECKPOINT_ID

ORIGIN_NAME = "ocihook-origin.img"
MAX_ORIGIN_BYTES = 1 << 20
_KIND, _VERSION = "origin", 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A container at its dump."""

    id: str  # of the checkpoint, unless its memory is in a store: then it has the id there
    created: str  # RFC 3339, UTC
    container: ContainerRef
    spec: SpecFacts
    volumes: Mapping[str, str] = field(default_factory=dict)  # that end with it: where it had them, by podman's names


def write_origin(directory: Path, origin: Origin) -> None:
    """Put the note into an image set, in place of any that is there.

    Raises:
        OSError: if it cannot be written.
    """
    body = json.dumps(to_json(origin)).encode()
    replace_file(directory / ORIGIN_NAME, encode_frame(_KIND, _VERSION, body), mode=0o600, durable=False)


def decode_origin(data: bytes) -> Origin:
    """Read a note's content.

    Raises:
        IntegrityError: if it is damaged.
    """
    _, body = decode_frame(_KIND, (_VERSION,), data)
    try:
        origin = from_json(Origin, load_json(body))
        as_name(origin.id, CHECKPOINT_ID)
        for text in (origin.created, *origin.container.to_json().values(), *origin.volumes.values()):
            as_text(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"the note about the container is malformed: {error}") from error
    return origin
