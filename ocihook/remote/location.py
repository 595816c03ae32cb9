"""Opens a remote by its name."""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from ocihook.errors import ConfigError
from ocihook.packs.domain_names import DOMAIN_NAME, check_domain_name
from ocihook.remote.blobs import Blobs
from ocihook.remote.directory import DirectoryBlobs
from ocihook.remote.objects import ObjectRemote
from ocihook.remote.remote import Remote

if TYPE_CHECKING:
    from ocihook.registry.client import Repository

FORMS = (
    "an absolute path, s3://BUCKET/PREFIX?endpoint=URL&region=NAME&profile=NAME&checksums=when_required, or "
    "oci://REGISTRY/REPOSITORY?authfile=PATH&ca_file=PATH&plain_http=yes; what follows ? may lack"
)
_S3_OPTIONS = {"endpoint", "region", "profile", "checksums"}
_OCI_OPTIONS = {"authfile", "ca_file", "plain_http"}


def open_remote(location: str, domain: str) -> Remote:
    """Return a domain of the remote with this name.

    Raises:
        ConfigError: if no remote can have such a name.
        StoreError: if no domain can.
        RemoteError: if what it needs is not installed, or not configured.
    """
    check_domain_name(domain)
    if location.startswith("oci://"):
        from ocihook.remote.registry import RegistryRemote

        return RegistryRemote(_repository(location), domain)
    return ObjectRemote(_blobs(location), domain)


def remote_domains(location: str) -> list[str]:
    """Return the domains of a remote; anything else there is not ours.

    Raises:
        ConfigError: if no remote can have such a name.
        RemoteError: if it cannot be reached.
    """
    if location.startswith("oci://"):
        from ocihook.remote.registry import registry_domains

        names = registry_domains(_repository(location))
    else:
        names = _blobs(location).folders("domains/")
    return [name for name in names if DOMAIN_NAME.fullmatch(name)]


def _blobs(location: str) -> Blobs:
    if location.startswith("/"):
        return DirectoryBlobs(Path(location))
    parts = urlsplit(location)
    if parts.scheme == "s3" and parts.netloc:
        from ocihook.remote.s3 import S3Blobs

        return S3Blobs(parts.netloc, parts.path.strip("/"), **_options(location, parts.query, _S3_OPTIONS))
    raise _no_remote(location)


def _repository(location: str) -> "Repository":
    from ocihook.registry.client import Access, Reference, Repository

    parts = urlsplit(location)
    options = _options(location, parts.query, _OCI_OPTIONS)
    reference = Reference.parse(parts.netloc + parts.path)
    if reference.tag or reference.digest or options.get("plain_http", "yes") != "yes":
        raise _no_remote(location)
    auth_file, ca_file = (Path(options[key]) if key in options else None for key in ("authfile", "ca_file"))
    access = Access(auth_file, ca_file, plain_http="plain_http" in options)
    return Repository(reference.registry, reference.repository, access)


def _options(location: str, query: str, known: set[str]) -> dict[str, str]:
    options = parse_qs(query)
    if not options.keys() <= known or bool(query) != bool(options):
        raise _no_remote(location)
    return {key: row[0] for key, row in options.items()}


def _no_remote(location: str) -> ConfigError:
    return ConfigError(f"{location!r} is no remote", hint=f"use {FORMS}")
