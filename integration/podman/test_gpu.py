"""Containers with CUDA processes through podman, over the stand-in: what comes back is what was there."""

from pathlib import Path

import pytest

from integration.journals import last_session
from integration.podman.conftest import MakePodman
from integration.podman.engine import assert_packed, image_names
from integration.soft_dirty import track_memory

VRAM_MIB = 48


def region_packs(names: set[str]) -> list[str]:
    return [name for name in names if name.startswith("ocihook-region-")]


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("gpu_memory", ["packs", "criu"])
@pytest.mark.parametrize("leave_running", [False, True])
def test_round_trip(
    make_podman: MakePodman, cuda_files: Path, runtime: str, gpu_memory: str, *, leave_running: bool
) -> None:
    podman = make_podman(runtime, cuda_files=cuda_files)
    podman.install()
    podman.start_cuda("c", VRAM_MIB, "watch", gpu_memory=gpu_memory)
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive, *(["--leave-running"] if leave_running else []))
    before = podman.count("c")
    if leave_running:
        podman.assert_goes_on("c", before)
    podman.remove("c")
    dump = last_session(podman.namespace, "post-dump")
    assert dump["effects"] == []
    assert_packed(archive)
    assert bool(region_packs(image_names(archive))) == (gpu_memory == "packs")
    moved = {phase["name"]: phase["bytes"] for phase in dump["phases"]}
    assert moved["gpu checkpoint"] >= VRAM_MIB << 20
    assert moved.get("gpu move out", 0) == (moved["gpu checkpoint"] if gpu_memory == "packs" else 0)
    assert (moved["pack"] >= VRAM_MIB << 20) == (gpu_memory == "criu")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    restore = last_session(podman.namespace, "post-resume")
    assert restore["effects"] == []
    written = [phase["bytes"] for phase in restore["phases"] if phase["name"] == "gpu write back"]
    assert written == ([moved["gpu checkpoint"]] if gpu_memory == "packs" else [])


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_snapshot_has_gpu_memory(make_podman: MakePodman, cuda_files: Path, runtime: str) -> None:
    """It is never moved out, nor given back: its process has its GPU again before its memory is read."""
    podman = make_podman(runtime, cuda_files=cuda_files)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman.namespace)
    podman.start_cuda("c", 96, "watch", "own-code", mode="store")
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive, "--leave-running")
    before = podman.count("c")
    podman.assert_goes_on("c", before)
    podman.ocihook("wait")
    dump = last_session(podman.namespace, "snapshot")
    assert dump["effects"] == []
    names = [phase["name"] for phase in dump["phases"]]
    assert not {"gpu move out", "gpu give back"} & set(names)
    assert names.index("fork") < names.index("gpu resume") < names.index("snapshot read")
    (read,) = (phase["bytes"] for phase in dump["phases"] if phase["name"] == "snapshot read")
    assert read >= 96 << 20
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
    podman.remove("c")
