"""Memory read past CRIU, with a real podman: whatever goes wrong, the container runs on with all that it had."""

import subprocess
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman
from integration.soft_dirty import track_memory

MIB = 72  # of each of three mappings


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static program that containers run here."""
    binary = tmp_path_factory.mktemp("mappings") / "workload"
    source = Path(__file__).parents[1] / "mappings.c"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-pthread", "-o", binary, source], check=True, timeout=120)
    return binary


def read_bytes(podman: Podman) -> int:
    """Return how much of the last dump was read past CRIU."""
    dump = last_session(podman.namespace, "pre-dump")
    assert dump["effects"] == []
    return sum(phase["bytes"] for phase in dump["phases"] if phase["name"] == "merge")


@pytest.mark.parametrize(("runtime", "mode"), [("runc", "inline"), ("crun", "store")])
def test_memory_of_every_kind(make_podman: MakePodman, runtime: str, mode: str) -> None:
    podman = make_podman(runtime)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman)
    archive = podman.scratch / "c.tar"
    podman.start("c", f"{MIB}+5", mode=mode)
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    podman.checkpoint("c", archive, "--leave-running")
    assert read_bytes(podman) > 4 * MIB << 20
    podman.assert_counts("c")
    podman.checkpoint("c", archive)
    before = podman.count("c")
    assert before[1] != "torn"
    assert read_bytes(podman) > 4 * MIB << 20
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
