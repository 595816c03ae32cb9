"""containerd over the handler: a pod that is created again, under another name, resumes where the old one was."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration import fake_driver
from integration.cri.engine import POD_NETWORK
from integration.namespace import CommandError, wait_for
from integration.runtime.engine import HandledContainerd, assert_streamed
from ocihook.archive.repack import read_origin

STOPPED: dict[str, Any] = {"checkpoint_on_stop": "true", "member": "job"}
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
NIGHTLY = pytest.mark.skipif(not IS_NIGHTLY, reason="CI takes some of all kills")
AGAIN: dict[str, Any] = {"restore_from": "latest", **STOPPED}


@pytest.fixture
def node(
    scratch: Path, forky_root: Path, wheels: Path, workload: Path, cuda_files: Path
) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed, and a stand-in for NVIDIA's driver."""
    node = HandledContainerd(scratch, forky_root, wheels, workload, cuda_files=cuda_files)
    node.install()
    yield node
    node.close()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_pod_that_is_made_anew_goes_on(node: HandledContainerd, runtime: str) -> None:
    node.configure('[agent]\nidle_timeout_s = 2\nremote = "/scratch/remote"\n[policy]\npush = "always"\n')
    (node.scratch / "remote").mkdir()
    container = node.start("first", mib=4, runtime=runtime, network=POD_NETWORK, container_name="main", **AGAIN)
    before = node.count(container)
    node.write_in(container, "/state/file", "kept")
    last = node.stop(container)
    pushed = (node.scratch / "remote/domains").glob
    wait_for("its push", lambda: [*pushed("*/checkpoints/*.manifest")] != [])
    node.ocihook("wait")
    node.namespace.run("rm", "-rf", "/var/lib/ocihook/store")  # as on another node
    archive, counts = Path(), [0]
    for name in ("second", "third"):
        container = node.start(name, mib=4, runtime=runtime, network=POD_NETWORK, container_name="main", **AGAIN)
        counts = node.counts(container)
        assert counts == list(range(last + 1, last + 1 + len(counts)))
        assert node.count(container)[1] == before[1]
        assert node.file(container, "/state/file").read_text() == "kept"
        assert container in Path(f"/proc/{node.init_pid(container)}/cgroup").read_text()
        archive = node.checkpoint(container, f"{name}.tar")  # the engine's own, of what the handler has restored
        assert archive.stat().st_size > 0
        node.assert_counts(container)
        last = node.stop(container)
    _, origin, _ = read_origin(archive)
    assert origin is not None
    archives = node.namespace.path("/var/lib/ocihook/archives")
    archives.mkdir(mode=0o700)
    shutil.copy(archive, archives)
    fourth: dict[str, Any] = {**STOPPED, "restore_from": origin.id, "on_restore_error": "fail"}
    container = node.start("fourth", mib=4, runtime=runtime, network=POD_NETWORK, container_name="main", **fourth)
    assert counts[0] < node.counts(container)[0] <= last  # the engine let the container run on
    assert node.count(container)[1] == before[1]
    assert node.file(container, "/state/file").read_text() == "kept"
    node.stop(container)
    image = "/scratch/third.tar"  # which containerd itself restores
    container = node.start("fifth", image=image, runtime=runtime, container_name="main", **STOPPED)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    assert counts[0] < node.counts(container)[0] <= last
    assert node.count(container)[1] == before[1]
    node.stop(container)
    kept = node.namespace.path("/run/ocihook/containers")
    wait_for("all to be forgotten", lambda: not [*kept.iterdir()])


def test_what_cannot_go_on(node: HandledContainerd) -> None:
    """The checkpoint of another namespace, a container that is restarted in its pod, and one that is not ours."""
    container = node.start("first", mib=4, **STOPPED)
    last = node.stop(container)
    other = node.start("other", mib=4, namespace="team-b", container_name="first", **AGAIN)
    assert node.counts(other)[0] == 1
    node.remove(other)
    domain = node.namespace.path("/var/lib/ocihook/store/domains/default")
    wait_for("it to be stored", lambda: any(domain.glob("checkpoints/*.manifest")))
    (named,) = (path.stem for path in domain.glob("checkpoints/*.manifest"))
    strict: dict[str, Any] = {"restore_from": named, "on_no_checkpoint": "fail"}
    with pytest.raises(grpc.RpcError, match=rf"no checkpoint {named} of .* in domain team-b .*Nothing was started"):
        node.start("thief", mib=4, namespace="team-b", **strict)
    node.configure('[restore_from]\nteam-b = ["default"]\n')
    allowed = node.start("allowed", mib=4, namespace="team-b", **strict)
    assert node.counts(allowed)[0] == last + 1
    node.remove(allowed)
    again = node.start("first", mib=4, **AGAIN)  # the pod's uid is its name here: the same pod
    assert node.counts(again)[0] == 1
    node.remove(again)
    assert node.counts(node.start("plain", mib=4))[0] == 1


def test_a_checkpoint_of_another_driver(node: HandledContainerd) -> None:
    """It is refused with the reason, and left as it was: with its own driver it is restored."""

    def make(pod: str, **annotations: str) -> str:
        container = node.add(node.make_pod(pod, member="job", **annotations), pod, "main", "8", "watch", gpus=[3])
        node.call("StartContainer", container_id=container)
        wait_for("it to count", lambda: len(node.counts(container)) > 2)
        return container

    last = node.stop(make("first", checkpoint_on_stop="true"))
    fake_driver.script(node.namespace, "driver 570.0")
    with pytest.raises(
        grpc.RpcError, match=r"made with driver 580\.159\.04, this node has 570\.0.*Nothing was started"
    ):
        make("second", restore_from="latest", on_restore_error="fail")
    assert not node.namespace.pids("cuda_workload")
    fake_driver.script(node.namespace)
    assert node.counts(make("third", restore_from="latest", on_restore_error="fail"))[0] == last + 1


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_pod_of_two_containers(node: HandledContainerd, runtime: str) -> None:
    """They share volumes, in which files are open, one at /dev/shm; one has a GPU. The second pod is like any other."""
    main = ("stream", "4", "/cache/open", "/dev/shm/open")
    log = ""
    volumes = ("/cache", "/dev/shm")
    saved: dict[str, tuple[int, str]] = {}
    ids: dict[str, str] = {}
    for pod in ("first", "second"):
        sandbox = node.make_pod(pod, runtime, member="job", restore_from="latest", checkpoint_on_stop="true")
        ids = {
            "main": node.add(sandbox, pod, "main", *main, volumes=volumes),
            "gpu": node.add(sandbox, pod, "gpu", "8", "watch", volumes=volumes, gpus=[3], has_terminal=True),
        }
        for container in ids.values():
            node.call("StartContainer", container_id=container)
        for name, container in ids.items():
            wait_for(f"{name} to count", lambda container=container: len(node.counts(container)) > 2)  # type: ignore[misc]
            if saved:
                assert node.counts(container)[0] == saved[name][0] + 1, name
                assert node.count(container)[1] == saved[name][1], name
        if not saved:
            node.write_in(ids["gpu"], "/cache/beside", "kept")
            opt = node.file(ids["main"], "/opt")
            (opt / "removed").unlink()
            shutil.rmtree(opt / "tree")
            node.write_in(ids["main"], "/opt/tree/upper", "of the container")
            for container in ids.values():
                node.call("StopContainer", container_id=container, timeout=60)
            saved = {name: node.count(container) for name, container in ids.items()}
            log = node.log(ids["main"])
            said = node.namespace.path("/run/ocihook/agent.log").read_text()
            assert "its volume /cache is saved while gpu may write to it" in said  # which was stopped later
            assert "while main may write" not in said
            node.remove(ids["main"])
    assert_streamed(log, node.log(ids["main"]))
    top = node.file(ids["main"], "/")
    assert sorted(path.name for path in (top / "opt").iterdir()) == ["kept", "tree"]
    assert [path.name for path in (top / "opt/tree").iterdir()] == ["upper"]
    for path in ("cache/open", "dev/shm/open"):
        wait_for(path, lambda path=path: int.from_bytes((top / path).read_bytes(), "little") > saved["main"][0])  # type: ignore[misc]
    assert node.file(ids["gpu"], "/cache/beside").read_text() == "kept"
    assert "said" in node.ctr("tasks", "exec", "--exec-id", "one", ids["main"], "/workload", "say", "said")
    assert ids["main"] in node.ctr("tasks", "metrics", ids["main"])
    node.ctr("tasks", "pause", ids["main"])
    still = node.counts(ids["main"])
    node.ctr("tasks", "resume", ids["main"])
    node.assert_counts(ids["main"])
    assert node.counts(ids["main"])[: len(still)] == still
    node.call("StopContainer", container_id=ids["gpu"], timeout=0)  # at once: no checkpoint
    node.remove(ids["main"])
    for container in ids.values():
        wait_for(f"{container} to be gone", lambda container=container: not node.processes(container))  # type: ignore[misc]
    wait_for("all to be forgotten", lambda: not [*node.namespace.path("/run/ocihook/containers").iterdir()])


def test_the_memory_limit_counts_for_what_was_restored(
    scratch: Path, forky_root: Path, wheels: Path, workload: Path
) -> None:
    node = HandledContainerd(scratch, forky_root, wheels, workload, cgroup_version=1)
    try:
        node.install()
        saved, container = 0, ""
        for pod in ("first", "second"):
            sandbox = node.make_pod(pod, **AGAIN)
            container = node.add(sandbox, pod, "main", "4", memory_mib=64)
            node.call("StartContainer", container_id=container)
            wait_for("it to count", lambda: len(node.counts(container)) > 2)  # noqa: B023
            assert node.counts(container)[0] == saved + 1
            if not saved:
                saved = node.stop(container)
        files = Path("/sys/fs/cgroup").glob(f"**/{container}/memory.*")
        (limit,) = (file for file in files if file.name in ("memory.limit_in_bytes", "memory.max"))
        assert int(limit.read_text()) == 64 << 20
        assert node.init_pid(container) in map(int, limit.with_name("cgroup.procs").read_text().split())
        with pytest.raises(CommandError, match="137"):
            node.ctr("tasks", "exec", "--exec-id", "large", container, "/workload", "200")
        node.assert_counts(container)
    finally:
        node.close()


# In the order in which CI takes some of them; a nightly run takes all.
RESTORES = [
    *[("post-resume", "caller"), ("post-restore", "shim"), ("setup-namespaces", "agent"), ("post-resume", "worker")],
    *[("post-resume", "runtime"), ("setup-namespaces", "criu"), ("setup-namespaces", "shim"), ("post-resume", "shim")],
    *[(stage, who) for stage in ("setup-namespaces", "post-restore") for who in ("caller", "worker", "runtime")],
    *[("post-restore", "criu"), ("post-resume", "criu"), ("post-restore", "agent"), ("post-resume", "agent")],
]
STOPS = [
    *[("post-dump", "wrapper"), ("post-dump", "shim"), ("pre-dump", "agent"), ("post-dump", "criu")],
    *[("pre-dump", "wrapper"), ("pre-dump", "shim"), ("post-dump", "agent"), ("pre-dump", "criu")],
    *[("pre-dump", "runtime"), ("post-dump", "runtime")],
]


class Pods:
    """Pods of one member, one after another, of which somebody is killed."""

    def __init__(self, node: HandledContainerd, runtime: str) -> None:
        self.node, self.runtime = node, runtime
        self.number = 0

    def make(self) -> str:
        """Make the next pod with its container, which is not started."""
        self.number += 1
        pod = f"pod{self.number}"
        sandbox = self.node.make_pod(pod, self.runtime, **AGAIN)
        return self.node.add(sandbox, pod, "main", "4")

    def kill_in(self, stage: str, find: Callable[[], int], method: str, **fields: Any) -> None:  # noqa: ANN401 - of a message
        """Call a method, and kill somebody when CRIU is at a stage; that the call fails does not matter."""
        self.node.stall_at(stage)
        with ThreadPoolExecutor() as pool:
            calling = pool.submit(self.node.call, method, **fields)
            self.node.wait_for_stall()
            os.kill(find(), signal.SIGKILL)
            self.node.go_on()
            calling.exception()

    def stop_longer_than_its_grace(self, container: str) -> int:
        """Stop a container by a dump that takes longer than the grace period; remove it, and return its last count."""
        self.node.stall_at("post-dump")
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            calling = pool.submit(self.node.call, "StopContainer", container_id=container, timeout=1)
            self.node.wait_for_stall()
            wait_for("the grace period to be over", lambda: time.monotonic() > began + 1)
            self.node.go_on()
            calling.result()
        last = self.node.counts(container)[-1]
        self.remove(container)
        return last

    def remove(self, container: str) -> None:
        """Remove a container with its pod: nothing is left of it."""
        self.node.remove(container)
        wait_for("its processes to be gone", lambda: not self.node.processes(container))
        kept = self.node.namespace.path(f"/run/ocihook/containers/{container}")
        wait_for(f"{container} to be forgotten", lambda: not kept.exists())

    def start(self, container: str) -> int:
        """Start a container; return the first count that it has printed."""
        self.node.call("StartContainer", container_id=container)
        wait_for("it to count", lambda: len(self.node.counts(container)) > 2)
        return self.node.counts(container)[0]


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=NIGHTLY)])
def test_kills(node: HandledContainerd, runtime: str) -> None:
    """The container is restored, starts over, or is not made: never twice, and never with the files of another."""
    pods = Pods(node, runtime)
    container = pods.make()
    pods.start(container)
    node.write_in(container, "/state/file", "kept")
    node.stall()
    saved = pods.stop_longer_than_its_grace(container)
    for stage, who in RESTORES[: None if IS_NIGHTLY else 2]:
        container = pods.make()
        pods.kill_in(
            stage,
            partial(node.shim_pid, container) if who == "shim" else partial(node.restorer, who),
            "StartContainer",
            container_id=container,
        )
        if node.is_running(container):
            wait_for("it to count", lambda: len(node.counts(container)) > 2)  # noqa: B023
            counts = node.counts(container)
            is_restored = counts == list(range(saved + 1, saved + 1 + len(counts)))
            assert is_restored or counts[-1] <= len(counts), (stage, who, counts)
            assert is_restored == node.file(container, "/state/file").exists(), (stage, who)
            assert is_restored or who != "agent", (stage, who)
        else:
            wait_for(f"{who} killed at {stage} to have left nothing", lambda: not node.processes(container))  # noqa: B023
        pods.remove(container)
        node.namespace.run("sh", "-c", "rm -f /var/lib/ocihook/store/restoring/*.attempts")

    container = pods.make()
    first = pods.start(container)
    assert first == saved + 1
    for stage, who in STOPS[: None if IS_NIGHTLY else 2]:
        pods.kill_in(
            stage,
            partial(node.shim_pid, container) if who == "shim" else partial(node.stopper, who),
            "StopContainer",
            container_id=container,
            timeout=60,
        )
        if node.is_running(container):  # its own call was killed: a kubelet asks again
            node.call("StopContainer", container_id=container, timeout=1)
        last = node.counts(container)[-1]
        pods.remove(container)
        container = pods.make()
        first = pods.start(container)
        if who in {"wrapper", "agent"}:
            assert first == last + 1, (stage, who)
        assert first == saved + 1 or first > last, (stage, who)
        saved = first - 1
