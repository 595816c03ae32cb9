"""Mode `store` with a real podman: the engine archives the small rest, the job runs, the store gets the memory."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman, image_names


def configure(podman: Podman, store: Path) -> None:
    podman.configure(f'[agent]\nidle_timeout_s = 2\nstore_dir = "{store}"\n')


def listed(podman: Podman) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"]
    return rows


def thin_bytes(archive: Path) -> int:
    with tarfile.open(archive) as tar:
        return sum(member.size for member in tar.getmembers() if member.name.startswith("checkpoint/"))


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("same_disk", [True, False])
def test_round_trip(make_podman: MakePodman, runtime: str, *, same_disk: bool) -> None:
    """Page images are linked where that is possible, and pinned where another file system has them."""
    podman = make_podman(runtime, size="" if same_disk else "300m")
    podman.install()
    configure(podman, podman.scratch / "store")
    podman.start("c", 48, mode="store")
    archives = [podman.scratch / "first.tar", podman.scratch / "second.tar"]
    podman.checkpoint("c", archives[0], "--leave-running")
    podman.assert_counts("c")
    podman.checkpoint("c", archives[1])
    before = podman.count("c")
    podman.remove("c")
    for archive in archives:
        assert {"ocihook.thin"} < image_names(archive)
        assert not any(name.startswith(("pages-", "ocihook-")) for name in image_names(archive))
        assert thin_bytes(archive) < 1 << 20
    podman.ocihook("wait")
    first, second = listed(podman)
    assert first["state"] == second["state"] == "complete"
    assert first["added_bytes"] > 10 << 20
    assert second["added_bytes"] < first["added_bytes"] / 20
    podman.restore(archives[1])
    podman.assert_goes_on("c", before)
    dump, restore = last_session(podman.namespace, "post-dump"), last_session(podman.namespace, "pre-restore")
    assert dump["effects"] == restore["effects"] == []
    assert dump["facts"]["checkpoint"] == restore["facts"]["checkpoint"] == second["id"]
    assert "every byte right" in podman.ocihook("store", "verify", "--read-data")
    assert not list(podman.namespace.path("/run/ocihook/staged").glob("*/*"))
    podman.remove("c")
    podman.restore(archives[0])
    podman.assert_goes_on("c", (1, before[1]))


@pytest.mark.parametrize("leave_running", [False, True])
def test_gpu_memory(gpu_podman: Podman, *, leave_running: bool) -> None:
    """It goes past CRIU as ever, into packs beside the store, is given back from there, and stored afterwards."""
    podman = gpu_podman
    configure(podman, podman.scratch / "store")
    podman.start_cuda("c", 24, mode="store")
    archives = [podman.scratch / "first.tar", podman.scratch / "second.tar"]
    podman.checkpoint("c", archives[0], "--leave-running")
    podman.assert_counts("c")
    podman.checkpoint("c", archives[1], *(["--leave-running"] if leave_running else []))
    if leave_running:
        podman.assert_counts("c")
    before = podman.count("c")
    podman.remove("c")
    for archive in archives:
        assert not any(name.startswith(("pages-", "ocihook-", "ocihook.staged")) for name in image_names(archive))
        assert thin_bytes(archive) < 1 << 20
    dump = last_session(podman.namespace, "post-dump")
    assert dump["effects"] == []
    assert any(phase["name"] == "gpu move out" and phase["bytes"] >= 24 << 20 for phase in dump["phases"])
    podman.restore(archives[1])
    podman.assert_goes_on("c", before)
    restore = last_session(podman.namespace, "pre-restore")
    assert restore["effects"] == []
    assert "bytes of GPU memory written" in restore["stages"]["post-restore"]["message"]
    podman.ocihook("wait")
    first, second = listed(podman)
    assert first["raw_bytes"] > 24 << 20
    assert second["added_bytes"] < first["added_bytes"] / 10
    assert "every byte right" in podman.ocihook("store", "verify", "--read-data")
    assert not list((podman.scratch / "store").glob("domains/*/pending/*"))
    assert not list(podman.namespace.path("/run/ocihook/sessions").glob("*"))
