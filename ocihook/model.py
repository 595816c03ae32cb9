"""Facts that several layers pass to one another."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from ocihook.errors import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRef:
    """A container as its engine, its runtime and its users know it; "" where it is not known."""

    id: str
    engine: str = ""  # podman, containerd, cri-o
    runtime: str = ""  # runc, crun
    name: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    bundle: str = ""
    owner: str = ""  # whose checkpoints it shares in retention, where an annotation says so

    @property
    def is_in_pod(self) -> bool:
        """Tell whether it is a pod's, and so somebody else's than the administrator's."""
        return bool(self.pod_namespace) or self.engine == "cri-o"  # without a kubelet CRI-O tells no namespace

    def __str__(self) -> str:
        short_id = self.id[:12]
        if self.pod_name:
            return printable(f"{self.pod_namespace}/{self.pod_name}/{self.name or short_id}")
        return printable(f"{self.name} ({short_id})" if self.name else short_id)

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
