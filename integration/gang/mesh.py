"""The members of a gang, each on a node of its own; as a mesh, with a connection between every two of them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

from integration.gang.nodes import assert_ended
from integration.namespace import wait_for
from integration.net.engine import NetPodman, Place
from integration.net.traffic import assert_flows, progress
from ocihook.linux.cgroup import find_freezer

_SKEW_S = 0.5  # between the first and the last that is asked for its dump or restore


class Members:
    """Containers of one job."""

    def __init__(self, engines: Sequence[NetPodman], size: int, gang: str, *, first_host: int = 1) -> None:
        """Make the nodes; the containers are the caller's.

        Args:
            engines: podman, or several on one network; members take turns.
            size: how many members.
            gang: its name, from which the members have theirs.
            first_host: number of the first member in its net; others follow.
        """
        self.notes = {"gang": gang, "gang_size": str(size)}
        self._first_host = first_host
        self.names = [f"{gang}{number}" for number in range(size)]
        self.engines = {name: engines[number % len(engines)] for number, name in enumerate(self.names)}
        self.archives = {name: engine.scratch / f"{name}.tar" for name, engine in self.engines.items()}
        self.places = self.make_places(0)

    def make_places(self, net: int) -> dict[str, Place]:
        """Make the nodes, with addresses of that net."""
        places = {name: Place.of(net, host) for host, name in enumerate(self.names, self._first_host)}
        for name, place in places.items():
            self.engines[name].make_place(name, place)
        return places

    def at_once(self, call: Callable[[str], str], *, skew_s: float = _SKEW_S) -> dict[str, str | Exception]:
        """Call something for all at about the same time; return what each call returned or raised."""

        def one(name: str) -> str | Exception:
            time.sleep(random.random() * skew_s)
            try:
                return call(name)
            except (AssertionError, OSError) as error:
                return error

        with ThreadPoolExecutor(len(self.names)) as pool:
            return dict(zip(self.names, pool.map(one, self.names), strict=True))

    def checkpoint(self, *options: str, skew_s: float = _SKEW_S) -> dict[str, str | Exception]:
        """Checkpoint all; return what podman printed, or how it failed."""

        def one(name: str) -> str:
            return self.engines[name].checkpoint(name, self.archives[name], *options)

        return self.at_once(one, skew_s=skew_s)

    def restore(self) -> dict[str, str | Exception]:
        """Restore all; return what podman printed, or how it failed."""
        return self.at_once(lambda name: self.engines[name].restore(self.archives[name]))

    def verify(self) -> str:
        """Return what `ocihook gang verify` says of the archives, which one node has."""
        return next(iter(self.engines.values())).ocihook("gang", "verify", *map(str, self.archives.values()))

    def remove(self) -> None:
        """Remove all containers."""
        for name, engine in self.engines.items():
            engine.remove(name)

    def move(self, net: int) -> None:
        """Remove containers and nodes, and make the nodes anew, with other addresses."""
        self.remove()
        for name, engine in self.engines.items():
            engine.remove_place(name)
        self.make_places(net)

    def state(self) -> dict[str, object]:
        """Return what a dump that was not made leaves as it was, by member."""
        return {name: self.state_of(name) for name in self.names}

    def state_of(self, name: str) -> object:
        """Return that of one."""
        engine = self.engines[name]
        pid = int(engine("inspect", "--format", "{{.State.Pid}}", name))
        freezer = find_freezer(pid)
        assert freezer is not None
        links = engine.inside(name, "ip", "-brief", "address")
        return pid, freezer.is_set(), freezer.is_frozen(), links, engine.inside(name, "nft", "list", "ruleset")

    def assert_nothing_is_left(self) -> None:
        """Check that all sessions have ended, and that nothing holds traffic any more."""
        for engine in set(self.engines.values()):
            assert_ended(engine)
        for name, engine in self.engines.items():
            assert engine.holds(name) == [], name


class Mesh(Members):
    """Containers under traffic, each connected with every other one."""

    beside: Sequence[str] = ()  # a program that each runs, too, and its one word
    options: Sequence[str] = ()  # of podman, for each

    def __init__(
        self,
        engines: Sequence[NetPodman],
        size: int,
        *,
        gang: str = "job",
        rate: float = 1,
        first_host: int = 1,
        memory_mib: int = 0,
        is_gang: bool = True,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start all, and wait for traffic.

        Args:
            engines: podman, or several on one network; members take turns.
            size: how many members.
            gang: its name, from which the members have theirs.
            rate: KB per ms that an end of a connection sends.
            first_host: number of the first member in its net; others follow.
            memory_mib: that each holds, beside its connections.
            is_gang: else they are containers like any others, for comparisons.
            notes: more annotations of ocihook, without prefix.
        """
        super().__init__(engines, size, gang, first_host=first_host)
        self.notes |= notes
        self._commands: dict[str, list[str]] = {}  # of `podman run`, by member
        self._words: dict[str, list[str]] = {}  # of the program, likewise
        self._rate = rate
        self._said = {name: self.place_of_files(engine) / "said" / name for name, engine in self.engines.items()}
        for number, name in enumerate(self.names):
            peers = [f"{self.places[peer].four}/7000" for peer in self.names[:number]]
            key = str(1 + number * (number - 1) // 2)
            words = [*(["beside", *self.beside] if self.beside else []), "member"]
            words += ["-o", f"/said/{name}", "-r", str(rate), "-m", str(memory_mib), "-k", key]
            words += [f"{self.places[name].four}/7000", *peers]
            self._said[name].parent.mkdir(exist_ok=True)
            options = [f"--volume={self._said[name].parent}:/said", *self.options]
            given = self.notes_of(number) if is_gang else {"tcp": "established"}
            self._words[name] = words
            engine = self.engines[name]
            self._commands[name] = engine.peer_command(name, name, *words, options=options, **given)
            engine.start_peer(name, name, *words, options=options, **given)
        self.assert_flows()

    def place_of_files(self, engine: NetPodman) -> Path:
        """Return the directory in which an engine's members write what they have done."""
        return engine.scratch

    def notes_of(self, number: int) -> dict[str, str]:
        """Return the annotations of one member, without prefix."""
        del number
        return self.notes

    def run(self) -> dict[str, str | Exception]:
        """Make all containers again; return what podman printed, or how it failed."""
        return self.at_once(lambda name: self.engines[name](*self._commands[name]))

    @property
    def connections(self) -> int:
        """How many there are between members."""
        return len(self.names) * (len(self.names) - 1) // 2

    def said(self, name: str) -> str:
        """Return what a member says of its connections."""
        return self._said[name].read_text() if self._said[name].exists() else ""

    def assert_flows(self) -> None:
        """Check that all connections continue in both directions, with the bytes that they must have."""
        peers = {name: partial(self.said, name) for name in self.names}
        assert_flows(peers, connections=len(self.names) - 1, enough_bytes=int(5000 * self._rate))

    def assert_received(self) -> None:
        """Wait until each has received all that the others have sent up to now, and more."""
        ends = {name: progress(self.said(name)) for name in self.names}
        for name, has in ends.items():
            for key, (sent, _) in has.items():
                peer = next(other for other in self.names if other != name and key in ends[other])

                def has_more(peer: str = peer, key: int = key, sent: int = sent) -> bool:
                    return progress(self.said(peer))[key][1] > sent

                wait_for(f"all that {name} has sent to {peer}", has_more)


def failures(results: dict[str, str | Exception]) -> dict[str, str]:
    """Return the words of those that failed."""
    return {name: str(result) for name, result in results.items() if isinstance(result, Exception)}


def succeeded(results: dict[str, str | Exception]) -> None:
    """Fail with the words of all that did."""
    failed = failures(results)
    assert not failed, "\n".join(f"{name}: {words}" for name, words in failed.items())
