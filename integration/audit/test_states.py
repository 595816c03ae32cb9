"""Whatever state a program is in comes back, or the restore names what does not.

The program (states.c) looks from inside; what the agent reports is compared with that.
"""

import os
import random
import re
import subprocess
import tarfile
from collections.abc import Collection
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman
from integration.runtime.conftest import MakeHandled

UNCONFINED = ("--security-opt", "seccomp=unconfined", "--cap-add", "SYS_NICE", "--cap-add", "IPC_LOCK")
# One thread can be in one of these at a time.
EXCLUSIVE = (
    {"nice", "batch", "idle", "reset_on_fork", "slice"},
    {"groups", "no_groups"},
)
# What no restore brings back, and what the report calls it.
REPORTED = {
    "semaphore": "semaphore mode of eventfds",
    "watch_once": "flags of inotify watches",
    "thread_own_directory": "working directory of a thread's own",
    "thread_own_files": "descriptors of a thread's own",
    "thread_personality": "personality of",
    "epoll_once": "what epoll watches",
    "ended_child": "gets another status after a restore",
    "unusual_child": "gets SIGCHLD at its end after a restore",
    "memory_policy": "NUMA policy of",  # if other processes have another
    "locked_on_use": "memory that is locked when it is used",
    "sealed": "sealed memory",
}
SEEDS = range(40 if os.environ.get("OCIHOOK_NIGHTLY") else 2)


def start(podman: Podman, name: str, wanted: Collection[str], *options: str) -> None:
    """Run the program in some states."""
    command = ["run", "--detach", "--name", name, "--network", "none", "--pids-limit", "0", "--tmpfs", "/scratch"]
    podman(*command, *UNCONFINED, *options, IMAGE, "/workload", *wanted)
    wait_for(f"{name} to count", lambda: podman.count(name)[0] > 2)
    assert podman.count(name)[1] == "ok"


def lost_after_restore(podman: Podman, name: str, *, may_refuse: bool = False) -> set[str]:
    """Dump, remove and restore the container; return the states that its program has lost.

    A dump that CRIU refuses loses nothing, if it may: the container runs on.
    """
    archive = podman.scratch / f"{name}.tar"
    before = podman.count(name)[0]
    said = podman.checkpoint(name, archive, check=not may_refuse)
    if not archive.exists() or not tarfile.is_tarfile(archive):
        assert "ocihook: " in said
        podman.assert_counts(name)
        return set()
    podman.remove(name)
    podman.restore(archive)
    wait_for(f"{name} to count", lambda: podman.count(name)[0] > before + 4)
    return set(re.findall(r"^lost (\w+)$", podman("logs", name), re.MULTILINE))


def choose(states: Path, seed: int, *, has_sockets: bool = False) -> list[str]:
    """Return some of all states that a program can be in at once."""
    names = subprocess.run([states, "list"], check=True, capture_output=True, text=True, timeout=10).stdout.split()
    names = [name for name in names if has_sockets or not name.endswith("_options")]
    chance = random.Random(seed)
    chosen = [name for name in names if chance.random() < 0.5]
    for group in EXCLUSIVE:
        of_group = [name for name in chosen if name in group]
        chosen = [name for name in chosen if name not in of_group[1:]]
    return chosen


def assert_nothing_lost_silently(podman: Podman, states: Collection[str]) -> None:
    start(podman, "job", states)
    lost = lost_after_restore(podman, "job", may_refuse=True)
    log = podman.agent_log()
    silent = {state for state in lost if REPORTED.get(state, "no report") not in log}
    assert not silent, f"of {states}\n{log}"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_state_is_lost_without_a_word(podman: Podman, states: Path, seed: int) -> None:
    assert_nothing_lost_silently(podman, choose(states, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_nor_with_a_newer_criu(new_podman: Podman, states: Path, seed: int) -> None:
    assert_nothing_lost_silently(new_podman, choose(states, 1000 + seed, has_sockets=True))


def test_what_restores_lost_before_is_kept(podman: Podman) -> None:
    """With CRIU 4.1.1, by its images, by what tasks inherit from it, and on copies of descriptors."""
    wanted = ["memory_policy", "personality", "wiped_on_fork", "expired_timer", "large_counter", "attributes", "waits"]
    start(podman, "job", wanted)
    assert lost_after_restore(podman, "job") == set()
    assert ": not restored: " not in podman.agent_log()


@pytest.mark.parametrize("podman", ["runc", "crun"], indirect=True)
def test_a_read_only_root_stays_read_only(podman: Podman) -> None:
    """CRIU before 4.2 mounts it without its options."""
    start(podman, "job", [], "--read-only")
    assert lost_after_restore(podman, "job") == set()
    assert ": not restored: " not in podman.agent_log()
    pid = podman("inspect", "--format", "{{.State.Pid}}", "job").strip()
    mounts = [line.split() for line in podman.namespace.run("cat", f"/proc/{pid}/mountinfo").splitlines()]
    assert ["ro" in options.split(",") for _, _, _, _, place, options, *_ in mounts if place == "/"] == [True]


def test_options_of_sockets_survive(new_podman: Podman) -> None:
    start(new_podman, "job", ["stream_options", "datagram_options"])
    assert lost_after_restore(new_podman, "job") == set()
    assert ": not restored: " not in new_podman.agent_log()


@pytest.mark.parametrize("podman", ["runc", "crun"], indirect=True)
def test_affinity_survives(podman: Podman) -> None:
    start(podman, "job", ["affinity", "thread_affinity"])
    assert lost_after_restore(podman, "job") == set()
    assert ": not restored: " not in podman.agent_log()


def test_no_task_has_the_groups_of_the_restoring_user(podman: Podman) -> None:
    """CRIU gives a task its groups; it does not take any away."""
    archive = podman.scratch / "job.tar"
    start(podman, "job", ["no_groups", "personality"])
    before = podman.count("job")[0]
    podman.checkpoint("job", archive)
    podman.remove("job")
    restore = ["podman", *podman.options(), "container", "restore", "--import", str(archive)]
    podman.namespace.run("setpriv", "--groups", "4,24", *restore, PODMAN_IGNORE_CGROUPSV1_WARNING="1")
    wait_for("job to count", lambda: podman.count("job")[0] > before + 4)
    assert "lost" not in podman("logs", "job")
    assert ": not restored: " not in podman.agent_log()


def test_a_plain_container_has_nothing_to_report(podman: Podman) -> None:
    start(podman, "job", [])
    assert lost_after_restore(podman, "job") == set()
    assert ": not restored: " not in podman.agent_log()


def test_what_exec_has_started_is_named(podman: Podman) -> None:
    """CRIU dumps what descends from the first process, and nothing else of the container."""
    start(podman, "job", [])
    podman("exec", "--detach", "job", "/workload", "nice")
    wait_for("exec to run", lambda: podman("top", "job", "pid").count("\n") > 2)
    lost_after_restore(podman, "job")
    assert re.search(r"not in the checkpoint: workload \(pid \d+\), started by exec", podman.agent_log())


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_what_the_handler_resumes_keeps_it(make_handled: MakeHandled, states: Path, runtime: str) -> None:
    """It stands still until its engine starts it, in a cgroup that it may be moved to later."""
    podman = make_handled(runtime, program=states)
    wanted = ("personality", "affinity", "thread_affinity", "thread_io_priority", "timer_slack", "coredump_filter")
    notes = {"checkpoint_on_stop": "true", "restore_from": "latest"}
    podman.make("run", "job", *UNCONFINED, workload=wanted, **notes)
    podman.wait_to_count("job")
    last = podman.stop("job")
    podman.make("run", "job", *UNCONFINED, workload=wanted, **notes)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] > last
    assert "lost" not in podman("logs", "job")
    assert ": not restored: " not in podman.agent_log()
