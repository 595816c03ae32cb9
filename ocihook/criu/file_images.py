"""Rewrites paths in CRIU's files.img: of open and mapped files, directories, and what inotify and fanotify watch."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ocihook.criu.images import COMMON_MAGIC, decode, frames, read_bounded
from ocihook.criu.socket_images import FILES_MAGIC, FILES_NAME, MAX_FILES_BYTES
from ocihook.errors import ImageError, UnsupportedError, printable
from ocihook.linux.files import replace_file

if TYPE_CHECKING:
    from google.protobuf.message import Message


class Moved(NamedTuple):
    """Where a path leads in the new container."""

    path: str
    size_bytes: int | None = None  # of a file there that may differ from the old one; None: as it was


Move = Callable[[str], Moved | None]  # from a path in the image; None: it stays


def move_paths(directory: Path, move: Move) -> bool:
    """Rewrite files.img of an image set; return whether any path has changed. All else is byte for byte the same.

    Raises:
        ImageError: if the image is damaged.
        UnsupportedError: if a new path cannot be in an image, or as `move` raises it; nothing was changed then.
        OSError: if the image is missing, or cannot be read or written.
    """
    path = directory / FILES_NAME
    data = read_bounded(path, MAX_FILES_BYTES)
    made = moved_paths(data, move)
    if made == data:
        return False
    replace_file(path, made, mode=path.stat().st_mode & 0o777)
    return True


def moved_paths(data: bytes, move: Move) -> bytes:
    """Return a files.img with other paths.

    Raises:
        ImageError: if it is damaged, or larger than any that CRIU writes.
        UnsupportedError: as `move_paths`.
    """
    if len(data) > MAX_FILES_BYTES:
        raise ImageError(f"{FILES_NAME} is larger than {MAX_FILES_BYTES} bytes")
    pieces, done = [], 0
    for position, encoded in frames(data, FILES_NAME, (COMMON_MAGIC, FILES_MAGIC)):
        entry = decode("file_entry", encoded, FILES_NAME, position)
        if not _move_entry(entry, move):
            continue
        again = entry.SerializeToString()
        pieces += [data[done : position - 4], len(again).to_bytes(4, "little"), again]
        done = position + len(encoded)
    return b"".join([*pieces, data[done:]])


def _move_entry(entry: "Message", move: Move) -> bool:
    has_moved = False
    for holder, field in _named(entry):
        name = getattr(holder, field)
        found = move(os.fsdecode(name))
        if found is None:
            continue
        _set(holder, field, found.path)
        if found.size_bytes is not None and field == "name":
            _set_size(holder, found.size_bytes)
        has_moved = True
    return has_moved


def _named(entry: "Message") -> Iterator[tuple["Message", str]]:
    """Yield the messages of an entry that have a path, with the field that has it."""
    if entry.HasField("reg"):
        yield entry.reg, "name"  # type: ignore[attr-defined]
    marks = [wd.f_handle for wd in entry.ify.wd]  # type: ignore[attr-defined]
    marks += [mark.ie.f_handle for mark in entry.ffy.mark if mark.HasField("ie")]  # type: ignore[attr-defined]
    yield from ((mark, "path") for mark in marks if mark.HasField("path"))


def _set(holder: "Message", field: str, path: str) -> None:
    try:
        setattr(holder, field, path)
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedError(f"{printable(path)} cannot be opened in a restore: its name is not UTF-8") from error


def _set_size(reg: "Message", size_bytes: int) -> None:
    """Have CRIU accept another content: it compares the size, and what it took from the content."""
    if reg.HasField("size"):
        reg.size = size_bytes  # type: ignore[attr-defined]
    for field in ("build_id", "checksum", "checksum_config", "checksum_parameter"):
        reg.ClearField(field)
