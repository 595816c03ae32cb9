"""A node whose kernel seems to mark what is written (soft-dirty bits), wherever tests run.

CRIU and ocihook note what they know of the kernel; both notes are in a /run of the test's own. To CRIU all pages are
then clean, as they are on a kernel that has the bits, once they have been cleared and while nothing runs.
"""

import sys

from integration.podman.engine import SITE, Podman

_HAS_DIRTY_TRACK = 32  # byte of criu/include/kerndat.h's struct kerndat_s, in CRIU 3.17 to 4.2

_NOTE = """
from pathlib import Path
from ocihook.linux.soft_dirty import note
Path("/run/ocihook").mkdir(mode=0o700, exist_ok=True)
note(Path("/run/ocihook"), works={works})
"""


def seem_to_have_soft_dirty(podman: Podman, *, works: bool = True) -> None:
    """Have CRIU and ocihook rely on bits that this kernel need not have; or have both believe that it has none."""
    podman.namespace.run("criu", "check", check=False)
    (facts,) = (
        path for name in ("criu.kdat", "criu/criu.kdat") if (path := podman.namespace.path(f"/run/{name}")).exists()
    )
    content = bytearray(facts.read_bytes())
    content[_HAS_DIRTY_TRACK] = works
    facts.write_bytes(content)
    podman.namespace.run(sys.executable, "-c", _NOTE.format(works=works), PYTHONPATH=str(SITE))


def track_memory(podman: Podman) -> None:
    """Have CRIU track memory, and look for a parent that nobody makes but ocihook."""
    seem_to_have_soft_dirty(podman)
    for path in podman.namespace.path("/etc/criu").glob("*.conf"):
        path.write_text(f"{path.read_text()}\ntrack-mem\nprev-images-dir /\n")
