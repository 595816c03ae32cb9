"""Nodes of one job: how long their members wait for one another, where their coordinator is, links between nodes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.containerd.engine import Containerd
from integration.journals import sessions
from integration.namespace import wait_for
from integration.net.engine import BRIDGE, NetPodman
from tests.fakes.authority import Authority

Node = NetPodman | Containerd
LIMIT_S = 120.0  # of a meeting; a loaded machine takes its time
_PORT = 7443


def limit_members(node: NetPodman, timeout_s: float = LIMIT_S, *, coordinator: str = "", tls: Path = Path()) -> None:
    """Say how long members of a node wait for one another, and which coordinator they have if it is not the agent."""
    text = f'coordinator = "{coordinator}"\ntls_dir = "{tls}"\n' if coordinator else ""
    node.configure(
        f"[agent]\nidle_timeout_s = 2\n{text}[policy]\ngang_timeout_s = {timeout_s}\ngang_gather_s = {timeout_s}\n"
    )


def link_nodes(nodes: Sequence[NetPodman]) -> list[str]:
    """Link nodes and the networks of their containers; return the nodes' addresses."""
    first, *others = nodes
    first.run("ip", "addr", "add", "10.78.0.1/32", "dev", "lo")
    for number, node in enumerate(others, 2):
        bridge = f"/proc/{first.namespace.pid}/root/run/netns/{BRIDGE}"
        trunk, there = f"trunk{number}", f"node{number}"
        node.run("ip", "-n", BRIDGE, "link", "add", trunk, "type", "veth", "peer", "name", trunk, "netns", bridge)
        node.run("ip", "link", "add", "node1", "type", "veth", "peer", "name", there, "netns", str(first.namespace.pid))
        for end in (first, node):
            end.run("ip", "-n", BRIDGE, "link", "set", trunk, "master", "br0", "up")
        for end, name, here, peer in ((first, there, 1, number), (node, "node1", number, 1)):
            end.run("ip", "addr", "add", f"10.78.0.{here}", "peer", f"10.78.0.{peer}", "dev", name)
            end.run("ip", "link", "set", name, "up")
    return [f"10.78.0.{number}" for number in range(1, len(nodes) + 1)]


def _url(host: str) -> str:
    return f"https://{host}:{_PORT}"


class Coordinator:
    """A coordinator that is a service of its own."""

    def __init__(self, node: NetPodman, host: str) -> None:
        """Start it on a node, at an address of it."""
        self.url = _url(host)
        self._node, self._command = node, ("python3", "-m", "ocihook", "coordinator", "--listen", f"{host}:{_PORT}")
        self._start()

    def _start(self) -> None:
        log = self._node.scratch / "coordinator.log"
        log.unlink(missing_ok=True)
        self._process = self._node.namespace.spawn(*self._command, log=log, PYTHONPATH="/opt/ocihook")
        wait_for("the coordinator to listen", lambda: "listening" in log.read_text())

    def restart(self) -> None:
        """Kill it, and start it again."""
        self._process.kill()
        self._process.wait()  # until then its port may not be free
        self._start()


def serve_nodes(nodes: Sequence[NetPodman], host: str = "127.0.0.1", timeout_s: float = LIMIT_S) -> Coordinator:
    """Start a coordinator on the first node for all, and name it in their configuration."""
    authority, url = Authority(host), _url(host)
    for number, node in enumerate(nodes):
        limit_members(node, timeout_s, coordinator=url, tls=authority.give(node.scratch / "tls", f"node{number}"))
    return Coordinator(nodes[0], host)


def epochs(node: Node, gang: str = "job") -> tuple[list[int], dict[str, list[str]]]:
    """Return which epochs of a gang are complete, and which members the others lack."""
    gangs = json.loads(node.ocihook("gang", "status", "--json"))["gangs"]
    found = next(one for one in gangs if one["gang"] == gang)
    return found["epochs"], found["incomplete"]


def attempt(node: Node, gang: str = "job") -> dict[str, Any]:
    """Return what is known of the last attempt of a gang."""
    gangs = json.loads(node.ocihook("gang", "status", "--json"))["gangs"]
    found: dict[str, Any] = next((one for one in gangs if one["gang"] == gang), {})
    last: dict[str, Any] = found.get("attempt", {"state": "none", "members": {}})
    return last


def open_journals(node: NetPodman) -> list[Path]:
    """Return the journals of sessions that have not ended."""
    return list(node.namespace.path("/run/ocihook/sessions").glob("*.json"))


def assert_ended(node: NetPodman) -> None:
    """Check that all sessions of a node have ended, and left nothing."""
    try:
        ended = sessions(node.namespace)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{node.agent_log()}") from error
    assert all(session["effects"] == [] for session in ended)
    assert "/run/ocihook/sessions" not in node.run("cat", "/proc/self/mountinfo")
    assert "criu" not in node.namespace.programs()
