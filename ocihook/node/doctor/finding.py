"""What a check finds: how grave it is, what and why, the remedy, and whether doctor can apply it itself."""

from enum import StrEnum
from typing import NamedTuple

from ocihook.errors import printable


class Status(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    WARN = "warn"  # some checkpoints or restores will not work, or not well
    FAIL = "fail"  # a checkpoint or its restore will not work
    SKIP = "skip"


class Repair(StrEnum):
    """What `doctor --fix` can do about a finding; each is safe to do at any time."""

    NONE = ""
    INSTALL = "install"  # as `ocihook install`
    RECOVER = "recover"  # as `ocihook recover`
    LISTEN = "listen"  # as `systemctl enable --now ocihook.socket`


class Finding(NamedTuple):
    """What a check found. Of a workload, `check` is the name that criu/explain.py gives the failure."""

    check: str
    status: Status
    detail: str
    remedy: str = ""
    repair: Repair = Repair.NONE


def without_commands(finding: Finding) -> Finding:
    """Return a finding without what a terminal takes for a command: containers choose names and paths in it."""
    return finding._replace(detail=printable(finding.detail), remedy=printable(finding.remedy))
