"""Reading archives as hostile input: what their headers say is believed only where it makes sense."""

import gzip
import io
import subprocess
import tarfile
from pathlib import Path
from typing import IO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocihook.container import engine_archive as archive
from ocihook.container.engine_archive import compression_of, read_facts, read_members, write_archive
from ocihook.errors import ArchiveError
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.memory_bound import run_within


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "images", {1: mixed_pages(20), 9: mixed_pages(3, seed=2)})
    make_archive(tmp_path / "plain.tar", tmp_path / "images")
    return tmp_path / "plain.tar"


def write(path: Path, data: bytes, compression: str) -> None:
    if compression == "none":
        path.write_bytes(data)
    else:
        with archive._open_stream(path, "wb", compression) as stream:
            stream.write(data)


def copy(source: Path, target: Path) -> None:
    with write_archive(target, "none") as tar:
        for member in read_members(source):
            tar.addfile(member.info, cast("IO[bytes] | None", member.data))


def read_all(path: Path) -> dict[str, bytes]:
    return {member.name: member.data.read() for member in read_members(path) if member.data is not None}


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_members_come_whole_whatever_the_compression(tmp_path: Path, plain: Path, compression: str) -> None:
    path = tmp_path / "a"
    write(path, plain.read_bytes(), compression)
    assert compression_of(path) == compression
    content = read_all(path)
    assert content["checkpoint/pages-1.img"] == mixed_pages(20)
    assert content["checkpoint/descriptors.json"] == b"[]"


def test_where_a_member_lies_is_told_of_plain_archives_only(tmp_path: Path, plain: Path) -> None:
    data = plain.read_bytes()
    offsets = {member.image_name: member.offset for member in read_members(plain)}
    start = offsets["pages-1.img"]
    assert start is not None
    assert data[start : start + 20 * 4096] == mixed_pages(20)
    (tmp_path / "a").write_bytes(gzip.compress(data))
    assert {member.offset for member in read_members(tmp_path / "a")} == {None}


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_a_tar_that_ends_between_two_members_is_truncated(tmp_path: Path, plain: Path, compression: str) -> None:
    """Also within an intact compressed stream, as `tar | zstd` leaves it when the disk is full."""
    with tarfile.open(plain) as tar:
        ends = [member.offset for member in tar][1:]
    data = plain.read_bytes()
    for end in ends:
        write(tmp_path / "cut", data[:end], compression)
        with pytest.raises(ArchiveError, match="cut is truncated or damaged: it has no end"):
            read_all(tmp_path / "cut")


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path, plain: Path, compression: str) -> None:
    data = bytearray(plain.read_bytes())
    data[data.index(b"checkpoint/pages-1.img")] ^= 1
    write(tmp_path / "bad", bytes(data), compression)
    with pytest.raises(ArchiveError, match="is truncated or damaged: bad checksum"):
        read_all(tmp_path / "bad")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"not a tar at all. " * 100, gzip.compress(b"", mtime=0), b"\x1f\x8b"]
)
def test_what_is_no_tar_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ArchiveError, match="is not a tar archive, or damaged at its start"):
        read_all(tmp_path / "a")


def with_member(source: Path, target: Path, info: tarfile.TarInfo, content: bytes = b"") -> None:
    info.size = len(content)
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            new.addfile(member, old.extractfile(member))
        new.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("name", ["checkpoint//core-1.img", "checkpoint/./core-1.img", "././checkpoint/core-1.img"])
def test_another_spelling_of_a_name_is_the_same_name(tmp_path: Path, plain: Path, name: str) -> None:
    """Whoever unpacks it would overwrite the image that was verified."""
    with_member(plain, tmp_path / "a", tarfile.TarInfo(name), b"evil")
    with pytest.raises(ArchiveError, match=r"member 'checkpoint/core-1.img' occurs twice"):
        read_all(tmp_path / "a")


@pytest.mark.parametrize("name", ["checkpoint/.hidden.img", "checkpoint/sub/core-1.img", "checkpoint/a b.img", "x.img"])
def test_only_plain_flat_names_are_images(tmp_path: Path, plain: Path, name: str) -> None:
    with_member(plain, tmp_path / "a", tarfile.TarInfo(name), b"other")
    members = {member.name: member.image_name for member in read_members(tmp_path / "a")}
    assert members[name] == ""
    assert members["checkpoint/core-1.img"] == "core-1.img"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
@pytest.mark.parametrize("size", [3 << 30, -512])
def test_a_header_cannot_claim_all_of_the_memory(tmp_path: Path, kind: bytes, size: int) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    with (tmp_path / "a").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(4 << 30)
    with pytest.raises(ArchiveError, match=f"a header claims {size} bytes"):
        read_all(tmp_path / "a")


def test_a_document_too_large_to_be_read_is_refused(tmp_path: Path, plain: Path) -> None:
    small = tmp_path / "small.tar"
    with tarfile.open(plain) as old, tarfile.open(small, "w") as new:
        for member in old:
            if member.name != "config.dump":
                new.addfile(member, old.extractfile(member))
    with_member(small, tmp_path / "a", tarfile.TarInfo("config.dump"), bytes((4 << 20) + 1))
    with pytest.raises(ArchiveError, match=r"member 'config.dump' is not a file of at most 4194304 bytes"):
        read_facts(tmp_path / "a")


@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_sparse_files_are_read_and_copied_with_their_zeros(tmp_path: Path, tar_format: str, compression: str) -> None:
    """`tar -S` makes them, when a checkpoint was unpacked and packed again."""
    (tmp_path / "checkpoint").mkdir()
    holes = tmp_path / "checkpoint" / ("long-name-" * 12 + "pages.img")
    with holes.open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data in the middle" * 100)
    first = tmp_path / "first.tar"
    command = ["tar", "-S", f"--format={tar_format}", "-cf", str(first), "-C", str(tmp_path), "checkpoint"]
    subprocess.run(command, check=True, timeout=60)
    assert first.stat().st_size < 1 << 19
    write(first, first.read_bytes(), compression)
    name = f"checkpoint/{holes.name}"
    assert read_all(first) == {name: holes.read_bytes()}
    assert {member.offset for member in read_members(first) if member.image_name} == {None}
    second = tmp_path / "second.tar"
    copy(first, second)
    done = subprocess.run(["tar", "-xOf", second, name], check=True, capture_output=True, timeout=60)
    assert done.stdout == holes.read_bytes()


def test_pax_headers_of_members_survive_copying(tmp_path: Path, plain: Path) -> None:
    info = tarfile.TarInfo("volumes/" + "n" * 120 + "é")
    info.mtime, info.uid = 1700000000.123456789, 1 << 22
    info.pax_headers = {"SCHILY.xattr.user.mark": "value=1\nof two lines", "mtime": "1700000000.123456789"}
    with_member(plain, tmp_path / "a", info, b"content")
    copy(tmp_path / "a", tmp_path / "b")
    with tarfile.open(tmp_path / "a") as a, tarfile.open(tmp_path / "b") as b:
        copied = b.getmember(info.name)
        assert copied.pax_headers == a.getmember(info.name).pax_headers
        assert copied.pax_headers["mtime"] == "1700000000.123456789"
        assert copied.uid == 1 << 22
        assert [m.get_info() for m in a] == [m.get_info() for m in b]


def test_visitors_see_what_is_no_document(plain: Path) -> None:
    seen: list[str] = []
    facts = read_facts(plain, lambda member: seen.append(member.name))
    assert facts.container.id == "ab" * 32
    assert {"stats-dump", "checkpoint", "checkpoint/pages-1.img"} <= set(seen)
    assert not {"config.dump", "spec.dump"} & set(seen)


def test_an_attribute_that_could_not_be_copied_is_refused(tmp_path: Path, plain: Path) -> None:
    info = tarfile.TarInfo("volumes/x")
    info.pax_headers = {"comment-mark": "value"}
    with_member(plain, tmp_path / "a", info, b"content")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes().replace(b"comment-mark", b"comment\xffmark"))
    with pytest.raises(ArchiveError, match=r"member 'volumes/x' has an attribute without a proper name"):
        read_all(tmp_path / "a")


@pytest.mark.parametrize("size", ["-512", str(1 << 62), "9" * 30])
def test_a_size_beyond_any_file_is_refused(tmp_path: Path, plain: Path, size: str) -> None:
    info = tarfile.TarInfo("volumes/x")
    info.pax_headers = {"size": size}
    with_member(plain, tmp_path / "a", info, b"content")
    with pytest.raises(ArchiveError, match=r"impossible size|truncated or damaged"):
        read_all(tmp_path / "a")


def test_names_that_are_not_utf_8_survive_copying(tmp_path: Path, plain: Path) -> None:
    name = b"volumes/\xff\xfe".decode("utf-8", "surrogateescape")
    with_member(plain, tmp_path / "a", tarfile.TarInfo(name), b"content")
    copy(tmp_path / "a", tmp_path / "b")
    assert read_all(tmp_path / "b")[name] == b"content"
    command = ["tar", "-tf", str(tmp_path / "b"), "--quoting-style=literal"]
    listed = subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert b"volumes/\xff\xfe" in listed.stdout


def pax_header(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


def long_name(data: bytes) -> bytes:
    return pax_header(data, tarfile.GNUTYPE_LONGNAME)


def before_all(source: Path, target: Path, headers: bytes, compression: str = "none") -> Path:
    write(target, headers + source.read_bytes(), compression)
    return target


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
@pytest.mark.parametrize("header", [pax_header(b"7 a=bc\n"), long_name(b"name\0"), pax_header(b"", tarfile.XGLTYPE)])
def test_headers_in_a_chain_are_refused(tmp_path: Path, plain: Path, header: bytes, compression: str) -> None:
    """tarfile calls itself for each of them, so that thousands end in a RecursionError."""
    path = before_all(plain, tmp_path / "a", header * 5000, compression)
    with pytest.raises(ArchiveError, match=f"{path} .*a member has more than 16 headers"):
        read_all(path)


def test_a_few_headers_before_a_member_are_read(tmp_path: Path, plain: Path) -> None:
    headers = pax_header(b"7 a=bc\n", tarfile.XGLTYPE) + pax_header(b"12 mtime=12\n") + long_name(b"another\0")
    path = before_all(plain, tmp_path / "a", headers)
    first = next(read_members(path))
    assert (first.name, first.info.mtime) == ("another", 12)


@pytest.mark.parametrize("mtime", ["nan", "inf", "-inf", "1e999"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, plain: Path, mtime: str) -> None:
    record = f" mtime={mtime}\n"
    path = before_all(plain, tmp_path / "a", pax_header(f"{len(record) + 2}{record}".encode()))
    with pytest.raises(ArchiveError, match="has an impossible size, time or name"):
        read_all(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"2 " * (100 << 10) + b"=", "malformed"),  # as older tarfiles read it, 10^5 keys of 10^5 bytes each
        (b"9" * (200 << 10) + b" hdrcharset", "a number that is none"),
        (b"9 a=b\n", "malformed"),
        (b"6 abc\n", "malformed"),
    ],
)
def test_attributes_that_cost_more_than_they_hold_are_refused(
    tmp_path: Path, plain: Path, data: bytes, why: str
) -> None:
    path = before_all(plain, tmp_path / "a", pax_header(data))
    with pytest.raises(ArchiveError, match=why):
        read_all(path)


_READ = (
    "from ocihook.container.engine_archive import read_facts; from ocihook.errors import ArchiveError; "
    "from pathlib import Path"
)
_REFUSE = """
try:
    read_facts(Path(sys.argv[1]))
except ArchiveError as error:
    print(error)
"""


def sparse_header(parts: int, size: int) -> bytes:
    """Return a member of GNU's old sparse format; its map continues in blocks of their own."""
    info = tarfile.TarInfo("checkpoint/pages-9.img")
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[482] = 1
    block[483:495] = b"%011o\0" % size
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * ord(" "))
    rows = b"".join(b"%011o\0%011o\0" % (2 * number + 1, 1) for number in range(21)) + b"\1" + bytes(7)
    return bytes(block) + rows * (parts // 21)


def global_attributes(number: int) -> bytes:
    rows = b"".join(b"18 %02d-%04d=value\n" % (number, row) for row in range(9999))
    return pax_header(rows, tarfile.XGLTYPE) + tarfile.TarInfo(f"volumes/{number}").tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(sparse_header(5_000_000, 1 << 40), id="map of a sparse file"),
        pytest.param(b"".join(map(global_attributes, range(100))), id="attributes of all members"),
    ],
)
def test_an_archive_cannot_take_more_memory_than_it_may(tmp_path: Path, plain: Path, headers: bytes) -> None:
    path = before_all(plain, tmp_path / "a", headers, "zstd")
    assert path.stat().st_size < 4 << 20
    assert "damaged" in run_within(64 << 20, _REFUSE, path, before=_READ)


def test_members_without_end_are_refused_in_bounded_memory(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "one", "w") as tar:
        tar.addfile(tarfile.TarInfo("volumes/" + "x" * 80))
    block = (tmp_path / "one").read_bytes()[:512]
    with archive._open_stream(tmp_path / "a", "wb", "zstd") as stream:
        for number in range(400_000):
            name = bytearray(block)
            name[8:16] = b"%08d" % number
            name[148:156] = b"%06o\0 " % (sum(name) - sum(name[148:156]) + 8 * ord(" "))
            stream.write(name)
    told = run_within(160 << 20, _REFUSE, tmp_path / "a", before=_READ)
    assert "its names are too long, or too many" in told


def test_a_stream_without_end_behind_its_tar_is_refused(tmp_path: Path, plain: Path) -> None:
    write(tmp_path / "a", plain.read_bytes() + bytes(64 << 20), "zstd")
    with pytest.raises(ArchiveError, match="goes on for more than 16777216 bytes behind its end"):
        read_all(tmp_path / "a")


@settings(max_examples=300, deadline=None)
@given(
    header=st.integers(0, 1 << 16),
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 511), st.integers(124, 135), st.just(156)),
            st.one_of(st.integers(0, 255), st.sampled_from(b"\x00\x80\xff-7/.SxgLK2")),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: int, changes: list[tuple[int, int]]
) -> None:
    """With a checksum that is right, so that all of it is looked at; nothing but an ArchiveError may come out."""
    directory = tmp_path_factory.mktemp("headers")
    make_image_set(directory / "images", {1: mixed_pages(2)})
    make_archive(directory / "a.tar", directory / "images", extra={"volumes/" + "n" * 130: b"with a long name"})
    data = bytearray((directory / "a.tar").read_bytes())
    starts = [start for start in range(0, len(data), 512) if data[start + 257 : start + 262] == b"ustar"]
    start = starts[header % len(starts)]
    for position, value in changes:
        data[start + position] = value
    block = data[start : start + 512]
    data[start + 148 : start + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * ord(" "))
    (directory / "a.tar").write_bytes(data)
    try:
        names = [member.name for member in read_members(directory / "a.tar")]
    except ArchiveError:
        return
    assert len(set(names)) == len(names)
    assert not any(".." in name.split("/") or name.startswith("/") for name in names)
