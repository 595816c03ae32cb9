"""Dumps a program with GPU memory again and again, with agents that die at one step after another.

    dying_session.py DIRECTORY WORKLOAD

It reads from its input, line by line: the number of the step that an agent does not survive (0: none; negative: it is
killed after so many milliseconds), `agent` or `everybody` for who is killed, `again` or `gone` for whether CRIU waits
and asks another agent or has gone, and the step that the first attempt at recovery does not survive (0: none). For each
it prints the steps, and how many there were in that attempt.

Everything is real but the driver and CRIU, which makes nothing of what it finds. Whoever runs this has the stand-in for
libcuda as his own, a mount namespace of his own, and is root.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from integration.steps import Steps, read_steps
from ocihook import wire
from ocihook.agent.session import Session
from ocihook.config import Policy, Settings
from ocihook.container.runtime_call import RuntimeCall
from ocihook.gpu import processes as gpu
from ocihook.gpu.driver import CudaDriver, CudaState, _load_bindings
from ocihook.gpu.participant import Gpu
from ocihook.linux.cgroup import Freezer, _cgroup_mounts
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants, thread_ids, tracer_pid
from ocihook.linux.workers import die_with_parent
from ocihook.memory.standstill import Standstill
from ocihook.model import ContainerRef
from ocihook.session.journal import Journal, open_journals
from ocihook.session.lock import lock_agent
from ocihook.session.participant import CallFacts
from ocihook.stages import dump
from ocihook.stages.recover import recover

DIRECTORY, WORKLOAD = Path(sys.argv[1]), sys.argv[2]
RUNTIME, IMAGES, OUTPUT = DIRECTORY / "run", DIRECTORY / "images", DIRECTORY / "output"
SETTINGS = Settings(history_dir=str(DIRECTORY / "history"), history_kept=1)
CALL = RuntimeCall(runtime="runc", verb="checkpoint", container_id="c" * 64, bundle="", leave_running=True)
PATIENCE_S = 60.0


def identify(journal: Journal, request: wire.Request, call: RuntimeCall, settings: Settings) -> None:
    del call, settings
    journal.identify(ContainerRef(id="c" * 64, runtime="runc"), os.readlink(request.image_dir))
    policy = Policy(preflight="warn")
    journal.note(CallFacts(verb="checkpoint", leave_running=True, policy=policy, workers=2))


setattr(dump, "find_runtime_call", lambda _pid: CALL)  # noqa: B010 - which does not export it
gpu._LARGE_BYTES = 4 << 20  # so that the mapping is watched and filled
dump.identify = identify
setattr(dump, "participants", lambda: [Standstill(), Gpu()])  # noqa: B010


def make_cgroup() -> Freezer:
    """Make a cgroup for the program: whatever it is in now holds others, too."""
    for version, name in ((1, "freezer.state"), (2, "cgroup.freeze")):
        for mount in _cgroup_mounts(version):
            directory = mount / f"ocihook-test-{os.getpid()}"
            with suppress(OSError):
                directory.mkdir()
                if (directory / name).exists():
                    return Freezer(directory, version)
                directory.rmdir()
    raise SystemExit("no cgroup can be made")


class Program:
    """The program with GPU memory, two processes of it."""

    def __init__(self) -> None:
        self.freezer = make_cgroup()
        with OUTPUT.open("wb") as output:
            self._process = subprocess.Popen(
                [WORKLOAD, "4", "children=1"],
                stdout=output,
                start_new_session=True,
                preexec_fn=lambda: self.freezer.enclose(os.getpid()),  # noqa: PLW1509 - there are none
            )
        self.pid = self._process.pid
        wait_for("the program to count", lambda: min(self.counts().values(), default=0) > 1 and len(self.counts()) > 1)
        self._sums = self.checksums()

    @staticmethod
    def _said() -> dict[str, tuple[int, str]]:
        """Return what each process has said last."""
        with OUTPUT.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode()
        found = re.findall(r"^(child \d+ |)count (\d+) checksum (\w+)\n", text, re.MULTILINE)
        return {who: (int(count), checksum) for who, count, checksum in found}

    def counts(self) -> dict[str, int]:
        return {who: count for who, (count, _) in self._said().items()}

    def checksums(self) -> dict[str, str]:
        return {who: checksum for who, (_, checksum) in self._said().items()}

    def assert_goes_on(self) -> None:
        before = self.counts()
        wait_for("the program to go on", lambda: all(self.counts()[who] > before[who] + 1 for who in before))
        assert self.checksums() == self._sums

    def assert_free(self) -> None:
        pids = descendants(self.pid)
        assert len(pids) == 2
        assert {tracer_pid(tid) for pid in pids for tid in thread_ids(pid)} == {0}
        known = gpu.states(CudaDriver(), [p for pid in pids if (p := Process.find(pid))], Patience())
        assert set(known.values()) == {CudaState.RUNNING}
        assert not self.freezer.is_frozen()

    def end(self) -> None:
        with suppress(Exception):
            self.freezer._write("THAWED" if self.freezer.version == 1 else "0")
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        wait_for("the cgroup to be empty", lambda: not (self.freezer.directory / "cgroup.procs").read_text())
        self.freezer.directory.rmdir()


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        time.sleep(0.005)


def in_a_fork(function: Callable[[], object], *, killed_after_s: float = 0, everybody: bool = False) -> None:
    """Let a process with a group of its own do something, and wait for its end; whatever it forks may live on."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            function()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    with suppress(ProcessLookupError):
        os.setpgid(pid, pid)
    if killed_after_s:
        time.sleep(killed_after_s)
        (os.killpg if everybody else os.kill)(pid, signal.SIGKILL)  # it is not waited for yet
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), f"ended with {status}"


def be_agent(criu: subprocess.Popen[bytes], init_pid: int, steps: Callable[[], object]) -> None:
    """Be an agent with one session, which dies with it."""
    logging.basicConfig(level=logging.INFO)
    agent = os.getpid()
    assert lock_agent(RUNTIME) is not None
    steps()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent(agent)
            be_session(criu, init_pid)
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status


def be_session(criu: subprocess.Popen[bytes], init_pid: int) -> None:
    process = Process.find(criu.pid)
    found = open_journals(RUNTIME)
    journal = Journal.load(found[0]) if found else None
    if process is not None:
        session = Session(journal or Journal.create(RUNTIME, process), lambda: SETTINGS)
        status, message = session.handle(wire.Request("pre-dump", criu.pid, init_pid, str(DIRECTORY / "link")))
        assert status == 0, message
        process.send(signal.SIGKILL)
        while process.is_alive():
            time.sleep(0.001)
        session.finish()
    elif journal is not None:
        Session(journal, lambda: SETTINGS).finish()


def recovered() -> bool:
    outcomes = {recovery.outcome for recovery in recover(RUNTIME, settings=SETTINGS)}
    assert outcomes <= {"undone", "served"}, recover(RUNTIME, settings=SETTINGS)
    return "served" not in outcomes and not open_journals(RUNTIME)


def recover_and_die(last: int) -> None:
    Steps(DIRECTORY / "recovery-steps", last=last, everybody=True)
    wait_for("the recovery", recovered)


def attempt(program: Program, last: int, victims: str, criu_then: str, last_of_recovery: int) -> dict[str, Any]:
    for log in DIRECTORY.glob("*steps"):
        log.unlink()
    log = DIRECTORY / "steps"
    criu = subprocess.Popen(["sleep", "infinity"])
    try:
        everybody = victims == "everybody"
        in_a_fork(
            lambda: be_agent(criu, program.pid, lambda: Steps(log, last=max(0, last), everybody=everybody)),
            killed_after_s=max(0, -last) / 1000,
            everybody=everybody,
        )
        steps = read_steps(log)
        wait_for("all its processes to end", lambda: is_free(RUNTIME))
        if criu_then == "again" and criu.poll() is None:
            in_a_fork(lambda: be_agent(criu, program.pid, lambda: None))
    finally:
        criu.kill()
        criu.wait()
    if last_of_recovery:
        in_a_fork(lambda: recover_and_die(last_of_recovery))
        wait_for("all its processes to end", lambda: is_free(RUNTIME))
    in_a_fork(lambda: wait_for("the recovery", recovered))
    in_a_fork(program.assert_free)
    program.assert_goes_on()
    assert str(DIRECTORY) not in Path("/proc/self/mountinfo").read_text()
    assert not list((RUNTIME / "sessions").iterdir())
    assert not list(IMAGES.iterdir())
    return {"steps": steps, "recovery": len(read_steps(DIRECTORY / "recovery-steps"))}


def is_free(runtime_dir: Path) -> bool:
    lock = lock_agent(runtime_dir)
    if lock is not None:
        os.close(lock)
    return lock is not None


def main() -> None:
    IMAGES.mkdir()
    (DIRECTORY / "link").symlink_to(IMAGES)
    _load_bindings()
    program = Program()
    try:
        for line in sys.stdin:
            last, victims, criu_then, last_of_recovery = line.split()
            print(json.dumps(attempt(program, int(last), victims, criu_then, int(last_of_recovery))), flush=True)
    finally:
        program.end()


if __name__ == "__main__":
    main()
