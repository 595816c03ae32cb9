"""What this machine need not have: a kernel with soft-dirty bits, and cgroup2 with a memory limit (`make vm`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration.cri.registry import program_layer
from integration.namespace import wait_for
from integration.vm.machine import Machine

pytestmark = pytest.mark.skipif("OCIHOOK_VM_ROOT" not in os.environ, reason="minutes of emulation: `make vm`")
MIB = 96
LIMIT = 192 << 20
NO_ROOM = 40 << 20
PODMAN = (
    "podman --root /tmp/podman --runroot /run/podman-test --tmpdir /run/podman-test/tmp --storage-driver vfs"
    " --cgroup-manager cgroupfs --runtime /usr/sbin/runc"
)
CHECKPOINT = f"{PODMAN} container checkpoint --compress none"


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
    wait_for("the workload to count", lambda: len(machine.counts("first")) > 2)
    done = machine.run("runc checkpoint --image-path /tmp/images --work-path /tmp/log job && echo done", check=False)
    said = machine.run("tail -n 30 /tmp/log/dump.log", check=False) + machine.agent_log()
    assert "done" in done.split(), said
    before = machine.counts("first")[-1]
    read = sum(phase["bytes"] for phase in machine.last_session()["phases"] if phase["name"] == "merge")
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
    wait_for("it to count on", lambda: len(machine.counts("second")) > 1)
    count, total = machine.counts("second")[0]
    assert (count, total) == (before[0] + 1, before[1])
    assert int(machine.run("cat /sys/fs/cgroup/job/memory.max")) == LIMIT
    assert MIB << 19 <= int(machine.run("cat /sys/fs/cgroup/job/memory.current")) <= LIMIT  # some pages are all zero
    assert "oom_kill 0" in machine.run("cat /sys/fs/cgroup/job/memory.events")
    machine.run("runc delete --force job")


def test_an_earlier_dump_of_the_engine_stays_its_own(tracking: Machine, workload: Path) -> None:
    """podman's --pre-checkpoint and --with-previous: CRIU leaves out what it has dumped; nothing goes past it."""
    machine = tracking
    make_earlier_dump(machine, workload)
    there = len(podman_counts(machine))
    wait_for("it to count on", lambda: len(podman_counts(machine)) > there)
    machine.run(f"{CHECKPOINT} --with-previous --export /tmp/second.tar job")
    before = podman_counts(machine)[-1]
    listed = machine.run("tar -tvf /tmp/second.tar")
    assert re.search(r" checkpoint/parent -> \.\./pre-checkpoint$", listed, re.MULTILINE)
    assert "ocihook-parent" not in listed
    record = machine.last_session()
    assert [phase["name"] for phase in record["phases"]] == ["preflight", "record tasks", "pack"]
    assert 0 < record["facts"]["raw_bytes"] < MIB << 16, "CRIU has left out what it had"
    assert_restored(machine, before)


@pytest.mark.parametrize("between", ["", "--with-previous"])
def test_pages_that_another_dump_has_marked_as_clean_are_not_missing(
    tracking: Machine, workload: Path, between: str
) -> None:
    """They are written between an earlier dump of the engine and another one, after which they are clean."""
    machine = tracking
    make_earlier_dump(machine, workload)
    earlier = podman_counts(machine)[-1][1]
    overwrite = Path(__file__).parents[1] / "overwrite.py"
    machine.run(f"{sys.executable} {overwrite} $({PODMAN} inspect --format '{{{{.State.Pid}}}}' job)")
    wait_for("it to have other memory", lambda: podman_counts(machine)[-1][1] != earlier)
    machine.run(f"{CHECKPOINT} --leave-running {between} --export /tmp/between.tar job; rm /tmp/between.tar")
    machine.run(f"{CHECKPOINT} --with-previous --export /tmp/second.tar job")
    before = podman_counts(machine)[-1]
    record = machine.last_session()
    assert "All of its memory is dumped" in record["stages"]["pre-dump"]["message"]
    assert record["facts"]["raw_bytes"] >= MIB << 20
    assert_restored(machine, before)


def make_earlier_dump(machine: Machine, workload: Path) -> None:
    """Run a container, and have podman make an earlier dump of it, /tmp/first.tar."""
    image = machine.put("image.tar", program_layer(workload))
    machine.run(f"{PODMAN} import {image} localhost/job")
    options = "--detach --name job --network host --pids-limit 0"
    machine.run(f"{PODMAN} run {options} localhost/job:latest /workload {MIB}")
    wait_for("the workload to count", lambda: len(podman_counts(machine)) > 2)
    machine.run(f"{CHECKPOINT} --pre-checkpoint --export /tmp/first.tar job")


def assert_restored(machine: Machine, before: tuple[int, str]) -> None:
    """Check that the container goes on from /tmp/second.tar, which was compared with that, and remove all."""
    machine.run(f"{PODMAN} rm --force --time 0 job")
    machine.run(f"{PODMAN} container restore --import-previous /tmp/first.tar --import /tmp/second.tar")
    wait_for("it to count on", lambda: podman_counts(machine)[-1][0] > before[0] + 1)
    assert podman_counts(machine)[-1][1] == before[1]
    machine.run(f"{PODMAN} rm --force --time 0 job; rm /tmp/first.tar /tmp/second.tar")


def podman_counts(machine: Machine) -> list[tuple[int, str]]:
    text = machine.run(f"{PODMAN} logs job")
    return [(int(count), total) for count, total in re.findall(r"^count (\d+) checksum (\w+)", text, re.MULTILINE)]
