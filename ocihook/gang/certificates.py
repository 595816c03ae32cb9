"""Certificates of nodes and of their coordinator: they authenticate one another by an authority of their own."""

import logging
import ssl
from pathlib import Path

from ocihook.errors import ConfigError, plain

_CHAIN, _KEY, _AUTHORITY = "tls.crt", "tls.key", "ca.crt"

log = logging.getLogger(__name__)


class ServerTls:
    """What a coordinator accepts clients with: read again whenever the files have changed."""

    def __init__(self, directory: Path) -> None:
        """Read a directory.

        Raises:
            ConfigError: if files are missing or wrong.
        """
        self._directory = directory
        self._seen = self._look()
        self._context = server_tls(directory)

    def context(self) -> ssl.SSLContext:
        """Return what the next client is accepted with: as before, where the new files cannot be used."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = server_tls(self._directory)
            except ConfigError as error:  # some may be there and others not yet
                log.warning("what was read before is used further: %s", error)
        return self._context

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(self._directory / name) for name in (_CHAIN, _KEY, _AUTHORITY)]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def client_tls(directory: Path) -> ssl.SSLContext:
    """Return what a node reaches the coordinator with: it must have the name that it is reached by.

    Raises:
        ConfigError: if files are missing or wrong.
    """
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), directory)


def server_tls(directory: Path) -> ssl.SSLContext:
    """Return what accepts every client with a certificate of the authority in `ca.crt`.

    Raises:
        ConfigError: if files are missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # a client that waits for an answer would wake for them
    return _load(context, directory)


def _load(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    """Load a directory's files into a context; they are named as in Kubernetes' TLS secrets."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(directory / _CHAIN, directory / _KEY)
        context.load_verify_locations(directory / _AUTHORITY)
    except OSError as error:
        hint = f"it needs {_CHAIN}, {_KEY} and {_AUTHORITY}"
        why = "one is damaged, or the key is another's" if isinstance(error, ssl.SSLError) else plain(error)
        raise ConfigError(f"the certificates in {directory} cannot be used: {why}", hint=hint) from error
    return context
