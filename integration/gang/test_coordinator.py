"""A coordinator that is killed in the middle of an attempt: all its members complete it, or none."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from integration.gang.mesh import Mesh, failures, succeeded
from integration.gang.nodes import attempt, epochs, link_nodes, open_journals, serve_nodes
from integration.gang.test_faults import MEETING_AGENT
from integration.journals import sessions
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.podman.test_faults import start_agent

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_DUMP = ["arrived", "drained", "held", "dumped"] if IS_NIGHTLY else ["held"]
_RESTORE = ["addresses", "restored", "released"] if IS_NIGHTLY else ["restored"]


class Job:
    """Two members on a node each, whose coordinator is a service on the first."""

    def __init__(self, make_node: MakeNode) -> None:
        """Start all."""
        self.nodes = [make_node(), make_node("crun")]
        self._coordinator = serve_nodes(self.nodes, link_nodes(self.nodes)[0])
        self.mesh = Mesh(self.nodes, 2)

    def outlives_coordinator(
        self, what: str, phase: str, act: Callable[[], dict[str, str | Exception]]
    ) -> dict[str, str | Exception]:
        """Do something in which the coordinator is killed, and started again, at a phase.

        Args:
            what: the last member does there, as meeting_agent.py has it: "hold", the other waits for it; or "deafen",
                it has arrived, too, and does not hear that all have.
            phase: of the dump or restore.
            act: what is done; its result is returned.
        """
        first, last = self.mesh.names
        here, there = self.nodes
        go = there.namespace.path("/run/ocihook/go")
        go.unlink(missing_ok=True)
        start_agent(there, MEETING_AGENT, what, phase, last)
        with ThreadPoolExecutor() as pool:
            results = pool.submit(act)
            try:
                wait_for(f"{first} to be at {phase}", lambda: attempt(here)["members"].get(first) == phase)
                if what == "deafen":
                    wait_for(f"{first} to have heard", lambda: not open_journals(here))
                assert attempt(here)["state"] == ("decided" if what == "deafen" else "open")
                self._coordinator.restart()
            finally:
                go.touch()
            return results.result()

    def assert_over(self, results: dict[str, str | Exception]) -> None:
        """Check that all have failed, since the coordinator does not know their attempt, and that nothing is left."""
        assert failures(results).keys() == results.keys(), results
        for node in self.nodes:
            said = json.dumps(sessions(node.namespace)[-1]["stages"])  # of a restore the engine does not say it
            assert "(its coordinator was restarted)" in said
        self.mesh.assert_nothing_is_left()

    def assert_runs(self) -> None:
        """Check that all are at work, and that nothing is left."""
        self.mesh.assert_flows()
        self.mesh.assert_nothing_is_left()


def test_the_coordinator_is_killed_in_a_dump(make_node: MakeNode) -> None:
    job = Job(make_node)
    mesh, before = job.mesh, job.mesh.state()
    for phase in _DUMP:
        job.assert_over(job.outlives_coordinator("hold", phase, lambda: mesh.checkpoint("--leave-running")))
        job.assert_runs()
        assert mesh.state() == before
    assert epochs(job.nodes[0]) == ([], {})
    decided = len(_DUMP) + 1
    succeeded(job.outlives_coordinator("deafen", "dumped", lambda: mesh.checkpoint("--leave-running")))
    assert epochs(job.nodes[0]) == ([decided], {})
    job.assert_runs()
    assert mesh.state() == before
    assert "1 connections" in mesh.verify()
    succeeded(mesh.checkpoint())
    assert epochs(job.nodes[0]) == ([decided, decided + 1], {})
    mesh.move(1)
    succeeded(mesh.restore())
    job.assert_runs()


def test_the_coordinator_is_killed_in_a_restore(make_node: MakeNode) -> None:
    job = Job(make_node)
    mesh = job.mesh
    succeeded(mesh.checkpoint())
    mesh.move(1)
    for phase in _RESTORE:
        job.assert_over(job.outlives_coordinator("hold", phase, mesh.restore))
        assert not any(node.is_running(name) for name, node in mesh.engines.items())
        mesh.remove()
    succeeded(job.outlives_coordinator("deafen", "released", mesh.restore))
    job.assert_runs()
