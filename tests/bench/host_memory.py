"""Times restores whose host memory goes past CRIU in turns with CRIU's own path, on the same node."""

import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman
from tests.bench.store import repeat

_WORKLOAD = Path("integration/workload.c")
_SMALL_BYTES = 48 << 20  # of a process that is left to CRIU with either setting
_ROUNDS, _SMALL_ROUNDS = 3, 9
# Where the memory comes from, and what that takes: page images as CRIU wrote them go past it from 4 workers on.
_SOURCES = {"packs": "mode = 'inline'", "store": "mode = 'store'", "page images": "mode = 'off'"}
_WORKERS = 4


class Restores(NamedTuple):
    """Seconds of whole restores by podman, of one process: those past CRIU, and each with the next one through CRIU."""

    memory_bytes: int
    source: str
    direct_s: float
    criu_s: float
    ratio: float
    longer_s: float


def restores(dataset: Path, sizes: list[int]) -> list[Restores]:
    """Restore containers of several sizes, and a small one, from packs, the store and page images; medians."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    workload, memory = scratch / "workload", scratch / "memory"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", workload, _WORKLOAD], check=True)
    try:
        found = []
        for size in [_SMALL_BYTES, *sizes]:
            repeat(dataset, memory, size)
            for source, mode in _SOURCES.items():
                seconds = _restores(scratch / "node", workload, memory, mode)
                pairs = list(zip(seconds["direct"], seconds["criu"], strict=True))
                direct, criu = (statistics.median(seconds[way]) for way in ("direct", "criu"))
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                longer = statistics.median(ours - theirs for ours, theirs in pairs)
                found.append(Restores(size, source, direct, criu, ratio, longer))
        return found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _restores(scratch: Path, workload: Path, memory: Path, mode: str) -> dict[str, list[float]]:
    scratch.mkdir()
    node = Podman(scratch, "runc", workload)
    try:
        node.install()
        volume = f"--volume={memory}:/memory:ro"
        node(
            "run",
            "--detach",
            "--name",
            "c",
            "--network",
            "host",
            "--pids-limit",
            "0",
            volume,
            IMAGE,
            "/workload",
            "/memory",
        )
        wait_for("the container to run", lambda: node.count("c")[0] > 0)
        seconds: dict[str, list[float]] = {"direct": [], "criu": []}
        for number in range((_SMALL_ROUNDS if memory.stat().st_size == _SMALL_BYTES else _ROUNDS) + 1):
            for way, taken in seconds.items():
                agent = f"idle_timeout_s = 5\nworkers = {_WORKERS}\nstore_dir = '{scratch}/podman/store'"
                node.configure(f"[agent]\n{agent}\n[policy]\nhost_memory = '{way}'\n{mode}\n")
                node("container", "checkpoint", "c")
                if "store" in mode:
                    node.ocihook("wait")
                began = time.perf_counter()
                node("container", "restore", "c")
                if number:  # the first is not counted
                    taken.append(time.perf_counter() - began)
        return seconds
    finally:
        node.close()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    for measured in restores(Path(".cache/bench/1073741824.img"), [1 << 30, 1 << 32]):
        print(measured, flush=True)
