"""The network's place in a dump and a restore."""

from ocihook.net.dump import freeze_for_repair, hold_network, note_lock_left, refuse
from ocihook.net.restore import Moving, end_release, move_sockets, prepare, release_sockets, wake_senders
from ocihook.session.participant import Dump, Participant, Restore


class Network(Participant):
    """Holds traffic, moves connections to new addresses, or ends them."""

    def __init__(self) -> None:
        self._moving: Moving | None = None

    def refuse(self, dump: Dump) -> None:
        """Refuse connections that the policy does not want dumped."""
        refuse(dump)

    def hold(self, dump: Dump) -> None:
        """Note addresses, let packets in flight arrive, and hold traffic."""
        hold_network(dump)

    def after_images(self, dump: Dump) -> str:
        """Freeze the container for as long as CRIU has its connections; note a lock that CRIU leaves."""
        freeze_for_repair(dump)
        note_lock_left(dump)
        return ""

    def check(self, restore: Restore) -> None:
        """Decide what becomes of each socket, and hold traffic, before other participants begin their long work."""
        self._moving = prepare(restore)

    def before_processes(self, restore: Restore) -> str:
        """Move sockets in CRIU's memory."""
        return move_sockets(restore, self._moving) if self._moving else ""

    def needs_processes(self, restore: Restore) -> bool:
        """Return whether there are sockets."""
        del restore
        return self._moving is not None

    def processes_wait(self, restore: Restore) -> str:
        """Put back what CRIU has lost, and let traffic pass: nothing after this may fail."""
        return release_sockets(restore)

    def about_to_run(self, restore: Restore) -> None:
        """Wake connections that wait for a timer: their peers need not wait until tasks run."""
        wake_senders(restore)

    def running(self, restore: Restore) -> None:
        """Wake them again; measure how long they have stalled."""
        end_release(restore)
