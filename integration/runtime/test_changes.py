"""A pod that is created again with another program or configuration, or with the same ones under other names."""

import base64
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd
from ocihook.archive.repack import read_origin

STOPPED: dict[str, Any] = {"checkpoint_on_stop": "true", "member": "job"}
AGAIN: dict[str, Any] = {"restore_from": "latest", **STOPPED}


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    yield node
    node.close()


def run(
    node: HandledContainerd,
    pod: str,
    *words: str,
    runtime: str,
    notes: dict[str, Any],
    environment: Mapping[str, str] = MappingProxyType({}),
    host_paths: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run a workload in a pod; return the container's id."""
    sandbox = node.make_pod(pod, runtime, **notes)
    container = node.add(sandbox, pod, "main", *words, environment=environment, host_paths=host_paths)
    node.call("StartContainer", container_id=container)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    return container


def service(name: str, address: str) -> dict[str, str]:
    """Return what a kubelet adds to the environment for a service."""
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": "80",
        f"{name}_PORT": f"tcp://{address}:80",
        f"{name}_PORT_80_TCP_ADDR": address,
    }


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_rollout_has_an_effect(node: HandledContainerd, runtime: str) -> None:
    """The same program goes on under other names; another one starts from scratch, and the reason names no value."""
    env = {"SEED": "1", "PASSWORD": "hunter2", "MY_NAME": "first", "NODE_NAME": "n1", "HOSTNAME": "first"}
    container = run(node, "first", "4", "--run=first", runtime=runtime, notes=AGAIN, environment=env)
    last = node.stop(container)
    env |= {"MY_NAME": "second", "NODE_NAME": "n2", "HOSTNAME": "second", **service("WEB", "10.96.0.9")}
    strict = {**AGAIN, "on_no_checkpoint": "fail", "on_restore_error": "fail"}
    container = run(node, "second", "4", "--run=second", runtime=runtime, notes=strict, environment=env)
    assert node.counts(container)[0] == last + 1
    last = node.stop(container)

    changed = {**env, "PASSWORD": "hunter3"}
    with pytest.raises(grpc.RpcError, match=r"variables that are changed: PASSWORD.*Nothing was started") as refused:
        run(node, "third", "4", "--run=third", runtime=runtime, notes=strict, environment=changed)
    assert "hunter" not in str(refused.value)
    kept_program = {**strict, "restore_on_change": "true"}
    container = run(node, "fourth", "4", "--new", runtime=runtime, notes=kept_program, environment=changed)
    assert node.counts(container)[0] == last + 1
    node.stop(container)

    by_default = {**AGAIN, "on_restore_error": "fail"}  # which is about restores that fail
    container = run(node, "fifth", "4", "--run=fifth", "--more", runtime=runtime, notes=by_default, environment=env)
    assert node.counts(container)[0] == 1
    log = node.namespace.path("/run/ocihook/handler.log").read_text()
    assert "starts from scratch: the container runs another program" in log
    sessions = json.loads(node.ocihook("ps", "--all", "--json"))["sessions"]
    assert any(one.get("outcome") == "refused" and "argument 2 (--run)" in one["error"] for one in sessions)


VOLUME = "/var/lib/kubelet/pods/{}/volumes/kubernetes.io~configmap/app"


def token(subject: str) -> str:
    """Return what looks as a service account's token does."""
    parts = (json.dumps({"alg": "none"}), json.dumps({"sub": subject}), subject)
    return ".".join(base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)


def write_volume(node: HandledContainerd, pod: str, time: str, files: Mapping[str, str]) -> Path:
    """Write a volume, or replace its files, as a kubelet's atomic writer does; return it."""
    volume = node.namespace.path(VOLUME.format(pod))
    directory = volume / f"..2026_11_26_{time}.1234567890"
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    before = os.readlink(volume / "..data") if (volume / "..data").is_symlink() else ""
    (volume / "..data_tmp").symlink_to(directory.name)
    (volume / "..data_tmp").rename(volume / "..data")
    if before:
        shutil.rmtree(volume / before)
    return volume


def opened(node: HandledContainerd, container: str) -> str:
    """Return the files of the volume that a container has open."""
    links = [os.readlink(link) for link in Path(f"/proc/{node.init_pid(container)}/fd").iterdir()]
    return " ".join(sorted(link for link in links if link.startswith("/etc/app")))


def used(node: HandledContainerd, container: str) -> dict[str, str]:
    """Return what a container that holds a volume has open there, is in, has mapped and watches."""
    pid = node.init_pid(container)
    infos = [path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()]
    (watched,) = (info for info in infos if "inotify wd" in info)
    return {
        "cwd": os.readlink(f"/proc/{pid}/cwd"),
        "open": opened(node, container),
        "mapped": ("/etc/app/" in Path(f"/proc/{pid}/maps").read_text() and "mapped") or "",
        "watched": " ".join(re.findall(r"ino:(\w+)", watched)),
    }


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_files_of_a_config_map_are_found_again(node: HandledContainerd, runtime: str) -> None:
    """The directory is another one; the token is too, and longer."""
    held = ("hold-in", "/etc/app", "4")
    paths = {"/etc/app": VOLUME.format("first") + ":ro"}
    write_volume(node, "first", "10_00_00", {"config": "a=1", "token": token("first")})
    container = run(node, "first", *held, runtime=runtime, notes=AGAIN, host_paths=paths)
    assert used(node, container)["cwd"] == "/etc/app/..2026_11_26_10_00_00.1234567890"
    last = node.stop(container)

    strict = {**AGAIN, "on_no_checkpoint": "fail", "on_restore_error": "fail"}
    for pod, files, why in (
        ("other", {"config": "a=2", "token": "x"}, r"10_00_00.1234567890/config.*its content is another one now"),
        ("none", {"token": token("second")}, r"the volume has no config now"),
    ):
        write_volume(node, pod, "11_00_00", files)
        paths = {"/etc/app": VOLUME.format(pod) + ":ro"}
        with pytest.raises(grpc.RpcError, match=rf"{why}.*Nothing was started"):
            run(node, pod, *held, runtime=runtime, notes=strict, host_paths=paths)

    volume = write_volume(node, "second", "12_00_00", {"config": "a=1", "token": token("a second one")})
    paths = {"/etc/app": VOLUME.format("second") + ":ro"}
    container = run(node, "second", *held, runtime=runtime, notes=strict, host_paths=paths)
    assert node.counts(container)[0] == last + 1
    now = "/etc/app/..2026_11_26_12_00_00.1234567890"
    found = used(node, container)
    assert (found["cwd"], found["open"], found["mapped"]) == (now, f"{now}/config {now}/token", "mapped")
    inodes = [f"{os.stat(place).st_ino:x}" for place in (volume, volume / "config")]
    assert sorted(found["watched"].split()) == sorted(inodes)
    node.stop(container)


@pytest.mark.parametrize("mode", ["inline", "store"])
def test_files_of_a_config_map_from_an_archive(node: HandledContainerd, mode: str) -> None:
    """The kubelet's API leaves the container running; its archive is restored by its id."""
    held = ("hold-in", "/etc/app", "4")
    paths = {"/etc/app": VOLUME.format("first") + ":ro"}
    write_volume(node, "first", "10_00_00", {"config": "a=1", "token": token("first")})
    notes = {"mode": mode, "member": "job"}
    container = run(node, "first", *held, runtime="runc", notes=notes, host_paths=paths)
    archive = node.checkpoint(container, "first.tar")
    node.ocihook("wait")
    last = node.counts(container)[-1]
    node.remove(container)
    archives = node.namespace.path("/var/lib/ocihook/archives")
    archives.mkdir(mode=0o700)
    shutil.copy(archive, archives)
    _, origin, thin = read_origin(archive)
    assert origin is not None
    write_volume(node, "second", "12_00_00", {"config": "a=1", "token": token("a second one")})
    paths = {"/etc/app": VOLUME.format("second") + ":ro"}
    wanted = {"restore_from": thin.checkpoint_id if thin else origin.id, "on_no_checkpoint": "fail"}
    notes |= {**wanted, "on_restore_error": "fail"}
    container = run(node, "second", *held, runtime="runc", notes=notes, host_paths=paths)
    assert 1 < node.counts(container)[0] <= last + 1
    assert used(node, container)["cwd"] == "/etc/app/..2026_11_26_12_00_00.1234567890"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_files_that_an_update_has_removed(node: HandledContainerd, runtime: str) -> None:
    """They are deleted files like others: they go on with the content that they had."""
    paths = {"/etc/app": VOLUME.format("first") + ":ro"}
    write_volume(node, "first", "10_00_00", {"config": "a=1", "token": "x"})
    container = run(node, "first", "hold-open", "/etc/app", "4", runtime=runtime, notes=AGAIN, host_paths=paths)
    write_volume(node, "first", "10_30_00", {"config": "a=2", "token": "x"})
    last = node.stop(container)
    write_volume(node, "second", "12_00_00", {"config": "a=2", "token": "x"})
    directory = "..2026_11_26_12_00_00.1234567890"
    paths = {"/etc/app": VOLUME.format("second") + ":ro"}
    strict = {**AGAIN, "on_no_checkpoint": "fail", "on_restore_error": "fail"}
    container = run(node, "second", "hold-open", "/etc/app", "4", runtime=runtime, notes=strict, host_paths=paths)
    assert node.counts(container)[0] == last + 1
    assert "/etc/app/..2026_11_26_10_00_00.1234567890/config (deleted)" in opened(node, container)
    volume = node.namespace.path(VOLUME.format("second"))
    assert sorted(path.name for path in volume.iterdir()) == sorted(["..data", directory, "config", "token"])
