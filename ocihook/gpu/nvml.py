"""The node's GPUs as NVML reports them: which, how much memory, and which process holds how much of it.

NVML starts a thread and opens device files in its caller, so call it in a process that ends afterwards.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ocihook.errors import CudaUnsupported
from ocihook.gpu import library


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    uuid: str  # as in GPU-8d1ee1b5-...
    name: str
    minor: int  # of its device file
    total_bytes: int
    free_bytes: int
    mig: bool = False
    mig_instances: Mapping[int, str] = field(default_factory=dict)  # UUID and shape of the one that a pid has
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
    # Late, since there are nodes without a GPU.
    import pynvml

    library.load(library.NVML)
    try:
        pynvml.nvmlInit()
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return version, [_read(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise CudaUnsupported(f"NVML does not answer: {error}", hint=_remedy()) from error


def _remedy() -> str:
    for root in library.driver_roots():
        if (root / "dev/nvidiactl").exists() and not Path("/dev/nvidiactl").exists():
            return f"the driver's device files are in its container alone: cp -a {root}/dev/nvidia* /dev/"
    return "see that nvidia-smi works on this node"


def _read(nvml: ModuleType, number: int) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    mig, mps = False, frozenset[int]()
    instances: dict[int, str] = {}
    with contextlib.suppress(nvml.NVMLError):  # a GPU or an NVML without MIG
        mig = bool(nvml.nvmlDeviceGetMigMode(device)[0])
        instances = _mig_instances(nvml, device) if mig else {}
    with contextlib.suppress(nvml.NVMLError):
        mps = frozenset(process.pid for process in nvml.nvmlDeviceGetMPSComputeRunningProcesses(device))
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    return Gpu(
        uuid=str(nvml.nvmlDeviceGetUUID(device)),
        name=str(nvml.nvmlDeviceGetName(device)),
        minor=int(nvml.nvmlDeviceGetMinorNumber(device)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        mig=mig,
        mig_instances=instances,
        held_bytes={int(p.pid): int(p.usedGpuMemory or 0) for p in processes},
        mps_pids=mps,
    )


def _mig_instances(nvml: ModuleType, device: object) -> dict[int, str]:
    """Return the MIG instance of each process, as MIG-4f2c... (1g.10gb)."""
    found: dict[int, str] = {}
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(nvml.NVMLError):  # numbers have gaps
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
            shape = str(nvml.nvmlDeviceGetName(instance)).rpartition("MIG ")[2]  # NVIDIA H100 80GB HBM3 MIG 1g.10gb
            name = f"{nvml.nvmlDeviceGetUUID(instance)} ({shape})"
            found |= {int(p.pid): name for p in nvml.nvmlDeviceGetComputeRunningProcesses(instance)}
    return found
