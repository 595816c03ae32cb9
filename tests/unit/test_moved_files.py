"""Files in ConfigMaps and the like are found where a new container has them, or the restore is refused by name."""

import base64
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.container import atomic_volumes
from ocihook.container.atomic_volumes import data_directory, read_atomic_volumes
from ocihook.container.spec import SpecFacts, spec_facts
from ocihook.criu.file_images import Moved, moved_paths
from ocihook.criu.images import COMMON_MAGIC
from ocihook.criu.proto import message_class
from ocihook.criu.socket_images import FILES_MAGIC, FILES_NAME
from ocihook.errors import ImageError, UnsupportedError
from ocihook.runtime.moved_files import move_volumes
from ocihook.session.record import from_json, to_json
from tests.fakes.sockets import framed

PLACE = "/etc/app"
OWNER = {"uid": 0, "euid": 0, "signum": 0, "pid_type": 0, "pid": 0}
HANDLE = {"bytes": 8, "type": 1, "handle": [0] * 16}
MAGICS = COMMON_MAGIC.to_bytes(4, "little") + FILES_MAGIC.to_bytes(4, "little")


def token(subject: str) -> str:
    parts = (json.dumps({"alg": "none"}), json.dumps({"sub": subject}), subject)
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)


def write_volume(volume: Path, time: str, files: Mapping[str, str]) -> Path:
    directory = volume / f"..2026_01_01_{time}"
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (volume / "..data").symlink_to(directory.name)
    return volume


def config(volume: Path) -> dict[str, Any]:
    return {"mounts": [{"destination": PLACE, "source": str(volume), "type": "bind"}]}


def regular(path: str, size: int = 3, *, build_id: tuple[int, ...] = (7,)) -> bytes:
    reg = {"id": 1, "flags": 0, "pos": 0, "fown": OWNER, "name": path, "size": size, "build_id": build_id}
    return framed(message_class("file_entry")(type=1, id=1, reg=reg).SerializeToString())


def watching(*paths: str) -> bytes:
    wd = {"id": 1, "i_ino": 1, "mask": 1, "ignored_mask": 0, "s_dev": 1}
    wds = [{**wd, "wd": number, "f_handle": {**HANDLE, "path": path}} for number, path in enumerate(paths)]
    wds += [{**wd, "wd": 99, "f_handle": HANDLE}]
    ify = {"id": 2, "flags": 0, "fown": OWNER, "wd": wds}
    mark = {"id": 3, "type": 1, "mflags": 0, "mask": 0, "ignored_mask": 0, "s_dev": 1}
    marks = [{**mark, "ie": {"i_ino": 1, "f_handle": {**HANDLE, "path": path}}} for path in paths]
    ffy = {"id": 3, "flags": 0, "fown": OWNER, "faflags": 0, "evflags": 0, "mark": marks}
    entries = (message_class("file_entry")(type=8, id=2, ify=ify), message_class("file_entry")(type=12, id=3, ffy=ffy))
    return b"".join(framed(entry.SerializeToString()) for entry in entries)


def moved(tmp_path: Path, image: bytes, then: Path, now: Path) -> bytes:
    (tmp_path / FILES_NAME).write_bytes(MAGICS + image)
    (tmp_path / FILES_NAME).chmod(0o640)
    before, after = (read_atomic_volumes(config(volume)) for volume in (then, now))
    changed = move_volumes(tmp_path, before, after, config(now))
    data = (tmp_path / FILES_NAME).read_bytes()
    assert changed == (data != MAGICS + image)
    assert (tmp_path / FILES_NAME).stat().st_mode & 0o777 == 0o640
    return data[len(MAGICS) :]


FILES = {"config": "a=1", "sub/deep": "b", "token": token("one"), "ca.crt": "-----BEGIN CERTIFICATE-----\n1"}
OLD, NEW = f"{PLACE}/..2026_01_01_10", f"{PLACE}/..2026_01_01_12"


def test_paths_lead_to_the_new_directory(tmp_path: Path) -> None:
    new_files = {**FILES, "token": token("another"), "ca.crt": "-----BEGIN CERTIFICATE-----\n2 and more"}
    then, now = write_volume(tmp_path / "a", "10", FILES), write_volume(tmp_path / "b", "12", new_files)
    other = regular("/srv/log") + regular(f"{PLACE}x/..2026_01_01_1/config") + regular(f"{OLD}0/config")
    image = (
        other
        + regular(f"{OLD}/config")
        + regular(f"{OLD}/sub/deep")
        + regular(f"{OLD}/sub")
        + regular(OLD)
        + regular(f"{OLD}/token")
        + watching(f"{OLD}/config", PLACE)
    )
    assert moved(tmp_path, image, then, now) == (
        other
        + regular(f"{NEW}/config")
        + regular(f"{NEW}/sub/deep")
        + regular(f"{NEW}/sub")
        + regular(NEW)
        + regular(f"{NEW}/token", len(new_files["token"]), build_id=())
        + watching(f"{NEW}/config", PLACE)
    )


@pytest.mark.parametrize(
    ("used", "files", "why"),
    [
        ("config", {**FILES, "config": "a=2"}, "its content is another one now"),
        ("config", {"token": "x"}, "the volume has no config now"),
        ("sub", {"config": "a=1"}, "does not have its content on record"),
        ("token", {**FILES, "token": "no token"}, "its content is another one now"),
        ("ca.crt", {**FILES, "ca.crt": "no certificate"}, "its content is another one now"),
        ("../../etc/passwd", FILES, "does not have its content on record"),
    ],
)
def test_what_is_not_the_same_is_refused(tmp_path: Path, used: str, files: Mapping[str, str], why: str) -> None:
    then, now = write_volume(tmp_path / "a", "10", FILES), write_volume(tmp_path / "b", "12", files)
    with pytest.raises(UnsupportedError, match=why):
        moved(tmp_path, regular("/x") + regular(f"{OLD}/{used}"), then, now)
    assert (tmp_path / FILES_NAME).read_bytes() == MAGICS + regular("/x") + regular(f"{OLD}/{used}")


def test_a_place_behind_a_link_of_the_image(tmp_path: Path) -> None:
    """/var/run leads to /run, which is in paths; volumes that were written at once differ by their places."""
    volumes = {
        f"/var/run/secrets/{name}": [
            write_volume(tmp_path / f"{name}{time}", time, {"token": f"{name}"}) for time in ("10", "12")
        ]
        for name in ("one", "two")
    }
    before, after = (
        {"mounts": [{"destination": place, "source": str(pair[at])} for place, pair in volumes.items()]}
        for at in (0, 1)
    )
    (tmp_path / FILES_NAME).write_bytes(MAGICS + regular("/run/secrets/two/..2026_01_01_10/token"))
    assert move_volumes(tmp_path, read_atomic_volumes(before), read_atomic_volumes(after), after)
    moved_to = MAGICS + regular("/run/secrets/two/..2026_01_01_12/token")
    assert (tmp_path / FILES_NAME).read_bytes() == moved_to


def test_a_file_that_an_update_had_removed_is_left_to_criu(tmp_path: Path) -> None:
    then, now = write_volume(tmp_path / "a", "10", FILES), write_volume(tmp_path / "b", "12", FILES)
    image = regular(f"{PLACE}/..2026_01_01_09/config")
    assert moved(tmp_path, image, then, now) == image


def test_without_a_volume_now_it_is_refused(tmp_path: Path) -> None:
    then = write_volume(tmp_path / "a", "10", FILES)
    (tmp_path / "b").mkdir()
    with pytest.raises(UnsupportedError, match=f"{PLACE} is not a volume with `..data` now"):
        moved(tmp_path, regular(f"{OLD}/config"), then, tmp_path / "b")


def test_the_record_is_part_of_what_a_checkpoint_has(tmp_path: Path) -> None:
    volume = write_volume(tmp_path / "a", "10", FILES)
    facts = spec_facts(config(volume), Path("/b"))
    assert facts.volumes[PLACE].directory == "..2026_01_01_10"
    assert {name: len(kind) for name, kind in facts.volumes[PLACE].files.items()} == {
        "config": 64,
        "sub/deep": 64,
        "token": len("token"),
        "ca.crt": len("certificates"),
    }
    assert from_json(SpecFacts, json.loads(json.dumps(to_json(facts)))) == facts
    seen = tmp_path / "seen"
    seen.mkdir()
    shutil.copytree(volume, seen / str(volume).lstrip("/"), symlinks=True)
    assert spec_facts(config(volume), Path("/b"), seen).volumes == facts.volumes


@pytest.mark.parametrize(
    "link", [None, "..data", "/etc", "../other", "..gone", "plain", "..2026/sub", ".", "..", "..x\n"]
)
def test_what_is_no_atomic_volume(tmp_path: Path, link: str | None) -> None:
    volume = tmp_path / "volume"
    (volume / "..2026/sub").mkdir(parents=True)
    (volume / "plain").mkdir()
    (tmp_path / "other").mkdir()
    if link is not None:
        (volume / "..data").symlink_to(link)
    assert data_directory(volume) == ""
    assert read_atomic_volumes(config(volume)) == {}


def test_odd_files_and_sizes_end_no_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes, links and sockets are no content; what is too large is not on record, and the record says so."""
    volume = write_volume(tmp_path / "a", "10", {"b": "1", "c": "22"})
    os.mkfifo(volume / "..2026_01_01_10/a")
    (volume / "..2026_01_01_10/aa").symlink_to("/etc/passwd")
    found = read_atomic_volumes(config(volume))[PLACE]
    assert (list(found.files), found.is_whole) == (["b", "c"], True)
    monkeypatch.setattr(atomic_volumes, "_MOST_BYTES", 2)
    found = read_atomic_volumes(config(volume))[PLACE]
    assert (list(found.files), found.is_whole) == (["b"], False)
    many = write_volume(tmp_path / "many", "10", {f"{number}{'é' * 100}": "" for number in range(400)})
    assert len(json.dumps(to_json(read_atomic_volumes(config(many))))) < 256 << 10


@pytest.mark.parametrize("data", [b"", b"x", MAGICS + b"\x05\0\0\0ab", MAGICS + framed(b"\x08\x01")])
def test_a_damaged_image_is_an_error(data: bytes) -> None:
    with pytest.raises(ImageError):
        moved_paths(data, lambda _: Moved("/x"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)))
def test_only_what_moves_changes(paths: list[str]) -> None:
    image = MAGICS + b"".join(regular(path) for path in paths)
    assert moved_paths(image, lambda _: None) == image
    there_and_back = moved_paths(moved_paths(image, lambda path: Moved(f"/new{path}")), lambda path: Moved(path[4:]))
    assert there_and_back == image


def test_a_name_that_is_no_text_is_refused() -> None:
    image = MAGICS + regular("/a/xx").replace(b"xx", b"\xff\xfe")
    assert moved_paths(image, lambda _: None) == image
    with pytest.raises(UnsupportedError, match="its name is not UTF-8"):
        moved_paths(image, lambda path: Moved(f"/b{path}"))
