"""A program whose tracer is killed, at every point and at any moment, does not notice.

Its threads sit in system calls of several kinds or hold something in every register, have masks of their own, and a
handler of SIGTRAP that must stay and is never called. OCIHOOK_NIGHTLY=1 makes more of the tries.
"""

import contextlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook.linux import ptrace
from ocihook.linux.memory import Span, prefault
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process, tracer_pid
from ocihook.linux.ptrace import CallInstruction, HeldThread, find_call_instruction, held
from ocihook.linux.workers import start_call

SOURCE = Path(__file__).parent.parent / "fakes" / "threads.c"
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
TRIES = 1000 if IS_NIGHTLY else 50
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14
PAGE_BYTES = 4096
LARGE_BYTES = 32 << 20
WAIT_S = 60


class Threads:
    """The program, and what it was at first."""

    def __init__(self, binary: Path, mapped_bytes: int) -> None:
        self.program = subprocess.Popen(
            [str(binary), str(mapped_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.program.pid
        words = self._line()
        values = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        self.scratch = values.pop("scratch")
        self.ids = values
        self.masks = self._masks()
        assert len(set(self.masks.values())) == len(self.ids), "each has a mask of its own"

    def _line(self) -> list[str]:
        assert self.program.stdout is not None
        line = str(self.program.stdout.readline())
        assert line, f"the program has ended: {self.program.wait(WAIT_S)}"
        return line.split()

    def _masks(self) -> dict[str, str]:
        return {name: status(tid)["SigBlk"] for name, tid in self.ids.items()}

    def _rounds(self) -> dict[str, int]:
        """Return how many rounds each thread has made; check that none was disturbed."""
        assert self.program.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.program.stdin.write("\n")
            self.program.stdin.flush()
        words = self._line()
        found = {name: (int(a), int(b)) for name, a, b in zip(words[::3], words[1::3], words[2::3], strict=True)}
        assert found.pop("SIGTRAP") == (0, 0)
        assert {name for name, (_, errors) in found.items() if errors} == set()
        return {name: rounds for name, (rounds, _) in found.items()}

    def check(self) -> None:
        """Wait until every thread has made a whole round from now on, and check that nothing happened to any."""
        deadline = time.monotonic() + WAIT_S
        at_first = now = self._rounds()
        while any(now[name] < at_first[name] + 2 for name in now):
            assert time.monotonic() < deadline, f"not all go on: {at_first}, {now}"
            time.sleep(0.005)
            now = self._rounds()
        assert [tracer_pid(tid) for tid in self.ids.values()] == [0] * len(self.ids)
        assert int(status(self.pid)["SigCgt"], 16) & 1 << signal.SIGTRAP - 1, "its handler of SIGTRAP is gone"
        assert self._masks() == self.masks


def status(tid: int) -> dict[str, str]:
    """Return what /proc/PID/status reports of a thread."""
    lines = Path(f"/proc/{tid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("threads") / "threads"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", path, SOURCE, "-lpthread"], check=True, timeout=60)
    return path


@pytest.fixture(params=[33 << 20])
def threads(binary: Path, request: pytest.FixtureRequest) -> Iterator[Threads]:
    threads = Threads(binary, request.param)
    try:
        threads.check()
        yield threads
    finally:
        threads.program.kill()
        threads.program.communicate()


def make_calls(threads: Threads) -> None:
    """What makes a process drop its memory, in each thread."""
    instruction = find_call_instruction(threads.pid)
    with held(threads.pid, ENDLESS) as all_threads:
        for thread in all_threads:
            thread.make_call("madvise", instruction, threads.scratch, PAGE_BYTES, MADV_DONTNEED)


def drop_in_parts(threads: Threads) -> None:
    """The same in one thread, call after call."""
    instruction = find_call_instruction(threads.pid)
    thread = HeldThread(threads.ids["polls"], ENDLESS)
    try:
        for at in range(threads.scratch, threads.scratch + 4 * PAGE_BYTES, PAGE_BYTES):
            thread.make_call("madvise", instruction, at, PAGE_BYTES, MADV_DONTNEED)
    finally:
        thread.release()


def fill_mapping(threads: Threads) -> None:
    """What a checkpoint does with the driver's mapping, while the driver's thread is the only one that runs."""
    instruction = find_call_instruction(threads.pid)
    process = Process.find(threads.pid)
    assert process is not None
    able = threads.ids["maps"]
    reader, writer = os.pipe()
    with held(threads.pid, ENDLESS, without=able):
        thread = HeldThread(able, ENDLESS)

        def fill(address: int, size_bytes: int) -> None:
            thread.make_call("madvise", instruction, address, size_bytes, MADV_HUGEPAGE)
            prefault(process, Span(address, address + size_bytes), workers=2)
            os.write(writer, b"done")

        with start_call(lambda _: os.read(reader, 4), None) as call:
            try:
                thread.watch_mappings(call.pid, LARGE_BYTES, fill)
            finally:
                thread.stop()
                thread.release()
    os.close(reader)
    os.close(writer)


has_frames = pytest.mark.skipif(os.uname().machine != "x86_64", reason="no frames there")


class Killed:
    """This process is killed before or after its n-th request, wait or write that has to do with the program."""

    def __init__(self, at: int) -> None:
        self._left = at

    def wrap(self, module: object, name: str, applies: Callable[..., bool] = lambda *_: True) -> None:
        function = getattr(module, name)

        def wrapped(*arguments: object) -> object:
            if not applies(*arguments):
                return function(*arguments)
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        setattr(module, name, wrapped)


def run_killed(action: Callable[[Threads], None], threads: Threads, at: int) -> bool:
    """Let a process of its own do something with the program, killed at some point; return whether it came to that."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            killed = Killed(at)
            killed.wrap(ptrace, "_ptrace")
            killed.wrap(ptrace, "write_memory")
            killed.wrap(os, "waitpid", lambda _, options: not options & os.WNOHANG)  # how often it is asked is chance
            action(threads)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "it failed"
    return code != 0


@has_frames
@pytest.mark.parametrize("action", [make_calls, drop_in_parts, fill_mapping])
def test_a_tracer_that_is_killed_at_any_point_is_not_noticed(
    action: Callable[[Threads], None], threads: Threads
) -> None:
    for at in itertools.count(1):
        if not run_killed(action, threads, at):
            break
        threads.check()
    threads.check()
    assert at > 30


@has_frames
@pytest.mark.parametrize("threads", [160 << 20], indirect=True)
def test_a_tracer_that_is_killed_at_any_moment_is_not_noticed(threads: Threads) -> None:
    """The fill is shared by several processes here, which the driver's thread outruns when it continues."""
    seed = random.randrange(1 << 32) if IS_NIGHTLY else 1
    moments = random.Random(seed)
    for _ in range(TRIES):
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    for action in (fill_mapping, make_calls, drop_in_parts):
                        wait_until(lambda: not any(map(is_restarted, threads.ids.values())))
                        action(threads)
            finally:
                os._exit(3)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"it failed, seed {seed}"
        threads.check()


def test_a_tracer_that_lives_is_not_noticed(threads: Threads) -> None:
    for action in (make_calls, drop_in_parts, fill_mapping):
        action(threads)
        threads.check()


@has_frames
def test_code_that_restores_a_thread_is_found(threads: Threads) -> None:
    instruction = find_call_instruction(threads.pid)
    assert instruction.restorer
    with open(f"/proc/{threads.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(instruction.address)
        assert memory.read(3) == b"\x0f\x05\xc3"  # syscall; ret
        memory.seek(instruction.restorer)
        assert memory.read(9).endswith(b"\x0f\0\0\0\x0f\x05") or memory.read(7).endswith(b"\x0f\0\0\0\x0f\x05")


def test_calls_are_made_where_there_is_no_frame(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on aarch64: only a killed tracer shows the difference."""
    instruction = find_call_instruction(threads.pid)
    for one in (CallInstruction(instruction.address, 0), instruction):
        with held(threads.pid, ENDLESS) as all_threads:
            for thread in all_threads:
                assert thread.make_call("madvise", one, threads.scratch, PAGE_BYTES, MADV_DONTNEED) == 0
        threads.check()
        monkeypatch.setattr(ptrace, "write_memory", lambda *_: 0)  # and then: no room on the stack


PAUSE = {"x86_64": "34", "aarch64": "73"}.get(os.uname().machine)  # pause(2), or ppoll(2) which stands for it
RESTART_SYSCALL = "219"  # of x86-64
# Has a handler, and sleeps until a signal comes.
SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
print("ready", flush=True)
while True: signal.pause(); print("interrupted", flush=True)
"""


def test_a_signal_that_comes_during_a_call_ends_what_it_interrupts() -> None:
    """It waits until the call has been made, then the thread's own call ends as if there had been none."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, bufsize=0) as program:
        assert next_line(program) == "ready\n"
        wait_for_pause(program.pid)
        instruction = find_call_instruction(program.pid)
        thread = HeldThread(program.pid, ENDLESS)
        program.send_signal(signal.SIGUSR1)
        thread.make_call("madvise", instruction, 0, 0, MADV_DONTNEED)
        thread.make_call("madvise", instruction, 0, 0, MADV_DONTNEED)
        assert int(status(program.pid)["ShdPnd"], 16) == 1 << signal.SIGUSR1 - 1
        thread.release()
        assert [next_line(program) for _ in range(2)] == ["handled\n", "interrupted\n"]
        program.kill()


def test_a_stop_that_comes_during_a_call_is_not_lost() -> None:
    """SIGSTOP cannot wait: the call is made all the same, and then the process is stopped."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, bufsize=0) as program:
        assert next_line(program) == "ready\n"
        wait_for_pause(program.pid)
        thread = HeldThread(program.pid, ENDLESS)
        program.send_signal(signal.SIGSTOP)
        thread.make_call("madvise", find_call_instruction(program.pid), 0, 0, MADV_DONTNEED)
        thread.release()
        wait_until(lambda: status(program.pid)["State"].startswith("T"))
        program.send_signal(signal.SIGCONT)
        program.send_signal(signal.SIGUSR1)
        assert [next_line(program) for _ in range(2)] == ["handled\n", "interrupted\n"]
        program.kill()


def next_line(program: "subprocess.Popen[bytes]") -> str:
    assert program.stdout is not None
    poll = select.poll()
    poll.register(program.stdout, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "it says nothing"
    return program.stdout.readline().decode()


def wait_for_pause(pid: int) -> None:
    wait_until(lambda: Path(f"/proc/{pid}/syscall").read_text().split()[0] == PAUSE)


def is_restarted(tid: int) -> bool:
    """Return whether a thread waits for the rest of what had been interrupted: the kernel forgets that in a frame."""
    return Path(f"/proc/{tid}/syscall").read_text().split()[0] == RESTART_SYSCALL


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stop_that_meets_a_system_call_comes_all_the_same() -> None:
    """Any stop replaces one that was requested: after the thread is resumed, it must be requested again."""
    code = "import os\nwhile True: os.getppid()"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        try:
            for _ in range(300):
                thread = HeldThread(busy.pid, ENDLESS)
                with start_call(lambda _: None, None) as call:
                    thread.watch_mappings(call.pid, 1 << 30, lambda *_: None)
                    thread.stop()
                    thread.release()
        finally:
            busy.kill()
