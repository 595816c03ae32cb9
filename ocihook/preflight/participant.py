"""Refuses a dump that CRIU would refuse, or whose restore would fail, before anything is touched."""

import logging
from collections.abc import Mapping

from ocihook.container.running import RunningContainer
from ocihook.container.runtime_call import read_config
from ocihook.criu.files import options_for
from ocihook.criu.version import parse_version
from ocihook.errors import GivenUp, OcihookError, PreflightError, plain
from ocihook.preflight.checks import CHECKS, alike_as_one, lasting
from ocihook.preflight.finding import Finding, Status, without_commands
from ocihook.preflight.observation import Observation, observe
from ocihook.session.participant import Dump, Participant

_TAKES_RISK = "the annotation ocihook.io/preflight=warn takes the risk"

log = logging.getLogger(__name__)


class Preflight(Participant):
    """Runs the checks that `ocihook doctor --container` runs, with the CRIU and the options of this dump."""

    def refuse(self, dump: Dump) -> None:
        """Refuse the dump if a check fails, unless the application is still to be quiesced."""
        if not dump.policy.quiesce_signal:
            _check(dump)

    def prepare(self, dump: Dump) -> None:
        """Refuse the dump if a check fails although the application has quiesced."""
        if dump.policy.quiesce_signal:
            _check(dump)


def _check(dump: Dump) -> None:
    with dump.journal.phase("preflight"):
        found = _find(dump)
    findings = alike_as_one(map(without_commands, found))
    fatal = [finding for finding in findings if finding.status is Status.FAIL]
    final = {check.name for check in CHECKS if check.is_final}
    refused = [finding for finding in fatal if dump.policy.preflight == "refuse" or finding.check in final]
    if refused:
        takes_risk = "" if {one.check for one in refused} & final else _TAKES_RISK
        raise PreflightError("; ".join(map(_in_words, refused)), hint=takes_risk)
    noted = [_in_words(finding) for finding in findings if finding.status in (Status.FAIL, Status.WARN)]
    for line in noted:
        log.warning("container %s: preflight: %s", dump.container, line)
    dump.remark = " ".join([dump.remark, *(f"warning: {line}." for line in noted)]).strip()


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
