"""Measures kinds of memory that GPU programs hold, and what many restores and kills leave; prints a table.

    memory_kinds.py RESULTS_DIR [CASE...]     as run.py, which prepares the node for it; default: all, 8 minutes

- `kills:50`: one checkpoint of 1 GiB on the GPU is restored and killed 50 times; the kernel's log of that time.
- `odd:64`, `odd:600`: pieces of GPU memory in sizes that are no multiples of 2 MiB, dumped and restored.
- `pool:4`: dumps of 4 programs in which 8 threads use a pool (cudaMallocAsync) that gives memory back to the driver;
  `kept:2`: of 2 whose pool keeps its memory. A dump may fail; each program must go on.
- `pinned:16`: 16 GiB of pinned memory that no packer makes smaller, restored 4 times, in turns with its pages mapped
  before the driver's part and without that.
- `store:24`, `store:64`: so many GiB of host memory into the store; seconds until it is complete, and a restore.
  Skipped where the node has less than 2.3 times as much memory.

With `c` as the first case the programs are cuda_workload.c's and workload.c's, to try this script without torch: each
number of GiB is one of MiB then. Written to memory-kinds.json after each case.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.faults import kill_agent
from integration.gpu.host_memory import Job, memory_gib
from integration.gpu.run import (
    IMAGES,
    PROJECT,
    SESSIONS,
    WORK,
    Container,
    command,
    configure,
    last_session,
    node_facts,
    ocihook,
    phases,
    run_case,
    set_up,
    warm,
)

ALL = ("kills:50", "odd:64", "odd:600", "pool:4", "kept:2", "pinned:16", "store:24", "store:64")
Row = dict[str, Any]
_MEMORY_SHARE = 2.3  # of a container in a store on a tmpfs: its memory, the store, and some more
_SHOWN_LINES = 12
_SHOWN = 300  # characters of an error
_STARTS_S = 30.0
_IS_STAND_IN = sys.argv[2:3] == ["c"]


def container(name: str, program: str, size: str, *words: str) -> Container:
    """Return a container with one GPU."""
    line = [sys.executable, str(PROJECT / "integration/gpu/programs.py"), program, size]
    if _IS_STAND_IN:
        line = ["/tmp/ocihook-cuda/cuda_workload", size, *words]
    return Container(name, line, [0], {})


@contextlib.contextmanager
def images(name: str) -> Iterator[Path]:
    """Have a directory for a checkpoint."""
    directory = IMAGES / name / "images"
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory.parent, ignore_errors=True)


def kills(times: str) -> Row:
    """Restore and kill a container again and again."""
    held, before = container("kills", "hold", "1"), kernel_log()
    seconds, sums = [], set()
    with images("kills") as directory:
        try:
            held.start(3)
            held.dump(directory, leave_running=False)
            held.remove()
            for _ in range(int(times)):
                seconds.append(held.restore(directory))
                held.wait_for(2)
                command("runc", "kill", held.name, "KILL", capture_output=True)
                held.remove()
            sums = {checksum for _, _, checksum in held.lines}
        finally:
            held.remove()
    new = kernel_log()[len(before) :]
    kinds = Counter(re.sub(r"0x[0-9a-f]+|\d+", "N", line) for line in new)
    xids = [line for line in new if "Xid" in line]
    return {
        "verified": len(seconds) == int(times) and len(sums) == 1 and not xids,
        "restore_s": median(seconds),
        "kernel_lines": len(new),
        "xids": xids,
        "kernel_log": [f"{count} x {line}" for line, count in kinds.most_common(_SHOWN_LINES)],
    }


def kernel_log() -> list[str]:
    """Return the kernel's log without times."""
    lines = command("dmesg", capture_output=True).stdout.splitlines()
    return [re.sub(r"^\[[\d. ]+\] ", "", line) for line in lines]


def odd(pieces: str) -> Row:
    """Dump and restore odd pieces."""
    row = run_case(f"c:{pieces}" if _IS_STAND_IN else f"odd:{pieces}", int(pieces))
    return {key: row[key] for key in ("verified", "dump_s", "restore_s", "vram_bytes")}


def pools(count: str, *, keeps: bool) -> Row:
    """Dump programs with a pool at work; the driver takes no other checkpoint of one that has failed."""
    outcomes = Counter(_pool(number, keeps=keeps) for number in range(int(count)))
    return {"verified": all(outcome.endswith("goes on") for outcome in outcomes), "outcomes": outcomes}


def _pool(number: int, *, keeps: bool) -> str:
    """Return how a dump ended, and what became of the program."""
    size = "8" if _IS_STAND_IN else "64" if keeps else "0"
    one = container(f"pool{number}", "pool", size, "pool=kept" if keeps else "pool")
    with images("pool") as directory:
        try:
            one.start(5)
            how = "dumped"
            try:
                one.dump(directory, leave_running=True)
            except RuntimeError as error:
                found = re.findall(r"NOT_SUPPORTED|CUDA_ERROR_\w+", str(error))
                how = found[0] if found else str(error)[-_SHOWN:]
            one.wait_for(10)
            sums = {checksum for _, _, checksum in one.lines}
            return f"{how}, goes on" if len(sums) == 1 else f"{how}, other memory"
        except TimeoutError as error:
            return f"stands still: {error}"
        finally:
            one.remove()


def pinned(gib: str) -> Row:
    """Restore pinned memory with and without its pages mapped before."""
    held, sums = container("pinned", "pinned", gib), set()
    found: dict[str, list[Row]] = {"mapped": [], "not mapped": []}
    with images("pinned") as directory:
        try:
            held.start(2)
            dump_s = held.dump(directory, leave_running=False)
            held.remove()
            for turn in range(4):
                way = "not mapped" if turn in (1, 2) else "mapped"
                with unmapping_agent() if way == "not mapped" else contextlib.nullcontext():
                    restore_s = held.restore(directory)
                    held.wait_for(1)
                    session = last_session("post-resume", held.name)
                found[way].append({"restore_s": restore_s, "phases": phases(session), "spans": _spans(session)})
                command("runc", "kill", held.name, "KILL", capture_output=True)
                held.remove()
            sums = {checksum for _, _, checksum in held.lines}
        finally:
            held.remove()
    driver = {f"{way}_s": [turn["phases"].get("gpu resume") for turn in turns] for way, turns in found.items()}
    return {"verified": len(sums) == 1, "dump_s": dump_s, **driver, "turns": found}


def _spans(session: Row) -> list[Row]:
    return [span for phase in session["phases"] if phase["name"] == "gpu resume" for span in phase.get("spans", ())]


@contextlib.contextmanager
def unmapping_agent() -> Iterator[None]:
    """Have an agent that leaves pinned memory to the driver, as it is."""
    kill_agent()
    agent = subprocess.Popen([sys.executable, __file__, "--agent"], cwd=PROJECT)
    try:
        deadline = time.monotonic() + _STARTS_S
        while not _listens(agent.pid):
            assert time.monotonic() < deadline, "the agent does not start"
            time.sleep(0.05)
        yield
    finally:
        agent.kill()
        agent.wait()


def _listens(pid: int) -> bool:
    """Return whether the socket that clients find is a process's."""
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {words[6] for words in listed if words[-1] == str(SESSIONS / "agent.sock") and words[3] == "00010000"}
    links = (Path(f"/proc/{pid}/fd").iterdir()) if inodes else ()
    return any(str(link.readlink()) in {f"socket:[{inode}]" for inode in inodes} for link in links)


def be_unmapping_agent() -> None:
    """Run it."""
    from ocihook.agent import server  # what it needs has been installed by now

    patch("ocihook.gpu.restore.populate").start()
    server.main()


def store(gib: str) -> Row:
    """Dump host memory into a store on a tmpfs, and restore it."""
    need = int(gib) * _MEMORY_SHARE
    if not _IS_STAND_IN:
        if memory_gib() < need:
            return {"verified": True, "skipped": f"needs {need:.0f} GiB of memory, the node has {memory_gib()}"}
        warm(int(need))
    (WORK / "store").mkdir(exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", "size=90%,huge=always", "tmpfs", WORK / "store")
    job = Job(int(gib), "c" if _IS_STAND_IN else "host", gib, "0")
    try:
        with images("store") as directory:
            dump = job.dump("store", directory)
            restored = job.restore("store", "direct", directory)
    finally:
        job.kill()
        ocihook("wait")
        command("umount", "--lazy", WORK / "store")  # the agent still merges its index
    return {
        "verified": restored["went_on"],
        "dump_s": dump["seconds"],
        "complete_after_s": dump["complete_after_s"],
        "restore_s": restored["seconds"],
        "dump_phases": dump["phases"],
        "restore_phases": restored["phases"],
    }


KINDS: dict[str, Callable[[str], Row]] = {
    "kills": kills,
    "odd": odd,
    "pool": lambda count: pools(count, keeps=False),
    "kept": lambda count: pools(count, keeps=True),
    "pinned": pinned,
    "store": store,
}


def main() -> None:
    """Run the cases; write and print each."""
    if sys.argv[1] == "--agent":
        be_unmapping_agent()
        return
    results, cases = Path(sys.argv[1]), sys.argv[2:]
    results.mkdir(exist_ok=True)
    set_up()
    rows: list[Row] = []
    for case in cases[_IS_STAND_IN:] or ALL:
        kind, _, size = case.partition(":")
        began = time.time()
        configure()
        try:
            row = KINDS[kind](size)
        except (OSError, RuntimeError, TimeoutError, AssertionError, subprocess.TimeoutExpired) as error:
            log = SESSIONS / "agent.log"
            row = {"verified": False, "error": str(error), "agent": log.read_text()[-1000:] if log.exists() else ""}
        rows.append({**node_facts(), "memory_gib": memory_gib(), "case": case, "took_s": time.time() - began, **row})
        (results / "memory-kinds.json").write_text(json.dumps(rows, indent=1) + "\n")
        shown = {key: value for key, value in row.items() if key not in {"turns", "dump_phases", "restore_phases"}}
        print(f"{case:>10} {time.time() - began:6.1f} s  {json.dumps(shown)}", flush=True)
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


if __name__ == "__main__":
    main()
