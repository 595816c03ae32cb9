"""Times gangs: small ones of containers against as many that are no gang, and meetings of large ones.

Containers are those of one podman, on nodes that are network namespaces; all are dumped at once, so that contenders
share the cores in the same way. Large ones have no containers: members are connections to a coordinator, one each, over
loopback with TLS, that ask as members do. They join; then all reach each phase at the same moment, which is the most
that they can ask of it, and ask again when they have been told to wait.
"""

import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from integration.cri.engine import build_wheels
from integration.gang.mesh import Mesh, succeeded
from integration.gang.nodes import limit_members
from integration.journals import sessions
from integration.net.conftest import build_peer
from integration.net.engine import NetPodman
from ocihook.gang.certificates import ServerTls, client_tls
from ocihook.gang.protocol import PHASES, TOLD, Phase, State
from ocihook.gang.server import expect_many, serve
from tests.fakes.authority import Authority

CONNECTIONS = 8  # of a member, with others
CONNECTING = 512  # members that do so at a time: a handshake must not take 10 s
SIZES = (64, 1024, 4096, 16384)
SMALL = (2, 4, 16)  # members in containers
MEMORY_MIB = 64  # of each of these


class Meetings(NamedTuple):
    """What a dump of a gang takes in meetings."""

    members: int
    messages: int  # both ways
    megabytes: float  # of HTTP
    joined_s: float  # from when they begin to connect until all have joined
    typical_s: float  # of a meeting, from when all ask until the last is told
    longest_s: float
    request_s: float  # of a processor, at the coordinator; connections are made before
    memory_mib: float  # of the coordinator


def most_members() -> int:
    """Return how many there may be, by the files that a process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 100


def meetings(members: int) -> Meetings:
    """Let a gang of so many members be dumped, by a coordinator in a process of its own."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            scratch, authority = Path(name), Authority()
            accepting = ServerTls(authority.give(scratch / "coordinator", "coordinator"))
            process = multiprocessing.get_context("fork").Process(
                target=_coordinate, args=(listener, scratch / "gangs", accepting)
            )
            process.start()
            try:
                assert process.pid is not None
                tls = client_tls(authority.give(scratch / "node", "node"))
                return asyncio.run(_Dump(members, listener.getsockname()[1], tls, process.pid).run())
            finally:
                process.kill()
                process.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _coordinate(listener: socket.socket, root: Path, tls: ServerTls) -> None:
    expect_many()
    serve(listener, root, tls)


class _Dump:
    """The members of a gang, as the coordinator sees them."""

    def __init__(self, members: int, port: int, tls: ssl.SSLContext, coordinator_pid: int) -> None:
        self._members, self._port, self._tls, self._pid = range(members), port, tls, coordinator_pid
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._connecting = asyncio.Semaphore(CONNECTING)
        self._messages = self._bytes = self._epoch = 0

    async def run(self) -> Meetings:
        """Dump it."""
        began = time.perf_counter()
        await asyncio.gather(*map(self._join, self._members))
        joined_s, times = time.perf_counter() - began, []
        cpu_s, before = self._cpu_s(), self._messages
        for phase in PHASES["dump"]:
            began = time.perf_counter()
            await asyncio.gather(*(self._meet(number, phase) for number in self._members))
            times.append(time.perf_counter() - began)
        request_s = (self._cpu_s() - cpu_s) / (self._messages - before) * 2
        memory_mib = self._memory_mib()
        for _, writer in self._streams.values():
            writer.transport.abort()
        sent = self._messages, self._bytes / 1e6
        return Meetings(
            len(self._members), *sent, joined_s, statistics.median(times), max(times), request_s, memory_mib
        )

    def _cpu_s(self) -> float:
        return time.clock_gettime(~self._pid << 3 | 2)  # clock_getcpuclockid(3)

    def _memory_mib(self) -> float:
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    async def _join(self, number: int) -> None:
        async with self._connecting:
            self._streams[number] = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
        answer = await self._ask(number, {"verb": "join", "join": ["dump", len(self._members), 0]})
        self._epoch = answer["epoch"]

    async def _meet(self, number: int, phase: Phase) -> None:
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        message: dict[str, Any] = {address: "x"}
        if phase == Phase.DUMPED:
            end = [address, 29500, "10.0.0.2", 40000, 1, 1 << 31, 1 << 31, 1 << 31]
            message = {"ends": [end] * CONNECTIONS, "checkpoint": {"container": "c" * 64}}
        about = [f"10.0.0.{peer}" for peer in range(CONNECTIONS)] if phase in TOLD else []
        request = {"verb": "meet", "phase": phase, "message": message, "about": about}
        while (answer := await self._ask(number, request))["state"] == State.WAIT:
            pass
        assert answer["state"] == State.MET, answer

    async def _ask(self, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        reader, writer = self._streams[number]
        who = {"namespace": "team", "gang": "job", "member": f"job-{number}/worker", "session": f"{number:036}"}
        body = json.dumps({**who, "epoch": self._epoch, "wait_s": 60.0, **request}).encode()
        head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: identity\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        said = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readexactly(int(said.lower().partition(b"content-length: ")[2].split()[0]))
        self._messages += 2
        self._bytes += len(head) + len(body) + len(said) + len(answer)
        parsed: dict[str, Any] = json.loads(answer)
        return parsed


class Added(NamedTuple):
    """What it costs that containers are a gang; seconds are medians of rounds."""

    members: int
    gang_s: float  # from when all were asked for a dump until the last was done; they run on
    alone_s: float  # the same of as many containers, with the same connections, that are no gang
    stalls_s: list[float]  # of connections whose sender waited, behind the release of a restore


def added(root: Path, members: int, rounds: int) -> Added:
    """Dump a gang and as many other containers in turns; then move the gang, as often."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    try:
        peer, wheels = build_peer(scratch / "peer.bin"), scratch / "wheels/site"
        wheels.parent.mkdir()
        build_wheels(wheels, os.readlink(root / "usr/bin/python3").removeprefix("python"))
        node = NetPodman(scratch, root, wheels, peer)
        try:
            node.install()
            limit_members(node)
            return _measure(node, members, rounds)
        finally:
            node.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure(node: NetPodman, members: int, rounds: int) -> Added:
    rate = 1 / members  # so that traffic takes no more CPU time where there are more of them
    contenders = {
        name: Mesh(
            [node], members, gang=name, rate=rate, first_host=host, memory_mib=MEMORY_MIB, is_gang=name == "gang"
        )
        for name, host in (("gang", 1), ("alone", 101))
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first is not counted
        for name, mesh in contenders.items():
            began = time.perf_counter()
            succeeded(mesh.checkpoint("--leave-running", skew_s=0))
            if number:
                seconds[name].append(time.perf_counter() - began)
            mesh.assert_nothing_is_left()
    contenders["alone"].remove()
    gang, stalls = contenders["gang"], []
    for number in range(1, rounds + 1):
        succeeded(gang.checkpoint())
        gang.move(number)
        began_s = time.time()
        succeeded(gang.restore())
        gang.assert_flows()
        new = [session for session in sessions(node.namespace) if float(session["began"]) >= began_s]
        phases = [phase for session in new for phase in session["phases"]]
        stalls += [phase["seconds"] for phase in phases if phase["name"].startswith("connections stalled")]
    return Added(members, statistics.median(seconds["gang"]), statistics.median(seconds["alone"]), stalls)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(added(Path(sys.argv[1]), *map(int, sys.argv[2:])))
        sys.exit()
    for size in filter(most_members().__ge__, SIZES):
        print(meetings(size))
