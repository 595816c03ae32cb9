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
from ocihook.gang.protocol import LONGEST_WAIT_S
from ocihook.linux.patience import Patience
from ocihook.packs.frame import as_object, load_json

if TYPE_CHECKING:
    from http.client import HTTPConnection

_TIMEOUT_S = 10.0  # to connect
_ANSWER_S = LONGEST_WAIT_S + 10.0
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
            GivenUp: once its caller has given up.
        """
        with contextlib.closing(Line(self)) as line:
            return line.ask(request, patience)

    def connect(self) -> "HTTPConnection":
        """Return a new connection.

        Raises:
            GangError: if the coordinator is not the one that the certificates name.
            OSError: if it cannot be reached.
        """
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


class Line:
    """A connection to a coordinator, made when it is needed and kept for what is asked next."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._connection: HTTPConnection | None = None

    def ask(self, request: Mapping[str, Any] | None, patience: Patience) -> dict[str, Any]:
        """Do as `Link.ask`. What is asked may come twice, if the connection ends meanwhile."""
        if self._connection is not None:
            try:
                return self._ask(request, patience)
            except TimeoutError:
                raise
            except OSError:  # it was closed, as nothing was asked for a while: a new one
                pass
        return self._ask(request, patience)

    def __del__(self) -> None:
        """Close it with whoever has used it."""
        self.close()

    def close(self) -> None:
        """Close it; it is made again if it is needed."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, request: Mapping[str, Any] | None, patience: Patience) -> dict[str, Any]:
        import http.client  # only members of gangs need it

        body = None if request is None else json.dumps(request).encode()
        try:
            self._connection = connection = self._connection or self._link.connect()
            connection.request("POST" if body else "GET", "/", body)
            if not patience.within(_ANSWER_S).ready(connection.sock.fileno()):
                raise TimeoutError(f"{self._link} does not answer")
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES)
            if response.will_close:
                self.close()
        except BaseException as error:  # whatever comes over it now belongs to no other request
            self.close()
            if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
                raise ConnectionError(f"{self._link} closed the connection: {plain(error)}") from error
            raise
        try:
            answer: dict[str, Any] = as_object(load_json(data))
            if response.status == http.client.OK:
                return answer
            reason = str(answer["error"])
        except (ValueError, KeyError, TypeError) as error:
            raise GangError(f"{self._link} gave a malformed answer (status {response.status})") from error
        raise GangError(f"{self._link} refuses: {printable(reason)}")


def unreachable(link: Link, error: OSError) -> GangError:
    """Return the error for a coordinator that does not answer."""
    hint = "see whether `ocihook coordinator` runs there, and the certificates in tls_dir" if link.url else ""
    return GangError(f"{link} cannot be reached: {plain(error)}", hint=hint)
