"""One CUDA process on its way from running through locked to checkpointed and back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ocihook.errors import CudaStateError
from ocihook.gpu.driver import CudaDriver, CudaState, GpuMap


class CudaProcess:
    """The four verbs for one process. Only steps that the driver's states allow are asked of the driver."""

    def __init__(self, driver: CudaDriver, pid: int) -> None:
        self._driver = driver
        self.pid = pid

    @classmethod
    def find(cls, driver: CudaDriver, pid: int) -> "CudaProcess | None":
        """Return the process, None if it does not use CUDA."""
        return None if driver.state(pid) is None else cls(driver, pid)

    @property
    def state(self) -> CudaState:
        """Its state, asked of the driver each time."""
        state = self._driver.state(self.pid)
        if state is None:
            raise CudaStateError(f"process {self.pid} no longer uses CUDA", result="CUDA_ERROR_NOT_INITIALIZED")
        return state

    def lock(self, timeout_s: float) -> None:
        """Running to locked."""
        self._driver.lock(self.pid, timeout_s)

    def checkpoint(self) -> None:
        """Locked to checkpointed."""
        self._driver.checkpoint(self.pid)

    def restore(self, gpu_map: GpuMap = ()) -> None:
        """Checkpointed to locked."""
        self._driver.restore(self.pid, gpu_map)

    def unlock(self) -> None:
        """Locked to running."""
        self._driver.unlock(self.pid)

    def set_running(
        self, gpu_map: GpuMap = (), measure: Callable[[str], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Bring it back to running from whatever state it is in: the inverse of lock and checkpoint.

        Its memory must be what the driver left there, and the GPUs must have room for it. Each verb is done within
        `measure`, given its name.

        Raises:
            CudaStateError: if the driver has given up on it (failed).
        """
        state = self.state
        if state is CudaState.FAILED:
            raise CudaStateError(f"process {self.pid} is lost to CUDA", result=state, hint="end the container")
        if state is CudaState.CHECKPOINTED:
            with measure("restore"):
                self.restore(gpu_map)
        if state is not CudaState.RUNNING:
            with measure("unlock"):
                self.unlock()
