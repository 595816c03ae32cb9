"""Members with GPUs, dumped, moved, or with an agent that is killed: all have their GPU memory afterwards."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from integration import fake_driver
from integration.gang.mesh import Mesh, succeeded
from integration.gang.nodes import limit_members
from integration.gang.test_faults import Death, kills_agent
from integration.journals import sessions
from integration.net.conftest import MakeNode

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_VRAM_MIB = 24
_PHASES = ("locked", "drained", "held", "dumped") if IS_NIGHTLY else ()
_DEATHS: list[Death] = [("locked", "behind"), *((phase, when) for phase in _PHASES for when in ("before", "behind"))]


class GpuMesh(Mesh):
    """Members under traffic, each with a process that counts on a GPU."""

    beside: Sequence[str] = ("/cuda_workload", str(_VRAM_MIB))
    options: Sequence[str] = ("--device=/dev/null:/dev/nvidiactl", f"--device={fake_driver.GPU_NODES[3]}:/dev/nvidia0")

    def __init__(self, make_node: MakeNode, cuda_files: Path, runtime: str = "runc") -> None:
        """Start all, and wait until they work."""
        self.node = make_node(runtime, cuda_files=cuda_files)
        limit_members(self.node)
        super().__init__([self.node], 2)
        for name in self.names:
            self.node.assert_counts(name)

    def counts(self) -> dict[str, tuple[int, str]]:
        """Return the last count of each member's process, and the checksum of its GPU memory."""
        return {name: self.node.count(name) for name in self.names}

    def assert_goes_on(self, before: dict[str, tuple[int, str]]) -> None:
        """Check that all count on with the GPU memory they had, that traffic flows, and that nothing is left."""
        for name in self.names:
            self.node.assert_goes_on(name, before[name])
        self.assert_flows()
        self.assert_nothing_is_left()


@pytest.mark.parametrize("runtime", ["runc", "crun"] if IS_NIGHTLY else ["runc"])
def test_members_have_their_gpu_memory(make_node: MakeNode, cuda_files: Path, runtime: str) -> None:
    mesh = GpuMesh(make_node, cuda_files, runtime)
    before = mesh.counts()
    succeeded(mesh.checkpoint("--leave-running"))
    assert "1 connections" in mesh.verify()
    mesh.assert_goes_on(before)
    dumps = [session for session in sessions(mesh.node.namespace) if "post-dump" in session["stages"]]
    assert len(dumps) == len(mesh.names)
    for dump in dumps:
        done = {phase["name"]: phase["bytes"] for phase in dump["phases"]}
        assert done["gpu checkpoint"] >= _VRAM_MIB << 20
    mesh.move(1)
    succeeded(mesh.restore())
    mesh.assert_goes_on(before)


def test_an_agent_is_killed_when_all_are_locked(make_node: MakeNode, cuda_files: Path) -> None:
    mesh = GpuMesh(make_node, cuda_files)
    state, before = mesh.state(), mesh.counts()
    for death in _DEATHS:
        kills_agent(mesh.node, death, lambda: mesh.checkpoint("--leave-running"))
        mesh.assert_goes_on(before)
        assert mesh.state() == state
    succeeded(mesh.checkpoint("--leave-running"))
    mesh.assert_goes_on(before)
