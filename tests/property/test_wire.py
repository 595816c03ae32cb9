"""Packets between hook and agent: what goes in comes out, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.wire import PACKET_BYTES, ProtocolError, Request, decode_verdict, encode_verdict

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
PATHS = st.binary(max_size=200).map(lambda raw: raw.replace(b"\0", b"/").decode("utf-8", "surrogateescape"))


@given(TEXT, st.integers(1, 1 << 22), st.integers(0, 1 << 22), PATHS)
def test_requests(stage: str, criu_pid: int, init_pid: int, image_dir: str) -> None:
    decoded = Request.decode(Request(stage, criu_pid, init_pid, image_dir).encode())
    assert (decoded.stage, decoded.criu_pid, decoded.init_pid, decoded.image_dir) == (
        stage,
        criu_pid,
        init_pid,
        image_dir,
    )


@given(st.sampled_from([0, 1]), st.text(max_size=300))
def test_verdicts(status: int, message: str) -> None:
    decoded_status, decoded = decode_verdict(encode_verdict(status, message))
    assert decoded_status == status
    assert decoded == message.encode("utf-8", "replace").decode()


def test_a_long_message_is_cut_to_a_packet() -> None:
    packet = encode_verdict(1, "ü" * PACKET_BYTES)
    assert len(packet) <= PACKET_BYTES
    assert decode_verdict(packet)[0] == 1


@given(st.binary(max_size=200))
def test_anything_else_is_refused(packet: bytes) -> None:
    for decode in (Request.decode, decode_verdict):
        try:
            decode(packet)
        except ProtocolError:
            continue
        assert packet[:2] in (b"1\0", b"0\0")


@pytest.mark.parametrize("packet", [b"1\0pre-dump\0x\0\0/", b"1\0pre-dump\0\xb2\0\0/", b"2\0pre-dump\x001\0\0/"])
def test_malformed_requests(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        Request.decode(packet)
