"""Tells from a bundle's annotations which engine made a container, and under which names its users know it."""

from collections.abc import Mapping

from ocihook.config import OWNER_ANNOTATION
from ocihook.model import ContainerRef

# Annotation names: CRI-O internal/annotations, containerd pkg/cri/annotations, podman libpod/define/annotations.
_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cri-o": {
        "name": ("io.kubernetes.container.name",),
        "pod_name": ("io.kubernetes.pod.name",),
        "pod_namespace": ("io.kubernetes.pod.namespace",),
    },
    "containerd": {
        "name": ("io.kubernetes.cri.container-name",),
        "pod_name": ("io.kubernetes.cri.sandbox-name",),
        "pod_namespace": ("io.kubernetes.cri.sandbox-namespace",),
    },
    "podman": {"name": (), "pod_name": (), "pod_namespace": ()},
}


def engine_of(annotations: Mapping[str, str]) -> str:
    """Return podman, containerd, cri-o, or "" for a runtime used on its own."""
    if annotations.get("io.container.manager") == "libpod" or any(
        key.startswith("io.podman.annotations.") for key in annotations
    ):
        return "podman"
    if annotations.get("io.container.manager") == "cri-o" or any(
        key.startswith("io.kubernetes.cri-o.") for key in annotations
    ):
        return "cri-o"
    return "containerd" if any(key.startswith("io.kubernetes.cri.") for key in annotations) else ""


def container_ref(
    annotations: Mapping[str, str], *, container_id: str, runtime: str, bundle: str, name: str = ""
) -> ContainerRef:
    """Return everything that the annotations tell of a container; `name` if they do not tell one."""
    engine = engine_of(annotations)
    names = {
        field: next((annotations[key] for key in keys if key in annotations), "")
        for field, keys in _NAMES.get(engine, {}).items()
    }
    names["name"] = names.get("name") or name
    owner = annotations.get(OWNER_ANNOTATION, "")
    return ContainerRef(id=container_id, engine=engine, runtime=runtime, bundle=bundle, owner=owner, **names)
