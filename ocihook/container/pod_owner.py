"""Reads which JobSet or Job made a container's pod, by the labels that the kubelet gives the engine with the pod.

No label is among the annotations that a runtime gets. containerd answers for them at its socket (CRI,
PodSandboxStatus); CRI-O has them in the config.json of the pod's sandbox, which lies beside the container's.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ocihook.container import grpc
from ocihook.errors import UnsupportedError, reason
from ocihook.model import ContainerRef

ANSWER_S = 2.0  # that containerd may take: it answers from memory, in about 1 ms
_CONTAINERD_SANDBOX, _CRIO_SANDBOX = "io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"
_CRIO_LABELS = "io.kubernetes.cri-o.Labels"
_SANDBOX_ID = re.compile(r"[0-9a-f]{64}")
# A shim of containerd has the path of its containerd's socket in its environment (pkg/shim, Command), and we have it.
_ADDRESS, _DEFAULT_ADDRESS = "GRPC_ADDRESS", "/run/containerd/containerd.sock"
_STATUS = "/runtime.v1.RuntimeService/PodSandboxStatus"
_REQUEST_ID, _RESPONSE_STATUS, _STATUS_LABELS, _KEY, _VALUE = 1, 1, 7, 1, 2  # numbers of fields (CRI, api.proto)
# JobSet api/jobset/v1alpha2; Kubernetes staging/src/k8s.io/api/batch/v1, the second one before 1.27.
_JOBSET, _JOBSET_UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
_JOB_UIDS = ("batch.kubernetes.io/controller-uid", "controller-uid")


def owner_uid(labels: Mapping[str, str]) -> str:
    """Return the uid of the JobSet or Job that made a pod with these labels; "" if they do not have it.

    A JobSet makes new Jobs at each of its restarts: the uid of such a Job says nothing.
    """
    names = (_JOBSET_UID,) if _JOBSET in labels or _JOBSET_UID in labels else _JOB_UIDS
    return next((labels[name] for name in names if labels.get(name)), "")


def find_owner_uid(container: ContainerRef, annotations: Mapping[str, str], timeout_s: float = ANSWER_S) -> str:
    """Return the uid of the JobSet or Job that made a container's pod; "" if none did.

    Args:
        container: that is created.
        annotations: of its bundle.
        timeout_s: that its engine may take.

    Raises:
        UnsupportedError: if its engine does not say which labels the pod has.
    """
    if container.engine not in ("containerd", "cri-o"):
        return ""
    try:
        if container.engine == "containerd":
            return owner_uid(_ask_containerd(_sandbox(annotations, _CONTAINERD_SANDBOX), timeout_s))
        return owner_uid(_read_crio(Path(container.bundle), _sandbox(annotations, _CRIO_SANDBOX)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = reason(error) if isinstance(error, OSError) else repr(error)
        raise UnsupportedError(
            f"{container.engine} does not say which labels pod {container.pod_name} has: {why}"
        ) from error


def _sandbox(annotations: Mapping[str, str], name: str) -> str:
    """Return the id of the pod's sandbox, as the engine notes it."""
    found = annotations.get(name, "")
    if not _SANDBOX_ID.fullmatch(found):
        raise ValueError(f"annotation {name} is {found!r}")
    return found


def _ask_containerd(sandbox: str, timeout_s: float) -> dict[str, str]:
    """Return the labels of a pod. While it makes a container containerd holds no lock that this call needs."""
    path = os.environ.get(_ADDRESS, "").removeprefix("unix://") or _DEFAULT_ADDRESS
    answer = grpc.call(path, _STATUS, grpc.encode_text(_REQUEST_ID, sandbox), timeout_s)
    entries = [
        dict(grpc.fields(entry))
        for number, status in grpc.fields(answer)
        if number == _RESPONSE_STATUS
        for name, entry in grpc.fields(status)
        if name == _STATUS_LABELS
    ]
    return {entry.get(_KEY, b"").decode(): entry.get(_VALUE, b"").decode() for entry in entries}


def _read_crio(bundle: Path, sandbox: str) -> dict[str, str]:
    """Return the labels of a pod, whose sandbox has its bundle beside those of the pod's containers."""
    config = json.loads((bundle.parents[1] / sandbox / bundle.name / "config.json").read_bytes())
    labels = json.loads(config["annotations"].get(_CRIO_LABELS, "{}"))
    return {str(name): str(text) for name, text in labels.items()}
