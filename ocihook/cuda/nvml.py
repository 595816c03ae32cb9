"""The node's GPUs as NVML tells them: which, how much memory, and which process holds how much of it.

NVML starts a thread and opens device files in whoever asks, so ask in a process that ends afterwards.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ocihook.errors import CudaUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    uuid: str  # as in GPU-8d1ee1b5-...
    name: str
    minor: int  # of its device file
    total_bytes: int
    free_bytes: int
    mig: bool = False
    held_bytes: Mapping[int, int] = field(default_factory=dict)  # by pid
    mps_pids: frozenset[int] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest keeps of it."""
        kept = asdict(self)
        return {key: kept[key] for key in ("uuid", "name", "minor", "total_bytes")}


def read_gpus() -> tuple[str, list[Gpu]]:
    """Return the driver's version and all GPUs.

    Raises:
        CudaUnsupported: if NVML cannot be loaded or does not answer.
    """
    # Late, since it is slow to import and there are nodes without a GPU.
    from cuda.bindings import nvml

    try:
        nvml.init_v2()
        version = str(nvml.system_get_driver_version())
        return version, [_read(nvml, number) for number in range(nvml.device_get_count_v2())]
    except (nvml.NvmlError, RuntimeError) as error:
        raise CudaUnsupported(
            f"NVML does not answer: {error}", hint="see that nvidia-smi works on this node"
        ) from error


def _read(nvml: Any, number: int) -> Gpu:  # noqa: ANN401 - the module cuda.bindings.nvml
    device = nvml.device_get_handle_by_index_v2(number)
    memory = nvml.device_get_memory_info_v2(device)
    try:
        mig = bool(nvml.device_get_mig_mode(device)[0])
    except (nvml.NvmlError, RuntimeError):  # a GPU or an NVML without MIG
        mig = False
    try:
        mps = frozenset(int(p.pid) for p in nvml.device_get_mps_compute_running_processes_v3(device))
    except (nvml.NvmlError, RuntimeError):
        mps = frozenset()
    processes = nvml.device_get_compute_running_processes_v3(device)
    return Gpu(
        uuid=str(nvml.device_get_uuid(device)),
        name=str(nvml.device_get_name(device)),
        minor=int(nvml.device_get_minor_number(device)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        mig=mig,
        held_bytes={int(p.pid): int(p.used_gpu_memory) for p in processes},
        mps_pids=mps,
    )
