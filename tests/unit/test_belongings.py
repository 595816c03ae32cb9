"""Belongings of a container: changes of a rootfs, applied elsewhere and reverted; where they are."""

import os
import shutil
import stat
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.belongings.bringing import INVERSE_NAME, bring, bring_reversibly, take_out, write_inverse
from ocihook.belongings.filesystems import find_rootfs, places_of, volumes_of
from ocihook.belongings.saving import Writer
from ocihook.belongings.tree import tree_bytes
from ocihook.errors import IntegrityError, UnsupportedError
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.pages import no_progress

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="makes devices and trusted attributes")


def snapshot(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything that is known of a tree."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(top):
        for path in (Path(directory), *(Path(directory, name) for name in files), *(Path(directory, n) for n in names)):
            status = path.lstat()
            content: object = None
            if path.is_symlink():
                content = path.readlink()
            elif path.is_file():
                content = path.read_bytes()
            attributes = {} if path.is_symlink() else {n: os.getxattr(path, n) for n in os.listxattr(path)}
            times = None if path.is_symlink() else status.st_mtime_ns
            found[str(path.relative_to(top))] = (
                status.st_mode,
                status.st_uid,
                status.st_gid,
                times,
                content,
                attributes,
            )
    return found


def save(path: Path, *trees: tuple[str, Path], upper_of: Path | None = None) -> Path:
    with path.open("wb") as file:
        writer = Writer(file, no_progress)
        for prefix, tree in trees:
            writer.add_tree(prefix, tree, upper_of)
        writer.end()
    assert path.stat().st_size % PAGE_BYTES == 0
    return path


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    """What a rootfs has before anything is applied."""
    top = tmp_path / "lower"
    (top / "etc/deep/er").mkdir(parents=True)
    (top / "var/cache").mkdir(parents=True)
    (top / "etc/kept").write_text("kept")
    (top / "etc/changed").write_text("before")
    (top / "etc/gone").write_text("gone")
    (top / "etc/deep/er/file").write_text("deep")
    (top / "var/cache/old").write_text("old")
    (top / "file-then-directory").write_text("file")
    (top / "link").symlink_to("etc")
    os.setxattr(top / "etc/changed", "user.note", b"\x00\xff\n before")
    for path in (top / "etc/changed", top / "etc", top / "var/cache"):
        os.utime(path, ns=(10**18 + 7, 10**18 + 7))
    return top


@pytest.fixture
def overlay(tmp_path: Path, lower: Path) -> Iterator[tuple[Path, Path]]:
    """A mounted rootfs and where its changes are."""
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    merged, upper = tmp_path / "merged", tmp_path / "upper"
    options = f"lowerdir={lower},upperdir={upper},workdir={tmp_path / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    yield merged, upper
    subprocess.run(["umount", str(merged)], check=True)


def change(top: Path) -> None:
    """Do to a rootfs what containers do."""
    (top / "etc/changed").write_bytes(b"after" * 5000)
    (top / "etc/gone").unlink()
    shutil.rmtree(top / "etc/deep")
    (top / "etc/deep").mkdir()  # opaque
    (top / "etc/deep/new").write_text("new")
    shutil.rmtree(top / "var/cache")
    (top / "file-then-directory").unlink()
    (top / "file-then-directory").mkdir(0o750)
    (top / "file-then-directory/in").write_text("in")
    (top / "added").write_text("added")
    (top / "twin").hardlink_to(top / "added")
    os.chown(top / "added", 12, 34)
    (top / "added").chmod(0o4755)
    os.setxattr(top / "added", "user.note", b"\x00\xff\n after")
    os.mkfifo(top / "fifo", 0o640)
    (top / "name with \n and \udcff").write_text("odd")
    with (top / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"middle")


@root_only
def test_changes_of_an_overlay_are_brought_to_another_one_and_taken_out_again(
    tmp_path: Path, lower: Path, overlay: tuple[Path, Path]
) -> None:
    merged, upper = overlay
    change(merged)
    wanted = snapshot(merged)
    tar = save(tmp_path / "belongings.tar", ("rootfs", upper), upper_of=merged)
    assert tar.stat().st_blocks * 512 < 1 << 20  # holes are holes
    other = tmp_path / "other"
    shutil.copytree(lower, other, symlinks=True)
    os.setxattr(other / "etc/changed", "user.note", b"\x00\xff\n before")
    for directory in (other / "etc", other / "var/cache"):
        os.utime(directory, ns=(10**18 + 7, 10**18 + 7))
    before = snapshot(other)
    undo = tmp_path / "undo"
    undo.mkdir()
    bring_reversibly(tar, {"rootfs": other}, undo, no_progress)
    assert snapshot(other) == wanted
    assert (other / "added").stat().st_nlink == 2
    assert (other / "sparse").stat().st_blocks * 512 < 1 << 20
    bring(tar, {"rootfs": other}, no_progress)  # again
    assert snapshot(other) == wanted
    take_out({"rootfs": other}, undo, no_progress)
    assert snapshot(other) == before
    take_out({"rootfs": other}, undo, no_progress)
    assert snapshot(other) == before
    assert list(undo.iterdir()) == []


@root_only
def test_what_was_brought_half_is_taken_out(tmp_path: Path, overlay: tuple[Path, Path], lower: Path) -> None:
    merged, upper = overlay
    change(merged)
    tar = save(tmp_path / "belongings.tar", ("rootfs", upper), upper_of=merged)
    before = snapshot(lower)
    undo = tmp_path / "undo"
    undo.mkdir()
    steps = left = 0

    def die(_done: int) -> None:
        nonlocal left, steps
        steps += 1
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    other = tmp_path / "other"
    for bound in range(40):
        left = bound
        shutil.rmtree(other, ignore_errors=True)
        subprocess.run(["cp", "-a", str(lower), str(other)], check=True)
        try:
            bring_reversibly(tar, {"rootfs": other}, undo, die)
        except KeyboardInterrupt:
            take_out({"rootfs": other}, undo, no_progress)
            assert snapshot(other) == before
        else:
            break
    else:
        pytest.fail("it never came to its end")
    assert steps > 5


@root_only
def test_what_overlayfs_keeps_elsewhere_is_saved(tmp_path: Path, lower: Path) -> None:
    """With metacopy and redirect_dir the upper directory has names, and no content."""
    for name in ("upper", "work", "merged", "other"):
        (tmp_path / name).mkdir()
    merged, upper, other = tmp_path / "merged", tmp_path / "upper", tmp_path / "other"
    options = f"lowerdir={lower},upperdir={upper},workdir={tmp_path / 'work'},metacopy=on,redirect_dir=on"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    try:
        (merged / "etc/kept").chmod(0o600)
        (merged / "etc/deep").rename(merged / "moved")
        tar = save(tmp_path / "belongings.tar", ("rootfs", upper), upper_of=merged)
        shutil.copytree(lower, other, symlinks=True, dirs_exist_ok=True)
        bring(tar, {"rootfs": other}, no_progress)
        assert (other / "etc/kept").read_text() == "kept"
        assert stat.S_IMODE((other / "etc/kept").stat().st_mode) == 0o600
        assert (other / "moved/er/file").read_text() == "deep"
        assert not (other / "etc/deep").exists()
    finally:
        subprocess.run(["umount", str(merged)], check=True)


@root_only
def test_a_volume_is_brought_by_the_first_container_alone(tmp_path: Path) -> None:
    source, volume = tmp_path / "source", tmp_path / "volume"
    for directory in (source, volume, tmp_path / "one", tmp_path / "two"):
        directory.mkdir()
    (source / "state").write_text("saved")
    tar = save(tmp_path / "belongings.tar", ("volumes/%2Fdata", source))
    places = {"volumes/%2Fdata": volume}
    bring_reversibly(tar, places, tmp_path / "one", no_progress)
    (volume / "state").write_text("goes on")
    bring_reversibly(tar, places, tmp_path / "two", no_progress)
    take_out(places, tmp_path / "two", no_progress)
    assert (volume / "state").read_text() == "goes on"
    again = save(tmp_path / "again.tar", ("volumes/%2Fdata", volume))
    take_out(places, tmp_path / "one", no_progress)
    assert list(volume.iterdir()) == []
    bring_reversibly(again, places, tmp_path / "two", no_progress)  # the mark went, and was not saved
    assert (volume / "state").read_text() == "goes on"


def test_sockets_are_left_out(tmp_path: Path) -> None:
    import socket

    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
    (source / "file").touch()
    bring(save(tmp_path / "belongings.tar", ("rootfs", source)), {"rootfs": other}, no_progress)
    assert [path.name for path in other.iterdir()] == ["file"]


def test_content_begins_at_a_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    contents = {
        f"file{number}": bytes([65 + number]) * size for number, size in enumerate((1, 4096, 5000, 12345, 8192))
    }
    for name, content in contents.items():
        (source / name).write_bytes(content)
    data = save(tmp_path / "belongings.tar", ("rootfs", source)).read_bytes()
    for content in contents.values():
        if len(content) >= PAGE_BYTES:
            assert data.index(content) % PAGE_BYTES == 0


@pytest.mark.parametrize("name", ["rootfs/../out", "rootfs//etc", "rootfs/./x", "rootfs/a/../../out"])
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    top = tmp_path / "top"
    top.mkdir()
    tar = tmp_path / "belongings.tar"
    with tar.open("wb") as file:
        writer = Writer(file, no_progress)
        writer.add_bytes(name, b"harm")
        writer.end()
    with pytest.raises(IntegrityError, match="has the name"):
        bring(tar, {"rootfs": top}, no_progress)
    assert not (tmp_path / "out").exists()


def test_no_link_is_followed(tmp_path: Path) -> None:
    top, out = tmp_path / "top", tmp_path / "out"
    top.mkdir()
    out.mkdir()
    (top / "link").symlink_to(out)
    tar = tmp_path / "belongings.tar"
    with tar.open("wb") as file:
        writer = Writer(file, no_progress)
        writer.add_bytes("rootfs/link/file", b"harm")
        writer.end()
    with pytest.raises(UnsupportedError, match="rootfs/link/file"):
        bring(tar, {"rootfs": top}, no_progress)
    assert list(out.iterdir()) == []


def _member(**fields: object) -> bytes:
    info = tarfile.TarInfo("rootfs/file")
    for name, value in fields.items():
        setattr(info, name, value)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize(
    "header",
    [
        _member(pax_headers={"mtime": "nan"}),
        _member(pax_headers={"mtime": "1e300"}),
        _member(pax_headers={"mtime": "9" * 30}),
        _member(pax_headers={"uid": str(1 << 70)}),
        _member(pax_headers={"gid": "-5"}),
        _member(pax_headers={"path": "rootfs/a\0b"}),
        _member(type=tarfile.SYMTYPE, pax_headers={"linkpath": "a\0b"}),
        _member(pax_headers={"SCHILY.xattr.user.a\0b": "x"}),
        _member(type=tarfile.DIRTYPE, pax_headers={"mtime": "inf"}),
        _member(type=tarfile.CHRTYPE, devmajor=0o7777777, devminor=0o7777777),
        _member(pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}, size=0),
    ],
)
def test_members_that_are_as_no_file_can_be_are_refused(tmp_path: Path, header: bytes) -> None:
    top = tmp_path / "top"
    top.mkdir()
    tar = tmp_path / "belongings.tar"
    tar.write_bytes(header + bytes(1024))
    with pytest.raises(IntegrityError):
        bring(tar, {"rootfs": top}, no_progress)
    assert list(top.iterdir()) == []


def test_attributes_of_directories_are_not_kept_in_memory(tmp_path: Path) -> None:
    """A tar of directories with large attributes takes no space in a store, and must take none in memory."""
    top = tmp_path / "top"
    top.mkdir()
    tar = tmp_path / "belongings.tar"
    with tar.open("wb") as file:
        for number in range(400):
            info = tarfile.TarInfo(f"rootfs/{number}")
            info.type, info.pax_headers = tarfile.DIRTYPE, {"comment": 200_000 * "x"}
            file.write(info.tobuf(tarfile.PAX_FORMAT))
        file.write(bytes(1024))
    tracemalloc.start()
    try:
        bring(tar, {"rootfs": top}, no_progress)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert len(list(top.iterdir())) == 400


def test_a_tar_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    tar = tmp_path / "belongings.tar"
    tar.write_bytes(b"x" * 512)
    with pytest.raises(IntegrityError, match="damaged"), (tmp_path / INVERSE_NAME).open("wb") as file:
        write_inverse(tar, {"rootfs": top}, file, no_progress)


def test_volumes_are_those_that_end_with_their_pod() -> None:
    anonymous = f"/var/lib/containers/storage/volumes/{'ab' * 32}/_data"
    empty_dir = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/scratch"
    sources = {
        "/scratch": empty_dir,
        "/anonymous": anonymous,
        "/dev/shm": "/run/containerd/sandboxes/id/shm",
        "/named": "/var/lib/containers/storage/volumes/named/_data",
        "/claim": "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/claim/mount",
        "/proc": "proc",
    }
    spec = {"mounts": [{"destination": to, "source": source} for to, source in sources.items()]}
    assert {str(path) for path in volumes_of(spec).values()} == {
        empty_dir,
        anonymous,
        "/run/containerd/sandboxes/id/shm",
    }
    places = places_of({**spec, "root": {"path": "/merged"}}, Path("/bundle"))
    assert places["rootfs"] == Path("/merged")
    assert places["volumes/%2Fdev%2Fshm"] == Path("/run/containerd/sandboxes/id/shm")
    assert volumes_of({"mounts": [{"destination": "/dev/shm", "source": "/dev/shm"}]}) == {}


@root_only
def test_the_upper_directory_is_found(overlay: tuple[Path, Path], tmp_path: Path) -> None:
    merged, upper = overlay
    assert find_rootfs(merged).upper == upper
    (tmp_path / "link").symlink_to(merged)
    assert find_rootfs(tmp_path / "link").upper == upper
    with pytest.raises(UnsupportedError, match="not an overlay"):
        find_rootfs(tmp_path)


def test_holes_and_second_names_count_nothing(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "file").write_bytes(bytes(4096))
    (tmp_path / "twin").hardlink_to(tmp_path / "file")
    assert tree_bytes(tmp_path) == 4096
