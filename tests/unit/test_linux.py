"""Processes and freezers of this machine, for real."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook.errors import FreezeError, QuiesceError
from ocihook.linux import cgroup as cgroups
from ocihook.linux.cgroup import Freezer, find_freezer, memory_headroom_bytes, task_headroom
from ocihook.linux.open_files import resolve_inside
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, command_line, has_ended, parent_pid, tracer_pid
from ocihook.stages.quiesce import ask_to_quiesce
from tests.unit.test_ptrace import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(60)


def test_a_process_is_known_by_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    process = Process.find(sleeper.pid)
    assert process is not None
    assert process.is_alive()
    assert not Process(process.pid, process.start_ticks - 1).is_alive()
    assert Process(process.pid, process.start_ticks - 1).open() is None
    assert parent_pid(process.pid) == os.getpid()
    wait_until(lambda: bool(command_line(process.pid)))  # exec is through
    assert command_line(process.pid) == ["sleep", "60"]
    assert tracer_pid(process.pid) == 0
    pidfd = process.open()
    assert pidfd is not None
    assert not has_ended(pidfd)
    sleeper.kill()
    wait_until(lambda: has_ended(pidfd))
    assert not process.is_alive()  # a zombie, which its parent has not looked at yet
    assert not process.send(signal.SIGTERM) or not process.is_alive()
    os.close(pidfd)
    sleeper.wait(60)
    assert Process.find(sleeper.pid) is None
    assert (command_line(sleeper.pid), tracer_pid(sleeper.pid), parent_pid(sleeper.pid)) == ([], None, 0)


def test_names_of_processes_may_be_anything(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1\n(b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        wait_until(lambda: command_line(child.pid)[:1] == [str(program)])
        assert parent_pid(child.pid) == os.getpid()
        assert Process.find(child.pid) is not None
    finally:
        child.kill()
        child.wait(60)


CGROUPS = {1: Path("/sys/fs/cgroup/freezer"), 2: Path("/sys/fs/cgroup/unified")}


def is_removed(cgroup: Path) -> bool:
    """Remove a cgroup if nothing is in it any more."""
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


@pytest.fixture(params=[1, 2])
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    mount = CGROUPS[request.param]
    if request.param == 2 and not mount.exists():
        mount = Path("/sys/fs/cgroup")
    probe = "freezer.state" if request.param == 1 else "cgroup.controllers"
    if os.geteuid() != 0 or not mount.exists() or not (request.param == 1 or (mount / probe).exists()):
        pytest.skip(f"needs root and cgroup v{request.param} at {mount}")
    outer = mount / f"ocihook-test-{os.getpid()}"
    (outer / "inner").mkdir(parents=True)
    yield outer / "inner"
    for directory in (outer / "inner", outer):
        wait_until(lambda directory=directory: is_removed(directory))  # type: ignore[misc]


def test_thaw_and_freeze_again(cgroup: Path) -> None:
    version = 1 if "freezer" in cgroup.parts else 2
    child = subprocess.Popen(["sleep", "60"])
    try:
        (cgroup / "cgroup.procs").write_text(str(child.pid))
        freezer = Freezer(cgroup, version)
        assert not freezer.is_frozen()
        assert find_freezer(child.pid) == freezer
        freezer.freeze(Patience())
        assert freezer.is_frozen()
        assert find_freezer(child.pid) == find_freezer(child.pid, "no-such-cgroup") == freezer
        freezer.freeze(Patience())
        freezer.thaw(Patience())
        assert not freezer.is_frozen()

        Freezer(cgroup.parent, version).freeze(Patience())
        assert freezer.is_frozen()
        with pytest.raises(FreezeError, match=rf"is frozen by its ancestor {cgroup.parent}, which is not ours"):
            freezer.thaw(Patience())
        Freezer(cgroup.parent, version).thaw(Patience())
        assert not freezer.is_frozen()
    finally:
        child.kill()
        child.wait(60)


@pytest.fixture
def nested(cgroup: Path) -> Iterator[tuple[int, Path]]:
    """A process in a cgroup that its container made in its own, which is called inner."""
    directory = cgroup / "nested"
    directory.mkdir()
    child = subprocess.Popen(["sleep", "60"])
    (directory / "cgroup.procs").write_text(str(child.pid))
    yield child.pid, directory
    version = 1 if "freezer" in cgroup.parts else 2
    for thawed in (cgroup.parent, cgroup, directory):
        with contextlib.suppress(FreezeError):
            Freezer(thawed, version).thaw(Patience())
    child.kill()
    child.wait(60)
    wait_until(lambda: is_removed(directory))


def test_a_container_that_is_frozen_above_its_init(cgroup: Path, nested: tuple[int, Path]) -> None:
    """It is thawed and frozen where its engine froze it."""
    pid, directory = nested
    version = 1 if "freezer" in cgroup.parts else 2
    assert find_freezer(pid, "inner") == Freezer(cgroup, version)  # what is not frozen is its container's to freeze
    assert find_freezer(pid) == find_freezer(pid, "other") == Freezer(directory, version)  # nothing better is known
    Freezer(cgroup, version).freeze(Patience())
    freezer = find_freezer(pid, "inner")
    assert freezer == Freezer(cgroup, version)
    freezer.thaw(Patience())
    assert not freezer.is_frozen()
    assert not Freezer(directory, version).is_frozen()
    freezer.freeze(Patience())
    assert Freezer(directory, version).is_frozen()
    freezer.thaw(Patience())
    # One that the engine froze where its init is, as by the init's own path.
    Freezer(directory, version).freeze(Patience())
    assert find_freezer(pid, "inner") == Freezer(directory, version)


def test_a_container_that_is_frozen_with_others(cgroup: Path, nested: tuple[int, Path]) -> None:
    """It is not ours to thaw those."""
    pid, _ = nested
    version = 1 if "freezer" in cgroup.parts else 2
    Freezer(cgroup.parent, version).freeze(Patience())
    freezer = find_freezer(pid, "inner")
    assert freezer == Freezer(cgroup, version)
    assert freezer.is_frozen()
    with pytest.raises(FreezeError, match=rf"is frozen by its ancestor {cgroup.parent}, which is not ours"):
        freezer.thaw(Patience())
    assert freezer.is_frozen()
    Freezer(cgroup.parent, version).thaw(Patience())
    assert not freezer.is_frozen()


def test_how_many_more_tasks_a_process_may_have(sleeper: subprocess.Popen[bytes]) -> None:
    """The tightest limit counts, of its own cgroup and of those above it."""
    pids = Path("/sys/fs/cgroup/pids")
    if os.geteuid() != 0 or not pids.exists():
        pytest.skip(f"needs root and the controller of tasks at {pids}")
    outer = pids / f"ocihook-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    try:
        before = task_headroom(sleeper.pid)
        (inner / "cgroup.procs").write_text(str(sleeper.pid))
        (inner / "pids.max").write_text("9")
        assert task_headroom(sleeper.pid) == 8
        (outer / "pids.max").write_text("3")
        assert task_headroom(sleeper.pid) == 2
        for group in (outer, inner):
            (group / "pids.max").write_text("max")
        assert task_headroom(sleeper.pid) == before
    finally:
        sleeper.kill()
        sleeper.wait(60)
        for group in (inner, outer):
            wait_until(lambda group=group: is_removed(group))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("names", "limits", "stat", "room", "at_most"),
    [
        (
            ("memory.max", "memory.current"),
            ("1000", "990"),
            "inactive_file 5\nactive_file 7\nslab_reclaimable 9",
            15,
            31,
        ),
        (("memory.max", "memory.current"), ("max", "990"), "inactive_file 5", None, None),
        (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("1000", "990"),
            "inactive_file 1\nactive_file 1\ntotal_inactive_file 5\ntotal_active_file 7",
            15,
            22,
        ),
        (("memory.limit_in_bytes", "memory.usage_in_bytes"), (str(1 << 63), "990"), "", None, None),
    ],
)
def test_how_much_more_memory_a_process_may_have(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str],
    limits: tuple[str, str],
    stat: str,
    room: int | None,
    at_most: int | None,
) -> None:
    """In v1 and v2: what can be reclaimed is not in the way."""
    for name, text in zip((*names, "memory.stat"), (*limits, stat), strict=True):
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(cgroups, "_rows", lambda _pid, _controller: [[tmp_path, tmp_path / "none"]])
    assert memory_headroom_bytes(1) == room
    assert memory_headroom_bytes(1, reclaims_all=True) == at_most


def test_a_cgroup_that_is_gone() -> None:
    for version in (1, 2):
        with pytest.raises(FreezeError, match="cannot be"):
            Freezer(Path("/sys/fs/cgroup/no-such-group"), version).freeze(Patience())
        Freezer(Path("/sys/fs/cgroup/no-such-group"), version).thaw(Patience())  # it holds nobody
    assert find_freezer(1 << 22) is None


APPLICATION = """
trap 'touch "$0"' USR1
trap 'exit 0' USR2
echo ready
while :; do sleep 0.01; done
"""


@pytest.fixture
def ack(tmp_path: Path) -> Path:
    return tmp_path / "ack"


@pytest.fixture
def application(ack: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(["sh", "-c", APPLICATION, str(ack)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()


def found(process: subprocess.Popen[str]) -> Process:
    known = Process.find(process.pid)
    assert known is not None
    return known


def test_an_application_quiesces_each_time_it_is_asked(
    application: subprocess.Popen[str], ack: Path, tmp_path: Path
) -> None:
    ask_to_quiesce(found(application), Patience(), signal_name="USR1", ack=str(ack))
    first = ack.stat().st_mtime_ns

    def is_later() -> bool:
        (tmp_path / "clock").touch()
        return (tmp_path / "clock").stat().st_mtime_ns > first

    wait_until(is_later)  # times of files may be the kernel's ticks
    # The file is there already: only touching it anew counts.
    ask_to_quiesce(found(application), Patience(), signal_name="USR1", ack=str(ack))
    assert ack.stat().st_mtime_ns > first


def test_silence_death_and_absence(application: subprocess.Popen[str], ack: Path) -> None:
    process = found(application)
    with pytest.raises(QuiesceError, match=r"did not create or touch /nowhere/ack within 0.2 s of SIGUSR1"):
        ask_to_quiesce(process, Patience(timeout_s=0.2), signal_name="USR1", ack="/nowhere/ack")
    with pytest.raises(QuiesceError, match="ended on SIGUSR2"):
        ask_to_quiesce(process, Patience(), signal_name="USR2", ack="/nowhere/ack")
    application.wait(60)
    with pytest.raises(QuiesceError, match="ended before it could be quiesced"):
        ask_to_quiesce(process, Patience(), signal_name="USR1", ack=str(ack))


def test_links_of_a_container_lead_nowhere(application: subprocess.Popen[str], ack: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(QuiesceError, match="did not create or touch"):
        ask_to_quiesce(found(application), Patience(timeout_s=0.3), signal_name="USR1", ack=f"{tmp_path}/link/ack")


@pytest.mark.parametrize(
    ("path", "place"),
    [("/run/secrets", "{0}/run/secrets"), ("/var/run/secrets", "{0}/run/secrets"), ("/loop/x", "{0}/loop/x")],
)
def test_links_are_followed_inside_a_root(tmp_path: Path, path: str, place: str) -> None:
    (tmp_path / "run/secrets").mkdir(parents=True)
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("../run")
    (tmp_path / "loop").symlink_to("loop")
    assert resolve_inside(os.getpid(), f"{tmp_path}{path}") == place.format(tmp_path)


def test_absolute_links_start_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert resolve_inside(os.getpid(), f"{tmp_path}/link/./self/../1") == resolve_inside(os.getpid(), "/proc/1")
