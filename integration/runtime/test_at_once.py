"""Two checkpoints of one container at once by the CRI; and runtimes under other names."""

import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from integration.namespace import wait_for
from integration.podman.engine import assert_packed
from integration.runtime.engine import HandledContainerd


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    yield node
    node.close()


@pytest.mark.parametrize("notes", [{}, {"checkpoint_on_stop": "true"}], ids=["plain", "handled"])
def test_a_second_checkpoint_is_refused_and_the_first_is_not_harmed(
    node: HandledContainerd, notes: dict[str, str]
) -> None:
    """The first one is dumped, and its archive is being written into a pipe, which is full."""
    container = node.add(node.make_pod("job", **notes), "job", "main", "8")
    node.call("StartContainer", container_id=container)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    os.mkfifo(node.scratch / "first")
    pipe = os.open(node.scratch / "first", os.O_RDONLY | os.O_NONBLOCK)
    with ThreadPoolExecutor() as pool, (node.scratch / "first.tar").open("wb") as archive:
        first = pool.submit(node.call, "CheckpointContainer", container_id=container, location="/scratch/first")
        wait_for("the archive", lambda: bool(select.select([pipe], [], [], 0)[0]))
        with pytest.raises(grpc.RpcError) as refused:
            node.checkpoint(container, "second.tar")
        while not first.done():
            if select.select([pipe], [], [], 0.05)[0]:
                archive.write(os.read(pipe, 1 << 20))
        first.result()
        while data := os.read(pipe, 1 << 20):
            archive.write(data)
    os.close(pipe)
    said = str(refused.value) + node.namespace.path("/run/ocihook/agent.log").read_text()
    assert "its engine still writes the archive of another checkpoint of this container" in said
    assert "every checksum right" in node.ocihook("archive", "verify", "/scratch/first.tar")
    node.assert_counts(container)
    assert node.checkpoint(container, "third.tar").stat().st_size > 0


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_wrapper_that_executes_a_copy_of_a_runtime(node: HandledContainerd, runtime: str) -> None:
    """Neither the program's name nor its first argument says which runtime it is."""
    real = {"runc": "/usr/sbin/runc", "crun": "/usr/bin/crun"}[runtime]
    wrapper = node.namespace.path(f"/usr/local/bin/limitless-{runtime}")
    node.namespace.run("cp", real, "/usr/local/lib/low-level")
    wrapper.write_text(wrapper.read_text().replace(f'"{real}"', '"/usr/local/lib/low-level"'))
    container = node.add(node.make_pod("job", runtime), "job", "main", "8")
    node.call("StartContainer", container_id=container)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    assert_packed(node.checkpoint(container, "job.tar"))
    node.assert_counts(container)
