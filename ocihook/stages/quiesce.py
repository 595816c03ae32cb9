"""Asks an application to quiesce before its dump, and signals it when it may resume.

The application's init gets a signal while it runs and creates (or touches) a file to say that it is ready.
"""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from ocihook.errors import OcihookError, QuiesceError
from ocihook.linux.cgroup import wait_until_released
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant, Restore

POLL_S = 0.002


@dataclass(kw_only=True)
class Quiesced(Effect, kind="quiesced"):
    """The application was asked to quiesce. A stage that starts over asks once more."""

    ends_with_stage: ClassVar[bool] = False
    init: Process
    signal: str

    def undo(self, _journal: Journal, patience: Patience) -> None:
        """Ask it to resume, as soon as it can receive a signal; twice rather than never."""
        wait_until_released(self.init, patience)
        self.init.send(signal_number(self.signal))


class Quiesce(Participant):
    """Quiesces the application, if it wants to be asked."""

    def needs_tasks(self, dump: Dump) -> bool:
        """Return whether it is to be asked."""
        return bool(dump.policy.quiesce_signal)

    def prepare(self, dump: Dump) -> None:
        """Ask it, and wait for its answer."""
        policy = dump.policy
        if not policy.quiesce_signal:
            return
        init = Process.find(dump.init_pid)
        if init is None:
            raise OcihookError(f"CRIU named process {dump.init_pid} as the container's init, which does not exist")
        with dump.journal.phase("quiesce"):
            if policy.resume_signal and dump.journal.find(Quiesced) is None:
                dump.journal.add(Quiesced(init=init, signal=policy.resume_signal))
            ask_to_quiesce(
                init,
                dump.patience.within(policy.quiesce_timeout_s),
                signal_name=policy.quiesce_signal,
                ack=policy.quiesce_ack,
            )

    def running(self, restore: Restore) -> None:
        """Signal a restored one, too."""
        if restore.init and restore.policy.resume_signal:
            restore.init.send(signal_number(restore.policy.resume_signal))


def signal_number(name: str) -> signal.Signals:
    """Return the signal of this name, given without SIG."""
    return signal.Signals[f"SIG{name}"]


def ask_to_quiesce(init: Process, patience: Patience, *, signal_name: str, ack: str) -> None:
    """Signal `init`, which must be able to run, and wait for its acknowledgement.

    Raises:
        QuiesceError: if the process is gone, or does not answer in time.
        GivenUp: if its caller has given up.
    """
    before = _identity(init.pid, ack)
    allowed_s = patience.left_s
    if not init.send(signal_number(signal_name)):
        raise QuiesceError(f"process {init.pid} ended before it could be quiesced")

    def has_answered() -> bool:
        if _identity(init.pid, ack) not in (None, before):
            return True
        if not init.is_alive():
            raise QuiesceError(f"process {init.pid} ended on SIG{signal_name}")
        return False

    if not patience.until(has_answered, longest_poll_s=POLL_S):
        raise QuiesceError(
            f"the application did not create or touch {ack} within {allowed_s:.3g} s of SIG{signal_name}",
            hint="raise ocihook.io/quiesce-timeout-s, or remove ocihook.io/quiesce-signal",
        )


def _identity(pid: int, path: str) -> tuple[int, int, int] | None:
    """Return what changes when a file of the container is made or touched; None if it is not there.

    Every component is opened without following links: a container's link must not lead to the node's files.
    """
    try:
        fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        *parents, name = path.strip("/").split("/")
        for parent in parents:
            inner = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    finally:
        os.close(fd)
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns
