"""A containerd for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.containerd.engine import Containerd

MakeContainerd = Callable[..., Containerd]


@pytest.fixture
def make_containerd(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[MakeContainerd]:
    """Return a function that makes a containerd; all are removed after the test."""
    made: list[Containerd] = []

    def make(*, cgroup_version: int = 2, cuda_files: Path | None = None) -> Containerd:
        node = Containerd(scratch, forky_root, wheels, workload, cgroup_version=cgroup_version, cuda_files=cuda_files)
        made.append(node)
        return node

    yield make
    for node in made:
        node.close()


@pytest.fixture
def containerd(make_containerd: MakeContainerd) -> Containerd:
    """A containerd with ocihook installed."""
    node = make_containerd()
    node.install()
    return node
