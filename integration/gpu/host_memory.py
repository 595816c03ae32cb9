"""Dumps and restores a container with much host memory in every way there is, in turns, and prints what each took.

    host_memory.py RESULTS_DIR PROGRAM:GIB[:GPU_GIB][:always][:rounds=N][:track]...  as run.py, which prepares the node

PROGRAM is `host`, or `c` (a workload of so many MiB, to try this script where there is no torch). In each of three
rounds (or N) it is dumped by CRIU alone (mode `off`), into packs (`inline`) and into the store, and each of these is
restored twice, with `host_memory` `direct` and `criu`, which take turns in being first. Images, packs and the store are
on a tmpfs in huge pages; `always` is transparent_hugepage's setting, else `madvise`, where the memory is in pages of
4 KiB. Every restore must go on with the sum of each page that it had. Written to host-memory.json.

With `track` it is left running, and dumped by CRIU alone, into packs and into the store as above, and then into both
again with its memory read past CRIU: CRIU and ocihook are made to believe that this kernel has soft-dirty bits
(integration/soft_dirty.py says why that is enough to measure; /run must be a tmpfs, else CRIU keeps no facts).
`stood_s` is how long the program stood still, as it has seen it itself, `without_gpu_s` how long it had no GPU. At the
end the last of these is restored; and it is dumped so once more, not left running, and restored.
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
    CRIU_CONF,
    IMAGES,
    PROJECT,
    SESSIONS,
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
from ocihook.linux.soft_dirty import note as note_soft_dirty

HAS_DIRTY_TRACK = 32  # byte of criu/include/kerndat.h's struct kerndat_s, in CRIU 3.17 to 4.2

MODES = ("off", "inline", "store")
_TRACKED = "track-mem\nprev-images-dir /\n"  # for CRIU
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
        self.last = 0  # number of its last sum before it was dumped; 0: it ran on

    def dump(
        self, mode: str, image_dir: Path, *, leave_running: bool = False, is_tracked: bool = False
    ) -> dict[str, Any]:
        """Dump it; return what that took."""
        configure(mode=mode)
        shutil.rmtree(image_dir, ignore_errors=True)
        image_dir.parent.mkdir(parents=True, exist_ok=True)
        said = len(self.container.output)
        criu_conf = CRIU_CONF.read_text()
        CRIU_CONF.write_text(criu_conf + (_TRACKED if is_tracked else ""))
        try:
            seconds = self.container.dump(image_dir, leave_running=leave_running)
        finally:
            CRIU_CONF.write_text(criu_conf)
        began = time.time()
        ocihook("wait")
        session = last_session("pre-dump", self.container.name)
        if leave_running:
            self.last = 0
            self.container.wait_for(_LINES)
        else:
            self.last = self.container.lines[-1][1]
            self.container.remove()
        stood = [float(line.split()[1]) for line in self.container.output[said:] if line.startswith("stood ")]
        return {
            "act": "dump",
            "mode": mode,
            **({"way": "tracked" if is_tracked else "criu", "stood_s": max(stood, default=0)} if leave_running else {}),
            "seconds": seconds,
            "complete_after_s": time.time() - began,
            "phases": phases(session),
            "criu_us": session["facts"].get("criu_statistics", {}),
            **without_gpu(session),
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
        # What ran on since its dump goes back to it.
        follows = lines[first][1] == self.last + 1 if self.last else lines[first][1] <= lines[first - 1][1]
        went_on = follows and len({checksum for _, _, checksum in lines}) == 1
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
    (IMAGES / "store").mkdir(exist_ok=True)
    job = Job(number, program, gib, gpu_gib)
    acts: list[dict[str, Any]] = []
    try:
        if "track" in more:
            acts += track(job, image_dir, int(rounds))
        for turn in range(0 if "track" in more else int(rounds)):
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


def track(job: Job, image_dir: Path, rounds: int) -> list[dict[str, Any]]:
    """Dump it with and without memory read past CRIU, in turns; and once more, to be restored."""
    seem_to_have_soft_dirty()
    acts = []
    for _ in range(rounds):
        for mode, is_tracked in (
            ("off", False),
            ("inline", False),
            ("inline", True),
            ("store", False),
            ("store", True),
        ):
            acts.append(job.dump(mode, image_dir, leave_running=True, is_tracked=is_tracked))
            print(json.dumps(acts[-1]), flush=True)
    job.kill()  # the last one was of what runs on; it goes back to that
    acts.append(job.restore("store", "direct", image_dir))
    acts.append({**job.dump("inline", image_dir, is_tracked=True), "way": "tracked, at its end"})
    acts.append(job.restore("inline", "direct", image_dir))
    print(json.dumps(acts[-3:]), flush=True)
    assert all("memory read" in act["phases"] for act in acts if "tracked" in act["way"])
    return acts


def seem_to_have_soft_dirty() -> None:
    """Have CRIU and ocihook rely on bits that this kernel need not have."""
    command("criu", "check", capture_output=True)
    (facts,) = (path for name in ("criu.kdat", "criu/criu.kdat") if (path := Path("/run", name)).exists())
    content = bytearray(facts.read_bytes())
    content[HAS_DIRTY_TRACK] = 1
    facts.write_bytes(content)
    SESSIONS.mkdir(mode=0o700, exist_ok=True)
    note_soft_dirty(SESSIONS, works=True)


def without_gpu(session: dict[str, Any]) -> dict[str, float]:
    """Return for how long processes that run on had no GPU: from the first lock to the end of the last resume."""
    began = {phase["name"]: phase["began"] for phase in session["phases"][::-1]}
    if "gpu resume" not in began:
        return {}
    ended = max(phase["began"] + phase["seconds"] for phase in session["phases"] if phase["name"] == "gpu resume")
    return {"without_gpu_s": round(ended - began["gpu lock"], 3)}


def medians(acts: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of the seconds of each act, and of those that the program stood still for."""
    found: dict[str, list[float]] = {}
    for act in acts:
        name = " ".join(filter(None, (act["act"], act["mode"], act.get("way"))))
        found.setdefault(name, []).append(act["seconds"])
        for figure in ("stood_s", "without_gpu_s"):
            if figure in act:
                found.setdefault(f"{name}: {figure}", []).append(act[figure])
    return {name: median(seconds) for name, seconds in found.items()}


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    set_up()
    (WORK / "store").symlink_to(IMAGES / "store")
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
