"""A member's side of the transport: one request to the coordinator, waited for as long as anybody waits for it."""

import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ocihook import wire
from ocihook.config import Settings
from ocihook.errors import GangError, plain, printable
from ocihook.linux.patience import Patience
from ocihook.packs.frame import as_object, load_json

if TYPE_CHECKING:
    from http.client import HTTPConnection

_TIMEOUT_S = 10.0  # to connect, and for an answer beyond what the coordinator waits itself
_MAX_ANSWER_BYTES = 64 << 20


def load_http() -> None:
    """Import what is otherwise imported late: once, for all processes that are forked from this one."""
    import http.client  # noqa: F401 - it takes 20 ms


class Link(NamedTuple):
    """Where the coordinator is."""

    url: str = ""  # "": on this node
    tls_dir: str = ""
    socket: str = f"{wire.RUNTIME_DIR}/{wire.GANG_SOCKET_NAME}"

    @classmethod
    def of(cls, settings: Settings) -> "Link":
        """Return the one that is configured."""
        return cls(settings.coordinator, settings.tls_dir)

    def __str__(self) -> str:
        return f"the coordinator at {self.url or self.socket}"

    def ask(self, request: Mapping[str, Any] | None, patience: Patience) -> dict[str, Any]:
        """Send a member's request, or without one ask about all gangs; return the answer.

        Raises:
            GangError: if the coordinator refuses, or is not the one that the certificates name.
            OSError: if it cannot be reached, or does not answer; it can be asked again.
            GivenUp: as soon as nobody waits for it any more.
        """
        import http.client  # only members of gangs need it

        with contextlib.closing(self._connection()) as connection:
            body = None if request is None else json.dumps(request).encode()
            try:
                connection.request("POST" if body else "GET", "/", body)
                if not patience.within(_TIMEOUT_S).ready(connection.sock.fileno()):
                    raise TimeoutError(f"{self} does not answer")
                response = connection.getresponse()
                data = response.read(_MAX_ANSWER_BYTES)
            except http.client.HTTPException as error:
                raise ConnectionError(f"{self} closed the connection: {plain(error)}") from error
        try:
            answer: dict[str, Any] = as_object(load_json(data))
            if response.status == http.client.OK:
                return answer
            reason = str(answer["error"])
        except (ValueError, KeyError, TypeError) as error:
            raise GangError(f"{self} gave a malformed answer (status {response.status})") from error
        raise GangError(f"{self} refuses: {printable(reason)}")

    def _connection(self) -> "HTTPConnection":
        """Return a connection that is made."""
        from http.client import HTTPConnection, HTTPSConnection

        if self.url:
            import ssl

            from ocihook.gang.certificates import client_tls

            parts = urlsplit(self.url)
            tls = client_tls(Path(self.tls_dir))
            connection: HTTPConnection = HTTPSConnection(
                parts.hostname or "", parts.port, timeout=_TIMEOUT_S, context=tls
            )
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as error:  # to ask again would not change it
                raise unreachable(self, error) from error
            return connection
        connection = HTTPConnection("localhost", timeout=_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_TIMEOUT_S)
        try:
            connection.sock.connect(self.socket)
        except OSError:
            connection.close()
            raise
        return connection


def unreachable(link: Link, error: OSError) -> GangError:
    """Return the error for a coordinator that does not answer."""
    hint = "see whether `ocihook coordinator` runs there, and the certificates in tls_dir" if link.url else ""
    return GangError(f"{link} cannot be reached: {plain(error)}", hint=hint)
