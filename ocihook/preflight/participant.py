"""Refuses a dump or restore that CRIU would refuse, or that would fail, before anything is touched."""

import logging
import os
from collections.abc import Iterable, Mapping

from ocihook.config import Policy
from ocihook.container.running import RunningContainer
from ocihook.container.runtime_call import read_config
from ocihook.criu.files import options_for
from ocihook.criu.images import read_bounded
from ocihook.criu.needs import Needs, is_wanted, read_needs
from ocihook.criu.version import parse_version
from ocihook.errors import GivenUp, OcihookError, PreflightError, plain
from ocihook.preflight import restores
from ocihook.preflight.check import Check, SeenT
from ocihook.preflight.checks import CHECKS, alike_as_one, lasting
from ocihook.preflight.finding import Finding, Status, without_commands
from ocihook.preflight.observation import Observation, observe
from ocihook.preflight.target import Restoration, observe_restore
from ocihook.session.participant import Dump, Participant, Restore

_TAKES_RISK = "the annotation ocihook.io/preflight=warn takes the risk"

log = logging.getLogger(__name__)


class Preflight(Participant):
    """Runs doctor's checks of a container before a dump, and those of a checkpoint on its node before a restore."""

    def refuse(self, dump: Dump) -> None:
        """Refuse the dump if a check fails, unless the application is still to be quiesced."""
        if not dump.policy.quiesce_signal:
            _check(dump)

    def prepare(self, dump: Dump) -> None:
        """Refuse the dump if a check fails although the application has quiesced."""
        if dump.policy.quiesce_signal:
            _check(dump)

    def check(self, restore: Restore) -> None:
        """Refuse the restore if a check fails."""
        with restore.journal.phase("preflight"):
            found = _find_of_restore(restore)
        noted = _refuse(found, restore.policy, restores.CHECKS)
        for line in noted:
            log.warning("container %s: preflight: %s", restore.journal.container, line)


def _check(dump: Dump) -> None:
    with dump.journal.phase("preflight"):
        found = _find(dump)
    noted = _refuse(found, dump.policy, CHECKS)
    for line in noted:
        log.warning("container %s: preflight: %s", dump.container, line)
    dump.remark = " ".join([dump.remark, *(f"warning: {line}." for line in noted)]).strip()


def _refuse(found: Iterable[Finding], policy: Policy, checks: Iterable[Check[SeenT]]) -> list[str]:
    """Return what is to be reported of findings.

    Raises:
        PreflightError: for those that refuse the dump or restore.
    """
    findings = alike_as_one(map(without_commands, found))
    fatal = [finding for finding in findings if finding.status is Status.FAIL]
    final = {check.name for check in checks if check.is_final}
    refused = [finding for finding in fatal if policy.preflight == "refuse" or finding.check in final]
    if refused:
        takes_risk = "" if {one.check for one in refused} & final else _TAKES_RISK
        raise PreflightError("; ".join(map(_in_words, refused)), hint=takes_risk)
    return [_in_words(finding) for finding in findings if finding.status in (Status.FAIL, Status.WARN)]


def _find_of_restore(restore: Restore) -> list[Finding]:
    """Return the findings; what cannot be read prevents no restore: CRIU reads it again."""
    try:
        names = os.listdir(restore.directory)
        images = {name: read_bounded(restore.directory / name) for name in filter(is_wanted, names)}
        needs = read_needs(images, names)
        return lasting(lambda: _observe_restore(restore, needs), restore.patience, restores.CHECKS)
    except GivenUp:
        raise
    except (OSError, OcihookError) as error:
        return [Finding("preflight", Status.WARN, f"the checkpoint could not be checked: {plain(error)}")]


def _observe_restore(restore: Restore, needs: Needs) -> Restoration:
    call, container = restore.call(), restore.journal.container
    bundle = container.bundle if container else ""
    return observe_restore(
        needs,
        criu=parse_version(call.criu_version),
        options=options_for(container.runtime if container else "", call.criu_config, call.criu_asked),
        config=read_config(restore.criu_pid, bundle),
        bundle=bundle,
        seen_from=restore.criu_pid,
    )


def _find(dump: Dump) -> list[Finding]:
    """Return the findings; what cannot be observed prevents no dump: CRIU may see more."""
    try:
        return lasting(lambda: _observe(dump), dump.patience, CHECKS)
    except GivenUp:
        raise
    except (OSError, OcihookError) as error:
        return [Finding("preflight", Status.WARN, f"the container could not be checked: {plain(error)}")]


def _observe(dump: Dump) -> Observation:
    call, container = dump.call(), dump.container
    config = read_config(dump.criu_pid, container.bundle)
    annotations = config.get("annotations")
    asked = call.criu_asked | ({"leave-running"} if call.leave_running else frozenset())
    return observe(
        dump.init_pid,
        criu=parse_version(call.criu_version),
        options=options_for(container.runtime, call.criu_config, asked),
        container=RunningContainer(
            container.id,
            container.runtime,
            dump.init_pid,
            container.bundle,
            {str(k): str(v) for k, v in annotations.items()} if isinstance(annotations, Mapping) else {},
            config,
        ),
        cgroup=call.cgroup,
    )


def _in_words(finding: Finding) -> str:
    return f"{finding.detail}: {finding.remedy}" if finding.remedy else finding.detail
