"""containerd over the handler: a pod that is created again, under another name, resumes where the old one was."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.cri.engine import POD_NETWORK
from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd
from ocihook.archive.repack import read_origin

STOPPED: dict[str, Any] = {"checkpoint_on_stop": "true", "member": "job"}
AGAIN: dict[str, Any] = {"restore_from": "latest", **STOPPED}


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    yield node
    node.close()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_pod_that_is_made_anew_goes_on(node: HandledContainerd, runtime: str) -> None:
    container = node.start("first", mib=4, runtime=runtime, network=POD_NETWORK, container_name="main", **AGAIN)
    before = node.count(container)
    node.write_in(container, "/state/file", "kept")
    last = node.stop(container)
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
    kept = node.namespace.path("/run/ocihook/containers")
    wait_for("all to be forgotten", lambda: not [*kept.iterdir()])


def test_what_cannot_go_on(node: HandledContainerd) -> None:
    """The checkpoint of another namespace, a container that is restarted in its pod, and one that is not ours."""
    container = node.start("first", mib=4, **STOPPED)
    node.stop(container)
    other = node.start("other", mib=4, namespace="team-b", container_name="first", **AGAIN)
    assert node.counts(other)[0] == 1
    node.remove(other)
    again = node.start("first", mib=4, **AGAIN)  # the pod's uid is its name here: the same pod
    assert node.counts(again)[0] == 1
    node.remove(again)
    assert node.counts(node.start("plain", mib=4))[0] == 1
