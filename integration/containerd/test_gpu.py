"""Containers with CUDA processes through containerd's CRI, which freezes them first, as the kubelet has it."""

import json
from pathlib import Path

import grpc
import pytest

from integration import fake_driver
from integration.containerd.conftest import MakeContainerd
from integration.containerd.engine import Containerd
from integration.journals import last_session
from integration.podman.engine import assert_packed, image_names

VRAM_MIB = 32
UUID = "GPU-00000000-0000-0000-0000-0000000000{:02x}"


@pytest.fixture
def node(make_containerd: MakeContainerd, cuda_files: Path) -> Containerd:
    """A containerd with ocihook and a stand-in for NVIDIA's driver."""
    node = make_containerd(cuda_files=cuda_files)
    node.install()
    return node


@pytest.mark.parametrize("cgroup_version", [2, 1])
def test_a_frozen_container_is_thawed_for_the_driver(
    make_containerd: MakeContainerd, cuda_files: Path, cgroup_version: int
) -> None:
    node = make_containerd(cgroup_version=cgroup_version, cuda_files=cuda_files)
    node.install()
    container = node.start("c1", mib=VRAM_MIB, gpus=[3])
    archive = node.checkpoint(container, "c1.tar")
    before = node.count(container)
    node.assert_goes_on(container, before)
    dump = last_session(node.namespace, "post-dump")
    assert dump["effects"] == []
    phases = {phase["name"]: phase["bytes"] for phase in dump["phases"]}
    assert phases["gpu give back"] == phases["gpu move out"] >= VRAM_MIB << 20
    node.remove(container)
    assert_packed(archive)
    assert any(name.startswith("ocihook-region-") for name in image_names(archive))
    if cgroup_version == 1:
        return  # a restore there is not what this is about
    restored = node.start("c2", image="/scratch/c1.tar", gpus=[3])
    node.assert_counts(restored)
    assert node.count(restored)[1] == before[1]


def _nest(pid: int, cgroup_version: int) -> Path:
    """Move a container's init into a cgroup below the container's, as one does that manages cgroups; return it."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    kind = ":freezer:" if cgroup_version == 1 else "0::"
    (path,) = (line.rpartition(":")[2] for line in lines if kind in line)
    unified = Path("/sys/fs/cgroup/unified")
    other = unified if unified.exists() else unified.parent
    mount = Path("/sys/fs/cgroup/freezer") if cgroup_version == 1 else other
    nested = mount / path.lstrip("/") / "nested"
    nested.mkdir()
    for inside in (nested.parent / "cgroup.procs").read_text().split():
        (nested / "cgroup.procs").write_text(inside)
    return nested


# crun 1.28 makes no container on a machine whose cgroups are hybrid, but for those of v2 alone.
@pytest.mark.parametrize(("runtime", "cgroup_version"), [("runc", 2), ("runc", 1), ("crun", 2)])
def test_a_container_whose_init_is_in_a_nested_cgroup(
    make_containerd: MakeContainerd, cuda_files: Path, runtime: str, cgroup_version: int
) -> None:
    """It is thawed and frozen where the engine has frozen it, which is above its init."""
    node = make_containerd(cgroup_version=cgroup_version, cuda_files=cuda_files)
    node.install()
    container = node.start("c1", mib=16, runtime=runtime, gpus=[3])
    nested = _nest(node.init_pid(container), cgroup_version)
    archive = node.checkpoint(container, "c1.tar")
    before = node.count(container)
    node.assert_goes_on(container, before)
    dump = last_session(node.namespace, "post-dump")
    assert dump["effects"] == []
    assert {"thaw", "freeze", "gpu move out", "gpu give back"} <= {phase["name"] for phase in dump["phases"]}
    assert (nested / "cgroup.procs").read_text().split()
    assert any(name.startswith("ocihook-region-") for name in image_names(archive))


def test_a_pod_with_other_gpus(node: Containerd) -> None:
    """The map comes from the devices that the new container is given."""
    container = node.start("c1", mib=VRAM_MIB, gpus=[3])
    node.checkpoint(container, "c1.tar")
    before = node.count(container)
    node.remove(container)
    restored = node.start("c2", image="/scratch/c1.tar", gpus=[5])
    node.assert_counts(restored)
    assert node.count(restored)[1] == before[1]
    restore = last_session(node.namespace, "post-resume")
    assert restore["facts"]["gpu_map"] == [[UUID.format(3), UUID.format(5)]]
    assert restore["effects"] == []


def test_a_refused_dump_leaves_a_container_that_runs(node: Containerd) -> None:
    container = node.start("c1", mib=VRAM_MIB, gpus=[3])
    fake_driver.script(node.namespace, "checkpoint 2")
    with pytest.raises(grpc.RpcError, match=r"ocihook: pre-dump of container default/c1/c1: .*OUT_OF_MEMORY"):
        node.checkpoint(container, "c1.tar")
    assert node.is_running(container)
    node.assert_counts(container)
    verdict = last_session(node.namespace, "pre-dump")["stages"]["pre-dump"]
    assert "OUT_OF_MEMORY" in verdict["message"]


def actions(node: Containerd) -> list[str]:
    """Return what the plugin has done since this was last called."""
    return [call.split()[1] for call in fake_driver.plugin_calls(node.namespace) if call.startswith("--action")]


def about_plugin(node: Containerd) -> dict[str, str]:
    findings: list[dict[str, str]] = json.loads(node.ocihook("doctor", "--json", check=False))["findings"]
    return next(finding for finding in findings if finding["check"] == "criu's cuda plugin")


def test_criu_has_a_cuda_plugin(make_containerd: MakeContainerd, cuda_files: Path, cuda_plugin: Path) -> None:
    """It is kept out, a dump that it would be in is refused, and what it has made alone is restored with it."""
    node = make_containerd(cuda_files=cuda_files)
    fake_driver.install_plugin(node.namespace, cuda_plugin, Path("/opt/cuda"))
    conf = node.namespace.path("/etc/criu/runc.conf")
    container = node.start("c1", mib=VRAM_MIB, gpus=[3])
    theirs = node.checkpoint(container, "theirs.tar")
    assert actions(node) == ["lock", "checkpoint", "restore", "unlock"]

    node.install()
    assert about_plugin(node)["status"] == "ok"
    ours = node.checkpoint(container, "ours.tar")
    before = node.count(container)
    node.assert_goes_on(container, before)
    conf.write_text(f"{conf.read_text()}libdir /usr/lib/criu\n")
    assert about_plugin(node)["status"] == "fail"
    with pytest.raises(grpc.RpcError, match=r"CRIU would load /usr/lib/criu/cuda_plugin.so"):
        node.checkpoint(container, "refused.tar")
    node.assert_goes_on(container, before)
    node.remove(container)
    assert fake_driver.plugin_calls(node.namespace) == []

    for archive, done in ((ours, []), (theirs, ["restore", "unlock"])):
        restored = node.start("c2", image=f"/scratch/{archive.name}", gpus=[3])
        node.assert_counts(restored)
        assert node.count(restored)[1] == before[1]
        assert actions(node) == done
        node.remove(restored)
