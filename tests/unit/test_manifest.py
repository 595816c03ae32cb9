"""The manifest: what is written is read, and nothing else is accepted."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from ocihook.errors import IntegrityError, StoreError
from ocihook.model import ContainerRef
from ocihook.packs import packed_manifest as manifest_module
from ocihook.packs.pack import PackInfo
from ocihook.packs.packed_manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    OtherImage,
    PackedImage,
    PackedManifest,
    Segment,
    decode_manifest,
    digest_file,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from tests.memory_bound import run_within

MANIFEST = PackedManifest(
    created="2026-11-20T22:57:44Z",
    writer="ocihook 0.1.0",
    container=ContainerRef(id="0123456789abcdef", engine="podman", name="train \N{SNOWMAN}"),
    host={"kernel": "6.12", "machine": "x86_64"},
    packed_images=(
        PackedImage("pages-1.img", 8192, (Segment("ocihook-0.pack", 0, 1), Segment("ocihook-1.pack", 7, 2))),
        PackedImage("pages-2.img", 0, ()),
    ),
    other_images=(OtherImage("core-1.img", 17, "0" * 32), OtherImage("descriptors.json", 2, "1" * 32)),
    packs=(PackInfo("ocihook-0.pack", 4200, 1, 2**64 - 1), PackInfo("ocihook-1.pack", 4300, 9, 0)),
)


def sealed(body: bytes, version: int = 1) -> bytes:
    return b"ocihook-manifest %d %s\n" % (version, xxh3_128_hexdigest(body).encode()) + body


def changed(path: str, value: Any, manifest: PackedManifest = MANIFEST) -> bytes:
    """A manifest with one value changed, sealed again; `path` is keys and indices joined by dots."""
    body = json.loads(encode_manifest(manifest).partition(b"\n")[2])
    at = body
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = value
    return sealed(json.dumps(body).encode(), 2 if manifest.gpu else 1)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for durable in (True, False):
        write_manifest(tmp_path, MANIFEST, durable=durable)
        assert read_manifest(tmp_path) == MANIFEST
    assert (tmp_path / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


def test_sums() -> None:
    assert MANIFEST.raw_bytes == 8192
    assert MANIFEST.stored_bytes == 8500


def test_a_directory_that_was_never_packed(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_keys_of_later_writers_are_ignored() -> None:
    assert decode_manifest(changed("comment", "hello")) == MANIFEST
    assert decode_manifest(changed("container.cluster", "west")) == MANIFEST


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_only_a_regular_file_is_a_manifest(tmp_path: Path, kind: str) -> None:
    path = tmp_path / MANIFEST_NAME
    if kind == "link":
        (tmp_path / "target").write_bytes(encode_manifest(MANIFEST))
        path.symlink_to("target")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(IntegrityError, match="cannot be opened"):
        read_manifest(tmp_path)


def test_sizes_are_bounded_when_reading_and_when_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, MANIFEST, durable=False)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(IntegrityError, match="larger than 100"):
        read_manifest(tmp_path)
    with pytest.raises(StoreError, match="larger than 100"):
        write_manifest(tmp_path, MANIFEST, durable=False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"ocihook-manifest",
        b"ocihook-manifest 1 \n{}",
        b"ocihook-manifest -1 " + b"0" * 32 + b"\n{}",
        b"ocihook-manifest 1 " + b"G" * 32 + b"\n{}",
        b" " + sealed(b"{}"),
        b"\xef\xbb\xbf" + sealed(b"{}"),
        b"ocihook-manifest " + b"9" * 5000 + b" " + b"0" * 32 + b"\n{}",
    ],
)
def test_what_does_not_begin_as_a_manifest(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="does not begin"):
        decode_manifest(data)


@pytest.mark.parametrize("version", [0, 3, 999999999])
def test_another_version_is_named_with_a_way_out(version: int) -> None:
    with pytest.raises(IntegrityError, match=f"version {version}, .* or a later one"):
        decode_manifest(sealed(b"{}", version))


def test_a_changed_body_is_damage() -> None:
    with pytest.raises(IntegrityError, match="checksum"):
        decode_manifest(encode_manifest(MANIFEST).replace(b"8192", b"4096"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b'"text"',
        b"1",
        b"\xff\xfe",
        "{}".encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b'{"packed_images": NaN}',
        b'{"packed_images": 1e999}',
        b"{} {}",
        b"\x00",
    ],
)
def test_bodies_that_are_no_manifest(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        decode_manifest(sealed(body))


BAD_NAMES: list[Any] = [
    1,
    None,
    "",
    ".",
    "..",
    "../pages-1.img",
    "/pages-1.img",
    "pages-1.img/",
    "a/pages-1.img",
    "pages-1.img\n",
]
BAD_NUMBERS: list[Any] = [-1, 1.0, True, False, None, "1", 1 << 60, 10**400, [], float("nan"), float("inf")]


BAD_VALUES: dict[str, list[Any]] = {
    "packed_images": [None, 1, {"a": 1}, [1], [[]], ["name"]],
    "packed_images.0.name": [*BAD_NAMES, "pages-.img", "pages-\u0661.img", "core-2.img"],
    "packed_images.1.name": ["pages-1.img"],  # twice
    "packed_images.0.size_bytes": BAD_NUMBERS,
    "packed_images.0.segments": [None, 1, "abc", [1], [[]], [["ocihook-0.pack", 0]]],
    "packed_images.0.segments.0": [["ocihook-0.pack", 0, 1, 1]],
    "packed_images.0.segments.0.0": [*BAD_NAMES, "x.pack"],
    "packed_images.0.segments.0.1": BAD_NUMBERS,
    "packed_images.0.segments.0.2": BAD_NUMBERS,
    "other_images.0.name": [*BAD_NAMES, "pages-1.img", "x", "a" * 251 + ".img", "a\0.img"],
    "other_images.0.size_bytes": BAD_NUMBERS,
    "other_files": [None, 1, [1], [{}]],
    "other_files.0.name": [*BAD_NAMES, "core-2.img", "x.json"],
    "other_images.0.digest": ["", "0" * 31, "A" * 32, 7, None],
    "packs": [None, {"a": {}}],
    "packs.0.name": [*BAD_NAMES, "ocihook-.pack", "ocihook-10000.pack", "x.pack"],
    "packs.1.name": ["ocihook-0.pack"],
    "packs.0.size_bytes": BAD_NUMBERS,
    "packs.0.chunks": BAD_NUMBERS,
    "packs.0.table_checksum": ["", "0" * 15, "0" * 17, "G" * 16, "+" + "0" * 15, 7, None],
    "created": [None, 1, "\ud800"],
    "writer": [None, [], "\udfff"],
    "host": [None, [], {"kernel": 1}, {"kernel": None}, {"\ud800": ""}, {"a": "\ud800"}],
    "container": [None, [], {}, {"id": 1}, {"id": "a", "name": 1}, {"id": "\ud800"}],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in BAD_VALUES.items() for value in values])
def test_every_value_is_checked(path: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        decode_manifest(changed(path, value))


GPU = {
    "driver": "580.159.04",
    "processes": 2,
    "devices": [{"uuid": "GPU-0a", "name": "H200", "minor": 0, "total_bytes": 20, "held_bytes": 7}],
    "held": {"1": {"GPU-0a": 4}, "3/1": {"GPU-0a": 3}},
    "threads": {"1": "5", "3/1": 4},
}
BAD_GPU_VALUES: dict[str, list[Any]] = {
    "gpu": [None, 1, [], "x", {"a": 1}, {"driver": "1"}, {"devices": []}],
    "gpu.driver": [None, 1, [], "\ud800"],
    "gpu.processes": BAD_NUMBERS,
    "gpu.devices": [None, 1, {}, "x", [1], [None], ["uuid"], [[]], [{}]],
    "gpu.devices.0.uuid": [None, 1, {}],
    "gpu.devices.0.name": [None, 1, {}],
    "gpu.devices.0.minor": BAD_NUMBERS,
    "gpu.devices.0.total_bytes": BAD_NUMBERS,
    "gpu.devices.0.held_bytes": BAD_NUMBERS,
    "gpu.held": [None, 1, [], {"x": {}}, {"1": 1}, {"1": None}, {"1": []}],
    "gpu.held.1.GPU-0a": BAD_NUMBERS,
    "gpu.threads": [None, 1, [], {"x": "1"}, {"1": "x"}, {"1": None}, {"1": True}, {"1": {}}, {"1": -1}],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in BAD_GPU_VALUES.items() for value in values]
)
def test_every_value_of_what_it_says_of_gpus_is_checked(path: str, value: Any) -> None:
    with_gpu = dataclasses.replace(MANIFEST, gpu=GPU)
    assert decode_manifest(encode_manifest(with_gpu)) == with_gpu
    with pytest.raises(IntegrityError, match="malformed"):
        decode_manifest(changed(path, value, with_gpu))


def test_an_error_stays_short_whatever_the_file_says() -> None:
    with pytest.raises(IntegrityError) as caught:
        decode_manifest(changed("packs.0.name", "x" * 1_000_000))
    assert len(str(caught.value)) < 500


def test_the_digest_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    content = os.urandom(3 << 20) + b"x"
    (tmp_path / "f").write_bytes(content)
    assert digest_file(tmp_path / "f") == xxh3_128_hexdigest(content)


_READ = (
    "from pathlib import Path; from ocihook.errors import IntegrityError; from ocihook.packs.packed_manifest import *"
)
_REFUSE = """
try:
    read_manifest(Path(sys.argv[1]))
except IntegrityError as error:
    print(error)
"""


def filled(before: bytes, piece: bytes, after: bytes, size_bytes: int) -> bytes:
    return sealed(before + piece * ((size_bytes - 200) // len(piece)) + after, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(filled(b"[", b"[],", b"1]", 30 << 20), "is larger than", id="30 MiB"),
        pytest.param(filled(b"[", b"[],", b"1]", MAX_MANIFEST_BYTES), "nothing but brackets", id="arrays"),
        pytest.param(filled(b"[", b'{"":0},', b"1]", MAX_MANIFEST_BYTES), "nothing but brackets", id="objects"),
        pytest.param(filled(b"[", b'{"aaaaaaaaaaa":0},', b"1]", MAX_MANIFEST_BYTES), "malformed", id="fewer objects"),
        pytest.param(
            filled(b'{"packed_images":[],"regions":[],"gpu":{"a":[', b"999,", b"1]}}", MAX_MANIFEST_BYTES),
            "malformed",
            id="numbers",
        ),
    ],
)
def test_a_hostile_manifest_is_read_in_bounded_memory(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    assert message in run_within(160 << 20, _REFUSE, tmp_path, before=_READ)


def test_three_tebibytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    segments = tuple(Segment(f"ocihook-{number % 64}.pack", number * 64, 3072) for number in range(3 << 16))
    image = PackedImage("pages-1.img", 3 << 40, segments)
    write_manifest(tmp_path, dataclasses.replace(MANIFEST, packed_images=(image,)), durable=False)
    told = run_within(120 << 20, "print(read_manifest(Path(sys.argv[1])).raw_bytes)", tmp_path, before=_READ)
    assert int(told) == 3 << 40
