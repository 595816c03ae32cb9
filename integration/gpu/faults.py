"""Injects the main faults into dumps and restores of a GPU container on a real node: the job always continues.

    faults.py RESULTS_DIR [PROGRAM:SIZE [FAULT...]]     as run.py, which prepares the node for it; default hold:8, all

Each fault in a container of its own: it counts on with the memory it had, or its checkpoint is restored and does.
Written to faults.json: what was injected, what was reported, how long the job was stopped, whether it continued.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.run import IMAGES, SESSIONS, WORK, Container, command, node_facts, prepare, set_up
from tests.damage import flip_bit

_WAIT_S = 60.0
_HOG = """
import torch
taken = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
input()
"""


def attempt(act: Callable[[], object]) -> str:
    """Return what went wrong, "" if nothing did."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


def while_memory_moves(container: Container, image_dir: Path, act: Callable[[], object]) -> str:
    """Dump a container that stays, and act when its GPU memory begins to move; return what the dump said."""
    with ThreadPoolExecutor(1) as pool:
        dump = pool.submit(attempt, lambda: container.dump(image_dir, leave_running=True))
        while not dump.done() and not list(image_dir.glob("ocihook-region-*.pack")):
            time.sleep(0.001)
        act()
        return dump.result(_WAIT_S)


def kill_criu() -> None:
    for path in (SESSIONS / "sessions").glob("*.json"):
        os.kill(int(path.name.split("-")[0]), signal.SIGKILL)


def kill_agent() -> None:
    """Kill the agent and all of its processes; the lock file that all of them hold shows which these are."""
    lock = (SESSIONS / "agent.lock").stat()
    for process in Path("/proc").glob("[0-9]*"):
        for fd in process.glob("fd/*"):
            try:
                if os.path.samestat(os.stat(fd), lock):
                    os.kill(int(process.name), signal.SIGKILL)
                    break
            except OSError:
                continue


def criu_killed(container: Container, image_dir: Path) -> str:
    return while_memory_moves(container, image_dir, kill_criu)


def agent_killed(container: Container, image_dir: Path) -> str:
    return while_memory_moves(container, image_dir, kill_agent) or "the dump succeeded with the next agent"


def somebody_refuses(container: Container, image_dir: Path) -> str:
    """Another action script refuses the dump when all is done, and CRIU gives it up."""
    script = WORK / "refuse"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    configuration = Path("/etc/criu/runc.conf")
    text = configuration.read_text()
    configuration.write_text(f"{text}action-script {script}\n")
    try:
        return attempt(lambda: container.dump(image_dir, leave_running=True))
    finally:
        configuration.write_text(text)


def no_room(container: Container, image_dir: Path) -> str:
    """A file system that is full before all memory is out."""
    command("mount", "-t", "tmpfs", "-o", "size=64m", "none", image_dir)
    try:
        return attempt(lambda: container.dump(image_dir, leave_running=True))
    finally:
        command("umount", "-l", image_dir)


def packs_damaged(container: Container, image_dir: Path) -> str:
    container.dump(image_dir, leave_running=False)
    pack = next(iter(sorted(image_dir.glob("ocihook-region-*.pack"))))
    middle = pack.stat().st_size // 2
    flip_bit(pack, middle)
    container.remove()
    said = attempt(lambda: container.restore(image_dir))
    flip_bit(pack, middle)
    container.remove()
    container.restore(image_dir)
    return said


def gpu_taken(container: Container, image_dir: Path) -> str:
    """Another process has nearly all of the GPU when the container is to be restored."""
    container.dump(image_dir, leave_running=False)
    container.remove()
    hog = subprocess.Popen([sys.executable, "-c", _HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hog.stdout is not None
    assert hog.stdout.readline() == "ready\n"
    said = attempt(lambda: container.restore(image_dir))
    hog.communicate("\n", timeout=_WAIT_S)
    container.remove()
    container.restore(image_dir)
    return said


def memory_limited(container: Container, image_dir: Path) -> str:
    """The container comes back with a limit of memory that holds a part of what it had, on the GPU or without it."""
    container.dump(image_dir, leave_running=False)
    container.remove()
    path = container.bundle / "config.json"
    as_it_was = path.read_text()
    config = json.loads(as_it_was)
    config["linux"]["resources"]["memory"] = {"limit": 1 << 30}
    path.write_text(json.dumps(config))
    said = attempt(lambda: container.restore(image_dir))
    container.remove()
    path.write_text(as_it_was)
    container.restore(image_dir)
    assert "memory limit leaves" in said, said
    return said


_ANNOTATIONS = {no_room: {"preflight": "warn"}}  # else it is refused before anything is tried
FAULTS = (criu_killed, agent_killed, somebody_refuses, no_room, packs_damaged, memory_limited, gpu_taken)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)  # before anything of this machine is changed
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    program, _, size = (sys.argv[2] if len(sys.argv) > 2 else "hold:8").partition(":")
    set_up()
    rows, facts = [], node_facts()
    wanted = [fault for fault in FAULTS if fault.__name__ in sys.argv[3:]]
    for fault in wanted or (FAULTS if program == "hold" else FAULTS[:-1]):
        container = prepare(fault.__name__.replace("_", "-"), program, size, [], 1, _ANNOTATIONS.get(fault, {}))
        image_dir = IMAGES / container.name
        image_dir.mkdir()
        row: dict[str, object] = {**facts, "fault": fault.__name__, "program": f"{program}:{size}"}
        try:
            container.start()
            row["said"] = fault(container, image_dir)[:800]
            first = len(container.lines)
            container.wait_for(10)
            counts = [count for _, count, _ in container.lines]
            same = len({checksum for _, _, checksum in container.lines}) == 1
            row["stood_still_s"] = max(b - a for (a, *_), (b, *_) in pairwise(container.lines))
            row["verified"] = same and counts[-1] > counts[first - 1] and bool(row["said"])
        except (OSError, RuntimeError, TimeoutError, AssertionError) as error:
            row |= {"verified": False, "error": str(error)[:2000]}
        finally:
            container.remove()
            shutil.rmtree(image_dir, ignore_errors=True)
        print(row, flush=True)
        rows.append(row)
        (results / "faults.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


if __name__ == "__main__":
    main()
