"""A member of a gang that ends: what its node reports, and which signal stops it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ocihook import wire
from ocihook.config import Settings
from ocihook.container.identity import grace_of
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.runtime import containers, member_end, stop
from ocihook.runtime.call import Call
from ocihook.runtime.stop_record import SIGNALLED, Stop, has_effect, write_stop
from ocihook.session.journal import Journal
from tests.unit.test_gang import LIMIT_S, Serving, stopped

ID = "container b"


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """A node with a member of a gang that is deleted, and its coordinator."""
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))
    program = tmp_path / "runc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    notes = {"ocihook.io/gang": "job", "ocihook.io/gang-size": "2", "ocihook.io/gang-index": "1"}
    (bundle / "config.json").write_text(json.dumps({"annotations": notes}))
    container = ContainerRef(id=ID, engine="podman", runtime="runc", name="b")
    containers.keep(containers.Kept(container=container, bundle=bundle, program=program, prefix=(), domain="_node"))
    serving = Serving(tmp_path)
    monkeypatch.setattr(member_end, "load_settings", Settings)
    monkeypatch.setattr("ocihook.gang.link.Link.of", lambda _: serving.link)
    return serving


def delete(tmp_path: Path) -> None:
    call = Call.parse(tmp_path / "runc", ["delete", ID])
    assert stop.delete(call, lambda _: (0, "")) == 0


def why(serving: Serving, tmp_path: Path) -> str:
    """Delete the container while another member is at a dump; return why that is over."""
    member = stopped(serving, Journal.create(tmp_path / "node", Process(1000, 0)), "0")
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(member.meet, "arrived")
        delete(tmp_path)
        return str(meeting.exception(LIMIT_S))


def test_a_member_that_has_crashed_is_reported(serving: Serving, tmp_path: Path) -> None:
    assert "1 has ended without a checkpoint: its exit code is not known" in why(serving, tmp_path)


def test_a_member_that_was_stopped_is_reported(serving: Serving, tmp_path: Path) -> None:
    write_stop(ID, Stop(words=("kill", ID, "TERM"), outcome=SIGNALLED))
    assert "1 has ended without a checkpoint: it was stopped" in why(serving, tmp_path)


def test_a_coordinator_that_is_away_keeps_nobody_from_deletion(serving: Serving, tmp_path: Path) -> None:
    serving.link = serving.link._replace(socket=str(tmp_path / "nothing"))
    delete(tmp_path)
    assert containers.read(ID) is None


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that treats signals in each way."""
    code = (
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: None);"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]);"
        "print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("name", "is_heeded"),
    [("TERM", False), ("15", False), ("USR1", True), ("HUP", True), ("INT", True), (str(signal.SIGUSR1.value), True)],
)
def test_which_signals_have_an_effect(process: "subprocess.Popen[bytes]", name: str, is_heeded: bool) -> None:  # noqa: FBT001 - a parameter
    assert has_effect(process.pid, name) == is_heeded


@pytest.mark.parametrize(("text", "grace_s"), [("30", 30.0), ("0", 0.0), ("", 0.0), ("-1", 0.0), ("1e9", 0.0)])
def test_the_grace_period_of_a_pod(text: str, grace_s: float) -> None:
    assert grace_of({"io.kubernetes.pod.terminationGracePeriod": text}) == grace_s
    assert grace_of({}) == 0
