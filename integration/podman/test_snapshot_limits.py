"""Snapshots where they meet a limit: of system calls, tasks, memory, or of room in the store."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import IMAGE, Podman
from integration.podman.test_clean_pages import assert_runs_on, no_room, sealed, start
from integration.podman.test_faults import end_agent
from integration.podman.test_snapshot import READ, SMALL_MIB, listed, phases, processes, snapshot_held, states
from integration.soft_dirty import track_memory

MIB = 72  # of each of three mappings
STORE_MIB = 16 * SMALL_MIB  # where a checkpoint is there twice while it is stored
LEFT_BYTES = 16 << 20  # of that, once the snapshot is taken


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


def foretold(podman: Podman) -> str:
    """Return what doctor says of a snapshot of the container."""
    name = podman("inspect", "--format", "{{.Id}}", "c").strip()
    said = json.loads(podman.ocihook("doctor", "--container", name, "--json", check=False))
    (detail,) = (finding["detail"] for finding in said["findings"] if finding["check"] == "snapshot")
    return str(detail)


def test_a_filter_that_allows_nothing_no_more_tasks_and_no_memory(store_podman: Podman) -> None:
    """The filter is suspended; without a task or memory for forks all is read while the container stands still."""
    podman = store_podman
    options = ["--network", "host", "--pids-limit", "0", "--cgroupns", "host", "--annotation=ocihook.io/mode=store"]
    podman("run", "--detach", "--name", "c", *options, IMAGE, "/workload", f"{MIB}+5!")
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    before, own = podman.count("c"), processes(podman)
    (child,) = sealed(podman)
    archives = [podman.scratch / f"{number}.tar" for number in range(3)]

    def dump() -> dict[str, int]:
        stages = "post-dump" if states(podman) else "snapshot"
        podman.checkpoint("c", archives[len(states(podman))], "--leave-running")
        assert_runs_on(podman, before)
        assert (processes(podman), sealed(podman)) == (own, [child])
        podman.ocihook("wait")
        return phases(podman, stages)

    assert "it goes on while its memory is read from a snapshot" in foretold(podman)
    found = dump()
    assert found["snapshot read"] > (READ - 20) << 20
    with no_room(podman, "pids"):
        assert "its limit leaves it 0 more tasks" in foretold(podman)
        without_tasks = dump()
    with no_room(podman, "memory"):
        assert "are needed for what it may write meanwhile, and its memory limit leaves it" in foretold(podman)
        without_memory = dump()
    for found in (without_tasks, without_memory):
        assert found["memory read"] > READ << 20
        assert not found.keys() & {"fork", "snapshot read"}
    assert states(podman) == ["complete"] * 3
    podman.ocihook("store", "verify", "--read-data")
    podman.remove("c")
    podman.restore(archives[0])  # the others have their limits with them, which the test made by hand
    podman.assert_goes_on("c", (1, before[1]))
    assert len(sealed(podman)) == 1


def test_a_store_that_fills_while_the_snapshot_is_read(make_podman: MakePodman) -> None:
    podman = make_podman("runc")
    podman.install()
    track_memory(podman.namespace)
    store = podman.scratch / "store"
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 2\nstore_dir = "{store}"\n')
    store.mkdir()
    podman.namespace.run("mount", "-t", "tmpfs", "-o", f"size={STORE_MIB}m", "tmpfs", str(store))
    start(podman, SMALL_MIB, mode="store")
    before, archive = podman.count("c"), podman.scratch / "c.tar"
    filler = podman.namespace.path(str(store / "filler"))
    with snapshot_held(podman, archive) as forks:
        assert len(forks) == 1
        space = os.statvfs(filler.parent)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - LEFT_BYTES)
    read = last_session(podman.namespace, "snapshot")
    assert (read["outcome"], read["error_code"]) == ("failed", "store-full")
    assert "The checkpoint is incomplete and cannot be restored, " in read["stages"]["snapshot"]["message"]
    assert states(podman) == ["lost"]
    assert "o space left" in listed(podman)[0]["reason"]
    packs = [path.stat().st_size for path in filler.parent.rglob("*.pack")]
    assert packs == [], "what was read of it"
    filler.unlink()
    podman.ocihook("store", "prune")
    podman.checkpoint("c", archive, "--leave-running")
    podman.ocihook("wait")
    assert_runs_on(podman, before)
    assert states(podman) == ["complete"]
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
    end_agent(podman)
