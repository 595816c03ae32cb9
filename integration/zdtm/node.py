"""A node on which runc runs tests of CRIU's suite: each is dumped and restored, then asked whether all is as it was."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from integration.journals import sessions
from integration.namespace import CommandError, Namespace, wait_for
from integration.packages.engine import PIVOTED
from integration.zdtm.bundle import STATUS, make_bundle
from integration.zdtm.case import RUNC_FLAGS, Case

_CONFIGURATION = "/etc/criu/runc.conf"
_WAIT_S = 30.0
_SHOWN = 700  # characters of a log
# The network lives on while a container is restored, and so does duplicate address detection in it: a test that
# compares its addresses would see that end, or not, by how long the dump takes.
_MAKE_NETWORK = """
mkdir -p "${1%/*}"
touch "$1"
exec unshare --net="$1" sh -c 'for which in all default; do echo 0 > /proc/sys/net/ipv6/conf/$which/accept_dad; done'
"""


class Failed(Exception):
    """A step of a test went wrong."""


class Outcome(NamedTuple):
    """What became of a test."""

    failed: str = ""  # the step that went wrong, and why; empty if it passed
    notes: tuple[tuple[str, str], ...] = ()  # what is not as it was: a kind, and what of it

    def is_as_good_as(self, other: "Outcome") -> bool:
        """Return whether it passed, and nothing is different that was not with the other one."""
        return not self.failed and {kind for kind, _ in self.notes} <= {kind for kind, _ in other.notes}


class State(NamedTuple):
    """What can be seen of a process."""

    files: set[str]
    mappings: set[str]
    mounts: set[str]


class Node:
    """A node with CRIU alone, or with ocihook."""

    def __init__(
        self, scratch: Path, root: Path, template: Path, *, wheels: Path | None = None, mode: str = ""
    ) -> None:
        """Make it.

        Args:
            scratch: for all of its files.
            root: a tree with runc and CRIU.
            template: the root of containers.
            wheels: ocihook; without it CRIU is alone.
            mode: of ocihook.
        """
        scratch.mkdir()
        self.mode = mode
        self._scratch, self._template, self._has_ocihook, self._count = scratch, template, wheels is not None, 0
        self._namespace = Namespace(PIVOTED, [str(scratch), str(root)])
        self._write(_CONFIGURATION, "manage-cgroups=ignore\n")
        if wheels is not None:
            subprocess.run(["cp", "-r", wheels, self._namespace.path("/opt/ocihook")], check=True, timeout=120)
            settings = f'[policy]\nmode = "{mode}"\n[agent]\nstore_dir = "{scratch}/store"\nhistory_kept = 1000\n'
            self._write("/etc/ocihook/config.toml", settings)
            self._namespace.run("python3", "-m", "ocihook", "install", PYTHONPATH="/opt/ocihook")
        self._configuration = self._namespace.path(_CONFIGURATION).read_text()

    def _write(self, path: str, text: str) -> None:
        place = self._namespace.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def close(self) -> None:
        """Remove the node, which has nothing left to undo."""
        if self._has_ocihook:
            assert all(session["effects"] == [] for session in sessions(self._namespace))
        self._namespace.close()

    def run(self, case: Case, *, leaves: bool = False) -> Outcome:
        """Run a test; if `leaves` it is also dumped and left running before."""
        self._count += 1
        run = _Run(self, case, f"zdtm-{os.getpid()}-{self._count}")
        try:
            failed = ""
            run.go(leaves=leaves)
        except (Failed, CommandError, AssertionError, subprocess.TimeoutExpired) as error:
            failed = f"{error}\n{self._agent_log()}"
        finally:
            run.close()
        return Outcome(failed, tuple(run.notes))

    def _agent_log(self) -> str:
        log = self._namespace.path("/run/ocihook/agent.log")
        return log.read_text()[-_SHOWN:] if log.exists() else ""


class _Run:
    """One test in one container."""

    def __init__(self, node: Node, case: Case, name: str) -> None:
        self._node, self._case, self._name = node, case, name
        self._place, self._images = node._scratch / name, node._scratch / f"{name}.images"
        self._network = f"/run/zdtm/{name}"
        self.notes: list[tuple[str, str]] = []

    def go(self, *, leaves: bool) -> None:
        self._node._namespace.run("sh", "-c", _MAKE_NETWORK, "sh", self._network)
        directory = make_bundle(self._place, self._node._template, self._case, self._network)
        self._images.mkdir()
        self._result = directory / f"{self._case.name}.out"
        test = self._start(directory)
        before = self._state()
        if self._case.is_refused:
            self._expect_refusal(test)
        else:
            if leaves:
                self._checkpoint(0, "--leave-running")
                self._compare("left running", test, before)
            self._checkpoint(1)
            wait_for("the container to end", lambda: not self._pids(), _WAIT_S)
            self._runc("delete", "--force", self._name)
            self._restore()
            self._compare("restored", test, before)
            self._end(test)

    def close(self) -> None:
        with contextlib.suppress(CommandError, Failed, subprocess.TimeoutExpired):
            self._runc("delete", "--force", self._name)
        self._node._namespace.run("umount", self._network, check=False)
        for directory in (self._place, self._images):
            shutil.rmtree(directory, ignore_errors=True)

    def _runc(self, *words: object) -> str:
        return self._node._namespace.run("runc", "--root", "/run/runc", *map(str, words))

    def _start(self, directory: Path) -> int:
        """Start the test; return its pid inside."""
        self._runc("run", "--detach", "--bundle", self._place, self._name)
        status, pid_file = directory / STATUS, directory / f"{self._case.name}.pid"
        wait_for("the test to start", lambda: status.exists() and status.read_text().endswith("\n"), _WAIT_S)
        if status.read_text() != "0\n" or not pid_file.exists():
            raise Failed(f"start: {_tail(Path(f'{self._result}.inprogress'))}")
        return int(pid_file.read_text())

    def _checkpoint(self, number: int, *options: str) -> None:
        self._configure("checkpoint")
        images, work = self._images / str(number), self._images / f"work{number}"
        try:
            flags = [option for option in self._case.options("checkpoint") if option in RUNC_FLAGS]
            where = ("--image-path", images, "--work-path", work)
            said = self._runc("checkpoint", *flags, *options, *where, self._name)
        except CommandError as error:
            raise Failed(f"dump: {_errors(work / 'dump.log') or error}") from error
        self._note("dump said", said.strip())
        if self._node._has_ocihook:
            names = {path.name for path in images.iterdir()}
            plain = [path.name for path in images.glob("pages-*.img") if path.stat().st_size]
            is_packed = not plain and names & {"ocihook.manifest", "ocihook.thin"}
            self._note("not packed", "" if is_packed else f"{plain}")

    def _restore(self) -> None:
        self._configure("restore")
        work = self._images / "restored"
        try:
            flags = [option for option in self._case.options("restore") if option in RUNC_FLAGS]
            where = ("--image-path", self._images / "1", "--work-path", work, "--bundle", self._place)
            said = self._runc("restore", "--detach", *flags, *where, self._name)
        except CommandError as error:
            raise Failed(f"restore: {_errors(work / 'restore.log') or error}") from error
        self._note("restore said", said.strip())

    def _configure(self, verb: str) -> None:
        lines = [option.removeprefix("--") for option in self._case.options(verb) if option not in RUNC_FLAGS]
        self._node._write(_CONFIGURATION, "\n".join([self._node._configuration, *lines, ""]))

    def _expect_refusal(self, test: int) -> None:
        before = self._state()
        try:
            self._checkpoint(1)
        except Failed:
            self._compare("refused", test, before)
            return
        raise Failed("dump: it was to be refused")

    def _end(self, test: int) -> None:
        os.kill(self._host_pid(test), signal.SIGTERM)
        wait_for("the test's result", lambda: self._result.exists() or not self._host_pid(test), self._case.timeout_s)
        wait_for("the test to end", lambda: not self._host_pid(test), self._case.timeout_s)
        said = _tail(self._result if self._result.exists() else Path(f"{self._result}.inprogress"))
        if "PASS" not in said.rpartition("\n")[2].split():
            raise Failed(f"result: {said}")

    def _pids(self) -> list[int]:
        with contextlib.suppress(OSError):
            procs = self._node._namespace.path(f"/sys/fs/cgroup/{self._name}/cgroup.procs")
            return [int(pid) for pid in procs.read_text().split()]
        return []

    def _inside(self) -> Iterator[tuple[int, int]]:
        """Yield pid inside and outside of each process that lives."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                number = re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)
                if number and not re.search(r"^State:\s+Z", status, re.MULTILINE):
                    yield int(number[1]), pid

    def _host_pid(self, test: int) -> int:
        return dict(self._inside()).get(test, 0)

    def _state(self) -> dict[int, State]:
        state = {}
        for number, pid in self._inside():
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                mounts = _mounts((process / "mountinfo").read_text())
                state[number] = State(
                    set(os.listdir(process / "fd")), _mappings((process / "maps").read_text()), mounts
                )
        return state

    def _compare(self, when: str, test: int, before: dict[int, State]) -> None:
        if not self._host_pid(test):
            raise Failed(f"{when}: the test is not among the processes")
        after = self._state()
        missing = before.keys() ^ after.keys()
        self._note(f"{when}: processes", f"{sorted(before)} became {sorted(after)}" if missing else "")
        for number in before.keys() & after.keys():
            for kind, old, new in zip(State._fields, before[number], after[number], strict=True):
                if old != new and not (kind == "mappings" and self._case.name.startswith("pthread_timers")):
                    self._note(f"{when}: {kind}", f"of {number} lost {sorted(old - new)}, new {sorted(new - old)}")

    def _note(self, kind: str, what: str) -> None:
        if what:
            self.notes.append((kind, what[-_SHOWN:]))


def _mappings(text: str) -> set[str]:
    """Return mappings; those that are next to one another and alike count as one, as CRIU may restore them."""
    merged: list[list[str]] = []
    for line in text.splitlines():
        span, rights, _, _, _, *names = line.split(None, 5)
        begin, end = span.split("-")
        name = names[0].replace("/memfd:/", "/") if names else ""  # as CRIU restores shared memory
        alike = [rights, name if name.startswith(("/", "[v")) else ""]
        if merged and merged[-1][1:] == [begin, *alike]:
            merged[-1][1] = end
        else:
            merged.append([begin, end, *alike])
    return {" ".join(words) for words in merged}


def _mounts(text: str) -> set[str]:
    lines = [line.partition(" - ") for line in text.splitlines()]
    return {" ".join([*_placed(left.split()[4:]), right.split()[0]]) for left, _, right in lines}


def _placed(words: Sequence[str]) -> list[str]:
    """Return where something is mounted, how, and how it propagates, without the numbers of groups."""
    return [words[0], words[1], *(word.split(":")[0] for word in words[2:])]


def _tail(file: Path) -> str:
    return file.read_text(errors="replace").strip()[-_SHOWN:] if file.exists() else ""


def _errors(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line for line in lines if "Error (" in line or line.startswith("ocihook: "))[-_SHOWN:]
