"""Times the runtime handler: what a call costs that is not about its containers, a stop, and a container made again."""

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from integration.runtime.engine import HandledPodman

RUNTIMES = ("runc", "crun")
_WORKLOAD = Path("integration/workload.c")
_CALLS = 41  # of each contender, some milliseconds each
_MADE = 9  # containers of each contender


class Handler(NamedTuple):
    """What the handler takes before one runtime, and what its peers take; containers hold 4 MiB."""

    runtime: str
    call_ratio: float  # CPU time of `state` of a container that is not ours, by the runtime's own
    create_ratio: float  # the same of `create`
    again_s: float  # `podman start` of a container that is made again, and goes on
    restore_s: float  # `podman container restore` on the same node, without the handler
    stop_s: float  # `podman stop` of a container that is checkpointed then
    checkpoint_s: float  # `podman container checkpoint` on the same node, without the handler


def handlers() -> list[Handler]:
    """Measure the handler before each runtime."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    workload = scratch / "workload"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", workload, _WORKLOAD], check=True)
    try:
        return [_measure(scratch / runtime, runtime, workload) for runtime in RUNTIMES]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure(scratch: Path, runtime: str, workload: Path) -> Handler:
    scratch.mkdir()
    node = HandledPodman(scratch, runtime, workload)
    try:
        bare = node.namespace.run("sh", "-c", f"command -v {runtime}").strip()
        call_ratio, create_ratio = _calls(node, bare, workload)
        middle = {name: statistics.median(values) for name, values in _containers(node).items()}
        return Handler(runtime, call_ratio, create_ratio, **middle)
    finally:
        node.close()


def _calls(node: HandledPodman, bare: str, workload: Path) -> tuple[float, float]:
    """Return what `state` and `create` take for a container without our annotations, by what the runtime takes."""
    bundle = node.scratch / "bundle"
    root = bundle / "rootfs"
    root.mkdir(parents=True)
    shutil.copy2(workload, root / "workload")
    node.namespace.run(bare, "spec", "--bundle", str(bundle))
    edit = 's|"sh"|"/workload", "1"|; s|"terminal": true|"terminal": false|'
    node.namespace.run("sed", "-i", edit, str(bundle / "config.json"))
    states: dict[str, list[float]] = {bare: [], node.runtime: []}
    creates: dict[str, list[float]] = {bare: [], node.runtime: []}
    for number in range(_CALLS + 1):  # the first is not counted
        for program, taken in states.items():
            create = _cpu_s(node, f'"{program}" create --bundle {bundle} bench </dev/null >/dev/null 2>&1')
            state = _cpu_s(node, f'"{program}" state bench >/dev/null')
            node.namespace.run(bare, "delete", "--force", "bench")
            if number:
                creates[program].append(create)
                taken.append(state)
    ours, theirs = node.runtime, bare
    return (
        statistics.median(states[ours]) / statistics.median(states[theirs]),
        statistics.median(creates[ours]) / statistics.median(creates[theirs]),
    )


def _cpu_s(node: HandledPodman, command: str) -> float:
    """Return the CPU time of a command of the shell, without what it takes to get into the namespace."""
    return float(node.namespace.run("python3", "-ISc", _COUNT, command))


_COUNT = """
import os, resource, subprocess, sys
subprocess.run(["sh", "-c", "exec " + sys.argv[1]], check=True, stdout=2)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime)
"""


def _containers(node: HandledPodman) -> dict[str, list[float]]:
    """Stop containers and make them again, in turns with podman's own checkpoint and restore on the same node."""
    seconds: dict[str, list[float]] = {"again_s": [], "restore_s": [], "stop_s": [], "checkpoint_s": []}
    wanted = {"checkpoint_on_stop": "true", "restore_from": "latest"}
    node.make("run", "job", **wanted)
    node.make("run", "other")
    for number in range(_MADE + 1):  # the first is not counted
        node.wait_to_count("job")
        node.wait_to_count("other")
        taken = {"stop_s": _took_s(lambda: node("stop", "job"))}
        node("rm", "job")
        node.make("create", "job", on_restore_error="fail", **wanted)
        taken["checkpoint_s"] = _took_s(lambda: node("container", "checkpoint", "other"))
        taken["again_s"] = _took_s(lambda: node("start", "job"))
        taken["restore_s"] = _took_s(lambda: node("container", "restore", "other"))
        if number:
            for name, values in seconds.items():
                values.append(taken[name])
    return seconds


def _took_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    for measured in handlers():
        print(measured)
