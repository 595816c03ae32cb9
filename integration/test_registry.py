"""The client against a real registry: credentials, chunks, a registry killed in the middle, deletion."""

import base64
import filecmp
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.registry import PASSWORD, USER, DockerRegistry
from ocihook.errors import RegistryError
from ocihook.registry.client import Access, Repository, digest_of

MakeRegistry = Callable[..., DockerRegistry]
CHUNK = 32 << 20


def write_auth_file(path: Path, registry: DockerRegistry) -> Path:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path.write_text(json.dumps({"auths": {registry.address: {"auth": auth}}}))
    return path


def test_a_registry_killed_in_the_middle_of_an_upload(
    make_registry: MakeRegistry, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had whole chunks of continues; an upload that breaks within one docker-registry itself gives up."""
    registry = make_registry(has_auth=True)
    access = Access(write_auth_file(scratch / "auth.json", registry), plain_http=True, backoff_s=0.01)
    repository = Repository(registry.address, "team/job", access)
    blob = scratch / "blob"
    blob.write_bytes(random.Random(1).randbytes(1 << 20) * 72)
    digest, size = digest_of(blob.read_bytes()), blob.stat().st_size
    within_third = [2 * CHUNK + (5 << 20)]
    uploads: list[int] = []  # sessions that had begun when the registry was killed
    told: list[int] = []
    pread = os.pread

    def kill() -> None:
        uploads.append(registry.log.count('"POST /v2/team/job/blobs/uploads/ HTTP/1.1" 202'))
        registry.kill_and_start()

    def pread_and_kill(fd: int, size_bytes: int, offset: int) -> bytes:
        if offset in within_third:
            within_third.clear()
            kill()
        return pread(fd, size_bytes, offset)

    def kill_after_first_chunk(size_bytes: int) -> None:
        told.append(size_bytes)
        if len(told) == 1:
            kill()

    monkeypatch.setattr("ocihook.registry.client.os.pread", pread_and_kill)
    assert repository.upload_file(blob, digest, progress=kill_after_first_chunk)
    assert uploads == [1, 1]
    assert sum(told) == size
    assert not repository.upload_file(blob, digest)
    repository.download(digest, size, scratch / "again")
    assert filecmp.cmp(scratch / "again", blob, shallow=False)
    assert repository.read_range(digest, CHUNK - 10, 20) == blob.read_bytes()[CHUNK - 10 : CHUNK + 10]


def test_what_a_registry_refuses(make_registry: MakeRegistry, scratch: Path) -> None:
    registry = make_registry(has_auth=True)
    nobody = scratch / "nobody.json"
    nobody.write_text("{}")
    with pytest.raises(RegistryError, match=r"HTTP 401.*podman login"):
        Repository(registry.address, "team/job", Access(nobody, plain_http=True)).tags()
    access = Access(write_auth_file(scratch / "auth.json", registry), plain_http=True, attempts=1)
    repository = Repository(registry.address, "team/job", access)
    assert repository.tags() == []
    with pytest.raises(RegistryError, match="MANIFEST_UNKNOWN"):
        repository.get_manifest("latest")
    blob = scratch / "blob"
    for content in (b"small", bytes(9 << 20)):
        blob.write_bytes(content)
        with pytest.raises(RegistryError, match="what the registry got is not blob"):
            repository.upload_file(blob, digest_of(b"something else"))
        assert not repository.exists(digest_of(content))
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
    media_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": media_type, "config": empty, "layers": []}).encode()
    with pytest.raises(RegistryError, match="HTTP 400, MANIFEST_BLOB_UNKNOWN"):
        repository.put_manifest("latest", manifest)
    assert repository.upload_bytes(b"{}")
    digest = digest_of(manifest)
    assert {repository.put_manifest(tag, manifest) for tag in ("b", "a")} == {digest}
    assert sorted(repository.tags()) == ["a", "b"]
    assert repository.get_manifest("b") == (media_type, digest, manifest)
    repository.delete_manifest(digest)
    with pytest.raises(RegistryError, match="HTTP 404"):
        repository.get_manifest(digest)
