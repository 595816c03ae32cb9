"""A podman with a network for each test."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.net.engine import NetPodman

HERE = Path(__file__).parent
MakeNode = Callable[..., NetPodman]


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static program whose connections are dumped."""
    return build_peer(tmp_path_factory.mktemp("peer") / "peer")


def build_peer(binary: Path) -> Path:
    """Build the program whose connections are dumped."""
    sources = [HERE / "peer.c", HERE / "kinds.c", HERE / "rank.c"]
    strict = ["-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-static", "-s"]
    subprocess.run(["gcc", *strict, "-o", binary, *sources], check=True, timeout=120)
    return binary


@pytest.fixture
def make_node(scratch: Path, forky_root: Path, wheels: Path, peer: Path) -> Iterator[MakeNode]:
    """Return a function that makes a podman with a network and ocihook; all are removed."""
    made: list[NetPodman] = []

    def make(runtime: str = "runc", *, cuda_files: Path | None = None, kind: type[NetPodman] = NetPodman) -> NetPodman:
        directory = scratch / str(len(made)) if made else scratch
        directory.mkdir(exist_ok=True)
        made.append(kind(directory, forky_root, wheels, peer, runtime, cuda_files=cuda_files))
        made[-1].install()
        return made[-1]

    yield make
    for node in made:
        node.close()
