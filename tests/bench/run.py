"""Measures the store and the hook against their peers: one line a figure, and bench-results.json.

Every ratio is the median over rounds in which the contenders take turns, on the same two cores and the same
tmpfs. What disturbs such a measure on a virtual machine, and what is done about it:

* First touch of memory that the guest gave back to its host is many times slower. So the tmpfs has huge pages,
  every contender runs once untimed, and each deletes its output right before it writes it again.
* Other processes. A run during which they used more than a quarter of a core is done again, up to six times.
* Too little memory: input and outputs of the largest measure take 8 GiB.
"""

import argparse
import contextlib
import json
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from ocihook import wire
from ocihook.linux.workers import run_forked
from ocihook.packs import pages
from ocihook.packs.pack import PAGE_BYTES, PackFile
from ocihook.packs.packing import WORKER_BYTES, pack_images
from ocihook.packs.pages import RANGE_BYTES, ImageFile, Target
from ocihook.packs.unpacking import Packs
from ocihook.store import assemble
from ocihook.store.deduplicate import WORKER_BYTES as STORE_WORKER_BYTES
from tests.bench.audit import recorded
from tests.bench.engine import whole_checkpoints
from tests.bench.gang import MEMORY_MIB, SIZES, SMALL, added, meetings, most_members
from tests.bench.host_memory import PAST, SMALL_BYTES, SNAPSHOT, Dumps, Restores, dumps, restores
from tests.bench.net import GOAL_S, SOCKETS, many_sockets, median, pauses, stalls
from tests.bench.runtime import handlers
from tests.bench.snapshot import Snapshots, snapshots
from tests.bench.store import OurStore, PeerStore, ZstdFiles, downtimes, peers, tree_bytes

DATASET_BYTES = 1 << 30
ROUNDS = 5
_STORE_ROUNDS = 5  # of all contenders of the store, each a few seconds
_COPY_ROUNDS = 15  # of what takes a fifth of a second
CORES = 2
_SIZES = (1 << 30, 1 << 32)  # of processes whose host memory goes past CRIU
MEMORY_BOUND_BYTES = 256 << 20  # Settings.memory_bound_bytes, unless configured
HOOK_RUNS = 61
TRIES = 6
_QUIET_CORES = 0.25
_CACHE = Path(".cache/bench")
_RESULTS = Path("bench-results.json")
_SMALL = "small"  # a tmpfs with pages of 4 KiB, below the one with huge pages

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the results."""

    name: str
    value: float
    unit: str
    peer: str
    target: float | None
    better: str  # higher or lower


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time, and what it leaves, which is deleted before it runs again."""

    run: Run
    leaves: tuple[Path, ...]

    def delete_output(self) -> None:
        """Remove what an earlier run left."""
        for path in self.leaves:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)


def main() -> int:
    """Measure everything inside a mount namespace with a tmpfs of its own."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--tmpfs", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    _check_peers()
    dataset, without_zeros, second, new_pages = _datasets()
    if options.tmpfs is None:
        with tempfile.TemporaryDirectory(prefix="ocihook-bench-") as name:
            huge = 'mount -t tmpfs -o huge=always,size=10g tmpfs "$0"'
            small = f'mkdir "$0/{_SMALL}" && mount -t tmpfs -o huge=never,size=8g tmpfs "$0/{_SMALL}"'
            mount = f'{huge} && {small} && mount -t tmpfs tmpfs /run && exec "$@"'
            command = [sys.executable, "-m", "tests.bench.run", f"--rounds={options.rounds}", f"--tmpfs={name}"]
            return subprocess.run(["unshare", "-m", "sh", "-c", mount, name, *command], check=False).returncode
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    parts: list[Callable[[], Iterator[Figure]]] = [
        partial(_packing, options.tmpfs, dataset, options.rounds),
        partial(_unpacking, options.tmpfs, dataset, options.rounds, zeros=True),
        partial(_unpacking, options.tmpfs, without_zeros, options.rounds, zeros=False),
        partial(_memory, dataset),
        partial(_hook, options.tmpfs),
        _audit,
        partial(_store, options.tmpfs, dataset, second, new_pages),
        partial(_store_and_copy, options.tmpfs / _SMALL, dataset, second),
        partial(_several_images, options.tmpfs / _SMALL, dataset),
        partial(_store_memory, dataset),
        partial(_engine, dataset),
        partial(_downtime, dataset),
        *(partial(part, dataset, options.tmpfs) for part in (_restores, _dumps, _snapshots)),
        _gangs,
        _handlers,
        _many_sockets,
        _pauses,
    ]
    return _measure(parts)


def _measure(parts: Sequence[Callable[[], Iterator[Figure]]]) -> int:
    """Print each figure as it is measured. A part that fails costs no other; return 1 if one has."""
    figures, failed = [], 0
    for part in parts:
        try:
            for figure in part():
                print(_line(figure), flush=True)
                figures.append(figure)
        except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the other parts can be measured
            failed = 1
            traceback.print_exc()
        _RESULTS.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return failed


def _line(figure: Figure) -> str:
    target = (
        "" if figure.target is None else f"  target {'>=' if figure.better == 'higher' else '<='} {figure.target:g}"
    )
    return f"{figure.name:<38} {figure.value:8.2f} {figure.unit:<5} {figure.peer}{target}"


def _check_peers() -> None:
    if os.geteuid() != 0:
        raise SystemExit("bench: must be root: it mounts a tmpfs with huge pages")
    for tool in ("lz4", "zstd", "borg", "restic", "unshare", "podman", "criu", "runc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"bench: needs {tool}; `make bench` installs it")
    if not Path(os.environ.get("OCIHOOK_FORKY_ROOT", "none"), ".complete").exists():
        raise SystemExit("bench: OCIHOOK_FORKY_ROOT must name what `integration/node-setup forky` made")
    version = subprocess.run(["lz4", "--version"], check=True, capture_output=True, text=True).stdout
    if "multithread" not in version:
        raise SystemExit(f"bench: needs lz4 >= 1.10 with -T, as Debian 13 has it; here is {version.strip()}")


def _datasets() -> tuple[Path, Path, Path, Path]:
    """Return the data set, its pages that are not zero, its next version, and what is new in that; made once."""
    names = ("", "-without-zeros", "-next", "-new-pages")
    paths = tuple(_CACHE / f"{DATASET_BYTES}{name}.img" for name in names)
    if not paths[-1].exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        partial = paths[-1].with_suffix(".partial")
        # In a process of its own: numpy would be in every worker's memory.
        maker = [sys.executable, "-m", "tests.bench.dataset", *map(str, (*paths[:3], partial)), str(DATASET_BYTES)]
        subprocess.run(maker, check=True)
        partial.rename(paths[-1])
    dataset, without_zeros, second, new_pages = paths
    return dataset, without_zeros, second, new_pages


# --- timing


def _busy_s() -> float:
    """CPU time that all processes have used so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _timed(contender: Contender) -> float:
    """Return the seconds of an undisturbed run; if there is none, of the least disturbed."""
    tries = []
    for _ in range(TRIES):
        contender.delete_output()
        busy, own, start = _busy_s(), _own_s(), time.perf_counter()
        contender.run()
        elapsed = time.perf_counter() - start
        others = (_busy_s() - busy) - (_own_s() - own)
        if others < _QUIET_CORES * elapsed + 0.02:  # the kernel counts in steps of 10 ms
            return elapsed
        tries.append((others / elapsed, elapsed))
        time.sleep(2)
    print(f"bench: others used {min(tries)[0]:.1f} cores all the time; do not trust these figures", file=sys.stderr)
    return min(tries)[1]


def _rounds(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Time the contenders in turns."""
    for contender in contenders.values():
        contender.delete_output()
        contender.run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            seconds[name].append(_timed(contender))
    return seconds


def _ratio(ours: Sequence[float], peers: Sequence[float]) -> float:
    """Return how many times as fast as the peer we are: the median of the rounds."""
    return statistics.median(peer / our for our, peer in zip(ours, peers, strict=True))


def _command(*arguments: str | Path) -> Run:
    return lambda: subprocess.run([str(argument) for argument in arguments], check=True)


# --- packing


def _pack(directory: Path, packs: Path, names: Sequence[str] = ("pages-1.img",)) -> Packs:
    packs.mkdir()
    prefix = f"{packs.name}/ocihook-"
    images, infos = pack_images(directory, names, prefix=prefix, workers=CORES, durable=False)
    return Packs(images, infos, {info.name: PackFile(packs / info.name) for info in infos})


def _packing(directory: Path, dataset: Path, rounds: int) -> Iterator[Figure]:
    image, packs = directory / "pages-1.img", directory / "packs"
    shutil.copyfile(dataset, image)
    outputs = {name: directory / f"{name}.out" for name in ("lz4", "zstd1", "zstd3")}
    contenders = {
        "ours": Contender(lambda: _pack(directory, packs).close(), (packs,)),
        "lz4": Contender(_command("lz4", "-1", "-T2", "-qf", image, outputs["lz4"]), (outputs["lz4"],)),
        "zstd1": Contender(_command("zstd", "-1", "-T2", "-qf", image, "-o", outputs["zstd1"]), (outputs["zstd1"],)),
        "zstd3": Contender(
            _command("zstd", "-3", "--single-thread", "-qf", image, "-o", outputs["zstd3"]), (outputs["zstd3"],)
        ),
    }
    seconds = _rounds(contenders, rounds)
    size = image.stat().st_size
    stored = sum(path.stat().st_size for path in packs.iterdir())
    podman = "zstd -3, one thread: a stand-in for podman's compression"
    yield Figure("pack throughput", size / statistics.median(seconds["ours"]) / 1e9, "GB/s", "", None, "higher")
    yield Figure("pack vs lz4", _ratio(seconds["ours"], seconds["lz4"]), "x", "lz4 -1 -T2", 1.05, "higher")
    yield Figure("pack vs zstd", _ratio(seconds["ours"], seconds["zstd1"]), "x", "zstd -1 -T2", 3.0, "higher")
    yield Figure("pack vs zstd -3", _ratio(seconds["ours"], seconds["zstd3"]), "x", podman, 5.0, "higher")
    yield Figure("stored bytes vs lz4", stored / outputs["lz4"].stat().st_size, "x", "lz4 -1 -T2", 1.01, "lower")
    for contender in contenders.values():
        contender.delete_output()
    image.unlink()


def _unpacking(directory: Path, dataset: Path, rounds: int, *, zeros: bool) -> Iterator[Figure]:
    """Compare unpacking, which always verifies.

    We leave zero pages as holes; lz4 and zstd seek over zeros too, where the output is a regular file. Only the
    data set without zero pages makes everybody write every byte, so only there the memory copy is a limit.
    """
    image, packs, out = directory / "pages-1.img", directory / "packs", directory / "out"
    shutil.copyfile(dataset, image)
    packed = _pack(directory, packs)
    lz4, zstd = directory / "lz4.in", directory / "zstd.in"
    _command("lz4", "-1", "-T2", "-qf", image, lz4)()
    _command("zstd", "-1", "-T2", "-qf", image, "-o", zstd)()
    outputs = {name: directory / f"{name}.out" for name in ("lz4", "zstd", "copy")}

    def rehydrate() -> None:
        out.mkdir()
        packed.rehydrate(out, workers=CORES)

    contenders = {
        "ours": Contender(rehydrate, (out,)),
        "verify": Contender(lambda: packed.verify(workers=CORES), ()),
        "lz4": Contender(_command("lz4", "-d", "-qf", lz4, outputs["lz4"]), (outputs["lz4"],)),
        "zstd": Contender(_command("zstd", "-d", "-qf", zstd, "-o", outputs["zstd"]), (outputs["zstd"],)),
        "copy": Contender(lambda: _copy(image, outputs["copy"]), (outputs["copy"],)),
    }
    seconds = _rounds(contenders, rounds)
    size = image.stat().st_size
    what = "unpack" if zeros else "unpack, no zero pages,"
    ours = seconds["ours"]
    yield Figure(f"{what} throughput", size / statistics.median(ours) / 1e9, "GB/s", "", None, "higher")
    yield Figure(f"{what} vs lz4", _ratio(ours, seconds["lz4"]), "x", "lz4 -d", 1.8, "higher")
    yield Figure(f"{what} vs zstd", _ratio(ours, seconds["zstd"]), "x", "zstd -d of zstd -1", 3.5, "higher")
    copy = "copy by 2 processes, 1 MiB pread and pwrite"
    yield Figure(f"{what} vs copy", _ratio(ours, seconds["copy"]), "x", copy, None if zeros else 0.65, "higher")
    if zeros:
        yield Figure("verify vs unpack", _ratio(seconds["verify"], ours), "x", "our unpack", 1.0, "higher")
    packed.close()
    for contender in contenders.values():
        contender.delete_output()
    for path in (image, lz4, zstd):
        path.unlink()
    shutil.rmtree(packs)


def _copy(source: Path, target: Path) -> None:
    """Copy as fast as two processes can: the limit for what must write every byte.

    The buffer begins with a page. Where malloc puts one is luck, and 16 bytes behind a page the copy takes 1.4 times as
    long.
    """
    size = source.stat().st_size
    target.touch()
    os.truncate(target, size)

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        buffer = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with (
            source.open("rb", buffering=0) as read,
            target.open("r+b", buffering=0) as write,
            memoryview(buffer) as view,
        ):
            for task in tasks:
                for at in range(task * RANGE_BYTES, min(size, (task + 1) * RANGE_BYTES), len(buffer)):
                    length = os.preadv(read.fileno(), [buffer], at)
                    os.pwrite(write.fileno(), view[:length], at)
                yield task

    for _ in run_forked(worker, tasks=-(-size // RANGE_BYTES), workers=CORES):
        pass


# --- memory


@contextlib.contextmanager
def _on_disk() -> Iterator[Path]:
    """Make a directory for a measure of memory: what is mapped of a tmpfs would count as a process's own."""
    with tempfile.TemporaryDirectory(prefix="memory-", dir=_CACHE) as name:
        yield Path(name).absolute()


def _memory(dataset: Path) -> Iterator[Figure]:
    """Peak memory of packing and of unpacking 4 GiB: what all processes hold that is not a file's page cache."""
    with _on_disk() as directory:
        peak_process, peak_sum = _memory_of_packing(directory, dataset)
    bound = MEMORY_BOUND_BYTES / (1 << 20)
    yield Figure("memory, packing and unpacking 4 GiB", peak_sum / (1 << 20), "MiB", "configured bound", bound, "lower")
    own = WORKER_BYTES / (1 << 20)
    yield Figure("memory of one worker", peak_process / (1 << 20), "MiB", "its share", own, "lower")


def _memory_of_packing(directory: Path, dataset: Path) -> tuple[int, int]:
    image = directory / "pages-1.img"
    shutil.copyfile(dataset, image)
    names = [f"pages-{number}.img" for number in range(1, 5)]
    for name in names[1:]:
        os.link(image, directory / name)
    packs, out = directory / "packs", directory / "out"
    program = (
        "import os, sys, ocihook.agent.server; from pathlib import Path; from tests.bench.run import _pack\n"
        "directory, packs, out, *names = sys.argv[1:]; out = Path(out)\n"
        "packed = _pack(Path(directory), Path(packs), names)\n"
        "for name in names: os.unlink(Path(directory, name))\n"
        "out.mkdir(); packed.rehydrate(out, workers=2)\n"
    )
    command: list[str | Path] = [sys.executable, "-c", program, directory, packs, out, *names]
    return _peak_memory(command)


def _store_memory(dataset: Path) -> Iterator[Figure]:
    """Peak memory of storing 4 GiB and restoring them."""
    with _on_disk() as directory:
        peak_process, peak_sum = _memory_of_storing(directory, dataset)
    bound = MEMORY_BOUND_BYTES / (1 << 20)
    yield Figure("memory, storing and restoring 4 GiB", peak_sum / (1 << 20), "MiB", "configured bound", bound, "lower")
    own = STORE_WORKER_BYTES / (1 << 20)
    yield Figure("memory of one worker that stores", peak_process / (1 << 20), "MiB", "its share", own, "lower")


def _memory_of_storing(directory: Path, dataset: Path) -> tuple[int, int]:
    image = directory / "v1.img"
    for _ in range(4):
        with dataset.open("rb") as source, image.open("ab") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    program = (
        "import sys, ocihook.agent.server; from pathlib import Path; from tests.bench.store import OurStore\n"
        "memory = Path(sys.argv[2]); store = OurStore(Path(sys.argv[1]), 2); store.prepare(memory)\n"
        "store.put(); memory.unlink(); store.get(Path(sys.argv[3]))\n"
    )
    command: list[str | Path] = [sys.executable, "-c", program, directory / "ours", image, directory / "out"]
    return _peak_memory(command)


def _peak_memory(command: Sequence[str | Path]) -> tuple[int, int]:
    """Run a command; return the peaks, in bytes, of its largest child and of it with all its children."""
    largest = together = 0
    with subprocess.Popen([str(argument) for argument in command]) as process:
        while process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                sizes = [_held_bytes(int(pid)) for pid in children]
                largest = max([largest, *sizes])
                together = max(together, _held_bytes(process.pid) + sum(sizes))
            time.sleep(0.01)
    if process.returncode != 0:
        raise SystemExit("bench: a run to measure its memory failed")
    return largest, together


def _held_bytes(pid: int) -> int:
    """RssAnon, RssShmem and tables of pages; what forked workers share with their parent is counted for each."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem", "VmPTE"))


# --- the content store


def _store(directory: Path, dataset: Path, second: Path, new_pages: Path) -> Iterator[Figure]:
    """Two versions of the same memory in, the second out; every contender has a repository of its own.

    All read from and write to the same tmpfs, in turns, each time with a new repository; the first time is not counted,
    it touches the memory. The best time of each counts: what else the host does only adds, to the shortest the most.
    """
    versions = (directory / "v1.img", directory / "v2.img")
    shutil.copyfile(dataset, versions[0])
    shutil.copyfile(second, versions[1])
    shutil.copyfile(new_pages, directory / "pages-9.img")
    _pack(directory, directory / "ideal", ("pages-9.img",)).close()
    ideal_bytes = tree_bytes(directory / "ideal")
    out = directory / "out"
    runs: dict[str, Callable[[], _Result]] = {
        "ours": lambda: _put_and_get(OurStore(directory / "ours", CORES), versions, out)
    }
    for name, peer in peers(directory).items():
        runs[name] = partial(_put_and_get, PeerStore(peer, directory / name), versions, out)
    runs["zstd"] = lambda: _put_and_get(ZstdFiles(directory / "zstd"), versions, out)
    tries: dict[str, list[_Result]] = {name: [] for name in runs}
    for _ in range(_STORE_ROUNDS + 1):
        for name, run in runs.items():
            tries[name].append(run())
            shutil.rmtree(directory / name)
    results = {name: _Result(*map(min, zip(*each[1:], strict=True))) for name, each in tries.items()}
    copies = []
    for _ in range(_STORE_ROUNDS + 1):
        out.unlink(missing_ok=True)
        copies.append(_timed_once(lambda: _copy(versions[1], out)))
    yield from _store_figures(results, versions[1].stat().st_size, ideal_bytes, min(copies[1:]))
    for path in (*versions, out, directory / "pages-9.img"):
        path.unlink()
    shutil.rmtree(directory / "ideal")


class _Result(NamedTuple):
    """Seconds for both versions in and the second out, and bytes stored after each."""

    first_s: float
    second_s: float
    out_s: float
    first_bytes: int
    second_bytes: int

    @property
    def added_bytes(self) -> int:
        return self.second_bytes - self.first_bytes


def _put_and_get(store: "OurStore | PeerStore | ZstdFiles", versions: tuple[Path, Path], out: Path) -> _Result:
    seconds, stored = [], []
    out_s = 0.0
    for version in versions:
        store.prepare(version)
        seconds.append(_timed_once(store.put))
        stored.append(store.stored_bytes)
    for _ in range(2):  # the first touches memory that is long free
        out.unlink(missing_ok=True)
        out_s = _timed_once(lambda: store.get(out))
    subprocess.run(["cmp", versions[1], out], check=True)
    out.unlink()
    return _Result(seconds[0], seconds[1], out_s, stored[0], stored[1])


def _gangs() -> Iterator[Figure]:
    """Gangs of containers, and meetings of large ones with a coordinator of their own."""
    for size in SMALL:
        cost = added(Path(os.environ["OCIHOOK_FORKY_ROOT"]), size, rounds=5)
        name, peer = f"gang of {size}, {MEMORY_MIB} MiB each", "as many containers at once, no gang"
        yield Figure(f"{name}: dump", cost.gang_s / cost.alone_s, "x", peer, 1.1, "lower")
        stall = statistics.median(cost.stalls_s or [0.0])
        yield Figure(f"{name}: stall", stall / GOAL_S, "x", "two round trips and 50 ms", 1.0, "lower")
    for found in map(meetings, filter(most_members().__ge__, SIZES)):
        name, peer = f"gang of {found.members}, dump", "all at the same moment, TLS on loopback"
        yield Figure(f"{name}: longest meeting", found.longest_s * 1e3, "ms", peer, 0.75 * found.members, "lower")
        yield Figure(f"{name}: joined", found.joined_s, "s", peer, None, "lower")
        yield Figure(f"{name}: coordinator, a request", found.request_s * 1e3, "ms", "processor", None, "lower")
        yield Figure(f"{name}: coordinator's memory", found.memory_mib, "MiB", "", None, "lower")
        yield Figure(f"{name}: messages", found.messages, "", "", None, "lower")
        yield Figure(f"{name}: sent", found.megabytes, "MB", "", None, "lower")


def _many_sockets() -> Iterator[Figure]:
    """Sockets in numbers: each step against what cannot be left out of it."""
    times = many_sockets()
    name = f"{SOCKETS} sockets"
    yield Figure(f"{name}: listed", times.listed_s, "s", "", None, "lower")
    yield Figure(f"{name}: listed vs ss", times.listed_s / times.by_ss_s, "x", "ss -Htuane", None, "lower")
    yield Figure(f"{name}: image read", times.read_s, "s", "", None, "lower")
    yield Figure(f"{name}: planned vs read", times.planned_s / times.read_s, "x", "the image read", 2.0, "lower")
    yield Figure(f"{name}: image rewritten vs read", times.rewritten_s / times.read_s, "x", "the same", 1.0, "lower")
    yield Figure(f"{name}: patched", times.patched_s, "s", "", None, "lower")
    one = "one socket in the same memory"
    yield Figure(f"{name}: patched vs one", times.patched_s / times.one_patched_s, "x", one, 20.0, "lower")


def _pauses() -> Iterator[Figure]:
    """What a peer sees: the pause against the time that CRIU froze the container, and the stall behind it."""
    root = Path(os.environ["OCIHOOK_FORKY_ROOT"])
    found = pauses(root, rounds=3)
    for name, seen in found.items():
        pause = median(p.left_running_s / p.frozen_s for p in seen)
        frozen = "frozen time that CRIU says"
        yield Figure(f"pause of a peer, {name}", pause, "x", frozen, None, "lower")
    goal = "two round trips and 50 ms"
    behind_dump = median(p.behind_dump_s for p in found["ocihook"])
    behind_restore, alone = (median(p.behind_restore_s for p in found[name]) for name in ("ocihook", "alone"))
    yield Figure("stall behind the hold of a dump", behind_dump / GOAL_S, "x", goal, 1.0, "lower")
    yield Figure("stall behind the hold of a restore", behind_restore / GOAL_S, "x", goal, 1.0, "lower")
    yield Figure("stall behind a restore, alone", alone / GOAL_S, "x", goal, None, "lower")
    for name, waits in stalls(root, rounds=2).items():
        for act, behind in (
            ("dump", [w.behind_dump_s for w in waits]),
            ("restore", [w.behind_restore_s for w in waits]),
        ):
            figure = f"stall behind a long hold of a {act}, {name}"
            yield Figure(figure, median(behind) / GOAL_S, "x", goal, None, "lower")


def _store_figures(results: dict[str, _Result], size: int, ideal_bytes: int, copy_s: float) -> Iterator[Figure]:
    ours = results.pop("ours")
    yield Figure("store, first version", DATASET_BYTES / ours.first_s / 1e9, "GB/s", "", None, "higher")
    yield Figure("store, second version", size / ours.second_s / 1e9, "GB/s", "", None, "higher")
    yield Figure("store, restore of the second", size / ours.out_s / 1e9, "GB/s", "", None, "higher")
    copy = "copy by 2 processes to a new file, 1 MiB pread and pwrite"
    yield Figure("second version vs copy, huge pages", copy_s / ours.second_s, "x", copy, None, "higher")
    yield Figure("restore vs copy, huge pages", copy_s / ours.out_s, "x", copy, None, "higher")
    limit = "what a restore would be that is as fast as that copy"
    yield Figure("copy vs borg's restore", results["borg"].out_s / copy_s, "x", limit, None, "higher")
    alone = "its new pages alone, packed"
    yield Figure("bytes added by the second", ours.added_bytes / ideal_bytes, "x", alone, 1.15, "lower")
    targets = {"borg": (8.0, 7.0, 0.40), "restic": (18.0, None, None), "zstd": (None, 3.5, 0.15)}
    for name, theirs in results.items():
        into, back, share = targets[name]
        yield Figure(f"first version vs {name}", theirs.first_s / ours.first_s, "x", _PEERS[name], None, "higher")
        yield Figure(f"second version vs {name}", theirs.second_s / ours.second_s, "x", _PEERS[name], into, "higher")
        yield Figure(f"restore vs {name}", theirs.out_s / ours.out_s, "x", _PEERS[name], back, "higher")
        yield Figure(f"added bytes vs {name}", ours.added_bytes / theirs.added_bytes, "x", _PEERS[name], share, "lower")


def _store_and_copy(directory: Path, dataset: Path, second: Path) -> Iterator[Figure]:
    """Compare with the copy by which the targets were set: pages of 4 KiB, over a file that is there already.

    A restore writes every byte then, zero pages, too. In turns; the best times of both are compared,
    and the median of the ratios is told as well, which other guests of the host make worse.
    """
    first, memory, out = (directory / name for name in ("v1.img", "v2.img", "out.img"))
    store = OurStore(directory / "ours", CORES)

    def prepare() -> None:
        shutil.rmtree(directory / "ours", ignore_errors=True)
        store.prepare(first)
        store.put()
        store.prepare(memory)

    def restore() -> None:
        layout = store.domain.layout(store.domain.checkpoints()[-1])
        target = Target(partial(ImageFile, out, writable=True), 0)
        assemble.assemble(layout, store.domain.packs, {"pages-1.img": target}, workers=CORES)

    def against_copy(run: Run, before: Run) -> tuple[float, float]:
        ours, copies = [], []
        for _ in range(_COPY_ROUNDS):
            before()
            ours.append(_timed_once(run))
            copies.append(_timed_once(partial(_copy, memory, out)))
        return min(copies) / min(ours), _ratio(ours, copies)

    copy = "copy by 2 processes over a file, pages of 4 KiB"
    shutil.copyfile(dataset, first)
    shutil.copyfile(second, memory)
    shutil.copyfile(memory, out)
    prepare()
    store.put()
    with _every_byte_written():
        best, median = against_copy(restore, lambda: None)
        with out.open("r+b") as file:
            while file.tell() < memory.stat().st_size:
                file.write(b"\xaa" * PAGE_BYTES)
        restore()
    subprocess.run(["cmp", memory, out], check=True)
    yield Figure("restore of every byte vs copy", best, "x", copy, 0.65, "higher")
    yield Figure("restore of every byte vs copy, median", median, "x", copy, None, "higher")
    best, median = against_copy(store.put, prepare)
    yield Figure("second version vs copy", best, "x", copy, 0.6, "higher")
    yield Figure("second version vs copy, median", median, "x", copy, None, "higher")
    shutil.rmtree(directory / "ours")
    for path in (first, memory, out):
        path.unlink()


def _several_images(directory: Path, dataset: Path) -> Iterator[Figure]:
    """Restore the same memory as one image and as four, to new files: a file takes one worker's pages at a time."""
    stores: dict[int, OurStore] = {}
    for count in (1, 4):
        parts = [directory / f"part-{number}.img" for number in range(count)]
        with dataset.open("rb") as file:
            for part in parts:
                part.write_bytes(file.read(DATASET_BYTES // count))
        stores[count] = OurStore(directory / f"ours-{count}", CORES)
        stores[count].prepare(*parts)
        stores[count].put()
        for part in parts:
            part.unlink()
    out = directory / "out"
    seconds: dict[int, list[float]] = {count: [] for count in stores}
    for _ in range(_COPY_ROUNDS):
        for count, store in stores.items():
            elapsed = 0.0
            for _ in range(2):  # the first touches memory that is long free
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                elapsed = _timed_once(partial(store.get_images, out))
            seconds[count].append(elapsed)
    shutil.rmtree(out)
    for count in stores:
        shutil.rmtree(directory / f"ours-{count}")
    one = "the same memory as one image, to a new file"
    yield Figure("restore of four images vs one", min(seconds[1]) / min(seconds[4]), "x", one, None, "higher")


_BATCH_BYTES = 2 << 20  # what a restore writes at a time


@contextlib.contextmanager
def _every_byte_written() -> Iterator[None]:
    """Have a restore leave no holes, as over a file that was there before."""
    with (
        patch.object(pages, "_HOLE_PAGES", _BATCH_BYTES),
        patch.object(pages, "ZEROS", memoryview(bytes(_BATCH_BYTES))),
    ):
        yield


_PEERS = {"borg": "lz4, buzhash of 64 KiB, no encryption", "restic": "as it comes", "zstd": "zstd -1 -T2, zstd -d"}


def _timed_once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _downtime(dataset: Path) -> Iterator[Figure]:
    for row in downtimes(dataset, [1 << 28, 1 << 30, 1 << 32]):
        for mode, (pause_ms, ours_ms) in row.by_mode.items():
            name = f"{row.memory_bytes >> 20} MiB left running, {mode}"
            yield Figure(name, pause_ms / 1000, "s", "the longest pause that the process sees", None, "lower")
            if ours_ms:
                yield Figure(f"{name}, our part", ours_ms / 1000, "s", "post-dump", None, "lower")


def _restores(dataset: Path, tmpfs: Path) -> Iterator[Figure]:
    """Compare restores whose memory goes past CRIU with those of which CRIU restores all."""
    for each in restores(dataset, _SIZES, _places(tmpfs)):
        yield from _restored(each)


def _dumps(dataset: Path, tmpfs: Path) -> Iterator[Figure]:
    """Compare dumps whose memory is read past CRIU with those of which CRIU reads all."""
    for each in dumps(dataset, _SIZES, _places(tmpfs)):
        yield from _dumped(each)


def _snapshots(dataset: Path, tmpfs: Path) -> Iterator[Figure]:
    """Time processes of which a snapshot is taken."""
    disk, *in_memory = _places(tmpfs).items()
    for each in snapshots(dataset, _SIZES, dict([*in_memory, disk])):
        yield from _taken(each)


def _places(tmpfs: Path) -> dict[str, Path]:
    return {"disk": Path("/var/tmp"), "tmpfs": tmpfs, "4 KiB tmpfs": tmpfs / _SMALL}


def _restored(each: Restores) -> Iterator[Figure]:
    name, peer = f"{each.memory_bytes >> 20} MiB restored, {each.source}, {each.place}", 'host_memory = "criu"'
    yield Figure(name, each.direct_s, "s", "podman container restore", None, "lower")
    if each.memory_bytes == SMALL_BYTES:
        yield Figure(f"{name}, longer by", each.longer_s, "s", peer, 0.02, "lower")
        return
    is_default = each.source != "page images"  # which are left to CRIU by default on so few cores
    yield Figure(f"{name}, vs CRIU", each.ratio, "x", peer, 0.8 if is_default else None, "lower")
    yield from _sizes(name, each)


def _dumped(each: Dumps) -> Iterator[Figure]:
    name = f"{each.memory_bytes >> 20} MiB left running, tracked, {each.place}"
    yield Figure(name, each.seconds[PAST], "s", "podman container checkpoint", None, "lower")
    yield Figure(f"{name}, pause", each.pause_s[PAST], "s", "as its process sees it", None, "lower")
    if each.memory_bytes == SMALL_BYTES:
        yield Figure(f"{name}, pause longer by", each.longer_s, "s", "all through CRIU", 0.02, "lower")
        return
    is_goal = each.place == "tmpfs"
    yield Figure(f"{name}, vs CRIU", each.seconds_to_criu, "x", "all through CRIU", None, "lower")
    to_criu, to_bare = (0.6, 1.1) if is_goal else (None, None)
    yield Figure(f"{name}, pause vs CRIU", each.pause_to_criu, "x", "all through CRIU", to_criu, "lower")
    yield Figure(f"{name}, pause vs podman", each.pause_to_bare, "x", "podman alone", to_bare, "lower")
    yield from _sizes(name, each)
    name = f"{each.memory_bytes >> 20} MiB left running, from a snapshot, {each.place}"
    yield Figure(name, each.seconds[SNAPSHOT], "s", "podman container checkpoint, mode store", None, "lower")
    yield Figure(f"{name}, pause", each.pause_s[SNAPSHOT], "s", "as its process sees it", None, "lower")


def _sizes(name: str, each: Restores | Dumps) -> Iterator[Figure]:
    mib = 1 << 20
    least = (mib + each.memory_bytes / 1000) / mib
    yield Figure(f"{name}, through CRIU", each.left_bytes / mib, "MiB", "1 MiB and 0.1 %", least, "lower")
    if each.place == "disk":  # packs on a tmpfs, which are mapped, would count
        bound = MEMORY_BOUND_BYTES / mib
        yield Figure(f"{name}, memory of the agent", each.agent_bytes / mib, "MiB", "configured bound", bound, "lower")


def _taken(each: Snapshots) -> Iterator[Figure]:
    name = f"{each.memory_bytes >> 20} MiB snapshot, {each.pages} pages, {each.place}"
    goal = {"4k": 50.0, "huge": 5.0}[each.pages]
    peer = "all is read before it goes on"
    yield Figure(f"{name}, pause beyond 64 MiB's", each.pause_ms_a_gib, "ms/GiB", "", goal, "lower")
    yield Figure(f"{name}, pause", each.pause_s, "s", "", None, "lower")
    yield Figure(f"{name}, pause vs no fork", each.pause_s / each.still_s, "x", peer, None, "lower")
    yield Figure(f"{name}, read", each.read_s, "s", "", None, "lower")
    yield Figure(f"{name}, speed meanwhile", each.speed, "x", "before; it writes to a tenth", None, "higher")
    if each.pages == "huge":
        yield Figure(f"{name}, huge pages lost", 100 * each.huge_lost, "%", "it writes to a tenth", None, "lower")


# --- the engine


def _engine(dataset: Path) -> Iterator[Figure]:
    """Compare whole checkpoints with podman's own: its default compression of the same memory, in the same run."""
    seconds, archive_bytes = whole_checkpoints(dataset, rounds=3)
    ours, default = seconds["packed"], "podman alone, its default compression"
    yield Figure("podman checkpoint, whole", statistics.median(ours), "s", "", None, "lower")
    yield Figure("podman checkpoint vs default", _ratio(ours, seconds["zstd"]), "x", default, None, "higher")
    none = "podman alone, --compress none"
    yield Figure("podman checkpoint vs uncompressed", _ratio(ours, seconds["none"]), "x", none, None, "higher")
    yield Figure(
        "archive bytes vs default", archive_bytes["packed"] / archive_bytes["zstd"], "x", default, None, "lower"
    )


def _handlers() -> Iterator[Figure]:
    """The runtime handler: calls in CPU time, containers of 4 MiB in time of the clock."""
    for each in handlers():
        name, alone = f"handler, {each.runtime}", f"{each.runtime} alone, CPU time"
        yield Figure(f"{name}: `state` of others' containers", each.call_ratio, "x", alone, 1.5, "lower")
        yield Figure(f"{name}: `create` of others'", each.create_ratio, "x", alone, 1.5, "lower")
        again, stop = each.again_s - each.restore_s, each.stop_s - each.checkpoint_s
        yield Figure(f"{name}: made again, longer by", again, "s", "podman container restore", 0.15, "lower")
        yield Figure(f"{name}: stopped, longer by", stop, "s", "podman container checkpoint", None, "lower")


# --- the audit


def _audit() -> Iterator[Figure]:
    found = recorded()
    yield Figure("state of 200 threads, recorded", found.processor_s * 1e3, "ms", "processor", 10.0, "lower")
    yield Figure("state of 200 threads, in a checkpoint", found.size_bytes / 1024, "KiB", "", 64.0, "lower")


# --- the hook


def _hook(directory: Path) -> Iterator[Figure]:
    script = directory / "criu-action"
    source = Path("ocihook/hook/criu-action").read_text()
    script.write_text(source.replace("@PYTHONS@", sys.executable).replace("@SITE@", str(Path.cwd())))
    script.chmod(0o755)
    yield Figure("hook, unhandled stage", unhandled_stage_ms(script), "ms", "", 1.0, "lower")
    with _agent_that_agrees():
        yield Figure("hook, handled stage", handled_stage_ratio(script), "x", "python -IS -c pass", 2.5, "lower")
        launcher, python = _packaged_hook(directory / "tree")
        ratio = handled_stage_ratio(launcher, python)
        yield Figure("hook of a package, handled stage", ratio, "x", "python -IS -c pass", 2.5, "lower")


def _packaged_hook(tree: Path) -> tuple[Path, str]:
    """Stage the tree that packages consist of, with its bytecode; return its launcher and the Python it runs."""
    subprocess.run([sys.executable, "packaging/stage.py", tree], check=True, stdout=subprocess.DEVNULL)
    libexec = tree / "usr/libexec/ocihook"
    for name in ("criu-action", "compile"):
        script = libexec / name
        script.write_text(script.read_text().replace("/usr/lib/ocihook", f"{tree}/usr/lib/ocihook"))
    subprocess.run([libexec / "compile"], check=True)
    found = re.findall(r"'(/usr/bin/python[\d.]+)'", (libexec / "criu-action").read_text())
    return libexec / "criu-action", next(path for path in found if Path(path).exists())


@contextlib.contextmanager
def _agent_that_agrees() -> Iterator[None]:
    """Listen where the agent does, in a /run of our own, and let every stage pass at once."""
    Path(wire.RUNTIME_DIR).mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{wire.RUNTIME_DIR}/{wire.SOCKET_NAME}")
        listener.listen()
        pid = os.fork()
        if pid == 0:
            while True:
                connection, _ = listener.accept()
                wire.Request.decode(connection.recv(wire.PACKET_BYTES))
                connection.send(wire.encode_verdict(0, ""))
                connection.close()
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def unhandled_stage_ms(script: Path) -> float:
    """Return the milliseconds that a stage costs for which the hook has nothing to do."""
    environment = {"CRTOOLS_SCRIPT_ACTION": "network-lock"}
    return statistics.median(_spawn_ms([str(script)], environment) for _ in range(HOOK_RUNS))


def handled_stage_ratio(script: Path, python: str = sys.executable) -> float:
    """Return how many times a bare `python -IS` a handled stage takes with an agent that answers at once."""
    environment = {"CRTOOLS_SCRIPT_ACTION": "pre-dump", "CRTOOLS_IMAGE_DIR": "/tmp", "CRTOOLS_INIT_PID": "1"}
    _spawn_ms([str(script)], environment)  # compiles the hook, once
    ratios = []
    for _ in range(HOOK_RUNS):
        bare = _spawn_ms([python, "-IS", "-c", "pass"], {})
        ratios.append(_spawn_ms([str(script)], environment) / bare)
    return statistics.median(ratios)


def _spawn_ms(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, environment)
    _, status = os.waitpid(pid, 0)
    elapsed = time.perf_counter() - start
    if status != 0:
        raise SystemExit(f"bench: {command[0]} failed")
    return elapsed * 1000


if __name__ == "__main__":
    sys.exit(main())
