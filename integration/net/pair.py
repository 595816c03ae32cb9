"""A client and a server in two containers, on a node each, with connections of every family between them."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from integration.journals import sessions
from integration.net.engine import NetPodman, Place
from integration.net.traffic import assert_flows, progress

NAMES = ("client", "server")


class Pair:
    """Two containers under traffic."""

    def __init__(
        self, node: NetPodman, *, server: Sequence[str] = (), options: Sequence[str] = (), **notes: str
    ) -> None:
        """Start both, and wait for traffic.

        Args:
            node: with podman.
            server: what the server's program is to do beside that.
            options: of podman for the server.
            notes: annotations of ocihook, of both.
        """
        self.node = node
        self.archives = {name: node.scratch / f"{name}.tar" for name in NAMES}
        self.places: dict[str, Place] = {}
        self.make_places(0)
        words = endpoints(self.places["server"])
        node.start_peer("server", "server", *server, "server", *words["server"], options=options, **notes)
        node.start_peer("client", "client", "client", *words["client"], **notes)
        self.assert_flows()

    def make_places(self, net: int, *, is_plugged: bool = True) -> None:
        """Make the nodes, with addresses of that net."""
        for host, name in enumerate(NAMES, 1):
            self.places[name] = self.node.make_place(name, Place.of(net, host), is_plugged=is_plugged)

    def remove_places(self) -> None:
        """Remove the nodes."""
        for name in NAMES:
            self.node.remove_place(name)

    def assert_nothing_is_left(self) -> None:
        """Check that all sessions have ended, and that nothing holds traffic any more."""
        assert all(session["effects"] == [] for session in sessions(self.node.namespace))
        for name in NAMES:
            assert self.node.holds(name) == []

    def assert_whole(self) -> None:
        """Check that no connection has broken."""
        for name in NAMES:
            progress(self.node.said(name))

    def assert_flows(self) -> None:
        """Check that all connections continue in both directions."""
        assert_flows({name: partial(self.node.said, name) for name in NAMES})

    def checkpoint(self, *options: str) -> None:
        """Checkpoint both at about the same time."""

        def one(name: str) -> None:
            time.sleep(random.random() / 5)
            self.node.checkpoint(name, self.archives[name], *options)

        both(one)

    def remove(self) -> None:
        """Remove both containers."""
        for name in NAMES:
            self.node.remove(name)

    def move_archives(self, pairs: Sequence[str]) -> None:
        """Write what both archives become at other addresses, OLD=NEW, in their place."""
        for archive in self.archives.values():
            moved = archive.with_name("moved.tar")
            addresses = [f"--address={pair}" for pair in pairs]
            self.node.ocihook("archive", "move", *addresses, str(archive), str(moved))
            moved.replace(archive)

    def restore(self) -> None:
        """Restore both at about the same time; then the network comes up.

        Without a gang nothing else keeps one from sending to where the other is not yet.
        """
        both(lambda name: self.node.restore(self.archives[name]))
        self.node.plug(*NAMES)


def endpoints(server: Place) -> dict[str, list[str]]:
    """Return where the server listens and what the client connects to."""
    here = [f"{server.four}/7000", f"{server.six}/7000"]
    return {"server": [*here, "::/7001"], "client": [*here, f"{server.four}/7001", f"::ffff:{server.four}/7001"]}


def both(call: Callable[[str], object]) -> None:
    """Call something for both at once."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(call, NAMES))
