"""Checks of gangs: whether their coordinator answers, and what it knows of a container's own."""

from collections.abc import Iterator
from typing import Any

from ocihook import __version__
from ocihook.config import Settings, load_settings
from ocihook.container.identity import container_ref, gang_ref
from ocihook.errors import ConfigError, GangError, IdentificationError, plain
from ocihook.gang.link import Link, unreachable
from ocihook.linux.patience import Patience
from ocihook.preflight.finding import Finding, Status
from ocihook.preflight.observation import Observation

_ANSWER_S = 10.0
_CHECK = "coordinator"


def _check_coordinator() -> Iterator[Finding]:
    """Ask the coordinator as a member of a gang on this node would; without an address the agent coordinates."""
    settings = _settings()
    if not settings.coordinator:
        return
    try:
        answer = _ask(settings)
    except GangError as error:
        remedy = error.hint or f"see the certificates in {settings.tls_dir} of both, and `ocihook coordinator` there"
        yield Finding(_CHECK, Status.WARN, str(error.args[0]), remedy, rules_out="members of gangs")
        return
    version = str(answer.get("version", ""))
    detail = f"{settings.coordinator} answers, ocihook {version or 'of an earlier release'}"
    if version:
        yield Finding(_CHECK, Status.OK, detail)
    else:
        detail += f"; here is {__version__}: members that are created while others are dumped may start from scratch"
        yield Finding(_CHECK, Status.WARN, detail, "update ocihook there")


def check_gang(seen: Observation) -> Iterator[Finding]:
    """Report what the coordinator knows of the gang that a container is a member of."""
    if seen.container is None:
        return
    notes = seen.container.annotations
    try:
        gang = gang_ref(notes, container_ref(notes, container_id=seen.container.id, runtime="", bundle=""))
    except IdentificationError:  # reported by the check of its policy
        return
    except ConfigError as error:
        yield Finding("gang", Status.FAIL, str(error.args[0]), error.hint or "correct the annotation")
        return
    if gang is None:
        return
    settings = _settings()
    try:
        found = _ask(settings)["gangs"] if settings.coordinator else []
    except GangError as error:
        yield Finding("gang", Status.FAIL, f"no member of gang {gang.name} can be dumped: {error.args[0]}", error.hint)
        return
    known: dict[str, Any] = next((row for row in found if (row["namespace"], row["gang"]) == gang[:2]), {})
    where = f"member {gang.member} of gang {gang.name}, which has {gang.size}: all of them are dumped at once, or none"
    attempt = known.get("attempt", {})
    if attempt.get("size", gang.size) != gang.size:
        detail = f"{where}; but its last {attempt['act']} was of {attempt['size']} members"
        yield Finding("gang", Status.WARN, detail, "give all members the same ocihook.io/gang-size")
    else:
        epochs = known.get("epochs", [])
        last = f"; epoch {epochs[-1]} is its last complete one" if epochs else ""
        why = f"; its last {attempt['act']} has failed: {attempt['reason']}" if attempt.get("reason") else ""
        yield Finding("gang", Status.OK, f"{where}{last}{why}")


def _ask(settings: Settings) -> dict[str, Any]:
    link = Link.of(settings)
    try:
        answer = link.ask(None, Patience(timeout_s=_ANSWER_S))
    except OSError as error:
        raise unreachable(link, error) from error
    except ConfigError as error:
        raise GangError(plain(error)) from error
    if not isinstance(answer.get("gangs"), list):
        raise GangError(f"{link} gave a malformed answer", hint="see which program listens there")
    return answer


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:  # reported by the check of the node
        return Settings()


CHECKS = (_check_coordinator,)
