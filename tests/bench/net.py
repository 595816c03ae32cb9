"""Times what connections cost: the pause that a peer sees, the stall behind it, and 10,000 sockets.

Pauses are those of a plain process on another node, connected to a container, which sends to it all the time; the
contender is podman with CRIU alone, its options set for connections, on the same kernel. Stalls are those of a
container that asks and waits for the answer; the contender is ocihook that wakes nobody.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from integration.cri.engine import build_wheels
from integration.journals import last_session
from integration.namespace import wait_for
from integration.net.conftest import build_peer
from integration.net.engine import NetPodman, Place
from ocihook.criu.socket_patch import Move, patch_sockets
from ocihook.net.addresses import AddressMap
from ocihook.net.moving import make_plan
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import inet_sockets
from ocihook.tcp_policy import parse
from tests.fakes.sockets import fake_criu, files_image, make_socket, read

SOCKETS = 10_000
GOAL_S = 2 * 0.0001 + 0.05  # of a stall: two round trips between namespaces of one node, and 50 ms
_SILENT = re.compile(r"silent (\d+) ms until ([\d.]+)")
_PROGRESS = re.compile(r"^connection 1 sent (\d+) received (\d+)$", re.MULTILINE)
_SERVER, _CLIENT = Place.of(1, 1), Place.of(1, 2)
_OPEN = """
import resource, socket, sys
count = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 64, count + 64))
held = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
for number, sock in enumerate(held):
    sock.bind(("0.0.0.0", 10000 + number))
print("ready", flush=True)
sys.stdin.readline()
"""


class Times(NamedTuple):
    """Seconds for 10,000 sockets, the best of some tries, and for what they are compared with."""

    listed_s: float
    by_ss_s: float
    read_s: float
    planned_s: float
    rewritten_s: float
    patched_s: float
    one_patched_s: float  # one socket, in the same memory


def many_sockets(tries: int = 3) -> Times:
    """Time 10,000 sockets: those of a process listed; those of an image read, moved in CRIU's memory and in it."""

    def best(run: Callable[[], object]) -> float:
        taken = []
        for _ in range(tries):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
        return min(taken)

    command = ["unshare", "--net", sys.executable, "-IS", "-c", _OPEN, str(SOCKETS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        namespace = NetNamespace.of(program.pid)
        assert len(inet_sockets(namespace)) == SOCKETS
        listed_s = best(lambda: inet_sockets(namespace))
        ss = ["nsenter", f"--net=/proc/{program.pid}/ns/net", "ss", "-Htuane"]
        by_ss_s = best(lambda: subprocess.run(ss, check=True, stdout=subprocess.DEVNULL))
        program.communicate("\n")
    old, new = ip_address("10.0.0.1"), ip_address("10.9.0.1")
    # None has the port of another's far end, and none the same two numbers in front.
    sockets = [make_socket(n % 5000, str(old), "10.0.0.2", id=n, inode=1000 + n) for n in range(1, SOCKETS + 1)]
    image = read(sockets)
    data = files_image(sockets)
    addresses, policy = AddressMap({old: new}), parse("established", "tcp")
    gang = {sockets[0].remote}
    plan = make_plan(sockets, policy, addresses, own={old}, gang=gang)
    assert len(plan.moves) == SOCKETS
    ends = {move.sock.id: move.ends for move in plan.moves}
    with fake_criu(sockets) as criu:
        one_patched_s = best(lambda: patch_sockets(criu.process, [Move(sockets[0], plan.moves[0].ends)]))
        patched_s = best(lambda: patch_sockets(criu.process, plan.moves))
    return Times(
        listed_s,
        by_ss_s,
        best(lambda: type(image)(data)),
        best(lambda: make_plan(sockets, policy, addresses, own={old}, gang=gang)),
        best(lambda: image.moved(ends)),
        patched_s,
        one_patched_s,
    )


class Pause(NamedTuple):
    """What the peer of a container sees of one dump that leaves it running, and of a dump and a restore."""

    left_running_s: float  # for how long it heard nothing
    frozen_s: float  # what CRIU says of the same dump
    behind_dump_s: float | None  # from when traffic could pass until it heard something; None: nobody noted when
    behind_restore_s: float  # the same; of CRIU alone from its post-restore, right behind which it unlocks


def pauses(root: Path, rounds: int) -> dict[str, list[Pause]]:
    """Return the pauses of rounds in which podman with ocihook and podman alone take turns."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    nodes: dict[str, NetPodman] = {}
    found: dict[str, list[Pause]] = {"ocihook": [], "alone": []}
    try:
        peer = build_peer(scratch / "peer")
        wheels = scratch / "wheels/site"
        wheels.parent.mkdir()
        build_wheels(wheels, os.readlink(root / "usr/bin/python3").removeprefix("python"))
        for name in found:
            (scratch / name).mkdir()
            nodes[name] = node = NetPodman(scratch / name, root, wheels, peer)
            if name == "ocihook":
                node.install()
            else:
                node.namespace.path("/etc/criu").mkdir(exist_ok=True)
                node.namespace.path("/etc/criu/runc.conf").write_text("tcp-established\nskip-in-flight\n")
            node.make_place("server", _SERVER)
            node.make_place("client", _CLIENT)
            words = ("server", "-r", "16", f"{_SERVER.four}/7000")
            node.start_peer("server", "server", *words, tcp="established")
        for number in range(rounds + 1):
            for name, node in nodes.items():
                pause = _pause(node, has_ocihook=name == "ocihook")
                if number:  # the first is not counted
                    found[name].append(pause)
        return found
    finally:
        for node in nodes.values():
            node.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _pause(node: NetPodman, *, has_ocihook: bool) -> Pause:
    log, archive = node.spawn_peer("client", "client", f"{_SERVER.four}/7000"), node.scratch / "server.tar"
    _wait_for_more(log)
    heard = len(log.read_text())
    said = node.checkpoint("server", archive, "--leave-running", "--print-stats")
    _wait_for_more(log)
    left_running_s, until = _longest(log.read_text()[heard:])
    frozen_s = json.loads(said)["container_statistics"][0]["criu_statistics"]["frozen_time"] / 1e6
    behind_dump_s = until - _released(node, "pre-dump") if has_ocihook else None

    mac = json.loads(node.inside("server", "ip", "-json", "link", "show", "eth0"))[0]["address"]
    heard = len(log.read_text())
    node.checkpoint("server", archive)
    node.remove("server")
    node.remove_place("server")
    node.make_place("server", _SERVER, mac=mac, is_held=True)
    unlocked = node.scratch / "unlocked"
    stage = "pre-restore" if has_ocihook else "post-restore"
    node.act_at(stage, f"{node.lets_in('server')}; date +%s.%N > {unlocked}")
    node.restore(archive)
    _wait_for_more(log)
    _, until = _longest(log.read_text()[heard:])
    released = _released(node, "pre-restore") if has_ocihook else float(unlocked.read_text())
    node.act_no_more()
    return Pause(left_running_s, frozen_s, behind_dump_s, until - released)


class Stall(NamedTuple):
    """How long a container waits for its answer from when traffic passes, in seconds, after a hold that was long."""

    behind_dump_s: float
    behind_restore_s: float  # from its post-restore, right behind which CRIU unlocks


HELD_S = 3.0  # by a member of a gang that is slow, say: timers have doubled a few times by then


def stalls(root: Path, rounds: int) -> dict[str, list[Stall]]:
    """Return the stalls of rounds in which ocihook wakes senders, and does not, in turns."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    nodes: dict[str, NetPodman] = {}
    found: dict[str, list[Stall]] = {"woken": [], "not woken": []}
    try:
        peer = build_peer(scratch / "peer")
        wheels = scratch / "wheels/site"
        wheels.parent.mkdir()
        build_wheels(wheels, os.readlink(root / "usr/bin/python3").removeprefix("python"))
        for name in found:
            directory = scratch / name.replace(" ", "-")
            directory.mkdir()
            nodes[name] = node = NetPodman(directory, root, wheels, peer)
            node.install()
            if name == "not woken":
                with node.namespace.path("/opt/ocihook/ocihook/net/kick.py").open("a") as source:
                    source.write("\n\ndef wake(*_): pass\n")
            node.make_place("asker", _SERVER)
            node.make_place("stranger", _CLIENT)
            node.spawn_peer("stranger", "stranger", _CLIENT.four)
            node.start_peer("asker", "asker", "asks", f"{_CLIENT.four}/9000", tcp="established")
        for _ in range(rounds):
            for name, node in nodes.items():
                found[name].append(_stall(node))
        return found
    finally:
        for node in nodes.values():
            node.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _stall(node: NetPodman) -> Stall:
    archive, unlocked = node.scratch / "asker.tar", node.scratch / "unlocked"
    node.act(post_dump=f"sleep {HELD_S}")
    began = time.time()
    node.checkpoint("asker", archive, "--leave-running")
    behind_dump_s = _answered(node, began) - _released(node, "pre-dump")

    mac = json.loads(node.inside("asker", "ip", "-json", "link", "show", "eth0"))[0]["address"]
    node.act_no_more()
    node.checkpoint("asker", archive)
    node.remove("asker")
    node.remove_place("asker")
    node.make_place("asker", _SERVER, mac=mac, is_held=True)
    node.act(pre_restore=node.lets_in("asker"), post_restore=f"sleep {HELD_S}; date +%s.%N > {unlocked}")
    began = time.time()
    node.restore(archive)
    behind_restore_s = _answered(node, began) - float(unlocked.read_text())
    node.act_no_more()
    return Stall(behind_dump_s, behind_restore_s)


def _answered(node: NetPodman, since: float) -> float:
    """Return when the longest wait since then was over; both in seconds since 1970."""

    def waits() -> list[tuple[float, float]]:
        found = [(float(wait), float(until)) for wait, until in _SILENT.findall(node.said("asker"))]
        return [one for one in found if one[1] > since and one[0] > HELD_S / 2 * 1e3]

    wait_for("an answer", lambda: bool(waits()))
    return max(waits())[1]


def _longest(said: str) -> tuple[float, float]:
    """Return how long the longest silence was, and when it ended, in seconds and seconds since 1970."""
    waits = [(int(wait) / 1e3, float(until)) for wait, until in _SILENT.findall(said)]
    if not waits or "broken" in said:
        raise SystemExit(f"bench: the peer has seen no pause, or its connection has ended:\n{said[-500:]}")
    return max(waits)


def _wait_for_more(log: Path) -> None:
    """Wait until bytes go both ways from now on."""
    before = _last(log)
    wait_for("traffic", lambda: all(now > then + 50_000 for now, then in zip(_last(log), before, strict=True)))


def _last(log: Path) -> tuple[int, int]:
    sent, received = (_PROGRESS.findall(log.read_text()) or [("0", "0")])[-1]
    return int(sent), int(received)


def _released(node: NetPodman, stage: str) -> float:
    """Return when the last session let traffic pass, in seconds since 1970."""
    (held,) = (p for p in last_session(node.namespace, stage)["phases"] if p["name"] == "network held")
    return float(held["began"] + held["seconds"])


def median(values: Iterable[float | None]) -> float:
    """Return the median of those that are known."""
    return statistics.median(value for value in values if value is not None)


if __name__ == "__main__":
    print(many_sockets())
    for measure in (pauses, stalls):
        for contender, seen in measure(Path(sys.argv[1]), 3).items():
            print(contender, *seen, sep="\n  ")
