"""Another process's memory: found, read, written, given back by an injected call, with its threads as they were."""

import contextlib
import ctypes
import mmap
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ocihook.errors import TraceError
from ocihook.linux import memory as memory_module
from ocihook.linux.memory import (
    Mapping,
    ProcessMemory,
    Span,
    anonymous_spans,
    common_spans,
    map_present,
    memory_path,
    prefault,
    read_mappings,
    shared_spans,
    subtract,
)
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, has_exited, status_fields, thread_ids, tracer_pid
from ocihook.linux.ptrace import HeldThread, find_call_instruction, held
from ocihook.linux.workers import call_each, start_call
from tests.unit.test_ptrace import wait_until

MADV_DONTNEED = 4
REGION_BYTES = 4 << 20
PAGE_BYTES = 4096
# System calls by their numbers: restart_syscall(2); and read(2), poll(2) and futex(2), or what libc makes of them.
RESTART_SYSCALL, *IN_CALLS = {"x86_64": ("219", "0", "7", "202"), "aarch64": ("128", "63", "73", "98")}[
    os.uname().machine
]

# Holds a region full of 7s, sleeps in every way in several threads, and says what it finds when it is asked.
PROGRAM = """
import ctypes, mmap, os, select, signal, sys, threading, time
region = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
region.write(b"\\7" * len(region))
lock = threading.Lock(); lock.acquire()
signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
def sleeper():
    while True:
        end = time.monotonic() + 1.5; time.sleep(1.5); slept.append(time.monotonic() < end)
def poller():
    select.poll().poll(3_600_000); polled.append(True)
slept, polled = [], []
threads = [threading.Thread(target=t, daemon=True) for t in (sleeper, poller, lock.acquire)]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # any thread that returns to user mode could take it
for t in threads: t.start()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print(hex(ctypes.addressof(ctypes.c_char.from_buffer(region))), flush=True)
for line in sys.stdin:
    before = len(slept)
    while len(slept) == before: time.sleep(0.01)
    print(region[:].count(7), sum(slept) + len(polled), len(signals), flush=True)
"""


class Program:
    def __init__(self) -> None:
        command = [sys.executable, "-c", PROGRAM, str(REGION_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pid = self.process.pid
        self.region = int(self.process.stdout.readline(), 16)

    def ask(self) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.process.kill()
    program.process.communicate()


def test_a_region_is_seen(program: Program) -> None:
    span = Span(program.region, program.region + REGION_BYTES)
    assert subtract([span], anonymous_spans(program.pid)) == []
    assert subtract(anonymous_spans(program.pid), [span]) != anonymous_spans(program.pid)
    assert any(mapping.name == "[stack]" and not mapping.is_anonymous for mapping in read_mappings(program.pid))
    assert read_mappings(1 << 22) == []


def test_memory_is_read_and_written(program: Program) -> None:
    fd = os.open(memory_path(program.pid), os.O_RDWR)
    assert os.pread(fd, 100, program.region) == b"\7" * 100
    assert os.pwritev(fd, [bytes(PAGE_BYTES), bytes(PAGE_BYTES)], program.region + PAGE_BYTES) == 2 * PAGE_BYTES
    os.close(fd)
    assert program.ask()[0] == REGION_BYTES - 2 * PAGE_BYTES


def test_an_injected_call_gives_memory_back_and_disturbs_nothing(program: Program) -> None:
    for call in IN_CALLS:
        wait_until(lambda call=call: any(is_in(call, tid) for tid in thread_ids(program.pid)))  # type: ignore[misc]
    instruction = find_call_instruction(program.pid)
    with held(program.pid, ENDLESS) as threads:
        assert sorted(thread.tid for thread in threads) == thread_ids(program.pid)
        assert len(threads) == 4
        assert tracer_pid(program.pid) == os.getpid()
        program.process.send_signal(signal.SIGUSR1)
        for number, thread in enumerate(threads):  # each in a system call of another kind
            assert thread.make_call(
                "madvise", instruction, program.region + number * PAGE_BYTES, PAGE_BYTES, MADV_DONTNEED
            ) == 0  # fmt: skip
        with pytest.raises(OSError, match="madvise in thread"):
            threads[0].make_call("madvise", instruction, program.region + 1, PAGE_BYTES, MADV_DONTNEED)
    assert tracer_pid(program.pid) == 0
    wait_until(lambda: any(is_in(RESTART_SYSCALL, tid) for tid in thread_ids(program.pid)))  # poll has not begun anew
    left, ended_early, signals = program.ask()
    assert left == REGION_BYTES - 4 * PAGE_BYTES
    assert ended_early == 0
    assert signals == 1


def is_in(call: str, tid: int) -> bool:
    """Return whether a thread waits in a system call."""
    return Path(f"/proc/{tid}/syscall").read_text().split()[0] == call


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, and not by a tracer."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_thread_can_be_left_out(program: Program) -> None:
    other = thread_ids(program.pid)[-1]
    with held(program.pid, ENDLESS, without=other) as threads:
        assert [thread.tid for thread in threads] == [tid for tid in thread_ids(program.pid) if tid != other]
        assert tracer_pid(other) == 0


def test_a_process_whose_first_thread_has_ended() -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: len(thread_ids(process.pid)) == 2 and has_exited(process.pid))
        with held(process.pid, ENDLESS) as threads:
            assert [thread.tid for thread in threads] == thread_ids(process.pid)[1:]
        process.kill()


def test_a_stopped_process_stays_stopped(program: Program) -> None:
    program.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(program.pid))
    with held(program.pid, ENDLESS) as threads:
        threads[0].make_call("madvise", find_call_instruction(program.pid), program.region, PAGE_BYTES, MADV_DONTNEED)
    wait_until(lambda: is_stopped(program.pid))
    program.process.send_signal(signal.SIGCONT)
    assert program.ask()[0] == REGION_BYTES - PAGE_BYTES


@pytest.mark.parametrize("waits", [True, False])
def test_a_process_that_is_killed_meanwhile_is_let_go(program: Program, *, waits: bool) -> None:
    def hold_and_kill(_: object) -> int:
        with held(program.pid, ENDLESS if waits else None) as threads:
            os.kill(program.pid, signal.SIGKILL)
        return len(threads)

    assert call_each(hold_and_kill, [None], Patience(timeout_s=60)) == [4]
    assert program.process.wait(60) == -signal.SIGKILL


def test_what_is_traced_cannot_be_held(program: Program) -> None:
    thread = HeldThread(program.pid, ENDLESS)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with held(program.pid, ENDLESS):
                pass
        except TraceError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert b"cannot be held" in os.read(reader, 1000)
    os.close(reader)
    thread.release()
    with held(program.pid, ENDLESS) as threads:
        assert len(threads) == 4


def test_threads_go_on_when_their_tracer_is_killed(program: Program) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with held(program.pid, ENDLESS):
            os.write(writer, b"held")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    assert tracer_pid(program.pid) == pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for fd in (reader, writer):
        os.close(fd)
    assert program.ask()[0] == REGION_BYTES


def test_a_process_that_is_gone(program: Program) -> None:
    program.process.kill()
    program.process.wait()
    with pytest.raises(TraceError, match="cannot be read"):
        find_call_instruction(program.pid)
    with held(program.pid, ENDLESS) as threads:
        assert threads == []


@pytest.mark.parametrize(
    ("spans", "others", "rest"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(10, 20)], [(0, 10), (20, 30)], [(10, 20)]),
        ([(10, 40)], [(0, 12), (15, 16), (38, 50)], [(12, 15), (16, 38)]),
    ],
)
def test_subtract(spans: list[tuple[int, int]], others: list[tuple[int, int]], rest: list[tuple[int, int]]) -> None:
    assert subtract([Span(*s) for s in spans], [Span(*o) for o in others]) == rest


@pytest.mark.parametrize("seed", range(20))
def test_what_several_processes_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    spaces: dict[int, list[Mapping]] = {}
    for pid in range(chance.randrange(5)):
        edges = sorted(chance.sample(range(40), 2 * chance.randrange(8)))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        spaces[pid] = [Mapping(Span(*span), chance.choice(["rw-p", "r--p", "rw-s"]), 0, "") for span in spans]
        spaces[pid] += [Mapping(Span(50, 51), "rw-p", 0, ""), Mapping(Span(51, 52), "r--p", 0, "")]  # no gap
    monkeypatch.setattr(memory_module, "read_mappings", spaces.__getitem__)
    found = common_spans(spaces)
    times = Counter(
        at
        for rows in spaces.values()
        for row in rows
        if row.mode[3] == "p"
        for at in range(row.span.start, row.span.end)
    )
    assert [at for span in found for at in range(span.start, span.end)] == sorted(a for a, n in times.items() if n > 1)


def test_joined_mappings_are_told_apart() -> None:
    """The kernel joins neighbours: what is new is seen by address all the same."""
    both = mmap.mmap(-1, 2 * REGION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(both))
    new = Span(start + REGION_BYTES, start + 2 * REGION_BYTES)
    with forked_sleeper() as process:  # this process allocates at any time
        before = subtract(anonymous_spans(process.pid), [new])
        assert subtract(anonymous_spans(process.pid), before) == [new]


# Maps 64 MiB filled at once as soon as it is asked to, writes a byte, and says where; then what is there.
MAPPER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
print("ready", flush=True)
sys.stdin.readline()
small = libc.mmap(None, 4096, 3, 0x8022, -1, 0)
large = libc.mmap(None, 64 << 20, 3, 0x8022, -1, 0)  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_POPULATE
ctypes.memset(large, 7, 4096)
print(large, flush=True)
sys.stdin.readline()
"""


def test_a_large_mapping_is_seen_before_anything_is_in_it() -> None:
    command = [sys.executable, "-c", MAPPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        thread = HeldThread(process.pid, ENDLESS)
        instruction = find_call_instruction(process.pid)
        seen: list[tuple[int, int, int]] = []

        def advise(address: int, size_bytes: int) -> None:
            seen.append((address, size_bytes, resident_bytes(process.pid, address)))
            thread.make_call("madvise", instruction, address, size_bytes, 16)  # MADV_DONTDUMP shows as dd

        def tell(pipes: tuple[IO[str], IO[str]]) -> object:
            pipes[0].write("go\n")
            pipes[0].flush()
            return str(pipes[1].readline())

        with start_call(tell, (process.stdin, process.stdout)) as call:
            thread.watch_mappings(call.pid, 32 << 20, advise)
            thread.stop()
            thread.release()
            address = int(call.outcome(ENDLESS))
        assert seen == [(address, 64 << 20, 0)]
        assert 4096 <= resident_bytes(process.pid, address) <= 4 << 20, "it was filled all the same"
        assert " dd " in smaps_entry(process.pid, address)
        process.communicate("end\n")


def test_what_is_told_of_a_mapping_may_fail() -> None:
    """The thread continues as it does without a failure, and can be stopped and released."""
    with subprocess.Popen(
        [sys.executable, "-c", MAPPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        thread = HeldThread(process.pid, ENDLESS)

        def fail(*_: int) -> None:
            raise RuntimeError("no")

        def tell(pipes: tuple[IO[str], IO[str]]) -> object:
            pipes[0].write("go\n")
            pipes[0].flush()
            return str(pipes[1].readline())

        with start_call(tell, (process.stdin, process.stdout)) as call:
            with pytest.raises(RuntimeError, match="no"):
                thread.watch_mappings(call.pid, 32 << 20, fail)
            thread.stop()
            thread.release()
            assert int(call.outcome(ENDLESS)) > 0
        process.communicate("end\n")


def test_prefault_survives_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may choose one of them where memory is short; the driver then fills the mapping itself."""
    memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    test = os.getpid()

    def die(*_: object) -> int:
        assert os.getpid() != test
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with forked_sleeper() as process:
        monkeypatch.setattr(ProcessMemory, "fault_in", die)
        prefault(process, Span(start, start + (256 << 20)), workers=2)
        assert process.is_alive()


@pytest.mark.parametrize("workers", [1, 3])
def test_prefault(workers: int) -> None:
    """A mapping of another process is there before that touches it, all of it and zero."""
    size = (129 << 20) + 3 * 4096  # not a whole number of any unit of work
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with forked_sleeper() as process:
        assert not any(presence(process.pid, start, size))
        span = Span(start + (2 << 20) + 4096, start + size - 4096)
        prefault(process, span, workers=workers)
        assert all(presence(process.pid, span.start, span.size_bytes))
        read = bytearray(size)
        assert ProcessMemory(process).read_into(memoryview(read), start) == size
        assert not any(read)


@pytest.mark.parametrize("workers", [1, 2])
def test_prefault_leaves_what_there_is(workers: int) -> None:
    """Who uses the mapping may have gone on: a process that was killed does not hold it any longer."""
    memory = mmap.mmap(-1, 129 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(0, len(memory), 3 * PAGE_BYTES):
        memory[at : at + PAGE_BYTES] = b"\7" * PAGE_BYTES
    with forked_sleeper() as process:
        prefault(process, Span(start, start + len(memory)), workers=workers)
        assert all(presence(process.pid, start, len(memory)))
        read = bytearray(len(memory))
        assert ProcessMemory(process).read_into(memoryview(read), start) == len(memory)
        assert memory[:] == read


@pytest.mark.parametrize("advice", [mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE])
def test_what_is_shared_since_a_fork_stays_shared_when_it_is_read(advice: int) -> None:
    """Else each of many processes would get a copy of what they have in common, and its limit may have no room."""
    size, step = 8 << 20, 1 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    content = os.urandom(size)
    memory.write(content)
    with forked_sleeper() as process:
        memory[0] ^= (
            1  # the kernel copies that page, or as much as is a huge one: the other process is alone with its own
        )
        before = private_kib(process.pid, start)
        assert before < size >> 10
        common = common_spans([os.getpid(), process.pid])
        assert subtract([Span(start, start + size)], common) == []
        found, reader = bytearray(size), ProcessMemory(process)
        for at in range(0, size, step):
            assert reader.read_shared_into(memoryview(found)[at : at + step], start + at) == step
        reader.close()
        assert found == content
        assert private_kib(process.pid, start) == before


def test_prefault_makes_huge_pages() -> None:
    huge_bytes = 2 << 20
    memory = mmap.mmap(-1, 9 * huge_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(14)  # MADV_HUGEPAGE
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    aligned = -(-start // huge_bytes) * huge_bytes
    with forked_sleeper() as process:
        prefault(process, Span(aligned, aligned + 8 * huge_bytes), workers=1)
        assert all(presence(process.pid, aligned, 8 * huge_bytes))


def test_prefault_of_what_is_not_there_is_nobodys_error() -> None:
    with forked_sleeper() as process:
        prefault(process, Span(4096, 4096 + (256 << 20)), workers=2)
    prefault(process, Span(4096, 8192), workers=1)  # the process has ended, too


@contextlib.contextmanager
def forked_sleeper() -> Iterator[Process]:
    """Fork a process that has this one's memory and does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        process = Process.find(pid)
        assert process is not None
        yield process
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def presence(pid: int, address: int, size_bytes: int) -> list[bool]:
    """Return of each page whether it is in memory, as /proc/PID/pagemap reports it."""
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
        file.seek(address // 4096 * 8)
        entries = file.read(size_bytes // 4096 * 8)
    return [bool(entry >> 63) for (entry,) in struct.iter_unpack("<Q", entries)]


def private_kib(pid: int, address: int) -> int:
    """Return how much of the mapping that has an address no other process has."""
    return sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB$", smaps_entry(pid, address), re.MULTILINE)))


def smaps_entry(pid: int, address: int) -> str:
    """Return what the kernel reports of the mapping that has an address."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    for entry in filter(None, entries):
        start, end = (int(word, 16) for word in entry.split()[0].split("-"))
        if start <= address < end:
            return str(entry)
    raise AssertionError(f"nothing is mapped at {address:#x}")


def resident_bytes(pid: int, address: int) -> int:
    """Return how much of a mapping is in memory."""
    found = re.search(r"^Rss: +(\d+) kB$", smaps_entry(pid, address), re.MULTILINE)
    assert found
    return int(found[1]) << 10


SHARED = """
import ctypes, mmap, sys
region = mmap.mmap(-1, 64 << 20)
region[: 32 << 20] = b"x" * (32 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(region))
assert ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(64 << 20), mmap.MADV_DONTNEED) == 0
print(address, flush=True)
sys.stdin.read()
"""


def test_shared_memory_is_mapped_again_and_holes_are_not_filled() -> None:
    """As pinned memory is after a restore: in the file, and in no page table."""
    with subprocess.Popen([sys.executable, "-c", SHARED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        start = int(popen.stdout.readline())
        process = Process.find(popen.pid)
        assert process is not None

        def resident_kib() -> int:
            return int(status_fields(popen.pid)["RssShmem"].split()[0])

        before = resident_kib()
        (span,) = (one for one in shared_spans(popen.pid) if one.start == start)
        assert span.size_bytes == 32 << 20
        map_present(process, span, workers=2)
        assert 31 << 10 < resident_kib() - before <= 32 << 10  # the kernel counts in batches of a processor
        popen.kill()
