"""The list of checks: `ocihook doctor --container` prints what they find, and a dump is refused for it.

A new check is one more row in the file of its subject.
"""

from collections.abc import Callable, Iterable

from ocihook.linux.patience import Patience
from ocihook.preflight import (
    deleted,
    descriptors,
    files,
    ipc,
    lost,
    memory,
    mounts,
    processes,
    programs,
    sockets,
    tasks,
    unread,
    volumes,
)
from ocihook.preflight.check import Check, SeenT
from ocihook.preflight.finding import Finding, Status
from ocihook.preflight.observation import Observation

CHECKS: tuple[Check[Observation], ...] = (
    *memory.CHECKS,
    *mounts.CHECKS,
    *files.CHECKS,
    *descriptors.CHECKS,
    *deleted.CHECKS,
    *volumes.CHECKS,
    *programs.CHECKS,
    *ipc.CHECKS,
    *sockets.CHECKS,
    *unread.CHECKS,
    *processes.CHECKS,
    *tasks.CHECKS,
    *lost.CHECKS,
)
_LOOKS = 4  # until a failure counts as lasting
_PAUSE_S = 0.05
_NAMED = 3  # findings of one check


def run(seen: SeenT, checks: Iterable[Check[SeenT]]) -> list[Finding]:
    """Return the findings of those checks that hold for the CRIU and the options of the dump or restore."""
    found = (finding for check in checks if check.holds(seen) for finding in check.findings(seen))
    return list(dict.fromkeys(found))  # each once: a file may be open and mapped


def lasting(observe: Callable[[], SeenT], patience: Patience, checks: Iterable[Check[SeenT]]) -> list[Finding]:
    """Return the findings of what may change: a failure that passes, as a lock held briefly, is a warning.

    Args:
        observe: reads the container, or the node.
        patience: between two looks; one look is enough if nothing fails.
        checks: the rows.
    """
    rows = tuple(checks)
    findings = run(observe(), rows)
    for _ in range(_LOOKS - 1):
        if not _failures(findings):
            break
        patience.sleep(_PAUSE_S)
        still = _failures(run(observe(), rows))
        findings = [_passing(one) if one.status is Status.FAIL and one not in still else one for one in findings]
    return findings


def _failures(findings: Iterable[Finding]) -> set[Finding]:
    return {finding for finding in findings if finding.status is Status.FAIL}


def _passing(finding: Finding) -> Finding:
    return finding._replace(
        status=Status.WARN, detail=f"{finding.detail}, at times", remedy=f"try again, or {finding.remedy}"
    )


def alike_as_one(findings: Iterable[Finding], *, all_of: str = "") -> list[Finding]:
    """Return a few findings of each check and status, the last of them with the number of the others.

    Args:
        findings: all.
        all_of: a check of which all are kept.
    """
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        own = finding.detail if finding.check == all_of else ""
        kinds.setdefault((finding.check, finding.status, own), []).append(finding)
    shown: list[Finding] = []
    for alike in kinds.values():
        *first, last = alike[:_NAMED]
        more = len(alike) - _NAMED
        shown += [*first, last._replace(detail=f"{last.detail}; and {more} more like it") if more > 0 else last]
    return shown
