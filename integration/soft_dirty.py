"""A node whose kernel seems to mark what is written (soft-dirty bits), wherever tests run.

CRIU and ocihook note what they know of the kernel; both notes are in a /run of the test's own. To CRIU all pages are
then clean, as they are on a kernel that has the bits, once they have been cleared and while nothing runs.
"""

from integration.namespace import Namespace
from ocihook.linux.soft_dirty import note

_HAS_DIRTY_TRACK = 32  # byte of criu/include/kerndat.h's struct kerndat_s, in CRIU 3.17 to 4.2


def seem_to_have_soft_dirty(node: Namespace) -> None:
    """Have CRIU and ocihook rely on bits that this kernel need not have."""
    node.run("criu", "check", check=False)
    (facts,) = (path for name in ("criu.kdat", "criu/criu.kdat") if (path := node.path(f"/run/{name}")).exists())
    content = bytearray(facts.read_bytes())
    content[_HAS_DIRTY_TRACK] = 1
    facts.write_bytes(content)
    runtime_dir = node.path("/run/ocihook")
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    note(runtime_dir, works=True)


def track_memory(node: Namespace) -> None:
    """Have CRIU track memory, and look for a parent that nobody makes but ocihook."""
    seem_to_have_soft_dirty(node)
    for path in node.path("/etc/criu").glob("*.conf"):
        path.write_text(f"{path.read_text()}\ntrack-mem\nprev-images-dir /\n")
