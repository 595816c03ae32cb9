"""From CRIU's pid to the container: command lines of runtimes, their state, and the annotations of engines."""

import json
import os
from pathlib import Path

import pytest

from ocihook.engine.identity import container_ref, engine_of
from ocihook.errors import IdentificationError
from ocihook.model import ContainerRef
from ocihook.oci import runtime
from ocihook.oci.runtime import RuntimeCall, find_runtime_call, parse_runtime_call, read_annotations

ID = "ab" * 32


@pytest.mark.parametrize(
    ("argv", "verb", "root", "bundle", "leave_running"),
    [
        # podman, dump; conmon, restore
        (f"/usr/bin/crun checkpoint --image-path /s/c --work-path /s {ID}", "checkpoint", "/run/crun", "", False),
        (
            f"/usr/bin/runc restore --bundle /s/u --pid-file /p --detach --image-path /c --work-path /s {ID}",
            "restore",
            "/run/runc",
            "/s/u",
            False,
        ),
        # containerd's shim
        (
            f"runc --root /run/k8s.io --log /l --log-format json --systemd-cgroup checkpoint --leave-running {ID}",
            "checkpoint",
            "/run/k8s.io",
            "",
            True,
        ),
        (
            f"/usr/sbin/runc --root /r --log-format json restore --image-path /i --bundle=/b --no-pivot --detach {ID}",
            "restore",
            "/r",
            "/b",
            False,
        ),
        # CRI-O
        (f"runc --root=/run/runc checkpoint --file-locks --leave-running {ID}", "checkpoint", "/run/runc", "", True),
        (f"crun --cgroup-manager cgroupfs --debug checkpoint -R {ID}", "checkpoint", "/run/crun", "", True),
    ],
)
def test_command_lines(argv: str, verb: str, root: str, bundle: str, *, leave_running: bool) -> None:
    found = parse_runtime_call(argv.split())
    assert found is not None
    call, found_root = found
    assert (call.verb, found_root, call.bundle, call.leave_running) == (verb, root, bundle, leave_running)
    assert call.container_id == ID
    assert call.runtime in argv


@pytest.mark.parametrize(
    "argv",
    ["", "criu dump -t 5", "runc run x", "runc", "runc checkpoint", "runc --root", "/bin/bash runc checkpoint x"],
)
def test_what_is_no_checkpoint_of_a_runtime(argv: str) -> None:
    assert parse_runtime_call(argv.split()) is None


@pytest.fixture
def called_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of CRIU's parent; this process stands for CRIU."""
    argv: list[str] = []
    monkeypatch.setattr(runtime, "command_line", lambda _pid: argv)
    return argv


def test_bundle_from_the_state_of_runc_and_crun(called_by: list[str], tmp_path: Path) -> None:
    state = tmp_path / ID
    state.mkdir()
    (state / "state.json").write_text(json.dumps({"config": {"labels": ["a=b", "bundle=/some/bundle"]}}))
    (state / "status").write_text(json.dumps({"bundle": "/other/bundle"}))
    for name, bundle in (("runc", "/some/bundle"), ("crun", "/other/bundle")):
        called_by[:] = [name, "--root", str(tmp_path), "checkpoint", ID]
        call = find_runtime_call(os.getpid())
        assert call == RuntimeCall(runtime=name, verb="checkpoint", container_id=ID, bundle=bundle, leave_running=False)


def test_state_that_is_missing_or_broken(called_by: list[str], tmp_path: Path) -> None:
    called_by[:] = ["runc", "--root", str(tmp_path), "checkpoint", ID]
    call = find_runtime_call(os.getpid())
    assert call is not None
    assert call.bundle == ""
    (tmp_path / ID).mkdir()
    for text in ("{", "[]"):
        (tmp_path / ID / "state.json").write_text(text)
        with pytest.raises(IdentificationError, match=r"state.json"):
            find_runtime_call(os.getpid())


@pytest.mark.parametrize("name", ["../../etc", "a/b", ".hidden"])
def test_an_id_is_no_path(called_by: list[str], name: str) -> None:
    called_by[:] = ["runc", "checkpoint", name]
    with pytest.raises(IdentificationError, match="is no container id"):
        find_runtime_call(os.getpid())


def test_criu_on_its_own_is_not_ours(called_by: list[str]) -> None:
    called_by[:] = ["bash"]
    assert find_runtime_call(os.getpid()) is None


def test_annotations_of_a_bundle(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"annotations": {"a": "b", "c": 1}}))
    assert read_annotations(os.getpid(), str(tmp_path)) == {"a": "b", "c": "1"}
    config.write_text("{}")
    assert read_annotations(os.getpid(), str(tmp_path)) == {}
    assert read_annotations(os.getpid(), "") == {}
    config.unlink()
    with pytest.raises(IdentificationError, match=r"has no config.json"):
        read_annotations(os.getpid(), str(tmp_path))


@pytest.mark.parametrize(
    ("annotations", "engine", "name"),
    [
        ({"io.container.manager": "libpod"}, "podman", ID[:12]),
        ({"io.podman.annotations.autoremove": "FALSE"}, "podman", ID[:12]),
        (
            {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.container-name": "c",
                "io.kubernetes.cri.sandbox-name": "p",
                "io.kubernetes.cri.sandbox-namespace": "n",
            },
            "containerd",
            "n/p/c",
        ),
        (
            {
                "io.container.manager": "cri-o",
                "io.kubernetes.cri-o.ContainerType": "container",
                "io.kubernetes.container.name": "c",
                "io.kubernetes.pod.name": "p",
                "io.kubernetes.pod.namespace": "n",
            },
            "cri-o",
            "n/p/c",
        ),
        ({}, "", ID[:12]),
    ],
)
def test_engines(annotations: dict[str, str], engine: str, name: str) -> None:
    assert engine_of(annotations) == engine
    container = container_ref(annotations, container_id=ID, runtime="runc", bundle="/b")
    assert (container.engine, str(container)) == (engine, name)
    assert ContainerRef.from_json(container.to_json()) == container


@pytest.mark.parametrize("value", [None, [], {}, {"id": 1}, {"id": "x", "name": 5}])
def test_what_is_no_container(value: object) -> None:
    with pytest.raises(ValueError, match="container"):
        ContainerRef.from_json(value)
