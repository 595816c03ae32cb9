"""Records in the journal's own protocol, with the fields that this process adds."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook import log


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, whose handlers are put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def journal(root: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(log, "JOURNAL_SOCKET", tmp_path / "socket")
    monkeypatch.setattr(log, "_sources", [])
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "socket"))
        receiver.settimeout(60)
        yield receiver


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


def test_what_is_put_aside_by_one_is_left_by_all(
    root: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "FILE_BYTES", 10_000)
    file = tmp_path / "agent.log"
    handlers = []
    for _ in range(2):  # as in two processes
        log.set_up_logging(logging.INFO, file)
        handlers.append(root.handlers.pop())
    for count in range(1001):
        root.handlers[:] = [handlers[count % 2]]
        root.info("record %d", count)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.log", "agent.log.1"]
    old, new = (tmp_path / "agent.log.1").read_text(), file.read_text()
    assert 10_000 <= len(old) < 10_100
    assert len(new) < 10_100
    counts = [int(line.rpartition(" ")[2]) for line in (old + new).splitlines()]
    assert counts == list(range(1001 - len(counts), 1001)), "the last ones, without a gap"
    for handler in handlers:
        handler.close()


def test_a_file_that_many_processes_fill_at_once_stays_small(
    root: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "FILE_BYTES", 20_000)
    log.set_up_logging(logging.INFO, tmp_path / "agent.log")
    logging.getLogger("ocihook.test").info("the file is open before others are forked")
    pids = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            try:
                for count in range(1000):
                    logging.getLogger("ocihook.test").info("%0100d", count)
            finally:
                os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 3
    assert {path.name for path in tmp_path.iterdir()} <= {"agent.log", "agent.log.1"}
    assert len((tmp_path / "agent.log.1").read_text()) >= 20_000, "one that is hardly begun is never put aside"
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 30_000


@pytest.mark.usefixtures("root")
def test_errors_of_the_system_are_in_words(tmp_path: Path) -> None:
    log.set_up_logging(logging.INFO, tmp_path / "log")
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/no/where")
    logging.getLogger("test").warning("session %d: %s", 7, error)
    assert (tmp_path / "log").read_text().endswith("session 7: /no/where: No such file or directory\n")
