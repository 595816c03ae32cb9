"""CRIU tracks memory in dumps of the handler's containers, and in no other: runtimes say so where a parent is named.

There is no earlier dump in /, the parent that is named: ocihook makes one up where it reads the memory itself
(memory/clean_pages.py). That clears the kernel's marks of what was written to, which an engine's own earlier dump
(podman's --pre-checkpoint) relies on: as soon as an engine makes one of a container, its dumps are the engine's alone.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ocihook.linux import soft_dirty
from ocihook.runtime.call import Call
from ocihook.runtime.containers import directory_of

_EARLIER_NAME = "earlier-dumps"  # is there once an engine has made one
_EARLIER = frozenset(("--pre-dump", "--parent-path"))
_NOT_TRACKED = frozenset(("--lazy-pages", "--page-server"))  # memory goes elsewhere


def checkpoint(call: Call) -> NoReturn:
    """Execute an engine's `checkpoint` of a container of ours, which is its last word, in our place.

    Raises:
        OSError: if it cannot be noted that there is an earlier dump; then none is made.
    """
    name, images = call.words[-1], call.options.get("--image-path", "")
    if _EARLIER & call.options.keys():
        (directory_of(name) / _EARLIER_NAME).touch()
    elif images and not _NOT_TRACKED & call.options.keys():
        at = len(call.prefix) + 1
        replace(call, words=(*call.words[:at], *parent_options(name, Path(images)), *call.words[at:])).pass_on()
    call.pass_on()


def parent_options(container_id: str, images: Path) -> list[str]:
    """Return what has CRIU track memory in a dump by a runtime; [] if the kernel cannot, or an engine's dumps need it.

    Args:
        container_id: whose dump it is.
        images: its directory, which need not exist yet.
    """
    if has_earlier_dumps(container_id) or not soft_dirty.works():
        return []
    # As runtimes see it, and as CRIU does behind links: above / there is / again.
    depth = max(len(path.parts) for path in (images.absolute(), images.resolve()))
    return ["--parent-path", "/".join([os.pardir] * depth)]


def has_earlier_dumps(container_id: str) -> bool:
    """Return whether an engine has made dumps of a container for later ones to build on."""
    return (directory_of(container_id) / _EARLIER_NAME).exists()
