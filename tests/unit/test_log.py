"""Records in the journal's own protocol, with the fields that this process adds."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook import log


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(log, "JOURNAL_SOCKET", tmp_path / "socket")
    monkeypatch.setattr(log, "_sources", [])
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "socket"))
        receiver.settimeout(5)
        yield receiver
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level


def test_records_reach_the_journal_with_fields(journal: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    log.set_up_logging(logging.INFO)
    log.add_fields(lambda: {"OCIHOOK_CONTAINER": "abc"})
    logging.getLogger("ocihook.test").error("%s lost", "all")
    packet = journal.recv(4096)
    wanted = b"MESSAGE=all lost\nPRIORITY=3\nSYSLOG_IDENTIFIER=ocihook\nLOGGER=ocihook.test\nOCIHOOK_CONTAINER=abc\n"
    assert packet == wanted
    logging.getLogger("ocihook.test").info("two\nlines")
    assert journal.recv(4096).startswith(b"MESSAGE\n\x09\0\0\0\0\0\0\0two\nlines\nPRIORITY=6\n")
    assert capfd.readouterr().err == ""


def test_without_a_journal_nothing_is_lost(journal: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    log.set_up_logging(logging.INFO)
    journal.close()
    logging.getLogger("ocihook.test").error("still here")
    assert "still here" in capfd.readouterr().err
