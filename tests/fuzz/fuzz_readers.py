"""Fuzzes everything that reads what an archive holds: whatever the bytes, only an OcihookError may come out.

`fuzz_readers.py` gives each target a share of `--seconds` in a process of its own; `fuzz_readers.py TARGET
[libFuzzer options] [files]` runs one target, for instance on an input that failed before.
"""

import argparse
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ocihook"]):
    from ocihook.archive.repack import inspect_archive, verify_archive
    from ocihook.audit.state import decode_state
    from ocihook.belongings.bringing import bring
    from ocihook.belongings.saving import Writer
    from ocihook.checkpoints.gang_note import decode_note as decode_gang_note
    from ocihook.criu.file_images import Moved, moved_paths
    from ocihook.criu.images import parse_dump_stats, parse_pagemap, parse_processes
    from ocihook.criu.proto import message_class
    from ocihook.criu.socket_images import FilesImage
    from ocihook.errors import OcihookError
    from ocihook.gang.coordinator import Coordinator
    from ocihook.model import ContainerRef
    from ocihook.net.note import decode_note
    from ocihook.packs.frame import as_object, encode_frame, load_json
    from ocihook.packs.pack import PAGE_BYTES, PackFile, PackInfo
    from ocihook.packs.packed_manifest import PackedImage, PackedManifest, Segment, decode_manifest, encode_manifest
    from ocihook.packs.packing import pack_images
    from ocihook.packs.unpacking import Packs
    from ocihook.registry.layout import (
        MANIFEST_TYPE,
        Blob,
        is_layout,
        make_image,
        read_layout,
        write_layout_archive,
    )

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from tests.fakes.images import make_archive, make_image_set, read_pages
from tests.fakes.sockets import files_image, make_socket

_TRAILER = struct.Struct("<8sQQII")
_work = Path()  # set in `main`: where a target may keep files


def _sealed(body: bytes) -> bytes:
    return b"ocihook-manifest 1 " + xxh3_128_hexdigest(body).encode() + b"\n" + body


def manifest(data: bytes) -> None:
    """Take the bytes as a manifest, once as they are and once with a checksum that is right."""
    for candidate in (data, _sealed(data)):
        try:
            decoded = decode_manifest(candidate)
        except OcihookError:
            continue
        if decode_manifest(encode_manifest(decoded)) != decoded:
            raise AssertionError("a manifest that was read is not read again as it was written")


def table_end(table: bytes, chunks: int, offset: int) -> bytes:
    """Return the trailer that makes a table a right one."""
    return _TRAILER.pack(b"OCIHTAIL", offset, xxh3_64_intdigest(table), chunks, 0)


def packs(data: bytes) -> None:
    """Take the bytes as a pack: a count of chunks, the chunks and a table whose checksums are put right."""
    provider = atheris.FuzzedDataProvider(data)
    chunks = provider.ConsumeIntInRange(0, 40)
    segment = Segment("ocihook-0.pack", provider.ConsumeIntInRange(0, 3), provider.ConsumeIntInRange(0, 40))
    is_sealed = provider.ConsumeIntInRange(0, 1) == 1
    pages = provider.ConsumeIntInRange(0, 255)
    content = provider.ConsumeBytes(1 << 20)
    checksum = 0
    if is_sealed:
        table = content[max(0, len(content) - 32 * chunks) :]
        checksum = xxh3_64_intdigest(table)
        offset = 16 + len(content) - len(table)
        content = struct.pack("<8sHHI", b"OCIHPACK", 1, 0, 0) + content
        content += table_end(table, chunks, offset)
        records = table[32 * segment.first_chunk : 32 * (segment.first_chunk + segment.chunks)]
        pages = sum(int.from_bytes(records[at + 28 : at + 30], "little") for at in range(0, len(records), 32))
    (_work / "ocihook-0.pack").write_bytes(content)
    info = PackInfo("ocihook-0.pack", len(content), chunks, checksum)
    image = PackedImage("pages-1.img", pages * PAGE_BYTES, (segment,))
    try:
        opened = Packs([image], [info], {info.name: PackFile(_work / info.name)})
    except OcihookError:
        return
    try:
        opened.verify(workers=1)
        (_work / image.name).unlink(missing_ok=True)
        opened.rehydrate(_work, workers=1)
        if b"".join(read_pages(opened, image.name)) != (_work / image.name).read_bytes():
            raise AssertionError("two ways of reading an image give different content")
    except OcihookError:
        pass
    finally:
        opened.close()


def criu_images(data: bytes) -> None:
    """Take the bytes as each of CRIU's images that we read; the magics are put right."""
    for parse, magics in (
        (parse_pagemap, (0x54564319, 0x56084025)),
        (parse_processes, (0x54564319, 0x50273030)),
        (parse_dump_stats, (0x55105940, 0x57093306)),
    ):
        read: Callable[[bytes], object] = parse
        for candidate in (data, struct.pack("<II", *magics) + data):
            try:
                read(candidate)
            except OcihookError:
                continue


def sockets(data: bytes) -> None:
    """Take the bytes as files.img, whose magics are put right, and as a note about a network, likewise sealed."""
    with contextlib.suppress(OcihookError):
        moved_paths(struct.pack("<II", 0x54564319, 0x56303138) + data, lambda path: Moved(f"{path}x", 1))
    try:
        image = FilesImage(struct.pack("<II", 0x54564319, 0x56303138) + data)
        same = {sock.id: sock.ends for sock in image.sockets}
        if FilesImage(image.moved(same)).sockets != image.sockets:
            raise AssertionError("sockets that were written are not read again as they were")
    except OcihookError:
        pass
    for kind, decode in (("network", decode_note), ("gang", decode_gang_note), ("tasks", decode_state)):
        for candidate in (data, encode_frame(kind, 1, data), encode_frame(kind, 1, zlib.compress(data, 1))):
            with contextlib.suppress(OcihookError):
                decode(candidate)


def gang(data: bytes) -> None:
    """Take the bytes as requests of members of a gang, one a line, as a coordinator reads them."""
    shutil.rmtree(_work / "gangs", ignore_errors=True)
    coordinator = Coordinator(_work / "gangs")
    for line in data.split(b"\n"):
        with contextlib.suppress(OcihookError, ValueError):
            request = as_object(load_json(line))
            coordinator.handle("", {**request, "wait_s": 0})


def belongings(data: bytes) -> None:
    """Take the bytes as what a container had beside its memory, plain and with the checksums of its headers right."""
    tar, top = _work / "belongings.tar", _work / "belongings"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    for candidate in (data, _with_checksums(data)):
        tar.write_bytes(candidate)
        # A file system may refuse what a tar asks for, as devices.
        with contextlib.suppress(OcihookError, OSError):
            bring(tar, {"rootfs": top}, lambda _: None)


def layout(data: bytes) -> None:
    """Take the bytes as an image in a tar, as the index of a layout, and as a manifest that an index names rightly."""
    named = Blob.of(data)
    entry = {"mediaType": MANIFEST_TYPE, "digest": named.digest, "size": named.size_bytes}
    blobs = _work / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (_work / "image.tar").write_bytes(data)
    manifest_file = blobs / named.digest.partition(":")[2]
    manifest_file.write_bytes(data)
    for path, index in (
        (_work / "image.tar", b""),
        (_work / "layout", data),
        (_work / "layout", json.dumps({"manifests": [entry]}).encode()),
    ):
        (_work / "layout" / "index.json").write_bytes(index)
        try:
            is_layout(path)
            for blob in read_layout(path).blobs:
                for _ in blob.pieces():
                    pass
        except OcihookError:
            continue
    manifest_file.unlink()


def _with_checksums(data: bytes) -> bytes:
    sound = bytearray(data)
    for start in range(0, len(data) - 511, 512):
        block = sound[start : start + 512]
        if block[257:262] == b"ustar":
            sound[start + 148 : start + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * ord(" "))
    return bytes(sound)


def archive(data: bytes) -> None:
    """Take the bytes as an archive, plain and with the checksums of its headers put right."""
    path = _work / "archive.tar"
    for candidate in (data, _with_checksums(data)):
        path.write_bytes(candidate)
        for read in (inspect_archive, lambda path: verify_archive(path, workers=1)):
            try:
                read(path)
            except OcihookError:
                continue


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "packs": packs,
    "criu_images": criu_images,
    "sockets": sockets,
    "layout": layout,
    "archive": archive,
    "belongings": belongings,
    "gang": gang,
}


def write_seeds(directory: Path) -> None:
    """Write valid inputs for each target below `directory`, so that fuzzing starts behind the first checks."""
    for target in TARGETS:
        (directory / target).mkdir()
    image = bytes(100 * PAGE_BYTES) + (b"text " * PAGE_BYTES)[: 3 * PAGE_BYTES] + bytes(range(256)) * 16
    (directory / "pages-1.img").write_bytes(image)
    packed, infos = pack_images(directory, ["pages-1.img"], prefix="ocihook-", workers=1, durable=False)
    full = PackedManifest(
        created="2026-11-20T22:57:44Z",
        writer="ocihook",
        container=ContainerRef(id="0123"),
        host={"kernel": "6.12"},
        packed_images=tuple(packed),
        other_images=(),
        packs=tuple(infos),
    )
    body = encode_manifest(full).partition(b"\n")[2]
    (directory / "manifest" / "whole").write_bytes(encode_manifest(full))
    (directory / "manifest" / "body").write_bytes(body)
    (directory / "manifest" / "compact").write_bytes(json.dumps(json.loads(body)).encode())
    # FuzzedDataProvider takes numbers from the end of its input, the first that is asked for from the very end.
    pack = (directory / infos[0].name).read_bytes()[16 : -_TRAILER.size]
    count = infos[0].chunks
    (directory / "packs" / "whole").write_bytes(pack + bytes([0, 1, count, 0, count]))
    zeros = struct.pack("<QQQIHBx", 16, 0, 0, 0, 104, 0)
    (directory / "packs" / "one-zero-chunk").write_bytes(zeros + bytes([0, 1, 1, 0, 1]))
    entry = message_class("pagemap_entry")(vaddr=4096, compat_nr_pages=1, nr_pages=2, flags=4)
    for name, message in {
        "pagemap": message_class("pagemap_head")(pages_id=1),
        "process": message_class("pstree_entry")(pid=1, ppid=0, pgid=1, sid=1, threads=[1]),
    }.items():
        framed = [struct.pack("<I", len(m)) + m for m in (message.SerializeToString(), entry.SerializeToString())]
        (directory / "criu_images" / name).write_bytes(b"".join(framed))
    found = [make_socket(1, "10.0.0.1", "10.0.0.2"), make_socket(2, "fd00::1", "fd00::2", device="eth0")]
    (directory / "sockets" / "image").write_bytes(files_image(found)[8:])
    (directory / "sockets" / "note").write_bytes(
        b'{"links": [["eth0", 2, "", "veth", 1500, true, false, ["10.0.0.1/8"]]]}'
    )
    layer = Blob.of(b"a layer")
    image_of = make_image(layer, "none", layer.digest, annotations={}, architecture="amd64", created="")
    write_layout_archive(image_of, directory / "layout" / "tar", "example.org/job:1", lambda _: None)
    make_image_set(directory / "images", {1: image[: 8 * PAGE_BYTES]})
    make_archive(directory / "archive" / "plain", directory / "images")
    (directory / "sockets" / "gang").write_bytes(b'{"gang": ["", "job", "a", 2, 1]}')
    who = '"namespace": "", "gang": "job"'
    said = [
        f'{{{who}, "member": "{name}", "session": "{name}", "epoch": 1, "verb": {verb}}}'
        for verb in (
            '"join", "join": ["restore", 2, 0]',
            '"meet", "phase": "addresses", "message": {"a": "b"}, "about": ["a"]',
        )
        for name in "ab"
    ]
    (directory / "gang" / "restore").write_text("\n".join(said))
    with (directory / "belongings" / "tree").open("wb") as file:
        writer = Writer(file, lambda _: None)
        writer.add_tree("rootfs", directory / "images")
        writer.add_gone("rootfs", "gone")
        writer.end()
    (directory / "layout" / "manifest").write_bytes(image_of.manifest.data or b"")


def _run_each(seconds: int) -> int:
    share = max(1, seconds // len(TARGETS))
    with tempfile.TemporaryDirectory(prefix="ocihook-fuzz-", dir="/dev/shm") as name:
        write_seeds(Path(name))
        for target in TARGETS:
            # A crashing input stays in the current directory, and libFuzzer prints its name.
            command = [sys.executable, __file__, target, f"-max_total_time={share}", "-verbosity=0", "-timeout=60"]
            command += [] if os.environ.get("OCIHOOK_NIGHTLY") else ["-seed=1"]  # CI begins the same each time
            command += ["-rss_limit_mb=1024", "-max_len=65536", str(Path(name) / target)]
            # libFuzzer ends its process without clean-up, so the target's own files lie in our directory.
            environment = {**os.environ, "TMPDIR": name}
            result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
            if result.returncode != 0:
                print(result.stdout[-4000:] + result.stderr[-8000:])
                print(f"fuzz {target}: FAILED")
                return 1
            print(f"fuzz {target}: {share} s, nothing but OcihookError")
    return 0


def main() -> int:
    """Run one target if it is named, else all."""
    if len(sys.argv) > 1 and sys.argv[1] in TARGETS:
        global _work  # noqa: PLW0603 - libFuzzer hands a target nothing but the input
        _work = Path(tempfile.mkdtemp(prefix="ocihook-fuzz-"))
        atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
        atheris.Fuzz()
        return 0
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=int, default=30, help="for all targets together")
    return _run_each(arguments.parse_args().seconds)


if __name__ == "__main__":
    sys.exit(main())
