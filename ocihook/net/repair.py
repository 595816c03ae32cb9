"""Takes connections that a killed CRIU has left in repair mode (TCP_REPAIR) out of it, before anything uses them.

In that mode a socket is only a description of itself: the next call of the application fails (EPERM), and most die of
it. Both this and the freeze that keeps the application from calling begin when CRIU's images are complete: until then
CRIU needs the tasks, and a kill of CRIU may cost connections.
"""

import logging
import socket
from dataclasses import dataclass

from ocihook.errors import OcihookError, plain
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.net.lost_options import tcp_sockets
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.wire import DETACHED_STAGE

_REPAIR, _REPAIR_OFF = 19, 0  # TCP_REPAIR of linux/tcp.h; off with a window probe, which notifies the peer

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class InRepair(Effect, kind="in-repair"):
    """CRIU has the container's connections in repair mode, or will."""

    ends_with_stage = False
    init: Process
    reusable: tuple[int, ...] = ()  # inodes of sockets that had SO_REUSEADDR, which the end of repair mode clears
    is_frozen: bool = False  # the container, until this is undone

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Take them out of it, if CRIU was killed; else it has done so itself."""
        if journal.criu.is_alive():
            if journal.stage not in ("pre-dump", DETACHED_STAGE):
                raise OcihookError(f"CRIU (pid {journal.criu.pid}) still has the container's connections")
            return
        ended = end_repair(list(descendants(self.init.pid)), self.reusable) if self.init.is_alive() else 0
        if ended and not self.is_frozen:
            log.error(
                "container %s: CRIU was killed while it had %d connections; the application may have lost them",
                journal.container,
                ended,
            )
        elif ended:
            log.info("container %s: %d connections that a killed CRIU had live on", journal.container, ended)


def end_repair(pids: list[int], reusable: tuple[int, ...]) -> int:
    """Take the connections of processes out of repair mode; return how many were in it."""
    ended = 0
    for inode, sock in tcp_sockets(pids):
        try:
            if sock.getsockopt(socket.IPPROTO_TCP, _REPAIR) == 0:
                continue
            sock.setsockopt(socket.IPPROTO_TCP, _REPAIR, _REPAIR_OFF)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(inode in reusable))
        except OSError as error:
            log.warning("socket %d is in repair mode, and stays there: %s", inode, plain(error))
            continue
        ended += 1
    return ended
