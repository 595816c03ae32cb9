"""The client of registries, against one that lies, forgets, breaks connections and asks for credentials."""

import base64
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ocihook.errors import ConfigError, RegistryError
from ocihook.registry import client, transport
from ocihook.registry.client import Access, Reference, Repository, digest_of
from ocihook.registry.credentials import find_credentials
from ocihook.registry.layout import MANIFEST_TYPE
from tests.fakes.registry import (
    BASIC,
    PASSWORD,
    USER,
    Registry,
    answers,
    breaks,
    loses_the_answer,
    sends,
)

SMALL = b"a small blob"
LARGE = random.Random(1).randbytes(300_000)
CHUNK = 64 << 10
UNKNOWN = "sha256:" + 64 * "0"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WHOLE_BYTES": CHUNK, "_CHUNK_BYTES": CHUNK, "_PIECE_BYTES": 16 << 10}.items():
        monkeypatch.setattr(client, name, value)
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")


@pytest.fixture
def serve() -> Iterator[Callable[..., Registry]]:
    made: list[Registry] = []

    def make(**options: object) -> Registry:
        made.append(Registry(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for registry in made:
        registry.close()


@pytest.fixture
def registry(serve: Callable[..., Registry]) -> Registry:
    return serve()


def connect(registry: Registry, **access: object) -> Repository:
    options = {"plain_http": True, "timeout_s": 20, "attempts": 3, "backoff_s": 0.001, **access}
    return Repository(registry.address, "team/job", Access(**options))  # type: ignore[arg-type]


def auth_file(tmp_path: Path, registry: Registry, password: str = PASSWORD) -> Path:
    path = tmp_path / "auth.json"
    entry = {"auth": base64.b64encode(f"{USER}:{password}".encode()).decode()}
    path.write_text(json.dumps({"auths": {registry.address: entry}}))
    return path


def make_file(tmp_path: Path, data: bytes = LARGE) -> tuple[Path, str]:
    path = tmp_path / "blob"
    path.write_bytes(data)
    return path, digest_of(data)


def put(registry: Registry, data: bytes) -> str:
    registry.blobs[digest_of(data)] = data
    return digest_of(data)


def test_blobs_there_and_back(tmp_path: Path, registry: Registry) -> None:
    repository = connect(registry)
    assert repository.upload_bytes(SMALL)
    assert repository.upload_bytes(b"")
    path, digest = make_file(tmp_path)
    assert not repository.exists(digest)
    told: list[int] = []
    assert repository.upload_file(path, digest, progress=told.append)
    assert registry.blobs == {digest_of(data): data for data in (SMALL, b"", LARGE)}
    assert registry.count("PATCH") == -(-len(LARGE) // CHUNK)
    assert sum(told) == len(LARGE)
    assert repository.exists(digest)
    assert not repository.upload_file(path, digest, progress=told.append)
    assert sum(told) == 2 * len(LARGE)
    assert registry.received_bytes == len(LARGE) + len(SMALL)

    repository.download(digest, len(LARGE), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == LARGE
    assert b"".join(repository.read_blob(digest_of(b""), 0)) == b""
    registry.knows_ranges = False
    for knows_ranges in (True, False):
        registry.knows_ranges = knows_ranges
        assert repository.read_range(digest, 100_000, 50_000) == LARGE[100_000:150_000]


def test_a_broken_upload_goes_on_where_it_was(tmp_path: Path, registry: Registry) -> None:
    path, digest = make_file(tmp_path)
    registry.fail("PATCH", breaks(after_bytes=40_000), times=2)
    registry.fail("PATCH", answers(503))
    told: list[int] = []
    assert connect(registry, attempts=4).upload_file(path, digest, progress=told.append)
    assert registry.blobs == {digest: LARGE}
    assert sum(told) == len(LARGE)
    assert registry.count("POST") == 1
    assert registry.received_bytes == len(LARGE)  # nothing was sent that the registry had


@pytest.mark.parametrize("forgets", ["PATCH", "PUT"])
def test_a_forgotten_upload_starts_over(tmp_path: Path, registry: Registry, forgets: str) -> None:
    path, digest = make_file(tmp_path)

    def forget(_handler: object) -> bool:
        registry.uploads.clear()
        return False

    registry.fail(forgets, forget)
    assert connect(registry).upload_file(path, digest)
    assert registry.blobs == {digest: LARGE}
    assert registry.count("POST") == 2


@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_an_upload_whose_last_answer_is_lost_is_not_made_again(tmp_path: Path, registry: Registry, data: bytes) -> None:
    path, digest = make_file(tmp_path, data)
    registry.fail("PUT", loses_the_answer)
    assert connect(registry).upload_file(path, digest)
    assert registry.blobs == {digest: data}
    assert (registry.count("PUT"), registry.count("POST")) == (1, 1)


def test_a_registry_that_dies_in_an_upload(tmp_path: Path, registry: Registry) -> None:
    path, digest = make_file(tmp_path)

    def die(handler: object) -> bool:
        registry._server.socket.close()
        return breaks()(handler)  # type: ignore[arg-type]

    registry.fail("PATCH", die)
    with pytest.raises(RegistryError, match=f"{registry.address}/team/job cannot be reached: .*refused") as caught:
        connect(registry).upload_file(path, digest)
    assert caught.value.status == 0


def test_an_upload_that_never_gets_on_ends(tmp_path: Path, registry: Registry) -> None:
    path, digest = make_file(tmp_path)
    registry.fail("PATCH", answers(500), times=9)
    with pytest.raises(RegistryError, match=r"not able to answer \(upload of blob sha256:.*HTTP 500") as caught:
        connect(registry).upload_file(path, digest)
    assert caught.value.status == 500
    assert registry.count("PATCH") == 3


def test_a_file_that_changes_while_it_is_sent(tmp_path: Path, registry: Registry) -> None:
    path, digest = make_file(tmp_path)
    with pytest.raises(RegistryError, match="is not blob sha256:0000"):
        connect(registry).upload_file(path, UNKNOWN)

    def cut(_handler: object) -> bool:
        path.write_bytes(LARGE[:CHUNK])
        return False

    registry.fail("PATCH", cut)
    with pytest.raises(RegistryError, match="became shorter"):
        connect(registry).upload_file(path, digest)
    assert registry.blobs == {}


def test_a_broken_download_goes_on_where_it_was(tmp_path: Path, registry: Registry) -> None:
    digest = put(registry, LARGE)
    for knows_ranges in (True, False):
        registry.knows_ranges = knows_ranges
        registry.requests.clear()
        registry.fail("GET", sends(LARGE[:100_000], claimed=len(LARGE)))
        registry.fail("GET", answers(500))
        assert b"".join(connect(registry).read_blob(digest, len(LARGE))) == LARGE
        assert registry.count("GET") == 3


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (LARGE[:-1], "ends at 299999, not at 300000"),
        (LARGE + b"x", "does not end at 300000"),
        (LARGE[:-1] + bytes([LARGE[-1] ^ 1]), "is something else"),
        (b"", "ends at 0, not"),
    ],
)
def test_a_wrong_blob_leaves_no_file(tmp_path: Path, registry: Registry, sent: bytes, message: str) -> None:
    registry.blobs[digest_of(LARGE)] = sent
    with pytest.raises(RegistryError, match=message) as caught:
        connect(registry).download(digest_of(LARGE), len(LARGE), tmp_path / "blob")
    assert "push it again" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_for_may_not_be_there(registry: Registry) -> None:
    repository = connect(registry)
    for ask in (
        lambda: list(repository.read_blob(UNKNOWN, 5)),
        lambda: repository.read_range(UNKNOWN, 0, 5),
        lambda: repository.get_manifest("latest"),
        lambda: repository.delete_manifest(UNKNOWN),
    ):
        with pytest.raises(RegistryError, match=r"does not know it \(.*HTTP 404") as caught:
            ask()
        assert caught.value.status == 404
    assert registry.count("GET") == 3  # once each
    other = Repository(registry.address, "team/other", Access(plain_http=True))
    assert other.tags() == []


def test_manifests_and_tags(registry: Registry) -> None:
    repository = connect(registry)
    data = json.dumps({"schemaVersion": 2}).encode()
    digests = {repository.put_manifest(tag, data) for tag in ("v1", "v2", "v3", "latest", "x")}
    assert digests == {digest_of(data)}
    for reference in ("v1", digest_of(data)):
        manifest = repository.get_manifest(reference)
        assert manifest == (MANIFEST_TYPE, digest_of(data), data)
    assert repository.tags() == ["latest", "v1", "v2", "v3", "x"]
    repository.delete_manifest(digest_of(data))
    registry.fail("GET", sends(b"{}"))
    with pytest.raises(RegistryError, match="something else"):
        repository.get_manifest(digest_of(data))
    registry.fail("GET", sends(b"x" * (client.MAX_MANIFEST_BYTES + 1)))
    with pytest.raises(RegistryError, match="no end"):
        repository.get_manifest("v1")


@pytest.mark.parametrize(
    "fault", [answers(500), answers(429, **{"Retry-After": "0"}), answers(503, **{"Retry-After": "soon"}), breaks()]
)
def test_what_may_go_right_later_is_tried_again(registry: Registry, fault: Callable[..., bool]) -> None:
    registry.fail("PUT", fault, times=2)
    assert connect(registry).put_manifest("latest", b"{}") == digest_of(b"{}")
    assert registry.count("PUT") == 3
    registry.fail("PUT", fault, times=3)
    with pytest.raises(RegistryError):
        connect(registry).put_manifest("latest", b"{}")
    assert registry.count("PUT") == 6


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"null", b'{"tags": {"a": 1}}', b'{"tags": "v1"}', b'{"tags": [1]}', b"[" * 99999]
)
def test_a_list_of_tags_that_cannot_be_read_does_not_count_as_empty(registry: Registry, data: bytes) -> None:
    """A prune would take it for a remote that has no checkpoints."""
    registry.fail("GET", sends(data))
    with pytest.raises(RegistryError, match="no list of tags"):
        connect(registry).tags()


def test_a_list_of_tags_may_be_empty(registry: Registry) -> None:
    registry.fail("GET", sends(b'{"name": "team/job", "tags": null}'))
    assert connect(registry).tags() == []


@pytest.mark.parametrize("following", ["/v2/team/job/tags/list?n=1000", "/v2/team/job/tags/list?last=b"])
def test_pages_of_tags_that_link_in_a_circle(registry: Registry, following: str) -> None:
    registry.fail("GET", answers(200, b'{"tags": ["a", "b"]}', Link=f'<{following}>; rel="next"'), times=9)
    with pytest.raises(RegistryError, match="the list of tags has no end"):
        connect(registry).tags()
    assert registry.count("GET") <= 2


def test_a_page_of_tags_that_is_missing_is_no_end(registry: Registry) -> None:
    repository = connect(registry)
    for tag in ("a", "b", "c"):
        repository.put_manifest(tag, b"{}")
    registry.fail("GET", lambda _: False)
    registry.fail("GET", answers(404))
    with pytest.raises(RegistryError, match="does not know it"):
        repository.tags()


@pytest.mark.parametrize("asked", ["61", "999999999", "9" * 400, "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_registry_that_asks_for_years_is_not_waited_for(registry: Registry, asked: str) -> None:
    registry.fail("PUT", answers(429, **{"Retry-After": asked}), times=9)
    with pytest.raises(RegistryError, match=r"takes no request for the next [0-9inf]+ s\. Try again then"):
        connect(registry).put_manifest("latest", b"{}")
    assert registry.count("PUT") == 1


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_credentials(tmp_path: Path, serve: Callable[..., Registry], auth: str) -> None:
    registry = serve(auth=auth)
    path, digest = make_file(tmp_path)
    with pytest.raises(RegistryError, match="podman login") as caught:
        connect(registry).exists(digest)
    assert caught.value.status == 401
    with pytest.raises(RegistryError, match="podman login"):
        connect(registry, auth_file=auth_file(tmp_path, registry, "wrong")).exists(digest)
    repository = connect(registry, auth_file=auth_file(tmp_path, registry))
    assert not repository.exists(digest)
    assert repository.upload_file(path, digest)
    if auth == "bearer":
        asked = registry.count("GET", "/token")
        registry.tokens.clear()  # they have expired
        assert b"".join(repository.read_blob(digest, len(LARGE))) == LARGE
        assert registry.count("GET", "/token") == asked + 1
        registry.blobs.clear()

        def expire(_handler: object) -> bool:
            registry.tokens.clear()
            return False

        registry.fail("PATCH", expire)  # in the middle of an upload
        assert repository.upload_file(path, digest)
    assert registry.blobs == {digest: LARGE}


def test_threads_that_need_tokens_for_different_purposes(tmp_path: Path, serve: Callable[..., Registry]) -> None:
    registry = serve(auth="bearer")
    repository = connect(registry, auth_file=auth_file(tmp_path, registry))
    blobs = [bytes([number]) * 1000 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repository.upload_bytes, blobs))
        digests = list(map(digest_of, blobs))
        again = list(pool.map(lambda digest: b"".join(repository.read_blob(digest, 1000)), digests))
    assert again == blobs
    assert registry.count("GET", "/token") <= 10


def test_a_forked_process_shares_no_connection(registry: Registry) -> None:
    repository = connect(registry)
    digest = put(registry, LARGE[:1000])
    pid = os.fork()
    if not pid:
        is_right = all(repository.read_range(digest, 0, 1000) == LARGE[:1000] for _ in range(50))
        os._exit(0 if is_right else 1)
    assert all(repository.read_range(digest, 0, 1000) == LARGE[:1000] for _ in range(50))
    assert os.waitpid(pid, 0)[1] == 0


def test_authorization_does_not_follow_to_another_host(tmp_path: Path, serve: Callable[..., Registry]) -> None:
    registry, elsewhere = serve(auth="basic"), serve()
    digest = put(registry, LARGE)
    put(elsewhere, LARGE)
    registry.redirect = f"http://{elsewhere.address}"
    repository = connect(registry, auth_file=auth_file(tmp_path, registry))
    assert b"".join(repository.read_blob(digest, len(LARGE))) == LARGE
    assert BASIC in registry.authorizations
    registry.auth = "bearer"
    with pytest.raises(RegistryError, match="a token"):
        connect(registry, auth_file=auth_file(tmp_path, registry)).exists(digest)
    assert elsewhere.authorizations == ["", ""]


def test_redirects_that_lead_nowhere(registry: Registry) -> None:
    digest = put(registry, SMALL)
    registry.redirect = f"http://{registry.address}"
    with pytest.raises(RegistryError, match="leads nowhere"):
        list(connect(registry).read_blob(digest, len(SMALL)))


def test_a_proxy(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:p%40ss@{registry.address}")
    monkeypatch.setenv("no_proxy", "direct.example")
    repository = Repository("registry.example:81", "team/job", Access(plain_http=True))
    assert not repository.exists(UNKNOWN)
    assert registry.requests == [("HEAD", f"http://registry.example:81/v2/team/job/blobs/{UNKNOWN}")]
    assert transport._proxy("http://direct.example") is None
    assert not connect(registry).exists(UNKNOWN)  # loopback never needs one
    assert registry.requests[1:] == [("HEAD", f"/v2/team/job/blobs/{UNKNOWN}")]


def test_tls(tmp_path: Path, serve: Callable[..., Registry]) -> None:
    certificate = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", "/CN=registry", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", certificate, "-out", tmp_path / "ca.pem"], check=True, timeout=60)
    certificate.write_bytes(certificate.read_bytes() + (tmp_path / "ca.pem").read_bytes())
    registry, plain = serve(certificate=certificate), serve()
    with pytest.raises(RegistryError, match=r"CERTIFICATE_VERIFY_FAILED.*--ca-file"):
        connect(registry, plain_http=False).exists(UNKNOWN)
    repository = connect(registry, plain_http=False, ca_file=tmp_path / "ca.pem")
    digest = digest_of(SMALL)
    assert repository.upload_bytes(SMALL)
    assert registry.blobs == {digest: SMALL}
    registry.redirect = f"http://{plain.address}"
    with pytest.raises(RegistryError, match="which has no TLS"):
        list(repository.read_blob(digest, len(SMALL)))
    assert plain.requests == []
    with pytest.raises(RegistryError, match="plain HTTP only if it has no TLS"):
        connect(plain, plain_http=False).exists(UNKNOWN)
    with pytest.raises(ConfigError, match="no certificates"):
        connect(registry, plain_http=False, ca_file=tmp_path / "missing.pem")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("localhost/a:1", ("localhost", "a", "1", "")),
        ("r.example:5000/a/b", ("r.example:5000", "a/b", "", "")),
        (f"[::1]:5000/a@{UNKNOWN}", ("[::1]:5000", "a", "", UNKNOWN)),
        (f"r.example/a:x@{UNKNOWN}", ("r.example", "a", "x", UNKNOWN)),
        ("docker.io/job", ("docker.io", "library/job", "", "")),
    ],
)
def test_references(text: str, reference: tuple[str, ...]) -> None:
    assert Reference.parse(text) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r.example/",
        "r.example/A:1",
        "r.example/a:",
        "r.example/a:b:c",
        "r.example/a@sha256:1",
        "r.x/a/../b",
        "r.example:x/a",
        "r.example/a?b",
        "team/job:1",
        "job",
        "user@r.example/a",
        "http://r.example/a",
    ],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError):
        Reference.parse(text)


def test_where_credentials_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, **passwords: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        auths = {key: {"auth": base64.b64encode(f"me:{word}".encode()).decode()} for key, word in passwords.items()}
        path.write_text(json.dumps({"auths": auths}))
        return path

    def password(registry: str, repository: str, file: Path | None = None) -> str:
        found = find_credentials(registry, repository, file)
        return found.password if found else ""

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert find_credentials("r.example", "a") is None
    write(tmp_path / "home/.docker/config.json", **{"https://index.docker.io/v1/": "hub", "r.example": "docker"})
    assert (password("r.example", "a"), password("docker.io", "library/a")) == ("docker", "hub")
    write(tmp_path / "run/containers/auth.json", **{"r.example": "all", "r.example/team": "team"})
    assert (password("r.example", "team/a/b"), password("r.example", "teams")) == ("team", "all")
    named = write(tmp_path / "named.json", **{"r.example": "named"})
    assert password("r.example", "team/a", named) == "named"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(named))
    assert (password("r.example", "team/a"), password("docker.io", "library/a")) == ("named", "")
    for content in ("", "[]", '{"auths": {"r.example": {"auth": "?"}}}'):
        named.write_text(content)
        with pytest.raises(ConfigError, match=r"named\.json"):
            find_credentials("r.example", "a")


def test_nothing_that_must_be_fast_loads_it() -> None:
    code = "import sys, ocihook.agent.server, ocihook.cli.main, ocihook.cli.store; assert 'urllib3' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_digests_other_than_sha256(registry: Registry) -> None:
    digest = digest_of(SMALL, "sha512")
    registry.blobs[digest] = SMALL
    assert b"".join(connect(registry).read_blob(digest, len(SMALL))) == SMALL
    assert digest == "sha512:" + hashlib.sha512(SMALL).hexdigest()
    for wrong in ("sha256:1", "md5:" + 32 * "0", "../x"):
        with pytest.raises(RegistryError, match="no digest"):
            list(connect(registry).read_blob(wrong, 5))
