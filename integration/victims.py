"""Kills one of those who take part in a dump or restore, while a stage of it is held (holding_agent.py)."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from integration.namespace import wait_for
from integration.podman.engine import Podman
from integration.podman.test_faults import end_agent, start_agent
from ocihook.linux.procfs import Process, parent_pid

HOLDING_AGENT = Path(__file__).with_name("holding_agent.py")
RUN = "/run/ocihook"


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Do something beside; wait for its end."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def held_at(podman: Podman, stage: str, act: Callable[[], object], *how: str) -> Iterator[None]:
    """Do something that comes to a stage; it is held there until the block ends, and has ended after it.

    Args:
        podman: whose node it is.
        stage: where it is held.
        act: what is done.
        how: what else holding_agent.py is told.
    """
    end_agent(podman)
    held, go = (podman.namespace.path(f"{RUN}/{name}") for name in ("held", "go"))
    for mark in (held, go):
        mark.unlink(missing_ok=True)
    start_agent(podman, HOLDING_AGENT, stage, *how)
    with meanwhile(act):
        try:
            wait_for(f"{stage} to be held", held.exists)
            yield
        finally:
            go.touch()


def kill(podman: Podman, victim: str) -> None:
    """Kill CRIU, the agent, the runtime or the engine of the only dump or restore there is, and wait for its end."""
    (journal,) = podman.namespace.path(f"{RUN}/sessions").glob("*.json")
    criu = int(journal.name.split("-")[0])
    pid = {
        "agent": lambda: int(podman.namespace.path(f"{RUN}/agent.lock").read_text()),
        "criu": lambda: criu,
        "runtime": lambda: parent_pid(criu),
        "engine": lambda: _engine(podman),
    }[victim]()
    process = Process.find(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(f"{victim} to end", lambda: not process.is_alive())


def _engine(podman: Podman) -> int:
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in podman.namespace.pids(" container ")}
    (pid,) = (pid for pid, name in names.items() if name == "podman")
    return pid
