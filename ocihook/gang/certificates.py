"""Certificates of nodes and of their coordinator: they authenticate one another by an authority of their own."""

import ssl
from pathlib import Path

from ocihook.errors import ConfigError, plain


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
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        context.load_verify_locations(directory / "ca.crt")
    except OSError as error:
        hint = "it needs tls.crt, tls.key and ca.crt"
        why = "one is damaged, or the key is another's" if isinstance(error, ssl.SSLError) else plain(error)
        raise ConfigError(f"the certificates in {directory} cannot be used: {why}", hint=hint) from error
    return context
