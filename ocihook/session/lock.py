"""The lock that decides who is responsible for a node's sessions: one agent with all its processes, or one recovery."""

import fcntl
import os
from pathlib import Path

from ocihook import wire


def lock_agent(runtime_dir: Path) -> int | None:
    """Take the lock; None while an agent, or any process of one, is alive. Forked processes share it."""
    runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(runtime_dir / wire.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def is_locked_by(runtime_dir: Path, lock: int) -> bool:
    """Return whether a descriptor is of the lock that others try: its file may be removed, or covered by a mount."""
    try:
        return os.path.samestat(os.stat(runtime_dir / wire.LOCK_NAME), os.fstat(lock))
    except OSError:
        return False
