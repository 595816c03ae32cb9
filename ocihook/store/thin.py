"""What replaces page images in an image directory when they go into a store: the checkpoint that they belong to."""

import json
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.packs.domain_names import DOMAIN_NAME
from ocihook.packs.frame import as_name, decode_frame, encode_frame, load_json, read_record
from ocihook.store.stored_manifest import CHECKPOINT_ID

THIN_NAME = "ocihook.thin"
MAX_THIN_BYTES = 1 << 20


class Thin(NamedTuple):
    """A checkpoint in a store."""

    domain: str
    checkpoint_id: str


def write_thin(directory: Path, thin: Thin, *, durable: bool) -> None:
    """Commit: from here on, the page images of `directory` are in the store, or pending there."""
    body = json.dumps({"domain": thin.domain, "checkpoint": thin.checkpoint_id}).encode()
    replace_file(directory / THIN_NAME, encode_frame("thin", 1, body), mode=0o600, durable=durable)


def read_thin(directory: Path) -> Thin | None:
    """Return where the page images of an image set are; None if they are not in a store.

    Raises:
        IntegrityError: if the record is damaged.
    """
    data = read_record(directory / THIN_NAME, MAX_THIN_BYTES, "record of a thin checkpoint")
    return None if data is None else decode_thin(data)


def decode_thin(data: bytes) -> Thin:
    """Read a record's content.

    Raises:
        IntegrityError: if it is damaged.
    """
    _, body = decode_frame("thin", (1,), data)
    try:
        value = load_json(body)
        return Thin(as_name(value["domain"], DOMAIN_NAME), as_name(value["checkpoint"], CHECKPOINT_ID))
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the record of a thin checkpoint is malformed: {error!r}") from error
