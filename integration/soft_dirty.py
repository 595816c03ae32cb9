"""A node whose kernel seems to mark what is written (soft-dirty bits), wherever tests run.

CRIU and ocihook note what they know of the kernel; both notes are in a /run of the test's own. To CRIU all pages are
then clean, as they are on a kernel that has the bits, once they have been cleared and while nothing runs.
"""

import sys
from pathlib import Path

from integration.namespace import Namespace
from integration.podman.engine import SITE, Podman

_FACTS = ("/run/criu.kdat", "/run/criu/criu.kdat")  # by version of CRIU
_OUR_NOTE = "/run/ocihook/soft-dirty.json"
_TRACKING = "\ntrack-mem\nprev-images-dir /\n"
_HAS_DIRTY_TRACK = 32  # byte of criu/include/kerndat.h's struct kerndat_s, in CRIU 3.17 to 4.2

_NOTE = """
import sys
from pathlib import Path
from ocihook.linux.soft_dirty import note
Path("/run/ocihook").mkdir(mode=0o700, exist_ok=True)
note(Path("/run/ocihook"), works=sys.argv[1:] == ["works"])
"""


def seem_to_have_soft_dirty(podman: Podman) -> None:
    """Have CRIU and ocihook rely on bits that this kernel need not have."""
    podman.namespace.run("criu", "check", check=False)
    (facts,) = (path for name in _FACTS if (path := podman.namespace.path(name)).exists())
    content = bytearray(facts.read_bytes())
    content[_HAS_DIRTY_TRACK] = 1
    facts.write_bytes(content)
    note(podman.namespace, sys.executable, SITE, works=True)


def note(namespace: Namespace, python: str, site: Path, *, works: bool) -> None:
    """Have the ocihook that `python` finds in `site` believe something of the kernel."""
    namespace.run(python, "-c", _NOTE, *(["works"] if works else []), PYTHONPATH=str(site))


def track_memory(podman: Podman) -> None:
    """Have CRIU track memory, and look for a parent that nobody makes but ocihook."""
    seem_to_have_soft_dirty(podman)
    for path in podman.namespace.path("/etc/criu").glob("*.conf"):
        path.write_text(path.read_text() + _TRACKING)


def lose_soft_dirty(podman: Podman) -> None:
    """Have all find out what this kernel can, and track nothing: another node, or this one with another kernel."""
    for name in (*_FACTS, _OUR_NOTE):
        podman.namespace.path(name).unlink(missing_ok=True)
    for path in podman.namespace.path("/etc/criu").glob("*.conf"):
        path.write_text(path.read_text().replace(_TRACKING, ""))
