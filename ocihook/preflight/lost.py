"""Checks of state that a dump takes and no restore brings back: the program runs on without it."""

import os
import signal
from collections.abc import Iterator
from itertools import groupby

from ocihook.audit.comparing import named
from ocihook.audit.foreseeing import foresee
from ocihook.linux.open_files import has_other_end
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, warn
from ocihook.preflight.observation import Observation

_AGAIN = "have the application make it again after a restore, of which ocihook.io/resume-signal tells it"

_STREAMS = (0, 1, 2)
_OF_THREAD = -1  # exit signal of what clone(2) has made with CLONE_PARENT, as the kernel shows some
_MOST_CODE, _FIRST_REALTIME, _CORE = 0x7F, 32, 0x80


def _lost_state(seen: Observation) -> Iterator[Problem]:
    found = sorted(foresee(seen.tasks), key=lambda difference: difference.row.what)
    for what, differences in groupby(found, key=lambda difference: difference.row.what):
        yield warn(f"{what} of {named(list(differences))}: a restore does not bring that back", _AGAIN)


def _trigger(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        if file.name.startswith("/proc/pressure/") or file.name.endswith((".pressure", "/cgroup.event_control")):
            detail = f"{seen.who(file.pid)} has {file.name} open: a trigger on it never fires after a restore"
            yield warn(detail, _AGAIN)


def _listener(seen: Observation) -> Iterator[Problem]:
    linux = seen.container.config.get("linux") if seen.container else None
    seccomp = linux.get("seccomp") if isinstance(linux, dict) else None
    if isinstance(seccomp, dict) and seccomp.get("listenerPath"):
        detail = "an agent outside answers some of its system calls (seccomp's listenerPath); after a restore they fail"
        yield warn(detail, "run it with a seccomp profile without SCMP_ACT_NOTIFY")


def _exit_signal(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        if process.pid != seen.init_pid and process.stat.exit_signal not in (signal.SIGCHLD, _OF_THREAD):
            number = process.stat.exit_signal
            detail = (
                f"the parent of {seen.who(process.pid)} gets SIGCHLD at its end after a restore, not signal {number}"
            )
            yield warn(detail, "have the application make it with SIGCHLD (clone(2)), as fork does")


def _exit_code(seen: Observation) -> Iterator[Problem]:
    """CRIU makes a zombie that exits with 7 bits of the code, or by a signal (cr-restore.c, restore_one_zombie)."""
    for process in seen.processes:
        code, number = process.stat.exit_code >> 8, process.stat.exit_code & 0x7F
        is_lost = code > _MOST_CODE or number >= _FIRST_REALTIME or process.stat.exit_code & _CORE
        if process.is_zombie and is_lost:
            detail = f"{seen.who(process.pid)} has ended unwaited for: its parent gets another status after a restore"
            yield warn(detail, "have the parent wait for its children (waitpid(2)) before the dump")


def _asynchronous(seen: Observation) -> Iterator[Problem]:
    """The kernel does not show how many requests are in flight; CRIU does not wait for them (parasite_check_aios)."""
    for process in seen.processes:
        if "/[aio]" in process.maps:
            detail = f"{seen.who(process.pid)} uses asynchronous I/O (io_setup): requests in flight at a dump never end"
            yield warn(detail, "have the application wait for its requests before the dump (ocihook.io/quiesce-signal)")


def _half_pipe(seen: Observation) -> Iterator[Problem]:
    """CRIU makes a pipe anew, with the ends that it knows; those of the first process's streams its runtime makes."""
    pipes = [file for file in seen.files if file.name.startswith("pipe:[")]
    streams = {file.inode for file in pipes if file.pid == seen.init_pid and file.fd in _STREAMS}
    modes: dict[int, set[int]] = {}
    for file in pipes:
        modes.setdefault(file.inode, set()).add(file.flags & os.O_ACCMODE)
    for file in {one.inode: one for one in pipes}.values():
        is_half = len(modes[file.inode]) == 1 and os.O_RDWR not in modes[file.inode]
        if is_half and file.inode not in streams and has_other_end(file.pid, file.fd):
            detail = f"{seen.who(file.pid)} has a pipe ({file.fd}) whose other end is outside: a restored one has none"
            yield warn(detail, "have it use a Unix socket with a name, or only its standard streams, to talk to others")


CHECKS = (
    Check(name="asynchronous-io", find=_asynchronous),
    Check(name="half-pipe", find=_half_pipe),
    Check(name="lost-state", find=_lost_state),
    Check(name="exit-signal", find=_exit_signal),
    Check(name="exit-status", find=_exit_code),
    Check(name="trigger", find=_trigger),
    Check(name="seccomp-listener", find=_listener),
)
