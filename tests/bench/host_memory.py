"""Times dumps and restores whose host memory goes past CRIU in turns with CRIU's own path, on the same node.

Dumps read memory past CRIU where it tracks memory, for which the kernel marks what is written (soft-dirty bits). CRIU
and ocihook are made to believe that it does (integration/soft_dirty.py says why that is enough to measure): what is
missing then is the time in which the kernel marks pages as clean.
"""

import contextlib
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman
from integration.soft_dirty import seem_to_have_soft_dirty
from ocihook.linux.memory import available_bytes
from ocihook.linux.procfs import descendants
from tests.bench.store import repeat

_WORKLOAD = Path("integration/workload.c")
SMALL_BYTES = 48 << 20  # of a process that is left to CRIU whatever is configured
_ROUNDS, _SMALL_ROUNDS = 3, 9
# Where the memory comes from, and what that takes: page images as CRIU wrote them go past it from 4 workers on.
_SOURCES = {"packs": "mode = 'inline'", "store": "mode = 'store'", "page images": "mode = 'off'"}
_WORKERS = 4
_PAGE_BYTES = 4096
_TIMES_IN_MEMORY = 3.5  # what a node needs where images are in memory: for the process, its images, and their packs
# podman with CRIU alone; ocihook inline, all through CRIU, past CRIU; in mode store, from a snapshot.
BARE, CRIU, PAST, SNAPSHOT = "bare", "criu", "past", "snapshot"
_TRACKING = "\ntrack-mem\nprev-images-dir /\n"


class Restores(NamedTuple):
    """Seconds of whole restores by podman, of one process: those past CRIU, and each with the next one through CRIU."""

    memory_bytes: int
    place: str
    source: str
    direct_s: float
    criu_s: float
    ratio: float
    longer_s: float
    left_bytes: int  # to CRIU, in one past it
    agent_bytes: int  # what the agent and its workers hold at most, in one past CRIU


class Dumps(NamedTuple):
    """Seconds of whole dumps by podman that leave the container running, and the pause that its process sees; by way.

    Ratios are medians of those of one round.
    """

    memory_bytes: int
    place: str
    seconds: Mapping[str, float]
    pause_s: Mapping[str, float]
    pause_to_criu: float
    pause_to_bare: float
    seconds_to_criu: float
    longer_s: float  # the pause past CRIU than that of all through CRIU
    left_bytes: int  # to CRIU
    agent_bytes: int


def restores(dataset: Path, sizes: Sequence[int], places: Mapping[str, Path]) -> Iterator[Restores]:
    """Restore containers of several sizes, and a small one, from packs, the store and page images; medians.

    Args:
        dataset: what memory is made of.
        sizes: in bytes.
        places: of images, by their names, a disk first: the others, in memory, get packs of `sizes` only.
    """
    with _workload(dataset) as workload:
        for place, directory, size in _cases(sizes, places):
            is_first = place == next(iter(places))
            for source, mode in _SOURCES.items():
                if is_first or source == "packs":
                    with workload.run(directory, size) as node:
                        yield _restores(node, size, place, source, mode)


def dumps(dataset: Path, sizes: Sequence[int], places: Mapping[str, Path]) -> Iterator[Dumps]:
    """Dump containers of several sizes, and a small one, left running, into packs; arguments as for `restores`."""
    with _workload(dataset) as workload:
        for place, directory, size in _cases(sizes, places):
            with workload.run(directory, size, "beat") as node:
                yield _dumps(node, size, place)


def _cases(sizes: Sequence[int], places: Mapping[str, Path]) -> Iterator[tuple[str, Path, int]]:
    for number, (place, directory) in enumerate(places.items()):
        for size in sizes if number else [SMALL_BYTES, *sizes]:
            if number == 0 or available_bytes() > _TIMES_IN_MEMORY * size:
                yield place, directory, size


class _Workload:
    """A program that holds memory, in a container."""

    def __init__(self, scratch: Path, dataset: Path) -> None:
        self._program, self._memory, self._dataset = scratch / "workload", scratch / "memory", dataset
        subprocess.run(["gcc", "-O2", "-static", "-s", "-o", self._program, _WORKLOAD], check=True)

    @contextlib.contextmanager
    def run(self, directory: Path, size: int, *words: str) -> Iterator[Podman]:
        """Run it on a node whose storage is in a directory."""
        if not self._memory.exists() or self._memory.stat().st_size != size:
            repeat(self._dataset, self._memory, size)
        scratch = Path(tempfile.mkdtemp(prefix="node-", dir=directory))
        node = Podman(scratch, "runc", self._program)
        try:
            node.install()
            seem_to_have_soft_dirty(node.namespace)
            volume = f"--volume={self._memory}:/memory:ro"
            options = ["--detach", "--name", "c", "--network", "host", "--pids-limit", "0", volume]
            node("run", *options, IMAGE, "/workload", *words, "/memory")
            wait_for("the container to run", lambda: ("gap" if words else "count") in node("logs", "c"))
            yield node
        finally:
            node.close()
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _workload(dataset: Path) -> Iterator[_Workload]:
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    try:
        yield _Workload(scratch, dataset)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _configure(node: Podman, policy: str) -> None:
    agent = f"idle_timeout_s = 5\nworkers = {_WORKERS}\nstore_dir = '{node.scratch}/podman/store'"
    node.configure(f"[agent]\n{agent}\n[policy]\n{policy}\n")


def _restores(node: Podman, size: int, place: str, source: str, mode: str) -> Restores:
    seconds: dict[str, list[float]] = {"direct": [], "criu": []}
    left = held = 0
    for number in range(_rounds(size) + 1):  # the first is not counted
        for way, taken in seconds.items():
            _configure(node, f"host_memory = '{way}'\n{mode}")
            node("container", "checkpoint", "c")
            if "store" in mode:
                node.ocihook("wait")
            with _AgentMemory(node, is_watched=number == 0 and way == "direct") as agent:
                began = time.perf_counter()
                node("container", "restore", "c")
                took = time.perf_counter() - began
            if number:
                taken.append(took)
            elif way == "direct":
                left, held = _left_bytes(node, "pre-restore"), agent.most_bytes
    pairs = list(zip(seconds["direct"], seconds["criu"], strict=True))
    return Restores(
        size,
        place,
        source,
        statistics.median(seconds["direct"]),
        statistics.median(seconds["criu"]),
        statistics.median(ours / theirs for ours, theirs in pairs),
        statistics.median(ours - theirs for ours, theirs in pairs),
        left,
        held,
    )


def _rounds(size: int) -> int:
    return _SMALL_ROUNDS if size == SMALL_BYTES else _ROUNDS


def _dumps(node: Podman, size: int, place: str) -> Dumps:
    seconds: dict[str, list[float]] = {BARE: [], CRIU: [], PAST: [], SNAPSHOT: []}
    pauses: dict[str, list[float]] = {way: [] for way in seconds}
    left = held = 0
    files = {path: path.read_text() for path in node.namespace.path("/etc/criu").glob("*.conf")}
    (images,) = node.scratch.glob("podman/vfs-containers/*/userdata")
    for number in range(_rounds(size) + 1):  # the first is not counted
        for way, taken in seconds.items():
            for path, text in files.items():
                path.write_text({BARE: "", CRIU: text}.get(way, text + _TRACKING))
            _configure(node, "mode = 'store'" if way == SNAPSHOT else "mode = 'inline'")
            shutil.rmtree(images / "checkpoint", ignore_errors=True)
            before = len(_gaps(node))
            with _AgentMemory(node, is_watched=number == 0 and way == PAST) as agent:
                began = time.perf_counter()
                node("container", "checkpoint", "--leave-running", "c")
                took = time.perf_counter() - began
            wait_for("the pause to be seen", lambda known=before: len(_gaps(node)) > known)  # type: ignore[misc]
            if way == SNAPSHOT:
                node.ocihook("wait")  # it is read, and stored
            if number:
                taken.append(took)
                pauses[way].append(max(_gaps(node)[before:]))
            elif way == PAST:
                left, held = _left_bytes(node, "pre-dump"), agent.most_bytes
    return Dumps(
        size,
        place,
        {way: statistics.median(taken) for way, taken in seconds.items()},
        {way: statistics.median(seen) for way, seen in pauses.items()},
        _middle_ratio(pauses[PAST], pauses[CRIU]),
        _middle_ratio(pauses[PAST], pauses[BARE]),
        _middle_ratio(seconds[PAST], seconds[CRIU]),
        statistics.median(ours - theirs for ours, theirs in zip(pauses[PAST], pauses[CRIU], strict=True)),
        left,
        held,
    )


def _gaps(node: Podman) -> list[float]:
    return [int(gap) / 1000 for gap in re.findall(r"gap (\d+) ms", node("logs", "c"))]


def _middle_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def _left_bytes(node: Podman, stage: str) -> int:
    """Return how much of the memory of the last dump or restore went through CRIU, by its own statistics."""
    return int(last_session(node.namespace, stage)["facts"]["criu_pages"]) * _PAGE_BYTES


class _AgentMemory:
    """Watches how much memory the agent and its workers hold, that of files apart."""

    def __init__(self, node: Podman, *, is_watched: bool) -> None:
        self.most_bytes = 0
        self._lock = node.namespace.path("/run/ocihook/agent.lock")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch) if is_watched else None

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            with contextlib.suppress(OSError, ValueError):  # not started yet
                pids = descendants(int(self._lock.read_text()))
                self.most_bytes = max(self.most_bytes, sum(map(_held_bytes, pids)))


def _held_bytes(pid: int) -> int:
    """Return what a process holds; of what forks share with their parent, each has its part."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split(":")
            found[name] = int(value.split()[0]) << 10
    return found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)


if __name__ == "__main__":
    disk = {"disk": Path("/var/tmp")}
    for measure in (dumps, restores):
        for measured in measure(Path(".cache/bench/1073741824.img"), [1 << 30, 1 << 32], disk):
            print(measured, flush=True)
