"""Mode `store` with a real podman: the engine archives the small rest, the job runs, the store gets the memory."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import NOTES, Podman, assert_packed, image_names
from integration.podman.test_faults import end_dying_agent, kill_at_any_step, start_dying_agent
from tests.damage import flip_bit


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
        assert not any(name.startswith(("pages-", "ocihook-")) for name in image_names(archive) - NOTES)
        assert thin_bytes(archive) < 1 << 20
    podman.ocihook("wait")
    first, second = listed(podman)
    assert first["state"] == second["state"] == "complete"
    assert first["container"].startswith("c ("), "by its name, which no annotation has"
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
    """It goes past CRIU as always, into packs beside the store, is given back from there, and stored afterwards."""
    podman = gpu_podman
    configure(podman, podman.scratch / "store")
    podman.start_cuda("c", 24, mode="store")
    archives = [podman.scratch / "first.tar", podman.scratch / "second.tar"]
    podman.checkpoint("c", archives[0], "--leave-running")
    podman.assert_counts("c")
    assert last_session(podman.namespace, "post-dump")["facts"]["staged_in_memory"]
    podman.checkpoint("c", archives[1], *(["--leave-running"] if leave_running else []))
    if leave_running:
        podman.assert_counts("c")
    before = podman.count("c")
    podman.remove("c")
    for archive in archives:
        assert not any(
            name.startswith(("pages-", "ocihook-", "ocihook.staged")) for name in image_names(archive) - NOTES
        )
        assert thin_bytes(archive) < 1 << 20
    dump = last_session(podman.namespace, "post-dump")
    assert dump["effects"] == []
    assert leave_running or not dump["facts"]["staged_in_memory"], "nothing else has its memory"
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
    if leave_running:
        return
    podman.remove("c")
    pack = max(podman.scratch.glob("store/domains/*/packs/*.pack"), key=lambda path: path.stat().st_size)
    middle = pack.stat().st_size // 2
    flip_bit(pack, middle)
    podman.restore(archives[1], check=False)
    refused = last_session(podman.namespace, "pre-restore")["stages"]
    assert "is damaged" in refused["pre-restore"]["message"]
    assert "post-restore" not in refused, "GPU memory is verified before there is a process to write it into"
    flip_bit(pack, middle)
    complete = podman.scratch / "complete.tar"  # of a thin one: what a node without this store needs
    podman.ocihook("archive", "pack", str(archives[1]), str(complete))
    podman.remove("c")
    configure(podman, podman.scratch / "elsewhere")
    podman.restore(complete)
    podman.assert_goes_on("c", before)
    assert not list(podman.namespace.path("/run/ocihook/sessions").glob("*"))


def test_agent_killed_at_any_step(gpu_podman: Podman) -> None:
    """A dump of a GPU container, left running: it continues with its GPU state, and the checkpoint is completed."""
    podman = gpu_podman
    configure(podman, podman.scratch / "store")
    podman.start_cuda("c", 16, mode="store")
    archive = podman.scratch / "c.tar"
    made = 0

    def dump(last: int, _last_of_restore: int) -> tuple[list[str], list[str]]:
        nonlocal made
        made += 1
        archive.unlink(missing_ok=True)
        start_dying_agent(podman, last)
        podman.checkpoint("c", archive, "--leave-running")
        steps = end_dying_agent(podman)
        podman.assert_counts("c")
        assert {"ocihook.thin"} < image_names(archive)
        assert not any(
            name.startswith(("pages-", "ocihook-", "ocihook.staged")) for name in image_names(archive) - NOTES
        )
        podman.ocihook("wait")
        assert "/run/ocihook" not in podman.namespace.run("cat", "/proc/self/mountinfo")
        rows = listed(podman)
        assert [row["state"] for row in rows] == ["complete"] * made
        assert rows[-1]["raw_bytes"] > 16 << 20
        return steps, []

    kill_at_any_step(dump, rounds=8)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
    assert "every byte right" in podman.ocihook("store", "verify", "--read-data")
    podman.ocihook("store", "prune", "--keep-last", "1")
    assert len(listed(podman)) == 1
    assert "every byte right" in podman.ocihook("store", "verify", "--read-data")
    assert not list((podman.scratch / "store").glob("domains/*/pending/*"))
    assert not list(podman.namespace.path("/run/ocihook/sessions").glob("*"))


def test_a_thin_archive_without_its_store(podman: Podman) -> None:
    configure(podman, podman.scratch / "store")
    podman.start("c", mode="store")
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.ocihook("wait")
    configure(podman, podman.scratch / "elsewhere")
    podman.restore(archive, check=False)
    assert not podman.is_running("c")
    message = last_session(podman.namespace, "pre-restore")["stages"]["pre-restore"]["message"]
    assert "of domain _node is not in this node's store. Configure the remote" in message
    assert "nothing was started" in message
    podman.remove("c")
    configure(podman, podman.scratch / "store")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


def test_restore_on_another_node_pulls(podman: Podman) -> None:
    """Pushed by policy, as soon as it is complete; what the other node's store lacks comes from the remote."""
    remote, here, there = (podman.scratch / name for name in ("remote", "here", "there"))
    remote.mkdir()
    settings = f'[agent]\nidle_timeout_s = 2\nremote = "{remote}"\n'
    podman.configure(f'{settings}store_dir = "{here}"\n')
    podman.start("c", 24, mode="store", push="always")
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")

    def at_remote() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(podman.ocihook("store", "list", "--remote", "--json"))["checkpoints"]
        return rows

    wait_for("the push", lambda: bool(at_remote()))
    podman.configure(f'{settings}store_dir = "{there}"\n')
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    restore = last_session(podman.namespace, "pre-restore")
    phases = {phase["name"]: phase.get("bytes", 0) for phase in restore["phases"]}
    assert phases["pull"] > 4 << 20
    assert [row["id"] for row in listed(podman)] == [row["id"] for row in at_remote()]
    assert "every byte right" in podman.ocihook("store", "verify", "--read-data")


def test_a_store_that_cannot_be_written(podman: Podman) -> None:
    """Seen before the dump: the checkpoint goes, packed, into the engine's archive."""
    (podman.scratch / "file").touch()
    configure(podman, podman.scratch / "file" / "store")
    podman.start("c", mode="store")
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive, "--leave-running")
    assert_packed(archive)
    message = last_session(podman.namespace, "post-dump")["stages"]["pre-dump"]["message"]
    assert "The checkpoint goes into the engine's archive" in message
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))


def test_one_directory_in_every_mode(podman: Podman) -> None:
    """Without an archive podman uses one directory again and again: what an earlier dump left must not matter."""
    podman.start("c")
    for mode in ("store", "inline", "store", "off", "inline", "off", "store"):
        text = f'[policy]\nmode = "{mode}"\n[agent]\nidle_timeout_s = 2\nstore_dir = "{podman.scratch}/store"\n'
        podman.configure(text)
        podman("container", "checkpoint", "--keep", "c")
        before = podman.count("c")
        podman("container", "restore", "--keep", "c")
        podman.assert_goes_on("c", before)
