"""Times gangs: small ones of containers against as many that are no gang, and meetings of large ones.

Containers are those of one podman, on nodes that are network namespaces; all are dumped at once, so that contenders
share the cores in the same way. Of the large ones network and members are simulated; what the coordinator does for each
request is done, and timed. A member asks once for each phase, and waits; the coordinator answers all when the last has
come.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from integration.cri.engine import build_wheels
from integration.gang.mesh import Mesh, succeeded
from integration.gang.nodes import limit_members
from integration.journals import sessions
from integration.net.conftest import build_peer
from integration.net.engine import NetPodman
from ocihook.gang.protocol import PHASES, Claim, Gang, Join, Phase
from ocihook.session.record import to_json

ROUND_TRIP_S = 0.0005  # between nodes of one cluster
CONNECTIONS = 8  # of a member, with others
SIZES = (64, 1024, 16384)
SMALL = (2, 4, 16)  # members in containers
MEMORY_MIB = 64  # of each of these


class Meetings(NamedTuple):
    """What a dump of a gang takes in meetings."""

    members: int
    messages: int  # both ways
    megabytes: float
    typical_s: float  # of a meeting, from when the last member has come until the last is told
    longest_s: float


def simulate(members: int) -> Meetings:
    """Let a gang of so many members be dumped."""
    gang = Gang(lambda _: "", lambda _: "", decided={})
    claims = [Claim(f"job-{number}/worker", f"session-{number}", f"node-{number}") for number in range(members)]
    wanted = Join("dump", members)
    for claim in claims:
        gang.join(claim, wanted)
    claims = [claim._replace(epoch=1) for claim in claims]
    sent_bytes, meetings = 0, []
    ends = [["10.0.0.1", 29500, "10.0.0.2", 40000 + n, 1, 1 << 31, 1 << 31, 1 << 31] for n in range(CONNECTIONS)]
    messages = {Phase.DUMPED: {"ends": ends, "checkpoint": {"container": "c" * 64}}}
    for phase in PHASES["dump"]:
        mine = [messages.get(phase, {f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}": "x"}) for n in range(members)]
        about = list(mine[members // 2]) * CONNECTIONS
        request = json.dumps({**claims[0]._asdict(), "verb": "meet", "message": mine[0], "about": about})
        for claim, message in zip(claims[:-1], mine, strict=False):
            gang.meet(claim, phase, message, about)
        began = time.perf_counter()
        gang.meet(claims[-1], phase, mine[-1], about)
        answers = [json.dumps(to_json(gang.meet(claim, phase, None, about)._asdict())) for claim in claims]
        meetings.append(time.perf_counter() - began + ROUND_TRIP_S)
        sent_bytes += members * len(request) + sum(map(len, answers))
    count = 2 * members * len(PHASES["dump"])
    return Meetings(members, count, sent_bytes / 1e6, statistics.median(meetings), max(meetings))


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
    for size in SIZES:
        print(simulate(size))
