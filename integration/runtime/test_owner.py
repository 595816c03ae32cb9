"""Jobs of one name, one after the other, over a real containerd: a pod's labels tell them apart."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd

JOB_UID, OLD_JOB_UID = "batch.kubernetes.io/controller-uid", "controller-uid"
JOBSET, JOBSET_UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"


@pytest.fixture
def node(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[HandledContainerd]:
    """A containerd with ocihook installed; its socket is not where most have it."""
    node = HandledContainerd(scratch, forky_root, wheels, workload)
    node.install()
    yield node
    node.close()


def start(node: HandledContainerd, pod: str, labels: Mapping[str, str], **annotations: str) -> str:
    """Make a pod of one container that counts, as the Job of its labels would."""
    notes = {"restore_from": "latest", "checkpoint_on_stop": "true", **annotations}
    node.pod_labels = labels
    container = node.add(node.make_pod(pod, **notes), pod, "main", "4")
    node.call("StartContainer", container_id=container)
    wait_for("it to count", lambda: len(node.counts(container)) > 2)
    return container


def first_count(node: HandledContainerd, container: str) -> int:
    return node.counts(container)[0]


def test_a_job_never_resumes_what_another_of_its_name_has_left(node: HandledContainerd) -> None:
    old = node.stop(start(node, "train-0-bcdfg", {JOB_UID: "uid-1", OLD_JOB_UID: "uid-1"}))
    second = start(node, "train-0-ghjkl", {JOB_UID: "uid-2", OLD_JOB_UID: "uid-2"})
    assert first_count(node, second) == 1
    log = node.namespace.path("/run/ocihook/handler.log").read_text()
    assert "is of an earlier job of this name, uid uid-1; this container is of uid uid-2" in log
    last = node.stop(second)
    third = start(node, "train-0-mnpqr", {OLD_JOB_UID: "uid-2"})
    assert first_count(node, third) == last + 1
    last = node.stop(third)
    node.ocihook("wait")
    found = json.loads(node.ocihook("store", "list", "--json"))["checkpoints"]
    assert sorted(row["owner_uid"] for row in found) == ["uid-1", "uid-2", "uid-2"]
    with pytest.raises(grpc.RpcError, match=r"uid uid-2; this container is of uid uid-3.*ocihook\.io/owner to train"):
        start(node, "train-0-stvwx", {JOB_UID: "uid-3"}, on_no_checkpoint="fail")
    named = next(row["id"] for row in found if row["owner_uid"] == "uid-1")
    by_id = start(node, "train-0-zzzzz", {JOB_UID: "uid-3"}, restore_from=named, checkpoint_on_stop="false")
    assert first_count(node, by_id) == old + 1
    by_owner = start(node, "train-0-xxxxx", {JOB_UID: "uid-3"}, owner="train")
    assert first_count(node, by_owner) == last + 1


def test_a_jobset_resumes_whatever_jobs_it_makes(node: HandledContainerd) -> None:
    jobset = {JOBSET: "set", JOBSET_UID: "uid-1"}
    last = node.stop(start(node, "set-workers-0-0-bcdfg", {**jobset, JOB_UID: "job-1"}))
    again = start(node, "set-workers-0-0-ghjkl", {**jobset, JOB_UID: "job-2"})
    assert first_count(node, again) == last + 1
    node.stop(again)
    other = start(node, "set-workers-0-0-mnpqr", {**jobset, JOBSET_UID: "uid-2", JOB_UID: "job-2"})
    assert first_count(node, other) == 1
