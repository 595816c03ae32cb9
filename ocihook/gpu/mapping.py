"""Which GPUs a restored container gets in place of those that it had, and whether they will do."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ocihook.errors import UnsupportedError
from ocihook.gpu.driver import GpuMap
from ocihook.gpu.nvml import Gpu


def choose_gpu_map(
    gpu: Mapping[str, Any], here: Sequence[Gpu], *, given_minors: Collection[int], wanted: str
) -> GpuMap:
    """Return the map for the driver, () when every GPU is the one it was.

    Args:
        gpu: what the manifest keeps of the GPUs at the dump.
        here: this node's.
        given_minors: of the GPUs that the container is given; none if that is not known.
        wanted: OLD=NEW,... by annotation or configuration, which goes before everything.

    Raises:
        UnsupportedError: if there are too few, or a wanted one is not there.
    """
    had = [str(device["uuid"]) for device in gpu["devices"]]
    by_uuid = {device.uuid: device for device in here}
    if wanted:
        pairs = dict(pair.split("=") for pair in wanted.split(","))
        for uuid in had:
            if pairs.get(uuid) not in by_uuid:
                raise UnsupportedError(
                    f"the GPU map has {pairs.get(uuid, 'nothing')} for {uuid}, this node has {', '.join(by_uuid)}",
                    hint="the GPU map must name every GPU that the container had, and GPUs of this node",
                )
        chosen = {uuid: pairs[uuid] for uuid in had}
    else:
        usable = [device for device in here if not given_minors or device.minor in given_minors]
        chosen = {uuid: uuid for uuid in had if any(device.uuid == uuid for device in usable)}
        free = [device.uuid for device in usable if device.uuid not in chosen]
        for uuid in had:
            if uuid not in chosen:
                if not free:
                    raise UnsupportedError(
                        f"the container had {len(had)} GPUs, this node gives it {len(usable)}",
                        hint="give it as many, of the same model",
                    )
                chosen[uuid] = free.pop(0)
    return () if all(old == new for old, new in chosen.items()) else tuple((uuid, chosen[uuid]) for uuid in had)


def check_gpus(gpu: Mapping[str, Any], here: Sequence[Gpu], driver_version: str, gpu_map: GpuMap) -> dict[str, int]:
    """Check that a restore onto these GPUs can succeed; return by UUID the bytes that it needs.

    Raises:
        UnsupportedError: naming what differs: the driver, a model, the room.
    """
    if gpu["driver"] != driver_version:
        raise UnsupportedError(
            f"the checkpoint was made with driver {gpu['driver']}, this node has {driver_version}",
            hint="restore where the driver is the same: its libraries are mapped in the container's memory",
        )
    by_uuid = {device.uuid: device for device in here}
    targets = dict(gpu_map)
    need: dict[str, int] = {}
    for device in gpu["devices"]:
        target = by_uuid[targets.get(device["uuid"], device["uuid"])]
        if target.name != device["name"]:
            raise UnsupportedError(f"the container had a {device['name']}, {target.uuid} is a {target.name}")
        need[target.uuid] = need.get(target.uuid, 0) + int(device["held_bytes"])
    for uuid, size in need.items():
        if by_uuid[uuid].free_bytes < size:
            others = ", ".join(str(pid) for pid in by_uuid[uuid].held_bytes) or "none that NVML shows"
            raise UnsupportedError(
                f"the container needs {size} bytes on GPU {uuid}, which has {by_uuid[uuid].free_bytes} free",
                hint=f"end what uses it (processes {others}), or restore onto another one",
            )
    return {uuid: size for uuid, size in need.items() if size}
