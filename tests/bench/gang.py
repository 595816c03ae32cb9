"""Times meetings of large gangs: the real state machine and the real encoding, on a network with a measured delay.

Simulated are the network and the members; what the coordinator does for each request is done, and timed. A member asks
once for each phase, and waits; the coordinator answers all when the last has come.
"""

import json
import statistics
import time
from typing import NamedTuple

from ocihook.gang.protocol import PHASES, Claim, Gang, Join, Phase
from ocihook.session.record import to_json

ROUND_TRIP_S = 0.0005  # between nodes of one cluster
CONNECTIONS = 8  # of a member, with others
SIZES = (64, 1024, 16384)


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


if __name__ == "__main__":
    for size in SIZES:
        print(simulate(size))
