"""Archives of engines as a source of the runtime handler: which count, and how what they hold is brought."""

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from ocihook.archive import restorable
from ocihook.archive.places import archive_directories, archive_files
from ocihook.archive.restorable import find_archives, lay_out_archive, write_belongings
from ocihook.belongings.bringing import bring
from ocihook.checkpoints import pending
from ocihook.checkpoints.belongings import FACTS_NAME, IMAGES_DIR
from ocihook.checkpoints.origin import ORIGIN_NAME, Origin, decode_origin, write_origin
from ocihook.config import LATEST, Policy, Settings
from ocihook.container.spec import SpecFacts
from ocihook.errors import ArchiveError, IntegrityError, NoCheckpoint, OcihookError, StoreError, UnsupportedError
from ocihook.linux.patience import ENDLESS
from ocihook.model import ContainerRef
from ocihook.packs.pages import no_progress
from ocihook.runtime import choice
from ocihook.runtime.choice import choose
from ocihook.runtime.containers import Kept
from ocihook.store.lineage import domain_name
from ocihook.store.store import Store
from ocihook.store.stored_manifest import BELONGINGS_NAME
from ocihook.store.thin import Thin, write_thin
from tests.fakes.images import make_archive, make_image_set, mixed_pages

SPEC = SpecFacts(image="i", mounts=("/proc",), user="0:0", namespaces=("pid",), devices=(), has_terminal=False)
JOB = ContainerRef(id="a" * 64, engine="podman", runtime="runc", name="job")
VOLUME = "e" * 64


def checkpoint_id(number: int) -> str:
    return f"20261123T12000{number}Z-0123abcd"


def made(number: int, container: ContainerRef = JOB) -> Origin:
    return Origin(
        id=checkpoint_id(number),
        created=f"2026-11-23T12:00:0{number}Z",
        container=container,
        spec=SPEC,
        volumes={VOLUME: "/cache"},
    )


class Node:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.archives = path / "archives"
        self.archives.mkdir(mode=0o700)
        self.settings = Settings(store_dir=str(path / "lib/store"), archive_dir=str(self.archives))

    def add(
        self, name: str, origin: Origin | None, thin: Thin | None = None, extra: Mapping[str, bytes] | None = None
    ) -> Path:
        images = self.path / f"images-{name}"
        make_image_set(images, {1: mixed_pages(10)})
        if origin is not None:
            write_origin(images, origin)
        if thin is not None:
            write_thin(images, thin, durable=False)
        make_archive(self.archives / name, images, extra=extra)
        return self.archives / name

    def choose(self, wanted: str, container: ContainerRef, **rules: tuple[str, ...]) -> tuple[Thin, Path | None]:
        kept = Kept(
            container=container, bundle=self.path, program=Path("runc"), prefix=(), domain=domain_name(container)
        )
        settings = Settings(
            store_dir=self.settings.store_dir, archive_dir=self.settings.archive_dir, restore_from=rules
        )
        chosen = choose(kept, Policy(restore_from=wanted), settings, ENDLESS)
        return chosen.thin, chosen.archive


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


NEW = ContainerRef(id="b" * 64, engine="podman", runtime="runc", name="job")


def test_the_newest_or_the_one_that_is_named_is_chosen(node: Node) -> None:
    first, second = node.add("1.tar", made(1)), node.add("2.tar", made(2))
    node.add("3.tar", made(3, ContainerRef(id="c" * 64, engine="podman", runtime="runc", name="other")))
    in_store = node.add("4.tar", made(1), Thin("_node", checkpoint_id(9)))
    assert node.choose(LATEST, NEW) == (Thin("_node", checkpoint_id(2)), second)
    assert node.choose(checkpoint_id(1), NEW) == (Thin("_node", checkpoint_id(1)), first)
    assert node.choose(checkpoint_id(9), NEW) == (Thin("_node", checkpoint_id(9)), in_store)
    with pytest.raises(NoCheckpoint, match=f"no checkpoint {checkpoint_id(7)} .*nor in an engine's archive here"):
        node.choose(checkpoint_id(7), NEW)


def test_an_archive_whose_snapshot_is_being_read_is_waited_for_and_passed_over_if_that_was_lost(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node.add("1.tar", made(1)), node.add("2.tar", made(2), Thin("_node", checkpoint_id(2)))
    domain = Store.of(node.settings).open("_node", create=True)
    place = pending.directory_of(domain, checkpoint_id(2))
    place.mkdir()
    job = pending.Job(
        id=checkpoint_id(2),
        created=made(2).created,
        container=JOB,
        host={},
        images={},
        sizes={},
        other_images=(),
        boot_id="",
        awaits_memory=True,
    )
    pending.write_job(domain, job, durable=False)
    named = Thin("_node", checkpoint_id(2)), second
    with pending.claimed(place):
        with monkeypatch.context() as patch:
            states = ["reading", "reading"]
            patch.setattr(choice, "memory_state", lambda *_: states.pop() if states else "")
            assert node.choose(LATEST, NEW) == named, "it was read meanwhile"
        monkeypatch.setattr(choice, "MADE_S", 0.1)
        assert node.choose(LATEST, NEW) == (Thin("_node", checkpoint_id(1)), first), "not in time"
    assert node.choose(LATEST, NEW) == (Thin("_node", checkpoint_id(1)), first), "its reader has died"
    assert node.choose(checkpoint_id(2), NEW) == named, "its restore fails, and says why"
    found = pending.read_job(domain, checkpoint_id(2))
    assert found is not None
    assert found.lost


def test_only_archives_of_the_pod_s_own_namespace_count(node: Node) -> None:
    pods = [
        ContainerRef(id=name, engine="containerd", runtime="runc", name="main", pod_name="db-0", pod_namespace=name)
        for name in ("mine", "yours")
    ]
    path = node.add("1.tar", made(1, pods[1]))
    for wanted in (LATEST, checkpoint_id(1)):
        with pytest.raises(NoCheckpoint):
            node.choose(wanted, pods[0])
        assert node.choose(wanted, pods[1]) == (Thin("yours", checkpoint_id(1)), path)
    assert node.choose(checkpoint_id(1), pods[0], mine=("yours",)) == (Thin("yours", checkpoint_id(1)), path)


def test_what_cannot_be_trusted_or_read_is_left_out(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    good = node.add("1.tar.gz", made(1))
    good.write_bytes(gzip.compress(good.read_bytes()))
    node.add("without.tar", None)
    damaged = node.add("damaged.tar", made(2))
    damaged.write_bytes(damaged.read_bytes()[:-20000])
    (node.archives / "link.tar").symlink_to(node.add("3.tar", made(3)).rename(node.path / "3.tar"))
    (node.archives / "1.txt").write_text("")
    assert [found.path for found in find_archives(archive_files(node.settings))] == [good]
    assert "nothing is restored from" in caplog.text
    assert not archive_files(node.settings, since_s=time.time() + 60)
    node.archives.chmod(0o770)
    assert not archive_files(node.settings)
    assert "others than root can write there" in caplog.text
    assert node.path / "lib/archives" in archive_directories(node.settings)


def test_archives_that_cannot_be_read_in_time_do_not_hold_up_a_container(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.archives.joinpath("1.tar").touch()
    monkeypatch.setattr(choice, "ARCHIVES_S", 0.1)
    monkeypatch.setattr(restorable, "find_archives", lambda _: time.sleep(1000))
    with pytest.raises(StoreError, match=r"the 1 archives in .*/archives were not read in 0.1 s"):
        node.choose(LATEST, NEW)


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    write_origin(tmp_path, made(1))
    data = (tmp_path / ORIGIN_NAME).read_bytes()
    assert decode_origin(data) == made(1)
    for broken in (b"", data[:-1], data.replace(b"/cache", b"/other")):
        with pytest.raises(IntegrityError):
            decode_origin(broken)
    write_origin(tmp_path, Origin(id="../x", created="", container=JOB, spec=SPEC))
    with pytest.raises(IntegrityError, match="malformed"):
        decode_origin((tmp_path / ORIGIN_NAME).read_bytes())


def tar_of(*members: tuple[str, str | None], **links: str) -> bytes:
    """Return a tar of files with this text, or directories; links by the name they are for."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, text in members:
            info = tarfile.TarInfo(name)
            info.uid, info.gid, info.mtime = os.getuid(), os.getgid(), 1700000000.25
            info.type, info.mode = (tarfile.DIRTYPE, 0o755) if text is None else (tarfile.REGTYPE, 0o640)
            info.size = len(text or "")
            tar.addfile(info, io.BytesIO((text or "").encode()))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.uid, info.gid = tarfile.LNKTYPE, target, os.getuid(), os.getgid()
            tar.addfile(info)
    return file.getvalue()


def test_what_an_engine_saved_is_laid_out(node: Node) -> None:
    whiteouts = tar_of(
        *(("./etc", None), ("etc/new", "new"), ("etc/.wh.old", "")),
        *(("a/", None), ("a/.wh..wh..opq", ""), ("a/only", "this"), ("x" * 200, "long name")),
        hard="etc/new",
    )
    extra = {
        "rootfs-diff.tar": gzip.compress(whiteouts),
        "deleted.files": json.dumps(["/gone/dir", "/gone/file"]).encode(),
        "devshm-checkpoint.tar": tar_of(("./", None), ("./segment", "shared")),
        f"volumes/{VOLUME}.tar": tar_of(("kept", "cached")),
        f"volumes/{'f' * 64}.tar": tar_of(("kept", "of nobody")),
        "container.log": b"said",
    }
    path = node.add("1.tar", made(1), extra=extra)
    place = node.path / "place"
    place.mkdir()
    origin = lay_out_archive(path, checkpoint_id(1), place, 1 << 20)
    assert origin == made(1)
    assert (place / IMAGES_DIR / "pages-1.img").read_bytes() == mixed_pages(10)
    assert SpecFacts(*json.loads((place / FACTS_NAME).read_bytes())).image == "i"

    trees = {name: node.path / name for name in ("rootfs", "shm", "cache")}
    for name in ("etc/old", "a/below/it", "gone/dir/x", "gone/file", "gone/stays"):
        (trees["rootfs"] / name).parent.mkdir(parents=True, exist_ok=True)
        (trees["rootfs"] / name).write_text("of the image")
    for tree in trees.values():
        tree.mkdir(exist_ok=True)
    places = {"rootfs": trees["rootfs"], "volumes/%2Fdev%2Fshm": trees["shm"], "volumes/%2Fcache": trees["cache"]}
    bring(place / BELONGINGS_NAME, places, no_progress)
    there = {str(file.relative_to(node.path)) for tree in trees.values() for file in tree.rglob("*") if file.is_file()}
    expected = {"rootfs/etc/new", "rootfs/a/only", "rootfs/hard", f"rootfs/{'x' * 200}", "rootfs/gone/stays"}
    assert there == expected | {"shm/segment", "cache/kept"}
    status = (trees["rootfs"] / "etc/new").stat()
    assert (status.st_mode & 0o777, status.st_mtime, status.st_nlink) == (0o640, 1700000000.25, 2)


@pytest.mark.parametrize(
    ("extra", "wanted", "error", "message"),
    [
        ({}, 2, IntegrityError, "is not the archive of checkpoint .* any more"),
        ({"rootfs-diff.tar": gzip.compress(bytes(1 << 21))}, 1, ArchiveError, "takes more than 1048576 bytes"),
        ({"rootfs-diff.tar": tar_of(("a/.wh..wh..opq", ""))}, 1, UnsupportedError, "a was replaced, and does not have"),
        ({"rootfs-diff.tar": b"x" * 5000}, 1, IntegrityError, "is damaged"),
        ({"deleted.files": b'{"a": 1}'}, 1, IntegrityError, "is not an array of names"),
        ({"deleted.files": b"["}, 1, IntegrityError, "is not JSON"),
    ],
)
def test_a_damaged_or_hostile_archive_is_refused(
    node: Node, extra: dict[str, bytes], wanted: int, error: type[OcihookError], message: str
) -> None:
    path = node.add("1.tar", made(1), extra=extra)
    place = node.path / "place"
    place.mkdir()
    with pytest.raises(error, match=message):
        lay_out_archive(path, checkpoint_id(wanted), place, 1 << 20)


@pytest.mark.parametrize(
    ("tree", "deleted"), [(tar_of(("../out", "x")), ()), (tar_of(("a/../../out", "x")), ()), (tar_of(), ("/../out",))]
)
def test_nothing_is_brought_outside(tmp_path: Path, tree: bytes, deleted: Iterable[str]) -> None:
    (tmp_path / "tree").write_bytes(tree)
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "out").write_text("stays")
    write_belongings(tmp_path / "belongings", {"rootfs": tmp_path / "tree"}, deleted)
    with pytest.raises(IntegrityError, match="a member has the name"):
        bring(tmp_path / "belongings", {"rootfs": tmp_path / "rootfs"}, no_progress)
    assert (tmp_path / "out").read_text() == "stays"
