"""Memory that is read from a snapshot while its container runs on, with a real podman: what is lost is a checkpoint."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import Podman, image_names
from integration.podman.test_clean_pages import assert_runs_on, start
from integration.podman.test_faults import end_agent, start_agent
from integration.soft_dirty import track_memory

MIB = 72  # of each of three mappings
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
    track_memory(podman)
    yield podman
    end_agent(podman)


def listed(podman: Podman) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"]
    return rows


def phases(record: dict[str, Any]) -> dict[str, int]:
    return {phase["name"]: phase["bytes"] for phase in record["phases"]}


@contextmanager
def snapshot_held(podman: Podman, archive: Path, *how: str) -> Iterator[None]:
    """Checkpoint; yield when the engine has its archive, and the snapshot is still to be read."""
    for name in ("held", "go"):
        (podman.namespace.path("/run/ocihook") / name).unlink(missing_ok=True)
    start_agent(podman, SNAPSHOT_AGENT, *how)
    podman.checkpoint("c", archive, "--leave-running")
    wait_for("the snapshot to be taken", podman.namespace.path("/run/ocihook/held").exists)
    yield
    podman.namespace.path("/run/ocihook/go").touch()


def test_the_job_goes_on_while_its_memory_is_read(store_podman: Podman) -> None:
    podman = store_podman
    archive = podman.scratch / "c.tar"
    start(podman, f"{MIB}+5", mode="store")
    before = podman.count("c")
    with snapshot_held(podman, archive):
        podman.assert_goes_on("c", before)
        assert [row["state"] for row in listed(podman)] == ["pending"]
    assert_runs_on(podman, before)
    dump = last_session(podman.namespace, "snapshot")
    assert phases(dump)["snapshot read"] > (READ - 20) << 20
    assert dump["stages"]["snapshot"]["status"] == 0
    assert "ocihook.thin" in image_names(archive)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
