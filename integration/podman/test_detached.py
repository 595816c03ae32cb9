"""A container that is left running continues before its memory is packed; the engine waits for that, whatever dies."""

import json
import os
import re
import signal
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman, assert_packed, image_names
from integration.podman.test_faults import end_agent, start_agent
from integration.podman.test_gpu_faults import act_at

HOLDING_AGENT = Path(__file__).parents[1] / "holding_agent.py"


def start(podman: Podman, *, gpu: bool, on_pack_error: str = "keep") -> None:
    if gpu:
        podman.start_cuda("c", 24, "children=1", "watch", on_pack_error=on_pack_error, preflight="warn")
    else:
        podman.start("c", on_pack_error=on_pack_error, quiesce_signal="USR1", resume_signal="USR2")


class Checkpoint:
    """One that has come as far as to pack, and is held there."""

    def __init__(self, podman: Podman) -> None:
        self.archive = podman.scratch / "c.tar"
        self.output = ""
        self._podman = podman
        end_agent(podman)
        for name in ("held", "go"):
            (podman.namespace.path("/run/ocihook") / name).unlink(missing_ok=True)
        start_agent(podman, HOLDING_AGENT, "detached")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for("the memory to be packed", podman.namespace.path("/run/ocihook/held").exists)
        assert self._thread.is_alive(), "podman did not wait"

    def _run(self) -> None:
        self.output = self._podman.checkpoint("c", self.archive, "--leave-running", check=False)

    def go_on(self) -> None:
        self._podman.namespace.path("/run/ocihook/go").touch()

    def join(self) -> None:
        self._thread.join()


@contextmanager
def held(podman: Podman) -> Iterator[Checkpoint]:
    """Checkpoint, and yield while its memory is packed; afterwards it has ended, and nothing is left."""
    checkpoint = Checkpoint(podman)
    try:
        yield checkpoint
    finally:
        checkpoint.go_on()
        checkpoint.join()
    assert all(session["effects"] == [] for session in sessions(podman.namespace))
    assert not list(podman.namespace.path("/run/ocihook/sessions").iterdir())
    assert "/run/ocihook" not in podman.namespace.run("cat", "/proc/self/mountinfo")
    assert not [path for path in podman.scratch.rglob("stats-dump*") if path.is_fifo()]


def kill_agent(podman: Podman) -> None:
    """Kill the agent with all its processes, and wait until none is left."""
    pid = podman.namespace.path("/run/ocihook/agent.lock").read_text().strip()
    podman.namespace.run("kill", "-KILL", pid)
    podman.namespace.run("flock", "--timeout", "60", "/run/ocihook/agent.lock", "true")


def assert_restores(podman: Podman, archive: Path) -> None:
    before = podman.count("c")
    podman.ocihook("archive", "verify", str(archive))
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (0, before[1]))


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize(("gpu", "bound_mib"), [(False, 256), (True, 256), (True, 64)])
def test_it_runs_while_its_memory_is_packed(
    make_podman: MakePodman, cuda_files: Path, runtime: str, bound_mib: int, *, gpu: bool
) -> None:
    podman = make_podman(runtime, cuda_files=cuda_files)
    podman.configure(f"[agent]\nidle_timeout_s = 2\nmemory_bound_bytes = {bound_mib << 20}\n")
    podman.install()
    start(podman, gpu=gpu)
    with held(podman) as checkpoint:
        podman.assert_counts("c")
        if not gpu:
            wait_for("the application to be told to go on", lambda: "resumed" in podman("logs", "c"))
    assert not checkpoint.output.startswith("Error")
    assert_packed(checkpoint.archive)
    dump = last_session(podman.namespace, "detached")
    assert dump["stages"]["detached"]["status"] == 0
    assert dump["facts"]["criu_statistics"]["frozen"] > 0
    phases = [phase["name"] for phase in dump["phases"]]
    assert ("take in" in phases) == (gpu and bound_mib > 64), "GPU memory does not wait in memory, where it fits"
    assert not gpu or phases.index("gpu resume") < phases.index("pack")
    with tarfile.open(checkpoint.archive) as tar:
        assert [member.isfile() for member in tar if member.name.endswith("stats-dump")] == [True]
    assert_restores(podman, checkpoint.archive)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_agent_is_killed_and_another_finishes(gpu_podman: Podman, *, gpu: bool) -> None:
    podman = gpu_podman
    start(podman, gpu=gpu)
    with held(podman) as checkpoint:
        kill_agent(podman)
        podman.assert_counts("c")
        checkpoint.join()  # nobody but the hook's own process starts an agent
    assert_packed(checkpoint.archive)
    assert_restores(podman, checkpoint.archive)


@pytest.mark.parametrize("gpu", [False, True])
def test_agent_and_hook_are_killed_and_the_dump_is_taken_back(gpu_podman: Podman, *, gpu: bool) -> None:
    podman = gpu_podman
    start(podman, gpu=gpu)
    with held(podman) as checkpoint:
        hooks = podman.namespace.pids("ocihook.hook.client")
        for pid in hooks:
            os.kill(pid, signal.SIGKILL)
        assert hooks
        kill_agent(podman)
        podman.assert_counts("c")
        assert re.search("undone .*kept-from-end", podman.ocihook("recover"))
        checkpoint.join()
    assert "rror" in checkpoint.output
    podman.assert_counts("c")
    again = podman.scratch / "again.tar"
    podman.checkpoint("c", again, "--leave-running")
    assert_restores(podman, again)


@pytest.mark.parametrize("victim", ["runtime", "criu"])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_caller_no_longer_waits(gpu_podman: Podman, victim: str, *, gpu: bool) -> None:
    podman = gpu_podman
    start(podman, gpu=gpu)
    with held(podman) as checkpoint:
        (journal,) = podman.namespace.path("/run/ocihook/sessions").glob("*.json")
        os.kill(json.loads(journal.read_text())[victim][0], signal.SIGKILL)
        checkpoint.join()
    assert "rror" in checkpoint.output
    message = last_session(podman.namespace, "detached")["stages"]["detached"]["message"]
    assert "was killed meanwhile. The dump fails, the container runs on" in message
    podman.assert_counts("c")


@pytest.mark.parametrize(("on_pack_error", "gpu"), [("keep", False), ("fail", False), ("keep", True), ("fail", True)])
def test_a_disk_that_is_full_by_then(
    make_podman: MakePodman, cuda_files: Path, on_pack_error: str, *, gpu: bool
) -> None:
    """Without packs of theirs the images are the checkpoint, with those of GPU memory, which were there before."""
    podman = make_podman("runc", size="96m", cuda_files=cuda_files)
    podman.install()
    start(podman, gpu=gpu, on_pack_error=on_pack_error)
    store = podman.namespace.path(str(podman.scratch / "podman"))
    script = podman.namespace.path("/etc/fill")
    filler = podman.scratch / "podman/filler"
    script.write_text(
        "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-dump ] || [ -e "
        f"{filler} ] || head -c $(($(df --output=avail -k {podman.scratch}/podman | tail -n 1) * 1024 - 65536)) "
        f"/dev/zero >{filler}\n"
    )
    script.chmod(0o755)
    conf = podman.namespace.path("/etc/criu/runc.conf")
    conf.write_text(f"action-script /etc/fill\n{conf.read_text()}")
    archive = podman.scratch / "c.tar"
    is_complete = on_pack_error == "keep"
    output = podman.checkpoint("c", archive, "--leave-running", check=is_complete)
    (store / "filler").unlink()
    podman.assert_counts("c")
    dump = last_session(podman.namespace, "detached")
    assert dump["effects"] == []
    assert "o space left" in dump["stages"]["detached"]["message"]
    if is_complete:
        assert "The checkpoint is complete but not packed" in dump["stages"]["detached"]["message"]
        assert any(name.startswith("pages-") for name in image_names(archive))
        assert any(name.startswith("ocihook-region-") for name in image_names(archive)) == gpu
        assert not any(name.startswith("ocihook-0") for name in image_names(archive))
        assert_restores(podman, archive)
        return
    assert "The dump fails, the container runs on" in dump["stages"]["detached"]["message"]
    assert "o space left" in output
    assert "o space left" in dump["error"]
    assert not list(store.rglob("ocihook*.pack"))


def test_images_without_their_gpu_memory_say_so(gpu_podman: Podman) -> None:
    """For a hook that has no agent to ask, and must not take them for a checkpoint."""
    podman = gpu_podman
    start(podman, gpu=True)
    act_at(podman, "post-dump", "ls $CRTOOLS_IMAGE_DIR >/run/names")
    archive = podman.scratch / "c.tar"
    podman.checkpoint("c", archive, "--leave-running")
    names = podman.namespace.path("/run/names").read_text().split()
    assert "ocihook.staged" in names
    assert not any(name.endswith(".pack") for name in names)
    assert "ocihook.staged" not in image_names(archive)
    assert_restores(podman, archive)
