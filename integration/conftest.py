"""Fixtures of the integration tests: real engines, real runtimes, real CRIU, each in a namespace of its own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration import fake_driver
from integration.cri.engine import build_wheels
from integration.namespace import is_required
from integration.registry import DockerRegistry

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, but in CI let it fail."""
    needed = ("criu", "podman", "runc", "crun", "docker-registry", "gcc", "unshare", "setpriv")
    missing = [name for name in needed if not shutil.which(name)]
    reason = "needs root" if os.geteuid() else f"needs {', '.join(missing)}" if missing else ""
    if reason and not is_required():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"{reason}; `make integration` installs it"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory on a real disk, and short enough for socket names."""
    directory = Path(tempfile.mkdtemp(prefix="ocihook-test-", dir="/var/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_registry(scratch: Path) -> Iterator[Callable[..., DockerRegistry]]:
    """Return a function that starts a registry; all end after the test."""
    made: list[DockerRegistry] = []

    def make(*, has_auth: bool = False) -> DockerRegistry:
        made.append(DockerRegistry(scratch / f"registry{len(made)}", has_auth=has_auth))
        return made[-1]

    yield make
    for registry in made:
        registry.close()


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static program that containers run."""
    binary = tmp_path_factory.mktemp("workload") / "workload"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", binary, HERE / "workload.c"], check=True, timeout=120)
    return binary


@pytest.fixture(scope="session")
def mappings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has memory of every kind, for modules whose containers run it."""
    binary = tmp_path_factory.mktemp("mappings") / "workload"
    options = ["-O2", "-static", "-s", "-pthread"]
    subprocess.run(["gcc", *options, "-o", binary, HERE / "mappings.c"], check=True, timeout=120)
    return binary


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


@pytest.fixture(scope="session")
def cuda_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in for the driver and the program that uses it."""
    return fake_driver.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def cuda_plugin(forky_root: Path) -> Path:
    """CRIU's CUDA plugin for the CRIU of that root, which Debian does not build."""
    plugin = forky_root / "opt/cuda_plugin.so"
    if not plugin.exists():  # a newer CRIU's source may need other steps, which says nothing of ocihook
        pytest.skip(f"needs {plugin}: integration/node-setup forky {forky_root}")
    return plugin
