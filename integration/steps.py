"""Counts the steps of an agent that change something, in all its processes together, and lets one be the last.

A step is what the kernel, the driver or a disk will remember: a write to a journal, an effect being undone, a verb of
the driver (and its answer), a request of ptrace, memory written, a mount, a freezer, a name in a file system, a signal,
rules of a network, and what is done to sockets.
"""

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ocihook.stages.order  # noqa: F401 - whose participants know the effects
from ocihook.gpu.driver import CudaDriver
from ocihook.linux import memory, mounts, ptrace
from ocihook.linux.cgroup import Freezer
from ocihook.linux.procfs import Process
from ocihook.net import hold, nftables, repair, restore
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal

_PR_GET_PDEATHSIG = 2
_VERBS = ("lock", "checkpoint", "restore", "unlock")
_NAMES = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink", "mknod", "mkfifo", "truncate")
_RECORD_BYTES = 80

_libc = ctypes.CDLL(None, use_errno=True)


class Steps:
    """The steps of this process and of all that it forks from now on."""

    def __init__(self, log: Path, *, last: int = 0, everybody: bool = False) -> None:
        """Begin to count.

        Args:
            log: gets a line for each step.
            last: number of the step that is not made any more; 0: none.
            everybody: all processes of this one's group are killed at once then, as systemd does it, and not this one
                alone, which the others follow.
        """
        self._log = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._last, self._everybody = last, everybody
        self._agent = os.getpid()
        self._phase = mmap.mmap(-1, 64)
        _patch(self)

    def enter(self, phase: str) -> None:
        """Say what the steps from now on belong to."""
        self._phase[:] = phase.encode().ljust(64, b"\0")

    def __call__(self, what: str) -> None:
        """Note that a step is about to be made, or die before it."""
        phase = self._phase[:].rstrip(b"\0").decode()
        record = f"{phase}: {what}".encode()[: _RECORD_BYTES - 1].ljust(_RECORD_BYTES - 1) + b"\n"
        fcntl.lockf(self._log, fcntl.LOCK_EX)
        os.write(self._log, record)
        number = os.fstat(self._log).st_size // _RECORD_BYTES
        fcntl.lockf(self._log, fcntl.LOCK_UN)
        if number == self._last:
            self._die()

    def _die(self) -> None:
        if self._everybody:
            os.killpg(0, signal.SIGKILL)
        os.kill(self._agent, signal.SIGKILL)
        while _dies_with_parent():  # what must not be left half done is finished
            time.sleep(0.01)


def read_steps(log: Path) -> list[str]:
    """Return what the steps were."""
    return [line.rstrip() for line in log.read_text().splitlines()] if log.exists() else []


def representative(steps: Sequence[str], most: int) -> list[int]:
    """Return numbers of steps: the first of each kind, as far as there is room, and some of the rest.

    Those before the first write to a journal are none: an agent makes them before it serves anybody.
    """
    begin = next(number for number, step in enumerate(steps) if step.endswith("journal"))
    firsts = [number for number, step in enumerate(steps, 1) if number > begin and steps.index(step) == number - 1]
    rest = sorted(set(range(begin + 1, len(steps) + 1)) - set(firsts))
    chance = random.Random(None if os.environ.get("OCIHOOK_NIGHTLY") else 1)  # what CI runs is the same each time
    picked = chance.sample(firsts, min(len(firsts), most * 3 // 4))
    return sorted(picked + chance.sample(rest, min(len(rest), most - len(picked))))


def _dies_with_parent() -> bool:
    armed = ctypes.c_int()
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(armed), 0, 0, 0)
    return bool(armed.value)


def _patch(steps: Steps) -> None:
    _before(Journal, "save", steps, "journal")
    for kind, effect in Effect._kinds.items():
        _before(effect, "undo", steps, f"undo {kind}")
    for verb in _VERBS:
        _around(CudaDriver, verb, steps)
    _before(ptrace, "_ptrace", steps, lambda request, *_: f"ptrace {request:#x}")
    for module in (memory, ptrace):
        _before(module, "write_memory", steps, "write memory")
    _before(memory.ProcessMemory, "fault_in", steps, "fault in")
    mounts._libc = _Mounts(mounts._libc, steps)  # type: ignore[assignment]
    _before(Freezer, "_write", steps, lambda _, value: f"freezer {value}")
    _before(Freezer, "enclose", steps, "enclose")
    _before(Freezer, "dissolve", steps, "dissolve")
    _before(Process, "send", steps, lambda _, number: f"send {number}")
    _before(nftables, "run", steps, lambda _, commands: "" if commands.startswith("list") else "rules")
    _before(repair, "end_repair", steps, "end repair")
    for name in ("patch_sockets", "put_back", "destroy"):
        _before(restore, name, steps, name.replace("_", " "))
    for module in (hold, restore):
        _before(module, "wake", steps, "wake")
    for name in _NAMES:
        _before(os, name, steps, name)
    _before(Path, "touch", steps, "touch")
    _name_phases(steps)


def _before(owner: Any, name: str, steps: Steps, what: str | Callable[..., str]) -> None:  # noqa: ANN401
    """Make a function of a class or module take a step first; `what` returns "" of a call that changes nothing."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def stepping(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        if done := what if isinstance(what, str) else what(*arguments):
            steps(done)
        return function(*arguments, **named)

    setattr(owner, name, stepping)


def _around(owner: Any, name: str, steps: Steps) -> None:  # noqa: ANN401
    function = getattr(owner, name)

    @functools.wraps(function)
    def stepping(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        steps(f"driver {name}")
        try:
            return function(*arguments, **named)
        finally:
            steps(f"driver {name} answered")

    setattr(owner, name, stepping)


class _Mounts:
    """The calls of libc that mount."""

    def __init__(self, libc: Any, steps: Steps) -> None:  # noqa: ANN401
        self._libc, self._steps = libc, steps

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        function = getattr(self._libc, name)
        if name not in ("mount", "umount2"):
            return function

        def stepping(*arguments: Any) -> Any:  # noqa: ANN401
            self._steps(name)
            return function(*arguments)

        return stepping


def _name_phases(steps: Steps) -> None:
    phase = Journal.phase

    @contextlib.contextmanager
    def named(journal: Journal, name: str) -> Iterator[dict[str, Any]]:
        steps.enter(name)
        try:
            with phase(journal, name) as entry:
                yield entry
        finally:
            steps.enter(f"after {name}")

    Journal.phase = named  # type: ignore[method-assign, assignment]
