"""A private mount namespace in which a test may change /etc, /run and the cgroup mount of this machine."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ocihook.linux.procfs import parent_pid
from ocihook.session import history

TIMEOUT_S = 120.0
_HISTORY = "/var/lib/ocihook/history"
_UNEXPLAINED = ("criu-unknown", "unknown")  # as session/failure.py records it
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CommandError(AssertionError):
    """A command that a test ran failed."""


class Namespace:
    """A holder process with mounts of its own. It, and all that is started with `spawn`, dies with the test run."""

    def __init__(self, setup: str, arguments: Sequence[str] = (), *, own_network: bool = False) -> None:
        script = f"set -e\n{setup}\necho ready\nexec sleep infinity"
        self._kinds = ("--mount", "--net") if own_network else ("--mount",)
        command = ["unshare", *self._kinds, "--propagation", "private", "sh", "-c", script, "setup", *arguments]
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise CommandError(f"namespace set-up failed: {self._holder.stderr.read()}")
        self._spawned: list[subprocess.Popen[bytes]] = []

    @property
    def kinds(self) -> tuple[str, ...]:
        """What kinds of namespaces it has of its own, as nsenter's options."""
        return self._kinds

    @property
    def pid(self) -> int:
        """A process that is inside."""
        return self._holder.pid

    def path(self, path: str) -> Path:
        """Return a path of the namespace as this process can open it."""
        return Path(f"/proc/{self.pid}/root") / path.lstrip("/")

    def programs(self) -> set[str]:
        """Return the names of the programs that run inside."""
        names = set()
        for pid in self.pids(""):
            with contextlib.suppress(OSError):
                names.add(Path(f"/proc/{pid}/comm").read_text().strip())
        return names

    def pids(self, words: str) -> list[int]:
        """Return the processes that run inside and have these words in their command line."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_inside = os.readlink(process / "ns/mnt") == os.readlink(f"/proc/{self.pid}/ns/mnt")
                if is_inside and words in (process / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(int(process.name))
        return found

    def pid_of(self, words: str) -> int:
        """Return the process that runs inside, has these words in its command line, and has no parent that does.

        Pids do not tell who was first: they begin anew.
        """
        found = self.pids(words)
        return next(pid for pid in found if parent_pid(pid) not in found)

    def _enter(self, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        inherited = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}  # another work tree
        named = {"PATH": PATH, "HOME": "/root", **inherited, **environment}
        variables = [f"{key}={value}" for key, value in named.items()]
        enter = ["nsenter", "-t", str(self.pid), *self.kinds, "--root", "--wd=/", "env", "-i", "--chdir=/"]
        return [*enter, *variables, *command]

    def run(self, *command: str, check: bool = True, timeout_s: float = TIMEOUT_S, **environment: str) -> str:
        """Run a command inside; return what it printed (stdout and stderr).

        Raises:
            CommandError: if it fails and `check` is set.
        """
        done = subprocess.run(
            self._enter(command, environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise CommandError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def spawn(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command inside that runs until the namespace is closed."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._enter(command, environment)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._spawned.append(process)
        return process

    def close(self) -> None:
        """End everything that was started here.

        Raises:
            AssertionError: if CRIU failed here for a cause that the catalogue lacks.
        """
        unexplained = self._unexplained()
        self._end()
        if unexplained:
            raise AssertionError(f"criu/causes.toml has no entry for: {unexplained}")

    def _unexplained(self) -> list[str]:
        """Return the failures of CRIU without a known cause, of an ocihook whose history is this namespace's own."""
        place = self.path(_HISTORY)
        with contextlib.suppress(OSError):  # it has none, or has ended
            is_own = not Path(_HISTORY).exists() or not place.samefile(_HISTORY)
            records = history.read(place) if is_own else []
            return [text for code, text in map(history.error_of, records) if code in _UNEXPLAINED]
        return []

    def _end(self) -> None:
        processes: list[subprocess.Popen[bytes] | subprocess.Popen[str]] = [*self._spawned, self._holder]
        for process in processes:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(TIMEOUT_S)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_for(what: str, is_true: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what} in vain")
        time.sleep(0.05)


def is_required() -> bool:
    """Return whether a missing tool is a failure (in CI) and not a reason to skip."""
    return bool(os.environ.get("OCIHOOK_REQUIRE_INTEGRATION"))
