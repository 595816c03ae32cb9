"""The coordinator's side of the transport: HTTP over a Unix socket on one node, over mutual TLS between nodes.

The transport authenticates the client: on a Unix socket as root of this node, over TLS by the name in a certificate of
the coordinator's own authority. A request is read whole before it is refused, so that the client sees why.
"""

import contextlib
import json
import logging
import resource
import socket
import socketserver
import ssl
import struct
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

from ocihook import __version__
from ocihook.errors import OcihookError, plain
from ocihook.gang.certificates import ServerTls
from ocihook.gang.coordinator import Coordinator
from ocihook.packs.frame import as_object, load_json

MAX_REQUEST_BYTES = 16 << 20  # connections of one member: some 100,000
_TIMEOUT_S = 10.0  # for a client's handshake
_IDLE_S = 600.0  # for it to send its next request: its member may be at work meanwhile
_SWITCH_S = 5.0
_UCRED = struct.Struct("3i")  # pid, uid, gid: socket(7), SO_PEERCRED
_PIECE = 1 << 16

log = logging.getLogger(__name__)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection; the server has the coordinator."""

    protocol_version = "HTTP/1.1"  # connections are kept: a handshake costs more than a request
    timeout: ClassVar[float | None] = _IDLE_S
    wbufsize = -1  # an answer is sent at once, not its head and then, when that is acknowledged, the rest
    server: socketserver.BaseServer

    @property
    def _server(self) -> "_Server":
        assert isinstance(self.server, _Server)
        return self.server

    @property
    def _coordinator(self) -> Coordinator:
        return self._server.coordinator

    def do_POST(self) -> None:
        """Answer a member."""
        self._server.asked()
        try:
            data = self._body()
            if data is None:
                self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"more than {MAX_REQUEST_BYTES} bytes"})
                return
            self._say(HTTPStatus.OK, self._coordinator.handle(self._peer(), as_object(load_json(data))))
        except PermissionError as error:
            self._say(HTTPStatus.FORBIDDEN, {"error": str(error)})
        except (OcihookError, ValueError) as error:
            self._say(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def do_GET(self) -> None:
        """Report all gangs."""
        try:
            self._peer()
            self._say(HTTPStatus.OK, {"version": __version__, "gangs": self._coordinator.status()})
        except PermissionError as error:
            self._say(HTTPStatus.FORBIDDEN, {"error": str(error)})
        except (OcihookError, OSError) as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": plain(error)})

    def _body(self) -> bytes | None:
        """Read all that the client sends; None if that is too much."""
        left = int(self.headers.get("Content-Length") or 0)
        is_small = left <= MAX_REQUEST_BYTES
        pieces = []
        while left > 0 and (piece := self.rfile.read(min(left, _PIECE))):
            left -= len(piece)
            if is_small:
                pieces.append(piece)
        return b"".join(pieces) if is_small else None

    def _peer(self) -> str:
        """Return the node that sends the request.

        Raises:
            PermissionError: if it may not.
        """
        if isinstance(self.connection, ssl.SSLSocket):
            return common_name(self.connection.getpeercert())
        _, uid, _ = _UCRED.unpack(self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != 0:
            raise PermissionError(f"user {uid} is not root")
        return ""

    def _say(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.close_connection |= status != HTTPStatus.OK  # not all of the request may have been read
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Keep each request out of the log."""


def common_name(certificate: Any) -> str:  # noqa: ANN401 - as ssl.SSLSocket.getpeercert returns it
    """Return the name of a certificate's owner.

    Raises:
        PermissionError: if it has none.
    """
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName" and value:
                return str(value)
    raise PermissionError("the certificate names nobody (CN)")


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers each request in a thread of its own."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        listener: socket.socket,
        coordinator: Coordinator,
        tls: ServerTls | None,
        asked: Callable[[], object],
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.coordinator, self._tls, self.asked = listener, coordinator, tls, asked

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Answer one; a handshake holds up nobody but its client."""
        if self._tls is not None:
            request.settimeout(_TIMEOUT_S)
            request = self._tls.context().wrap_socket(request, server_side=True)
        try:
            super().finish_request(request, client_address)
        finally:
            if self._tls is not None:
                with contextlib.suppress(OSError):
                    request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - likewise
        """Log that a client was not answered."""
        log.warning("a request was not answered: %s", client_address or "this node", exc_info=log.isEnabledFor(10))


def expect_many() -> None:
    """Prepare this process for as many clients as it may have files.

    A thread that waits for its turn to run looks for it once in each switch interval. Where thousands have been asked
    or answered at the same moment, and this is the usual 5 ms, they do little else.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(_SWITCH_S)


def _note_nothing() -> None:
    pass


def serve(
    listener: socket.socket,
    root: Path,
    tls: ServerTls | None = None,
    asked: Callable[[], object] = _note_nothing,
) -> None:
    """Serve until the process ends.

    Args:
        listener: a Unix socket, or one of TCP with `tls`.
        root: directory of all gangs.
        tls: who is let in.
        asked: is called for each request of a member, by any thread.
    """
    _Server(listener, Coordinator(root), tls, asked).serve_forever()
