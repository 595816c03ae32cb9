"""What this ocihook is: a tree that a package or an image installed, or a part of a Python environment.

Such a tree has every module it needs in PREFIX/lib/ocihook/RELEASE/site-packages, for each Python of `PYTHONS`, and
takes none from elsewhere; packaging/stage.py makes it. Releases never share a directory, so that no process ever
finds modules of two. A package's prefix is /usr: its launcher and units are its own files.
"""

import sys
from pathlib import Path

import ocihook

PYTHONS = ("3.14", "3.13", "3.12", "3.11")  # the first that a node has runs ocihook
PACKAGE_PREFIX = Path("/usr")
RELEASES_BELOW_PREFIX = Path("lib/ocihook")
LIBEXEC_BELOW_PREFIX = Path("libexec/ocihook")

PACKAGE_DIR = Path(ocihook.__file__).parent
SITE = PACKAGE_DIR.parent


def prefix() -> Path | None:
    """Return the prefix of the tree, None for a Python environment."""
    above = SITE.parents[3] if len(SITE.parents) > 3 else SITE
    return above if SITE.parent.parent == above / RELEASES_BELOW_PREFIX else None


def is_packaged() -> bool:
    """Return whether a package owns launcher and units."""
    return prefix() == PACKAGE_PREFIX


def command() -> list[str]:
    """Return what runs the `ocihook` command."""
    tree = prefix()
    return [str(tree / "bin/ocihook")] if tree else [sys.executable, "-m", "ocihook"]


def interpreters() -> list[str]:
    """Return the interpreters that a launcher tries in turn."""
    return [f"/usr/bin/python{version}" for version in PYTHONS] if prefix() else [sys.executable]
