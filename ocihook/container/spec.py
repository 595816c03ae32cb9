"""What of a bundle must be the same for processes to resume in another one."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import UnsupportedError

_IMAGES = ("io.kubernetes.cri-o.ImageRef", "io.kubernetes.cri.image-name")  # of CRI-O, a digest; of containerd
_STORAGE = re.compile(r"(?P<root>/.+)/\w+-containers/(?P<id>[0-9a-f]{64})/userdata")  # bundles of containers/storage


class SpecFacts(NamedTuple):
    """What of a bundle must be the same for processes to resume in it."""

    image: str  # by id or digest where the engine records it, else by name; "" where it records nothing
    mounts: tuple[str, ...]  # where they are in the container
    user: str  # uid:gid of the first process, and further groups
    namespaces: tuple[str, ...]
    devices: tuple[str, ...]  # their paths
    has_terminal: bool


def spec_facts(config: Mapping[str, Any], bundle: Path) -> SpecFacts:
    """Return what counts of a bundle's config.json.

    Raises:
        UnsupportedError: if it is not one.
    """
    try:
        process, linux = config.get("process") or {}, config.get("linux") or {}
        user = process.get("user") or {}
        return SpecFacts(
            image=_image(config.get("annotations") or {}, bundle),
            mounts=tuple(sorted({os.path.normpath(mount["destination"]) for mount in config.get("mounts") or ()})),
            user=":".join(
                str(part) for part in (user.get("uid", 0), user.get("gid", 0), *user.get("additionalGids", ()))
            ),
            namespaces=tuple(sorted({namespace["type"] for namespace in linux.get("namespaces") or ()})),
            devices=tuple(sorted({device["path"] for device in linux.get("devices") or ()})),
            has_terminal=bool(process.get("terminal")),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise UnsupportedError(f"{bundle}/config.json is not one that a runtime accepts: {error!r}") from error


def _image(annotations: Mapping[str, str], bundle: Path) -> str:
    """Return the image: podman writes it into no bundle, but its storage has it."""
    named = next((annotations[name] for name in _IMAGES if annotations.get(name)), "")
    found = _STORAGE.fullmatch(str(bundle))
    if named.startswith("sha256:") or "@sha256:" in named or not found:
        return named
    try:
        containers = json.loads((Path(found["root"]) / f"{_kind(bundle)}-containers/containers.json").read_bytes())
        return next((str(entry["image"]) for entry in containers if entry["id"] == found["id"]), named)
    except (OSError, ValueError, KeyError, TypeError):
        return named


def _kind(bundle: Path) -> str:
    return bundle.parts[-3].removesuffix("-containers")
