"""`create`: a container whose annotations ask for a checkpoint is restored; another one is made by the runtime.

`restore`, which an engine calls for its own checkpoints: what is restored is one of ours again, with the next stop.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ocihook.config import Policy, Settings, apply_annotations, load_settings
from ocihook.container.conmon import conmon_name
from ocihook.container.descriptors import check_image_files
from ocihook.container.identity import container_ref, gang_ref
from ocihook.container.pod_owner import find_owner_uid
from ocihook.errors import (
    CheckpointInUse,
    ConfigError,
    GivenUp,
    NoCheckpoint,
    OcihookError,
    ProgramChanged,
    RestoreError,
    UnsupportedError,
    plain,
)
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import GangRef
from ocihook.runtime import containers, waiting
from ocihook.runtime.attempts import keep, record
from ocihook.runtime.call import Call
from ocihook.runtime.choice import choose
from ocihook.runtime.claims import is_claimed
from ocihook.runtime.containers import Kept
from ocihook.runtime.left_behind import leave_behind
from ocihook.runtime.member_end import report_unrestored
from ocihook.runtime.restoring import discard, is_unsettled, restore, running_from, settle
from ocihook.runtime.stop_record import checkpoint_signals
from ocihook.store.lineage import domain_name, has_identity
from ocihook.store.thin import Thin

_CLAIM_POLL_S = 2.0  # between looks at who runs from a checkpoint

log = logging.getLogger(__name__)

_KINDS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")


def create(call: Call, wake: Callable[[], object]) -> int:
    """Restore the container, or have the runtime make it, which does not return.

    Args:
        call: `create`.
        wake: reaches the agent, and starts one if none runs; members of a gang need it.

    Raises:
        OcihookError: if it must not be made: its annotations are wrong, or it was to be restored and nothing else.
    """
    config = _read_config(call)
    notes = annotations_of(config)
    settle(call.container_id)  # an earlier `create` may have been killed
    discard(call.container_id)  # or its engine, which has not heard that it was done
    if _is_sandbox(notes):
        call.pass_on()
    settings = load_settings()
    kept = _kept(call, notes)
    policy = read_policy(settings, notes, in_pod=kept.container.is_in_pod)
    if not (policy.restore_from or policy.checkpoint_on_stop):
        call.pass_on()
    kept = _with_owner(replace(kept, stop_signals=checkpoint_signals(config, policy, kept.container)), notes)
    if policy.checkpoint_on_stop and not has_identity(kept.container):
        call.say(
            f"container {kept.container} is not checkpointed when it is stopped: its pod is one of many that are alike "
            "and none would resume from it. Name a member by ocihook.io/member",
            "warning",
        )
    containers.keep(kept)
    if policy.on_member_stop == "checkpoint":
        try:
            wake()  # it answers calls of others of the gang
        except OSError as error:
            call.say(f"container {kept.container} cannot be called by others of its gang: {plain(error)}", "warning")
    try:
        if policy.restore_from and _is_restored(call, kept, config, policy, settings, wake):
            return 0
    except OcihookError:
        if not is_unsettled(call.container_id):  # else `delete`, or whoever creates it again, undoes the rest
            containers.forget(call.container_id)
        raise
    if not policy.restore_from and not policy.restore_on_restart:
        _leave_behind(call, kept, settings)
    if not policy.checkpoint_on_stop:
        containers.forget(call.container_id)
    return call.pass_on()


def keep_restored(call: Call) -> NoReturn:
    """Have the runtime restore what its engine has checkpointed; it is checkpointed when it is stopped, as before.

    Args:
        call: `restore`.

    Raises:
        OcihookError: if its annotations are wrong, or the runtime would wait for what is no file among the images.
    """
    config = _read_config(call)
    notes = annotations_of(config)
    check_image_files(Path(call.options.get("--image-path") or "checkpoint"))  # runc's and crun's default
    kept = _kept(call, notes)
    if not _is_sandbox(notes):
        policy = read_policy(load_settings(), notes, in_pod=kept.container.is_in_pod)
        if policy.checkpoint_on_stop:
            kept = replace(kept, stop_signals=checkpoint_signals(config, policy, kept.container))
            containers.keep(_with_owner(kept, notes))
    call.pass_on()


def _is_sandbox(notes: Mapping[str, str]) -> bool:
    return any(notes.get(name) == "sandbox" for name in _KINDS)


def _is_restored(
    call: Call,
    kept: Kept,
    config: Mapping[str, Any],
    policy: Policy,
    settings: Settings,
    wake: Callable[[], object],
) -> bool:
    """Restore, if there is something to restore; False: it starts from scratch, as if nothing had been tried."""
    gang, chosen, began_s = None, None, time.time()
    try:
        gang = gang_ref(annotations_of(config), kept.container)
        if gang is not None and not settings.coordinator:
            wake()
        while True:
            if chosen is None or gang is None:  # the others of a gang restore what was chosen
                chosen = choose(kept, policy, settings, _patience(), gang, partial(_tell, call))
            if chosen.is_restart and not policy.restore_on_restart:
                _leave_behind(call, kept, settings, chosen.thin)
                return False
            try:
                restore(call, kept, config, chosen, settings, policy)
                waiting.end(kept, waiting.CLAIM)
                break
            except CheckpointInUse as error:
                if policy.on_claim != "wait" or not _wait_for_claim(call, kept, chosen.thin, policy, settings, error):
                    raise
    except GivenUp:
        raise
    except (OcihookError, OSError) as error:
        if is_unsettled(call.container_id):  # its rootfs may be half the other one's
            raise RestoreError(
                f"container {kept.container} is neither restored nor started: {plain(error).rstrip('.')}",
                hint="remove it, or run `ocihook recover`",
            ) from error
        why = plain(error).rstrip(".")
        if chosen is not None:
            why += _note_unrestored(kept, gang, chosen.thin, settings, error, began_s)
        if _is_to_fail(error, policy):
            raise OcihookError(f"container {kept.container} is not restored: {why}. Nothing was started") from error
        message = f"container {kept.container} is not restored and starts from scratch: {why}"
        log.warning(message)
        call.say(message, "warning")
        return False
    return True


def _note_unrestored(
    kept: Kept, gang: GangRef | None, chosen: Thin, settings: Settings, error: Exception, began_s: float
) -> str:
    """Tell the gang of a container that it is not restored, and note that; return a sentence about its checkpoint."""
    why = plain(error).rstrip(".")
    if gang is not None:
        report_unrestored(kept, gang, why)
    if isinstance(error, CheckpointInUse | ProgramChanged):  # retention treats it as before
        record(chosen, settings, kept.container, error, began_s)
        return ""
    return f". {keep(chosen, settings, kept.container, why, began_s)}"


def _leave_behind(call: Call, kept: Kept, settings: Settings, chosen: Thin | None = None) -> None:
    """Have no new pod resume from what this pod's container was checkpointed to: it may have been killed as hung."""
    try:
        left = leave_behind(kept, settings, chosen)
    except (OcihookError, OSError) as error:
        why = f"new pods may resume from its state before its restart: {plain(error)}"
        call.say(f"container {kept.container}: {why}", "warning")
        return
    if chosen is not None or left:
        ids = f": no new pod resumes from {', '.join(left)}" if left else ""
        call.say(f"container {kept.container} was restarted in its pod, and starts from scratch{ids}", "info")


def _tell(call: Call, text: str) -> None:
    log.info("%s", text)
    call.say(text, "info")


def _is_to_fail(error: Exception, policy: Policy) -> bool:
    """Return whether a container that is not restored must not start from scratch either."""
    if isinstance(error, NoCheckpoint):
        return policy.on_no_checkpoint == "fail"
    return policy.on_restore_error == "fail" or (isinstance(error, CheckpointInUse) and policy.on_claim == "fail")


def _wait_for_claim(
    call: Call, kept: Kept, chosen: Thin, policy: Policy, settings: Settings, error: CheckpointInUse
) -> bool:
    """Wait until no container runs from a checkpoint any longer; False if one still does at the end of the wait.

    Raises:
        RemoteError: if the remote does not answer.
        GivenUp: if the engine no longer waits.
    """
    watch, patience = waiting.begin(kept, waiting.CLAIM), _patience()
    left_s = watch.left_s(policy.restore_wait_s, time.monotonic())
    _tell(call, f"container {kept.container} waits for its checkpoint, for {left_s:.0f} s at most: {plain(error)}")

    def is_free() -> bool:
        watch.look([], time.monotonic())
        waiting.keep(kept, waiting.CLAIM, watch)
        if running_from(chosen, kept) is not None:
            return False
        return not settings.remote or not is_claimed(chosen, kept.container, settings, patience)

    limit = patience.within(left_s)
    limit.sleep(_CLAIM_POLL_S)  # also where it was only being restored: that is no claim that can be looked at
    if left_s and limit.until(is_free, poll_s=_CLAIM_POLL_S, longest_poll_s=_CLAIM_POLL_S):
        return True
    waiting.end(kept, waiting.CLAIM)
    return False


def _patience() -> Patience:
    """Return the patience with the process that has called: an engine that gives up may kill that one alone."""
    caller = Process.find(os.getppid())  # None: it is outside of our PID namespace
    return Patience({"the engine": caller} if caller else {})


def read_policy(settings: Settings, notes: Mapping[str, str], *, in_pod: bool) -> Policy:
    """Return what is wanted of a container that is made: whatever is wrong is reported now, and not by its first dump.

    Raises:
        AdmissionError, ConfigError: if an annotation of ocihook is wrong, or may not be set.
    """
    policy, refused, _ = apply_annotations(settings, notes, in_pod=in_pod)
    if refused:
        raise refused[0]
    return policy


def annotations_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of a bundle's config.json."""
    found = config.get("annotations")
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, Mapping) else {}


def _read_config(call: Call) -> Mapping[str, Any]:
    path = call.bundle / "config.json"
    try:
        config = json.loads(path.read_text("utf-8", "replace"))  # as runc reads it
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def _kept(call: Call, notes: Mapping[str, str]) -> Kept:
    """Return who the container is."""
    container = container_ref(
        notes,
        container_id=call.container_id,
        runtime=call.runtime,
        bundle=str(call.bundle),
        name=conmon_name(os.getpid(), call.container_id),
    )
    return Kept(
        container=container,
        bundle=call.bundle,
        program=call.program,
        prefix=call.prefix,
        domain=domain_name(container),
    )


def _with_owner(kept: Kept, notes: Mapping[str, str]) -> Kept:
    """Return the container with the uid of the JobSet or Job that made its pod, as far as its engine says so."""
    try:
        uid = find_owner_uid(kept.container, notes)
    except UnsupportedError as error:
        log.warning("container %s may resume from an earlier job of its name: %s", kept.container, plain(error))
        return kept
    return replace(kept, container=replace(kept.container, owner_uid=uid))
