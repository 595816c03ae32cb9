"""A snapshot of a container that its engine has frozen: containerd resumes it when CRIU has ended."""

from pathlib import Path

import pytest

from integration.containerd.conftest import MakeContainerd
from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import image_names
from integration.soft_dirty import track_memory

MIB = 40  # of each of three mappings; what two of them have goes past CRIU in a restore


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


# crun 1.28 makes no container on a machine whose cgroups are hybrid, but for those of v2 alone.
@pytest.mark.parametrize(("runtime", "cgroup_version"), [("runc", 1), ("runc", 2), ("crun", 2)])
def test_a_frozen_container(make_containerd: MakeContainerd, runtime: str, cgroup_version: int) -> None:
    node = make_containerd(cgroup_version=cgroup_version)
    node.install()
    node.configure('[policy]\nmode = "store"\n[agent]\nidle_timeout_s = 2\nstore_dir = "/scratch/store"\n')
    track_memory(node.namespace)
    container = node.start("c1", mib=MIB, runtime=runtime)
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
    restored = node.start("c2", image="/scratch/c1.tar", runtime=runtime)
    wait_for("the workload to go on", lambda: node.count(restored)[0] > 2)
    assert node.count(restored)[1] == before[1]
    restore = last_session(node.namespace, "pre-restore")
    assert restore["container"]["runtime"] == runtime
    past_criu = sum(phase["bytes"] for phase in restore["phases"] if phase["name"] == "memory write back")
    assert past_criu > 64 << 20
