"""Refuses a dump for which the kernel would kill the container: it is at its memory limit, and CRIU needs some there.

CRIU runs code of its own in each process, whose memory counts as the container's. Without swap, and where there is
nothing left to be reclaimed, the kernel ends a process of the job for it.
"""

from ocihook.errors import PreflightError
from ocihook.linux.cgroup import memory_headroom_bytes
from ocihook.linux.memory import free_swap_bytes
from ocihook.session.participant import Dump, Participant

HINT = "raise the limit a little, or have the application free memory"
_NEEDED_BYTES = 1 << 20  # 256 KiB were enough for CRIU 4.1.1, which is in one process after the other


class ParasiteRoom(Participant):
    """Looks whether there is room for it."""

    def refuse(self, dump: Dump) -> None:
        """Refuse the dump if there is none."""
        if reason := lacking_for_criu(dump.init_pid):
            raise PreflightError(f"container {dump.container}: {reason}", hint=HINT)


def lacking_for_criu(init_pid: int) -> str:
    """Return what a container at its memory limit lacks for being dumped; "" if nothing."""
    room = memory_headroom_bytes(init_pid, reclaims_all=True)
    if room is None or room >= _NEEDED_BYTES or free_swap_bytes():
        return ""
    left = max(0, room) >> 10
    return f"its memory limit leaves it {left} KiB; CRIU needs {_NEEDED_BYTES >> 20} MiB there, or the kernel kills it"
