"""Archives of all engines: packed, unpacked, compared, and refused when damaged or hostile."""

import gzip
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocihook.archive import compare
from ocihook.archive import repack as ops
from ocihook.archive.compare import MemoryDiff, diff_archives
from ocihook.container.engine_archive import ArchiveFacts, Member, compression_of, read_facts
from ocihook.errors import (
    ArchiveError,
    ArchiveKindError,
    ImageError,
    IntegrityError,
    OcihookError,
    OutputExists,
    StoreFull,
    UnsupportedError,
)
from ocihook.node.doctor.archive import check_archive
from ocihook.packs.packed_manifest import PackedManifest
from ocihook.registry.layout import is_layout, read_layout
from ocihook.store.store import Store
from tests.fakes.images import make_archive, make_image_set, mixed_pages

MEMORY = {1: mixed_pages(500), 9: mixed_pages(70, seed=3)}


@pytest.fixture
def image_set(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "images", MEMORY)
    return tmp_path / "images"


@pytest.fixture
def plain(tmp_path: Path, image_set: Path) -> Path:
    make_archive(tmp_path / "plain.tar", image_set)
    return tmp_path / "plain.tar"


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, "r:*" if compression_of(path) != "zstd" else "r:") as tar:
        return {m.name: file.read() for m in tar if (file := tar.extractfile(m))}


def pack(source: Path, target: Path, compression: str = "none") -> None:
    ops.pack_archive(source, target, compression=compression, force=False, workers=2)


def unpack(source: Path, target: Path, compression: str = "none") -> None:
    ops.unpack_archive(source, target, compression=compression, force=False, workers=2)


@pytest.mark.parametrize("engine", ["podman", "containerd", "cri-o"])
def test_every_engine_is_recognised(tmp_path: Path, image_set: Path, engine: str) -> None:
    make_archive(tmp_path / "a.tar", image_set, engine)
    facts = read_facts(tmp_path / "a.tar")
    assert facts.container.engine == engine
    assert (facts.image, facts.runtime) == ("example.org/train:1", "runc")
    if engine != "podman":
        assert str(facts.container) == "default/p1/c1"


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_unpacked_is_what_it_was_before_packing(tmp_path: Path, plain: Path, compression: str) -> None:
    packed, again = tmp_path / "packed.tar", tmp_path / "again.tar"
    pack(plain, packed, compression)
    assert compression_of(packed) == compression
    assert ops.is_packed(read_facts(packed))
    manifest = ops.verify_archive(packed, workers=2)
    assert manifest is not None
    assert manifest.raw_bytes == 570 * 4096
    unpack(packed, again)
    assert members(again) == members(plain)
    assert ops.verify_archive(again, workers=2) is None
    assert packed.stat().st_mode & 0o777 == plain.stat().st_mode & 0o777


def test_packing_leaves_other_members_alone(tmp_path: Path, image_set: Path) -> None:
    make_archive(tmp_path / "a.tar", image_set, extra={"rootfs-diff.tar": b"x" * 1000, "volumes/data.tar": b"y"})
    pack(tmp_path / "a.tar", tmp_path / "b.tar")
    before, after = members(tmp_path / "a.tar"), members(tmp_path / "b.tar")
    gone = {"checkpoint/pages-1.img", "checkpoint/pages-2.img"}
    assert before.keys() - after.keys() == gone
    assert {name: after[name] for name in before.keys() - gone} == {n: d for n, d in before.items() if n not in gone}
    assert all(name.startswith("checkpoint/ocihook") for name in after.keys() - before.keys())


def test_inspect_tells_processes_and_times(tmp_path: Path, plain: Path) -> None:
    pack(plain, tmp_path / "packed.tar")
    for path in (plain, tmp_path / "packed.tar"):
        inspection = ops.inspect_archive(path)
        assert [(p.process.pid, p.memory_bytes) for p in inspection.processes] == [(1, 500 * 4096), (9, 70 * 4096)]
        assert inspection.stats is not None
        assert inspection.stats.frozen_us == 250_000
        assert ops.to_json(inspection)["raw_bytes"] == 570 * 4096


def test_diff_compares_page_by_page_whether_packed_or_not(tmp_path: Path, image_set: Path, plain: Path) -> None:
    changed = bytearray(MEMORY[1])
    for page in (0, 200, 499):
        changed[page * 4096] ^= 1
    make_image_set(tmp_path / "second", {1: bytes(changed), 10: mixed_pages(5)})
    make_archive(tmp_path / "second.tar", tmp_path / "second")
    pack(tmp_path / "second.tar", tmp_path / "second-packed.tar")
    for second in (tmp_path / "second.tar", tmp_path / "second-packed.tar"):
        diff = diff_archives(plain, second)
        assert diff.memory == [
            MemoryDiff("pagemap-1.img", 497, 3, 0, 0),
            MemoryDiff("pagemap-10.img", 0, 0, 0, 5),
            MemoryDiff("pagemap-9.img", 0, 0, 70, 0),
        ]
        states = dict(diff.images)
        assert (states["inventory.img"], states["core-9.img"], states["core-10.img"]) == (
            "same",
            "only in first",
            "only in second",
        )
    assert all(state == "same" for _, state in diff_archives(plain, plain).images)


def write_tar(path: Path, *entries: tarfile.TarInfo, source: Path | None = None) -> None:
    with tarfile.open(path, "w") as tar:
        if source is not None:
            with tarfile.open(source) as old:
                for member in old:
                    tar.addfile(member, old.extractfile(member))
        for entry in entries:
            tar.addfile(entry, BytesIO(bytes(entry.size)))


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = 10 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (entry("../outside"), "climbs out"),
        (entry("checkpoint/../../outside"), "climbs out"),
        (entry("/etc/outside"), "climbs out"),
        (entry("checkpoint/pages-3.img", tarfile.SYMTYPE, "/etc/shadow"), "is a link to '/etc/shadow'"),
        (entry("checkpoint/ocihook-0.pack", tarfile.LNKTYPE, "checkpoint/core-1.img"), "is a link"),
        (entry("checkpoint/parent", tarfile.SYMTYPE, "/"), "is a link"),
        (entry("checkpoint/fifo", tarfile.FIFOTYPE), "neither a file nor a directory"),
        (entry("checkpoint/device", tarfile.CHRTYPE), "neither a file nor a directory"),
        (entry("checkpoint/core-1.img"), "occurs twice"),
        (entry("./checkpoint/core-1.img"), "occurs twice"),
    ],
)
@pytest.mark.parametrize("act", [read_facts, lambda p: ops.verify_archive(p, workers=1), ops.inspect_archive])
def test_hostile_members_are_refused(
    tmp_path: Path, plain: Path, member: tarfile.TarInfo, message: str, act: Callable[[Path], object]
) -> None:
    hostile = tmp_path / "hostile" / "archive.tar"
    hostile.parent.mkdir()
    write_tar(hostile, member, source=plain)
    with pytest.raises(ArchiveError, match=message):
        act(hostile)
    assert [path.name for path in hostile.parent.iterdir()] == ["archive.tar"]
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    "content",
    [
        b'["pipe:[1]"' + b" " * (64 << 10) + b"]",
        b"[" * 100_000,
        b'["/dev/null", "pipe:[1]", "pipe:[2]", "pipe:[3]"]',  # the fourth is a descriptor of the runtime's own
        b'{"0": "pipe:[1]"}',
        b"[1, 2, 3]",
        b"",
    ],
    ids=["huge", "deep", "four", "object", "numbers", "empty"],
)
@pytest.mark.parametrize("act", [read_facts, lambda p: ops.verify_archive(p, workers=1), ops.inspect_archive])
def test_odd_descriptors_are_refused(
    tmp_path: Path, image_set: Path, content: bytes, act: Callable[[Path], object]
) -> None:
    """The runtime reads them before it calls CRIU, and CRIU any script."""
    (image_set / "descriptors.json").write_bytes(content)
    make_archive(tmp_path / "a.tar", image_set)
    with pytest.raises(ArchiveError, match=r"descriptors\.json is not (JSON|an array of at most 3 names)"):
        act(tmp_path / "a.tar")


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
@pytest.mark.parametrize("act", [read_facts, lambda p: ops.verify_archive(p, workers=1), check_archive])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str, act: Callable[[Path], object]) -> None:
    path = tmp_path / "a.tar"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    path = Path("/dev/zero") if kind == "device" else path
    with pytest.raises(ArchiveError, match=r"is not a file|none of CRIU's images"):
        act(path)


def test_link_to_earlier_images_of_podman_is_allowed(tmp_path: Path, plain: Path) -> None:
    write_tar(tmp_path / "a.tar", entry("checkpoint/parent", tarfile.SYMTYPE, "../pre-checkpoint"), source=plain)
    assert ops.verify_archive(tmp_path / "a.tar", workers=1) is None


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_every_truncation_is_noticed(tmp_path: Path, plain: Path, compression: str) -> None:
    packed = tmp_path / "packed.tar"
    pack(plain, packed, compression)
    data = packed.read_bytes()
    # A tar ends with two blocks of zeros and padding: losing only those loses nothing.
    end = len(data.rstrip(b"\0")) if compression == "none" else len(data)
    cut = tmp_path / "cut.tar"
    for size in {0, 100, 512, 1536, 5000, end // 3, end // 2, end - 600, end - 1}:
        cut.write_bytes(data[:size])
        with pytest.raises(OcihookError):
            ops.verify_archive(cut, workers=1)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_flipped_bit_in_packed_memory_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    directory = tmp_path_factory.mktemp("flip")
    make_image_set(directory / "images", {1: mixed_pages(40)})
    make_archive(directory / "plain.tar", directory / "images")
    pack(directory / "plain.tar", directory / "packed.tar")
    with tarfile.open(directory / "packed.tar") as tar:
        ours = [m for m in tar if m.name.startswith("checkpoint/ocihook")]
    offsets = [m.offset_data + number for m in ours for number in range(m.size)]
    data = bytearray((directory / "packed.tar").read_bytes())
    data[offsets[position % len(offsets)]] ^= 1 << bit
    (directory / "packed.tar").write_bytes(data)
    with pytest.raises(IntegrityError):
        ops.verify_archive(directory / "packed.tar", workers=1)


def test_plain_archive_with_a_short_page_image_does_not_verify(tmp_path: Path, image_set: Path) -> None:
    os.truncate(image_set / "pages-2.img", 4096)
    make_archive(tmp_path / "a.tar", image_set)
    with pytest.raises(ImageError, match=r"pages-2.img has 4096 bytes, pagemap-9.img says 286720"):
        ops.verify_archive(tmp_path / "a.tar", workers=1)


@pytest.mark.parametrize("kind", ["plain", "packed", "thin"])
def test_a_lost_list_of_descriptors_is_noticed(tmp_path: Path, plain: Path, kind: str) -> None:
    """runc and crun write it beside CRIU's images, and restore nothing without it."""
    whole, store = tmp_path / f"{kind}.tar", Store(tmp_path / "store")
    if kind != "plain":
        into = store if kind == "thin" else None
        ops.pack_archive(plain, whole, compression="none", force=False, workers=1, into_store=into)
    ops.verify_archive(whole, workers=1, store=store)
    lost = remake(whole, tmp_path / "lost.tar", without="checkpoint/descriptors.json")
    with pytest.raises(OcihookError, match=r"descriptors\.json"):
        ops.verify_archive(lost, workers=1, store=store)


def test_what_is_no_checkpoint_archive_says_so(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", entry("readme"))
    with pytest.raises(ArchiveError, match="is not a checkpoint archive"):
        read_facts(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(gzip.compress(b"hello"))
    with pytest.raises(ArchiveError, match="is not a tar archive, or damaged at its start"):
        read_facts(tmp_path / "b.tar")
    listed = dict(ops.list_archives([tmp_path]))
    assert all(isinstance(value, ArchiveError) for value in listed.values())


def chain_of_headers(source: Path, target: Path) -> Path:
    """Write `target` as `source` with thousands of headers before its first member."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 5
    target.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"name".ljust(512, b"\0")) * 4000 + source.read_bytes())
    return target


def test_a_hostile_archive_does_not_keep_others_from_being_listed(tmp_path: Path, plain: Path) -> None:
    chained = chain_of_headers(plain, tmp_path / "a.tar")
    listed = dict(ops.list_archives([tmp_path]))
    assert isinstance(listed[chained], ArchiveError)
    assert str(chained) in str(listed[chained])
    assert isinstance(listed[plain], ArchiveFacts)


def test_a_hostile_tar_is_no_image_layout(tmp_path: Path, plain: Path) -> None:
    chained = chain_of_headers(plain, tmp_path / "a.tar")
    assert not is_layout(chained)
    with pytest.raises(ArchiveError, match="is no OCI image layout, or damaged"):
        read_layout(chained)


def claim(source: Path, target: Path, name: str, size_bytes: int) -> Path:
    """Write `target` as `source`, with a member that claims to be so large, as a sparse file of one byte."""
    map_of_parts = b"1\n0\n1\n".ljust(512, b"\0")
    info = tarfile.TarInfo("GNUSparseFile.0/" + name)
    sparse = {"major": "1", "minor": "0", "name": f"checkpoint/{name}", "realsize": str(size_bytes)}
    info.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    content = map_of_parts + b"x"
    info.size = len(content)
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        members = {member.name: member for member in old if member.name != f"checkpoint/{name}"}
        last = members.pop("checkpoint/pagemap-9.img")  # comes too late to be known
        for member in members.values():
            new.addfile(member, old.extractfile(member))
        new.addfile(info, BytesIO(content))
        new.addfile(last, old.extractfile(last))
    return target


@pytest.mark.parametrize("name", ["pages-1.img", "pages-2.img", "pages-3.img"])
def test_a_page_image_that_claims_more_than_its_pagemap_is_not_read(
    tmp_path: Path, plain: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine terabytes of zeros would be read for an hour, or fill the disk."""
    claiming = claim(plain, tmp_path / "a.tar", name, 9 << 40)
    assert read_facts(claiming).sizes[name] == 9 << 40
    extract, extracted = ops._extract, []

    def note(member: Member, path: Path) -> None:
        extracted.append(member.image_name)
        extract(member, path)

    monkeypatch.setattr(ops, "_extract", note)
    for act in (
        lambda: pack(claiming, tmp_path / "out.tar"),
        lambda: ops.verify_archive(claiming, workers=1),
        lambda: diff_archives(claiming, plain),
    ):
        with pytest.raises(ImageError, match=name):
            act()
    assert "pagemap-9.img" in extracted
    assert name not in extracted


def test_output_is_replaced_only_by_force_and_never_half(tmp_path: Path, plain: Path) -> None:
    target = tmp_path / "out.tar"
    target.write_text("precious")
    with pytest.raises(OutputExists, match="exists"):
        pack(plain, target)
    packed = tmp_path / "packed.tar"
    pack(plain, packed)
    data = bytearray(packed.read_bytes())
    data[len(data) // 2] ^= 1
    packed.write_bytes(data)
    with pytest.raises(OcihookError):
        ops.unpack_archive(packed, target, compression="none", force=True, workers=1)
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "out.tar", "packed.tar", "plain.tar"]
    ops.pack_archive(plain, plain, compression="none", force=True, workers=1)
    assert ops.is_packed(read_facts(plain))


def test_packing_twice_and_unpacking_a_plain_one_are_errors(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(ArchiveKindError, match="is not packed"):
        unpack(plain, tmp_path / "out.tar")
    pack(plain, tmp_path / "packed.tar")
    with pytest.raises(ArchiveKindError, match="is packed already"):
        pack(tmp_path / "packed.tar", tmp_path / "out.tar")


def test_diff_takes_zero_pages_at_once_whatever_is_claimed_of_them() -> None:
    page, zeros, million = b"x" * 4096, bytes(4096), 1 << 20
    first = [compare._Run(0, million), compare._Run(million << 12, 1, page), compare._Run(1 << 60, 1 << 40)]
    second = [compare._Run(5 << 12, 1, zeros), compare._Run(6 << 12, 1, page), compare._Run(9 << 12, 2 * million)]
    second.append(compare._Run(1 << 60, 1 << 40))
    same = 1 + (million - 9) + (1 << 40)
    changed, only_second = 2, 9 + 2 * million - million - 1
    assert compare._merge(iter(first), iter(second)) == (same, changed, 7, only_second)
    assert compare._merge(iter(second), iter(first)) == (same, changed, only_second, 7)


def test_diff_sees_what_follows_many_zero_pages(tmp_path: Path) -> None:
    """A run of zero pages is one chunk in a pack, whatever its length; memory is full of such runs."""
    archives = {}
    for name, seed in (("first", 1), ("second", 2)):
        memory = bytes(64 * 4096) + mixed_pages(30, seed=seed) + bytes(200 * 4096) + os.urandom(3 * 4096)
        make_image_set(tmp_path / name, {1: memory})
        make_archive(tmp_path / f"{name}.tar", tmp_path / name)
        pack(tmp_path / f"{name}.tar", tmp_path / f"{name}-packed.tar")
        archives[name] = memory
        same = diff_archives(tmp_path / f"{name}.tar", tmp_path / f"{name}-packed.tar")
        assert same.memory == [MemoryDiff("pagemap-1.img", 297, 0, 0, 0)]
    pages = [[memory[at : at + 4096] for at in range(0, len(memory), 4096)] for memory in archives.values()]
    equal = sum(a == b for a, b in zip(*pages, strict=True))
    seen: list[int] = []
    diff = diff_archives(tmp_path / "first-packed.tar", tmp_path / "second-packed.tar", progress=seen.append)
    assert diff.memory == [MemoryDiff("pagemap-1.img", equal, 297 - equal, 0, 0)]
    assert sum(seen) == 2 * 297 * 4096


def remake(source: Path, target: Path, *added: tuple[str, bytes], without: str = "") -> Path:
    """Write `target` as `source`, without a member and with others."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            if member.name != without:
                new.addfile(member, old.extractfile(member))
        for name, data in added:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            new.addfile(info, BytesIO(data))
    return target


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return sorted(tar.getnames())


def test_what_an_interruption_left_does_not_come_into_the_output(tmp_path: Path, plain: Path) -> None:
    """The manifest decides: with it page images are leftovers, without it packs are."""
    pack(plain, tmp_path / "packed.tar")
    leftover = remake(tmp_path / "packed.tar", tmp_path / "with-pages.tar", ("checkpoint/pages-1.img", b"stale"))
    unpack(leftover, tmp_path / "unpacked.tar")
    assert names(tmp_path / "unpacked.tar") == names(plain)
    assert members(tmp_path / "unpacked.tar") == members(plain)
    leftover = remake(plain, tmp_path / "with-pack.tar", ("checkpoint/ocihook-7.pack", b"stale"))
    pack(leftover, tmp_path / "repacked.tar")
    repacked = names(tmp_path / "repacked.tar")
    assert len(set(repacked)) == len(repacked)
    assert not {"checkpoint/ocihook-7.pack", "checkpoint/pages-1.img"} & set(repacked)
    assert ops.verify_archive(tmp_path / "repacked.tar", workers=1) is not None


def test_packs_without_their_manifest_are_not_a_plain_archive(tmp_path: Path, plain: Path) -> None:
    pack(plain, tmp_path / "packed.tar")
    lost = remake(tmp_path / "packed.tar", tmp_path / "lost.tar", without="checkpoint/ocihook.manifest")
    with pytest.raises(IntegrityError, match="without a manifest"):
        unpack(lost, tmp_path / "out.tar")
    with pytest.raises(IntegrityError, match="without a manifest"):
        ops.verify_archive(lost, workers=1)
    with pytest.raises(ImageError, match=r"pages-1.img has 0 bytes"):
        pack(lost, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [("ocihook-0.pack", r"pack ocihook-0.pack cannot be opened"), ("core-9.img", r"image core-9.img is missing")],
)
def test_a_packed_archive_that_lacks_something_is_refused(
    tmp_path: Path, plain: Path, missing: str, message: str
) -> None:
    ops.pack_archive(plain, tmp_path / "packed.tar", compression="none", force=False, workers=1)
    lost = remake(tmp_path / "packed.tar", tmp_path / "lost.tar", without=f"checkpoint/{missing}")
    with pytest.raises(IntegrityError, match=message):
        ops.verify_archive(lost, workers=1)
    with pytest.raises(IntegrityError, match=message):
        unpack(lost, tmp_path / "out.tar")
    with pytest.raises(IntegrityError, match=message):
        diff_archives(lost, plain)


def test_memory_that_criu_compressed_itself_stays_as_it_is(tmp_path: Path) -> None:
    """CRIU marks such a pagemap by a field that 4.2 does not know; beside it, others may be packed."""
    make_image_set(tmp_path / "images", MEMORY)
    pagemap = tmp_path / "images" / "pagemap-9.img"
    entry_with_unknown_field = b"\x08\x80\x80\x04\x10\x46\x20\x04\xf8\x3f\x01"
    pagemap.write_bytes(
        pagemap.read_bytes() + len(entry_with_unknown_field).to_bytes(4, "little") + entry_with_unknown_field
    )
    (tmp_path / "images" / "pages-2.img").write_bytes(b"opaque, and no whole number of pages")
    make_archive(tmp_path / "plain.tar", tmp_path / "images")
    pack(tmp_path / "plain.tar", tmp_path / "packed.tar")
    assert members(tmp_path / "packed.tar")["checkpoint/pages-2.img"].startswith(b"opaque")
    assert "checkpoint/pages-1.img" not in members(tmp_path / "packed.tar")
    assert ops.verify_archive(tmp_path / "packed.tar", workers=1) is not None
    unpack(tmp_path / "packed.tar", tmp_path / "again.tar")
    assert members(tmp_path / "again.tar") == members(tmp_path / "plain.tar")
    with pytest.raises(UnsupportedError, match=r"pages-2.img is compressed by CRIU itself and cannot be compared"):
        diff_archives(tmp_path / "packed.tar", tmp_path / "plain.tar")
    for pages in ("pages-1.img", "pagemap-1.img", "core-1.img"):
        (tmp_path / "images" / pages).unlink()
    make_archive(tmp_path / "opaque.tar", tmp_path / "images")
    with pytest.raises(ArchiveKindError, match=r"no memory that could be packed. CRIU itself may have compressed it"):
        pack(tmp_path / "opaque.tar", tmp_path / "out.tar")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True, timeout=60)
    yield place
    subprocess.run(["umount", place], check=True, timeout=60)


def test_full_disk_is_told_and_nothing_left_on_it(tmp_path: Path, plain: Path, small_disk: Path) -> None:
    with pytest.raises(StoreFull, match=f"no space left in {small_disk}"):
        pack(plain, small_disk / "out.tar")
    pack(plain, tmp_path / "packed.tar")
    with pytest.raises(StoreFull, match=r"unpacking the checkpoint needs 2334720 bytes, \d+ are free"):
        unpack(tmp_path / "packed.tar", small_disk / "out.tar")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_verifying_takes_no_space_for_memory(tmp_path: Path, plain: Path, small_disk: Path, compression: str) -> None:
    """What is looked at may be larger than what is free, and its directory may be read-only."""
    make_image_set(tmp_path / "large", {1: bytes(512 * 4096)})
    make_archive(tmp_path / "large.tar", tmp_path / "large")
    pack(tmp_path / "large.tar", tmp_path / "packed.tar", compression)
    (small_disk / "packed.tar").write_bytes((tmp_path / "packed.tar").read_bytes())
    unpack(small_disk / "packed.tar", tmp_path / "again.tar", compression)
    assert ops.verify_archive(small_disk / "packed.tar", workers=1) is not None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=60)
    seen: list[int] = []
    assert ops.verify_archive(small_disk / "packed.tar", workers=1, progress=seen.append) is not None
    assert sum(seen) == 512 * 4096 == ops.memory_bytes(small_disk / "packed.tar")
    diff = diff_archives(small_disk / "packed.tar", tmp_path / "again.tar")
    assert diff.memory == [MemoryDiff("pagemap-1.img", 512, 0, 0, 0)]


def test_progress_of_verifying_a_plain_archive_adds_up(plain: Path) -> None:
    seen: list[int] = []
    assert ops.verify_archive(plain, workers=1, progress=seen.append) is None
    assert sum(seen) == ops.memory_bytes(plain) == 570 * 4096


def test_one_unreadable_file_does_not_end_a_list(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, visit: Callable[[Member], object]) -> object:
        if path == plain:
            raise PermissionError(13, "Permission denied", str(path))
        return read_facts(path, visit)

    pack(plain, tmp_path / "packed.tar")
    monkeypatch.setattr(ops, "read_facts", refuse)
    listed = dict(ops.list_archives([tmp_path]))
    assert isinstance(listed[plain], PermissionError)
    assert not isinstance(listed[tmp_path / "packed.tar"], Exception)


def test_thin_and_back(tmp_path: Path, plain: Path) -> None:
    store, thin, again = tmp_path / "store", tmp_path / "thin.tar", tmp_path / "again.tar"
    ops.pack_archive(plain, thin, into_store=Store(store), compression="none", force=False, workers=2)
    assert thin.stat().st_size < plain.stat().st_size / 10
    found = ops.inspect_archive(thin)
    assert ops.is_thin(found.facts)
    assert found.thin is not None
    assert ops.to_json(found)["thin"] == {"domain": "_node", "checkpoint_id": found.thin.checkpoint_id}
    stored = ops.verify_archive(thin, store=Store(store), workers=1)
    assert stored is not None
    assert stored.raw_bytes == sum(map(len, MEMORY.values()))
    with pytest.raises(ArchiveKindError, match="packed already"):
        ops.pack_archive(thin, again, into_store=Store(store), compression="none", force=False, workers=2)
    packed = tmp_path / "packed.tar"
    ops.pack_archive(thin, packed, store=Store(store), compression="none", force=False, workers=2)
    assert isinstance(ops.verify_archive(packed, workers=1), PackedManifest)
    unpack(packed, tmp_path / "unpacked.tar")
    assert members(tmp_path / "unpacked.tar") == members(plain)
    with pytest.raises(OcihookError, match="is in a store"):
        diff_archives(thin, plain)
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(OcihookError, match="no domain"):
        ops.unpack_archive(thin, again, store=Store(elsewhere), compression="none", force=False, workers=2)
    ops.unpack_archive(thin, again, store=Store(store), compression="none", force=False, workers=2)
    assert members(again) == members(plain)
    assert not list((store / "domains/_node/pending").iterdir())
    for pack_file in (store / "domains/_node/packs").iterdir():
        data = bytearray(pack_file.read_bytes())
        data[100] ^= 1
        pack_file.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        ops.verify_archive(thin, store=Store(store), workers=1)
