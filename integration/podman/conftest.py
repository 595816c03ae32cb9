"""A podman for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.podman.engine import Podman

MakePodman = Callable[..., Podman]


@pytest.fixture
def make_podman(scratch: Path, workload: Path) -> Iterator[MakePodman]:
    """Return a function that makes a podman for a runtime; all are removed after the test."""
    made: list[Podman] = []

    def make(runtime: str, *, size: str = "", cuda_files: Path | None = None) -> Podman:
        podman = Podman(scratch, runtime, workload, size=size, cuda_files=cuda_files)
        made.append(podman)
        return podman

    yield make
    for podman in made:
        podman.close()


@pytest.fixture
def podman(make_podman: MakePodman) -> Podman:
    """A podman with runc and ocihook installed."""
    podman = make_podman("runc")
    podman.install()
    return podman


@pytest.fixture
def gpu_podman(make_podman: MakePodman, cuda_files: Path) -> Podman:
    """A podman with runc, ocihook and a stand-in for NVIDIA's driver."""
    podman = make_podman("runc", cuda_files=cuda_files)
    podman.install()
    return podman
