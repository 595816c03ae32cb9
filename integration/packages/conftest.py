"""Packages, built once, and the roots that they are installed in."""

import fcntl
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from integration.namespace import is_required
from integration.packages.engine import Node

PROJECT = Path(__file__).parents[2]
MakeNode = Callable[..., Node]
_T = TypeVar("_T")


class Built(NamedTuple):
    """A staged tree and the packages of it, each also as a later version with other contents."""

    tree: Path
    release: str
    debs: tuple[Path, Path]
    rpms: tuple[Path, Path]


@pytest.fixture(scope="session")
def roots() -> Path:
    """The directory with root trees that `integration/node-setup packages` made."""
    directory = Path(os.environ.get("OCIHOOK_PACKAGE_ROOTS", "/var/cache/ocihook/packages"))
    if not all((directory / name / ".complete").exists() for name in ("bookworm", "trixie", "checks")):
        if is_required():
            raise AssertionError(f"{directory} is not complete: run integration/node-setup packages {directory}")
        pytest.skip(f"needs {directory}: integration/node-setup packages {directory}")
    return directory


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Everything that is built, once."""
    return _once(tmp_path_factory, "built", _build_all)


@pytest.fixture(scope="session")
def image_contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the image is built from, and the same of a later release."""
    return _once(tmp_path_factory, "image", _make_contexts)


def _once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], _T]) -> _T:
    """Return what `make` makes in a directory that all workers of a test run share: the first one calls it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(shared / name, ignore_errors=True)
            (shared / name).mkdir()
            made.write_bytes(pickle.dumps(make(shared / name)))
    found: _T = pickle.loads(made.read_bytes())
    return found


def _build_all(directory: Path) -> Built:
    trees = directory / "tree", directory / "later"
    release = _run("stage.py", str(trees[0])).splitlines()[-1]
    subprocess.run(["cp", "-a", *trees], check=True)
    _become_later(trees[1], release)
    later = ("--version=0.2.0", "--fast")
    jobs = [(kind, tree, more) for kind in ("deb", "rpm") for tree, more in ((trees[0], ()), (trees[1], later))]
    with ThreadPoolExecutor() as pool:
        deb, later_deb, rpm, later_rpm = pool.map(lambda job: _build(directory / "out", *job), jobs)
    return Built(trees[0], release, (deb, later_deb), (rpm, later_rpm))


def _make_contexts(directory: Path) -> tuple[Path, Path]:
    first, later = directory / "first", directory / "later"
    for context in (first, later):
        (context / "packaging/image").mkdir(parents=True)
        shutil.copy(PROJECT / "Containerfile", context)
        shutil.copy(PROJECT / "packaging/image/installer", context / "packaging/image")
    release = _run("stage.py", str(first / "dist/image"), "--prefix=/opt/ocihook").splitlines()[-1]
    (later / "dist").mkdir()
    subprocess.run(["cp", "-a", first / "dist/image", later / "dist"], check=True)
    _become_later(later / "dist/image", release)
    return first, later


def _build(out: Path, kind: str, tree: Path, more: Sequence[str]) -> Path:
    return Path(_run("build.py", kind, str(out), f"--tree={tree}", *more).splitlines()[-1])


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(PROJECT / "packaging" / script), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _become_later(tree: Path, release: str) -> None:
    """Make a tree one of a release whose every module has changed."""
    later = "0.2.0-later"
    (place,) = tree.glob("**/lib/ocihook")
    (place / release).rename(place / later)
    for path in (*(place.parents[1] / "bin").iterdir(), *(place.parents[1] / "libexec/ocihook").iterdir()):
        path.write_text(path.read_text().replace(release, later))
    package = place / later / "site-packages/ocihook"
    for path in package.rglob("*.py"):
        path.write_text(path.read_text() + "\n# later\n")
    init = package / "__init__.py"
    init.write_text(init.read_text() + '__version__ = "0.2.0"\n')


@pytest.fixture
def make_node(scratch: Path, roots: Path, workload: Path, cuda_files: Path) -> Iterator[MakeNode]:
    """Return a function that makes a node of a suite; it is removed after the test."""
    made: list[Node] = []

    def make(suite: str, *, systemd: bool = False) -> Node:
        node = Node(scratch, roots / suite, workload, cuda_files=cuda_files if systemd else None)
        made.append(node)
        return node

    yield make
    for node in made:
        node.close()


def copy_to(node: Node, *paths: Path) -> list[str]:
    """Copy files to where the node sees them; return their names there."""
    for path in paths:
        shutil.copy(path, node.scratch)
    return [str(node.scratch / path.name) for path in paths]
