"""What this machine need not have: a kernel with soft-dirty bits, and cgroup2 with a memory limit (`make vm`)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cri.registry import program_layer
from integration.namespace import wait_for
from integration.vm.machine import Machine

pytestmark = pytest.mark.skipif("OCIHOOK_VM_ROOT" not in os.environ, reason="minutes of emulation: `make vm`")
MIB = 96
LIMIT = 192 << 20
NO_ROOM = 40 << 20
OCIHOOK = f"{sys.executable} -m ocihook"
PODMAN = (
    "podman --root /tmp/podman --runroot /run/podman-test --tmpdir /run/podman-test/tmp --storage-driver vfs"
    " --cgroup-manager cgroupfs --runtime /usr/sbin/runc"
)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    directory = Path(tempfile.mkdtemp(prefix="ocihook-vm-"))
    started = Machine(Path(os.environ["OCIHOOK_VM_ROOT"]), directory)
    yield started
    started.close()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def tracking(machine: Machine) -> Machine:
    """One whose CRIU tracks memory, with an agent: this machine is too slow for a hook to start one."""
    machine.run(f"{OCIHOOK} install --track-memory; grep -x track-mem /etc/criu/runc.conf")
    machine.run(
        f"({OCIHOOK} agent >/run/ocihook-agent.log 2>&1 &); until [ -S /run/ocihook/agent.sock ]; do sleep 0.2; done"
    )
    return machine


def config_of(directory: Path, limit_bytes: int) -> bytes:
    """Return a config.json in the node's own network, with a cgroup of its own."""
    path = directory / "config.json"
    path.unlink(missing_ok=True)
    subprocess.run(["runc", "spec", "--bundle", directory], check=True, timeout=60)
    config = json.loads(path.read_text())
    config["process"] |= {"args": ["/workload", str(MIB)], "terminal": False}
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
    config["linux"]["cgroupsPath"] = "/job"
    config["linux"]["resources"]["memory"] = {"limit": limit_bytes}
    return json.dumps(config).encode()


def counts(machine: Machine, name: str) -> list[tuple[int, str]]:
    text = machine.run(f"cat /tmp/{name} 2>/dev/null || true")
    return [(int(count), total) for count, total in re.findall(r"^count (\d+) checksum (\w+)", text, re.MULTILINE)]


def test_this_kernel_marks_what_is_written(machine: Machine) -> None:
    code = "from ocihook.linux import soft_dirty; print(soft_dirty.works())"
    assert machine.run(f"{sys.executable} -c '{code}'").strip() == "True"


def test_memory_is_tracked_dumped_and_restored_within_its_limit(
    tracking: Machine, workload: Path, tmp_path: Path
) -> None:
    machine = tracking
    program = machine.put("workload", workload.read_bytes())
    config = machine.put("config.json", config_of(tmp_path, LIMIT))
    machine.run(f"mkdir -p /tmp/b/rootfs/proc; cp {program} /tmp/b/rootfs/workload; cp {config} /tmp/b/config.json")
    machine.run("cd /tmp/b; (runc run --detach job </dev/null 2>&1 | cat >/tmp/first) &")
    wait_for("the workload to count", lambda: len(counts(machine, "first")) > 2)
    done = machine.run("runc checkpoint --image-path /tmp/images --work-path /tmp/log job && echo done", check=False)
    said = machine.run("tail -n 30 /tmp/log/dump.log; cat /run/ocihook-agent.log", check=False)
    assert "done" in done.split(), said
    before = counts(machine, "first")[-1]
    history = "/var/lib/ocihook/history/*.json"
    wait_for("the session to be over", lambda: bool(machine.run(f"cat {history}", check=False).startswith("{")))
    record = json.loads(machine.run(f"cat {history}"))
    read = sum(phase["bytes"] for phase in record["phases"] if phase["name"] == "merge")
    assert read >= MIB << 20, said
    assert "parent" not in machine.run("ls /tmp/images").split()

    # Where there is no room it is refused, or ended at its limit: it does not run.
    small = machine.put("config.json", config_of(tmp_path, NO_ROOM))
    machine.run(f"cp {small} /tmp/b/config.json")
    machine.run("cd /tmp/b; runc restore --detach --image-path /tmp/images --work-path /tmp/no job | cat", check=False)
    machine.run("runc delete --force job 2>&1 || true; ! pgrep -x workload")

    config = machine.put("config.json", config_of(tmp_path, LIMIT))
    machine.run(f"cp {config} /tmp/b/config.json")
    machine.run(
        "cd /tmp/b; (runc restore --detach --image-path /tmp/images --work-path /tmp/again job </dev/null 2>&1"
        " | cat >/tmp/second) &"
    )
    wait_for("it to count on", lambda: len(counts(machine, "second")) > 1)
    count, total = counts(machine, "second")[0]
    assert (count, total) == (before[0] + 1, before[1])
    assert int(machine.run("cat /sys/fs/cgroup/job/memory.max")) == LIMIT
    assert MIB << 19 <= int(machine.run("cat /sys/fs/cgroup/job/memory.current")) <= LIMIT  # some pages are all zero
    assert "oom_kill 0" in machine.run("cat /sys/fs/cgroup/job/memory.events")
    machine.run("runc delete --force job")


def test_an_earlier_dump_of_the_engine_stays_its_own(tracking: Machine, workload: Path) -> None:
    """podman's --pre-checkpoint and --with-previous: CRIU leaves out what it has dumped; nothing goes past it."""
    machine = tracking
    image = machine.put("image.tar", program_layer(workload))
    machine.run(f"{PODMAN} import {image} localhost/job")
    options = "--detach --name job --network host --pids-limit 0"
    machine.run(f"{PODMAN} run {options} localhost/job:latest /workload {MIB}")
    wait_for("the workload to count", lambda: len(podman_counts(machine)) > 2)
    checkpoint = f"{PODMAN} container checkpoint --compress none"
    machine.run(f"{checkpoint} --pre-checkpoint --export /tmp/first.tar job")
    there = len(podman_counts(machine))
    wait_for("it to count on", lambda: len(podman_counts(machine)) > there)
    machine.run(f"{checkpoint} --with-previous --export /tmp/second.tar job")
    before = podman_counts(machine)[-1]
    listed = machine.run("tar -tvf /tmp/second.tar")
    assert re.search(r" checkpoint/parent -> \.\./pre-checkpoint$", listed, re.MULTILINE)
    assert "ocihook-parent" not in listed
    wait_for("the session to be over", lambda: "No session is open." in machine.run(f"{OCIHOOK} recover", check=False))
    record = json.loads(machine.run("cat $(ls /var/lib/ocihook/history/*-*.json | tail -n 1)"))
    assert [phase["name"] for phase in record["phases"]] == ["pack"]
    assert 0 < record["facts"]["raw_bytes"] < MIB << 16, "CRIU has left out what it had"
    machine.run(f"{PODMAN} rm --force --time 0 job")
    machine.run(f"{PODMAN} container restore --import-previous /tmp/first.tar --import /tmp/second.tar")
    wait_for("it to count on", lambda: podman_counts(machine)[-1][0] > before[0] + 1)
    assert podman_counts(machine)[-1][1] == before[1]
    machine.run(f"{PODMAN} rm --force --time 0 job")


def podman_counts(machine: Machine) -> list[tuple[int, str]]:
    text = machine.run(f"{PODMAN} logs job")
    return [(int(count), total) for count, total in re.findall(r"^count (\d+) checksum (\w+)", text, re.MULTILINE)]
