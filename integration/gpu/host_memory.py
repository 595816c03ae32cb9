"""Dumps and restores a container with much host memory in every way there is, in turns, and prints what each took.

    host_memory.py RESULTS_DIR PROGRAM:GIB[:GPU_GIB][:always][:rounds=N]...     as run.py, which prepares the node

PROGRAM is `host`, or `c` (a workload of so many MiB, to try this script where there is no torch). In each of three
rounds (or N) it is dumped by CRIU alone (mode `off`), into packs (`inline`) and into the store, and each of these is
restored twice, with `host_memory` `direct` and `criu`, which take turns in being first. Images, packs and the store are
on a tmpfs in huge pages; `always` is transparent_hugepage's setting, else `madvise`, where the memory is in pages of
4 KiB. Every restore must go on with the sum of each page that it had. Written to host-memory.json.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.run import (
    IMAGES,
    PROJECT,
    THP,
    WORK,
    Container,
    command,
    configure,
    last_session,
    node_facts,
    ocihook,
    phases,
    set_up,
    warm,
)

MODES = ("off", "inline", "store")
WAYS = ("direct", "criu")
_ROUNDS = "3"
_LINES = 2  # sums of all memory after each restore


class Job:
    """A container that is dumped and restored again and again, and counts on all the while."""

    def __init__(self, number: int, program: str, gib: str, gpu_gib: str) -> None:
        words = [sys.executable, str(PROJECT / "integration/gpu/programs.py"), "host", gib, gpu_gib]
        if program == "c":
            words = ["/tmp/ocihook-cuda/workload", gib]
        self.container = Container(f"memory{number}", words, [0] if float(gpu_gib) else [], {})
        self.container.start(_LINES)
        self.last = 0

    def dump(self, mode: str, image_dir: Path) -> dict[str, Any]:
        """Dump it; return what that took."""
        configure(mode=mode)
        shutil.rmtree(image_dir, ignore_errors=True)
        image_dir.parent.mkdir(parents=True, exist_ok=True)
        seconds = self.container.dump(image_dir, leave_running=False)
        began = time.time()
        ocihook("wait")
        session = last_session("pre-dump", self.container.name)
        self.last = self.container.lines[-1][1]
        self.container.remove()
        return {
            "act": "dump",
            "mode": mode,
            "seconds": seconds,
            "complete_after_s": time.time() - began,
            "phases": phases(session),
            "stored_bytes": sum(path.stat().st_size for path in image_dir.iterdir()),
        }

    def restore(self, mode: str, way: str, image_dir: Path) -> dict[str, Any]:
        """Restore it and look at its memory; return what that took."""
        configure(host_memory=way)
        first = len(self.container.lines)
        names = sorted(path.name for path in image_dir.iterdir())
        seconds = self.container.restore(image_dir)
        self.container.wait_for(_LINES)
        session = last_session("post-resume", self.container.name)
        lines = self.container.lines
        went_on = lines[first][1] == self.last + 1 and len({checksum for _, _, checksum in lines}) == 1
        return {
            "act": "restore",
            "mode": mode,
            "way": way,
            "seconds": seconds,
            "phases": phases(session),
            "went_on": went_on,
            "images_as_before": names == sorted(path.name for path in image_dir.iterdir()),
        }

    def kill(self) -> None:
        command("runc", "kill", self.container.name, "KILL", capture_output=True)
        time.sleep(0.5)
        self.container.remove()


def run_case(case: str, number: int) -> dict[str, Any]:
    """Run one case; return its row."""
    program, gib, *more = case.split(":")
    gpu_gib = next((word for word in more if word.isdigit()), "0")
    rounds = next((word.removeprefix("rounds=") for word in more if word.startswith("rounds=")), _ROUNDS)
    THP.write_text("always" if "always" in more else "madvise")
    image_dir = IMAGES / "memory" / "images"
    job = Job(number, program, gib, gpu_gib)
    acts: list[dict[str, Any]] = []
    try:
        for turn in range(int(rounds)):
            for mode in MODES:
                acts.append(job.dump(mode, image_dir))
                print(json.dumps(acts[-1]), flush=True)
                ways = WAYS if turn % 2 else WAYS[::-1]
                for way in ways:
                    acts.append(job.restore(mode, way, image_dir))
                    print(json.dumps(acts[-1]), flush=True)
                    if way != ways[-1]:
                        job.kill()
    except BaseException:
        print(job.container.output[-10:], flush=True)
        raise
    finally:
        job.kill()
        shutil.rmtree(image_dir, ignore_errors=True)
        shutil.rmtree(IMAGES / "store", ignore_errors=True)
    return {
        "case": case,
        "verified": all(act.get("went_on", True) for act in acts),
        "medians": medians(acts),
        "acts": acts,
    }


def medians(acts: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of the seconds of each act."""
    names = {" ".join(filter(None, (act["act"], act["mode"], act.get("way")))): act for act in acts}
    return {
        name: median(
            act["seconds"]
            for act in acts
            if (act["act"], act["mode"], act.get("way")) == (one["act"], one["mode"], one.get("way"))
        )
        for name, one in names.items()
    }


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    set_up()
    (WORK / "store").symlink_to(IMAGES / "store")
    (IMAGES / "store").mkdir()
    rows = []
    for number, case in enumerate(sys.argv[2:]):
        if case.startswith("host"):
            warm(64)
        try:
            row = run_case(case, number)
        except (OSError, RuntimeError, TimeoutError, AssertionError, subprocess.TimeoutExpired) as error:
            row = {"case": case, "verified": False, "error": str(error)}
            log = Path("/run/ocihook/agent.log")
            print(log.read_text()[-3000:] if log.exists() else "", flush=True)
        print(case, row.get("medians"), "verified" if row["verified"] else f"FAILED {row.get('error')}", flush=True)
        rows.append({**node_facts(), "memory_gib": memory_gib(), **row})
        (results / "host-memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


def memory_gib() -> int:
    """Return how much memory the node has."""
    return int(Path("/proc/meminfo").read_text().split()[1]) >> 20


if __name__ == "__main__":
    main()
