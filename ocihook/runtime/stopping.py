"""A container is checkpointed in place of the signal that stops it: the agent's part, which no engine can kill.

The request is on record before the agent is asked, and the result before anybody hears of it. So the agent that follows
a killed one goes on: it waits for the runtime that is dumping, or begins. A checkpoint that fails is removed, and the
container gets its signal.
"""

import contextlib
import json
import logging
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ocihook.checkpoints.belongings import IMAGES_DIR, is_alone, read_call, stopping_dir
from ocihook.checkpoints.pending import claimed, directory_of, pending_ids
from ocihook.checkpoints.stage import discard_staged, pins_of
from ocihook.config import Settings, apply_annotations
from ocihook.container.identity import gang_ref
from ocihook.criu.explain import explain
from ocihook.errors import ConfigError, OcihookError, UnsupportedError, plain, printable
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.runtime import containers, dumping
from ocihook.runtime.announced import announce, note_end
from ocihook.runtime.call import Call
from ocihook.runtime.dumping import LOG_NAME, PATH
from ocihook.runtime.stop_record import (
    CHECKPOINTED,
    SIGNALLED,
    has_effect,
    read_config,
    read_stop,
    signal_of,
    write_stop,
)
from ocihook.runtime.suspending import suspend_gpus
from ocihook.session.journal import open_journals, read_journal
from ocihook.store.store import Store
from ocihook.store.thin import Thin, read_thin

_ENDING_S = 60.0  # for CRIU to end once its runtime was killed
_LOG_BYTES = 64 << 10  # of CRIU's log, at its end
_TAIL_CHARACTERS = 400  # of the runtime's own words

log = logging.getLogger(__name__)


class Stopping:
    """The stop of one container."""

    def __init__(self, container_id: str, load: Callable[[], Settings]) -> None:
        """Take it up.

        Raises:
            OcihookError: if the container is not ours, or is not to be stopped.
        """
        kept, stop = containers.read(container_id), read_stop(container_id)
        if kept is None or stop is None:
            raise OcihookError(f"container {container_id} is not being stopped")
        self._kept, self._stop = kept, stop
        self._load = load
        self._id = container_id

    def log_fields(self) -> dict[str, str]:
        """Return what journald gets with every record of it."""
        container = self._kept.container
        fields = {"OCIHOOK_CONTAINER": container.id, "OCIHOOK_CONTAINER_NAME": container.name}
        fields |= {"OCIHOOK_POD": container.pod_name, "OCIHOOK_NAMESPACE": container.pod_namespace}
        return {name: value for name, value in fields.items() if value}

    def finish(self) -> tuple[int, str]:
        """Checkpoint the container, or deliver the signal: return 0, or 1 and why."""
        if not self._stop.is_over:
            try:
                self._checkpoint()
            except (OcihookError, OSError) as error:
                return self._deliver(plain(error))
            except Exception as error:
                log.exception("stop of container %s", self._kept.container)
                return self._deliver(f"{type(error).__name__}: {error} (a defect in ocihook)")
        return int(self._stop.outcome != CHECKPOINTED), self._stop.message

    def delete_if_left(self) -> None:
        """Delete the container if its engine has removed the bundle: its shim was killed, and nobody else deletes it.

        Raises:
            OSError: from the system.
        """
        if not self._kept.bundle.exists():
            log.warning("container %s is deleted: its engine has given it up", self._kept.container)
            self._call("delete", "--force", self._id)
            containers.forget(self._id)

    def _note(self, **changes: Any) -> None:  # noqa: ANN401 - fields of a stop
        self._stop = replace(self._stop, **changes)
        write_stop(self._id, self._stop)

    def _checkpoint(self) -> None:
        settings = self._load()
        place = stopping_dir(Path(settings.store_dir), self._id)
        self._announce(settings)
        self._wait_for_gang(settings, place)
        runtime = dumping.runtime_at(place)  # that an agent before this one has called
        if runtime is not None:
            self._await(runtime, settings)
        elif self._stop.init is None or (self._stop.init.is_alive() and read_thin(place / IMAGES_DIR) is None):
            self._begin(settings, place)
            self._dump(settings, place)
        self._conclude(settings, place)

    def _announce(self, settings: Settings) -> None:
        """Announce the stop at the remote, where its checkpoint is pushed to: others wait for it."""
        if not settings.remote:
            return
        try:
            notes = read_config(self._kept).get("annotations") or {}
            policy = apply_annotations(settings, notes, in_pod=self._kept.container.is_in_pod).policy
            if policy.push == "always":
                gang = gang_ref(notes, self._kept.container)
                self._note(announced=announce(self._kept, gang, settings, self._stop.announced))
        except (OcihookError, OSError) as error:
            log.warning("the stop of container %s is not announced: %s", self._kept.container, plain(error))

    def _note_end(self, settings: Settings, *, checkpoint: str = "", failed: str = "") -> None:
        with contextlib.suppress(OSError):  # a full disk: the announcement fails when the stop is over
            note_end(self._id, settings, checkpoint=checkpoint, failed=failed)

    def _wait_for_gang(self, settings: Settings, place: Path) -> None:
        """Wait until a container has been dumped that another member of its gang has called."""
        over = Patience(timeout_s=settings.stop_timeout_s)
        while read_call(place) and not over.within(_ENDING_S).until(lambda: not read_call(place)):
            if over.is_over or dumping.runtime_at(place) is None:  # its agent was killed
                shutil.rmtree(place, ignore_errors=True)

    def _begin(self, settings: Settings, place: Path) -> None:
        """Check that it can be checkpointed, before anything is done to it."""
        answer = self._call("state", self._id)
        state = json.loads(answer.stdout) if answer.returncode == 0 else {}
        init = Process.find(int(state.get("pid") or 0))
        if state.get("status") != "running" or init is None:
            raise UnsupportedError(f"it is {state.get('status', 'not known to its runtime')}")
        dumping.check_sizes(self._kept, settings)
        for volume, names in dumping.sharers(self._kept).items():
            log.warning(
                "container %s: its volume %s is saved while %s may write to it, and a restore may find another moment",
                *(self._kept.container, volume, ", ".join(names)),
            )
        self._note(init=init)
        dumping.make_place(self._kept, settings, place)

    def _dump(self, settings: Settings, place: Path) -> None:
        """Call the runtime.

        Raises:
            OcihookError: if it does not end in time.
        """
        running = dumping.begin(self._kept, place)
        try:
            running.wait(settings.stop_timeout_s)
        except subprocess.TimeoutExpired:
            criu = descendants(running.pid)
            running.kill()
            running.wait()  # waits: no, it was killed
            self._wait_for_end([process for pid in criu if (process := Process.find(pid))])
            raise OcihookError(
                f"its checkpoint took longer than {settings.stop_timeout_s:g} s", hint="raise [agent] stop_timeout_s"
            ) from None

    def _wait_for_end(self, processes: list[Process]) -> None:
        """Wait until CRIU, whose runtime was killed, and the session that served it have ended."""
        patience = Patience(timeout_s=_ENDING_S)
        if not patience.until(lambda: not any(process.is_alive() for process in processes)):
            log.warning("container %s: CRIU does not end", self._kept.container)
        patience.until(lambda: not self._has_session())

    def _has_session(self) -> bool:
        for path in open_journals():
            with contextlib.suppress(OcihookError, OSError):  # it ends just now
                if (read_journal(path).get("container") or {}).get("id") == self._id:
                    return True
        return False

    def _await(self, runtime: Process, settings: Settings) -> None:
        """Wait for a runtime that another agent has called."""
        if not Patience(timeout_s=settings.stop_timeout_s).until(lambda: not runtime.is_alive()):
            runtime.send(signal.SIGKILL)
        self._wait_for_end([])

    def _conclude(self, settings: Settings, place: Path) -> None:
        """Check the result of the dump.

        Raises:
            OcihookError: if the container is not checkpointed.
        """
        if not self._is_gone():
            self._wait_for_end([])  # of a runtime that was killed CRIU may still be at it
        thin, is_gone = read_thin(place / IMAGES_DIR), self._is_gone()
        if thin is not None and is_gone:
            (containers.directory_of(self._id) / containers.ENDED_NAME).touch(mode=0o600)
            self._note_end(settings, checkpoint=thin.checkpoint_id)
            self._note(outcome=CHECKPOINTED)
            log.info("container %s was checkpointed as it was stopped: %s", self._kept.container, thin.checkpoint_id)
            shutil.rmtree(place, ignore_errors=True)
            return
        if thin is not None:
            withdraw(settings, thin)
        if is_gone:
            raise OcihookError("it has ended before it was checkpointed")
        raise OcihookError(_why(place))

    def _is_gone(self) -> bool:
        return self._stop.init is None or not self._stop.init.is_alive()

    def _deliver(self, why: str) -> tuple[int, str]:
        """Deliver the signal that was to be delivered; return 1 and why."""
        message = f"container {self._kept.container} is stopped without a checkpoint: {why}"
        log.error("%s", message)
        self._wait_for_end([])
        with contextlib.suppress(ConfigError):  # that is the reason, or is reported with it
            self._note_end(self._load(), failed=why)
            if unsafe := suspend_gpus(self._kept, self._load()):
                log.warning("container %s is stopped with its GPU: %s", self._kept.container, unsafe)
        done = self._call(*self._words())
        self._note(outcome=SIGNALLED, message=message)
        with contextlib.suppress(OcihookError):  # the reason is reported; the next agent removes what is there
            shutil.rmtree(stopping_dir(Path(self._load().store_dir), self._id), ignore_errors=True)
        return 1, message if done.returncode == 0 else f"{message}. {done.stderr.strip()}"

    def _words(self) -> Sequence[str]:
        """Return what delivers the signal.

        Without its gang a container is of no use. If the signal has no effect on it, as it neither catches nor blocks
        it, the rest of its gang would wait for its engine's patience to end: it is killed.
        """
        call = Call.parse(self._kept.program, self._stop.words)
        is_heeded = self._stop.init is None or has_effect(self._stop.init.pid, signal_of(call))
        with contextlib.suppress(ConfigError):  # it is reported, and the signal delivered
            if not is_heeded and is_alone(stopping_dir(Path(self._load().store_dir), self._id)):
                log.info("container %s is killed: its stop signal has no effect on it", self._kept.container)
                return ["kill", self._id, "KILL"]
        return call.words[len(call.prefix) :]

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        call = Call.parse(self._kept.program, [*self._kept.prefix, *words])
        prefix = call.prefix_with_log(containers.directory_of(self._id) / containers.LOG_NAME)
        command = [str(call.program), *prefix, *words]
        return subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, env={"PATH": PATH}
        )


def remove_stale(settings: Settings) -> None:
    """Remove the dumps of containers that nobody stops any more, as after a boot. For an agent that starts."""
    for place in stopping_dir(Path(settings.store_dir), "x").parent.glob("*"):
        stop = read_stop(place.name)
        if (stop is None or stop.is_over) and dumping.runtime_at(place) is None:
            shutil.rmtree(place, ignore_errors=True)


def withdraw(settings: Settings, thin: Thin) -> None:
    """Remove a checkpoint of a container that runs on: it is not the container's last state.

    Raises:
        OcihookError: if it cannot be removed.
    """
    domain = Store.of(settings, Patience(timeout_s=_ENDING_S)).open(thin.domain)
    pending = directory_of(domain, thin.checkpoint_id)
    while thin.checkpoint_id in pending_ids(domain):
        with claimed(pending) as is_ours:
            if is_ours:
                discard_staged(pending, pins_of(thin.checkpoint_id))
        if domain.patience.is_over:
            raise OcihookError(f"checkpoint {thin.checkpoint_id} is of a container that ran on", hint="remove it")
        domain.patience.sleep(0.1)
    if thin.checkpoint_id in domain.checkpoint_ids():
        with domain.alone():
            domain.remove([thin.checkpoint_id])


def _why(place: Path) -> str:
    """Return why the runtime failed: from CRIU's log if that shows it, else in its own words."""
    with contextlib.suppress(OSError):
        text = (place / "dump.log").read_text(errors="replace")[-_LOG_BYTES:]
        explanation = explain(text)
        if explanation is not None:
            return explanation.what
    with contextlib.suppress(OSError):
        if words := (place / LOG_NAME).read_text(errors="replace").strip():
            return printable(words[-_TAIL_CHARACTERS:])
    return "its runtime was killed"
