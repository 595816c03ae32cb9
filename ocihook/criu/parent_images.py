"""Makes up the images of an earlier dump: of pages that such a parent has, CRIU writes only those that are dirty.

CRIU follows a link `parent` in its image directory (criu/image.c) and reads there when that dump was made, and of each
process which pages it has. A process that it finds no pagemap of is dumped whole.
"""

import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.message import Message

from ocihook.criu.images import INVENTORY_NAME, decode, read_bounded
from ocihook.criu.proto import message_class
from ocihook.errors import ImageError

LINK_NAME = "parent"
PARENT_NAME = "ocihook-parent"  # what the link names: a directory beside it
PAGES_ID = 1
_NO_PARENT = "/"  # what configurations name that have CRIU track memory in every dump: nobody's earlier dump is there
_INVENTORY_MAGIC = 0x58313116  # criu/include/magic.h
_TWO_NUMBERS = struct.Struct("<II")
_MAX_INVENTORY_BYTES = 1 << 20


def has_parent(directory: Path) -> bool:
    """Return whether CRIU was given an earlier dump by its caller."""
    return os.path.lexists(directory / LINK_NAME) and not _is_ours(directory / LINK_NAME)


def _is_ours(link: Path) -> bool:
    """Return whether a link leads to what was made up here, or nowhere: by whatever path."""
    try:
        return link.is_symlink() and (os.readlink(link) == PARENT_NAME or link.samefile(_NO_PARENT))
    except OSError:
        return False


def make_parent(directory: Path, pagemaps: Mapping[int, bytes]) -> None:
    """Make a parent in an image directory, which its link leads to once all is there.

    Args:
        directory: that CRIU is about to write to.
        pagemaps: of what the parent has, by CRIU's numbers of the processes.

    Raises:
        OSError: from the file system; call `remove_parent` then.
    """
    parent = directory / PARENT_NAME
    parent.mkdir(mode=0o700)
    (parent / f"pages-{PAGES_ID}.img").touch(mode=0o600)
    for pid, pagemap in pagemaps.items():
        (parent / f"pagemap-{pid}.img").write_bytes(pagemap)
    # A process that has begun later is another one with the same pid, and dumped whole.
    (parent / INVENTORY_NAME).write_bytes(encode_inventory(dump_uptime=now_us()))
    (directory / LINK_NAME).symlink_to(PARENT_NAME)


def remove_parent(directory: Path) -> None:
    """Remove a parent that was made here, and a link that leads to none; anybody else's is left. May run any time.

    Raises:
        OSError: from the file system.
    """
    if _is_ours(directory / LINK_NAME):
        (directory / LINK_NAME).unlink(missing_ok=True)
    if os.path.lexists(directory / PARENT_NAME):
        shutil.rmtree(directory / PARENT_NAME)


def earlier_dumps(directory: Path) -> Iterator[int | None]:
    """Yield when each dump was made that the one in a directory is compared with, the latest first.

    Yields:
        The time as `dumped_us` returns it. Where that is None, what else there is cannot be known.
    """
    for earlier in _earlier(directory):
        made_us = dumped_us(earlier)
        yield made_us
        if made_us is None:
            return


def lacks_pages(directory: Path) -> bool:
    """Return whether a dump that the one in a directory is compared with has no page images any more."""
    return not all(any(earlier.glob("pages-*.img")) for earlier in _earlier(directory))


def _earlier(directory: Path) -> Iterator[Path]:
    while has_parent(directory):
        directory = directory / LINK_NAME  # a circle of them ends as well: at the fortieth link (path_resolution(7))
        yield directory


def dumped_us(directory: Path) -> int | None:
    """Return when the dump in a directory was made, in microseconds since the boot; None if it does not say.

    It does where CRIU tracks memory (criu/image.c, inventory_save_uptime): in hundredths of a second, after all was
    marked as clean and while nothing runs.
    """
    entry = _read_inventory(directory)
    return entry.dump_uptime if entry and entry.HasField("dump_uptime") else None  # type: ignore[attr-defined]


def run_id(directory: Path) -> str:
    """Return the name that the CRIU had which made the dump in a directory; "" if its inventory has none."""
    entry = _read_inventory(directory)
    return str(entry.dump_criu_run_id) if entry else ""  # type: ignore[attr-defined]


def _read_inventory(directory: Path) -> Message | None:
    try:
        data = read_bounded(directory / INVENTORY_NAME, _MAX_INVENTORY_BYTES)
        head, body = data[: _TWO_NUMBERS.size], data[_TWO_NUMBERS.size :]
        if head != _TWO_NUMBERS.pack(_INVENTORY_MAGIC, len(body)):
            return None
        return decode("inventory_entry", body, INVENTORY_NAME, len(head))
    except (OSError, ImageError):
        return None


def now_us() -> int:
    """Return the time as `dumped_us` does."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def encode_inventory(**fields: int | str) -> bytes:
    """Return an inventory with its version, and with fields of `inventory_entry`."""
    body = message_class("inventory_entry")(img_version=2, **fields).SerializeToString()
    return _TWO_NUMBERS.pack(_INVENTORY_MAGIC, len(body)) + body
