"""A pod of a job on containerd crashes: the others end without a checkpoint, and all go on from the last epoch."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.cri.engine import POD_NETWORK
from integration.gang.nodes import epochs
from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd

_SIZE = 3
_NOTES: dict[str, Any] = {
    "checkpoint_on_stop": "true",
    "restore_from": "latest",
    "gang": "job",
    "gang_size": str(_SIZE),
}


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    node.configure("[agent]\nidle_timeout_s = 60\n[policy]\ngang_timeout_s = 110\ngang_gather_s = 110\n")
    yield node
    node.close()


def _start(node: HandledContainerd, generation: str) -> list[str]:
    """Make all pods; return their containers, once all count."""

    def one(number: int) -> str:
        notes: dict[str, Any] = {"gang_index": str(number), "member": f"job-{number}"}
        pod = f"{generation}-{number}"
        return node.start(pod, mib=4, network=POD_NETWORK, container_name="main", **_NOTES, **notes)

    with ThreadPoolExecutor(_SIZE) as pool:
        containers = list(pool.map(one, range(_SIZE)))
    for container in containers:
        wait_for("it to count", lambda container=container: len(node.counts(container)) > 2)  # type: ignore[misc]
    return containers


def _stop(node: HandledContainerd, containers: list[str]) -> list[int]:
    """Stop containers at once, with a grace period that no test lasts; return their last counts."""
    with ThreadPoolExecutor(_SIZE) as pool:
        list(pool.map(lambda one: node.call("StopContainer", container_id=one, timeout=600), containers))
    counts = [node.counts(container)[-1] for container in containers]
    for container in containers:
        node.remove(container)
    return counts


def test_a_job_whose_pod_has_crashed_goes_on_from_its_last_epoch(node: HandledContainerd) -> None:
    last = _stop(node, _start(node, "first"))
    wait_for("all to be stored", lambda: len(epochs(node)[0]) == 1)
    complete = epochs(node)
    containers = _start(node, "second")
    assert [node.counts(container)[0] for container in containers] == [count + 1 for count in last]
    began = time.monotonic()
    os.kill(node.init_pid(containers[-1]), signal.SIGKILL)
    _stop(node, containers[:-1])
    print(f"the others were gone {time.monotonic() - began:.1f} s after the crash")
    said = node.namespace.path("/run/ocihook/agent.log").read_text()
    assert re.search(r"2 \(?has ended without a checkpoint: ", said), said
    node.remove(containers[-1])
    third = _start(node, "third")
    print(f"all count again {time.monotonic() - began:.1f} s after the crash")
    assert [node.counts(container)[0] for container in third] == [count + 1 for count in last]
    assert epochs(node) == complete
    _stop(node, third)
