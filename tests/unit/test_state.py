"""A running container is found by what people call it."""

import json
import os
from pathlib import Path

import pytest

from ocihook.container import running as state
from ocihook.container.running import container_of, find_container
from ocihook.errors import IdentificationError

RUNC, CRUN, POD = "aa" * 32, "ab" * 32, "cc" * 32


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The /run of a node with three containers, all of them this process, and one that has ended."""
    monkeypatch.setattr(state, "_podman_id", {"web": CRUN, "aa": POD}.get)
    for name, annotations in ((RUNC, {}), (CRUN, {}), (POD, {"io.kubernetes.cri.container-name": "trainer"})):
        (tmp_path / "bundles" / name).mkdir(parents=True)
        (tmp_path / "bundles" / name / "config.json").write_text(json.dumps({"annotations": annotations}))
    for root, name, pid in (
        ("runc", RUNC, os.getpid()),
        ("containerd/runc/k8s.io", POD, os.getpid()),
        ("runc", "dd" * 32, 1 << 30),
    ):
        labels = [f"bundle={tmp_path}/bundles/{name}"]
        put(tmp_path / root / name / "state.json", {"init_process_pid": pid, "config": {"labels": labels}})
    put(tmp_path / "crun" / CRUN / "status", {"pid": os.getpid(), "bundle": f"{tmp_path}/bundles/{CRUN}"})
    put(tmp_path / "runc/damaged/state.json", {"config": None})
    return tmp_path


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "container_id", "runtime"),
    [(RUNC, RUNC, "runc"), ("ab", CRUN, "crun"), ("aa", POD, "runc"), ("trainer", POD, "runc"), ("web", CRUN, "crun")],
)
def test_by_id_beginning_or_name(run: Path, name: str, container_id: str, runtime: str) -> None:
    found = find_container(name, run)
    assert (found.id, found.runtime, found.init_pid) == (container_id, runtime, os.getpid())
    assert found.bundle == f"{run}/bundles/{container_id}"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a", "any of 2 containers: a"), ("dd", "no running"), ("nginx", "no running container 'nginx'")],
)
def test_none_or_many(run: Path, name: str, message: str) -> None:
    with pytest.raises(IdentificationError, match=message):
        find_container(name, run)


def test_by_its_init(run: Path) -> None:
    found = container_of(os.getpid(), run)
    assert found is not None
    assert container_of(1, run) is None
