"""A node whose kernel seems to mark what is written (soft-dirty bits), wherever tests run.

CRIU and ocihook note what they know of the kernel; both notes are in a /run of the test's own. To CRIU all pages are
then clean, as they are on a kernel that has the bits, once they have been cleared and while nothing runs.
"""

from pathlib import Path

from integration.namespace import Namespace
from ocihook.linux.soft_dirty import note as note_soft_dirty

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


def seem_to_have_soft_dirty(node: Namespace, *, works: bool = True) -> None:
    """Have CRIU and ocihook rely on bits that this kernel need not have; or have both believe that it has none."""
    node.run("criu", "check", check=False)
    (facts,) = (path for name in _FACTS if (path := node.path(name)).exists())
    content = bytearray(facts.read_bytes())
    content[_HAS_DIRTY_TRACK] = works
    facts.write_bytes(content)
    runtime_dir = node.path("/run/ocihook")
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    note_soft_dirty(runtime_dir, works=works)


def note(node: Namespace, python: str, site: Path, *, works: bool) -> None:
    """Have the ocihook that `python` finds in `site` believe something of the kernel."""
    node.run(python, "-c", _NOTE, *(["works"] if works else []), PYTHONPATH=str(site))


def track_memory(node: Namespace) -> None:
    """Have CRIU track memory, and look for a parent that nobody makes but ocihook."""
    seem_to_have_soft_dirty(node)
    for path in node.path("/etc/criu").glob("*.conf"):
        path.write_text(path.read_text() + _TRACKING)


def lose_soft_dirty(node: Namespace) -> None:
    """Have all find out what this kernel can, and track nothing: another node, or this one with another kernel."""
    for name in (*_FACTS, _OUR_NOTE):
        node.path(name).unlink(missing_ok=True)
    for path in node.path("/etc/criu").glob("*.conf"):
        path.write_text(path.read_text().replace(_TRACKING, ""))
