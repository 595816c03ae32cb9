"""`ocihook image`: what it makes of archives, plain, compressed and thin, and what a registry gets of it."""

import gzip
import hashlib
import json
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ocihook.cli.main import cli
from ocihook.container import engine_archive
from ocihook.errors import ArchiveError, ConfigError, IntegrityError, RegistryError
from tests.damage import flip_bit
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.fakes.registry import Registry, answers

MEMORY = {1: mixed_pages(300), 5: mixed_pages(20, seed=2)}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "images", MEMORY)
    make_archive(tmp_path / "plain.tar", tmp_path / "images", "cri-o")
    return tmp_path / "plain.tar"


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.close()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_layout(directory: Path) -> dict[str, bytes]:
    """Return all blobs of a layout, after a check of what the specification wants of it."""
    assert json.loads((directory / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (directory / "blobs/sha256").iterdir()}
    assert all(digest(data) == name for name, data in blobs.items())
    return blobs


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_build(tmp_path: Path, plain: Path, compression: str) -> None:
    content, archive = tmp_path / "packed.tar", tmp_path / "compressed"
    assert run("archive", "pack", plain, content).exit_code == 0
    if compression == "none":
        archive = content
    else:
        with engine_archive._open_stream(archive, "wb", compression) as stream:
            stream.write(content.read_bytes())
    built = run_json("image", "build", archive, tmp_path / "layout", "--name", "example.org/team/job:7")
    blobs = read_layout(tmp_path / "layout")
    (entry,) = json.loads((tmp_path / "layout/index.json").read_bytes())["manifests"]
    assert entry["digest"] == built["digest"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == "7"
    manifest = json.loads(blobs[entry["digest"]])
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar" + f"+{compression}".replace("+none", "")
    assert blobs[layer["digest"]] == archive.read_bytes()
    config = json.loads(blobs[manifest["config"]["digest"]])
    assert config["rootfs"] == {"type": "layers", "diff_ids": [digest(content.read_bytes())]}
    assert (config["os"], config["architecture"]) == ("linux", "amd64")
    assert built["annotations"] == manifest["annotations"]
    assert manifest["annotations"] == {
        "io.kubernetes.cri-o.annotations.checkpoint.name": "c1",
        "org.criu.checkpoint.container.name": "c1",
        "org.criu.checkpoint.engine.name": "cri-o",
        "org.criu.checkpoint.pod.name": "p1",
        "org.criu.checkpoint.pod.namespace": "default",
        "org.criu.checkpoint.rootfsImageName": "example.org/train:1",
        "org.criu.checkpoint.runtime.name": "runc",
    }
    again = run_json("image", "build", archive, tmp_path / "again.tar", "--oci-archive")
    assert again["digest"] == built["digest"]  # the same archive makes the same image
    assert stat.S_IMODE((tmp_path / "layout").stat().st_mode) == 0o700  # there is memory in them
    assert stat.S_IMODE((tmp_path / "again.tar").stat().st_mode) == 0o600
    with tarfile.open(tmp_path / "again.tar", "r:") as tar:
        tar.extractall(tmp_path / "extracted", filter="data")
    assert read_layout(tmp_path / "extracted") == blobs


def test_only_a_checkpoint_of_podman_is_one_for_podman(tmp_path: Path, plain: Path) -> None:
    """It refuses to start a container from any other image with such an annotation."""
    make_archive(tmp_path / "podman.tar", tmp_path / "images", "podman")
    built = run_json("image", "build", tmp_path / "podman.tar", tmp_path / "podman")
    assert built["annotations"]["io.podman.annotations.checkpoint.runtime.name"] == "runc"
    built = run_json("image", "build", plain, tmp_path / "cri-o")
    assert not any("podman" in key for key in built["annotations"])


def test_a_thin_archive(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "etc/ocihook/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[agent]\nstore_dir = "{tmp_path}/store"\n')
    monkeypatch.setattr("ocihook.config.CONFIG_FILE", config)
    thin = tmp_path / "thin.tar"
    assert run("archive", "pack", "--store", plain, thin).exit_code == 0
    kept = run_json("image", "build", thin, tmp_path / "kept", "--thin")
    whole = run_json("image", "build", thin, tmp_path / "whole")
    assert kept["bytes"] < 100_000 < whole["bytes"]
    manifest = json.loads(read_layout(tmp_path / "whole")[whole["digest"]])
    layer = tmp_path / "layer.tar"
    layer.write_bytes(read_layout(tmp_path / "whole")[manifest["layers"][0]["digest"]])
    assert run("archive", "diff", plain, layer).exit_code == 0
    assert not list(tmp_path.glob(".ocihook-*"))


def test_push(tmp_path: Path, plain: Path, registry: Registry) -> None:
    target = f"{registry.address}/team/job"
    pushed = run_json("image", "push", plain, f"{target}:1", "--plain-http")
    kind, manifest = registry.manifests["1"]
    assert kind == "application/vnd.oci.image.manifest.v1+json"
    assert pushed["reference"] == f"{target}:1"
    assert pushed["digest"] == digest(manifest)
    named = json.loads(manifest)
    assert set(registry.blobs) == {named["config"]["digest"], named["layers"][0]["digest"]}
    assert plain.read_bytes() in registry.blobs.values()
    assert pushed["sent_bytes"] == sum(map(len, registry.blobs.values()))
    for number, options in enumerate(([], ["--oci-archive"])):  # the same image, from elsewhere
        source = tmp_path / f"image{number}"
        run_json("image", "build", plain, source, *options)
        again = run_json("image", "push", source, target, "--plain-http")
        assert again["digest"] == pushed["digest"]
        assert again["sent_bytes"] == 0
    assert registry.manifests["latest"] == (kind, manifest)
    assert "0 B sent" in run("image", "push", plain, target, "--plain-http").stdout
    registry.blobs.clear()
    run_json("image", "push", tmp_path / "image1", target, "--plain-http")
    assert plain.read_bytes() in registry.blobs.values()  # from the middle of a tar


def test_a_push_that_fails_leaves_the_tag_alone(plain: Path, registry: Registry) -> None:
    registry.fail("POST", answers(403))
    result = run("image", "push", plain, f"{registry.address}/team/job:1", "--plain-http")
    assert isinstance(result.exception, RegistryError)
    assert "does not allow it" in str(result.exception)
    assert registry.manifests == {}


def test_what_cannot_be_built_or_pushed(tmp_path: Path, plain: Path, registry: Registry) -> None:
    def error(*arguments: object) -> BaseException | None:
        return run("image", *arguments).exception

    damaged = tmp_path / "damaged.tar.gz"
    damaged.write_bytes(gzip.compress(plain.read_bytes())[:-20])
    assert isinstance(error("build", damaged, tmp_path / "out"), ArchiveError)
    (tmp_path / "empty").mkdir()
    assert "exists" in str(error("build", plain, tmp_path / "empty"))
    assert isinstance(error("build", plain, tmp_path / "out", "--name", "No Name"), ConfigError)
    assert not (tmp_path / "out").exists()

    target = f"{registry.address}/team/job"
    for source in (damaged, tmp_path / "empty"):
        assert isinstance(error("push", source, target, "--plain-http"), ArchiveError)
    assert isinstance(error("push", plain, f"{target}@sha256:{64 * '0'}", "--plain-http"), ConfigError)
    layout = tmp_path / "layout"
    run_json("image", "build", plain, layout)
    manifest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]
    for name, data in (
        (f"blobs/{manifest.replace(':', '/')}", b"{}"),
        ("index.json", b'{"manifests": [{}, {}]}'),
        ("index.json", b"{"),
        ("index.json", b'{"manifests": [{"digest": "../../x", "size": 1, "mediaType": 1}]}'),
    ):
        before = (layout / name).read_bytes()
        (layout / name).write_bytes(data)
        assert isinstance(error("push", layout, target, "--plain-http"), ArchiveError)
        (layout / name).write_bytes(before)
    assert registry.requests == []
    largest = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    assert "is not blob" in str(error("push", layout, target, "--plain-http"))
    assert registry.manifests == {}


def test_a_damaged_checkpoint_becomes_no_image_unless_it_is_wanted(
    tmp_path: Path, plain: Path, registry: Registry
) -> None:
    packed, target = tmp_path / "packed.tar", f"{registry.address}/team/job:1"
    run_json("archive", "pack", plain, packed)
    with tarfile.open(packed) as tar:
        pack = next(member for member in tar if member.name.endswith(".pack"))  # of whichever worker had a task
        flip_bit(packed, pack.offset_data + 100)
    for arguments in (("build", packed, tmp_path / "out"), ("push", packed, target, "--plain-http")):
        assert isinstance(run("image", *arguments).exception, IntegrityError)
    assert not (tmp_path / "out").exists()
    assert registry.requests == []
    run_json("image", "build", packed, tmp_path / "out", "--no-verify")
    run_json("image", "push", packed, target, "--plain-http", "--no-verify")
    assert packed.read_bytes() in registry.blobs.values()


def test_an_interrupted_push_ends_at_once(tmp_path: Path, plain: Path, registry: Registry) -> None:
    """Also while the registry does not answer."""
    arrived, is_over = threading.Event(), threading.Event()

    def stall(_handler: object) -> bool:
        arrived.set()
        return is_over.wait(60)

    registry.fail("PUT", stall, times=2)
    command = [sys.executable, "-m", "ocihook", "image", "push", str(plain), f"{registry.address}/team/job"]
    before = set(tmp_path.iterdir())
    process = subprocess.Popen([*command, "--plain-http"])
    try:
        assert arrived.wait(60)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        is_over.set()
    assert set(tmp_path.iterdir()) == before
    assert registry.manifests == {}
