"""Refuses what is known not to survive a restore, while the container still runs and nothing is touched.

A checkpoint of CUDA can succeed whose restore fails, and the job is lost then, left running or not. What is checked
here was seen to fail on a real node (integration/gpu/results/driver-limits-580.json, probes-580.json) or is NVIDIA's
own word.
"""

import dataclasses
import logging
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ocihook.criu.causes import remedy_of
from ocihook.errors import PreflightError
from ocihook.gpu.driver import CudaState
from ocihook.gpu.nvml import Gpu
from ocihook.gpu.processes import read_node
from ocihook.gpu.signs import Signs
from ocihook.linux.cgroup import memory_headroom_bytes
from ocihook.linux.memory import available_bytes
from ocihook.linux.mounts import is_in_memory
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process

FIRST_DRIVER = 570
FIRST_DRIVER_ON_ARM = 610
FIRST_DRIVER_WITH_IPC = 610
# The transports that are left with these, sockets and shared memory, survive; P2P, NVLS and cuMem do not.
_NCCL_NEEDS: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
# What follows ocihook's block in CRIU's file wins; `ocihook install` adds nothing where a directory is named already.
KEEP_PLUGIN_OUT = "`ocihook install`; if that changes nothing, name a directory without it as CRIU's `libdir`"
_GIB = 1 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A container with CUDA processes, and the node that it is on."""

    init_pid: int
    driver_version: str  # as in 580.159.04
    machine: str
    processes: Sequence[Signs]  # that use NVIDIA's driver
    cuda_pids: frozenset[int]  # those of them that the driver can checkpoint
    gpus: Sequence[Gpu]
    available_ram_bytes: int
    cgroup_room_bytes: int | None  # None: no limit
    packs_dir: Path | None  # where packs go; None: there are none
    free_disk_bytes: int | None  # there
    packs_in_memory: bool = False  # that place is a tmpfs
    plugin: Path | None = None  # CRIU's own for CUDA, if CRIU would load it

    @classmethod
    def read(
        cls,
        init_pid: int,
        processes: Sequence[Signs],
        states: Mapping[Process, CudaState | None],
        patience: Patience,
        packs_dir: Path | None = None,
        plugin: Path | None = None,
    ) -> "Situation":
        """Read what there is to know of the node and a container.

        Args:
            init_pid: of the container.
            processes: its processes that use NVIDIA's driver.
            states: what the driver says of them.
            patience: how long to wait.
            packs_dir: where packs go.
            plugin: of CRIU for CUDA, that it would load.

        Raises:
            CudaUnsupported: if NVML does not answer.
            OSError: if `packs_dir` cannot be looked at.
        """
        version, gpus = read_node(patience)
        return cls(
            init_pid=init_pid,
            driver_version=version,
            machine=platform.machine(),
            processes=processes,
            cuda_pids=frozenset(process.pid for process, state in states.items() if state),
            gpus=gpus,
            available_ram_bytes=available_bytes(),
            cgroup_room_bytes=memory_headroom_bytes(init_pid),
            packs_dir=packs_dir,
            free_disk_bytes=_free_bytes(packs_dir),
            packs_in_memory=packs_dir is not None and is_in_memory(packs_dir),
            plugin=plugin,
        )

    def read_again(self, patience: Patience) -> "Situation":
        """Return the same with what the processes hold now, and what room there is: for when they are locked.

        What they hold changes until then: it may be less than was read before, or more.

        Raises:
            CudaUnsupported: if NVML does not answer.
            OSError: if `packs_dir` cannot be looked at.
        """
        return dataclasses.replace(
            self,
            gpus=read_node(patience)[1],
            available_ram_bytes=available_bytes(),
            cgroup_room_bytes=memory_headroom_bytes(self.init_pid),
            free_disk_bytes=_free_bytes(self.packs_dir),
        )

    @property
    def held_bytes(self) -> int:
        """GPU memory that the processes hold."""
        return sum(gpu.held_bytes.get(pid, 0) for gpu in self.gpus for pid in self.cuda_pids)


def refusals(situation: Situation) -> list[str]:
    """Return every reason not to dump, each with what to do about it; [] if none is seen."""
    return [*_about_node(situation), *(r for signs in situation.processes for r in _about_process(signs, situation))]


def memory_refusals(situation: Situation) -> list[str]:
    """Return those of them that are about room, on the node, in the container's limit and on the disk."""
    return [*_about_room(situation)]


def restore_refusals(need_bytes: int, available_ram_bytes: int, cgroup_room_bytes: int | None) -> list[str]:
    """Return every reason not to begin a restore, each with what to do about it; [] if none is seen.

    Args:
        need_bytes: GPU memory that will be written into the container's own, at least.
        available_ram_bytes: of the node.
        cgroup_room_bytes: what the container's memory limit leaves; None: no limit.
    """
    return [*_about_memory("a restore", need_bytes, available_ram_bytes, cgroup_room_bytes)]


def heed(reasons: Sequence[str], policy: str) -> None:
    """Refuse for these reasons, if any; or log them where the policy (`preflight`) takes the risk.

    Raises:
        PreflightError: to refuse.
    """
    if reasons and policy == "refuse":
        raise PreflightError("; ".join(reasons), hint="the annotation ocihook.io/preflight=warn takes the risk")
    for reason in reasons:
        log.warning("preflight: %s", reason)


def _about_node(situation: Situation) -> Iterator[str]:
    major = driver_major(situation.driver_version)
    if major < FIRST_DRIVER:
        yield f"driver {situation.driver_version} cannot checkpoint: install {FIRST_DRIVER} or later"
    if situation.machine == "aarch64" and major < FIRST_DRIVER_ON_ARM:
        yield f"driver {situation.driver_version} cannot checkpoint on Arm: install {FIRST_DRIVER_ON_ARM} or later"
    if situation.plugin:
        yield (
            f"CRIU would load {situation.plugin}, which lets threads run whose GPU memory has been taken, and such a "
            f"thread can end the job: {KEEP_PLUGIN_OUT}"
        )
    yield from _about_room(situation)


def _about_room(situation: Situation) -> Iterator[str]:
    need = situation.held_bytes
    ram, room = situation.available_ram_bytes, situation.cgroup_room_bytes
    if situation.packs_in_memory and need <= ram < 2 * need:
        yield (
            f"the driver copies {_gib(need)} of GPU memory into the node's, which has {_gib(ram)} left, and packs may "
            "take as much again where the engine puts them, a tmpfs: free memory on the node, or have them on a disk"
        )
    yield from _about_memory("the driver", need, ram, room)
    if situation.free_disk_bytes is not None and need > situation.free_disk_bytes:
        yield (
            f"{_gib(need)} of GPU memory may not fit where the engine puts checkpoints, which has "
            f"{_gib(situation.free_disk_bytes)} free: free space there"
        )


def _about_memory(who: str, need_bytes: int, ram_bytes: int, room_bytes: int | None) -> Iterator[str]:
    copies = f"{who} copies {_gib(need_bytes)} of GPU memory into"
    if need_bytes > ram_bytes:
        yield f"{copies} the node's, which has {_gib(ram_bytes)} left: free memory on the node"
    if room_bytes is not None and need_bytes > room_bytes:
        yield (
            f"{copies} the container's own, whose memory limit leaves {_gib(room_bytes)}; the kernel would kill it: "
            "raise the container's memory limit"
        )


def _about_process(signs: Signs, situation: Situation) -> Iterator[str]:
    who = f"process {signs.pid}"
    gpus = [gpu for gpu in situation.gpus if gpu.minor in signs.gpu_minors]
    if signs.has_mig or any(gpu.mig for gpu in gpus):
        named = next((f" {gpu.mig_instances[signs.pid]}" for gpu in gpus if signs.pid in gpu.mig_instances), "")
        yield f"{who} uses a MIG instance{named}, which the driver cannot restore: use a whole GPU"
    if any(signs.pid in gpu.mps_pids for gpu in gpus) or "CUDA_MPS_PIPE_DIRECTORY" in signs.environment:
        yield f"{who} is a client of MPS, which the driver cannot checkpoint: run it without MPS"
    if signs.pid not in situation.cuda_pids and signs.device_files:
        yield (
            f"{who} holds {signs.device_files} of NVIDIA's device files without a CUDA context of its own, as after a "
            "fork without exec (a DataLoader's worker): start workers with 'spawn', or before CUDA is first used"
        )
    if signs.has_nccl:
        missing = [f"{name}={value}" for name, value in _NCCL_NEEDS.items() if signs.environment.get(name) != value]
        if missing:
            yield (
                f"{who} has an NCCL communicator that may use P2P, NVLS or cuMem; the checkpoint would succeed, its "
                "restore fail: end the process group before a checkpoint and make it again after "
                "(torch.distributed.destroy_process_group, init_process_group; ocihook.io/quiesce-signal asks for it), "
                f"or start the container with {' '.join(missing)}"
            )
    if signs.has_ipc and driver_major(situation.driver_version) < FIRST_DRIVER_WITH_IPC:
        yield (
            f"{who} shares GPU memory with another one by CUDA IPC; the checkpoint would succeed, its restore fail: "
            f"install driver {FIRST_DRIVER_WITH_IPC}, or share by the processor's memory (torch: tensors on the CPU)"
        )
    if signs.has_managed_memory:
        yield (
            f"{who} has managed memory (cudaMallocManaged, __managed__), which the driver cannot checkpoint: have it "
            "allocated on the GPU"
        )
    if signs.has_io_uring:
        yield f"{who} uses io_uring, which CRIU cannot dump: {remedy_of('io-uring')}"


def _free_bytes(directory: Path | None) -> int | None:
    if directory is None:
        return None
    file_system = os.statvfs(directory)
    return file_system.f_bavail * file_system.f_frsize


def driver_major(version: str) -> int:
    """Return the first number of a driver's version, 0 if it has none."""
    first = version.split(".", 1)[0]
    return int(first) if first.isdigit() else 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
