"""Times how long a program stands still in an inline dump with and without pre-copy, in turns, in a virtual machine.

Its kernel has soft-dirty bits that outlive the merging of mappings; being emulated, it tells ratios, not seconds. The
program writes nothing to its memory, so this is the most that pre-copy can gain.

    OCIHOOK_VM_ROOT=... python -m integration.vm.pre_copy_pause [MIB]
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from integration.namespace import wait_for
from integration.vm.machine import OCIHOOK, WAIT_S, Machine

_WORKLOAD = Path(__file__).parents[1] / "workload.c"
_ROUNDS = 3
_WAYS = {"with": "true", "without": "false"}


def _gaps(machine: Machine, way: str) -> list[int]:
    return list(map(int, re.findall(r"gap (\d+) ms", machine.run(f"cat /tmp/{way} 2>/dev/null || true"))))


def _start(machine: Machine, directory: Path, way: str) -> None:
    """Run the program in the node's own network, in a cgroup of its own."""
    subprocess.run(["runc", "spec", "--bundle", directory], check=True, timeout=60)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.unlink()
    config["process"] |= {"args": ["/workload", "beat", "/memory"], "terminal": False}
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
    config["root"]["path"] = "/tmp/rootfs"
    config["linux"]["cgroupsPath"] = f"/{way}"
    config["annotations"] = {"ocihook.io/pre-copy": _WAYS[way]}
    made = machine.put("config.json", json.dumps(config).encode())
    bundle = f"/tmp/bundle-{way}"  # where annotations are read in a dump, too
    machine.run(f"mkdir {bundle}; cp {made} {bundle}")
    machine.run(f"cd {bundle}; (runc run --detach {way} </dev/null 2>&1 | cat >/tmp/{way}) &")
    wait_for(f"{way} to run", lambda: bool(_gaps(machine, way)), WAIT_S)


class _Pause(NamedTuple):
    all_s: float  # as the program sees it: most of it CRIU, and programs that start, which emulation makes slow
    read_s: float  # of that, reading memory


def _dump(machine: Machine, way: str, number: int) -> _Pause:
    """Dump one, left running; return how long it stood still."""
    before = len(_gaps(machine, way))
    images = f"/tmp/images-{way}-{number}"
    machine.run(f"runc checkpoint --leave-running --image-path {images} --work-path {images}-log {way}")
    record = machine.last_session()
    seconds = {phase["name"]: phase["seconds"] for phase in record["phases"]}
    assert ("pre-copy" in seconds) == (way == "with"), machine.agent_log()
    wait_for("the pause to be seen", lambda: len(_gaps(machine, way)) > before, WAIT_S)
    machine.run(f"rm -r {images}")
    return _Pause(max(_gaps(machine, way)[before:]) / 1000, seconds["memory read"])


def main() -> None:
    """Print the median pauses, and the median of the rounds' ratios."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    with tempfile.TemporaryDirectory(prefix="ocihook-vm-") as made:
        directory = Path(made)
        machine = Machine(Path(os.environ["OCIHOOK_VM_ROOT"]) / "newer", directory)
        program = directory / "workload"
        subprocess.run(["gcc", "-O2", "-static", "-s", "-o", program, _WORKLOAD], check=True, timeout=120)
        machine.run(f"{OCIHOOK} install --track-memory; mkdir -p /tmp/rootfs/proc")
        machine.start_agent()
        put = machine.put("workload", program.read_bytes())
        machine.run(f"cp {put} /tmp/rootfs/workload; head -c {mib}M /dev/urandom >/tmp/rootfs/memory")
        for way in _WAYS:
            _start(machine, directory, way)
        rows = [{way: _dump(machine, way, number) for way in _WAYS} for number in range(_ROUNDS + 1)][1:]
        for name in _Pause._fields:
            seen = [{way: getattr(row[way], name) for way in _WAYS} for row in rows]
            medians = "  ".join(f"{way} {statistics.median(one[way] for one in seen):.2f}" for way in _WAYS)
            print(f"{name:6}  {medians}  ratio {statistics.median(one['with'] / one['without'] for one in seen):.2f}")
        machine.close()


if __name__ == "__main__":
    main()
