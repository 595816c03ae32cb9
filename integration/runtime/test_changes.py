"""A pod that is created again with another program, or with the same one and other names."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd

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
    environment: Mapping[str, str],
) -> str:
    """Run a workload in a pod; return the container's id."""
    container = node.add(node.make_pod(pod, runtime, **notes), pod, "main", *words, environment=environment)
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
    assert any(one.get("outcome") == "refused" and "--more" in one["error"] for one in sessions)
