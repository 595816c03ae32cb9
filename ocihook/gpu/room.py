"""Room on GPUs, without which the driver must not be called: its restore is final then, and the process is lost.

Sessions that give memory back to the same GPU take turns, so that two of them do not count the same room.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ocihook.errors import CudaError
from ocihook.gpu.nvml import Gpu
from ocihook.gpu.processes import read_node
from ocihook.linux.files import try_lock
from ocihook.linux.patience import Patience

ROOM_TIMEOUT_S = 60.0  # for a restore: memory on a GPU that was just left comes free
_POLL_S = 0.2


def missing_room(need_bytes: Mapping[str, int], gpus: Sequence[Gpu]) -> CudaError | None:
    """Return which of these GPUs has less memory free than is needed, by UUID; None if each has enough."""
    for gpu in gpus:
        need = need_bytes.get(gpu.uuid, 0)
        if need > gpu.free_bytes:
            others = ", ".join(str(pid) for pid in gpu.held_bytes) or "none that NVML shows"
            what = f"GPU {gpu.uuid} has {gpu.free_bytes} bytes free, {need} are needed"
            return CudaError(what, hint=f"end what uses it: processes {others}")
    return None


@contextlib.contextmanager
def room(
    uuids: Iterable[str],
    need_bytes: Callable[[Sequence[Gpu]], Mapping[str, int]],
    runtime_dir: Path,
    patience: Patience,
    tell: Callable[[CudaError], None] = lambda _missing: None,
) -> Iterator[None]:
    """Wait until every GPU has the memory that is needed on it, and let no other session count on it meanwhile.

    Args:
        uuids: of the GPUs.
        need_bytes: returns what is needed now, by UUID, given what NVML reports.
        runtime_dir: of the agent.
        patience: how long to wait.
        tell: is given what is missing, once, where there is a wait for memory.

    Raises:
        CudaError: if there is not enough in time; nothing has been done then.
        GivenUp: if the callers have gone; likewise.
    """
    places = [runtime_dir / f"{uuid}.lock" for uuid in sorted(set(uuids))]
    has_told = False
    while True:
        with contextlib.ExitStack() as locks:
            taken = next((place.stem for place in places if not _lock(place, locks)), "")
            gpus = [] if taken else read_node(patience)[1]
            missing = missing_room(need_bytes(gpus), gpus)
            if not taken and missing is None:
                yield
                return
        if patience.is_over:
            raise missing or CudaError(f"GPU {taken} is given to another container all the time")
        if missing is not None and not has_told:
            tell(missing)
            has_told = True
        patience.sleep(_POLL_S)


def _lock(place: Path, locks: contextlib.ExitStack) -> bool:
    """Take a GPU's lock until the stack ends; False if another session has it."""
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    locks.callback(os.close, fd)
    return try_lock(fd, fcntl.LOCK_EX)
