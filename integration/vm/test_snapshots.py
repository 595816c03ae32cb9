"""Snapshots and the runtime handler's dumps where the kernel has soft-dirty bits, huge pages and cgroup2's limits."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration.cri.registry import program_layer
from integration.namespace import wait_for
from integration.vm.machine import OCIHOOK, WAIT_S, Machine
from ocihook.node.install import render

pytestmark = pytest.mark.skipif("OCIHOOK_VM_ROOT" not in os.environ, reason="minutes of emulation: `make vm`")
MIB = 28  # of each of three mappings
READ_BYTES = (3 * MIB - 4) << 20  # at least: some of it was never touched, or is read another way
HUGE_PAGE = 2 << 20
ROOM_BYTES = 24 << 20  # for a snapshot's own needs, and less than the program writes to
WORKLOAD_MIB = 96
SITE = Path(__file__).parents[2]
CGROUP = "/sys/fs/cgroup/job"
PODMAN = (
    "podman --root /tmp/podman-handled --runroot /run/podman-handled --tmpdir /run/podman-handled/tmp"
    " --storage-driver overlay --cgroup-manager cgroupfs --runtime"
)


def make_bundle(machine: Machine, directory: Path, program: Path, *arguments: str, **annotations: str) -> None:
    """Make /tmp/snap: a container in the node's own network, in mode `store`, with a cgroup of its own."""
    remove(machine)  # that of a test that has failed
    subprocess.run(["runc", "spec", "--bundle", directory], check=True, timeout=60)
    config = json.loads((directory / "config.json").read_text())
    config["process"] |= {"args": ["/workload", *arguments], "terminal": False}
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
    config["linux"]["cgroupsPath"] = "/job"
    config["annotations"] = {"ocihook.io/mode": "store", **annotations}
    made = machine.put("config.json", json.dumps(config).encode())
    put = machine.put("workload", program.read_bytes())
    machine.run(
        f"rm -rf /tmp/snap; mkdir -p /tmp/snap/rootfs/proc; cp {put} /tmp/snap/rootfs/workload; cp {made} /tmp/snap/"
    )


def start(machine: Machine, output: str, verb: str = "run", options: str = "") -> list[tuple[int, str]]:
    """Run or restore it until it counts; return its counts.

    The runtime has ended then: one that has not may still make the container that `remove` no longer finds.
    """
    runtime = f"runc {verb} --detach {options} job </dev/null"
    machine.run(f"cd /tmp/snap; (({runtime}; touch /tmp/{output}-made) 2>&1 | cat >/tmp/{output}) &")
    counts = machine.wait_to_count(output)
    has_ended = f"test -e /tmp/{output}-made && echo yes || echo no"
    wait_for("the runtime to end", lambda: machine.run(has_ended).strip() == "yes", WAIT_S)
    return counts


def remove(machine: Machine) -> None:
    """Remove it; its processes take their time to end here, and only then its cgroup can go."""
    machine.run("while runc state job >/dev/null 2>&1; do runc delete --force job || sleep 0.2; done")


def dump(machine: Machine, name: str, options: str = "--leave-running") -> dict[str, Any]:
    """Checkpoint it into /tmp/snap/NAME; return the record of that."""
    where = f"--image-path /tmp/snap/{name} --work-path /tmp/snap/{name}-log"
    done = machine.run(f"runc checkpoint {where} {options} job && echo done", check=False)
    said = machine.run(f"tail -n 30 /tmp/snap/{name}-log/dump.log", check=False) + machine.agent_log()
    assert "done" in done.split(), done + said
    return machine.last_session()


def phases(record: dict[str, Any]) -> dict[str, int]:
    """Return how many bytes each phase has moved."""
    return {phase["name"]: phase["bytes"] for phase in record["phases"]}


def states(machine: Machine) -> list[str]:
    """Return the states of all checkpoints in the store, the oldest first."""
    return [row["state"] for row in json.loads(machine.run(f"{OCIHOOK} store list --json"))["checkpoints"]]


def test_a_container_with_huge_pages_goes_on_while_it_is_read(
    tracking: Machine, mappings: Path, tmp_path: Path
) -> None:
    """Then it is dumped once more, stopped, and its bits know what it has written since; both are restored."""
    machine = tracking
    machine.run("echo 4 >/proc/sys/vm/nr_hugepages")
    make_bundle(machine, tmp_path, mappings, str(MIB))
    start(machine, "huge")
    assert int(machine.run("cat /proc/sys/vm/nr_hugepages")) - int(free_huge_pages(machine)) == 1, "the program has one"
    record = dump(machine, "first")
    before = machine.counts("huge")[-1]
    assert machine.wait_to_count("huge")[-1] > before
    assert {entry["status"] for entry in record["stages"].values()} == {0}
    found = phases(record)
    assert found["snapshot read"] > READ_BYTES
    assert HUGE_PAGE <= found["memory read"] < 16 << 20, "what forks do not have"
    record = dump(machine, "second", "")
    last = machine.counts("huge")[-1]
    assert phases(record)["memory read"] > READ_BYTES
    machine.run(f"{OCIHOOK} wait")
    assert states(machine) == ["complete", "complete"]
    remove(machine)
    for name, least in (("first", 1), ("second", last[0] + 1)):
        options = f"--image-path /tmp/snap/{name} --work-path /tmp/snap/{name}-again"
        counts = start(machine, f"{name}-restored", "restore", options)
        assert counts[0][0] >= least
        assert {word for _, word in counts} == {last[1]}
        remove(machine)
    machine.run("echo 0 >/proc/sys/vm/nr_hugepages")


def free_huge_pages(machine: Machine) -> int:
    (number,) = re.findall(r"^HugePages_Free:\s+(\d+)$", machine.run("cat /proc/meminfo"), re.MULTILINE)
    return int(number)


def test_no_room_within_its_limit(tracking: Machine, workload: Path, tmp_path: Path) -> None:
    """It is read while it stands still."""
    machine = tracking
    make_bundle(machine, tmp_path, workload, str(WORKLOAD_MIB))
    start(machine, "limited")
    cache = f"$(sed -n 's/^inactive_file //p' {CGROUP}/memory.stat)"  # which is room
    machine.run(f"echo $(($(cat {CGROUP}/memory.current) - {cache} + (4 << 20))) >{CGROUP}/memory.max")
    record = dump(machine, "limited-images")
    assert {"fork", "snapshot read"}.isdisjoint(phases(record))
    assert phases(record)["memory read"] > WORKLOAD_MIB << 20
    assert "may write meanwhile, and its memory limit leaves it" in machine.agent_log()
    assert len({word for _, word in machine.wait_to_count("limited")}) == 1
    assert re.search(r"^oom_kill 0$", machine.run(f"cat {CGROUP}/memory.events"), re.MULTILINE)
    machine.run(f"{OCIHOOK} wait")
    assert states(machine)[-1] == "complete"
    remove(machine)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_the_handler_dumps_past_criu_with_nothing_in_the_configuration(
    untracked: Machine, workload: Path, runtime: str
) -> None:
    machine = untracked
    program = machine.run(f"command -v {runtime}").strip()
    template = (SITE / "ocihook/hook/handler").read_text()
    machine.put(f"ocihook-{runtime}", render(template, "Test", SITE).replace("@RUNTIME@", program).encode())
    handler = f"/run/handler/ocihook-{runtime}"
    machine.run(f"mkdir -p /run/handler; cp /run/share/ocihook-{runtime} {handler}; chmod 755 {handler}")
    podman = f"{PODMAN} {handler}"
    image = machine.put("image.tar", program_layer(workload))
    machine.run(f"{podman} import {image} localhost/job")
    notes = "--annotation ocihook.io/checkpoint-on-stop=true --annotation ocihook.io/restore-from=latest"
    options = f"--detach --name {runtime} --network host --pids-limit 0 --stop-timeout 600 {notes}"
    run = f"{podman} run {options} localhost/job:latest /workload {WORKLOAD_MIB}"

    def counts() -> list[tuple[int, str]]:
        text = machine.run(f"{podman} logs {runtime}")
        return [(int(n), total) for n, total in re.findall(r"^count (\d+) checksum (\w+)", text, re.MULTILINE)]

    machine.run(run)
    wait_for("the workload to count", lambda: len(counts()) > 2, WAIT_S)
    machine.run(f"{podman} stop {runtime}")
    last = counts()[-1]
    machine.run(f"{podman} rm {runtime}")
    record = machine.last_session()
    assert record["container"]["runtime"] == runtime
    assert phases(record)["memory read"] > WORKLOAD_MIB << 20
    machine.run("! grep track-mem /etc/criu/*.conf")
    machine.run(run)
    wait_for("it to count on", lambda: len(counts()) > 1, WAIT_S)
    assert counts()[0] == (last[0] + 1, last[1])
    machine.run(f"{podman} rm --force --time 0 {runtime}")


def test_its_limit_is_hit_while_its_snapshot_is_read(tracking: Machine, mappings: Path, tmp_path: Path) -> None:
    """With memory.oom.group, as kubelets set it: the kernel ends the forks, and the job itself goes on."""
    machine = tracking
    make_bundle(machine, tmp_path, mappings, str(MIB))
    start(machine, "full")
    room = f"$(($(cat {CGROUP}/memory.current) + ({ROOM_BYTES})))"
    machine.run(f"echo {room} >{CGROUP}/memory.max; echo 1 >{CGROUP}/memory.oom.group")
    machine.run("rm -f /run/ocihook/held /run/ocihook/go")
    machine.start_agent(str(SITE / "integration/snapshot_agent.py"))
    where = "--image-path /tmp/snap/full-images --work-path /tmp/snap/full-log"
    machine.run(f"runc checkpoint {where} --leave-running job")
    wait_for(
        "its forks to be ended", lambda: kills(machine) > 0, WAIT_S
    )  # before they are read, or before all of them is
    machine.run("touch /run/ocihook/go")
    record = machine.last_session()
    assert (record["outcome"], record["error_code"]) == ("failed", "snapshot-lost")
    assert states(machine)[-1] == "lost"
    assert len({word for _, word in machine.wait_to_count("full")}) == 1
    assert machine.run(f"cat {CGROUP}/memory.oom.group").strip() == "1"
    remove(machine)
    machine.start_agent()


def kills(machine: Machine) -> int:
    """Return how many processes the kernel has ended for the container's limit."""
    (number,) = re.findall(r"^oom_kill (\d+)$", machine.run(f"cat {CGROUP}/memory.events"), re.MULTILINE)
    return int(number)
