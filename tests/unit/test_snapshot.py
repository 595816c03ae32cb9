"""A snapshot is of one instant, whatever its process does meanwhile; and no end of anybody leaves a trace in a process.

The process keeps a sum over all its pages while it changes them (tests/fakes/versions.c). Needs root.
"""

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ocihook.errors import SnapshotLost
from ocihook.images.merging import MERGED_PREFIX, MOST_MERGERS, READ_PREFIX
from ocihook.linux import cgroup, forked, memory, ptrace
from ocihook.linux.hold import Hold
from ocihook.linux.memory import ProcessMemory, Span
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Child, Process, children, descendants, tracer_pid
from ocihook.memory import snapshot
from ocihook.memory.clean_pages import MOST_WORKERS
from ocihook.memory.snapshot import Area, Copied, Snapshotted, lacking
from ocihook.packs.pack import PAGE_BYTES, PackFile
from ocihook.packs.packed_manifest import PACK_NAME, PackedRegion
from ocihook.packs.unpacking import Packs
from ocihook.session.journal import Journal
from ocihook.session.undo import undo_all
from tests.fakes.images import read_pages

SOURCE = Path(__file__).parent.parent / "fakes" / "versions.c"
WAIT_S = 60
PLAIN_MIB = 24
PREFIX = "ocihook-region-"


class Versions:
    """The process."""

    def __init__(self, binary: Path, *, pages: str = "4k", mib: int = PLAIN_MIB, around: Sequence[str] = ()) -> None:
        command = [*around, str(binary), str(mib), pages]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        ready, self.port, *numbers = self._line().split()
        assert ready == "ready"
        places = list(map(int, numbers))
        self.spans = [Span(start, start + size) for start, size in zip(places[::2], places[1::2], strict=True)]
        process = Process.find(descendants(self.popen.pid)[-1])
        assert process is not None
        self.process = process
        self.files = self._files()

    def _line(self) -> str:
        assert self.popen.stdout is not None
        assert select.select([self.popen.stdout], [], [], WAIT_S)[0], "it says nothing"
        return self.popen.stdout.readline().decode().strip()

    def _files(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.process.pid}/fd"))

    def do(self, command: str) -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(command.encode() + b"\n")
        return self._line()

    @property
    def total(self) -> int:
        view = memoryview(bytearray(8))
        assert ProcessMemory(self.process).read_into(view, self.spans[0].start + 16) == 8
        return int.from_bytes(view, "little")

    @property
    def area(self) -> Area:
        return Area(self.process, tuple(sorted(self.spans)))

    def check(self) -> None:
        """Check that it is as it was but for its versions, and that nothing of a snapshot is left."""
        before = self.total
        wait_for(lambda: self.total > before)
        assert self.do("check").startswith("ok ")
        assert children(self.process.pid) == []
        assert {tracer_pid(int(tid)) for tid in os.listdir(f"/proc/{self.process.pid}/task")} == {0}
        assert self._files() == self.files

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("versions") / "versions"
    path.parent.chmod(0o755)
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", path, SOURCE, "-lpthread"], check=True, timeout=60
    )
    return path


@pytest.fixture
def start(binary: Path) -> Iterator[Callable[..., Versions]]:
    with contextlib.ExitStack() as stack:

        def run(**options: object) -> Versions:
            versions = Versions(binary, **options)  # type: ignore[arg-type]
            stack.callback(versions.end)
            return versions

        yield run


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    me = Process.find(os.getpid())
    assert me is not None
    return Journal.create(tmp_path / "run", me)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextlib.contextmanager
def still(*processes: Versions) -> Iterator[Hold]:
    hold = Hold()
    try:
        for one in processes:
            hold.add({one.process: 0}, None)
        yield hold
    finally:
        hold.release()


def take(journal: Journal, directory: Path, *processes: Versions, during: Callable[[int], None] = lambda _: None,
         may_fork: bool = True, workers: int = 2) -> Copied:  # fmt: skip
    directory.mkdir(exist_ok=True)
    taken = snapshot.take(
        [one.area for one in processes], directory, journal=journal, still=still(*processes), prefix=PREFIX,
        workers=workers, durable=False, may_fork=may_fork, progress=during,
    )  # fmt: skip
    return taken.read(during)


def content(copied: Copied, directory: Path, number: int, one: Versions) -> dict[Span, bytes]:
    """Return what a copy has of each mapping."""
    region = PackedRegion("1", 0, sum(span.size_bytes for span in one.spans), copied.rows[number])
    packs = Packs([region], copied.packs, {info.name: PackFile(directory / info.name) for info in copied.packs})
    try:
        data = b"".join(read_pages(packs, region.name))
    finally:
        packs.close()
    found, at = {}, 0
    for span in one.area.spans:
        found[span] = data[at : at + span.size_bytes]
        at += span.size_bytes
    return found


def check_copy(copied: Copied, directory: Path, *processes: Versions) -> int:
    """Check that a copy is of one instant; return the total in it, of the first process."""
    totals = []
    for number, one in enumerate(processes):
        mappings = content(copied, directory, number, one)
        pages = [
            memoryview(mappings[span])[at : at + PAGE_BYTES].cast("Q")
            for span in one.spans
            for at in range(0, span.size_bytes, PAGE_BYTES)
        ]
        assert [page[0] for page in pages] == list(range(len(pages)))
        total = pages[0][2]
        assert sum(page[1] for page in pages[1:]) in (total, total + 1)
        assert len({page[3] for page in pages}) == len(pages)
        totals.append(total)
    return totals[0]


class Meanwhile:
    """Does something once, when a part of a snapshot has been read, and its process goes on."""

    def __init__(self, one: Versions, act: Callable[[], object]) -> None:
        self._one, self._act = one, act
        self.was_done = False

    def __call__(self, _size_bytes: int) -> None:
        if not self.was_done and tracer_pid(self._one.process.pid) == 0:
            self.was_done = True
            self._act()


@pytest.mark.parametrize("around", [(), ("unshare", "-pf", "--kill-child")], ids=["", "namespace"])
@pytest.mark.parametrize("pages", ["4k", "huge"])
def test_a_snapshot_is_of_one_instant(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, pages: str, around: tuple[str, ...]
) -> None:
    one = start(pages=pages, mib=48, around=around)
    one.check()
    seen: list[int] = []
    resident: list[int] = []

    def during(_size_bytes: int) -> None:
        if tracer_pid(one.process.pid) != 0:
            return  # what forks do not have is read first
        effect = journal.find(Snapshotted)
        assert effect is not None
        (fork,) = effect.forks
        if not seen:
            first = one.total
            wait_for(lambda: one.total > first + 1000)
            assert os.listdir(f"/proc/{fork.pid}/fd") == []
            assert Path(f"/proc/{fork.pid}/oom_score_adj").read_text() == "1000\n"
        seen.append(one.total)
        resident.append(int(Path(f"/proc/{fork.pid}/statm").read_text().split()[1]) * PAGE_BYTES)

    copied = take(journal, tmp_path / "packs", one, during=during)
    assert copied.was_forked
    assert check_copy(copied, tmp_path / "packs", one) < seen[-1] - 1000
    assert resident[-1] < resident[0] - (16 << 20), "it drops what has been read"
    assert journal.effects == []
    one.check()
    again = take(journal, tmp_path / "again", one)
    assert check_copy(again, tmp_path / "again", one) >= seen[-1]
    one.check()


def test_nothing_below_a_stack_is_changed_in_a_process_or_its_fork(start: Callable[..., Versions]) -> None:
    """It may be memory of others: a stack of Go's is a part of its heap."""
    one = start()
    with still(one) as hold:
        hold.settle(ENDLESS)
        thread = hold.threads[one.process][0]
        stack = int(Path(f"/proc/{thread.tid}/syscall").read_text().split()[-2], 16)

        def below(process: Process) -> bytes:
            view = memoryview(bytearray(32 << 10))
            assert ProcessMemory(process).read_into(view, stack - len(view)) == len(view)
            return bytes(view)

        earlier = below(one.process)
        made = forked.fork(one.process, hold.threads[one.process], ptrace.find_call_instruction(one.process.pid))
        assert below(one.process) == earlier
        assert below(made.process) == earlier
    forked.end(made.process)
    forked.reap(made.process, [one.process])
    one.check()


def test_a_filter_that_knows_none_of_the_calls_does_not_matter(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    one = start()
    assert one.do("filter") == "done"
    copied = take(journal, tmp_path / "packs", one)
    assert copied.was_forked
    check_copy(copied, tmp_path / "packs", one)
    one.check()


def test_processes_are_copied_at_one_instant_or_while_all_stand_still(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    """Whatever keeps one of them from being forked: no more processes, or a PID namespace that one would open."""
    free, other = start(), start(mib=4)
    copied = take(journal, tmp_path / "forked", free, other)
    assert copied.was_forked
    check_copy(copied, tmp_path / "forked", free, other)
    for number, why in enumerate(("", "limit", "unshare")):
        hindered = start(mib=4)
        if why:
            assert hindered.do(why) == "done"
        where = tmp_path / f"held-{number}"
        totals: list[int] = []
        during = partial(lambda totals, _size_bytes: totals.append(free.total), totals)
        copied = take(journal, where, free, hindered, during=during, may_fork=bool(why))
        assert not copied.was_forked
        assert len(set(totals)) == 1, "it stands still"
        assert check_copy(copied, where, free, hindered) == totals[0]
        assert journal.effects == []
        free.check()
        hindered.check()
        hindered.end()


def is_free(port: int) -> bool:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", port))
            again.listen()
        except OSError:
            return False
    return True


@pytest.mark.parametrize("command", ["exit", "exec", "map", "fork"])
def test_a_process_may_do_anything_while_its_snapshot_is_read(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, command: str
) -> None:
    one = start()

    def act() -> None:
        if command == "exit":
            assert one.popen.stdin is not None
            one.popen.stdin.write(b"exit\n")
            wait_for(lambda: not one.process.is_alive())
        else:
            assert one.do(command) == "done"
        if command in ("exit", "exec"):
            wait_for(lambda: is_free(int(one.port)))  # a snapshot keeps none

    meanwhile = Meanwhile(one, act)
    copied = take(journal, tmp_path / "packs", one, during=meanwhile, workers=1)
    assert meanwhile.was_done
    assert copied.was_forked
    check_copy(copied, tmp_path / "packs", one)
    assert journal.effects == []
    if command != "exit":
        assert children(one.process.pid) == []
        assert one.process.is_alive()


def test_a_snapshot_that_is_killed_is_lost_and_nothing_else(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    one = start()

    def kill() -> None:
        effect = journal.find(Snapshotted)
        assert effect is not None
        assert effect.forks[0].send(signal.SIGKILL)
        wait_for(lambda: not effect.forks[0].is_alive())

    with pytest.raises(SnapshotLost, match=str(one.process.pid)):
        take(journal, tmp_path / "packs", one, during=Meanwhile(one, kill), workers=1)
    assert journal.effects == []
    one.check()


def test_a_fork_whose_memory_ends_before_itself_is_lost(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes a process's memory first, and then counts it as ended."""
    one = start()

    def end(pages: snapshot._Pages, view: memoryview, offset: int) -> int:
        if pages._notes < 0:
            return read_into(pages, view, offset)
        effect = journal.find(Snapshotted)
        assert effect is not None
        threading.Timer(0.2, effect.give_up).start()
        return 0

    read_into = snapshot._Pages.read_into
    monkeypatch.setattr(snapshot._Pages, "read_into", end)
    with pytest.raises(SnapshotLost, match=str(one.process.pid)):
        take(journal, tmp_path / "packs", one, workers=1)
    assert journal.effects == []
    one.check()


def run_killed(journal: Journal, arm: Callable[[], object], work: Callable[[], object]) -> bool:
    """Let a process of its own do something that may kill it; undo what it did; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            arm()
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), "it failed"
    undo_all(Journal.load(journal.path), ENDLESS)
    return code != 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="what a killed tracer leaves there is not undone")
def test_an_agent_that_is_killed_at_any_point_leaves_nothing(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    """At each request to the kernel that makes or ends a fork: also before that is set to end with its tracer."""
    one = start(mib=1)
    (tmp_path / "packs").mkdir()

    def arm(at: int) -> None:
        left = itertools.count(at, -1)
        depth = 0

        def counting(function: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*arguments: object, **options: object) -> object:
                nonlocal depth
                depth += 1
                try:
                    return function(*arguments, **options)
                finally:
                    depth -= 1

            return wrapped

        def killing(function: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*arguments: object, **options: object) -> object:
                if depth and next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return wrapped

        for module, name in ((ptrace, "_ptrace"), (forked, "_find_child"), (forked, "_has_ended")):
            setattr(module, name, killing(getattr(module, name)))
        for name in ("_fork_all", "_finish"):
            setattr(snapshot, name, counting(getattr(snapshot, name)))

    for at in itertools.count():
        for pack in (tmp_path / "packs").iterdir():
            pack.unlink()
        if not run_killed(journal, partial(arm, at), lambda: take(journal, tmp_path / "packs", one, workers=1)):
            break
        one.check()
    assert at > 30
    one.check()


def test_an_agent_that_is_killed_while_it_reads_leaves_nothing(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    one = start()
    kill = Meanwhile(one, lambda: os.kill(os.getpid(), signal.SIGKILL))  # while workers read
    work = partial(take, journal, tmp_path / "packs", one, during=kill)
    assert run_killed(journal, lambda: None, work)
    one.check()


class AlwaysFrozen:
    def is_frozen(self) -> bool:
        return True


def test_a_frozen_process_waits_for_its_fork_once_it_runs(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    with monkeypatch.context() as patched:
        patched.setattr(forked, "find_freezer", lambda _pid: AlwaysFrozen())
        copied = take(journal, tmp_path / "packs", one)
    check_copy(copied, tmp_path / "packs", one)
    (fork,) = children(one.process.pid)
    assert isinstance(journal.effects[0], Snapshotted)
    assert [process.pid for process in journal.effects[0].forks] == [fork]
    undo_all(Journal.load(journal.path), ENDLESS)
    one.check()


def test_a_stopped_process_stays_stopped(start: Callable[..., Versions], journal: Journal, tmp_path: Path) -> None:
    one = start()
    one.popen.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(one.process))
    copied = take(journal, tmp_path / "packs", one)
    assert copied.was_forked
    assert check_copy(copied, tmp_path / "packs", one) == one.total
    wait_for(lambda: is_stopped(one.process))
    assert children(one.process.pid) == []
    one.popen.send_signal(signal.SIGCONT)
    one.check()


def is_stopped(process: Process) -> bool:
    return " T " in Path(f"/proc/{process.pid}/stat").read_text()


def test_a_child_of_its_own_is_not_taken_for_a_fork(
    start: Callable[..., Versions], journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_UNRECORDED_END_S", 0.1)
    one = start()
    effect = Snapshotted(processes=[one.process], since_ticks=forked.clock_ticks() - 1)
    child = Process.find(int(one.do("child")))
    assert child is not None
    assert forked.find_forks(one.process, effect.since_ticks) == [child]
    effect.undo(journal, ENDLESS)
    assert child.is_alive()
    child.send(signal.SIGKILL)


def test_a_fork_that_is_gone_costs_its_parent_no_other_child(start: Callable[..., Versions]) -> None:
    """A wait for pid 0 would be one for any child: of those the application is told itself."""
    one = start()
    child, gone = (Process.find(int(one.do("child"))) for _ in range(2))
    assert child is not None
    assert gone is not None
    child.send(signal.SIGKILL)
    forked.end(gone)
    forked.reap(gone, [one.process])
    forked._wait_for(one.process, gone)  # as if somebody had waited for it since it was seen
    wait_for(lambda: has_ended(child))
    assert children(one.process.pid) == [child.pid]
    forked.reap(child, [one.process])
    one.check()


def has_ended(process: Process) -> bool:
    found = Child.find(process.pid)
    return found is not None and found.has_ended


def test_one_thread_that_can_stop_waits_for_a_fork(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on: one that waits for a disk holds up nothing."""
    one, taken = start(), []

    class Noted(ptrace.HeldThread):
        def __init__(self, tid: int, *arguments: Any, **options: Any) -> None:
            taken.append(tid)
            super().__init__(tid, *arguments, **options)

    monkeypatch.setattr(forked, "HeldThread", Noted)
    monkeypatch.setattr(forked, "can_be_interrupted", lambda tid: tid != one.process.pid)
    copied = take(journal, tmp_path / "packs", one)
    assert copied.was_forked
    assert len(taken) == 1
    assert one.process.pid not in taken
    one.check()


def test_a_process_of_another_machine_is_read_while_it_stands_still(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a 32-bit one, of which the kernel gives fewer registers."""
    one, real = start(), ptrace.HeldThread._register_set

    def short(thread: ptrace.HeldThread, kind: int, most_bytes: int) -> bytes:
        return real(thread, kind, most_bytes)[:68]

    with monkeypatch.context() as patched:
        patched.setattr(ptrace.HeldThread, "_register_set", short)
        copied = take(journal, tmp_path / "packs", one)
    assert not copied.was_forked
    assert check_copy(copied, tmp_path / "packs", one) <= one.total
    undo_all(journal, ENDLESS)
    one.check()


def test_reading_keeps_no_descriptors(start: Callable[..., Versions], journal: Journal, tmp_path: Path) -> None:
    one = start()
    before = os.listdir("/proc/self/fd")
    for name in ("forked", "held"):
        take(journal, tmp_path / name, one, workers=1, may_fork=name == "forked")
        assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("limits", "is_enough"),
    [
        ({}, True),
        ({"available_bytes": 9 << 30}, False),
        ({"memory_headroom_bytes": 11 << 30}, True),
        ({"memory_headroom_bytes": 9 << 30}, False),
        ({"commit_headroom_bytes": 111 << 30}, True),
        ({"commit_headroom_bytes": 109 << 30}, False),
        ({"task_headroom": 2}, True),
        ({"task_headroom": 1}, False),
    ],
)
def test_there_must_be_room_for_what_is_written_meanwhile(
    limits: dict[str, int], *, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for the forks, of one process here."""
    found = {
        "available_bytes": 11 << 30,
        "memory_headroom_bytes": None,
        "commit_headroom_bytes": None,
        "task_headroom": None,
    }
    for name, value in (found | limits).items():
        monkeypatch.setattr(snapshot, name, lambda *_, value=value: value)
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert (lacking(child.pid, 100 << 30, 0.1) == "") is is_enough
    finally:
        child.kill()
        child.wait()


def test_limits_of_processes_and_of_what_they_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "pod/container"
    inner.mkdir(parents=True)
    monkeypatch.setattr(cgroup, "_cgroup_paths", lambda _pid, _controller: [(2, "/pod/container")])
    monkeypatch.setattr(cgroup, "_cgroup_mounts", lambda _version, _controller: [tmp_path])
    assert cgroup.task_headroom(1) is None
    for directory, limit, used in ((inner, "max", "3"), (inner.parent, "9", "4")):
        (directory / "pids.max").write_text(limit)
        (directory / "pids.current").write_text(used)
    assert cgroup.task_headroom(1) == 5
    for name, text in (("_OVERCOMMIT", "2\n"), ("_MEMINFO", "CommitLimit: 10 kB\nCommitted_AS: 4 kB\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory, name, tmp_path / name)
    assert memory.commit_headroom_bytes() == 6 << 10
    (tmp_path / "_OVERCOMMIT").write_text("0\n")
    assert memory.commit_headroom_bytes() is None


def test_packs_have_names_that_can_be_read_with_any_number_of_workers() -> None:
    for name in (f"{MERGED_PREFIX}{MOST_MERGERS - 1}", f"{READ_PREFIX}{2 * MOST_WORKERS - 1}"):
        assert PACK_NAME.fullmatch(f"{name}.pack")


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """As many pages of hugetlbfs as the process has, and no more."""
    number = Path("/proc/sys/vm/nr_hugepages")
    before = number.read_text()
    number.write_text(str(int(before) + 2))
    free = re.search(r"^HugePages_Free: +(\d+)$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert free is not None
    try:
        if free[1] != "2":
            pytest.skip(f"{free[1]} pages of hugetlbfs are free here, and not 2")
        yield
    finally:
        number.write_text(before)


@pytest.mark.usefixtures("huge_pages")
def test_a_snapshot_takes_no_pages_of_hugetlbfs_from_its_process(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path
) -> None:
    """A process that writes to one that a fork has too, and for whose copy there is none left, gets SIGBUS."""
    one = start()
    assert one.do("huge") == "done"
    meanwhile = Meanwhile(one, lambda: one.do("write"))
    assert take(journal, tmp_path / "packs", one, during=meanwhile).was_forked
    assert meanwhile.was_done
    assert one.do("write") == "done"
    one.check()


def test_where_memory_runs_out_a_fork_ends_alone(
    start: Callable[..., Versions], journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if an agent that had seen to that is killed, the switch is as it was once the forks have ended."""
    one, switch = start(), tmp_path / "memory.oom.group"
    switch.write_text("1")
    above: list[Path] = []
    monkeypatch.setattr(snapshot, "oom_groups", lambda _pid, _cgroup: ([switch], above))
    seen: list[str] = []
    meanwhile = Meanwhile(one, lambda: seen.append(switch.read_text()))
    assert take(journal, tmp_path / "packs", one, during=meanwhile).was_forked
    assert seen == ["0"]
    assert switch.read_text() == "1"

    kill = Meanwhile(one, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert run_killed(journal, lambda: None, partial(take, journal, tmp_path / "killed", one, during=kill))
    assert switch.read_text() == "1"

    above.append(tmp_path / "pod")
    assert not take(journal, tmp_path / "above", one).was_forked
    above.clear()
    switch.unlink()
    switch.mkdir()
    assert not take(journal, tmp_path / "refused", one).was_forked
    one.check()


def test_which_cgroups_end_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "pods/pod/container/inner"
    inner.mkdir(parents=True)
    for directory, value in (("pods", "0"), ("pods/pod", "1"), ("pods/pod/container", "1"), (inner, "0")):
        (tmp_path / directory / "memory.oom.group").write_text(f"{value}\n")
    monkeypatch.setattr(cgroup, "_cgroup_paths", lambda _pid, _controller: [(2, "/pods/pod/container/inner")])
    monkeypatch.setattr(cgroup, "_cgroup_mounts", lambda _version, _controller: [tmp_path])
    container, pod = (directory / "memory.oom.group" for directory in (inner.parent, inner.parents[1]))
    assert cgroup.oom_groups(1, "container") == ([container], [pod])
    assert cgroup.oom_groups(1) == ([], [container, pod])
    container.unlink()
    pod.write_text("0")
    assert cgroup.oom_groups(1, "container") == ([], [])


def test_a_note_of_what_was_read_counts_once_it_is_whole() -> None:
    """A write that crosses a page becomes visible in two parts."""
    notes = os.memfd_create("notes")
    whole = [struct.pack("<QQQ", pid, 4096, 8192) for pid in (1, 2)]
    os.write(notes, whole[0] + whole[1][:10])
    assert list(snapshot._noted(notes, 0)) == [(1, Span(4096, 8192))]
    os.write(notes, whole[1][10:])
    assert list(snapshot._noted(notes, len(whole[0]))) == [(2, Span(4096, 8192))]
    os.close(notes)
