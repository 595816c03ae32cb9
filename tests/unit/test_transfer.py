"""Push and pull, over every kind of remote: what is there does not travel, what is wrong is seen, nothing is lost."""

import contextlib
import dataclasses
import os
import random
import re
import secrets
import shutil
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from ocihook.checkpoints import pushing, remote_listing, transfer
from ocihook.checkpoints.prune import Keep, prune
from ocihook.checkpoints.pulling import pull
from ocihook.checkpoints.pushing import push
from ocihook.checkpoints.remote_listing import RemoteCheckpoints, list_remote, prune_remote
from ocihook.errors import ConfigError, IntegrityError, OcihookError, RemoteError, StoreFull
from ocihook.packs.cipher import NO_KEYS, Keyring, KeySource
from ocihook.packs.pack import PAGE_BYTES
from ocihook.remote.directory import DirectoryBlobs
from ocihook.remote.location import _blobs as open_blobs
from ocihook.remote.location import open_remote
from ocihook.store.records import largest_layout
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.verify import verify
from tests.fakes.object_storage import make_bucket, object_storage
from tests.fakes.registry import Registry
from tests.unit.test_store_crash import DIED, Node, die_at, in_child, pages


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node with two checkpoints, of which the second has 30 new pages."""
    made = Node(tmp_path / "node")
    made.dump(made.new)
    made.complete()
    return made


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            patch.delenv(name, raising=False)
            patch.delenv(name.upper(), raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with object_storage() as url:
            yield url


@pytest.fixture
def bucket(endpoint: str) -> str:
    return make_bucket(endpoint, f"bucket-{secrets.token_hex(4)}")


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture
def repository(registry: Registry) -> str:
    return f"oci://{registry.address}/team/job?plain_http=yes"


@pytest.fixture(params=["directory", "bucket", "repository"])
def remote(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "remote"
    path.mkdir()
    return path


def ids(node: Node) -> list[str]:
    return [manifest.id for manifest in node.domain.checkpoints()]


class Other(Node):
    """Another node, with an empty store."""

    def __init__(self, root: Path, keys: KeySource = NO_KEYS) -> None:
        self.root, self.store_dir, self.keys = root, root / "store", keys
        root.mkdir()

    def pull(self, checkpoint_id: str, location: str) -> transfer.Moved:
        return pull(self.store, "team", checkpoint_id, location)


def test_there_and_back(node: Node, remote: str, tmp_path: Path) -> None:
    first, second = ids(node)
    sent = push(node.domain, first, remote)
    assert sent.moved_bytes == sent.pack_bytes > 60 * PAGE_BYTES
    more = push(node.domain, second, remote)
    assert 30 * PAGE_BYTES < more.moved_bytes < 31 * PAGE_BYTES, "only what is new"
    assert more.pack_bytes > more.moved_bytes
    assert push(node.domain, second, remote).moved_bytes == 0
    assert [row.id for row in list_remote(remote)] == [first, second]
    other = Other(tmp_path / "other")
    assert other.pull(second, remote).moved_bytes == more.pack_bytes
    assert other.pull(second, remote).moved_bytes == 0
    assert other.contents() == [node.new]
    assert other.pull(first, remote).moved_bytes == 0, "it has all the packs"
    assert sorted(other.contents()) == sorted([node.old, node.new])
    assert verify(other.domain, read_data=True) == []
    assert other.domain.seed != node.domain.seed


def test_a_registry_is_asked_each_question_once(
    tmp_path: Path, registry: Registry, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a checkpoint of many packs beside many others; each of four workers needs an authorization, if any."""
    node = Node(tmp_path / "node")
    for number in range(9):
        node.dump(pages(1, 100 + number))
        node.complete()
    others = ids(node)
    for checkpoint_id in others:
        push(node.domain, checkpoint_id, repository)
    monkeypatch.setattr("ocihook.store.deduplicate.PACK_BYTES", PAGE_BYTES)
    monkeypatch.setattr("ocihook.store.deduplicate._BATCH_PAGES", 1)
    monkeypatch.setattr("ocihook.store.deduplicate._BATCH_IDS", struct.Struct("16s"))
    node.dump(node.old[: 8 * PAGE_BYTES] + pages(20, 2))
    node.complete()
    last = ids(node)[-1]
    new_packs = len(node.domain.layout(node.domain.read(last)).packs) - 1
    assert new_packs == 20

    registry.requests.clear()
    push(node.domain, last, repository)
    asked = Counter(registry.requests)
    gets = {path: count for (method, path), count in asked.items() if method == "GET" and "/uploads/" not in path}
    assert max(gets.values()) == 1
    assert sum("/manifests/" in path for path in gets) == len(others) + 1  # it might be there itself
    assert sum("/tags/" in path for path in gets) == len(others) // 2  # the double lists two at a time
    # a blob that is sent: is it there, begin, send
    assert asked.total() == len(gets) + 1 + 3 * (new_packs + 2) + 1

    registry.requests.clear()
    Other(tmp_path / "other").pull(last, repository)
    asked = Counter(registry.requests)
    assert max(asked.values()) == 1
    assert asked.total() == 1 + 2 + new_packs + 1, "its artifact, its manifest and layout, its packs"


def test_a_job_goes_on_elsewhere(node: Node, remote: str, tmp_path: Path) -> None:
    """A checkpoint of a container that was pulled is compared with it: what goes back is what changed since."""
    _, second = ids(node)
    push(node.domain, second, remote)
    other = Other(tmp_path / "other")
    other.pull(second, remote)
    changed = pages(5, 7) + node.new[5 * PAGE_BYTES :]
    other.dump(changed)
    other.complete()
    third = ids(other)[1]
    assert 5 * PAGE_BYTES < push(other.domain, third, remote).moved_bytes < 6 * PAGE_BYTES
    pull(node.store, "team", third, remote)
    assert node.contents() == [node.old, node.new, changed]
    for each in (node, other):
        each.assert_clean()
        assert verify(each.domain, read_data=True) == []
    prune(other.store, Keep(last=1))
    assert other.contents() == [changed]
    other.assert_clean()


def test_what_was_pruned_here_comes_back(node: Node, directory: Path) -> None:
    first, second = ids(node)
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(directory))
    prune(node.store, Keep(last=1))
    pull(node.store, "team", first, str(directory))
    assert sorted(node.contents()) == sorted([node.old, node.new])
    node.assert_clean()
    node.dump(node.old)
    node.complete()
    prune(node.store, Keep(last=1))
    assert node.contents() == [node.old]
    node.assert_clean()


def test_pruning_a_remote(node: Node, remote: str, tmp_path: Path) -> None:
    first, second = ids(node)
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, remote)
    (would,) = prune_remote(remote, Keep(last=1), dry_run=True)
    assert would.removed == (first,)
    assert len(list_remote(remote)) == 2
    (done,) = prune_remote(remote, Keep(last=1))
    assert done.removed == (first,)
    other = Other(tmp_path / "other")
    with pytest.raises(RemoteError, match=f"has no checkpoint {first} in domain team"):
        other.pull(first, remote)
    other.pull(second, remote)
    assert other.contents() == [node.new]
    node.dump(pages(9, 9))
    node.complete()
    push(node.domain, ids(node)[-1], remote)
    (done,) = prune_remote(remote, Keep(last=1))
    assert done.removed == (second,)
    assert remote.startswith("oci://") or done.freed_bytes > 90 * PAGE_BYTES, "a registry does that itself"
    assert len(RemoteCheckpoints(remote, Keyring(NO_KEYS, "team")).packs()) == 1


def test_the_order_of_what_several_nodes_made(node: Node) -> None:
    """By each node's sequence, whatever its clock did; by clocks between nodes."""
    (manifest, _) = node.domain.checkpoints()

    def made(name: str, seed: int, sequence: int, hour: int) -> StoredManifest:
        created = f"2026-01-01T{hour:02}:00:00Z"
        return dataclasses.replace(manifest, id=name, seed=seed, sequence=sequence, created=created)

    rows = [made("a", 1, 0, 3), made("b", 1, 1, 9), made("c", 1, 2, 1), made("d", 2, 5, 8), made("e", 2, 6, 10)]
    random.Random(1).shuffle(rows)
    assert [row.id for row in remote_listing.in_order(rows)] == ["a", "d", "b", "c", "e"]


def test_what_a_checkpoint_claims_is_bounded(
    node: Node, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout, by the pages that there can be; the ids of pages, by the disk."""
    first, other = ids(node)[0], Other(tmp_path / "other")
    push(node.domain, first, str(directory))
    layout = directory / f"domains/team/checkpoints/{first}.layout"
    layout_bytes = layout.read_bytes()
    manifest = node.domain.read(first)
    assert len(layout_bytes) < largest_layout(manifest) < manifest.raw_bytes
    layout.write_bytes(bytes(largest_layout(manifest) + 1))
    with pytest.raises(RemoteError, match=rf"{first}.layout is larger than {largest_layout(manifest)} bytes"):
        other.pull(first, str(directory))
    layout.write_bytes(layout_bytes)
    monkeypatch.setattr("ocihook.store.adopt.ID_BYTES", 1 << 40)
    with pytest.raises(StoreFull, match=f"claims {manifest.raw_bytes} bytes of memory; the ids of its pages take"):
        other.pull(first, str(directory))


def test_a_prune_spares_what_is_being_pushed(node: Node, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The push has sent its packs when the prune comes; then the prune announces, and the next push waits for it."""
    remote = open_remote(str(directory), "team")
    first, _ = ids(node)
    layout = node.domain.layout(node.domain.read(first))
    with remote.pushing(first, layout.packs) as known:
        assert known == set()
        for info in layout.packs:
            assert sum(remote.send_pack(info, node.domain.packs_dir / info.name)) == info.size_bytes
        assert remote.remove_rubbish(set) == 0
    assert remote.remove_rubbish(set) > 0
    waited = []
    blobs = DirectoryBlobs(directory)
    blobs.write("domains/team/removing/x", f'["{layout.packs[0].name}"]'.encode())

    def removed_meanwhile(_seconds: float) -> None:
        waited.append(1)
        blobs.remove("domains/team/removing/x")

    monkeypatch.setattr("ocihook.remote.objects.time.sleep", removed_meanwhile)
    with remote.pushing(first, layout.packs):
        assert waited == [1]
    blobs.write("domains/team/removing/x", f'["{layout.packs[0].name}"]'.encode())
    os.utime(directory / "domains/team/removing/x", (0, 0))
    with remote.pushing(first, layout.packs):
        assert waited == [1], "whoever announced that is dead"


@pytest.mark.parametrize("torn", [False, True])
def test_a_push_that_dies_at_any_write(node: Node, tmp_path: Path, *, torn: bool) -> None:
    first, second = ids(node)
    before = tmp_path / "before"
    before.mkdir()
    push(node.domain, first, str(before))
    number = 0
    while True:
        number += 1
        there = tmp_path / f"there-{number}"
        shutil.copytree(before, there)

        def act(there: Path = there, number: int = number) -> None:
            die_at(number, torn=torn)
            push(node.domain, second, str(there))

        status = in_child(act)
        assert status in {0, DIED}
        has = [row.id for row in list_remote(str(there))]
        assert has in ([first], [first, second])
        push(node.domain, second, str(there))
        other = Other(tmp_path / f"other-{number}")
        for checkpoint_id in (first, second):
            other.pull(checkpoint_id, str(there))
        assert sorted(other.contents()) == sorted([node.old, node.new])
        for path in there.rglob("*"):
            os.utime(path, (0, 0))  # so that what was announced, or begun, is found to be of long ago
        prune_remote(str(there), Keep())
        assert {path.name.partition(".")[2] for path in there.rglob("*") if path.is_file()} == {
            "pack",
            "layout",
            "manifest",
        }
        shutil.rmtree(there)
        shutil.rmtree(other.root)
        if status == 0:
            break
    assert number > 12


@pytest.mark.parametrize("torn", [False, True])
def test_a_pull_that_dies_at_any_write(node: Node, directory: Path, tmp_path: Path, *, torn: bool) -> None:
    first, second = ids(node)
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(directory))
    number = 0
    while True:
        number += 1
        other = Other(tmp_path / f"other-{number}")
        other.pull(first, str(directory))

        def act(other: Other = other, number: int = number) -> None:
            die_at(number, torn=torn)
            other.pull(second, str(directory))

        status = in_child(act)
        assert status in {0, DIED}
        assert other.contents() in ([node.old], [node.old, node.new])
        assert verify(other.domain, read_data=True) == []
        other.pull(second, str(directory))
        assert other.contents() == [node.old, node.new]
        for path in other.domain.pending_dir.iterdir():
            os.utime(path, (0, 0))
        other.assert_clean()
        assert list(other.domain.pending_dir.iterdir()) == []
        shutil.rmtree(other.root)
        if status == 0:
            break
    assert number > 12


@pytest.mark.parametrize("torn", [False, True])
def test_a_remote_prune_that_dies_at_any_write(node: Node, tmp_path: Path, *, torn: bool) -> None:
    first, second = ids(node)
    before = tmp_path / "before"
    before.mkdir()
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(before))
    number = 0
    while True:
        number += 1
        there = tmp_path / f"there-{number}"
        shutil.copytree(before, there)

        def act(there: Path = there, number: int = number) -> None:
            die_at(number, torn=torn)
            prune_remote(str(there), Keep(last=1))

        status = in_child(act)
        assert status in {0, DIED}
        assert list_remote(str(there))[-1].id == second
        other = Other(tmp_path / f"other-{number}")
        other.pull(second, str(there))
        assert other.contents() == [node.new]
        prune_remote(str(there), Keep(last=1))
        assert [row.id for row in list_remote(str(there))] == [second]
        assert len(list(there.rglob("*.layout"))) == 1
        shutil.rmtree(there)
        shutil.rmtree(other.root)
        if status == 0:
            break
    assert number > 5


def test_an_interrupted_pull_goes_on(node: Node, directory: Path, tmp_path: Path) -> None:
    _, second = ids(node)
    push(node.domain, second, str(directory))
    other = Other(tmp_path / "other")
    packs = sorted((directory / "domains/team/packs").iterdir())
    half = packs[0].read_bytes()[: packs[0].stat().st_size // 2]
    other.store.open("team", create=True)
    pending = other.domain.pending_dir / second
    pending.mkdir()
    (pending / packs[0].name).write_bytes(half)
    fetched: list[int] = []

    def count(blobs: Any, name: str, path: Path) -> Iterator[int]:
        for size in real(blobs, name, path):
            fetched.append(size)
            yield size

    real = DirectoryBlobs.fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectoryBlobs, "fetch", count)
        patch.setattr(transfer, "TRANSFERS", 1)
        other.pull(second, str(directory))
    assert sum(fetched) == sum(path.stat().st_size for path in packs) - len(half)
    assert other.contents() == [node.new]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["packs/*.pack", "checkpoints/*.layout", "checkpoints/*.manifest"])
@pytest.mark.parametrize("act", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_a_remote_that_lies(
    node: Node, directory: Path, tmp_path: Path, kind: str, act: Callable[[Path], object]
) -> None:
    _, second = ids(node)
    push(node.domain, second, str(directory))
    good = tmp_path / "good"
    shutil.copytree(directory, good)
    act(next((directory / "domains/team").glob(kind)))
    other = Other(tmp_path / "other")
    with pytest.raises((IntegrityError, RemoteError)):
        other.pull(second, str(directory))
    if other.store_dir.exists():
        assert other.contents() == []
    other.pull(second, str(good))
    assert other.contents() == [node.new]


def test_an_exchanged_checkpoint(node: Node, directory: Path, tmp_path: Path) -> None:
    first, second = ids(node)
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, str(directory))
    there = directory / "domains/team/checkpoints"
    shutil.copy(there / f"{first}.manifest", there / f"{second}.manifest")
    with pytest.raises(IntegrityError, match=f"where checkpoint {second} of domain team should be is {first} of team"):
        Other(tmp_path / "other").pull(second, str(directory))
    with pytest.raises(IntegrityError, match=f"where checkpoint {second} of domain team should be is {first}"):
        push(node.domain, second, str(directory))


def test_a_damaged_pack_does_not_travel(node: Node, remote: str) -> None:
    flip(next(node.domain.packs_dir.iterdir()))
    with pytest.raises(IntegrityError, match="is damaged"):
        push(node.domain, ids(node)[1], remote)
    assert list_remote(remote) == []


def test_a_remote_that_is_gone(node: Node, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ids(node)[0]
    with pytest.raises(RemoteError, match=r"is no directory. Is it mounted\?"):
        push(node.domain, first, str(tmp_path / "not-there"))
    with pytest.raises(RemoteError, match="specified bucket does not exist"):
        push(node.domain, first, bucket.replace("//bucket-", "//other-"))
    monkeypatch.setattr("ocihook.remote.s3._CONFIG", Config(retries={"max_attempts": 0}))
    with pytest.raises(RemoteError, match="Could not connect"):
        push(node.domain, first, re.sub(":[0-9]+&", ":1&", bucket))
    assert verify(node.domain, read_data=True) == []


def test_a_remote_that_never_answers(node: Node, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del endpoint  # its credentials are needed
    config = Config(connect_timeout=1, read_timeout=0.2, retries={"max_attempts": 0})
    monkeypatch.setattr("ocihook.remote.s3._CONFIG", config)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"s3://bucket?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region=us-east-1"
        with pytest.raises(RemoteError, match="Read timeout"):
            push(node.domain, ids(node)[0], location)


@pytest.mark.parametrize(
    ("option", "has_own"), [("", True), ("&checksums=when_supported", True), ("&checksums=when_required", False)]
)
def test_servers_that_know_no_checksums(endpoint: str, tmp_path: Path, option: str, *, has_own: bool) -> None:
    """What botocore adds by itself can be left out; the hash that a request is signed with is compared all the same."""
    del endpoint  # its credentials are needed
    seen: list[Any] = []

    class Server(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            seen.append(self.headers)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "pack").write_bytes(b"x" * 1000)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        blobs = open_blobs(f"s3://bucket?endpoint={url}&region=us-east-1{option}")
        assert list(blobs.send("pack", tmp_path / "pack")) == [1000]
        blobs.write("mark", b"y")
        server.shutdown()
    assert len(seen) == 2
    for headers in seen:
        names = {name.lower() for name in headers}
        assert bool(names & {"x-amz-trailer", "x-amz-sdk-checksum-algorithm"}) is has_own
        assert has_own or re.fullmatch("[0-9a-f]{64}", headers["x-amz-content-sha256"])


def test_a_kind_of_checksums_that_is_not_known() -> None:
    with pytest.raises(RemoteError, match="when_required"):
        open_remote("s3://bucket?region=us-east-1&checksums=never", "team")


@pytest.mark.parametrize(
    "location",
    [
        "",
        "relative/path",
        "ftp://host/x",
        "s3://",
        "s3://bucket?speed=9",
        "s3://bucket?x",
        "oci://r.io/x?x=1",
        "oci://r.io/x:tag",
    ],
)
def test_what_is_no_remote(location: str) -> None:
    with pytest.raises(ConfigError, match=r"is no remote\. Use an absolute path"):
        open_remote(location, "team")


def test_a_full_remote(node: Node, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ocihook.remote.directory.os.posix_fadvise", full)
        with pytest.raises(RemoteError, match=r"No space left on device. Make room there"):
            push(node.domain, ids(node)[0], str(directory))
    assert not [path for path in directory.rglob("*") if path.is_file()]


def test_pushes_by_policy(node: Node, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    from ocihook.config import Settings

    first, _ = ids(node)
    node.domain.pushes.note(first)
    settings = Settings(store_dir=str(node.store_dir), remote=str(directory / "gone"))
    pushing.push_due(settings)
    assert "was not pushed" in caplog.text
    assert [(name, push.checkpoint_id) for name, push in pushing.due(node.store)] == [("team", first)]
    pushing.push_due(Settings(store_dir=str(node.store_dir), remote=str(directory)), at_once=True)
    assert pushing.due(node.store) == []
    assert [row.id for row in list_remote(str(directory))] == [first]
    node.domain.pushes.note(first)
    prune(node.store, Keep(last=1))
    assert list(node.domain.pushes_dir.iterdir()) == []
    with contextlib.suppress(OcihookError):
        node.domain.read(first)
        pytest.fail("it was pruned")


def test_pushes_are_tried_again_after_longer_and_longer(node: Node, directory: Path) -> None:
    from ocihook.config import Settings
    from ocihook.store.pushes import FIRST_WAIT_S, LONGEST_WAIT_S

    first, second = ids(node)
    node.domain.pushes.note(first)
    since_s = node.domain.due_pushes()[0].since_s
    gone = Settings(store_dir=str(node.store_dir), remote=str(directory / "gone"))
    now_s, waits = since_s, []

    def now() -> float:
        return now_s

    for attempt in range(1, 13):
        assert pushing.has_due_pushes(node.store, now_s)
        assert len(pushing.push_due(gone, now)) == 1
        (push_state,) = node.domain.due_pushes()
        assert push_state.attempts == attempt
        assert "is no directory" in push_state.error
        assert push_state.since_s == pytest.approx(since_s, abs=1)
        assert not pushing.has_due_pushes(node.store, now_s)
        assert pushing.push_due(gone, now) == [], "not before it is time"
        waits.append(push_state.next_s - now_s)
        now_s = push_state.next_s
    assert FIRST_WAIT_S / 2 - 1 <= waits[0] <= FIRST_WAIT_S
    assert all(LONGEST_WAIT_S / 2 - 1 <= wait <= LONGEST_WAIT_S for wait in waits[-4:])
    assert all(late > early for early, late in zip(waits[:5:2], waits[2:7:2], strict=True))
    node.domain.pushes.note(second)
    there = Settings(store_dir=str(node.store_dir), remote=str(directory))
    assert pushing.push_due(there, now) == []
    assert node.domain.due_pushes() == []
    assert pushing.next_push_s(node.store, now_s) is None


def test_when_an_agent_has_to_push_next(node: Node) -> None:
    first, second = ids(node)
    assert pushing.next_push_s(node.store, 0) is None
    node.domain.pushes.note(first)
    (waiting,) = node.domain.due_pushes()
    now_s = waiting.since_s + 10
    assert pushing.next_push_s(node.store, now_s) == 0
    later = node.domain.pushes.failed(waiting, "why", now_s, lambda _low, high: high)
    assert later.next_s == now_s + 30
    assert pushing.next_push_s(node.store, now_s) == pytest.approx(30, abs=1)
    node.domain.pushes.note(second)
    assert pushing.next_push_s(node.store, now_s) == 0, "one that was never tried is tried now"
    node.domain.pushes.end(second)
    assert pushing.has_due_pushes(node.store, now_s - 7200), "a clock that was put back keeps nothing from being tried"
    assert pushing.next_push_s(node.store, now_s + 2 * 86400) is None, "no agent waits for ever"
    (node.domain.pushes_dir / first).write_bytes(b"garbage")
    assert node.domain.due_pushes()[0].attempts == 0


def test_an_agent_pushes_again_and_leaves_when_all_is_pushed(
    node: Node, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote is mounted only after the first attempt; nothing else makes the agent try again."""
    from integration.namespace import wait_for
    from ocihook.agent.listening import Listener
    from ocihook.agent.server import Agent
    from ocihook.config import Settings

    monkeypatch.setattr("ocihook.store.pushes.FIRST_WAIT_S", 2.0)
    remote = tmp_path / "later"
    settings = Settings(store_dir=str(node.store_dir), remote=str(remote))
    (first, *_) = ids(node)
    node.domain.pushes.note(first)
    run_dir = tmp_path / "agent"
    run_dir.mkdir()

    def agent() -> None:
        listener = Listener(run_dir / "agent.sock", socket.SOCK_SEQPACKET, backlog=1)
        Agent(listener, run_dir, lambda: settings).run(idle_timeout_s=0.1)

    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            agent()
            status = 0
        os._exit(status)
    wait_for("the first attempt", lambda: any(push.attempts for push in node.domain.due_pushes()))
    remote.mkdir()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it leaves"
    assert node.domain.due_pushes() == []
    assert [row.id for row in list_remote(str(remote))] == [first]


def test_one_of_several_nodes_prunes_the_remote(node: Node, remote: str, tmp_path: Path) -> None:
    from ocihook.config import Settings

    def settings(of: Node, **options: Any) -> Settings:
        return Settings(store_dir=str(of.store_dir), remote=remote, **options)

    first, second = ids(node)
    for checkpoint_id in (first, second):
        push(node.domain, checkpoint_id, remote)
    pushing.push_due(settings(node))
    assert len(list_remote(remote)) == 2, "nothing is removed unless it is configured"
    freed = remote_listing.prune_remote_by_policy(settings(node, remote_keep_last=1))
    assert [row.removed for row in freed] == [(first,)]
    node.dump(pages(9, 9))
    node.complete()
    third = ids(node)[-1]
    node.domain.pushes.note(third)
    assert pushing.push_due(settings(node, remote_keep_last=1)) == []
    other = Other(tmp_path / "other")
    assert remote_listing.prune_remote_by_policy(settings(other, remote_keep_last=1)) == []
    assert [row.id for row in list_remote(remote)] == [second, third], "it was pruned a moment ago"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_listing, "REMOTE_PRUNED_EVERY_S", 0)
        (pruned,) = remote_listing.prune_remote_by_policy(settings(other, remote_keep_last=1))
        assert pruned.removed == (second,)
    assert [row.id for row in list_remote(remote)] == [third]


def test_of_nodes_that_prune_within_one_second_the_first_does(remote: str) -> None:
    turns = []
    for _ in range(20):
        with open_remote(remote, "team").pruning(3600) as is_ours:
            turns.append(is_ours)
    assert turns == [True] + [False] * 19


def test_a_prune_by_policy_that_fails_is_not_counted(node: Node, directory: Path) -> None:
    push(node.domain, ids(node)[0], str(directory))
    remote = open_remote(str(directory), "team")
    with pytest.raises(IntegrityError), remote.pruning(3600):
        raise IntegrityError("damaged there")
    with remote.pruning(3600) as is_ours, open_remote(str(directory), "team").pruning(3600) as is_theirs:
        assert (is_ours, is_theirs) == (True, False)
    assert len(list(directory.glob("domains/team/pruned/*"))) == 1
