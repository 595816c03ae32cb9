"""A registry in memory that fails on request: what a real one does only when its luck runs out."""

import base64
import hashlib
import json
import re
import ssl
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Fault = Callable[["_Handler"], bool]
USER, PASSWORD = "hans", "geheim"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Registry:
    """One repository, `team/job`, on loopback."""

    def __init__(self, *, auth: str = "", certificate: Path | None = None) -> None:
        """Serve until `close`.

        Args:
            auth: "", "basic" or "bearer".
            certificate: file with key and certificate, for HTTPS.
        """
        self.auth = auth
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}  # by tag and by digest
        self.uploads: dict[str, bytearray] = {}
        self.requests: list[tuple[str, str]] = []  # method and path, with the query
        self.authorizations: list[str] = []
        self.received_bytes = 0
        self.tokens: set[str] = set()
        self.knows_ranges = True
        self.redirect = ""  # where blobs are, if elsewhere
        self.faults: deque[tuple[str, Fault]] = deque()
        self.lock = threading.Lock()
        registry = self

        class Handler(_Handler):
            served = registry

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def fail(self, method: str, fault: Fault, times: int = 1) -> None:
        """Have the next requests of this method go wrong: a fault answers, or not, and tells whether that was all."""
        self.faults.extend([(method, fault)] * times)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def count(self, method: str, part: str = "") -> int:
        """Return the number of requests with this method and part of a path."""
        return sum(m == method and part in path for m, path in self.requests)


def answers(status: int, body: bytes = b"{}", /, **headers: str) -> Fault:
    """Return a fault: another answer."""

    def fault(handler: "_Handler") -> bool:
        handler.take_body()
        handler.answer(status, body, **headers)
        return True

    return fault


def breaks(after_bytes: int = 0) -> Fault:
    """Return a fault: the connection breaks once so much of a request's body is kept."""

    def fault(handler: "_Handler") -> bool:
        data = handler.rfile.read(after_bytes)
        upload = handler.served.uploads.get(urlsplit(handler.path).path)
        if upload is not None:
            upload += data
            handler.served.received_bytes += len(data)
        handler.close_connection = True
        return True

    return fault


def loses_the_answer(handler: "_Handler") -> bool:
    """Do what was asked, and break the connection."""
    handler.is_mute = True
    handler.close_connection = True
    return False


def sends(data: bytes, *, claimed: int | None = None) -> Fault:
    """Return a fault: this content in place of the right one."""

    def fault(handler: "_Handler") -> bool:
        handler.answer(200, data, **{"Content-Length": str(len(data) if claimed is None else claimed)})
        handler.close_connection = True
        return True

    return fault


class _Handler(BaseHTTPRequestHandler):
    served: Registry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    is_mute = False

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass

    def take_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        if self.is_mute:
            return
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _handle(self) -> None:
        served = self.served
        with served.lock:
            served.requests.append((self.command, self.path))
            served.authorizations.append(self.headers.get("Authorization", ""))
            fault = served.faults.popleft()[1] if served.faults and served.faults[0][0] == self.command else None
        if fault and fault(self):
            return
        url = urlsplit(self.path)
        if url.path == "/token" and served.redirect:
            self.answer(307, Location=f"{served.redirect}{self.path}")
        elif url.path == "/token":
            self._token(parse_qs(url.query))
        elif not self._is_allowed():
            self.take_body()
            kind = f'Bearer realm="http://{served.address}/token",service="x",scope="{self._scope()}"'
            self.answer(401, b"{}", WWW_Authenticate=kind if served.auth == "bearer" else 'Basic realm="x"')
        elif match := re.fullmatch(r"/v2/team/job/(blobs|manifests|tags|uploads|blobs/uploads)/(.*)", url.path):
            getattr(self, f"_{self.command.lower()}_{match[1].rpartition('/')[2]}")(match[2], parse_qs(url.query))
        else:
            self.answer(404, json.dumps({"errors": [{"code": "NAME_UNKNOWN", "message": "no such"}]}).encode())

    def __getattr__(self, name: str) -> Any:  # do_GET and the like
        if name.startswith("do_"):
            return self._handle
        raise AttributeError(name)

    def _scope(self) -> str:
        return "repository:team/job:" + ("pull" if self.command in ("GET", "HEAD") else "pull,push")

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if self.served.auth == "bearer":
            token = given.removeprefix("Bearer ")
            return token in self.served.tokens and set(self._scope().split(":")[2].split(",")) <= set(token.split("."))
        return not self.served.auth or given == BASIC

    def _token(self, query: dict[str, list[str]]) -> None:
        if self.headers.get("Authorization") != BASIC:
            self.answer(401, b"{}")
            return
        token = ".".join([*query["scope"][0].split(":")[2].split(","), str(len(self.served.requests))])
        self.served.tokens.add(token)
        self.answer(200, json.dumps({"token": token}).encode())

    def _get_blobs(self, digest: str, _query: object) -> None:
        data = self.served.blobs.get(digest)
        if data is None:
            self.answer(404, json.dumps({"errors": [{"code": "BLOB_UNKNOWN", "message": "unknown"}]}).encode())
        elif self.served.redirect:
            self.answer(307, Location=f"{self.served.redirect}{self.path}")
        elif (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and self.served.knows_ranges:
            start, end = int(match[1]), int(match[2] or len(data) - 1) + 1
            self.answer(206 if start < len(data) else 416, data[start:end])
        else:
            self.answer(200, data)

    _head_blobs = _get_blobs

    def _post_uploads(self, _name: str, _query: object) -> None:
        path = f"/v2/team/job/uploads/{len(self.served.requests)}"
        self.served.uploads[path] = bytearray()
        self.answer(202, Location=path)

    _post_blobs = _post_uploads

    def _patch_uploads(self, _name: str, _query: object) -> None:
        data = self.take_body()
        upload = self.served.uploads.get(urlsplit(self.path).path)
        self.served.received_bytes += len(data)
        if upload is None:
            self.answer(404)
        elif self.headers["Content-Range"].split("-")[0] != str(len(upload)):
            self.answer(416)
        else:
            upload += data
            self.answer(202, Location=self.path, Range=f"0-{len(upload) - 1}")

    def _get_uploads(self, _name: str, _query: object) -> None:
        upload = self.served.uploads.get(self.path)
        if upload is None:
            self.answer(404)
        else:
            self.answer(204, Location=self.path, Range=f"0-{max(0, len(upload) - 1)}")

    def _put_uploads(self, _name: str, query: dict[str, list[str]]) -> None:
        body = self.take_body()
        self.served.received_bytes += len(body)
        upload = self.served.uploads.pop(urlsplit(self.path).path, None)
        if upload is None:
            self.answer(404)
            return
        data = bytes(upload) + body
        if query["digest"][0] != "sha256:" + hashlib.sha256(data).hexdigest():
            self.answer(400, json.dumps({"errors": [{"code": "DIGEST_INVALID", "message": "wrong"}]}).encode())
            return
        self.served.blobs[query["digest"][0]] = data
        self.answer(201)

    def _get_manifests(self, reference: str, _query: object) -> None:
        kind, data = self.served.manifests.get(reference, ("", b""))
        if kind:
            self.answer(200, data, Content_Type=kind)
        else:
            self.answer(404, json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "unknown"}]}).encode())

    def _put_manifests(self, reference: str, _query: object) -> None:
        data = self.take_body()
        for name in (reference, "sha256:" + hashlib.sha256(data).hexdigest()):
            self.served.manifests[name] = (self.headers["Content-Type"], data)
        self.answer(201)

    def _delete_manifests(self, reference: str, _query: object) -> None:
        found = self.served.manifests.pop(reference, None)
        for name in [name for name, manifest in self.served.manifests.items() if manifest == found]:
            del self.served.manifests[name]  # its tags
        self.answer(202 if found else 404)

    def _get_tags(self, _list: str, query: dict[str, list[str]]) -> None:
        tags = sorted(name for name in self.served.manifests if ":" not in name)
        page = [tag for tag in tags if tag > query.get("last", [""])[0]][:2]
        more = (
            {"Link": f'</v2/team/job/tags/list?n=2&last={page[-1]}>; rel="next"'}
            if page and page[-1] != tags[-1]
            else {}
        )
        self.answer(200, json.dumps({"name": "team/job", "tags": page}).encode(), **more)
