"""A podman whose containers run the program with many states."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.net.engine import NetPodman
from integration.podman.engine import Podman
from integration.runtime.conftest import make_handled

__all__ = ["make_handled"]

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    binary = tmp_path_factory.mktemp("states") / "states"
    options = ["-O1", "-Wall", "-Werror", "-static", "-pthread"]
    subprocess.run(["gcc", *options, "-o", binary, HERE / "states.c"], check=True, timeout=120)
    return binary


@pytest.fixture
def podman(request: pytest.FixtureRequest, scratch: Path, states: Path) -> Iterator[Podman]:
    """A podman with runc, or another runtime that a test names, CRIU 4.1.1 and ocihook installed."""
    made = Podman(scratch, getattr(request, "param", "runc"), states)
    made.install()
    yield made
    made.close()


@pytest.fixture
def new_podman(scratch: Path, states: Path, forky_root: Path, wheels: Path) -> Iterator[Podman]:
    """The same with CRIU 4.2, which dumps Internet sockets on Linux 6.18, too."""
    made = NetPodman(scratch, forky_root, wheels, states)
    made.install()
    yield made
    made.close()
