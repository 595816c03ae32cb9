"""Dumps two GPU containers with connections between them, moves both to new addresses, and checks that all continue.

    connections.py RESULTS_DIR CASE...     as run.py, which prepares the node for it

Each container is in a network namespace of its own, on a bridge. `peers:GIB` holds so much memory on one GPU in each,
beside traffic in both directions of which every byte is known; `ddp:BACKEND` trains with torch, one rank a container,
over `gloo` (all on one GPU) or `nccl` (a GPU each), and compares each loss with those of a run without interruption;
`c:MIB` is `peers` with cuda_workload.c, to try this script where there is no torch. In every case both are dumped left
running, dumped, restored in new namespaces at other addresses, and that once more. Options, each after a colon: `gang`
(both are members of one; else they are dumped at about the same time, and restored by an address map), `busy` (no
pause between steps of a training: it is always in a collective), `ranks=N` (a training in so many containers), `on=N`
(which share so many GPUs). Written to connections.json.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.run import (
    CARRIED,
    IMAGES,
    PROJECT,
    WORK,
    Container,
    command,
    configure,
    last_session,
    node_facts,
    phases,
    set_up,
    value,
)
from integration.net.engine import BRIDGE, Place
from integration.net.pair import endpoints
from integration.net.traffic import assert_flows, progress

NAMES = ("server", "client", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
Line = tuple[float, int, str]  # when it was said, number, checksum
STEPS = 1_000_000  # more than any training makes here
_MOVES = 2
_RATE = "8"  # MB/s of each connection, each way
PAUSE_S = 0.02  # between two steps
_LOSS_LINES = 60  # between one act and the next


def ip(*words: str) -> None:
    done = command("ip", *words, capture_output=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def make_places(net: int, names: Sequence[str]) -> dict[str, Place]:
    """Make namespaces, with addresses of that net, which are not reachable before `plug`."""
    places = {name: Place.of(net, host) for host, name in enumerate(names, 1)}
    for name, place in places.items():
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"v-{name}", "netns", BRIDGE)
        ip("-n", BRIDGE, "link", "set", f"v-{name}", "master", "br0", "down")
        ip("-n", name, "addr", "add", f"{place.four}/16", "dev", "eth0")
        ip("-n", name, "addr", "add", f"{place.six}/64", "dev", "eth0", "nodad")
        ip("-n", name, "link", "set", "eth0", "up")
    return places


def plug(names: Iterable[str]) -> None:
    for name in names:
        ip("-n", BRIDGE, "link", "set", f"v-{name}", "up")


def remove_places() -> None:
    for name in NAMES:
        command("ip", "-n", BRIDGE, "link", "delete", f"v-{name}", capture_output=True)
        command("ip", "netns", "delete", name, capture_output=True)


class Job:
    """Containers that have connections with each other."""

    def __init__(
        self, programs: dict[str, list[str]], gpus: Sequence[int], places: dict[str, Place], *, is_gang: bool = False
    ) -> None:
        self.names, self.places, self.is_gang = tuple(places), places, is_gang
        notes = {"gang": "job", "gang-size": str(len(places))} if is_gang else {}
        self.containers = {
            name: Container(name, programs[name], [gpu], notes, network=name)
            for name, gpu in zip(places, gpus, strict=True)
        }
        self.heard = dict.fromkeys(places, 0)  # lines of output that were said before the last restore
        plug(places)
        self.each(lambda name: self.containers[name].start())

    def each(self, call: Callable[[str], Any]) -> dict[str, Any]:
        """Call something for all at once."""
        with ThreadPoolExecutor(len(self.names)) as pool:
            return dict(zip(self.names, pool.map(call, self.names), strict=True))

    def said(self, name: str) -> str:
        return "\n".join(self.containers[name].output[self.heard[name] :])

    def wait_for(self, lines: int) -> None:
        self.each(lambda name: self.containers[name].wait_for(lines))

    def dump(self, *, leave_running: bool) -> dict[str, float]:
        """Dump all at once; return the seconds that each took."""
        return self.each(
            lambda name: self.containers[name].dump(IMAGES / "job" / name / "images", leave_running=leave_running)
        )

    def forget_images(self) -> None:
        for name in self.names:
            directory = IMAGES / "job" / name
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)

    def move(self, net: int) -> None:
        """Destroy all namespaces and recreate them at other addresses."""
        old = self.places
        remove_places()
        self.places = make_places(net, self.names)
        moved = [f"{a}={b}" for name in self.names for a, b in zip(old[name], self.places[name], strict=True)]
        if not self.is_gang:  # whose members exchange their addresses
            configure(address_map=",".join(moved))

    def restore(self, gpus: Sequence[int]) -> dict[str, float]:
        """Restore all at once, then plug all in; return the seconds that each took."""
        for name, gpu in zip(self.names, gpus, strict=True):
            self.containers[name].remove()
            self.containers[name].configure([gpu])
            self.heard[name] = len(self.containers[name].output)
        seconds = self.each(lambda name: self.containers[name].restore(IMAGES / "job" / name / "images"))
        plug(self.names)
        return seconds

    def remove(self) -> None:
        for container in self.containers.values():
            container.remove()
        remove_places()


def gap_s(container: Container, first: int) -> float:
    """Return the longest time between two lines from one on."""
    times = [line[0] for line in container.lines[max(0, first - 1) :]]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def silence_s(said: str) -> float:
    """Return the longest time in which a peer heard nothing."""
    return max((int(ms) / 1000 for ms in re.findall(r"silent (\d+) ms", said)), default=0.0)


def programs_of(program: str, size: str, places: dict[str, Place], *, is_busy: bool = False) -> dict[str, list[str]]:
    """Return what runs in each container."""
    ours = [sys.executable, str(PROJECT / "integration/gpu/programs.py")]
    if program == "ddp":
        rest = [str(0 if is_busy else PAUSE_S), str(len(places))]
        return {
            name: [*ours, "ddp", str(STEPS), size, str(rank), places["server"].four, *rest]
            for rank, name in enumerate(places)
        }
    words = endpoints(places["server"])
    holds = "/tmp/ocihook-cuda/cuda_workload"
    if program == "peers":
        holds = str(WORK / "hold")
        Path(holds).write_text(f'#!/bin/sh\nexec {" ".join(ours)} hold "$1"\n')
        Path(holds).chmod(0o755)
    beside = [str(WORK / "peer"), "beside", holds, size]
    return {
        "server": [*beside, "server", *words["server"]],
        "client": [*beside, "client", "-r", _RATE, *words["client"]],
    }


def check_flows(job: Job, program: str) -> None:
    """Wait until all continue; nothing may have been lost or doubled."""
    if program == "ddp":
        job.wait_for(_LOSS_LINES)
        return
    job.wait_for(5)
    assert_flows({name: lambda name=name: job.said(name) for name in job.names})  # type: ignore[misc]


def run_case(case: str) -> dict[str, Any]:
    """Run one case; return its row."""
    program, size, *options = case.split(":")
    ranks = value(options, "ranks") or 2
    shared = value(options, "on") or (ranks if size == "nccl" else 1)
    gpus = [rank % shared for rank in range(ranks)]
    is_busy = "busy" in options
    configure()
    places = make_places(0, NAMES[:ranks])
    job = Job(programs_of(program, size, places, is_busy=is_busy), gpus, places, is_gang="gang" in options)
    row: dict[str, Any] = {"case": case, "gpus": len(set(gpus)), "moves": []}
    try:
        check_flows(job, program)
        for number in range(1, _MOVES + 1):
            move: dict[str, Any] = {}
            job.forget_images()
            firsts = {name: len(container.lines) for name, container in job.containers.items()}
            spoken = {name: len(job.said(name)) for name in job.names}
            move["left_running_dump_s"] = job.dump(leave_running=True)
            check_flows(job, program)
            move["left_running_gap_s"] = {name: gap_s(c, firsts[name]) for name, c in job.containers.items()}
            move["left_running_silent_s"] = {name: silence_s(job.said(name)[spoken[name] :]) for name in job.names}
            move["left_running_phases"] = {name: phases(last_session("pre-dump", name)) for name in job.names}
            job.forget_images()
            move["dump_s"] = job.dump(leave_running=False)
            if program != "ddp":
                move["bytes"] = {name: sum(map(sum, progress(job.said(name)).values())) for name in job.names}
            job.move(number)
            move["restore_s"] = job.restore(gpus)
            check_flows(job, program)
            move["restore_phases"] = {name: phases(last_session("post-resume", name)) for name in job.names}
            row["moves"].append(move)
            print(json.dumps(move), flush=True)
        row["lines"] = {name: len(container.lines) for name, container in job.containers.items()}
        found = {name: container.lines[: row["lines"][name]] for name, container in job.containers.items()}
    except BaseException:
        print({name: job.containers[name].output[-80:] for name in job.names}, flush=True)
        raise
    finally:
        job.remove()
    expected = reference(size, gpus, row["lines"]) if program == "ddp" else {}
    row["verified"] = verify(found, expected)
    return row


def verify(found: Mapping[str, Sequence[Line]], expected: Mapping[str, Sequence[str]]) -> bool:
    """Return whether each continued one by one, with the memory it had or the losses that it should have."""
    for name, lines in found.items():
        counts = [count for _, count, _ in lines]
        if counts != list(range(counts[0], counts[0] + len(counts))):
            return False
        checksums = [checksum for _, _, checksum in lines]
        if (checksums != expected[name][: len(checksums)]) if expected else len(set(checksums)) != 1:
            return False
    return True


def reference(backend: str, gpus: Sequence[int], lines: Mapping[str, int]) -> dict[str, list[str]]:
    """Return so many losses of all ranks, from a training without any interruption or pause."""
    places = make_places(0, tuple(lines))
    job = Job(programs_of("ddp", backend, places, is_busy=True), gpus, places)
    try:
        job.each(lambda name: job.containers[name].wait_for(max(0, lines[name] - len(job.containers[name].lines))))
        return {name: [loss for _, _, loss in container.lines] for name, container in job.containers.items()}
    finally:
        job.remove()


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    set_up(has_networks=True)
    shutil.copy(CARRIED / "bin/peer", WORK / "peer")
    for name in NAMES:  # of an earlier run, all of these
        command("runc", "delete", "-f", name, capture_output=True)
    remove_places()
    command("ip", "netns", "delete", BRIDGE, capture_output=True)
    ip("netns", "add", BRIDGE)
    ip("-n", BRIDGE, "link", "add", "br0", "type", "bridge")
    ip("-n", BRIDGE, "link", "set", "br0", "up")
    rows = []
    for case in sys.argv[2:]:
        try:
            row = run_case(case)
        except (OSError, RuntimeError, TimeoutError, AssertionError) as error:
            row = {"case": case, "verified": False, "error": str(error)}
        print(case, "verified" if row["verified"] else f"FAILED {row.get('error', '')}", flush=True)
        rows.append({**node_facts(), **row})
        (results / "connections.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


if __name__ == "__main__":
    main()
