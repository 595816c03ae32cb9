"""The small records of a domain: what it is, its chain, and what came from elsewhere. See docs/formats.md."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.packs.cipher import Keyring, is_sealed, opened, seal, unseal
from ocihook.packs.frame import as_name, as_number, decode_frame, encode_frame, load_json
from ocihook.packs.pack import PAGE_BYTES
from ocihook.store.extents import Layout, decode_layout
from ocihook.store.stored_manifest import CHECKPOINT_ID, Link, StoredManifest, decode_stored, digest

MAX_LAYOUT_BYTES = 4 << 30  # of 1.4 TiB whose pages are all somewhere else
_LAYOUT_HEAD_BYTES = 4096  # of each image, and of what a layout is wrapped in; some dozens, really
_PLACE_BYTES = 12 + 100  # an extent, and a pack in JSON
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """A link of the chain: a checkpoint that is there, or was and has been removed by a prune."""

    link: Link
    sequence: int
    previous: Link | None


class Pulled(NamedTuple):
    """What is recorded of a checkpoint that came from elsewhere: it is in no chain here."""

    after: int  # sequence of the newest checkpoint made here by then, -1 without one: its place among them
    page_ids_digest: str  # of its page ids by the seed of this domain


class Identity(NamedTuple):
    """What a domain's record holds."""

    seed: int
    ids_key: bytes | None
    is_converting: bool  # to an encrypted one: some of it is not encrypted yet


def write_identity(record: Path, keyring: Keyring, identity: Identity) -> None:
    """Write a domain's record, encrypted if the ids of its pages are."""
    ids_key = identity.ids_key.hex() if identity.ids_key else ""
    body = {"seed": f"{identity.seed:016x}", "ids_key": ids_key, "is_converting": identity.is_converting}
    data = encode_frame("domain", 1, json.dumps(body).encode())
    replace_file(record, seal(keyring, "domain", data) if identity.ids_key else data, mode=0o600)


def decode_identity(keyring: Keyring, record: bytes) -> Identity:
    """Read a domain's record.

    Raises:
        IntegrityError: if it is damaged.
        KeyMissing: if it is encrypted, and there is no key.
    """
    _, body = decode_frame("domain", (1,), unseal(keyring, "domain", record) if is_sealed(record) else record)
    try:
        value = load_json(body)
        ids_key = bytes.fromhex(value["ids_key"])
        return Identity(int(value["seed"], 16), ids_key or None, is_converting=value["is_converting"] is True)
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the domain's record is malformed: {error!r}") from error


def unseal_manifest(
    keyring: Keyring, checkpoint_id: str, data: bytes, *, must_be_encrypted: Callable[[], bool] = lambda: False
) -> StoredManifest:
    """Read a manifest as it is written, here or at a remote.

    Args:
        keyring: of its domain.
        checkpoint_id: whose it must be.
        data: the manifest.
        must_be_encrypted: returns whether it must be, as all of its domain.

    Raises:
        IntegrityError: if it is damaged, or another one's, or not encrypted and should be.
        KeyMissing: if it is encrypted, and there is no key.
    """
    manifest = decode_stored(opened(keyring, f"manifest {checkpoint_id}", data, must_be_sealed=must_be_encrypted))
    if manifest.id != checkpoint_id or manifest.domain != keyring.domain:
        raise IntegrityError(
            f"where checkpoint {checkpoint_id} of domain {keyring.domain} should be is {manifest.id} of "
            f"{manifest.domain}"
        )
    return manifest


def unseal_layout(
    keyring: Keyring, manifest: StoredManifest, data: bytes, *, must_be_encrypted: Callable[[], bool] = lambda: False
) -> Layout:
    """Read a checkpoint's layout as it is written, here or at a remote, as `unseal_manifest` does a manifest."""
    record = opened(keyring, f"layout {manifest.id}", data, must_be_sealed=must_be_encrypted)
    return decode_layout(record, [(part.name, part.size_bytes // PAGE_BYTES) for part in manifest.parts])


def largest_layout(manifest: StoredManifest) -> int:
    """Return how many bytes a checkpoint's layout has at most: where each page is alone, in a pack of its own."""
    pages = manifest.raw_bytes // PAGE_BYTES
    return min(MAX_LAYOUT_BYTES, _LAYOUT_HEAD_BYTES * (1 + len(manifest.parts)) + _PLACE_BYTES * pages)


def entry_of(manifest: StoredManifest, record: bytes) -> Entry:
    """Return a checkpoint's link; its digest is of the record, however it is encrypted."""
    return Entry(Link(manifest.id, digest(record)), manifest.sequence, manifest.previous)


def encode_pulled(pulled: Pulled) -> bytes:
    """Return a record's content."""
    return encode_frame("pulled", 1, json.dumps(pulled._asdict()).encode())


def decode_pulled(data: bytes) -> Pulled:
    """Read a record's content.

    Raises:
        IntegrityError: if it is damaged.
    """
    _, body = decode_frame("pulled", (1,), data)
    try:
        value = load_json(body)
        return Pulled(as_number(value["after"] + 1) - 1, as_name(value["page_ids_digest"], _DIGEST))
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the record of a pulled checkpoint is malformed: {error!r}") from error


def encode_entry(entry: Entry, kind: str) -> bytes:
    """Return the content of a record: `head` or `removed`."""
    body = {"link": list(entry.link), "sequence": entry.sequence, "previous": entry.previous and list(entry.previous)}
    return encode_frame(kind, 1, json.dumps(body).encode())


def decode_entry(data: bytes | None, kind: str) -> Entry | None:
    """Read a record's content, if there is one.

    Raises:
        IntegrityError: if it is damaged.
    """
    if data is None:
        return None
    _, body = decode_frame(kind, (1,), data)
    try:
        value = load_json(body)
        previous = value["previous"]
        return Entry(_link(value["link"]), as_number(value["sequence"]), _link(previous) if previous else None)
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the {kind} is malformed: {error!r}") from error


def _link(value: Sequence[object]) -> Link:
    checkpoint_id, found = value
    return Link(as_name(checkpoint_id, CHECKPOINT_ID), as_name(found, _DIGEST))
