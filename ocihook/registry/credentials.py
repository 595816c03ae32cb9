"""Credentials for registries, from the files that `podman login`, `skopeo login` and `docker login` write.

Format: containers-auth.json(5). Credential helpers are not asked.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.errors import ConfigError, plain

_MAX_FILE_BYTES = 1 << 20
_DOCKER_HUB = ("docker.io", "https://index.docker.io/v1/")


class Credentials(NamedTuple):
    """A name and a password, or a token by which others are requested."""

    user: str
    password: str
    refresh_token: str = ""

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_credentials(registry: str, repository: str, auth_file: Path | None = None) -> Credentials | None:
    """Return the credentials for a repository, None if there are none.

    Args:
        registry: host with port.
        repository: name; an entry for it, or for a part of its path, is preferred to one for the registry.
        auth_file: the only file to look into; else $REGISTRY_AUTH_FILE is, else those of podman and docker.

    Raises:
        ConfigError: if a file cannot be read or is malformed.
    """
    for path in _files(auth_file):
        entries = _read(path).get("auths") or {}
        for key in _keys(registry, repository):
            entry = entries.get(key) if isinstance(entries, Mapping) else None
            if isinstance(entry, Mapping) and (entry.get("auth") or entry.get("identitytoken")):
                return _decode(entry, key, path)
    return None


def _files(auth_file: Path | None) -> Iterator[Path]:
    if named := auth_file or os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
        return
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    podman = Path(runtime, "containers") if runtime else Path(f"/run/containers/{os.getuid()}")
    home = Path(os.environ.get("HOME") or "/")
    places = (podman / "auth.json", home / ".config/containers/auth.json", home / ".docker/config.json")
    yield from filter(Path.exists, places)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"credentials cannot be read: {plain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _keys(registry: str, repository: str) -> Iterator[str]:
    parts = [registry, *repository.split("/")]
    for count in range(len(parts), 0, -1):
        yield "/".join(parts[:count])
    yield from (f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/")  # as docker wrote them
    if registry == _DOCKER_HUB[0]:
        yield _DOCKER_HUB[1]


def _decode(entry: Mapping[str, Any], key: str, path: Path) -> Credentials:
    try:
        decoded = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the entry {key!r} is damaged", hint="log in again") from error
    user, _, password = decoded.rstrip("\0").partition(":")
    return Credentials(user, password, str(entry.get("identitytoken") or ""))
