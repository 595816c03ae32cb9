"""A process of this machine that real CRIU dumps and restores, with a process outside that it can be connected to."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from integration.namespace import PATH, wait_for
from ocihook.linux.procfs import descendants

_PROGRAM = Path(__file__).parent / "hazard.py"
_TIMEOUT_S = 120.0
# Whose child it is, where it is to be in another's session: one of its PID namespace, or one outside.
_SESSION_LEADERS = {
    "session_outside": ["sh", "-c", '"$@" & wait', "sh"],
    "session_unseen": ["unshare", "--pid", "--fork", "--kill-child"],
}

# Mounts of its own, and standard files that are on them.
_OWN_MOUNTS = ["unshare", "--mount", "sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "sh"]


class Hazard:
    """A process with something special about it (integration/criu/hazard.py), and a directory of its own."""

    def __init__(self, name: str, directory: Path, port: int) -> None:
        self.directory = directory
        self.images = directory / "images"
        self.images.mkdir()
        leader = _SESSION_LEADERS.get(name, [])
        mounts = _OWN_MOUNTS if name.startswith("hidden_") else []
        self._process = subprocess.Popen(
            [*leader, *mounts, sys.executable, "-S", _PROGRAM, name, directory, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(f"{name} to be ready", lambda: self._process.poll() is not None or (directory / "ready").exists())
        if self._process.poll() is not None:
            raise OSError(f"{name} cannot be made on this machine")
        self.pid = descendants(self._process.pid)[1 if leader else 0]

    def dump(self, *options: str, environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
        """Dump it: whether that succeeded, and CRIU's log. It continues only with --leave-running."""
        succeeded, log = self._criu("dump", "--tree", str(self.pid), *options, environment=environment)
        if succeeded and "--leave-running" not in options:
            self._process.wait(60)
        return succeeded, log

    def restore(self, *options: str, environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
        """Restore it: whether that succeeded, and CRIU's log."""
        return self._criu("restore", "--restore-detached", *options, environment=environment)

    def _criu(self, verb: str, *options: str, environment: Mapping[str, str] | None) -> tuple[bool, str]:
        where = ["--images-dir", str(self.images), "--work-dir", str(self.directory), "--log-file", f"{verb}.log"]
        done = subprocess.run(
            ["/usr/sbin/criu", verb, *where, "-v4", *options],
            env={"PATH": PATH, **(environment or {})},
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return done.returncode == 0, (self.directory / f"{verb}.log").read_text(errors="replace")

    def close(self) -> None:
        """End it, and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


@contextmanager
def hazard(name: str) -> Iterator[Hazard]:
    """Start one; it is ended and its directory removed.

    Raises:
        OSError: if this machine cannot make it.
    """
    directory = Path(tempfile.mkdtemp(prefix="ocihook-test-", dir="/var/tmp"))
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as server:
        listener.bind(str(directory / "peer.sock"))
        listener.listen()
        process: Hazard | None = None
        if name == "inotify_overlay":
            _mount_overlay(directory)
        try:
            process = Hazard(name, directory, server.getsockname()[1])
            if name == "unix_external":
                listener.accept()[0].detach()
            yield process
        finally:
            if process is not None:
                process.close()
            if name == "inotify_overlay":
                subprocess.run(["umount", directory / "overlay"], check=True)
            Path(f"/dev/shm/sem.ocihook-{directory.name}").unlink(missing_ok=True)
            shutil.rmtree(directory)


def _mount_overlay(directory: Path) -> None:
    for part in ("lower", "upper", "work", "overlay"):
        (directory / part).mkdir()
    (directory / "lower/file").touch()
    options = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, directory / "overlay"], check=True)
