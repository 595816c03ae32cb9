"""A remote in S3-compatible object storage."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from ocihook.errors import RemoteError
from ocihook.remote.blobs import PIECE_BYTES, Blob

_MISSING = ("404", "NoSuchKey", "NotFound")
_CONFIG = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})


class S3Blobs:
    """Blobs as objects below a prefix of a bucket. Credentials are found as every AWS tool finds them.

    A pack is one PUT (far below the 5 GB that S3 accepts at once), with a checksum that the server compares.
    """

    def __init__(
        self, bucket: str, prefix: str, *, endpoint: str = "", region: str = "", profile: str = "", checksums: str = ""
    ) -> None:
        """Use a bucket and prefix; empty arguments are taken from the environment and AWS's files.

        Args:
            bucket: of the storage.
            prefix: of all blobs, without a slash at its end.
            endpoint: a URL, where it is not Amazon's.
            region: of the bucket.
            profile: of AWS's files.
            checksums: when botocore adds checksums of its own, request_checksum_calculation and
                response_checksum_validation alike: when_supported, or when_required for servers that know none of
                them; those compare the hash that a request is signed with.

        Raises:
            RemoteError: if there is no such profile, the endpoint is not a URL, or `checksums` is unknown.
        """
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        with self._telling():
            session = botocore.session.Session(profile=profile or None)
            names = ("request_checksum_calculation", "response_checksum_validation")
            config = _CONFIG.merge(Config(**dict.fromkeys(names, checksums))) if checksums else _CONFIG
            self._connect = partial(
                session.create_client, "s3", region_name=region or None, endpoint_url=endpoint or None, config=config
            )
            self._connection = os.getpid(), self._connect()

    @property
    def _client(self) -> Any:  # noqa: ANN401 - botocore makes its classes when it runs
        pid, client = self._connection
        if pid != os.getpid():  # a process that was forked shares no connection
            client = self._connect()
            self._connection = os.getpid(), client
        return client

    def below(self, prefix: str) -> Iterator[Blob]:
        """Yield what begins with `prefix`, which ends in a slash."""
        with self._telling():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for row in page.get("Contents", ()):
                    name = row["Key"].removeprefix(self._prefix)
                    yield Blob(name, row["Size"], row["LastModified"].timestamp())

    def folders(self, prefix: str) -> list[str]:
        """Return the parts between `prefix` and the next slash in the names of blobs."""
        with self._telling():
            pages = self._client.get_paginator("list_objects_v2")
            rows = [
                row["Prefix"].removeprefix(self._prefix + prefix).rstrip("/")
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix, Delimiter="/")
                for row in page.get("CommonPrefixes", ())
            ]
        return sorted(rows)

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Return a small blob; None if there is none."""
        with self._telling():
            try:
                reply = self._client.get_object(**self._object(name))
            except ClientError as error:
                if error.response["Error"]["Code"] in _MISSING:
                    return None
                raise
            with contextlib.closing(reply["Body"]) as body:
                data = bytes(body.read(limit_bytes + 1))
        if len(data) > limit_bytes:
            raise RemoteError(f"{name} in s3://{self._bucket} is larger than {limit_bytes} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Store a small blob; it replaces one with this name."""
        with self._telling():
            self._client.put_object(**self._object(name), Body=data)

    def send(self, name: str, path: Path) -> Iterator[int]:
        """Store a file; yield its bytes when it is there."""
        with self._telling(), path.open("rb") as file:
            self._client.put_object(**self._object(name), Body=file)
        yield path.stat().st_size

    def fetch(self, name: str, path: Path) -> Iterator[int]:
        """Append to a file what it lacks of a blob; yield the bytes done, bit by bit."""
        with self._telling(), path.open("ab") as target:
            lacking = f"bytes={target.tell()}-"
            with contextlib.closing(self._client.get_object(**self._object(name), Range=lacking)["Body"]) as body:
                while data := body.read(PIECE_BYTES):
                    target.write(data)
                    yield len(data)

    def remove(self, name: str) -> None:
        """Remove a blob, if it is there."""
        with self._telling():
            self._client.delete_object(**self._object(name))

    def settle(self, prefix: str) -> None:
        """Return at once: whatever a call has done is durable."""
        del prefix

    def sweep(self, prefix: str, before_s: float) -> int:
        """Return 0: an incomplete PUT leaves nothing."""
        del prefix, before_s
        return 0

    def _object(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, HTTPClientError, ValueError) as error:
            denied = isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] == 403
            hint = "see whether its credentials may do this" if denied else ""
            raise RemoteError(f"the remote s3://{self._bucket}/{self._prefix}: {error}", hint=hint) from error
