"""Makes up the images of an earlier dump: of pages that such a parent has, CRIU writes only those that are dirty.

CRIU follows a link `parent` in its image directory (criu/image.c) and reads there when that dump was made, and of each
process which pages it has. A process that it finds no pagemap of is dumped whole.
"""

import os
import shutil
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from ocihook.criu.images import INVENTORY_NAME

LINK_NAME = "parent"
PARENT_NAME = "ocihook-parent"  # what the link names: a directory beside it
PAGES_ID = 1
# The first line `prev-images-dir` of a configuration that is for all containers: no parent of anybody's is there.
NO_PARENT = "/"
_INVENTORY_MAGIC = 0x58313116  # criu/include/magic.h
_TWO_NUMBERS = struct.Struct("<II")


def link_target(directory: Path) -> str:
    """Return what an image directory names as its parent; "" for nothing."""
    try:
        return os.readlink(directory / LINK_NAME)
    except OSError:
        return ""


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
    (parent / INVENTORY_NAME).write_bytes(_inventory())
    (directory / LINK_NAME).symlink_to(PARENT_NAME)


def remove_parent(directory: Path) -> None:
    """Remove a parent that was made here, and a link that leads to none; anybody else's is left. May run any time.

    Raises:
        OSError: from the file system.
    """
    if link_target(directory) in (PARENT_NAME, NO_PARENT):
        (directory / LINK_NAME).unlink(missing_ok=True)
    if os.path.lexists(directory / PARENT_NAME):
        shutil.rmtree(directory / PARENT_NAME)


def _inventory() -> bytes:
    """Return an inventory (images/inventory.proto): its version, and when it was made, in microseconds since the boot.

    A process that has begun later is another one with the same pid, and dumped whole.
    """
    made_us = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    body = bytes([1 << 3, 2, 8 << 3]) + _varint(made_us)  # img_version = 1, dump_uptime = 8
    return _TWO_NUMBERS.pack(_INVENTORY_MAGIC, len(body)) + body


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
