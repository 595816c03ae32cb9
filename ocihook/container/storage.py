"""Where podman and CRI-O keep containers and images: as containers-storage.conf(5) says, if there is one."""

import os
import tomllib
from pathlib import Path

DEFAULT_ROOT = Path("/var/lib/containers/storage")
_CONFS = (Path("/etc/containers/storage.conf"), Path("/usr/share/containers/storage.conf"))  # the first one counts


def storage_root() -> Path:
    """Return root's graphroot; what cannot be read says nothing."""
    named = os.environ.get("CONTAINERS_STORAGE_CONF")
    for path in (Path(named),) if named else _CONFS:
        try:
            root = tomllib.loads(path.read_text()).get("storage", {}).get("graphroot", "")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError):
            break
        return Path(root) if isinstance(root, str) and root.startswith("/") else DEFAULT_ROOT
    return DEFAULT_ROOT
