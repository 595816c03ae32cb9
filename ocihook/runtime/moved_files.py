"""Moves open files, directories and watches in atomic volumes to where the new container has them.

A path in CRIU's images has the directory that `..data` led to at the checkpoint. The new volume has another one, so the
path is rewritten, where the new file has the same content, or a content that is expected to change.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from ocihook.container.atomic_volumes import AtomicVolume
from ocihook.criu.file_images import Moved, move_paths
from ocihook.errors import UnsupportedError, printable

_KINDS = ("token", "certificates")


def move_volumes(
    images: Path, then: Mapping[str, AtomicVolume], now: Mapping[str, AtomicVolume], config: Mapping[str, Any]
) -> bool:
    """Rewrite the paths of an image set that are in atomic volumes; return whether any has changed.

    Args:
        images: the image set.
        then: the volumes at the checkpoint, by their places in the container.
        now: those of the new container.
        config: config.json of the new container's bundle.

    Raises:
        UnsupportedError: naming a file that the new volume does not have, or has with another content.
        ImageError: if the image is damaged.
        OSError: if the image is missing, or cannot be read or written.
    """
    sources = {os.path.normpath(str(m["destination"])): Path(str(m.get("source"))) for m in config.get("mounts") or ()}

    def move(path: str) -> Moved | None:
        for place, where in _places_of(path, then):
            return _move(path, where, then[place], now.get(place), sources.get(place))
        return None

    return move_paths(images, move)


def _places_of(path: str, then: Mapping[str, AtomicVolume]) -> Iterator[tuple[str, str]]:
    """Yield the volumes that a path may be in, the likeliest first, each with its place as the path has it.

    A place in the configuration may lead through links of the image: /var/run/secrets is /run/secrets.
    """
    found = []
    for place, volume in then.items():
        where, is_in, _ = f"{path}/".partition(f"/{volume.directory}/")
        if is_in:
            found.append((_common_end(place, where), place, where))
    yield from ((place, where) for _, place, where in sorted(found, reverse=True))


def _common_end(one: str, other: str) -> int:
    """Return how many names at the end of two paths are equal."""
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _move(path: str, place: str, then: AtomicVolume, now: AtomicVolume | None, source: Path | None) -> Moved | None:
    if now is None or source is None:
        raise _refused(path, f"{place} is not a volume with `..data` now")
    name = path.removeprefix(f"{place}/{then.directory}").lstrip("/")
    found = source / now.directory / name
    if found.is_dir():
        return _at(place, now, name, None)
    before, after = then.files.get(name), now.files.get(name)
    if before is None:
        raise _refused(path, "the checkpoint does not have its content on record")
    if after is None:
        raise _refused(path, f"the volume has no {name} now")
    if before != after:
        raise _refused(path, "its content is another one now")
    return _at(place, now, name, found.stat().st_size if after in _KINDS else None)


def _at(place: str, now: AtomicVolume, name: str, size_bytes: int | None) -> Moved:
    return Moved("/".join(filter(None, (place, now.directory, name))), size_bytes)


def _refused(path: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        printable(f"a process uses {path}, which is not in the new container: {why}"),
        hint="start from scratch, or give the volume the content that it had",
    )
