"""Waits until nothing on the node needs ocihook any more: CRIU has read its configuration long before it calls us.

So after ocihook was removed from the configuration the launcher must stay for a while.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path

from ocihook import wire
from ocihook.criu.version import find_program
from ocihook.errors import AgentError
from ocihook.linux.procfs import Process, command_line
from ocihook.session.journal import open_journals
from ocihook.session.lock import lock_agent

_POLL_S = 0.05
# What runtimes and people start, under the title that CRIU gives itself, too; `criu service` and its like stay.
_CRIU_AT_WORK = re.compile(r"(?:\S*/)?criu:? +(?:-\S* +)*(?:swrk|pre-dump|dump|restore)\b")


def wait_until_unused(
    runtime_dir: Path = Path(wire.RUNTIME_DIR), *, launchers: Collection[Path] = (), timeout_s: float
) -> None:
    """Wait until no CRIU that may call a launcher runs and no session is open, then end the agent.

    Args:
        runtime_dir: of the agent.
        launchers: what CRIU's configuration named, as absolute paths.
        timeout_s: how long to wait.

    Raises:
        AgentError: if that takes too long; running dumps and restores are left alone.
    """
    deadline = time.monotonic() + timeout_s
    while users := _users(runtime_dir, launchers):
        if time.monotonic() > deadline:
            raise AgentError(
                f"in use after {timeout_s:g} s: {', '.join(users)}. New dumps and restores do not call ocihook now",
                hint="see `ocihook ps`; uninstall again when they have ended",
            )
        time.sleep(_POLL_S)  # waits: a command, which ends with its user
    while not _end_agent(runtime_dir):
        if time.monotonic() > deadline:
            raise AgentError(f"the agent of {runtime_dir} does not end", hint="kill it, then uninstall again")
        time.sleep(_POLL_S)  # waits: a command, which ends with its user


def _users(runtime_dir: Path, launchers: Collection[Path]) -> list[str]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [
        *(f"CRIU (pid {pid})" for pid in pids if _is_criu_at_work(pid) and _sees(pid, launchers)),
        *(f"session {path.stem}" for path in open_journals(runtime_dir)),
    ]


def _is_criu_at_work(pid: int) -> bool:
    return _CRIU_AT_WORK.match(" ".join(command_line(pid))) is not None and _runs_criu(pid)


def _runs_criu(pid: int) -> bool:
    """Return whether a process runs CRIU's program: any process may have its title."""
    try:
        running = os.stat(f"/proc/{pid}/exe")
        if (criu := find_program("criu")) and os.path.samestat(running, os.stat(criu.path)):
            return True
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)") == "criu"
    except OSError:  # it has ended
        return False


def _sees(pid: int, launchers: Collection[Path]) -> bool:
    """Return whether a process may call a launcher: one in a container, or of another node in a namespace, does not."""
    for launcher in launchers:
        with contextlib.suppress(OSError):  # it has ended, or has no such file
            if os.path.samestat(os.stat(f"/proc/{pid}/root{launcher}"), os.stat(launcher)):
                return True
    return False


def _end_agent(runtime_dir: Path) -> bool:
    """Ask the agent to leave, which it does once its sessions have ended; True when there is none."""
    if not runtime_dir.exists():
        return True
    lock = lock_agent(runtime_dir)
    if lock is not None:
        os.close(lock)
        return True
    written = (runtime_dir / wire.LOCK_NAME).read_text().strip()
    agent = Process.find(int(written)) if written.isdigit() else None
    if agent and any("ocihook" in word for word in command_line(agent.pid)):
        agent.send(signal.SIGTERM)
    return False
