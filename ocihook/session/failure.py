"""Handles a failed dump or restore: reports its cause to journal and engine, and keeps CRIU's log.

Engines remove CRIU's log, which runc and crun have it write where images go. So it is opened at the first stage, with
the runtime's standard error, which engines show: of a dump podman and CRI-O show all, containerd the first line; of a
restore podman and CRI-O show what conmon reads once, when the runtime exits. By then a refusal by a stage is always
written; for an error of CRIU the runtime's exit is delayed until it is written. podman prefers the runtime's error log
to standard error if that log is one JSON object (libpod, readConmonPipeData), and containerd shows its last error. So
the error is the last object there, and podman shows standard error. An engine may wait until all copies of standard
error are closed, so ours is closed as soon as CRIU or the runtime exits.
"""

import contextlib
import json
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ocihook.container.runtime_call import find_error_log
from ocihook.criu.explain import Explanation, explain, has_given_up
from ocihook.errors import CriuError
from ocihook.linux.delayed_exit import DelayedExit
from ocihook.linux.descriptors import copy_descriptor, write_at_once
from ocihook.linux.files import replace_file
from ocihook.linux.procfs import Process
from ocihook.session.effect import Facts
from ocihook.session.history import act_of
from ocihook.session.journal import Journal

LOGS_KEPT = 16
_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 192 << 10
_END_BYTES = 4 << 10  # in which a failure's last line is
_STDERR = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FailureFacts(Facts):
    """Why CRIU failed."""

    failure: dict[str, str] | None = None  # name, what, remedy; where its log is kept


class Attempt:
    """One dump or restore by CRIU, while it lasts."""

    def __init__(self, criu: Process, runtime: Process | None) -> None:
        self._criu, self._runtime = criu, runtime
        self._delayed: DelayedExit | None = None
        self._log = _open_log(criu.pid)
        found = runtime.open() if runtime else None  # none: `criu dump` was called directly
        self.runtime = -1 if found is None else found  # pidfd
        self._stderr = self._error_log = -1
        self._reported = ""
        if self.runtime >= 0 and runtime:
            with contextlib.suppress(OSError):
                self._stderr = copy_descriptor(self.runtime, _STDERR)
                self._error_log = _open_error_log(runtime.pid)

    def delay_exit(self) -> None:
        """Let a runtime whose CRIU has failed exit only once the cause is reported."""
        if self._runtime and self._stderr >= 0 and self._delayed is None:
            self._delayed = DelayedExit(self._runtime.pid, is_wanted=lambda: not self._criu.is_alive())

    def report(self, message: str) -> None:
        """Write a line where the engine shows the runtime's errors; only the first, and only if that does not block."""
        if self._stderr < 0:
            return
        self._reported = f"ocihook: {message}"
        with contextlib.suppress(OSError):  # the error is in the agent's log and the journal
            write_at_once(self._stderr, f"{self._reported}\n".encode())
        os.close(self._stderr)
        self._stderr = -1

    def explain(self) -> tuple[Explanation | None, str]:
        """Return why CRIU has failed, and its log."""
        text = _read(self._log) if self._log >= 0 else ""
        return explain(text), text

    @property
    def has_given_up(self) -> bool:
        """Return whether CRIU has failed by its log."""
        return self._log >= 0 and has_given_up(_read_end(self._log))

    def release(self) -> None:
        """Release the runtime and the engine's standard error, on whose end the engine may wait."""
        if self._delayed:
            self._append_to_error_log(self._delayed)
            self._delayed.close()
        for fd in (self.runtime, self._stderr, self._error_log):
            if fd >= 0:
                os.close(fd)
        self.runtime = self._stderr = self._error_log = -1
        self._delayed = None

    def _append_to_error_log(self, delayed: DelayedExit) -> None:
        """Make what was reported the last error of the runtime's log."""
        if self._reported and self._error_log >= 0:
            delayed.wait()  # waits: for a runtime whose CRIU has exited, two seconds at most
            line = json.dumps({"level": "error", "msg": self._reported})
            with contextlib.suppress(OSError):  # the error is in the agent's log and the journal
                os.write(self._error_log, f"{line}\n".encode())

    def close(self) -> None:
        """Release everything."""
        self.release()
        if self._log >= 0:
            os.close(self._log)
        self._log = -1


def _open_log(criu_pid: int) -> int:
    """Return the log that CRIU has open, -1 if it writes none."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{criu_pid}/fd"):
            path = f"/proc/{criu_pid}/fd/{fd}"
            with contextlib.suppress(OSError):
                if os.readlink(path).endswith(".log"):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return -1


def _open_error_log(runtime_pid: int) -> int:
    """Return the runtime's own error log, -1 without one."""
    path = find_error_log(runtime_pid)
    if path is None:
        return -1
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def _read_end(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, _END_BYTES, max(0, size - _END_BYTES)).decode(errors="replace")


def _read(fd: int) -> str:
    """Return a log; of a long one, its beginning and its end."""
    size = os.fstat(fd).st_size
    if size <= _HEAD_BYTES + _TAIL_BYTES:
        return os.pread(fd, size, 0).decode(errors="replace")
    head, tail = os.pread(fd, _HEAD_BYTES, 0), os.pread(fd, _TAIL_BYTES, size - _TAIL_BYTES)
    left_out = size - len(head) - len(tail)
    return f"{head.decode(errors='replace')}\n... {left_out} bytes are left out ...\n{tail.decode(errors='replace')}"


def message_of(journal: Journal, explanation: Explanation) -> str:
    """Return one line about a failure, for people."""
    about = f" of container {journal.container}" if journal.container else ""
    return f"the {act_of(journal.to_json())}{about} failed: {explanation}"


def keep_log(directory: Path, session_id: str, text: str) -> str:
    """Keep a log, and the most recent earlier ones; return its path, "" if it cannot be kept."""
    path = directory / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{session_id}.log"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text.encode(), mode=0o600, durable=False)
        for old in sorted(directory.glob("*.log"))[:-LOGS_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("session %s: CRIU's log cannot be kept: %s", session_id, error)
        return ""
    return str(path)


def record_failure(journal: Journal, explanation: Explanation, kept: str) -> None:
    """Put a failure into the journal: its cause, and where CRIU's log is kept."""
    if explanation.name != "ocihook":  # else our own error is recorded already
        journal.note_error(CriuError(explanation.what, cause=explanation.name, hint=explanation.remedy), "failed")
    journal.note(FailureFacts(failure={**explanation._asdict(), "log": kept}))
