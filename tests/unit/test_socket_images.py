"""Sockets in CRIU's images: read within bounds, written at other addresses, all else byte for byte the same."""

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocihook.criu.proto import message_class
from ocihook.criu.socket_images import Ends, FilesImage, Stream, move_files, read_stream
from ocihook.errors import ImageError
from tests.fakes.sockets import files_image, framed, make_socket, raw, read

FOUR = make_socket(1, "10.0.0.1", "10.0.0.2", device="eth0")
SIX = make_socket(2, "fd00::1", "fd00::2", is_six_only=True)
MAPPED = make_socket(3, "10.0.0.1", "10.0.0.2", mapped=True)
LISTENER = make_socket(4, "10.0.0.1")
ALL = [FOUR, SIX, MAPPED, LISTENER]


def test_what_is_written_is_read() -> None:
    found = read(ALL).sockets
    assert found == ALL
    assert [str(sock) for sock in found] == [
        "TCP 10.0.0.1:5001 -> 10.0.0.2:80 ESTABLISHED on eth0",
        "TCP [fd00::1]:5002 -> [fd00::2]:80 ESTABLISHED",
        "TCP 10.0.0.1:5003 -> 10.0.0.2:80 ESTABLISHED",
        "TCP 10.0.0.1:5004 LISTEN",
    ]
    assert [sock.is_connection for sock in found] == [True, True, True, False]


def test_moved_and_back_is_the_same_image() -> None:
    image = read(ALL)
    there = {2: Ends(raw("fd00::3"), raw("fd00::4")), 1: Ends(raw("10.9.0.1"), FOUR.ends.remote)}
    moved = FilesImage(image.moved(there))
    assert [sock.ends for sock in moved.sockets] == [there[1], there[2], MAPPED.ends, LISTENER.ends]
    assert moved.sockets[0]._replace(ends=FOUR.ends) == FOUR
    assert moved.moved({1: FOUR.ends, 2: SIX.ends}) == files_image(ALL)
    assert image.moved({}) == files_image(ALL)


def test_a_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "files.img"
    path.write_bytes(files_image(ALL))
    path.chmod(0o640)
    image = FilesImage.read(tmp_path)
    move_files(tmp_path, image, {1: Ends(raw("10.9.0.1"), raw("10.9.0.2"))})
    assert str(FilesImage.read(tmp_path).sockets[0].local) == "10.9.0.1"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["files.img"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ends": Ends(raw("fd00::1"), raw("10.0.0.2"))},  # four words for IPv4
        {"ends": Ends(b"", raw("10.0.0.2"))},
        {"ends": Ends(raw("10.0.0.1"), raw("10.0.0.2") * 1000)},
        {"family": 1},
        {"family": 1 << 20},
        {"local_port": 1 << 16},
        {"remote_port": (1 << 32) - 1},
        {"protocol": 1 << 16},
        {"state": 13},
        {"device": "a-name-of-16-chr"},
        {"device": "\033[2J"},
    ],
)
def test_what_no_criu_says(changes: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match=r"files\.img is damaged at byte"):
        read([FOUR._replace(**changes)])


def test_two_of_one_id() -> None:
    with pytest.raises(ImageError, match="two sockets with the id 1"):
        read([FOUR, SIX._replace(id=1)])


def test_every_truncation_is_told() -> None:
    whole = files_image(ALL)
    for size in range(len(whole)):
        try:
            cut = FilesImage(whole[:size])
        except ImageError:
            continue
        assert cut.sockets == ALL[: len(cut.sockets)]  # cut between two entries


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(files_image(ALL)) - 1), st.integers(0, 255))
def test_any_edited_byte_is_an_image_error_or_read_within_bounds(at: int, value: int) -> None:
    edited = bytearray(files_image(ALL))
    edited[at] = value
    try:
        image = FilesImage(bytes(edited))
    except ImageError:
        return
    assert all(len(end) in (4, 16) for sock in image.sockets for end in sock.ends)
    assert FilesImage(image.moved({sock.id: sock.ends for sock in image.sockets})).sockets == image.sockets


def test_what_a_connection_has_sent(tmp_path: Path) -> None:
    numbers = {
        "inq_len": 1,
        "inq_seq": 5,
        "outq_len": 10,
        "outq_seq": 4,
        "opt_mask": 0,
        "snd_wscale": 0,
        "mss_clamp": 1,
    }
    message = framed(message_class("tcp_stream_entry")(**numbers).SerializeToString())
    path = tmp_path / f"tcp-stream-{FOUR.inode:x}.img"
    magics = struct.pack("<II", 0x54564319, 0x51465506)
    assert read_stream(tmp_path, FOUR) is None
    path.write_bytes(magics + message + b"queues" * 2000)
    assert read_stream(tmp_path, FOUR) == Stream((1 << 32) - 6, queued_bytes=10, next_sent=4, next_received=5)
    for damaged in (b"", magics, magics + message[:-1], b"x" * 30, magics + b"\xff\xff\xff\xff"):
        path.write_bytes(damaged)
        with pytest.raises(ImageError):
            read_stream(tmp_path, FOUR)
