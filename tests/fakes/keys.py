"""Key files for encrypted stores."""

import secrets
from pathlib import Path

from ocihook.packs.cipher import KeySource


def make_keys(directory: Path, *keys: str) -> KeySource:
    """Write a key file, the newest key first; by default with one new key."""
    path = directory / "store.keys"
    path.write_text("# newest first\n" + "".join(f"{key}\n" for key in keys or (secrets.token_hex(32),)))
    path.chmod(0o600)
    return KeySource(str(path))
