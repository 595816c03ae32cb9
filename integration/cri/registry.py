"""A read-only OCI registry on loopback with images made here: containerd pulls a restored container's base image."""

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from integration import fake_driver

LOWER = ("opt/removed", "opt/tree/lower", "opt/kept")  # empty files of images, for containers to remove
_OCI = "application/vnd.oci.image."


class Registry:
    """Serves images by tag `latest` and by digest."""

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[bytes, str]] = {}
        self._latest: dict[str, str] = {}
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            served: ClassVar[Registry] = registry

            def do_GET(self) -> None:
                self._serve(with_body=True)

            def do_HEAD(self) -> None:
                self._serve(with_body=False)

            def _serve(self, *, with_body: bool) -> None:
                status, body, kind, digest = self.served.look_up(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if digest:
                    self.send_header("Docker-Content-Digest", digest)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"localhost:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def look_up(self, path: str) -> tuple[int, bytes, str, str]:
        """Answer a request: status, body, content type, digest."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["v2"]:
            return 200, b"{}", "application/json", ""
        if len(parts) == 4 and parts[2] in ("manifests", "blobs"):
            digest = self._latest.get(parts[1], "") if parts[3] == "latest" else parts[3]
            if digest in self._blobs:
                body, kind = self._blobs[digest]
                return 200, body, kind, digest
        return 404, b"{}", "application/json", ""

    def add(self, name: str, layer: bytes, *, entrypoint: Sequence[str]) -> str:
        """Add an image of one layer (a tar); return its reference."""
        compressed = gzip.compress(layer, 1, mtime=0)
        config = self._put_json(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Entrypoint": list(entrypoint)},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            },
            _OCI + "config.v1+json",
        )
        manifest = self._put_json(
            {
                "schemaVersion": 2,
                "mediaType": _OCI + "manifest.v1+json",
                "config": config,
                "layers": [self._put(compressed, _OCI + "layer.v1.tar+gzip")],
            },
            _OCI + "manifest.v1+json",
        )
        self._latest[name] = manifest["digest"]
        return f"{self.address}/{name}:latest"

    def _put_json(self, value: object, kind: str) -> dict[str, Any]:
        return self._put(json.dumps(value).encode(), kind)

    def _put(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = _digest(data)
        self._blobs[digest] = (data, kind)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def program_layer(program: Path, cuda_files: Path | None = None) -> bytes:
    """Return a layer with a static program, /workload, the CUDA workload, LOWER, and directories that runtimes want."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("run", "tmp", "proc", "sys", "dev", "etc"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in LOWER:
            tar.addfile(tarfile.TarInfo(name))
        tar.add(program, "workload")
        if cuda_files:
            fake_driver.add_to_image(tar, cuda_files)
    return data.getvalue()
