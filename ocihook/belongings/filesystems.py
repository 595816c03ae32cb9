"""Finds what ends with a container: its rootfs, overlayfs's directory of changes to it, volumes of its pod."""

import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import UnsupportedError

ROOTFS = "rootfs"
_SHM = "/dev/shm"  # noqa: S108 - a mount point, nothing is made there
# The kubelet's emptyDir; podman's volumes without a name, which are removed with their container.
_ENDS_WITH_POD = re.compile(r"/kubernetes\.io~empty-dir/[^/]+/?$|/volumes/[0-9a-f]{64}/_data/?$")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")  # of mountinfo (proc(5)), and of overlayfs in its options


class Rootfs(NamedTuple):
    """A mounted rootfs."""

    merged: Path  # as the container sees it
    upper: Path | None  # its changes, as overlayfs keeps them; None: it cannot be written to


def volumes_of(spec: Mapping[str, Any]) -> dict[str, Path]:
    """Return the volumes that end with a container or its pod, by where the container has them.

    No engine's archive has them, and a new pod's are empty. Its /dev/shm is one of them, unless it is the node's.

    Args:
        spec: config.json of its bundle.
    """
    found = {}
    for mount in spec.get("mounts") or ():
        source, destination = str(mount.get("source", "")), str(mount.get("destination", ""))
        is_shm = os.path.normpath(destination) == _SHM and source.startswith("/") and os.path.normpath(source) != _SHM
        if is_shm or _ENDS_WITH_POD.search(source):
            found[destination] = Path(source)
    return found


def places_of(spec: Mapping[str, Any], bundle: Path) -> dict[str, Path]:
    """Return the directories of belongings, by the prefix of their names in a tar.

    Args:
        spec: config.json of its bundle.
        bundle: the bundle.
    """
    volumes = {f"volumes/{urllib.parse.quote(name, safe='')}": path for name, path in volumes_of(spec).items()}
    return {ROOTFS: rootfs_of(spec, bundle), **volumes}


def rootfs_of(spec: Mapping[str, Any], bundle: Path) -> Path:
    """Return where a bundle's rootfs is mounted."""
    return bundle / str((spec.get("root") or {}).get("path", "rootfs"))


def find_rootfs(merged: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Rootfs:
    """Find the directory with the changes of a mounted rootfs.

    Args:
        merged: where it is mounted.
        mountinfo: of a process that sees it.

    Raises:
        UnsupportedError: if it is not an overlay, so that what was changed is not known.
        OSError: if it is not there.
    """
    fd = os.open(merged, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        number = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
    finally:
        os.close(fd)
    for line in mountinfo.read_text().splitlines():  # proc(5): id ... options - type source super-options
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :]
        if number and fields[0] == number[1] and kind == "overlay":
            return Rootfs(merged, _upper(options))
    raise UnsupportedError(
        f"the rootfs {merged} is not an overlay, so what the container has changed in it is not known",
        hint="let its engine keep containers by overlayfs: its storage driver, or snapshotter",
    )


def _upper(options: str) -> Path | None:
    """Return upperdir of overlayfs's options; commas in a path have a backslash."""
    for option in re.split(r"(?<!\\),", _ESCAPE.sub(_unescape_octal, options)):
        if option.startswith("upperdir="):
            return Path(_ESCAPE.sub(r"\1", option.removeprefix("upperdir=")))
    return None


def _unescape_octal(match: re.Match[str]) -> str:
    return chr(int(match[1], 8)) if len(match[1]) == 3 else match[0]
