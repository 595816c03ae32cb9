"""Volumes whose files are replaced all at once: ConfigMaps, Secrets, projected tokens, and others of the same form.

Their writer (Kubernetes pkg/volume/util/atomic_writer.go) puts files into a directory with a time in its name and lets
the link `..data` lead there. Programs that open a file through the link have that directory in their paths.
"""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DATA_LINK = "..data"
_DIRECTORY = re.compile(r"\.\.[^/]+")  # a sibling of the link: neither absolute, nor elsewhere
_MOST_BYTES = 64 << 20  # of a volume; a ConfigMap or Secret has 1 MiB at most, a projected volume several of them
_MOST_NAMES_BYTES = 128 << 10  # of all volumes, in a record
# Contents that are issued anew for each pod, or for a cluster: a JSON Web Token (RFC 7519), certificates (RFC 7468).
_TOKEN = re.compile(rb"eyJ[\w-]*\.eyJ[\w-]*\.[\w-]*\s*")
_CERTIFICATES = b"-----BEGIN CERTIFICATE-----"


class AtomicVolume(NamedTuple):
    """A volume as it was at one moment."""

    directory: str  # name of what `..data` leads to
    files: Mapping[str, str]  # by path below it: digest, or a kind of content that may change
    is_whole: bool = True  # all of its files are in the record


def read_atomic_volumes(config: Mapping[str, Any], seen: Path = Path("/")) -> dict[str, AtomicVolume]:
    """Return the atomic volumes of a bundle, by their places in the container; what is of no such form is left out.

    Args:
        config: config.json of the bundle.
        seen: where the root of the process lies that sees the sources of its mounts.
    """
    found = {}
    left = _MOST_NAMES_BYTES
    for mount in config.get("mounts") or ():
        source = str(mount.get("source") or "")
        place = os.path.normpath(mount["destination"])
        if source.startswith("/") and (volume := _read(seen / source.lstrip("/"), left)):
            found[place] = volume
            left -= sum(map(_record_bytes, volume.files))
    return found


def data_directory(volume: Path) -> str:
    """Return the name of the directory that `..data` of a volume leads to; "" if it is not an atomic volume."""
    try:
        name = os.readlink(volume / DATA_LINK)
        is_one = _DIRECTORY.fullmatch(name) is not None and stat.S_ISDIR(os.lstat(volume / name).st_mode)
    except (OSError, ValueError):
        return ""
    return name if is_one and name != DATA_LINK else ""


def _read(volume: Path, most_names_bytes: int) -> AtomicVolume | None:
    directory = data_directory(volume)
    if not directory:
        return None
    files: dict[str, str] = {}
    left_bytes = _MOST_BYTES
    for path in _paths(volume / directory):
        name = str(path.relative_to(volume / directory))
        most_names_bytes -= _record_bytes(name)
        with contextlib.suppress(OSError):  # replaced in this moment: it is in the next directory
            content = _content(path, left_bytes)
            if content is None:
                continue
            left_bytes -= len(content)
            if most_names_bytes < 0 or left_bytes < 0:
                return AtomicVolume(directory, files, is_whole=False)
            files[name] = _kind(content)
    return AtomicVolume(directory, files)


def _record_bytes(name: str) -> int:
    return len(name.encode("unicode_escape", "surrogatepass")) + 64


def _paths(directory: Path) -> Iterator[Path]:
    for place, names, others in os.walk(directory):
        names.sort()
        yield from (Path(place, name) for name in sorted(others))


def _content(path: Path, most_bytes: int) -> bytes | None:
    """Return the content of a plain file, of a larger one a byte more than the limit; None if it is anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(file.fileno())
        return file.read(min(status.st_size, most_bytes) + 1) if stat.S_ISREG(status.st_mode) else None


def _kind(content: bytes) -> str:
    if _TOKEN.fullmatch(content):
        return "token"
    if content.startswith(_CERTIFICATES):
        return "certificates"
    return hashlib.sha256(content).hexdigest()
