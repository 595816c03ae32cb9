"""Opens a remote by its name."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ocihook.errors import ConfigError
from ocihook.remote.blobs import Blobs
from ocihook.remote.directory import DirectoryBlobs
from ocihook.remote.objects import ObjectRemote
from ocihook.remote.remote import Remote

FORMS = (
    "an absolute path, or s3://BUCKET/PREFIX?endpoint=URL&region=NAME&profile=NAME, of which all but BUCKET may lack"
)


def open_remote(location: str, domain: str) -> Remote:
    """Return a domain of the remote that has a name.

    Raises:
        ConfigError: if no remote can have such a name.
        RemoteError: if what it needs is not installed, or not configured.
    """
    return ObjectRemote(_open_blobs(location), domain)


def remote_domains(location: str) -> list[str]:
    """Return the domains of a remote.

    Raises:
        ConfigError: if no remote can have such a name.
        RemoteError: if it cannot be reached.
    """
    return _open_blobs(location).folders("domains/")


def _open_blobs(location: str) -> Blobs:
    parts = urlsplit(location)
    if parts.scheme in {"", "file"} and not parts.netloc and parts.path.startswith("/"):
        return DirectoryBlobs(Path(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        from ocihook.remote.s3 import S3Blobs

        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        if options.keys() <= {"endpoint", "region", "profile"}:
            return S3Blobs(parts.netloc, parts.path.strip("/"), **{key: row[0] for key, row in options.items()})
    raise ConfigError(f"{location!r} is no remote", hint=f"use {FORMS}")
