"""Two dumps of one container at once: the later one is refused, or waits if the container is being stopped."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.checkpoints.belongings import stopping_dir
from ocihook.errors import GivenUp, UnsupportedError
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump
from ocihook.stages.one_at_a_time import OneAtATime

ID, OTHER = "ab" * 32, "cd" * 32
_CODE = "import subprocess as s; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"


@contextlib.contextmanager
def session(path: Path, container: str, *, verb: str = "checkpoint") -> Iterator[tuple[Journal, Process]]:
    """Run what stands for a runtime and its CRIU, with the session's journal, which does not know its container."""
    command = ["runc", f"-c{_CODE}", verb, container]
    environment, program = {**os.environ, "PYTHONHOME": sys.base_prefix}, Path(sys.executable).resolve()
    with subprocess.Popen(command, executable=program, env=environment, stdout=subprocess.PIPE, text=True) as runtime:
        assert runtime.stdout is not None
        criu = Process.find(int(runtime.stdout.readline()))
        assert criu is not None
        try:
            yield Journal.create(path, criu), criu
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(criu.pid, 9)


def dump_of(
    journal: Journal,
    criu: Process,
    path: Path,
    patience: Patience = ENDLESS,
    *,
    stops: bool = False,
) -> Dump:
    images = stopping_dir(path / "store", ID) / "images" if stops else path / "images"
    images.mkdir(parents=True, exist_ok=True)
    journal.identify(ContainerRef(id=ID, runtime="runc"), str(images))
    journal.note(CallFacts(store=(str(path / "store"),)))
    return Dump(journal, patience, criu.pid, criu.pid, str(images), images)


def test_the_later_one_is_refused_and_the_earlier_one_is_not(tmp_path: Path) -> None:
    with session(tmp_path, ID) as first, session(tmp_path, ID) as second:
        OneAtATime().refuse(dump_of(*first, tmp_path))
        with pytest.raises(UnsupportedError, match=rf"under way \(session {first[0].session_id}\).*Try again"):
            OneAtATime().refuse(dump_of(*second, tmp_path))


@pytest.mark.parametrize("what", ["another container", "a restore", "one that has ended"])
def test_others_do_not_count(tmp_path: Path, what: str) -> None:
    container, verb = (
        (OTHER if what == "another container" else ID),
        ("restore" if what == "a restore" else "checkpoint"),
    )
    with session(tmp_path, container, verb=verb) as first, session(tmp_path, ID) as second:
        if what == "one that has ended":
            os.kill(first[1].pid, 9)
            Patience().until(lambda: not first[1].is_alive())
        OneAtATime().refuse(dump_of(*second, tmp_path))


def test_a_stop_waits_for_the_end_of_the_other_one(tmp_path: Path) -> None:
    with session(tmp_path, ID) as first, session(tmp_path, ID) as second:
        dump = dump_of(*second, tmp_path, stops=True)
        waiting = threading.Thread(target=OneAtATime().refuse, args=(dump,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        os.kill(first[1].pid, 9)
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_stop_that_is_given_up_waits_no_longer(tmp_path: Path) -> None:
    with session(tmp_path, ID), session(tmp_path, ID) as second:
        ended = Process(second[1].pid, second[1].start_ticks + 1)
        dump = dump_of(*second, tmp_path, Patience({"CRIU": ended}), stops=True)
        with pytest.raises(GivenUp):
            OneAtATime().refuse(dump)
