"""A finding of a check: how grave it is, what and why, the remedy, and whether doctor can apply it itself."""

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
    TABLES = "tables"  # as `nft delete table` of those of CRIU's that block nothing


class Finding(NamedTuple):
    """One finding. `check` of a container's is the name that criu/explain.py gives the failure."""

    check: str
    status: Status
    detail: str
    remedy: str = ""
    repair: Repair = Repair.NONE
    rules_out: str = ""  # of a warning: the containers, or acts, that do not work


class Problem(NamedTuple):
    """A finding of a row of preflight/checks.py, which has the name for it."""

    status: Status
    detail: str
    remedy: str = ""
    repair: Repair = Repair.NONE


def fail(detail: str, remedy: str, repair: Repair = Repair.NONE) -> Problem:
    """Return a problem because of which the dump or its restore certainly fails."""
    return Problem(Status.FAIL, detail, remedy, repair)


def warn(detail: str, remedy: str) -> Problem:
    """Return a problem that may make them fail, or because of which a restored program differs."""
    return Problem(Status.WARN, detail, remedy)


def without_commands(finding: Finding) -> Finding:
    """Return a finding without what a terminal takes for a command: containers choose names and paths in it."""
    return finding._replace(detail=printable(finding.detail), remedy=printable(finding.remedy))
