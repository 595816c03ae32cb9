"""What a dump notes of the gang that it was made with: which member it is of, at which epoch.

Its name is that of an image, so it is packed, stored, archived and verified as one. It is a frame (packs/frame.py) with
JSON; docs/formats.md has its fields.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ocihook.errors import IntegrityError
from ocihook.linux.files import replace_file
from ocihook.model import ContainerRef, GangRef
from ocihook.packs.frame import decode_frame, encode_frame, load_json, read_record
from ocihook.session.record import from_json, to_json

GANG_NAME = "ocihook-gang.img"
_KIND, _VERSION = "gang", 1
MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class GangNote:
    """A container's place in its gang at its dump."""

    gang: GangRef  # with the epoch of the dump
    here: int = 0  # members of the dump that were on the same node

    @property
    def dump(self) -> str:
        """What tells the dump from all others in the namespace: NAME/EPOCH/ATTEMPT."""
        return f"{self.gang.name}/{self.gang.epoch}/{self.gang.attempt}"

    def on(self, container: ContainerRef) -> ContainerRef:
        """Return a container with what the checkpoints of one dump are known by."""
        member, size, here = self.gang.member, str(self.gang.size), str(self.here)
        return replace(container, gang=self.dump, gang_member=member, gang_size=size, gang_here=here)


def write_note(directory: Path, note: GangNote) -> None:
    """Put a note into an image set, in place of any that is there.

    Raises:
        OSError: if it cannot be written.
    """
    body = json.dumps(to_json(note), indent=1).encode()
    replace_file(directory / GANG_NAME, encode_frame(_KIND, _VERSION, body), mode=0o600)


def read_note(directory: Path) -> GangNote | None:
    """Return the note of an image set; None if it was dumped in no gang.

    Raises:
        IntegrityError: if it is damaged.
    """
    data = read_record(directory / GANG_NAME, MAX_NOTE_BYTES, "note about the gang")
    return None if data is None else decode_note(data)


def decode_note(data: bytes) -> GangNote:
    """Read a note; as `read_note`."""
    _, body = decode_frame(_KIND, (_VERSION,), data)
    try:
        note = from_json(GangNote, load_json(body))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(f"the note about the gang is malformed: {error}") from error
    if note.gang.size < 2 or note.gang.epoch < 1:
        raise IntegrityError(f"the note about the gang says epoch {note.gang.epoch} of {note.gang.size} members")
    return note
