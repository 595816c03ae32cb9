"""Tells from a bundle's annotations which engine made a container, and under which names its users know it.

A pod's own annotations stand beside those of the engine, and in a restore those of the archive, too. So only what
engines write after all of these counts: containerd its `io.kubernetes.cri.*`, CRI-O the labels that come from the
kubelet, with the pod's namespace. Who has the mark of one of them is in a pod, whatever else is said of him; who has
both has forged one. podman takes everything from an archive: who has it restore one trusts its author with the node.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ocihook.config import MEMBER_ANNOTATION, OWNER_ANNOTATION
from ocihook.errors import IdentificationError
from ocihook.model import ContainerRef, short_id


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


def engine_of(annotations: Mapping[str, str]) -> str:
    """Return podman, containerd, cri-o, or "" for a runtime used on its own, or if two engines are named."""
    marked = [engine for engine, names in _ENGINES.items() if names.pod_namespace in annotations]
    if marked:
        return marked[0] if len(marked) == 1 else ""
    return _MANAGERS.get(annotations.get("io.container.manager", ""), "")


def container_ref(
    annotations: Mapping[str, str], *, container_id: str, runtime: str, bundle: str, name: str = ""
) -> ContainerRef:
    """Return everything that the annotations tell of a container; `name` if they do not tell one.

    Raises:
        IdentificationError: if they do not tell whose it is: not one engine and one namespace.
    """
    namespaces = {names.pod_namespace: annotations.get(names.pod_namespace) for names in _ENGINES.values()}
    marks = {key: value for key, value in namespaces.items() if value is not None}
    if len(marks) > 1 or not all(map(_NAMESPACE.fullmatch, marks.values())):
        told = ", ".join(f"{key} {value!r}" for key, value in marks.items())
        raise IdentificationError(
            f"container {short_id(container_id)} has the annotations {told}: nobody can tell whose it is",
            hint="an engine writes one of them, remove the other from the pod",
        )
    engine = engine_of(annotations)
    names = {field: annotations.get(key, "") for field, key in (_ENGINES[engine]._asdict() if marks else {}).items()}
    names["name"] = names.get("name") or name
    names["owner"], names["member"] = annotations.get(OWNER_ANNOTATION, ""), annotations.get(MEMBER_ANNOTATION, "")
    return ContainerRef(id=container_id, engine=engine, runtime=runtime, bundle=bundle, **names)
