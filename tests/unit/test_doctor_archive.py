"""What doctor says of a restore before anybody tries."""

import dataclasses
import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ocihook.archive import repack as archives
from ocihook.checkpoints.pushing import push
from ocihook.config import Settings
from ocihook.container import storage
from ocihook.container.descriptors import check_image_files
from ocihook.criu import files as criu_files
from ocihook.criu.version import Program
from ocihook.errors import ArchiveError, CudaUnsupported, IntegrityError, OcihookError
from ocihook.gpu.nvml import Gpu
from ocihook.images import compatibility
from ocihook.node.doctor import archive as module
from ocihook.node.doctor import machine
from ocihook.packs.packed_manifest import read_manifest, write_manifest
from ocihook.preflight.finding import Finding, Status
from ocihook.store.store import Store
from tests.fakes.images import make_archive, make_image_set, mixed_pages

HOST = {"machine": compatibility.host_facts("4.1.1")["machine"], "criu": "4.1.1", "cpu_features": "avx2 fpu"}


def packed(tmp_path: Path, host: dict[str, str], **changes: Any) -> Path:
    """Return a packed archive that was made on such a host."""
    images, plain, path = tmp_path / "images", tmp_path / "plain.tar", tmp_path / "packed.tar"
    make_image_set(images, {1: mixed_pages(50)})
    make_archive(plain, images, "containerd")
    archives.pack_archive(plain, path, compression="none", force=False, workers=1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with tarfile.open(path) as tar:
        tar.extractall(scratch, filter="data")
    manifest = read_manifest(scratch / "checkpoint")
    assert manifest is not None
    write_manifest(scratch / "checkpoint", dataclasses.replace(manifest, host=host, **changes), durable=False)
    with tarfile.open(path, "w") as tar:
        for entry in scratch.iterdir():
            tar.add(entry, entry.name)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_settings", lambda: Settings(store_dir=str(tmp_path / "store")))
    monkeypatch.setattr(module, "_has_image", lambda _engine, _image: True)
    monkeypatch.setattr(compatibility, "features", lambda: frozenset({"fpu", "avx2", "new"}))


def found(path: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in module.check_archive(path)}


def test_an_image_directory(tmp_path: Path) -> None:
    """The findings are those of the archive, but that nothing is unpacked."""
    archive = packed(tmp_path, HOST | {"criu": "9.9"})
    directory = tmp_path / "scratch/checkpoint"
    of_archive, of_directory = found(archive), found(directory)
    assert {name: f.status for name, f in of_directory.items()} == {
        name: f.status for name, f in of_archive.items() if name != "image"
    }
    assert of_directory["host"] == of_archive["host"]
    assert f"; {directory} has" in of_directory["room"].detail
    with pytest.raises(ArchiveError, match="none of CRIU's images"):
        found(tmp_path / "scratch")


@pytest.mark.parametrize(
    "name", ["descriptors.json", "inventory.img", "pagemap-1.img", "core-1.img", "ocihook.manifest"]
)
@pytest.mark.parametrize("kind", ["fifo", "link", "device", "directory"])
@pytest.mark.parametrize("where", ["", "earlier"])
def test_a_file_that_no_runtime_should_open(tmp_path: Path, name: str, kind: str, where: str) -> None:
    packed(tmp_path, HOST)
    directory = tmp_path / "scratch/checkpoint"
    target = directory / where
    if where:
        target.mkdir()
        (directory / "parent").symlink_to(where)
    odd = target / name
    odd.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "device":
        os.mknod(odd, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    elif kind == "link":
        odd.symlink_to("/dev/zero")
    else:
        odd.mkdir()
    with pytest.raises(OcihookError, match=r"is not a file|none of CRIU's images"):
        found(directory)
    with pytest.raises(IntegrityError, match=rf"{name} in {directory}\S* is not a file: a restore would wait for it"):
        check_image_files(directory)


def test_earlier_dumps_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "inventory.img").touch()
    (tmp_path / "parent").symlink_to(".")
    with pytest.raises(IntegrityError, match="needs more than 32 earlier dumps"):
        check_image_files(tmp_path)


def test_a_link_that_leads_to_no_earlier_dump(tmp_path: Path) -> None:
    """A runtime with `/` as its directory has left `/parent`, to which podman's first dump leads then."""
    images, root = tmp_path / "images", tmp_path / "root"
    images.mkdir()
    root.mkdir()
    (images / "inventory.img").touch()
    (images / "parent").symlink_to(root)
    (root / "parent").symlink_to(".")
    check_image_files(images)


def test_one_that_fits(tmp_path: Path) -> None:
    findings = found(packed(tmp_path, HOST))
    assert {name: finding.status for name, finding in findings.items()} == {
        "images": Status.OK,
        "host": Status.OK,
        "image": Status.OK,
        "gpus": Status.OK,
        "room": Status.OK,
    }


@pytest.mark.parametrize("lost", ["inventory.img", "pagemap-1.img", "descriptors.json", "pages-1.img"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_one_that_lacks_images(tmp_path: Path, lost: str, *, is_packed: bool) -> None:
    """The finding says what `archive verify` says."""
    archive = packed(tmp_path, HOST) if is_packed else plain(tmp_path, "containerd", extra={})
    if is_packed and lost == "pages-1.img":
        lost = "ocihook-0.pack"
    with tarfile.open(archive) as source, tarfile.open(tmp_path / "lost.tar", "w") as target:
        members = [member for member in source if not member.name.endswith(f"/{lost}")]
        assert len(members) < len(source.getmembers())
        for member in members:
            target.addfile(member, source.extractfile(member))
    finding = found(tmp_path / "lost.tar")["images"]
    assert finding.status is Status.FAIL
    assert finding.remedy
    with pytest.raises(OcihookError):
        archives.verify_archive(tmp_path / "lost.tar", workers=1)


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"machine": "riscv64"}, "host", "made on riscv64, this node is"),
        ({"criu": "4.3"}, "host", "this node's CRIU 4.1.1 cannot read it"),
        ({"cpu_features": "avx2 avx512f amx_tile fpu weird"}, "cpu", "lack amx_tile, avx512f: programs"),
    ],
)
def test_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], check: str, message: str
) -> None:
    monkeypatch.setattr(module, "find_program", lambda _: type("Criu", (), {"version_text": "4.1.1"}))
    finding = found(packed(tmp_path, HOST | changes))[check]
    assert finding.status is Status.FAIL
    assert message in finding.detail
    assert finding.remedy


@pytest.mark.parametrize(
    ("image", "has", "status", "word"),
    [
        ("example.org/train:1", True, Status.OK, "containerd has example.org/train:1"),
        ("example.org/train:1", False, Status.WARN, "a restore pulls it first"),
        ("example.org/train:1", None, Status.SKIP, "is not known"),
        ("localhost/train;reboot", False, Status.FAIL, "is in no registry"),
    ],
)
def test_the_base_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, status: Status, word: str, *, has: bool | None
) -> None:
    """It is the engine's: the archive has only what has changed since."""
    monkeypatch.setattr(module, "_has_image", lambda _engine, _image: has)
    config = json.dumps({"id": "ab" * 32, "rootfsImageName": image}).encode()
    path = plain(tmp_path, "containerd", extra={"config.dump": config})
    finding = found(path)["image"]
    assert (finding.status, word in finding.detail) == (status, True)
    assert ";" not in finding.remedy or finding.remedy.endswith(f"save '{image}', podman load")


def plain(tmp_path: Path, engine: str, *, extra: dict[str, bytes], images: tuple[str, ...] = ()) -> Path:
    """Return a plain archive."""
    make_image_set(tmp_path / "images", {1: mixed_pages(50)})
    for name in images:
        (tmp_path / "images" / name).write_bytes(b"x")
    make_archive(tmp_path / "plain.tar", tmp_path / "images", engine, extra=extra)
    return tmp_path / "plain.tar"


@pytest.mark.parametrize(
    ("program", "said", "has"),
    [
        ("ctr", (0, "docker.io/x:1\nexample.org/train:1\n"), True),
        ("ctr", (0, "docker.io/x:1\n"), False),
        ("ctr", (1, "no containerd"), None),
        ("podman", (0, ""), True),
        ("podman", (1, ""), False),
        ("podman", (125, "broken"), None),
        ("none", (0, ""), None),
    ],
)
def test_engines_are_asked_for_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: tuple[int, str], *, has: bool | None
) -> None:
    monkeypatch.undo()
    (tmp_path / program).write_text(f"#!/bin/sh\nprintf '{said[1]}'\nexit {said[0]}\n".replace("\n'", "\\n'"))
    (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(
        module, "find_program", lambda name: Program(name, str(tmp_path / name), ()) if name == program else None
    )
    assert module._has_image("containerd" if program == "ctr" else "podman", "example.org/train:1") is has


@pytest.mark.parametrize(
    ("engine", "conf", "status", "word"),
    [
        ("podman", "", Status.WARN, "podman container restore --tcp-established"),
        ("cri-o", "", Status.FAIL, "echo tcp-close >> "),
        ("cri-o", "tcp-close\n", Status.OK, "has tcp-close"),
        ("podman", "tcp-established\n", Status.OK, "has tcp-established"),
    ],
)
def test_connections_in_a_dump_need_an_option_in_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, conf: str, status: Status, word: str
) -> None:
    monkeypatch.setattr(criu_files, "CRIU_CONF_DIR", tmp_path)
    monkeypatch.setattr(criu_files, "find_program", lambda name: Program(name, f"/usr/bin/{name}", (1, 3)))
    (tmp_path / "runc.conf").write_text(conf)
    path = plain(tmp_path, engine, extra={}, images=("tcp-stream-2f.img",))
    finding = found(path)["tcp-established"]
    assert (finding.status, word in f"{finding.detail} {finding.remedy}") == (status, True)
    (tmp_path / "images/tcp-stream-2f.img").unlink()
    make_archive(path, tmp_path / "images", engine)
    assert "tcp-established" not in found(path)


def test_room_is_looked_for_where_podman_is_told_to_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "storage.conf"
    conf.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}"\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(conf))
    assert f"; {tmp_path} has" in found(plain(tmp_path, "podman", extra={}))["room"].detail
    assert machine.image_set_places("crio") == (str(tmp_path),)
    for text in ("[storage]\n", "storage = 1\n", "not TOML", '[storage]\ngraphroot = "relative"\n'):
        conf.write_text(text)
        assert storage.storage_root() == storage.DEFAULT_ROOT


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had = {"driver": "580", "processes": 1, "devices": [{"uuid": "GPU-a", "name": "H200", "minor": 0, "held_bytes": 9}]}
    path = packed(tmp_path, HOST, gpu=had)

    def no_driver() -> None:
        raise CudaUnsupported("there is no driver", hint="install it")

    monkeypatch.setattr(module, "CudaDriver", no_driver)
    assert found(path)["gpus"] == Finding("gpus", Status.FAIL, "there is no driver", "install it")
    monkeypatch.setattr(module, "CudaDriver", lambda: None)
    other = Gpu(uuid="GPU-b", name="H200", minor=1, total_bytes=20, free_bytes=20)
    nodes: list[tuple[str, list[Gpu]]] = [("580", [other]), ("590", [other]), ("580", [])]
    monkeypatch.setattr(module, "read_node", lambda _: nodes.pop(0))
    assert found(path)["gpus"] == Finding("gpus", Status.OK, "driver 580; 1 GPUs: GPU-a becomes GPU-b")
    assert "this node has 590" in found(path)["gpus"].detail
    assert "this node gives it 0" in found(path)["gpus"].detail


def test_a_thin_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, plain, thin = tmp_path / "images", tmp_path / "plain.tar", tmp_path / "thin.tar"
    make_image_set(images, {1: mixed_pages(50)})
    make_archive(plain, images, "containerd")
    store, remote = Store(tmp_path / "store"), tmp_path / "remote"
    remote.mkdir()
    archives.pack_archive(plain, thin, into_store=store, compression="none", force=False, workers=1)
    assert found(thin)["store"].detail.endswith("is in this node's store")
    (name,) = store.names()
    domain = store.open(name)
    push(domain, domain.checkpoint_ids()[0], str(remote))
    elsewhere = Settings(store_dir=str(tmp_path / "other"), remote=str(remote))
    monkeypatch.setattr(module, "load_settings", lambda: elsewhere)
    assert found(thin)["store"].detail.endswith(f"is in {remote}")
    monkeypatch.setattr(module, "load_settings", lambda: dataclasses.replace(elsewhere, remote=""))
    finding = found(thin)["store"]
    assert finding.status is Status.FAIL
    assert "is neither in this node's store nor at its remote" in finding.detail


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no archive")
    with pytest.raises(ArchiveError):
        module.check_archive(tmp_path / "x.tar")
