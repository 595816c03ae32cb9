"""Checks of state that a dump takes and no restore brings back: the program runs on without it."""

import signal
from collections.abc import Iterator
from itertools import groupby

from ocihook.audit.comparing import named
from ocihook.audit.foreseeing import foresee
from ocihook.preflight.check import Check, before
from ocihook.preflight.finding import Problem, warn
from ocihook.preflight.observation import Observation

_AGAIN = "have the application make it again after a restore, of which ocihook.io/resume-signal tells it"

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


def _wiped(seen: Observation) -> Iterator[Problem]:
    """CRIU before 4.2 takes no note of this advice (criu/proc_parse.c, parse_vmflags)."""
    for pid, process in seen.tasks.processes.items():
        if process.own.get("wf"):
            detail = (
                f"{process.name} {pid} has memory that its children are to find empty (MADV_WIPEONFORK): libraries "
                "have keys and random numbers in it. CRIU before 4.2 does not restore that: children forked after a "
                "restore get a copy"
            )
            yield warn(detail, "install CRIU 4.2 or later, or have such children run a program (execve)")


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
            detail = (
                f"{seen.who(process.pid)} has ended, and its parent has not asked how: it gets another status later"
            )
            yield warn(detail, "have the parent wait for its children (waitpid(2)) before the dump")


CHECKS = (
    Check(name="lost-state", find=_lost_state),
    Check(name="wipe-on-fork", find=_wiped, criu=before(4, 2)),
    Check(name="exit-signal", find=_exit_signal),
    Check(name="exit-status", find=_exit_code),
    Check(name="trigger", find=_trigger),
    Check(name="seccomp-listener", find=_listener),
)
