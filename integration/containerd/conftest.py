"""A containerd for each test."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.containerd.engine import Containerd, build_wheels
from integration.namespace import is_required

MakeContainerd = Callable[..., Containerd]


@pytest.fixture(scope="session")
def forky_root() -> Path:
    """The root tree that `integration/node-setup forky` made."""
    root = Path(os.environ.get("OCIHOOK_FORKY_ROOT", "/var/cache/ocihook/forky"))
    if not (root / ".complete").exists():
        if is_required():
            raise AssertionError(f"{root} is missing: run integration/node-setup forky {root}")
        pytest.skip(f"needs {root}: integration/node-setup forky {root}")
    return root


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, forky_root: Path) -> Path:
    """ocihook with all it needs, for the Python of that root."""
    target = tmp_path_factory.mktemp("wheels") / "site"
    interpreter = os.readlink(forky_root / "usr/bin/python3")
    build_wheels(target, interpreter.removeprefix("python"))
    return target


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
