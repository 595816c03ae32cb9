"""Checks of state that a dump takes and no restore brings back: the program runs on without it."""

from collections.abc import Iterator
from itertools import groupby

from ocihook.audit.comparing import named
from ocihook.audit.foreseeing import foresee
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, warn
from ocihook.preflight.observation import Observation

_AGAIN = "have the application make it again after a restore, of which ocihook.io/resume-signal tells it"


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


CHECKS = (
    Check(name="lost-state", find=_lost_state),
    Check(name="trigger", find=_trigger),
    Check(name="seccomp-listener", find=_listener),
)
