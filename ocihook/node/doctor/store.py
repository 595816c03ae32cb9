"""The store: keys that cannot be read, a remote that is missing, checkpoints that were lost or not pushed."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook.checkpoints.listing import list_pending
from ocihook.checkpoints.pushing import due
from ocihook.config import load_settings
from ocihook.errors import ConfigError, OcihookError, reason
from ocihook.preflight.finding import Finding, Status
from ocihook.store.store import Store


def _check_store() -> Iterator[Finding]:
    try:
        settings = load_settings()
    except ConfigError:  # reported by the check of the configuration
        return
    store = Store.of(settings)
    try:
        domains = store.domains()
    except (OcihookError, OSError) as error:
        yield Finding("store", Status.FAIL, f"{store.root}: {reason(error)}", "ocihook store verify")
        return
    for domain in domains:
        try:
            if domain.is_encrypted or domain.keyring.is_configured:
                _ = domain.keyring.newest
        except OcihookError as error:
            detail = f"{error.args[0]}: checkpoints of domain {domain.name} can be neither made nor restored"
            yield Finding("store keys", Status.FAIL, detail, error.hint or "see key_file and key_command")
            continue
        if domain.keyring.is_configured and not domain.is_encrypted:
            detail = f"domain {domain.name} is not encrypted, and keys are configured: mode store refuses its dumps"
            yield Finding("store keys", Status.FAIL, detail, "ocihook store rekey")
    if settings.remote.startswith("/") and not Path(settings.remote).is_dir():
        detail = f"the remote {settings.remote} is not a directory: nothing is pushed to it, or pulled"
        yield Finding("remote", Status.FAIL, detail, "mount it")
    elif settings.remote:
        waiting = len(due(store))
        status = Status.WARN if waiting else Status.OK
        detail = f"{settings.remote}; {waiting} checkpoints are to be pushed" if waiting else settings.remote
        yield Finding("remote", status, detail, "ocihook store push" if waiting else "")
    for row in list_pending(store):
        if row.state == "lost":
            detail = f"checkpoint {row.id} is lost: {row.reason}: a restore of it fails"
            yield Finding("store", Status.WARN, detail, "ocihook store prune")
        elif row.reason:
            tried = f" in {row.attempts} attempts" if row.attempts > 1 else ""
            detail = f"checkpoint {row.id} of {row.container} could not be stored{tried}: {row.reason}"
            yield Finding("store pending", Status.FAIL, detail, row.remedy)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_check_store,)
