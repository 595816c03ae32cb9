"""An S3 server on the loopback for tests, in a process of its own: what is tested forks."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import boto3


@contextlib.contextmanager
def object_storage() -> Iterator[str]:
    """Run one; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert server.poll() is None
                assert time.monotonic() < deadline
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def make_bucket(endpoint: str, name: str) -> str:
    """Make a bucket; return the location of a remote in it."""
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/some/prefix?endpoint={endpoint}&region=us-east-1"
