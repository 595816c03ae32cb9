"""The engine's call has a deadline: the runtime is killed when it passes, whatever is being done. The job continues."""

import re
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from integration import fake_driver
from integration.containerd.conftest import MakeContainerd
from integration.containerd.engine import Containerd
from integration.journals import sessions
from integration.namespace import wait_for

DEADLINES_S = (2, 8, 30)  # where a slow machine has not come to what the test is about by then, it tries once more
NEVER: dict[str, Any] = {
    "quiesce_signal": "USR1",
    "resume_signal": "USR2",
    "quiesce_ack": "/run/never",
    "quiesce_timeout_s": "60",
}


# Keeps the tasks still in CRIU's hands.
SLOW = """#!/bin/sh
[ $CRTOOLS_SCRIPT_ACTION = post-dump ] || exit 0
while [ -e /run/slow ]; do sleep 0.05; done
"""


def is_told(node: Containerd) -> bool:
    """Return whether the node's metrics say that the engine has given up."""
    return 'ocihook_open_sessions{state="given-up"} 1.0' in node.ocihook("metrics")


def hold(node: Containerd, stage: str) -> None:
    """Let a stage take longer than any deadline."""
    if stage == "criu":
        node.write("/run/slow", "")
    elif stage != "quiesce":
        fake_driver.hold(node.namespace, stage)


def release(node: Containerd) -> None:
    """Resume whatever is held."""
    node.namespace.path("/run/slow").unlink(missing_ok=True)
    fake_driver.script(node.namespace)


def goes_on_when_resumed(node: Containerd, container: str) -> bool:
    """Resume a container that containerd has paused for its dump, and leaves so when it gives up; maybe only later."""
    before = node.count(container)[0]
    node.namespace.run("ctr", "-a", node.socket, "-n", "k8s.io", "task", "resume", container, check=False)
    time.sleep(1)  # a paused one says nothing in any time; one that runs is looked at again
    return node.count(container)[0] > before


def has_come_to(session: dict[str, Any], stage: str) -> bool:
    """Return whether a dump was in a stage when it was given up."""
    if stage == "criu":
        return session["stages"]["pre-dump"].get("status") == 0 and "criu_ended" in session["facts"]
    return any(phase["name"] in (stage, f"gpu {stage}") for phase in session["phases"])


def checkpoint_in_vain(node: Containerd, container: str, stage: str) -> dict[str, Any]:
    """Checkpoint with a deadline that passes in a stage; check that the container continues; return the session."""
    for deadline_s in DEADLINES_S:
        session = _checkpoint_in_vain(node, container, stage, deadline_s)
        if session and has_come_to(session, stage):
            return session
    raise AssertionError(f"the dump never came to {stage}")


def _checkpoint_in_vain(node: Containerd, container: str, stage: str, deadline_s: float) -> dict[str, Any] | None:
    before, known = node.count(container), len(sessions(node.namespace))
    hold(node, stage)
    with pytest.raises(grpc.RpcError) as error:
        node.checkpoint(container, "c.tar", timeout_s=deadline_s)
    # The server sees the deadline, too, and may be the first to say so.
    assert error.value.code() in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
    if stage != "quiesce":  # what cannot be interrupted
        wait_for("the node to tell it, or to have undone all", lambda: is_told(node) or not node.is_open())
    release(node)
    wait_for("CRIU to end", lambda: "criu" not in node.namespace.programs())
    found = sessions(node.namespace)[known:]
    if not found or found[-1]["container"] is None:  # its runtime was gone before CRIU came to us
        wait_for("the container to go on", lambda: goes_on_when_resumed(node, container))
        return None
    node.assert_goes_on(container, before)
    assert found[-1]["effects"] == []
    assert found[-1]["given_up"] is not None
    return found[-1]


# crun 1.28 makes no container on a machine whose cgroups are hybrid, but for those of v2 alone.
@pytest.mark.parametrize(("runtime", "cgroup_version"), [("runc", 2), ("runc", 1), ("crun", 2)])
@pytest.mark.parametrize("stage", ["quiesce", "lock", "checkpoint", "criu"])
def test_the_job_goes_on(
    make_containerd: MakeContainerd, cuda_files: Path, stage: str, runtime: str, cgroup_version: int
) -> None:
    node = make_containerd(cgroup_version=cgroup_version, cuda_files=cuda_files)
    node.install()
    annotations: dict[str, Any] = NEVER if stage == "quiesce" else {}
    container = node.start("c1", mib=16, runtime=runtime, gpus=[] if stage == "quiesce" else [3], **annotations)
    if stage == "criu":  # tasks stand still in its hands
        node.write("/etc/slow", SLOW)
        node.namespace.path("/etc/slow").chmod(0o755)
        for name in ("runc", "crun"):
            path = node.namespace.path(f"/etc/criu/{name}.conf")
            if path.exists():  # crun reads runc.conf where it has none of its own
                path.write_text(f"action-script /etc/slow\n{path.read_text()}")
    session = checkpoint_in_vain(node, container, stage)
    waited_for = [session["given_up"], session["facts"]["criu_ended"] if stage == "criu" else 0.0]
    waited_for += [p["began"] + p["seconds"] for p in session["phases"] if p["name"] == f"gpu {stage}"]
    print(f"{stage}, {runtime}, cgroup v{cgroup_version}: over {session['ended'] - max(waited_for):.2f} s later")
    if stage != "criu":
        message = session["stages"]["pre-dump"]["message"]
        assert re.search(r"the runtime \(pid \d+\) was killed meanwhile.*the container runs on", message)
    if stage == "quiesce":
        wait_for("the application to be told", lambda: "resumed" in node.log(container))
    # and is checkpointed the next time, which has no deadline
    if stage in {"lock", "checkpoint"}:
        node.checkpoint(container, "c.tar")
        node.assert_counts(container)
