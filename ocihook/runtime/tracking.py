"""CRIU tracks memory in dumps of the handler's containers, and in no other: runtimes say so where a parent is named.

There is no earlier dump in /, the parent that is named: ocihook makes one up where it reads the memory itself
(memory/clean_pages.py). What an engine compares with its own earlier dumps stays as it was called, and is made whole
where these have become too old by that (memory/earlier_dumps.py).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ocihook.linux import soft_dirty
from ocihook.runtime.call import Call

# A call with an earlier dump of the engine's own, or whose memory goes elsewhere.
_PASSED_ON = frozenset(("--pre-dump", "--parent-path", "--lazy-pages", "--page-server"))


def checkpoint(call: Call) -> NoReturn:
    """Execute an engine's `checkpoint` of a container of ours in our place."""
    images = call.options.get("--image-path", "")
    if images and not _PASSED_ON & call.options.keys():
        at = len(call.prefix) + 1
        call = replace(call, words=(*call.words[:at], *parent_options(Path(images)), *call.words[at:]))
    call.pass_on()


def parent_options(images: Path) -> list[str]:
    """Return what has CRIU track memory in a dump by a runtime into a directory, which need not exist yet.

    It is [] if the kernel cannot.
    """
    if not soft_dirty.works():
        return []
    # As runtimes see it, and as CRIU does behind links: above / there is / again.
    depth = max(len(path.parts) for path in (images.absolute(), images.resolve()))
    return ["--parent-path", "/".join([os.pardir] * depth)]
