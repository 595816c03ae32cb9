"""Memory that is read from a snapshot while its container runs on, with a real podman: what is lost is a checkpoint."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.engine import Podman, image_names
from integration.podman.test_clean_pages import assert_runs_on, start
from integration.podman.test_direct import pss_bytes
from integration.podman.test_faults import (
    end_agent,
    end_dying_agent,
    kill_at_any_step,
    start_agent,
    start_dying_agent,
)
from integration.soft_dirty import track_memory
from ocihook.linux.procfs import descendants, tracer_pid
from ocihook.session.journal import open_journals

MIB = 72  # of each of three mappings
SMALL_MIB = 28  # the first process alone has enough then
STAGES = ("pre-dump", "post-dump", "detached", "snapshot")
READ = 5 * MIB  # at least: by the first process all three, and one by each child
SNAPSHOT_AGENT = Path(__file__).parents[1] / "snapshot_agent.py"


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


@pytest.fixture
def store_podman(podman: Podman) -> Iterator[Podman]:
    """One whose CRIU tracks memory, with a store."""
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman.namespace)
    yield podman
    end_agent(podman)


def listed(podman: Podman) -> list[dict[str, Any]]:
    """Return the checkpoints in the store, the oldest first."""
    rows: list[dict[str, Any]] = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"]
    return rows


def states(podman: Podman) -> list[str]:
    """Return their states."""
    return [row["state"] for row in listed(podman)]


def phases(podman: Podman, stage: str = "snapshot") -> dict[str, int]:
    """Return how many bytes each phase of the last dump has moved."""
    return {phase["name"]: phase["bytes"] for phase in last_session(podman.namespace, stage)["phases"]}


def processes(podman: Podman) -> list[int]:
    """Return the processes of the container, also those that have ended and are not waited for."""
    return descendants(int(podman("inspect", "--format", "{{.State.Pid}}", "c")))


def checkpoint_held(podman: Podman, archive: Path, *how: str) -> list[int]:
    """Checkpoint by an agent that waits before it reads the snapshot; return its forks."""
    own = processes(podman)
    for name in ("held", "go"):  # of an earlier one
        (podman.namespace.path("/run/ocihook") / name).unlink(missing_ok=True)
    start_agent(podman, SNAPSHOT_AGENT, *how)
    podman.checkpoint("c", archive, "--leave-running")
    wait_for("the snapshot to be taken", podman.namespace.path("/run/ocihook/held").exists)
    return [pid for pid in processes(podman) if pid not in own]


@contextmanager
def snapshot_held(podman: Podman, archive: Path, *how: str) -> Iterator[list[int]]:
    """Checkpoint; yield the forks when the engine has its archive, and the snapshot is still to be read.

    Afterwards the container runs on with all its memory, and nothing is left.
    """
    before, own = podman.count("c"), processes(podman)
    yield checkpoint_held(podman, archive, *how)
    podman.namespace.path("/run/ocihook/go").touch()
    assert_runs_on(podman, before)
    assert processes(podman) == own
    end_agent(podman)


def test_the_job_goes_on_while_its_memory_is_read(store_podman: Podman) -> None:
    """Another dump of it waits until that is done."""
    podman = store_podman
    archives = [podman.scratch / f"{number}.tar" for number in range(2)]
    start(podman, f"{MIB}+5", mode="store")
    before, memory = podman.count("c"), pss_bytes(podman, "c")
    with snapshot_held(podman, archives[0]) as forks:
        assert len(forks) == 3, "of those with enough memory"
        podman.assert_goes_on("c", before)
        assert states(podman) == ["reading"]
        assert os.sched_getscheduler(tracer_pid(forks[0]) or 0) == os.SCHED_IDLE
        again = threading.Thread(target=podman.checkpoint, args=("c", archives[1], "--leave-running"))
        again.start()
        wait_for("the other dump to begin", lambda: len(open_journals(podman.namespace.path("/run/ocihook"))) == 2)
        podman.assert_goes_on("c", before)
        assert again.is_alive()
        reader = tracer_pid(forks[0])
        assert reader
        wait_for("it to be read at normal priority", lambda: os.sched_getscheduler(reader) == os.SCHED_OTHER)
        podman.namespace.path("/run/ocihook/go").touch()
        again.join()
    for dump in sessions(podman.namespace):
        assert {name: entry["status"] for name, entry in dump["stages"].items()} == dict.fromkeys(STAGES, 0)
    found = phases(podman)
    assert found["snapshot read"] > (READ - 20) << 20
    assert 0 < found["memory read"] < 10 << 20, "what forks do not have"
    assert list(found).index("fork") < list(found).index("snapshot read")
    podman.remove("c")
    assert all("ocihook.thin" in image_names(archive) for archive in archives)
    podman.restore(archives[0])
    podman.assert_goes_on("c", (1, before[1]))
    assert pss_bytes(podman, "c") <= memory * 1.1, "what is shared since a fork is shared again"
    podman.ocihook("wait")
    assert states(podman) == ["complete", "complete"]


def test_what_is_lost_is_a_checkpoint(store_podman: Podman) -> None:
    podman = store_podman
    archive = podman.scratch / "c.tar"
    start(podman, SMALL_MIB, mode="store")

    def assert_lost(code: str, reason: str) -> None:
        dump = last_session(podman.namespace, "snapshot")
        assert (dump["outcome"], dump["error_code"]) == ("failed", code)
        message = dump["stages"]["snapshot"]["message"]
        assert reason in message
        assert "The checkpoint is incomplete and cannot be restored, " in message
        assert states(podman) == ["lost"]
        assert reason in listed(podman)[0]["reason"]
        output = podman.restore(archive, "--name", "other", check=False)
        assert "rror" in output
        podman("rm", "--force", "other", check=False)
        refused = last_session(podman.namespace, "pre-restore")["stages"]["pre-restore"]["message"]
        assert "the snapshot of its memory was lost" in refused
        podman.ocihook("store", "prune")

    with snapshot_held(podman, archive) as forks:
        for pid in forks:  # as the kernel does where memory runs out
            os.kill(pid, signal.SIGKILL)
    assert_lost("snapshot-lost", "ended before it was read")
    with snapshot_held(podman, archive, "full"):
        pass
    assert_lost("store-full", "o space left")
    with snapshot_held(podman, archive):
        agent = podman.namespace.path("/run/ocihook/agent.lock").read_text().strip()
        podman.namespace.run("kill", "-KILL", agent)
        podman.namespace.run("flock", "--timeout", "60", "/run/ocihook/agent.lock", "true")
        wait_for("all to be undone", lambda: "No session is open." in podman.ocihook("recover", check=False))
    assert "was killed" in listed(podman)[0]["reason"]
    verified = podman.namespace.run(sys.executable, "-m", "ocihook", "archive", "verify", str(archive), check=False)
    assert "the snapshot of its memory was lost" in verified
    assert last_session(podman.namespace, "detached")["outcome"] == "failed"
    podman.ocihook("store", "prune")
    start_agent(podman, SNAPSHOT_AGENT, "no-room")
    podman.checkpoint("c", archive, "--leave-running")
    assert phases(podman, "post-dump").keys() & {"memory read", "fork"} == {"memory read"}
    end_agent(podman)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))

    assert checkpoint_held(podman, archive)
    podman("kill", "c")  # returns when it has ended, which is before the workers go on
    assert last_session(podman.namespace, "snapshot")["outcome"] == "failed"
    assert states(podman)[-1] == "lost"


def test_who_stops_a_container_does_not_wait_for_ever(store_podman: Podman) -> None:
    """The snapshot of an earlier dump is given up."""
    podman = store_podman
    archive = podman.scratch / "c.tar"
    start(podman, SMALL_MIB, mode="store")
    before = podman.count("c")
    assert checkpoint_held(podman, archive)
    podman.checkpoint("c", archive)
    podman.ocihook("wait")
    assert sorted(states(podman)) == ["complete", "lost"]
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))


def test_none_is_taken_where_it_is_not_wanted(store_podman: Podman) -> None:
    podman = store_podman
    start(podman, SMALL_MIB, mode="store", snapshot="off")
    podman.checkpoint("c", podman.scratch / "c.tar", "--leave-running")
    assert phases(podman, "post-dump")["memory read"] > 3 * SMALL_MIB << 20
    assert "snapshot" not in last_session(podman.namespace, "post-dump")["stages"]


def test_agents_killed_at_any_step(store_podman: Podman) -> None:
    podman = store_podman
    archive = podman.scratch / "c.tar"
    start(podman, SMALL_MIB, mode="store")
    before, own = podman.count("c"), processes(podman)

    def dump(last: int, _last_of_restore: int) -> tuple[list[str], list[str]]:
        archive.unlink(missing_ok=True)
        start_dying_agent(podman, last)
        podman.checkpoint("c", archive, "--leave-running", check=False)
        steps = end_dying_agent(podman)
        assert_runs_on(podman, before)
        assert processes(podman) == own
        podman.ocihook("wait", check=False)
        if states(podman)[-1] == "complete":
            podman.ocihook("store", "verify", "--read-data")
        else:
            assert states(podman)[-1] == "lost"
            assert last, "it was not killed"
        podman.ocihook("store", "prune")
        return steps, []

    kill_at_any_step(dump, rounds=3)
    podman.checkpoint("c", archive, "--leave-running")
    assert_runs_on(podman, before)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
