"""What goes wrong with GPUs: afterwards the job runs with its GPU state, or its checkpoint is complete and verifies."""

import contextlib
import json
import os
import re
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration import fake_driver
from integration.journals import last_session, sessions
from integration.namespace import CommandError, wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman, assert_packed
from integration.podman.test_faults import (
    damage,
    end_agent,
    end_dying_agent,
    kill_at_any_step,
    start_agent,
    start_dying_agent,
)
from integration.soft_dirty import track_memory
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants, parent_pid

DRIVER_CALL = Path(__file__).parents[1] / "gpu/driver_contract.py"
KILLING_AGENT = Path(__file__).parents[1] / "killing_agent.py"
NO_SECCOMP = ("--security-opt=seccomp=unconfined",)


def refused(podman: Podman, name: str = "c", *options: str) -> str:
    """Try to checkpoint; check that it is refused and that the container has lost nothing; return why."""
    before = podman.count(name)
    podman.checkpoint(name, podman.scratch / "refused.tar", "--leave-running", *options, check=False)
    session = last_session(podman.namespace, "pre-dump")
    podman.assert_goes_on(name, before)
    assert session["effects"] == []
    verdict = session["stages"]["pre-dump"]
    assert verdict["status"] == 1
    assert "the container runs on" in verdict["message"]
    assert not list(podman.namespace.path("/run/ocihook/sessions").iterdir())
    return str(verdict["message"])


def processes(podman: Podman) -> list[int]:
    """Return the pids of the container's processes, its init first."""
    return descendants(int(podman("inspect", "--format", "{{.State.Pid}}", "c")))


def locked_children(podman: Podman) -> list[str]:
    """Return what each process of the workload printed last, twice, to see that all are working."""
    return re.findall(r"^child (\d+) count \d+ checksum \w+$", podman("logs", "c"), re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["nccl"], (), "NCCL communicator.*start the container with NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0"),
        (["fork"], (), "of NVIDIA's device files without a CUDA context of its own.*'spawn'"),
        (["uring"], NO_SECCOMP, "uses io_uring, which CRIU cannot dump"),
        (["managed"], (), "has managed memory .* which the driver cannot checkpoint"),
        (["pool"], (), "CUDA checkpoint of process.*NOT_SUPPORTED.*cudaMemPoolAttrReleaseThreshold"),
        ([], ("--env=CUDA_MPS_PIPE_DIRECTORY=/tmp/mps",), "client of MPS"),
    ],
)
def test_what_could_not_be_restored_is_refused(
    gpu_podman: Podman, words: list[str], options: tuple[str, ...], message: str
) -> None:
    gpu_podman.start_cuda("c", 16, *words, options=options)
    assert re.search(message, refused(gpu_podman))


@pytest.mark.parametrize(
    ("words", "option", "message"),
    [
        (["ghost=3072"], "ghost-limit 4M", "uses /dev/shm/ghost, which is deleted and has 3 MiB.*echo ghost-limit 16M"),
        (["renamed"], "link-remap", "by a name that it no longer has: /dev/shm/first.*echo link-remap >> .*runc.conf"),
    ],
)
def test_what_criu_will_refuse_costs_no_gpu(gpu_podman: Podman, words: list[str], option: str, message: str) -> None:
    """It is said before a process is locked; CRIU itself says the same, and takes it with the option."""
    gpu_podman.start_cuda("c", 16, *words)
    assert re.search(message, refused(gpu_podman))
    assert phases(gpu_podman) == ["preflight"]
    gpu_podman.remove("c")
    gpu_podman.start_cuda("c", 16, *words, preflight="warn")
    dump_fails(gpu_podman)
    configuration = gpu_podman.namespace.path("/etc/criu/runc.conf")
    configuration.write_text(f"{configuration.read_text()}{option}\n")
    gpu_podman.remove("c")
    gpu_podman.start_cuda("c", 16, *words)
    round_trip(gpu_podman)


def test_a_small_deleted_file_is_no_reason(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "ghost=1000")
    round_trip(gpu_podman)


def phases(podman: Podman) -> list[str]:
    """Return what the last dump came to."""
    return [str(phase["name"]) for phase in last_session(podman.namespace, "pre-dump")["phases"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("driver 565.57.01", "driver 565.57.01 cannot checkpoint: install 570 or later"),
        ("mig", r"uses a MIG instance MIG-[0-9a-f-]+ \(1g.10gb\)"),
        ("mps", "client of MPS"),
        ("lock 600", "CUDA lock of process.*NOT_READY.*raise the lock's time"),
        ("lock 999", "CUDA lock of process.*UNKNOWN"),
        ("checkpoint 2", "CUDA checkpoint of process.*OUT_OF_MEMORY.*raise the limits of the container"),
        ("state 999", "CUDA state of process.*UNKNOWN"),
    ],
)
def test_a_driver_that_refuses_costs_nothing(gpu_podman: Podman, line: str, message: str) -> None:
    gpu_podman.start_cuda("c", 16, "children=1", gpu_lock_timeout_s="1")
    fake_driver.script(gpu_podman.namespace, line)
    reason = refused(gpu_podman)
    assert re.search(message, reason)
    before = len(locked_children(gpu_podman))
    wait_for("the other process to go on", lambda: len(locked_children(gpu_podman)) > before + 1)


def test_the_preflight_can_be_overruled(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "nccl", preflight="warn")
    round_trip(gpu_podman)


@pytest.mark.parametrize("before_the_lock", [1, 1 << 28])
def test_memory_that_changes_until_the_lock(gpu_podman: Podman, before_the_lock: int) -> None:
    """What NVML says of a process that runs is old when it is locked: what it says then is held against the copy."""
    gpu_podman.start_cuda("c", 16)
    fake_driver.script(gpu_podman.namespace, f"running {before_the_lock}")
    dump = round_trip(gpu_podman)
    assert [device["held_bytes"] for device in dump["facts"]["gpu"]["devices"]] == [16 << 20]


def test_memory_that_grows_beyond_the_room(gpu_podman: Podman) -> None:
    """Locked already, it is released."""
    gpu_podman.start_cuda("c", 32, "children=1")
    fake_driver.script(gpu_podman.namespace, "running 1")
    with memory_limit(gpu_podman, ROOM_FOR_ONE_BYTES, processes(gpu_podman)):
        assert re.search("whose memory limit leaves .* the kernel would kill it", refused(gpu_podman))
    assert phases(gpu_podman)[:4] == ["preflight", "gpu preflight", "gpu lock", "gpu read again"]
    assert "gpu checkpoint" not in phases(gpu_podman)


def test_managed_memory_that_is_not_refused_the_driver_refuses(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "managed", preflight="warn")
    assert re.search("CUDA checkpoint of process.*NOT_SUPPORTED.*managed memory", refused(gpu_podman))


def test_a_pool_that_gives_memory_back_is_checkpointed_never_more(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "pool")
    assert "cudaMallocAsync" in refused(gpu_podman)
    assert re.search("UNKNOWN.*has failed before, .*: start it again", refused(gpu_podman))


def test_a_pool_that_keeps_its_memory(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "pool=kept")
    round_trip(gpu_podman)


def round_trip(podman: Podman, *options: str) -> dict[str, Any]:
    """Checkpoint, restore, and check that it continues; return the session of the dump."""
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive, *options)
    before = podman.count("c")
    podman.remove("c")
    dump = last_session(podman.namespace, "post-dump")
    assert_packed(archive)
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    return dump


def test_ranks_that_wait_for_one_another_are_locked_in_the_end(gpu_podman: Podman) -> None:
    """A kernel of 3 s more is longer than the first attempts, and shorter than the time there is."""
    gpu_podman.start_cuda("c", 16, "busy=3")
    dump = round_trip(gpu_podman)
    assert next(phase["seconds"] for phase in dump["phases"] if phase["name"] == "gpu lock") > 0.5


def test_a_dump_that_criu_refuses_gives_everything_back(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "uffd", "children=1", options=NO_SECCOMP, preflight="warn")
    dump_fails(gpu_podman)


def test_the_engine_removes_what_holds_the_memory(gpu_podman: Podman) -> None:
    """Packs of a failed dump go with their directory; the memory comes back all the same."""
    gpu_podman.configure(f"[agent]\nidle_timeout_s = 2\nmemory_bound_bytes = {64 << 20}\n")  # else they are elsewhere
    gpu_podman.start_cuda("c", 16, "uffd", options=NO_SECCOMP, preflight="warn")
    act_at_pre_dump(gpu_podman, 'rm -f "$CRTOOLS_IMAGE_DIR"/ocihook*')
    dump_fails(gpu_podman)


@pytest.mark.parametrize("words", [[], ["uffd"]], ids=["left running", "a dump that fails"])
def test_another_process_has_taken_the_gpu(gpu_podman: Podman, words: list[str]) -> None:
    """The container waits for room, and the driver is not asked before: its restore without room is final."""
    gpu_podman.start_cuda("c", 16, "children=1", *words, options=NO_SECCOMP, preflight="warn")
    fake_driver.script(gpu_podman.namespace, f"total {48 << 20}", f"taken {32 << 20}")  # room for one of two
    archive = gpu_podman.scratch / "c.tar"
    dump = threading.Thread(target=lambda: gpu_podman.checkpoint("c", archive, "--leave-running", check=not words))
    dump.start()
    try:
        wait_for("the container to wait", lambda: "waits for room on a GPU" in gpu_podman.ocihook("ps"))
        shown = gpu_podman.ocihook("ps")
        assert re.search("stands\\s+still until.*room: GPU.*bytes free, 33554432 are\\s+needed", shown, re.DOTALL), (
            shown
        )
        before = gpu_podman.count("c")
        Patience().sleep(1)
        assert gpu_podman.count("c") == before
    finally:
        fake_driver.script(gpu_podman.namespace)
        dump.join()
    gpu_podman.assert_goes_on("c", before)
    count = len(locked_children(gpu_podman))
    wait_for("the other process to go on", lambda: len(locked_children(gpu_podman)) > count + 1)
    assert_nothing_is_left(gpu_podman)


def act_at_pre_dump(podman: Podman, command: str) -> None:
    """Let CRIU run a shell command at pre-dump once GPU memory is in packs; CRIU runs all actions twice."""
    act_at(podman, "pre-dump", f'set -- "$CRTOOLS_IMAGE_DIR"/ocihook[-.]*\n[ -e "$1" ] || exit 0\n{command}')


def act_at(podman: Podman, stage: str, command: str) -> None:
    """Let CRIU run a shell command at a stage, before our hook and after it."""
    script = podman.scratch / "action"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = {stage} ] || exit 0\n{command}\n')
    script.chmod(0o755)
    configuration = podman.namespace.path("/etc/criu/runc.conf")
    configuration.write_text(f"{configuration.read_text()}action-script {script}\n")


def act_no_more(podman: Podman) -> None:
    """Take back what `act_at` did."""
    (podman.scratch / "action").write_text("#!/bin/sh\n")


def dump_fails(podman: Podman) -> None:
    """Try to checkpoint; check that CRIU fails after our pre-dump, and that everything is given back."""
    before = podman.count("c")
    assert "rror" in podman.checkpoint("c", podman.scratch / "c.tar", "--leave-running", check=False)
    dump = last_session(podman.namespace, "pre-dump")
    assert dump["stages"]["pre-dump"]["status"] == 0
    assert "post-dump" not in dump["stages"]
    assert dump["effects"] == []
    assert next(phase["bytes"] for phase in dump["phases"] if phase["name"] == "gpu give back") >= 16 << 20
    podman.assert_goes_on("c", before)


def wait_for_gpu_checkpoint(podman: Podman, text: str = "gpu-checkpointed") -> int:
    """Wait until a dump has begun to lock and checkpoint (or until its journal says so); return its CRIU's pid."""
    journals = podman.namespace.path("/run/ocihook/sessions")
    wait_for("the dump to lock", lambda: any(text in p.read_text() for p in journals.glob("*.json")))
    return int(next(journals.glob("*.json")).name.split("-")[0])


@pytest.mark.parametrize("leave_running", [True, False])
@pytest.mark.parametrize("verb", ["lock", "checkpoint"])
def test_criu_killed_in_the_middle(gpu_podman: Podman, verb: str, *, leave_running: bool) -> None:
    gpu_podman.start_cuda("c", 32, "children=1")
    before = gpu_podman.count("c")
    fake_driver.hold(gpu_podman.namespace, verb)
    options = ["--leave-running"] if leave_running else []
    archive = gpu_podman.scratch / "c.tar"
    dump = threading.Thread(target=lambda: gpu_podman.checkpoint("c", archive, *options, check=False))
    dump.start()
    pid = wait_for_gpu_checkpoint(gpu_podman)
    os.kill(pid, signal.SIGKILL)
    wait_for("CRIU to end", lambda: Process.find(pid) is None)
    fake_driver.script(gpu_podman.namespace)
    dump.join()
    assert sessions(gpu_podman.namespace)[-1]["effects"] == []
    gpu_podman.assert_goes_on("c", before)


def test_a_process_that_dies_meanwhile(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "children=1")
    before = gpu_podman.count("c")
    _, child = processes(gpu_podman)  # podman tells nothing while it checkpoints
    fake_driver.hold(gpu_podman.namespace, "checkpoint")
    archive = gpu_podman.scratch / "c.tar"
    dump = threading.Thread(target=lambda: gpu_podman.checkpoint("c", archive, "--leave-running", check=False))
    dump.start()
    wait_for_gpu_checkpoint(gpu_podman, '"threads"')  # all are locked
    os.kill(child, signal.SIGKILL)
    wait_for("the process to end", lambda: Process.find(child) is None)
    fake_driver.script(gpu_podman.namespace)
    dump.join()
    message = last_session(gpu_podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
    assert f"process {child} ended while" in message
    assert "the container runs on" in message
    assert_nothing_is_left(gpu_podman)
    gpu_podman.assert_goes_on("c", before)


def test_no_room_for_the_packs(make_podman: MakePodman, cuda_files: Path) -> None:
    podman = make_podman("runc", size="96m", cuda_files=cuda_files)
    podman.install()
    podman.start_cuda("c", 16)
    store = podman.namespace.path(str(podman.scratch / "podman"))
    (store / "filler").write_bytes(bytes(os.statvfs(store).f_bavail * 4096 - (12 << 20)))
    assert "free space there" in refused(podman)


def test_no_room_for_what_criu_writes(make_podman: MakePodman, cuda_files: Path) -> None:
    podman = make_podman("runc", size="96m", cuda_files=cuda_files)
    podman.install()
    podman.start_cuda("c", 16)
    act_at_pre_dump(podman, f"dd if=/dev/zero of={podman.scratch}/podman/filler bs=64k 2>/dev/null; exit 0")
    dump_fails(podman)


def test_damaged_gpu_memory_is_refused_before_anything_runs(gpu_podman: Podman) -> None:
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16)
    gpu_podman.checkpoint("c", archive)
    gpu_podman.remove("c")
    damage(archive, r"checkpoint/ocihook-region-\d\.pack", offset=200_000)
    assert "is damaged" in gpu_podman.ocihook("archive", "verify", str(archive), check=False)
    assert "is damaged" in restore_refused(gpu_podman, archive)
    damage(archive, r"checkpoint/ocihook-region-\d\.pack", offset=200_000)  # as it was
    gpu_podman.remove("c")
    pack = 'set -- $(ls -S "$CRTOOLS_IMAGE_DIR"/ocihook-region-*)'
    act_at(gpu_podman, "setup-namespaces", f"{pack}\ndd if=/dev/urandom of=$1 bs=16 seek=9999 count=1 conv=notrunc")
    message = restore_refused(gpu_podman, archive, at="post-restore")
    assert "is damaged" in message
    assert "CRIU kills what it has started" in message


def restore_refused(podman: Podman, archive: Path, *, at: str = "pre-restore") -> str:
    podman.restore(archive, check=False)
    assert not podman.is_running("c")
    session = last_session(podman.namespace, "pre-restore")
    assert session["effects"] == []
    assert list(session["stages"])[-1] == at
    verdict = session["stages"][at]
    assert verdict["status"] == 1
    return str(verdict["message"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("total 1000000", "needs 16777216 bytes on GPU .* which has \\d+ free"),
        ("driver 590.10", "made with driver 580.159.04, this node has 590.10"),
        ("gpus 7", "the container had 1 GPUs, this node gives it 0"),
    ],
)
def test_a_node_that_will_not_do(gpu_podman: Podman, line: str, message: str) -> None:
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16)
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    fake_driver.script(gpu_podman.namespace, line)
    refused = restore_refused(gpu_podman, archive)
    assert re.search(message, refused)
    assert "nothing was started" in refused
    gpu_podman.remove("c")
    fake_driver.script(gpu_podman.namespace)
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


@pytest.mark.parametrize("policy", ["kill", "keep"])
def test_a_restore_that_the_driver_refuses(gpu_podman: Podman, policy: str) -> None:
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16, on_gpu_restore_error=policy)
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    fake_driver.script(gpu_podman.namespace, "restore 801")
    gpu_podman.restore(archive, check=False)
    session = last_session(gpu_podman.namespace, "post-resume")
    message = session["stages"]["post-resume"]["message"]
    assert "NOT_SUPPORTED" in message
    assert ("processes were killed" if policy == "kill" else "wait for their GPU state") in message
    assert session["effects"] == []
    if policy == "kill":
        wait_for("the container to end", lambda: not gpu_podman.is_running("c"))
    else:
        os.kill(processes(gpu_podman)[0], 0)
        assert gpu_podman.is_running("c")
    assert gpu_podman.count("c")[0] <= before[0]
    gpu_podman.remove("c")
    fake_driver.script(gpu_podman.namespace)
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


def test_a_restore_waits_for_a_driver_that_does_not_answer(gpu_podman: Podman) -> None:
    """The call cannot be interrupted: `ocihook ps` names the stage; the container runs once the call has returned."""
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16)
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    fake_driver.hold(gpu_podman.namespace, "restore")
    restore = threading.Thread(target=lambda: gpu_podman.restore(archive))
    restore.start()
    try:
        wait_for("the driver to be asked", lambda: "post-resume" in gpu_podman.ocihook("ps"))
    finally:
        fake_driver.script(gpu_podman.namespace)
        restore.join()
    gpu_podman.assert_goes_on("c", before)
    assert_nothing_is_left(gpu_podman)


def test_a_job_that_cannot_come_back_is_not_left_stuck(gpu_podman: Podman) -> None:
    """P2P, unseen by the preflight: the checkpoint is complete, the container ends and says so."""
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16, "p2p")
    gpu_podman.checkpoint("c", archive, "--leave-running")
    assert last_session(gpu_podman.namespace, "post-dump")["effects"] == []
    wait_for("the container to end", lambda: not gpu_podman.is_running("c"))
    assert (
        "its GPU state cannot be given back and is lost"
        in gpu_podman.namespace.path("/run/ocihook/agent.log").read_text()
    )
    assert "every checksum right" in gpu_podman.ocihook("archive", "verify", str(archive))


def test_other_gpus(gpu_podman: Podman) -> None:
    """Two GPUs change places, by annotation: the driver gets a map of all that the container has."""
    archive = gpu_podman.scratch / "c.tar"
    first, second = (f"GPU-00000000-0000-0000-0000-0000000000{minor:02x}" for minor in (3, 5))
    gpu_podman.start_cuda("c", 16, gpus={0: 3, 1: 5}, gpu_map=f"{first}={second},{second}={first}")
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    gpu_podman.restore(archive)
    restore = last_session(gpu_podman.namespace, "post-resume")
    assert restore["facts"]["gpu_map"] == [[first, second], [second, first]]
    gpu_podman.assert_goes_on("c", before)


def test_what_somebody_else_has_checkpointed_is_left_to_them(gpu_podman: Podman, cuda_files: Path) -> None:
    """As CRIU's CUDA plugin, or a controller: no process is handled twice, and a restore resumes whatever waits."""
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16)
    pid = gpu_podman("inspect", "--format", "{{.State.Pid}}", "c").strip()

    def call(verb: str) -> dict[str, Any]:
        command = [sys.executable, str(DRIVER_CALL), "--call", verb, pid]
        answer: dict[str, Any] = json.loads(gpu_podman.namespace.run(*command, LD_LIBRARY_PATH=str(cuda_files)))
        return answer

    assert [call(verb)["name"] for verb in ("lock", "checkpoint")] == ["CUDA_SUCCESS"] * 2
    before = gpu_podman.count("c")
    gpu_podman.checkpoint("c", archive, "--leave-running")
    assert last_session(gpu_podman.namespace, "post-dump")["effects"] == []
    assert call("state")["value"] == 2
    assert gpu_podman.count("c") == before
    gpu_podman.remove("c")
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


def test_the_engine_and_its_runtime_are_killed(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 16, "children=1")
    before = gpu_podman.count("c")
    fake_driver.hold(gpu_podman.namespace, "checkpoint")
    dump = threading.Thread(
        target=lambda: gpu_podman.checkpoint("c", gpu_podman.scratch / "c.tar", "--leave-running", check=False)
    )
    dump.start()
    criu = wait_for_gpu_checkpoint(gpu_podman)
    runtime = parent_pid(criu)
    for pid in (parent_pid(runtime), runtime, criu):
        os.kill(pid, signal.SIGKILL)
    wait_for("CRIU to end", lambda: Process.find(criu) is None)
    fake_driver.script(gpu_podman.namespace)
    dump.join()
    assert sessions(gpu_podman.namespace)[-1]["effects"] == []
    gpu_podman.assert_goes_on("c", before)


@pytest.mark.parametrize("victims", ["criu", "runtime", "agent", "runtime and criu and agent"])
def test_how_soon_it_runs_after_a_kill(gpu_podman: Podman, victims: str) -> None:
    """While the driver has its GPU state; docs/faults.md has the figures that this prints."""
    gpu_podman.start_cuda("c", 32, "children=1")
    before = gpu_podman.count("c")
    fake_driver.hold(gpu_podman.namespace, "checkpoint")
    archive = gpu_podman.scratch / "c.tar"
    dump = threading.Thread(target=lambda: gpu_podman.checkpoint("c", archive, "--leave-running", check=False))
    dump.start()
    criu = wait_for_gpu_checkpoint(gpu_podman)
    agent = int(gpu_podman.namespace.path("/run/ocihook/agent.lock").read_text())
    pids = {"criu": criu, "runtime": parent_pid(criu), "agent": agent}
    for victim in victims.split(" and "):
        os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    fake_driver.script(gpu_podman.namespace)
    journals = gpu_podman.namespace.path("/run/ocihook/sessions")
    wait_for("the session to end", lambda: not list(journals.glob("*.json")))
    print(f"{victims}: the container runs {time.monotonic() - began:.2f} s later")
    dump.join()
    assert_nothing_is_left(gpu_podman)
    gpu_podman.assert_goes_on("c", before)


@pytest.mark.parametrize("leave_running", [True, False])
def test_agent_killed_at_any_step(gpu_podman: Podman, *, leave_running: bool) -> None:
    """Another agent finishes, whoever starts it: every dump has its GPU memory, every job continues."""
    gpu_podman.start_cuda("c", 16, "children=1")

    def round_trip(last_of_dump: int, last_of_restore: int) -> tuple[list[str], list[str]]:
        archive = gpu_podman.scratch / "c.tar"
        start_dying_agent(gpu_podman, last_of_dump)
        gpu_podman.checkpoint("c", archive, *(["--leave-running"] if leave_running else []))
        dump, restore = end_dying_agent(gpu_podman), []
        before = gpu_podman.count("c")
        if leave_running:
            gpu_podman.assert_goes_on("c", before)
        assert_packed(archive)
        assert "every checksum right" in gpu_podman.ocihook("archive", "verify", str(archive))
        if not leave_running:
            gpu_podman.remove("c")
            start_dying_agent(gpu_podman, last_of_restore)
            gpu_podman.restore(archive)
            restore = end_dying_agent(gpu_podman)
            gpu_podman.assert_goes_on("c", before)
        assert_nothing_is_left(gpu_podman)
        archive.unlink()
        return dump, restore

    kill_at_any_step(round_trip, rounds=8)


def test_agent_killed_at_any_step_of_a_snapshot(gpu_podman: Podman) -> None:
    """GPU memory is among what forks have: the job has its GPU back whatever becomes of them, and of its checkpoint."""
    podman = gpu_podman
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman.namespace)
    podman.start_cuda("c", 96, "own-code", mode="store")
    archive = podman.scratch / "c.tar"
    own = processes(podman)

    def dump(last: int, _last_of_restore: int) -> tuple[list[str], list[str]]:
        archive.unlink(missing_ok=True)
        start_dying_agent(podman, last)
        podman.checkpoint("c", archive, "--leave-running", check=False)
        steps = end_dying_agent(podman)
        podman.assert_goes_on("c", podman.count("c"))
        assert processes(podman) == own
        assert_nothing_is_left(podman)
        podman.ocihook("wait", check=False)
        state = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"][-1]["state"]
        assert state in (("complete", "lost") if last else ("complete",))
        if state == "complete":
            podman.ocihook("store", "verify", "--read-data")
        podman.ocihook("store", "prune")
        return steps, []

    kill_at_any_step(dump, rounds=4)
    podman.checkpoint("c", archive, "--leave-running")
    before = podman.count("c")
    podman.ocihook("wait")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))


def start_killing_agent(podman: Podman, stage: str, *victim: str) -> None:
    """Start an agent that kills CRIU, or another victim, in the middle of a stage, once."""
    end_agent(podman)
    start_agent(podman, KILLING_AGENT, stage, *victim)


def assert_nothing_is_left(podman: Podman) -> None:
    """Check that every session is undone and on record, and that nothing is pinned any more."""
    assert all(session["effects"] == [] for session in sessions(podman.namespace))
    assert not list(podman.namespace.path("/run/ocihook/sessions").iterdir())
    assert "/run/ocihook" not in podman.namespace.run("cat", "/proc/self/mountinfo")


def agent_log(podman: Podman) -> str:
    """Return what all agents have logged."""
    paths = podman.namespace.path("/run/ocihook/agent.log"), podman.scratch / "agent.log"
    return "".join(path.read_text() for path in paths if path.exists())


def processes_with(text: str) -> list[bytes]:
    """Return the command lines of all processes that have a text in them or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if text.encode() in command + (process / "environ").read_bytes():
                found.append(command)
    return found


@pytest.mark.parametrize(
    ("stage", "killed_by"),
    [
        ("post-setup-namespaces", "action"),
        ("post-restore", "agent"),  # while memory is written back
        ("pre-resume", "action"),
        ("post-resume", "agent"),  # while the GPU is given back
    ],
)
def test_criu_killed_during_a_restore(gpu_podman: Podman, stage: str, killed_by: str) -> None:
    """What CRIU has made would wait for it for ever, or run, unknown to the engine: it is killed, nothing else is.

    Between the making of the first process and the stage setup-namespaces nobody could tell what is CRIU's.
    """
    archive = gpu_podman.scratch / "c.tar"
    mark = f"ocihook-{gpu_podman.scratch.name}"
    gpu_podman.start_cuda("c", 16, "children=1", options=[f"--env=MARK={mark}"])
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    if killed_by == "agent":
        start_killing_agent(gpu_podman, stage)
    else:
        act_at(gpu_podman, stage, "kill -KILL $PPID")
    assert "rror" in gpu_podman.restore(archive, check=False)
    assert_nothing_is_left(gpu_podman)
    wait_for("what CRIU made to be gone", lambda: not processes_with(mark))
    said = r"container c \(\w+\): CRIU did not come to the end of its restore, .* restore it again"
    assert re.search(said, agent_log(gpu_podman))
    act_no_more(gpu_podman)
    gpu_podman.remove("c")
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


@pytest.mark.parametrize("leave_running", [True, False])
def test_criu_killed_while_memory_is_packed(gpu_podman: Podman, *, leave_running: bool) -> None:
    gpu_podman.start_cuda("c", 16, "children=1")
    before = gpu_podman.count("c")
    stage = "detached" if leave_running else "post-dump"
    start_killing_agent(gpu_podman, stage)
    options = ["--leave-running"] if leave_running else []
    assert "rror" in gpu_podman.checkpoint("c", gpu_podman.scratch / "c.tar", *options, check=False)
    gpu_podman.assert_goes_on("c", before)
    dump = last_session(gpu_podman.namespace, stage)
    message = dump["stages"][stage]["message"]
    assert re.search(r"container c \(\w+\): CRIU \(pid \d+\) was killed meanwhile. .*, the container runs on", message)
    assert next(phase["bytes"] for phase in dump["phases"] if phase["name"] == "gpu give back") >= 32 << 20
    assert_nothing_is_left(gpu_podman)
    round_trip(gpu_podman)


@pytest.mark.parametrize(
    ("stage", "leave_running"), [("pre-dump", True), ("pre-dump", False), ("detached", True), ("post-dump", False)]
)
def test_the_runtime_alone_is_killed_while_memory_is_packed(
    gpu_podman: Podman, stage: str, *, leave_running: bool
) -> None:
    """As by an engine whose patience ends: CRIU waits for the stage, and nothing waits for CRIU."""
    gpu_podman.start_cuda("c", 16, "children=1")
    before = gpu_podman.count("c")
    start_killing_agent(gpu_podman, stage, "runtime")
    options = ["--leave-running"] if leave_running else []
    assert "rror" in gpu_podman.checkpoint("c", gpu_podman.scratch / "c.tar", *options, check=False)
    gpu_podman.assert_goes_on("c", before)
    dump = last_session(gpu_podman.namespace, stage)
    message = dump["stages"][stage]["message"]
    assert re.search(r"the runtime \(pid \d+\) was killed meanwhile.*the container runs on", message)
    assert dump["given_up"] is not None
    assert_nothing_is_left(gpu_podman)
    round_trip(gpu_podman)


@contextlib.contextmanager
def memory_limit(podman: Podman, limit_bytes: int, pids: list[int]) -> Iterator[Path]:
    """Limit what processes of a container may take from now on; yield their cgroup.

    They are placed by hand in a memory cgroup of v1: where that hierarchy has the memory controller, as on the machines
    that these tests were made on, the v2 that the engines see has none, and podman's --memory fails.
    """
    mount = podman.scratch / "memory"
    mount.mkdir()
    try:
        podman.namespace.run("mount", "-t", "cgroup", "-o", "memory", "cgroup", str(mount))
    except CommandError:
        pytest.skip("the memory controller is not in a v1 hierarchy")
    group = podman.namespace.path(str(mount / podman.scratch.name))
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        podman.remove("c")
        wait_for("the cgroup to be empty", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


# A process needs 34 MiB for its checkpoint.
ROOM_FOR_ONE_BYTES = 60 << 20
ROOM_FOR_NONE_BYTES = 20 << 20


def test_out_of_memory_is_foreseen(gpu_podman: Podman) -> None:
    gpu_podman.start_cuda("c", 32, "children=1")
    with memory_limit(gpu_podman, ROOM_FOR_ONE_BYTES, processes(gpu_podman)):
        assert re.search(
            r"copies [\d.]+ GiB of GPU memory into the container's own, whose memory limit leaves [\d.]+ GiB; the "
            "kernel would kill it: raise the container's memory limit",
            refused(gpu_podman),
        )


def test_out_of_memory_takes_one_process_and_no_other(gpu_podman: Podman) -> None:
    """Only one is limited: two would share the kernel's choice of a victim, and preflight would have foreseen it."""
    gpu_podman.start_cuda("c", 32, "children=1")
    child = processes(gpu_podman)[1]
    with memory_limit(gpu_podman, ROOM_FOR_NONE_BYTES, [child]) as group:
        reason = refused(gpu_podman)
        assert "oom_kill 1" in (group / "memory.oom_control").read_text()
        assert re.search(
            rf"process {child} ended while the driver copied GPU memory.*raise the container's memory limit", reason
        )
        assert_nothing_is_left(gpu_podman)


def test_a_process_that_ends_after_its_memory_was_moved(gpu_podman: Podman) -> None:
    """The checkpoint is that of a container without it, and can be restored."""
    archive = gpu_podman.scratch / "c.tar"
    gpu_podman.start_cuda("c", 16, "children=1")
    children = "cat /proc/$CRTOOLS_INIT_PID/task/$CRTOOLS_INIT_PID/children"
    # CRIU may wait in vain for a cgroup to freeze in which a process is on its way out, so it is gone by then.
    end = "while grep -q '^State:.[^ZX]' /proc/$pid/status 2>/dev/null; do sleep 0.01; done"
    act_at_pre_dump(gpu_podman, f"for pid in $({children}); do kill -KILL $pid 2>/dev/null; {end}; done; exit 0")
    gpu_podman.checkpoint("c", archive, "--leave-running")
    before = gpu_podman.count("c")
    gpu_podman.assert_goes_on("c", before)
    assert_nothing_is_left(gpu_podman)
    assert "every checksum right" in gpu_podman.ocihook("archive", "verify", str(archive))
    gpu_podman.remove("c")
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


def test_a_disk_that_is_full_while_gpu_memory_is_moved(make_podman: MakePodman, cuda_files: Path) -> None:
    podman = make_podman("runc", size="96m", cuda_files=cuda_files)
    podman.install()
    podman.start_cuda("c", 16, "children=1", preflight="warn")
    store = podman.namespace.path(str(podman.scratch / "podman"))
    (store / "filler").write_bytes(bytes(os.statvfs(store).f_bavail * 4096 - (4 << 20)))
    assert re.search("No space left on device", refused(podman))
    assert_nothing_is_left(podman)
    assert not list(store.rglob("ocihook*"))


@pytest.mark.parametrize(
    ("on_pack_error", "left_kib", "is_complete"), [("keep", 400, True), ("keep", 0, False), ("fail", 400, False)]
)
def test_a_disk_that_is_full_while_packing(
    make_podman: MakePodman, cuda_files: Path, on_pack_error: str, left_kib: int, *, is_complete: bool
) -> None:
    """Packs of GPU memory are there; with a manifest, which has room or not, and the images they are a checkpoint."""
    podman = make_podman("runc", size="96m", cuda_files=cuda_files)
    podman.install()
    podman.start_cuda("c", 16, "children=1", on_pack_error=on_pack_error)
    filler = podman.scratch / "podman/filler"
    free_kib = "$(df --output=avail -k $CRTOOLS_IMAGE_DIR | tail -n 1)"
    act_at(podman, "post-dump", f"[ -e {filler} ] || head -c $((({free_kib} - {left_kib}) * 1024)) /dev/zero >{filler}")
    archive = podman.scratch / "c.tar"
    before = podman.count("c")
    output = podman.checkpoint("c", archive, check=is_complete)
    podman.namespace.path(str(filler)).unlink()
    message = last_session(podman.namespace, "post-dump")["stages"]["post-dump"]["message"]
    assert "o space left" in message
    assert_nothing_is_left(podman)
    act_no_more(podman)
    if not is_complete:
        assert "rror" in output
        assert "The dump fails, the container runs on as soon as it has its GPUs back" in message
        podman.assert_goes_on("c", before)
        round_trip(podman)
        return
    assert "The checkpoint is complete but not packed" in message
    assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


@pytest.mark.parametrize(
    ("left_bytes", "message"),
    [(None, "cannot be opened: No such file"), (100_000, "has 100000 bytes, its manifest says")],
)
def test_gpu_memory_that_is_cut_short_or_missing(gpu_podman: Podman, left_bytes: int | None, message: str) -> None:
    """Seen in the packs' tables, before CRIU has made anything."""
    archive, damaged = gpu_podman.scratch / "c.tar", gpu_podman.scratch / "damaged.tar"
    gpu_podman.start_cuda("c", 16)
    gpu_podman.checkpoint("c", archive)
    before = gpu_podman.count("c")
    gpu_podman.remove("c")
    with tarfile.open(archive) as source, tarfile.open(damaged, "w") as target:
        members = source.getmembers()
        largest = max((m for m in members if "/ocihook-region-" in m.name), key=lambda member: member.size)
        for member in members:
            if member is largest:
                if left_bytes is None:
                    continue
                member.size = left_bytes
            target.addfile(member, source.extractfile(member))
    assert re.search(message, gpu_podman.ocihook("archive", "verify", str(damaged), check=False))
    refusal = restore_refused(gpu_podman, damaged)
    assert re.search(rf"{Path(largest.name).name}.*{message}", refusal)
    assert "nothing was started" in refusal
    assert_nothing_is_left(gpu_podman)
    gpu_podman.remove("c")
    gpu_podman.restore(archive)
    gpu_podman.assert_goes_on("c", before)


@pytest.mark.parametrize("leave_running", [True, False])
@pytest.mark.parametrize("victim", ["podman", "conmon"])
def test_the_engine_alone_is_killed(gpu_podman: Podman, victim: str, *, leave_running: bool) -> None:
    """CRIU continues. Without podman there is no archive, its own directory has all; a container without conmon dies
    of the log that it cannot write any more.
    """
    gpu_podman.start_cuda("c", 16, "children=1")
    before = gpu_podman.count("c")
    archive = gpu_podman.scratch / "c.tar"
    conmon = parent_pid(processes(gpu_podman)[0])
    fake_driver.hold(gpu_podman.namespace, "checkpoint")
    options = ["--leave-running"] if leave_running else []
    said: list[str] = []
    dump = threading.Thread(target=lambda: said.append(gpu_podman.checkpoint("c", archive, *options, check=False)))
    dump.start()
    criu = wait_for_gpu_checkpoint(gpu_podman)
    killed = conmon if victim == "conmon" else parent_pid(parent_pid(criu))
    os.kill(killed, signal.SIGKILL)
    wait_for(f"{victim} to end", lambda: Process.find(killed) is None)
    fake_driver.script(gpu_podman.namespace)
    dump.join()
    assert_nothing_is_left(gpu_podman)
    if victim == "conmon":
        assert archive.exists(), said
        assert_packed(archive)
        assert "every checksum right" in gpu_podman.ocihook("archive", "verify", str(archive))
    if victim == "podman" and leave_running:
        gpu_podman.assert_goes_on("c", before)
        return
    before = gpu_podman.count("c")
    if victim == "conmon":
        gpu_podman("rm", "--force", "--time", "0", "c", check=False)  # podman finds out what has happened
        gpu_podman.remove("c")
        gpu_podman.restore(archive)
    else:
        wait_for("podman to see the container's end", lambda: not gpu_podman.is_running("c"))
        gpu_podman("container", "restore", "c")
    gpu_podman.assert_goes_on("c", before)


def test_an_engine_that_thaws_what_has_no_gpu_yet(gpu_podman: Podman) -> None:
    """As one does that was restarted: all the time, from the end of the dump on, and the agent is killed then, too."""
    gpu_podman.start_cuda("c", 16, "children=1", "watch", preflight="warn")
    before = gpu_podman.count("c")
    container = gpu_podman("inspect", "--format", "{{.Id}}", "c").strip()
    switch, done = f"/sys/fs/cgroup/libpod_parent/libpod-{container}/cgroup.freeze", gpu_podman.scratch / "done"
    thaw = f"while [ ! -e {done} ]; do echo 0 >{switch}; sleep 0.002; done"
    kill = "kill -KILL $(cat /run/ocihook/agent.lock)"
    act_at(gpu_podman, "post-dump", f"setsid sh -c '{thaw}' </dev/null >/dev/null 2>&1 & {kill}\n:")
    try:
        gpu_podman.checkpoint("c", gpu_podman.scratch / "c.tar", "--leave-running", check=False)
        gpu_podman.assert_goes_on("c", before)
    finally:
        done.touch()
    wait_for(
        "all to be undone", lambda: not gpu_podman.namespace.path(f"{Path(switch).parent}/ocihook-frozen").exists()
    )
    assert sessions(gpu_podman.namespace)[-1]["effects"] == []
