"""A snapshot of a container that its engine has frozen: containerd resumes it when CRIU has ended."""

from pathlib import Path

import pytest

from integration.containerd.conftest import MakeContainerd
from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import image_names
from integration.soft_dirty import track_memory

MIB = 28


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


@pytest.mark.parametrize("cgroup_version", [1, 2])
def test_a_frozen_container(make_containerd: MakeContainerd, cgroup_version: int) -> None:
    node = make_containerd(cgroup_version=cgroup_version)
    node.install()
    node.configure('[policy]\nmode = "store"\n[agent]\nidle_timeout_s = 2\nstore_dir = "/scratch/store"\n')
    track_memory(node.namespace)
    container = node.start("c1", mib=MIB)
    archive = node.checkpoint(container, "c1.tar")
    node.assert_counts(container)
    before = node.count(container)
    node.ocihook("wait")
    dump = last_session(node.namespace, "snapshot")
    assert dump["effects"] == []
    assert {entry["status"] for entry in dump["stages"].values()} == {0}
    found = {phase["name"]: phase["bytes"] for phase in dump["phases"]}
    assert found["snapshot read"] > 3 * MIB << 20
    assert found["memory read"] < 10 << 20
    node.remove(container)
    assert "ocihook.thin" in image_names(archive)
    restored = node.start("c2", image="/scratch/c1.tar")
    wait_for("the workload to go on", lambda: node.count(restored)[0] > 2)
    assert node.count(restored)[1] == before[1]
