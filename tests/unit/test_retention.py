"""What goes and what stays: by owner, within bounds, except what is pinned or in use; no process waits for a prune."""

import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.namespace import wait_for
from ocihook.agent.session import Session
from ocihook.checkpoints import listing, pending, pulling, pushing, rehydrate, remote_listing, transfer
from ocihook.checkpoints.prune import Keep, prune, prune_archives, prune_by_policy
from ocihook.config import Policy, Settings, apply_annotations
from ocihook.container.conmon import conmon_name
from ocihook.container.identity import container_ref
from ocihook.errors import StoreError
from ocihook.linux import workers
from ocihook.model import ContainerRef
from ocihook.packs.pack import PAGE_BYTES
from ocihook.store import garbage, rewrite
from ocihook.store.domain import Domain
from ocihook.store.extents import encode_layout
from ocihook.store.lineage import lineage
from ocihook.store.records import entry_of
from ocihook.store.store import Store
from ocihook.store.stored_manifest import StoredManifest, encode_stored
from ocihook.store.thin import Thin
from ocihook.store.verify import verify
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.fakes.keys import make_keys
from tests.unit.test_domain import CONTAINER, content_of, random_pages, take
from tests.unit.test_session import Node as SessionNode
from tests.unit.test_session import of_namespace
from tests.unit.test_store_crash import Node, in_child, pages

NOW_S = 1_800_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def domain(store: Store) -> Domain:
    return store.open("team", create=True)


@contextlib.contextmanager
def doing(act: Callable[[], object]) -> Iterator[int]:
    """Have another process do something, then wait to be killed."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            act()
            os.write(told, b"1")
            signal.pause()
        os._exit(1)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"1"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def pod(name: str, owner: str = "") -> ContainerRef:
    return ContainerRef(id=name, engine="containerd", name="main", pod_name=name, pod_namespace="team", owner=owner)


def ids(domain: Domain) -> list[str]:
    return [manifest.id for manifest in domain.checkpoints()]


def made(domain: Domain, number: int, *, content: int = 20, container: ContainerRef = CONTAINER) -> StoredManifest:
    """Make a checkpoint of pages that no other one has, an hour after the one before."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW_S + 3600 * number))
    return take(domain, {"pages-1.img": random_pages(content, number)}, container=container, created=created)


# --- whose checkpoints


@pytest.mark.parametrize(
    ("names", "member"),
    [
        (["train-x7k2p", "train-24567", "train-bcdfg"], "train"),  # a Job
        (["train-0-x7k2p", "train-0-24567"], "train-0"),  # an indexed one
        (["train-12-x7k2p"], "train-12"),
        (["nightly-29345678-x7k2p", "nightly-29347118-9vq4c"], "nightly"),  # a CronJob
        (["nightly-29345678-3-x7k2p", "nightly-29347118-3-9vq4c"], "nightly-3"),
        (["train-20261122-x7k2p"], "train-20261122"),  # a date, part of a Job's own name
        (["llm-workers-0-1-x7k2p", "llm-workers-0-1-zzzzz"], "llm-workers-0-1"),  # a JobSet
        (["web-5d4f8c7b96-x7k2p", "web-66b6c48dd5-9vq4c"], "web"),  # a Deployment
        (["db-0"], "db-0"),  # a StatefulSet
        (["db-11"], "db-11"),
        (["train-x7k2p-9vq4c"], "train-x7k2p"),  # a Job whose own name was generated
        (["train-final"], "train-final"),  # names by people have vowels
        (["x7k2p"], "x7k2p"),
        (["a" * 57 + "-x7k2p"], "a" * 57 + "-x7k2p"),  # the owner's name may have been longer
    ],
)
def test_members_by_the_names_of_pods(names: list[str], member: str) -> None:
    assert {lineage(pod(name)) for name in names} == {f"team/{member}/main"}


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("train-8f3a-x7k2p", "mine"),
        ("train-2-x7k2p", "mine-2"),
        ("llm-workers-0-1-x7k2p", "mine-0-1"),
        ("db-3", "mine-3"),
        ("web-5d4f8c7b96-x7k2p", "mine"),
        ("a" * 52 + "-3-" + "-x7k2p", "mine"),
        ("a" * 55 + "-3-x7k2p", "mine-3"),  # cut, but its index is there: ranks stay apart
    ],
)
def test_an_owner_that_is_named_keeps_the_indices(name: str, member: str) -> None:
    assert lineage(pod(name, "mine")) == f"team/{member}/main"


def test_an_owner_by_annotation() -> None:
    annotations = {
        "io.kubernetes.cri.container-name": "main",
        "io.kubernetes.cri.sandbox-name": "train-x7k2p",
        "io.kubernetes.cri.sandbox-namespace": "team",
        "ocihook.io/owner": "experiment",
    }
    container = container_ref(annotations, container_id="c", runtime="runc", bundle="/b")
    assert lineage(container) == "team/experiment/main"
    assert ContainerRef.from_json(container.to_json()) == container
    assert apply_annotations(Settings(), annotations, in_pod=True) == (Policy(), (), ())
    (unknown,) = apply_annotations(Settings(), {"ocihook.io/owners": "x"}, in_pod=True).unknown
    assert unknown.startswith("annotation ocihook.io/owners is not known here")


def test_podman_by_name() -> None:
    podman = container_ref(
        {"io.container.manager": "libpod"}, container_id="ab" * 32, runtime="crun", bundle="/b", name="web"
    )
    assert (podman.name, lineage(podman)) == ("web", "web")
    assert lineage(dataclasses.replace(podman, owner="mine")) == "mine"
    assert lineage(dataclasses.replace(podman, name="")) == podman.id
    assert lineage(ContainerRef(id="of-ctr", name="x")) == "of-ctr"


def test_the_name_that_conmon_was_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {
        7: ["/usr/bin/conmon", "--api-version", "1", "-c", "abc", "-u", "abc", "-n", "web", "--full-attach", "-s"],
        6: ["runc", "restore", "abc"],
    }
    parents = {5: 6, 6: 7, 7: 1, 8: 7, 9: 1}
    monkeypatch.setattr("ocihook.container.conmon.command_line", lambda pid: lines.get(pid, []))
    monkeypatch.setattr("ocihook.container.conmon.parent_pid", lambda pid: parents.get(pid, 0))
    assert conmon_name(8, "abc") == "web", "the parent of a container's init"
    assert conmon_name(5, "abc") == "web", "in a restore, of CRIU's runtime"
    assert conmon_name(8, "another") == ""
    assert conmon_name(9, "abc") == conmon_name(0, "abc") == ""


def test_a_thousand_pods_of_a_job(store: Store, domain: Domain) -> None:
    first = take(domain, {"pages-1.img": random_pages(2, 1)}, container=pod("train-bbbbb"))
    record = encode_layout(domain.layout(first))
    alphabet = "bcdfghjklmnpqrstvwxz2456789"
    newest = first
    for number in range(1, 1000):
        name = f"train-{''.join(alphabet[number // 27**place % 27] for place in range(5))}"
        link = entry_of(newest, encode_stored(newest)).link
        checkpoint_id = f"20260101T000000Z-{number:08x}"
        newest = dataclasses.replace(first, id=checkpoint_id, sequence=number, previous=link, container=pod(name))
        (domain.checkpoints_dir / f"{checkpoint_id}.manifest").write_bytes(encode_stored(newest))
        (domain.checkpoints_dir / f"{checkpoint_id}.layout").write_bytes(record)
    domain.rewrite_head()
    (pruned,) = prune(store, Keep(last=1))
    assert len(pruned.removed) == 999
    assert ids(domain) == [newest.id]
    assert verify(domain, read_data=True) == []
    assert len(list(domain.checkpoints_dir.iterdir())) <= 3, "nothing is left of the others but a link"


def test_ranks_keep_their_own(store: Store, domain: Domain) -> None:
    names = [f"llm-workers-0-{rank}-{suffix}" for suffix in ("bbbbb", "ccccc") for rank in range(3)]
    for number, name in enumerate(names):
        made(domain, number, content=1, container=pod(name))
    prune(store, Keep(last=1))
    assert [manifest.container.pod_name for manifest in domain.checkpoints()] == names[3:]


# --- pins and use


def test_what_is_pinned_stays(store: Store, domain: Domain) -> None:
    old, *_, newest = [made(domain, number) for number in range(4)]
    listing.pin(store, old.id, is_pinned=True)
    assert [row.is_pinned for row in listing.list_checkpoints(store)] == [True, False, False, False]
    prune(Store(store.root), Keep(last=1, max_bytes=1))
    assert ids(domain) == [old.id, newest.id]
    assert content_of(domain, old)["pages-1.img"] == random_pages(20, 0)
    listing.pin(store, old.id, is_pinned=False)
    prune(store, Keep(last=1))
    assert ids(domain) == [newest.id]
    assert not list(domain.checkpoints_dir.glob("*.pin"))
    with pytest.raises(StoreError, match="has no checkpoint"):
        listing.pin(store, old.id, is_pinned=True)


def test_a_pin_is_for_complete_checkpoints(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    node.dump(node.new)
    (pending,) = node.domain.pending_dir.iterdir()
    with pytest.raises(StoreError, match=r"is still being stored. `ocihook wait`"):
        listing.pin(node.store, pending.name, is_pinned=True)


def test_what_a_restore_uses_stays_until_its_process_ends(store: Store, domain: Domain) -> None:
    """Between two stages, too, in which it reads nothing; and its pages stay where they are."""
    old = made(domain, 0)
    made(domain, 1)
    with doing(lambda: pending.keep_in_use(store, Thin("team", old.id), is_pulled=False)):
        assert [row.is_used for row in listing.list_checkpoints(store)] == [True, False]
        (pruned,) = prune(store, Keep(last=1, max_bytes=1))
        assert pruned.removed == ()
        assert content_of(domain, old)["pages-1.img"] == random_pages(20, 0)
    assert not domain.marks.is_used(old.id), "a process that was killed uses nothing"
    (pruned,) = prune(store, Keep(last=1))
    assert pruned.removed == (old.id,)
    with pytest.raises(StoreError, match=f"no checkpoint {old.id}"), domain.using(old.id):
        pass


def test_what_a_restore_is_to_pull_is_used_before_it_is_here(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    remote = tmp_path / "remote"
    remote.mkdir()
    (old,) = ids(node.domain)
    pushing.push(node.domain, old, str(remote))
    node.dump(node.new)
    node.complete()
    prune(node.store, Keep(last=1))
    with doing(lambda: pending.keep_in_use(node.store, Thin("team", old), is_pulled=True)):
        prune(node.store, Keep(last=1))
        pulling.pull(node.store, "team", old, str(remote))
        prune(node.store, Keep(last=1))
        assert old in ids(node.domain)
    node.dump(node.new)
    node.complete()
    prune(node.store, Keep(last=1))
    assert old not in ids(node.domain)
    assert not list(node.domain.checkpoints_dir.glob(f"{old}.*"))


def test_a_checkpoint_in_use_stays_in_its_packs(tmp_path: Path) -> None:
    """A process that has read its layout, and continues to read, finds them."""
    node = Node(tmp_path / "node")
    few = node.old[: 5 * PAGE_BYTES] + pages(2, 5)
    node.dump(few)
    node.complete()
    newest = node.domain.checkpoints()[-1]
    packs = {info.name for info in node.domain.layout(newest).packs}
    with doing(lambda: node.domain.marks.begin_use(newest.id)):
        prune(node.store, Keep(last=1))
        assert packs <= {path.name for path in node.domain.packs_dir.iterdir()}
        assert node.contents() == [few]
    prune(node.store, Keep(last=1))
    assert not packs <= {path.name for path in node.domain.packs_dir.iterdir()}
    assert node.contents() == [few]
    node.assert_clean()


# --- bounds


def test_the_oldest_of_all_pay(store: Store, domain: Domain) -> None:
    """Even the newest of their container, of whatever namespace; not more of them than must, and never the last one."""
    other = store.open("another", create=True)
    rows = [made((domain, other)[n % 2], n, container=ContainerRef(id=f"c{n}")) for n in range(6)]
    one = max(domain.own_bytes(rows[0].id), 20 * PAGE_BYTES)
    total = sum(each.stored_bytes() for each in (domain, other))
    would = prune(store, Keep(max_bytes=total - one), dry_run=True)
    assert sorted(name for pruned in would for name in pruned.removed) == [rows[0].id]
    prune(store, Keep(max_bytes=total - one))
    assert sorted([*ids(domain), *ids(other)]) == sorted(row.id for row in rows[1:])
    prune(store, Keep(max_bytes=total // 2))
    assert sorted([*ids(domain), *ids(other)]) == sorted(row.id for row in rows[4:])
    assert sum(each.stored_bytes() for each in (domain, other)) <= total // 2
    prune(store, Keep(max_bytes=1))
    assert [*ids(domain), *ids(other)] == [rows[5].id]
    assert verify(domain, read_data=True) == verify(other, read_data=True) == []


def test_a_bound_that_cannot_be_kept_is_told(store: Store, domain: Domain, caplog: pytest.LogCaptureFixture) -> None:
    rows = [made(domain, number) for number in range(3)]
    domain.pin(rows[0].id)
    prune_by_policy(Settings(store_dir=str(store.root), max_store_bytes=1))
    assert ids(domain) == [rows[0].id, rows[2].id]
    assert "more than it may: what is left is pinned, in use or the newest" in caplog.text


def test_a_bound_counts_shared_pages_once(store: Store, domain: Domain) -> None:
    """Ten checkpoints of the same pages take no more than one: none need go."""
    content = random_pages(200, 1)
    before = None
    for number in range(10):
        container = ContainerRef(id=f"c{number}")
        before = take(domain, {"pages-1.img": content}, container=container, before=before)
    prune(store, Keep(max_bytes=2 * len(content)))
    assert len(ids(domain)) == 10


def test_a_damaged_domain_does_not_keep_others_from_being_pruned(store: Store, domain: Domain) -> None:
    bad = store.open("damaged", create=True)
    made(bad, 0)
    next(bad.checkpoints_dir.glob("*.layout")).write_bytes(b"")
    rows = [made(domain, number) for number in range(2)]
    prune_by_policy(Settings(store_dir=str(store.root), keep_last=1))
    assert ids(domain) == [rows[1].id]
    assert len(ids(bad)) == 1


def test_a_bound_of_archives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    make_image_set(tmp_path / "images", {1: mixed_pages(5)})
    paths = [directory / f"checkpoint-{number}.tar" for number in range(4)]
    for number, path in enumerate(paths):
        make_archive(path, tmp_path / "images", "containerd")
        os.utime(path, (1000 + number, 1000 + number))
    size = paths[0].stat().st_size
    (directory / "no-archive.tar").write_bytes(b"x")
    os.utime(directory / "no-archive.tar", (1, 1))
    bound = Settings(archive_dir=str(directory), max_archive_bytes=2 * size + size // 2)
    planned = prune_archives(directory, Keep(max_bytes=bound.max_archive_bytes), Store.of(bound), dry_run=True)
    assert planned.removed == ("checkpoint-0.tar", "checkpoint-1.tar")
    prune_by_policy(bound)
    assert [path.exists() for path in paths] == [False, False, True, True]
    prune_by_policy(dataclasses.replace(bound, max_archive_bytes=1))
    assert [path.exists() for path in paths] == [False, False, False, True], "the newest stays"
    assert "more than max_archive_bytes" in caplog.text
    assert (directory / "no-archive.tar").exists()


# --- who waits for whom


def test_a_restore_does_not_wait_for_a_prune(store: Store, domain: Domain) -> None:
    """Not even for one that is alone in the domain, for ever."""
    manifest = made(domain, 0)

    stack = contextlib.ExitStack()
    with doing(lambda: stack.enter_context(domain.alone())):
        with pytest.raises(StoreError, match="in use"), domain.alone(0):
            pass
        images = store.root / "images"
        images.mkdir()
        rehydrate.rehydrate_stored(domain, manifest, images, workers=1)
        assert (images / "pages-1.img").read_bytes() == random_pages(20, 0)


def test_a_push_does_not_starve_a_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the middle of sending; what it sends stays, and only that."""
    node = Node(tmp_path / "node")
    node.dump(node.new)
    node.complete()
    node.dump(pages(9, 9))
    node.complete()
    first, second, third = ids(node.domain)
    remote = tmp_path / "remote"
    remote.mkdir()
    go_on, told = os.pipe()
    sending = tmp_path / "sending"
    send = pushing._send

    def slow(*arguments: object) -> Iterator[int]:
        sending.touch()
        os.read(go_on, 1)
        yield from send(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pushing, "_send", slow)
    monkeypatch.setattr(transfer, "TRANSFERS", 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            pushing.push(node.domain, first, str(remote))
            status = 0
        os._exit(status)
    wait_for("the push", sending.exists)
    (pruned,) = prune(node.store, Keep(last=1), timeout_s=60)
    assert pruned.removed == (second,)
    assert ids(node.domain) == [first, third]
    os.write(told, bytes(100))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [row.id for row in remote_listing.list_remote(str(remote))] == [first]
    (pruned,) = prune(node.store, Keep(last=1))
    assert pruned.removed == (first,)


def test_whoever_stores_lets_a_prune_go_first(domain: Domain) -> None:
    """One store after the other, without a pause: a prune has its turn all the same."""

    def store_for_ever() -> None:
        pid = os.fork()
        if pid == 0:
            workers.die_with_parent(os.getppid())
            while True:
                with domain.shared(in_turn=True):
                    time.sleep(0.3)

    with doing(store_for_ever), domain.alone(60):
        pass


def meanwhile(monkeypatch: pytest.MonkeyPatch, module: object, name: str, act: Callable[[], object]) -> None:
    """Have something done when a prune first gets to a function."""
    original = getattr(module, name)

    def call(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(module, name, original)
        act()
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, call)


def test_what_is_found_before_the_index_has_lost_it(
    store: Store, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune is not alone while it rewrites the index: what is stored then may need what was to be removed."""
    old, new = random_pages(50, 1), random_pages(50, 2)
    for content in (old, new):
        take(domain, {"pages-1.img": content})
    others: list[StoredManifest] = []
    again = lambda: others.append(take(domain, {"pages-1.img": old}, container=ContainerRef(id="other")))  # noqa: E731
    meanwhile(monkeypatch, garbage, "merge_index", again)
    (pruned,) = prune(store, Keep(last=1), timeout_s=60)
    assert len(pruned.removed) == 1
    (other,) = others
    assert other.added_bytes == 0
    assert content_of(domain, other)["pages-1.img"] == old
    assert verify(domain, read_data=True) == []


def test_what_is_stored_while_packs_are_written_anew(
    store: Store, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random_pages(400, 1)
    few, more = content[: 100 * PAGE_BYTES], content[: 300 * PAGE_BYTES]
    for part in (content, few):
        take(domain, {"pages-1.img": part})
    others: list[StoredManifest] = []
    again = lambda: others.append(take(domain, {"pages-1.img": more}, container=ContainerRef(id="other")))  # noqa: E731
    meanwhile(monkeypatch, rewrite, "_rewrite", again)
    prune(store, Keep(last=1), timeout_s=60)
    (other,) = others
    for _ in range(2):
        assert content_of(domain, other)["pages-1.img"] == more
        assert content_of(domain, domain.checkpoints()[0])["pages-1.img"] == few
        assert verify(domain, read_data=True) == []
        prune(store, Keep())


def test_two_prunes_at_once(store: Store, domain: Domain) -> None:
    made(domain, 0)
    with domain.upkeep(), pytest.raises(StoreError, match="in use by another process"):
        prune(store, Keep(), timeout_s=0)


def test_a_rekey_waits_for_a_restore(store: Store, domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocihook.store.rewrite.LOCK_TIMEOUT_S", 0.3)
    manifest = made(domain, 0)
    keyed = Store(store.root, make_keys(store.root)).open("team")
    with (
        doing(lambda: domain.marks.begin_use(manifest.id)),
        keyed.alone(),
        pytest.raises(StoreError, match=f"checkpoint {manifest.id} is in use"),
    ):
        rewrite.rekey(keyed)
    keyed = Store(store.root, keyed.keyring.source).open("team")
    with keyed.alone():
        assert rewrite.rekey(keyed) == 1
    assert verify(Store(store.root, keyed.keyring.source).open("team"), read_data=True) == []


def test_priority_while_others_wait() -> None:
    def act() -> None:
        workers.run_at_low_priority()
        assert os.getpriority(os.PRIO_PROCESS, 0) == 19
        with workers.at_normal_priority():
            assert os.getpriority(os.PRIO_PROCESS, 0) == (0 if os.geteuid() == 0 else 19)
        assert os.getpriority(os.PRIO_PROCESS, 0) == 19

    assert in_child(act) == 0


def test_a_restore_uses_its_checkpoint_from_its_first_stage_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container_pid: int
) -> None:
    """As a session of its own, which then waits for CRIU's next stage."""
    session = SessionNode(tmp_path, monkeypatch, container_pid)
    node = Node(tmp_path / "node")
    shutil.rmtree(session.directory)
    shutil.copytree(node.images, session.directory)
    session.image_fd = os.open(session.directory, os.O_RDONLY)
    session.annotations = of_namespace("team")
    settings = Settings(store_dir=str(node.store_dir), workers=1, history_dir=str(tmp_path / "history"))
    monkeypatch.setattr(session, "session", Session(session.journal, lambda: settings))
    (old,) = ids(node.domain)
    node.dump(node.new)
    node.complete()

    def pre_restore() -> None:
        status, message = session.stage("pre-restore")
        assert (status, old in message) == (0, True)

    with doing(pre_restore):
        assert (session.directory / "pages-1.img").read_bytes() == node.old
        (pruned,) = prune(node.store, Keep(last=1, max_bytes=1))
        assert pruned.removed == ()
    (pruned,) = prune(node.store, Keep(last=1))
    assert pruned.removed == (old,)
