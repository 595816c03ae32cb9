"""Runtimes under other names."""

from collections.abc import Iterator
from pathlib import Path

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
