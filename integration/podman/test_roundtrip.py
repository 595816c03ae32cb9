"""podman with runc and with crun: what is checkpointed through ocihook is packed, and continues after a restore."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman, assert_packed, image_names


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("leave_running", [False, True])
def test_round_trip(make_podman: MakePodman, runtime: str, *, leave_running: bool) -> None:
    podman = make_podman(runtime)
    archive, plain = podman.scratch / "packed.tar", podman.scratch / "plain.tar"
    podman.start("c")
    podman.checkpoint("c", plain, "--leave-running")
    podman.install()
    podman.checkpoint("c", archive, *(["--leave-running"] if leave_running else []))
    if leave_running:
        podman.assert_counts("c")
    before = podman.count("c")
    podman.remove("c")
    assert_packed(archive)
    assert any(name.startswith("pages-") for name in image_names(plain))
    assert archive.stat().st_size < plain.stat().st_size * 0.6
    dump = last_session(podman.namespace, "post-dump")
    assert dump["container"]["engine"] == "podman"
    assert dump["container"]["runtime"] == runtime
    assert dump["facts"]["leave_running"] is leave_running
    assert dump["effects"] == []

    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert podman.is_running("c")
    restore = last_session(podman.namespace, "pre-restore")
    assert restore["stages"]["pre-restore"]["status"] == 0
    assert restore["effects"] == []


def test_two_checkpoints_at_once_do_not_meet(podman: Podman) -> None:
    names = ["a", "b"]
    for name in names:
        podman.start(name, 48)
    archives = [podman.scratch / f"{name}.tar" for name in names]
    with ThreadPoolExecutor() as pool:
        list(pool.map(podman.checkpoint, names, archives))
    before = [podman.count(name) for name in names]
    assert before[0][1] != before[1][1], "both workloads have the same memory; the test would prove nothing"
    assert len({tuple(session["criu"]) for session in sessions(podman.namespace)}) == 2
    for name in names:
        podman.remove(name)
    for archive in archives:
        assert_packed(archive)
    with ThreadPoolExecutor() as pool:
        list(pool.map(podman.restore, archives))
    for name, counted in zip(names, before, strict=True):
        podman.assert_goes_on(name, counted)


def test_checkpoint_kept_in_place_restores_and_is_checkpointed_again(podman: Podman) -> None:
    """Without an archive podman uses one directory again and again: packs of an earlier dump must not matter."""
    podman.start("c")
    for _ in range(2):
        podman("container", "checkpoint", "--keep", "c")
        before = podman.count("c")
        podman("container", "restore", "--keep", "c")
        podman.assert_goes_on("c", before)


def test_quiesce_and_resume(podman: Podman) -> None:
    archive = podman.scratch / "c.tar"
    podman.start("c", quiesce_signal="USR1", resume_signal="USR2")
    podman.checkpoint("c", archive, "--leave-running")
    sessions(podman.namespace)
    wait_for("the application to be told to go on", lambda: "resumed" in podman("logs", "c"))
    assert podman("logs", "c").count("quiesced") == 1
    podman.remove("c")
    podman.restore(archive)
    wait_for("the restored application to be told to go on", lambda: "resumed" in podman("logs", "c"))


def test_uninstalled_node_restores_an_unpacked_archive_only(podman: Podman) -> None:
    packed, plain = podman.scratch / "packed.tar", podman.scratch / "plain.tar"
    podman.start("c")
    podman.checkpoint("c", packed)
    before = podman.count("c")
    podman.remove("c")
    podman.ocihook("archive", "unpack", str(packed), str(plain))
    podman.ocihook("uninstall", "--libexec", "/etc/ocihook/libexec")
    podman.restore(plain)
    podman.assert_goes_on("c", before)
    podman.remove("c")
    assert "rror" in podman.restore(packed, check=False)
    assert not podman.is_running("c")


def test_archive_packed_afterwards_restores(make_podman: MakePodman) -> None:
    podman = make_podman("runc")
    plain, packed = podman.scratch / "plain.tar", podman.scratch / "packed.tar"
    podman.start("c")
    podman.checkpoint("c", plain)
    before = podman.count("c")
    podman.remove("c")
    podman.ocihook("archive", "pack", str(plain), str(packed))
    assert_packed(packed)
    podman.install()
    podman.restore(packed)
    podman.assert_goes_on("c", before)


def test_doctor_tells_whether_it_will_work(make_podman: MakePodman) -> None:
    podman = make_podman("runc")
    before = podman.ocihook("doctor", check=False)
    assert "runc does not call ocihook" in before
    assert "A checkpoint will not work here." in before
    podman.install()
    assert "A checkpoint will work here" in podman.ocihook("doctor")


def test_sessions_are_shown(podman: Podman) -> None:
    podman.start("c")
    podman.checkpoint("c", podman.scratch / "c.tar")
    sessions(podman.namespace)
    shown = podman.ocihook("ps", "--all")
    assert re.search(r" c \([0-9a-f]{12}\) +dump +done", shown)
    assert "No session is open." in podman.ocihook("recover")
