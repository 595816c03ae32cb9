"""Where a restored container has addresses that it had: reported, not changed, as only it knows what they are for."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ocihook.linux.files import open_inside
from ocihook.net.netlink import Route

_FILES = ("/etc/hosts", "/etc/resolv.conf")
_MAX_BYTES = 1 << 20


def carriers(init_pid: int, moved: Mapping[str, str]) -> Iterator[str]:
    """Yield in words what of a restored container names addresses that it no longer has.

    Args:
        init_pid: its first process.
        moved: new addresses by old ones.
    """
    if not moved:
        return
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{init_pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            for old in _named(value, moved):
                yield f"its environment has {old} in {name!r}; the address is {moved[old]} now"
    for path in _FILES:
        for old in _named(_content(init_pid, path), moved):
            yield f"its {path} has {old}; the address is {moved[old]} now"


def strayed(had: Iterable[Route], has: Iterable[Route], moved: Mapping[str, str]) -> Iterator[str]:
    """Yield routes that name an address which is no more, or that went by a gateway and lead nowhere now, in words.

    Args:
        had: those of the container's network at its dump, which CRIU does not keep.
        has: those of the network that it is in now.
        moved: new addresses by old ones.
    """
    here = list(has)
    for route in here:
        for old in (route.gateway, route.destination.partition("/")[0]):
            if old in moved:
                yield f"its route to {route.destination} has {old}; the address is {moved[old]} now"
    known = {route.destination for route in here}
    for route in had:
        if route.gateway and route.destination not in known:
            yield f"it had a route to {route.destination} by {route.gateway}, and has none where it is restored"


def _named(text: str, moved: Mapping[str, str]) -> Iterator[str]:
    for old in moved:
        if re.search(rf"(?<![0-9a-fA-F.:]){re.escape(old)}(?![0-9a-fA-F]|\.[0-9])", text):
            yield old


def _content(init_pid: int, path: str) -> str:
    with contextlib.suppress(OSError):
        fd = open_inside(init_pid, path)
        with open(fd, "rb") as file:
            return file.read(min(os.fstat(fd).st_size, _MAX_BYTES)).decode(errors="replace")
    return ""
