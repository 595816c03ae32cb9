"""An S3 server on the loopback for tests, in a process of its own: what is tested forks."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import boto3

# It is given a socket that listens: a port that is free when it is looked for may be somebody else's a moment later.
_SERVER = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import MotoRequestHandler
from werkzeug.serving import make_server
fd, port = map(int, sys.argv[1:])
app = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler, fd=fd).serve_forever()
"""


@contextlib.contextmanager
def object_storage() -> Iterator[str]:
    """Run one; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(fd), str(port)],
            pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def make_bucket(endpoint: str, name: str) -> str:
    """Make a bucket; return the location of a remote in it."""
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/some/prefix?endpoint={endpoint}&region=us-east-1"
