"""Times snapshots of a process that works on all its memory: how long it stands still, and how much slower it is then.

In turns with what takes the place of a snapshot where there can be none: its memory is read while it stands still.
"""

import contextlib
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from integration.namespace import wait_for
from ocihook.linux.hold import Hold
from ocihook.linux.memory import Span
from ocihook.linux.procfs import Process
from ocihook.memory.snapshot import Area, take
from ocihook.session.journal import Journal, read_journal

_PROGRAM = Path("tests/bench/summing.c")
_SMALL_BYTES = 64 << 20
_ROUNDS = 5
_WORKERS = 2
_LOOK_S, _SOON_S = 0.005, 0.0005
_BEFORE_S = 1.0
_HUGE_PAGE_BYTES = 2 << 20
PAGES = ("4k", "huge")


class Snapshots(NamedTuple):
    """Medians over snapshots of one process."""

    memory_bytes: int
    pages: str
    place: str
    pause_ms_a_gib: float  # what the process sees beyond the pause of one with 64 MiB
    pause_s: float
    still_s: float  # the pause if its memory is read while it stands still
    read_s: float
    speed: float  # of its work while its snapshot is read, to that before
    huge_lost: float  # of its huge pages, when its snapshot has been read; of a process without: 0


class _One(NamedTuple):
    """One snapshot."""

    pause_s: float
    read_s: float
    speed: float
    huge_lost: float


def snapshots(dataset: Path, sizes: Sequence[int], places: Mapping[str, Path]) -> Iterator[Snapshots]:
    """Take snapshots of processes of several sizes, with pages of 4 KiB and huge ones.

    Args:
        dataset: what memory is made of.
        sizes: in bytes.
        places: of packs, by their names; the first gets all of it, the others the first of `sizes` only.
    """
    with _directory(Path("/var/tmp")) as scratch:
        program = scratch / "summing"
        subprocess.run(["gcc", "-O2", "-o", program, _PROGRAM], check=True)
        for pages in PAGES:
            small = 0.0
            for number, (place, directory) in enumerate(places.items()):
                for size in sizes[:1] if number else [_SMALL_BYTES, *sizes]:
                    with _Summing(program, dataset, size, pages, scratch) as one, _directory(directory) as packs:
                        found = _measure(one, packs)
                    if size == _SMALL_BYTES:
                        small = found.pause_s
                        continue
                    beyond_ms_a_gib = 1000 * (found.pause_s - small) / ((size - _SMALL_BYTES) / (1 << 30))
                    yield found._replace(pages=pages, place=place, pause_ms_a_gib=beyond_ms_a_gib)


@contextlib.contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Summing:
    """The process."""

    def __init__(self, program: Path, dataset: Path, size: int, pages: str, scratch: Path) -> None:
        self.size = size
        self.stood_s = 0.0  # when it was held last
        control = scratch / "control"
        control.write_bytes(bytes(mmap.PAGESIZE))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._control = memoryview(self._map).cast("Q")
        self._popen = subprocess.Popen([program, dataset, str(size >> 20), pages, control])
        wait_for("the process to have been at all its memory", lambda: self.steps > size >> 20)
        process = Process.find(self._popen.pid)
        if process is None:
            raise SystemExit("bench: the process whose snapshot is taken has ended")
        self.process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()

    @property
    def steps(self) -> int:
        """Those that it has done."""
        return self._control[0]

    def collapse(self) -> None:
        """Have it have its huge pages back."""
        self._control[3] = 1
        wait_for("the process to have its huge pages", lambda: self._control[3] == 0)

    @property
    def area(self) -> Area:
        """Its memory."""
        start = self._control[2]
        return Area(self.process, (Span(start, start + self.size),))

    def huge_bytes(self) -> int:
        """Return how much of its memory is in huge pages."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("AnonHugePages"))

    @contextlib.contextmanager
    def still(self) -> Iterator[Hold]:
        """Hold it, and see how long it stood still: later the scheduler may have it wait longer for others."""
        hold = Hold()
        self._control[1] = 0
        try:
            hold.add({self.process: 0}, None)
            yield hold
        finally:
            before = self.steps
            hold.release()
            while self.steps == before and self.process.is_alive():
                time.sleep(_SOON_S)
            self.stood_s = self._control[1] / 1e9


def _measure(one: _Summing, directory: Path) -> Snapshots:
    _take(one, directory, may_fork=True)  # not counted
    forked, still = [], []
    for _ in range(_ROUNDS):
        forked.append(_take(one, directory, may_fork=True))
        still.append(_take(one, directory, may_fork=False).pause_s)
    middle = [statistics.median(values) for values in zip(*forked, strict=True)]
    pause_s, read_s, speed, huge_lost = middle
    return Snapshots(one.size, "", "", 0.0, pause_s, statistics.median(still), read_s, speed, huge_lost)


def _take(one: _Summing, directory: Path, *, may_fork: bool) -> _One:
    me = Process.find(os.getpid())
    if me is None:
        raise SystemExit("bench: /proc is of another PID namespace")
    shutil.rmtree(directory)
    packs = directory / "packs"
    packs.mkdir(parents=True)
    journal = Journal.create(directory, me)
    one.collapse()
    huge_before = one.huge_bytes()
    with _Watch(one) as watch:
        time.sleep(_BEFORE_S)
        began = time.time()
        copied = take(
            [one.area], packs, journal=journal, still=one.still(), prefix="ocihook-region-", workers=_WORKERS,
            durable=False, may_fork=may_fork,
        ).read()  # fmt: skip
        huge_after = one.huge_bytes()
    if copied.was_forked != may_fork:
        raise SystemExit("bench: the process whose snapshot is taken cannot be forked")
    if not may_fork:
        return _One(one.stood_s, 0.0, 0.0, 0.0)
    (read,) = (phase for phase in read_journal(journal.path)["phases"] if phase["name"] == "snapshot read")
    speed = watch.speed(read["began"], read["began"] + read["seconds"]) / watch.speed(began - _BEFORE_S, began)
    return _One(one.stood_s, read["seconds"], speed, (huge_before - huge_after) / max(huge_before, 1))


class _Watch:
    """Looks again and again how many steps a process has done."""

    def __init__(self, one: _Summing) -> None:
        self._one = one
        self._seen: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._seen.append((time.time(), self._one.steps))

    def speed(self, start: float, end: float) -> float:
        """Return the steps in a second between two times, in seconds since 1970."""
        seen = [(at, steps) for at, steps in self._seen if start - _LOOK_S <= at <= end + _LOOK_S]
        (first, before), (last, after) = seen[0], seen[-1]
        return (after - before) / max(last - first, _LOOK_S)


if __name__ == "__main__":
    for measured in snapshots(Path(".cache/bench/1073741824.img"), [1 << 30, 1 << 32], {"disk": Path("/var/tmp")}):
        print(measured, flush=True)
