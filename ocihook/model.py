"""Facts that several layers pass to one another."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from ocihook.errors import printable

_ENGINES_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRef:
    """A container as its engine, its runtime and its users know it; "" where it is not known."""

    id: str
    engine: str = ""  # podman, containerd, cri-o
    runtime: str = ""  # runc, crun
    name: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    bundle: str = ""
    owner: str = ""  # whose checkpoints it shares in retention, where an annotation says so
    member: str = ""  # likewise, which of them are its own
    owner_uid: str = ""  # of the JobSet or Job that made its pod
    gang: str = ""  # NAME/EPOCH/ATTEMPT of the dump of a gang that this is part of
    gang_member: str = ""  # what it is called there
    gang_size: str = ""  # a number: members of that dump
    gang_here: str = ""  # a number: those of them that were on the same node

    @property
    def is_in_pod(self) -> bool:
        """Return whether it is a pod's, and so somebody else's than the administrator's."""
        return bool(self.pod_namespace) or self.engine == "cri-o"  # without a kubelet CRI-O records no namespace

    def __str__(self) -> str:
        shown = short_id(self.id)
        if self.pod_name:
            return printable(f"{self.pod_namespace}/{self.pod_name}/{self.name or shown}")
        return printable(f"{self.name} ({shown})" if self.name else shown)

    def to_json(self) -> dict[str, str]:
        """Return what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "ContainerRef":
        """Take what `to_json` made; ignore keys of later versions.

        Raises:
            ValueError: if a value is not a string, or there is no id.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("id"), str):
            raise ValueError("a container is an object with an id")
        known = {field.name: value[field.name] for field in fields(cls) if field.name in value}
        if not all(isinstance(item, str) for item in known.values()):
            raise ValueError("every fact of a container is a string")
        return cls(**known)


class GangRef(NamedTuple):
    """A container's place in a gang."""

    namespace: str  # of its pod; "" for containers in no pod
    name: str
    member: str  # what the container is called in it
    size: int  # members of the gang, with this one
    epoch: int = 0  # of the dump that is restored; 0: a dump
    attempt: str = ""  # the id of that dump: another coordinator may have given it the same epoch

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def short_id(container_id: str) -> str:
    """Return the id that an engine has made as engines show it; one that somebody chose (with runc alone) whole."""
    return container_id[:12] if _ENGINES_ID.fullmatch(container_id) else container_id
