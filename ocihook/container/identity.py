"""Finds out by a bundle's annotations which engine made a container, and under which names its users know it.

A pod's own annotations stand beside those of the engine, and in a restore those of the archive, too. So only what
engines write after all of these counts: containerd its `io.kubernetes.cri.*`, CRI-O the labels that come from the
kubelet, with the pod's namespace. A container with the mark of one of them is in a pod, whatever else it has; one with
both has forged one. podman takes everything from an archive: to restore one is to trust its author with the node.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ocihook.config import (
    GANG_ANNOTATION,
    GANG_INDEX_ANNOTATION,
    GANG_SIZE_ANNOTATION,
    MEMBER_ANNOTATION,
    OWNER_ANNOTATION,
)
from ocihook.errors import ConfigError, IdentificationError
from ocihook.model import ContainerRef, GangRef, short_id


class _Names(NamedTuple):
    """Annotation names: CRI-O internal/annotations, containerd pkg/cri/annotations."""

    pod_namespace: str  # is also the engine's mark
    pod_name: str
    pod_uid: str
    name: str


_ENGINES = {
    "containerd": _Names(
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.sandbox-uid",
        "io.kubernetes.cri.container-name",
    ),
    "cri-o": _Names(*(f"io.kubernetes.{name}" for name in ("pod.namespace", "pod.name", "pod.uid", "container.name"))),
}
_MANAGERS = {"libpod": "podman", "cri-o": "cri-o"}
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1123 label


_GANG_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_MAX_GANG = 1 << 16
# kubelet pkg/kubelet/kuberuntime/labels.go. CRI-O passes it on, and containerd with our handler's configuration.
_LONGEST_NUMBER = 7  # more digits than any grace period has
GRACE_ANNOTATION = "io.kubernetes.pod.terminationGracePeriod"


def engine_of(annotations: Mapping[str, str]) -> str:
    """Return podman, containerd, cri-o, or "" for a runtime used on its own, or if two engines are named."""
    marked = [engine for engine, names in _ENGINES.items() if names.pod_namespace in annotations]
    if marked:
        return marked[0] if len(marked) == 1 else ""
    return _MANAGERS.get(annotations.get("io.container.manager", ""), "")


def container_ref(
    annotations: Mapping[str, str], *, container_id: str, runtime: str, bundle: str, name: str = ""
) -> ContainerRef:
    """Return everything that the annotations say of a container; `name` if they have none.

    Raises:
        IdentificationError: if they contradict one another: not one engine and one namespace.
    """
    namespaces = {names.pod_namespace: annotations.get(names.pod_namespace) for names in _ENGINES.values()}
    marks = {key: value for key, value in namespaces.items() if value is not None}
    if len(marks) > 1 or not all(map(_NAMESPACE.fullmatch, marks.values())):
        claims = ", ".join(f"{key} {value!r}" for key, value in marks.items())
        raise IdentificationError(
            f"container {short_id(container_id)} has the annotations {claims}: its owner is ambiguous",
            hint="an engine writes one of them, remove the other from the pod",
        )
    engine = engine_of(annotations)
    names = {field: annotations.get(key, "") for field, key in (_ENGINES[engine]._asdict() if marks else {}).items()}
    names["name"] = names.get("name") or name
    names["owner"], names["member"] = annotations.get(OWNER_ANNOTATION, ""), annotations.get(MEMBER_ANNOTATION, "")
    return ContainerRef(id=container_id, engine=engine, runtime=runtime, bundle=bundle, **names)


def gang_ref(annotations: Mapping[str, str], container: ContainerRef) -> GangRef | None:
    """Return a container's place in the gang that its annotations name; None if they name none.

    It is always a gang of the container's own namespace.

    Raises:
        ConfigError: if the annotations are wrong.
    """
    name, size = annotations.get(GANG_ANNOTATION, ""), annotations.get(GANG_SIZE_ANNOTATION, "")
    if not name and not size:
        return None
    if not _GANG_NAME.fullmatch(name):
        raise ConfigError(
            f"annotation {GANG_ANNOTATION}: {name!r} is not a valid name of a gang",
            hint="up to 63 letters, digits, '.', '_' and '-', the first and the last a letter or digit",
        )
    if not size.isascii() or not size.isdigit() or not 1 < int(size[:6]) <= _MAX_GANG:
        raise ConfigError(
            f"annotation {GANG_SIZE_ANNOTATION}: {size!r} must be the number of containers in gang {name}, 2 or more"
        )
    index = annotations.get(GANG_INDEX_ANNOTATION, "")
    if index and not (index.isascii() and index.isdigit() and int(index[:6]) < int(size)):
        raise ConfigError(f"annotation {GANG_INDEX_ANNOTATION}: {index!r} must be a number less than {int(size)}")
    named = "/".join(filter(None, (container.pod_name, container.name))) or short_id(container.id)
    return GangRef(container.pod_namespace, name, str(int(index)) if index else named, int(size))


def grace_of(annotations: Mapping[str, str]) -> float:
    """Return the seconds that a container's pod has to end, as the kubelet notes it; 0: that is not known."""
    text = annotations.get(GRACE_ANNOTATION, "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < _LONGEST_NUMBER else 0.0
