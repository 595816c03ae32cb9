"""`ocihook archive` as people and programs meet it: output, errors, interruption, what a terminal is shown."""

import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ocihook.cli.main import cli
from ocihook.cli.render import format_bytes
from ocihook.criu.socket_images import FilesImage
from ocihook.errors import IntegrityError, OutputExists, printable
from ocihook.net.addresses import AddressMap
from ocihook.net.moving import Plan
from ocihook.net.netlink import Link
from ocihook.net.note import NetworkNote, read_note, write_note
from ocihook.net.restore import Moving, _ended_before
from ocihook.net.stall import Place
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.fakes.sockets import files_image, make_socket

MEMORY = {1: mixed_pages(100), 5: mixed_pages(20, seed=2)}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "images", MEMORY)
    make_archive(tmp_path / "plain.tar", tmp_path / "images", "cri-o")
    return tmp_path / "plain.tar"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["archive", *map(str, arguments)])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    assert value.pop("schema_version") == 1
    return value


def ocihook(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ocihook", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_inspect_for_programs(plain: Path) -> None:
    value = run_json("inspect", plain)
    assert value["archive"] == str(plain)
    assert value["container"]["engine"] == "cri-o"
    assert (value["container"]["pod_namespace"], value["container"]["pod_name"]) == ("default", "p1")
    assert (value["packed"], value["manifest"]) == (False, None)
    assert value["raw_bytes"] == value["stored_bytes"] == 120 * 4096
    assert value["processes"] == [
        {"pid": 1, "ppid": 0, "threads": 1, "memory_bytes": 100 * 4096},
        {"pid": 5, "ppid": 0, "threads": 1, "memory_bytes": 20 * 4096},
    ]
    assert value["stats"]["frozen_us"] == 250_000


def test_inspect_for_people(tmp_path: Path, plain: Path) -> None:
    packed = tmp_path / "packed.tar"
    assert run("pack", plain, packed).exit_code == 0
    shown = run("inspect", packed).stdout
    for fact in ("cri-o", "default/p1", "example.org/train:1", "0.250 s", "480.0 KiB raw", "by ocihook"):
        assert fact in shown


def test_conversions_for_programs(tmp_path: Path, plain: Path) -> None:
    packed, again = tmp_path / "packed.tar.zst", tmp_path / "again.tar"
    value = run_json("pack", plain, packed, "--compress", "zstd", "--workers", 2)
    assert value == {
        "source": str(plain),
        "output": str(packed),
        "source_bytes": plain.stat().st_size,
        "output_bytes": packed.stat().st_size,
    }
    assert run_json("verify", packed) == {"archive": str(packed), "ok": True, "packed": True}
    assert run_json("unpack", packed, again)["output_bytes"] == again.stat().st_size
    diff = run_json("diff", packed, again)
    assert {image["state"] for image in diff["images"]} == {"same"}
    assert diff["memory"][0] == {
        "name": "pagemap-1.img",
        "same": 100,
        "changed": 0,
        "only_in_first": 0,
        "only_in_second": 0,
    }


def test_an_output_that_exists_is_kept_without_force(tmp_path: Path, plain: Path) -> None:
    target = tmp_path / "out.tar"
    target.write_text("precious")
    refused = run("pack", plain, target)
    assert isinstance(refused.exception, OutputExists)
    assert "exists. Name another output, or use --force" in str(refused.exception)
    assert target.read_text() == "precious"
    assert run("pack", plain, target, "--force").exit_code == 0
    assert run("pack", target, target).exit_code == 1
    assert run("unpack", target, target, "--force").exit_code == 0
    assert run_json("diff", plain, target)["memory"][0]["same"] == 100


def test_one_bad_file_does_not_end_a_list(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see")
    listed = {Path(entry["path"]).name: entry for entry in run_json("list", tmp_path)["archives"]}
    assert listed["plain.tar"]["container"] == "default/p1/c1"
    assert listed["plain.tar"]["error"] is None
    assert "is not a tar archive" in listed["notes.txt"]["error"]


def test_damage_is_one_line_and_exit_status_4(tmp_path: Path, plain: Path) -> None:
    packed = tmp_path / "packed.tar"
    run("pack", plain, packed, "--workers", 1)
    with tarfile.open(packed) as tar:
        pack = next(member for member in tar if member.name.endswith(".pack"))
    data = bytearray(packed.read_bytes())
    data[pack.offset_data + 100] ^= 1
    packed.write_bytes(data)
    assert isinstance(run("verify", packed).exception, IntegrityError)
    done = ocihook("archive", "verify", packed)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("ocihook: error: pack ocihook-0.pack: the chunk at byte")
    assert done.stderr.count("\n") == 1


def with_config(source: Path, target: Path, **config: str) -> Path:
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            file = old.extractfile(member)
            data = file.read() if file else b""
            if member.name == "config.dump":
                data = json.dumps(config).encode()
                member.size = len(data)
            new.addfile(member, BytesIO(data))
    return target


def test_an_archive_cannot_give_commands_to_a_terminal(tmp_path: Path, plain: Path) -> None:
    hostile = with_config(plain, tmp_path / "a.tar", id="ab", rootfsImageName="\x1b]0;owned\x07\x1b[2Jimage\r\ud83d")
    for command in ("list", "inspect"):
        shown = run(command, hostile)
        assert shown.exit_code == 0
        assert "\\x1b]0;owned\\x07\\x1b[2Jimage\\r\\ud83d" in shown.stdout
        assert "\x1b" not in shown.stdout
    with tarfile.open(hostile, "a") as tar:
        tar.addfile(tarfile.TarInfo("\x1b[2J/../x"))
    refused = ocihook("archive", "inspect", hostile)
    assert refused.returncode == 6
    assert "climbs out" in refused.stderr
    assert "\x1b" not in refused.stderr


def test_what_is_printable_stays_as_it_is() -> None:
    assert printable("größe 大 ✓") == "größe 大 ✓"
    assert printable("a\tb\x9bc\udc80\u202e") == "a\\tb\\x9bc\\udc80\\u202e"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.00 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_progress_is_shown_on_a_terminal_and_nowhere_else(tmp_path: Path, plain: Path) -> None:
    command = [sys.executable, "-m", "ocihook", "archive", "pack", str(plain)]
    terminal, side = pty.openpty()
    done = subprocess.run([*command, str(tmp_path / "a")], stdout=subprocess.PIPE, stderr=side, timeout=60, check=True)
    os.close(side)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert b"packing" in shown
    assert b"480.0/480.0 KiB" in shown.replace(b"\x1b[32m", b"").replace(b"\x1b[0m", b"")
    assert b"packing" not in done.stdout
    silent = subprocess.run([*command, str(tmp_path / "b")], capture_output=True, timeout=60, check=True)
    assert silent.stderr == b""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=str
)
def test_an_interrupted_command_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    make_image_set(tmp_path / "images", {1: os.urandom(4096) * 16384})
    make_archive(tmp_path / "plain.tar", tmp_path / "images")
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "ocihook", "archive", "pack", str(tmp_path / "plain.tar"), str(place / "out.tar")]
    heeding = ["env", "--default-signal"]  # whoever has started the tests may ignore signals
    command = [*heeding, *command, "--workers", "2", "--compress", "gzip"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not any(place.glob(".ocihook-*/pages-1.img")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(60) == status
    assert list(place.iterdir()) == []


def make_connected(tmp_path: Path, *, is_packed: bool, state: int = 1, has_note: bool = True) -> Path:
    """Write an archive of a container with a note about its network, a listener and two connections."""
    images = tmp_path / "images"
    make_image_set(images, {1: mixed_pages(20)})
    peers = ["10.0.0.2", "192.0.2.7"]
    found = [
        make_socket(1, "10.0.0.1"),
        *(make_socket(n, "10.0.0.1", peer, state=state) for n, peer in enumerate(peers, 2)),
    ]
    (images / "files.img").write_bytes(files_image(found))
    link = Link("eth0", 2, "", "veth", 1500, is_up=True, is_loopback=False, addresses=("10.0.0.1/8",))
    if has_note:
        write_note(images, NetworkNote(links=(link,)))
    make_archive(tmp_path / "plain.tar", images)
    if not is_packed:
        return tmp_path / "plain.tar"
    assert run("pack", tmp_path / "plain.tar", tmp_path / "packed.tar").exit_code == 0
    return tmp_path / "packed.tar"


def test_inspect_says_what_becomes_of_each_connection(tmp_path: Path) -> None:
    archive = make_connected(tmp_path, is_packed=False)
    assert run_json("inspect", archive)["sockets"] == [
        {"socket": "TCP 10.0.0.1:5001 LISTEN", "fate": "moves"},
        {"socket": "TCP 10.0.0.1:5002 -> 10.0.0.2:80 ESTABLISHED", "fate": "closed"},
        {"socket": "TCP 10.0.0.1:5003 -> 192.0.2.7:80 ESTABLISHED", "fate": "closed"},
    ]
    assert "10.0.0.1:5003 -> 192.0.2.7:80 ESTABLISHED" in run("inspect", archive).output


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_archive_moves_to_other_addresses(tmp_path: Path, *, is_packed: bool) -> None:
    archive, moved = make_connected(tmp_path, is_packed=is_packed), tmp_path / "moved.tar"
    before = archive.read_bytes()
    addresses = ["--address", "10.0.0.1=10.9.0.1", "--address", "10.0.0.2=10.9.0.2"]
    done = run_json("move", archive, moved, *addresses, "--close-others")
    assert (done["moved"], done["closed"]) == (2, 1)
    assert archive.read_bytes() == before
    shown = [(one["socket"], one["fate"]) for one in run_json("inspect", moved)["sockets"]]
    assert shown == [
        ("TCP 10.9.0.1:5001 LISTEN", "moves"),
        ("TCP 10.9.0.1:5002 -> 10.9.0.2:80 ESTABLISHED", "closed"),
        ("TCP 127.0.0.1:5003 -> 127.0.0.2:80 ESTABLISHED", "stays"),
    ]
    assert run("verify", moved).exit_code == 0
    back = run_json("move", moved, tmp_path / "back.tar", "--address", "10.9.0.1=10.0.0.1")
    assert (back["moved"], back["closed"]) == (2, 0)


def test_a_move_notes_what_a_restore_must_destroy(tmp_path: Path) -> None:
    """Half closed, a connection sends nothing that the loopback device could answer."""
    make_connected(tmp_path, is_packed=False, state=5)
    images, addresses = tmp_path / "images", ["--address", "10.0.0.1=10.9.0.1", "--address", "10.0.0.2=10.9.0.2"]
    assert run_json("move", images, *addresses, "--close-others")["closed"] == 1
    note = read_note(images)
    assert note is not None
    assert note.ended == (3,)
    moving = Moving(FilesImage.read(images).sockets, None, note, AddressMap({}), Plan())
    assert list(_ended_before(moving)) == [Place("127.0.0.1", 5003, "127.0.0.2", 80)]


def test_what_only_a_restore_can_end_needs_a_note(tmp_path: Path) -> None:
    archive = make_connected(tmp_path, is_packed=False, state=5, has_note=False)
    result = run("move", archive, tmp_path / "moved.tar", "--address", "10.0.0.1=10.9.0.1", "--close-others")
    assert "10.0.0.1:5002 -> 10.0.0.2:80 FIN_WAIT2 ends only where" in str(result.exception)
    assert not (tmp_path / "moved.tar").exists()


def test_a_move_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    archive, moved = make_connected(tmp_path, is_packed=True), tmp_path / "moved.tar"
    for addresses, text in (
        (["10.7.0.1=10.9.0.1"], "no socket and no interface has 10.7.0.1"),
        (["10.0.0.1"], "must be OLD=NEW"),
        (["10.0.0.1=10.9.0.1", "10.0.0.2=10.9.0.1"], "cannot both become"),
    ):
        result = run("move", archive, moved, *(word for pair in addresses for word in ("--address", pair)))
        assert result.exit_code != 0
        assert text in str(result.exception) + result.output
    assert run("move", archive, "--address", "10.0.0.1=10.9.0.1").exit_code == 2


def test_an_image_directory_moves_where_it_is(tmp_path: Path) -> None:
    make_connected(tmp_path, is_packed=False)
    done = run_json("move", tmp_path / "images", "--address", "10.0.0.1=10.9.0.1")
    assert (done["moved"], done["closed"]) == (3, 0)
    assert str(FilesImage.read(tmp_path / "images").sockets[0].local) == "10.9.0.1"
    note = read_note(tmp_path / "images")
    assert note is not None
    assert note.links[0].addresses == ("10.9.0.1/8",)
