"""The driver API's checkpoint calls, each answer an error with a remedy or nothing.

The calls need no cuInit in the caller. None may be made on a stopped process (ptrace, freezer, SIGSTOP): a thread of
that process does the work, and the call never returns.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import ModuleType
from typing import Any

from ocihook.errors import CudaError, CudaLockTimeout, CudaStateError, CudaUnsupported
from ocihook.gpu import library

FIRST_DRIVER_VERSION = 12080  # as cuDriverGetVersion returns it: the first with this API, driver 570

# Of a verb, or of any: what integration/gpu/results/{driver-limits,probes}-580.json were seen to end so.
_REMEDIES: Mapping[str, str] = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the node, or raise the limits of the container (checkpoint); free "
    "memory on the GPU (restore)",
    "checkpoint CUDA_ERROR_NOT_SUPPORTED": "the process has managed memory, or a pool (cudaMallocAsync) that gives "
    "memory back to the driver at work: start it again with a pool that keeps it (cudaMemPoolAttrReleaseThreshold), or "
    "have it come to rest before a checkpoint (ocihook.io/quiesce-signal)",
    "checkpoint CUDA_ERROR_UNKNOWN": "a checkpoint of this process has failed before, and the driver makes no other "
    "one of it: start it again",
    "CUDA_ERROR_NOT_SUPPORTED": "the process used what a checkpoint cannot hold (NCCL over P2P or cuMem, CUDA IPC, "
    "MIG, MPS), or the GPUs here are not those that it had",
    "restore CUDA_ERROR_INVALID_VALUE": "the process had opened GPU memory of another one (CUDA IPC, as vLLM's custom "
    "all-reduce does: --disable-custom-all-reduce), which drivers before 610 cannot restore",
    "CUDA_ERROR_OPERATING_SYSTEM": "the process is gone or lost to CUDA; end the container, restore its checkpoint",
}
# Of cuda-bindings, for a restore above all: 13.3.0 has no CUcheckpointRestoreArgs.
_NEEDED = (
    *("cuDriverGetVersion", "cuCheckpointProcessGetState", "cuCheckpointProcessGetRestoreThreadId"),
    *(f"cuCheckpointProcess{verb}" for verb in ("Lock", "Checkpoint", "Restore", "Unlock")),
    *("CUcheckpointLockArgs", "CUcheckpointRestoreArgs", "CUcheckpointGpuPair", "CUuuid"),
)
_REMEDY_OF_BINDINGS = "install ocihook's package, or pip install 'cuda-bindings>=13.0.2,<14,!=13.3.0'"
_REMEDY_OF_A_MAP = "the GPU map (ocihook.io/gpu-map) must name every GPU that the process has open"

GpuMap = Sequence[tuple[str, str]]


class CudaState(StrEnum):
    """The driver's states of a process, in NVIDIA's own words."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


log = logging.getLogger(__name__)

_STATES = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED, CudaState.FAILED)  # CUprocessState


def load_bindings() -> None:
    """Import what is otherwise imported late, where it may be needed: on a node with the driver.

    For a process that outlives the files it was started from, as an agent does when its package is upgraded.
    """
    if library.has_kernel_driver():
        import pynvml  # noqa: F401 - for gpu/nvml.py

        try:
            _load_bindings()
        except CudaUnsupported as error:  # containers without a GPU need none
            log.error("GPUs cannot be checkpointed: %s", error)


def has_driver() -> bool:
    """Return whether there is a driver library on this node."""
    return library.load(library.CUDA)


def no_driver() -> CudaUnsupported:
    """Return why there is no driver to be called: none is installed, or its library is not found."""
    if not library.has_kernel_driver():
        return CudaUnsupported(f"there is no {library.CUDA}", hint="install NVIDIA's driver 570 or later")
    looked = ", ".join(map(str, [*library.driver_roots(), *library.CDI_DIRS]))
    return CudaUnsupported(
        f"NVIDIA's driver is loaded, but its {library.CUDA} is neither where the loader looks nor by {looked}",
        hint="name its directory in a file of /etc/ld.so.conf.d and run ldconfig",
    )


class CudaDriver:
    """The node's driver.

    Raises:
        CudaUnsupported: if there is none, or it is older than 570.
    """

    def __init__(self) -> None:
        if not has_driver():
            raise no_driver()
        self._api: ModuleType = _load_bindings()
        self.version = int(self._call("cuDriverGetVersion"))
        if self.version < FIRST_DRIVER_VERSION:
            raise CudaUnsupported(
                f"the driver supports CUDA {self.version // 1000}.{self.version % 1000 // 10}, which cannot checkpoint",
                hint="install driver 570 or later",
            )

    def state(self, pid: int) -> CudaState | None:
        """Return the state of a process; None if it does not use CUDA."""
        code, value = self._api.cuCheckpointProcessGetState(pid)
        if code.name == "CUDA_ERROR_NOT_INITIALIZED":
            return None
        self._check(code, "state", pid)
        return _STATES[int(value)]

    def restore_thread_id(self, pid: int) -> int:
        """Return the thread of the process that must be able to run for any of the verbs."""
        return int(self._call("cuCheckpointProcessGetRestoreThreadId", pid))

    def lock(self, pid: int, timeout_s: float) -> None:
        """Let CUDA calls that have begun end, and hold back new ones.

        Raises:
            CudaLockTimeout: if they do not end in time; the process runs on.
        """
        arguments = self._api.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, int(timeout_s * 1000))  # 0 would be for ever
        self._check(self._api.cuCheckpointProcessLock(pid, arguments)[0], "lock", pid)

    def checkpoint(self, pid: int) -> None:
        """Move device memory of a locked process into its own memory, and release the GPU."""
        self._check(self._api.cuCheckpointProcessCheckpoint(pid, None)[0], "checkpoint", pid)

    def restore(self, pid: int, gpu_map: GpuMap = ()) -> None:
        """Give a checkpointed process its GPU and device memory back; it stays locked.

        Must not be tried without enough free memory on the GPU: the process is lost then, as was seen with 580.

        Args:
            pid: of the process.
            gpu_map: UUIDs (as NVML reports them) that it had, each with the one to take instead. With any, every GPU
                that the process has open must be in it (CUDA_VISIBLE_DEVICES or not), else INVALID_VALUE.
        """
        arguments = None
        if gpu_map:
            pairs = [self._pair(old, new) for old, new in gpu_map]
            arguments = self._api.CUcheckpointRestoreArgs()
            arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        self._check(self._api.cuCheckpointProcessRestore(pid, arguments)[0], "restore", pid, has_map=bool(gpu_map))

    def _pair(self, old: str, new: str) -> Any:  # noqa: ANN401 - CUcheckpointGpuPair of cuda-bindings
        pair = self._api.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
        return pair

    def _uuid(self, text: str) -> Any:  # noqa: ANN401 - CUuuid of cuda-bindings
        uuid = self._api.CUuuid()
        ctypes.memmove(uuid.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
        return uuid

    def unlock(self, pid: int) -> None:
        """Let a locked process call CUDA again."""
        self._check(self._api.cuCheckpointProcessUnlock(pid, None)[0], "unlock", pid)

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - what the API gives
        code, value = getattr(self._api, name)(*arguments)
        self._check(code, name, 0)
        return value

    @staticmethod
    def _check(code: Any, verb: str, pid: int, *, has_map: bool = False) -> None:  # noqa: ANN401 - CUresult
        name = str(code.name)
        if name == "CUDA_SUCCESS":
            return
        what = f"CUDA {verb} of process {pid}: {name}"
        if name == "CUDA_ERROR_NOT_READY":
            raise CudaLockTimeout(what, result=name, hint="the GPU is busy with long work; raise the lock's time")
        if name == "CUDA_ERROR_ILLEGAL_STATE":
            raise CudaStateError(what, result=name, hint="another program, such as CRIU's CUDA plugin, handles it, too")
        hint = _REMEDIES.get(f"{verb} {name}") or _REMEDIES.get(name, "")
        if has_map and name == "CUDA_ERROR_INVALID_VALUE":
            hint = _REMEDY_OF_A_MAP
        raise CudaError(what, result=name, hint=hint)


def _load_bindings() -> ModuleType:
    # Late, since it is slow to import and there are nodes without a GPU.
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnsupported(f"cuda-bindings cannot be loaded: {error}", hint=_REMEDY_OF_BINDINGS) from error
    module: ModuleType = driver
    if missing := [name for name in _NEEDED if not hasattr(module, name)]:
        what = f"the installed cuda-bindings have no {', '.join(missing)}, without which GPUs cannot be restored"
        raise CudaUnsupported(what, hint=_REMEDY_OF_BINDINGS)
    return module
