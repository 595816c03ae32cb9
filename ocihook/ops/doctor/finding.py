"""What a check finds: how grave it is, what and why, the remedy, and whether doctor can apply it itself."""

from enum import StrEnum
from typing import NamedTuple


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


class Finding(NamedTuple):
    """What a check found. Of a workload, `check` is the name that criu/explain.py gives the failure."""

    check: str
    status: Status
    detail: str
    remedy: str = ""
    repair: Repair = Repair.NONE
