"""Checks of memory: room for CRIU, and mappings that CRIU cannot dump."""

from collections.abc import Iterator

from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail
from ocihook.preflight.observation import Observation

# CRIU runs code of its own in each process, one after the other, whose memory counts as the container's. Without swap,
# and where nothing can be reclaimed, the kernel kills a process of the job for it. CRIU 4.1.1 needs 256 KiB.
_NEEDED_BYTES = 1 << 20


def _memory_limit(seen: Observation) -> Iterator[Problem]:
    room = seen.room_bytes
    if room is None or room >= _NEEDED_BYTES or seen.swap_bytes:
        return
    detail = (
        f"its memory limit leaves it {max(0, room) >> 10} KiB; CRIU needs {_NEEDED_BYTES >> 20} MiB there, or the "
        "kernel kills it"
    )
    yield fail(detail, "raise the limit a little, or have the application free memory")


def _sysv_ipc(seen: Observation) -> Iterator[Problem]:
    if seen.has_own("ipc"):
        return
    for process in seen.processes:
        if "/SYSV" in process.maps:
            detail = f"{seen.who(process.pid)} has System V shared memory of the node's"
            yield fail(detail, "run it in an IPC namespace of its own (no hostIPC)")


CHECKS = (
    Check(name="memory-limit", find=_memory_limit, is_final=True),
    Check(name="sysv-ipc", find=_sysv_ipc),
)
