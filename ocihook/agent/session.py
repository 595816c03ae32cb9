"""One dump or restore in one process: handles its stages, watches CRIU, and undoes what is left when CRIU is gone."""

import logging
import os
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ocihook import wire
from ocihook.config import Settings, load_settings
from ocihook.criu.explain import Explanation
from ocihook.errors import AgentError, ConfigError, OcihookError, plain
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.memory.standstill import is_given_up
from ocihook.session import history
from ocihook.session.criu_statistics import note_end, open_work_directory
from ocihook.session.failure import Attempt, keep_log, message_of, record_failure
from ocihook.session.journal import Journal
from ocihook.session.undo import undo_all, undo_interrupted
from ocihook.stages import dump, restore
from ocihook.stages.awaited_memory import AwaitsMemory
from ocihook.stages.detached import KeptFromEnd, is_due, is_kept_from_end
from ocihook.stages.lost_container import FailedRestore, LostContainer

_LOOK_S = 0.01  # whether CRIU has detached, which nobody reports
_LOOK_AT_CONTAINER_S = 1.0  # whether it was killed: likewise
RETRY_S = 5.0  # between attempts to undo what could not be undone yet

log = logging.getLogger(__name__)

_Stage = Callable[[Journal, Patience, wire.Request, Path, Callable[[], Settings]], str]
_STAGES: dict[str, _Stage] = {
    "pre-dump": dump.pre_dump,
    "post-dump": dump.post_dump,
    wire.DETACHED_STAGE: dump.detached,
    wire.SNAPSHOT_STAGE: dump.snapshot,
    "pre-restore": restore.pre_restore,
    "setup-namespaces": restore.setup_namespaces,
    "post-restore": restore.post_restore,
    "pre-resume": restore.pre_resume,
    "post-resume": restore.post_resume,
}
# Stages that continue what an earlier one began, for which CRIU has called an agent in any case.
_CONTINUES = {
    "post-dump": "pre-dump",
    wire.DETACHED_STAGE: "pre-dump",
    "setup-namespaces": "pre-restore",
    "post-restore": "pre-restore",
}
# What an error in a stage leaves behind, said after the error itself. CRIU ignores a veto in post-resume.
_STATE_AFTER_ERROR = {
    "pre-dump": "The dump is refused",
    "post-dump": "The dump fails",
    wire.DETACHED_STAGE: "The dump fails",
    wire.SNAPSHOT_STAGE: "The checkpoint is incomplete and cannot be restored",
    "pre-restore": "The restore is refused, nothing was started",
    "setup-namespaces": "The restore fails, CRIU kills what it has started",
    "post-restore": "The restore fails, CRIU kills what it has started",
    "pre-resume": "The container is restored and gets its GPUs next",
    "post-resume": "CRIU had restored the container",
}


class Session:
    """What the agent does for one CRIU process."""

    def __init__(self, journal: Journal, load: Callable[[], Settings] = load_settings) -> None:
        self.journal = journal
        self._load = load
        self._lost, self._failed = LostContainer(journal), FailedRestore(journal)
        self._killed: Explanation | None = None  # why we have ended CRIU, which cannot know
        self._waiting: list[socket.socket] = []  # hooks that get their verdict once the container runs and all is done

    def log_fields(self) -> dict[str, str]:
        """Return what journald gets with every record of this session."""
        fields = {"OCIHOOK_SESSION": self.journal.session_id, "OCIHOOK_STAGE": self.journal.stage}
        if container := self.journal.container:
            fields |= {"OCIHOOK_CONTAINER": container.id, "OCIHOOK_CONTAINER_NAME": container.name}
            fields |= {"OCIHOOK_POD": container.pod_name, "OCIHOOK_NAMESPACE": container.pod_namespace}
        return {name: value for name, value in fields.items() if value}

    def handle(self, request: wire.Request) -> tuple[int, str]:
        """Handle one stage; the same stage again gets the same verdict.

        A stage that an agent began and did not end is undone and started over.
        """
        given = self.journal.verdict_of(request.stage)
        if given is not None:
            return given
        was_begun = self.journal.begin_stage(request.stage)
        status, message = self._run(request, was_begun=was_begun)
        self.journal.end_stage(request.stage, status, message)
        return status, message

    def _run(self, request: wire.Request, *, was_begun: bool) -> tuple[int, str]:
        stage = request.stage
        try:
            self._check_known(stage)
            if was_begun:
                log.warning("session %s: %s was interrupted, beginning again", self.journal.session_id, stage)
                undo_interrupted(self.journal, Patience())
            patience = self.journal.patience()
            directory = self._open_images(request)
            try:
                # CRIU's descriptor names the right directory in whatever mount namespace CRIU is.
                where = Path(f"/proc/self/fd/{directory}")
                message = _STAGES[stage](self.journal, patience, request, where, self._load)
            finally:
                patience.close()
                if directory >= 0:
                    os.close(directory)
        except (OcihookError, OSError) as error:
            self.journal.note_error(error, "failed")
            return self._refuse(request, plain(error))
        except Exception as error:
            log.exception("session %s: %s", self.journal.session_id, stage)
            self.journal.note_error(error, "failed")
            return self._refuse(request, f"{type(error).__name__}: {error} (a defect in ocihook)")
        if message:
            log.info("%s: %s", stage, message)
        return 0, message

    def _check_known(self, stage: str) -> None:
        """Check that an earlier stage is on record: without it nobody knows which memory CRIU was made to leave out."""
        earlier = _CONTINUES.get(stage)
        if earlier is not None and self.journal.verdict_of(earlier) is None:
            raise AgentError(
                f"there is no record of {earlier}: {wire.RUNTIME_DIR} was removed, or covered by a mount, meanwhile",
                hint="try again",
            )

    def _open_images(self, request: wire.Request) -> int:
        kept = self.journal.find(KeptFromEnd) if request.stage == wire.DETACHED_STAGE else None
        if kept is not None:
            return kept.open_images(self.journal)
        return (
            -1
            if request.stage in ("post-resume", wire.SNAPSHOT_STAGE)
            else os.open(request.image_dir, os.O_RDONLY | os.O_DIRECTORY)
        )

    def _refuse(self, request: wire.Request, error: str) -> tuple[int, str]:
        stage, container = request.stage, self.journal.container
        if is_given_up(self.journal):
            log.warning("the engine of container %s has given up on CRIU", container)
        about = f" of container {container}" if container else ""
        try:
            undo_all(self.journal, Patience(timeout_s=0))
        except OcihookError as undo_error:
            log.warning("%s", undo_error)  # tried again when CRIU is gone
        state = _STATE_AFTER_ERROR[stage]
        if stage in (*wire.DUMP_STAGES, wire.DETACHED_STAGE, wire.SNAPSHOT_STAGE):
            state = f"{state}, {self._what_became_of_it(request.init_pid)}"
        message = f"{stage}{about}: {error.rstrip('.')}. {state}"
        log.error("%s", message)
        return (0 if stage in ("pre-resume", "post-resume") else 1), message

    def _what_became_of_it(self, init_pid: int) -> str:
        if Process.find(init_pid) is None:
            return "but the container has died meanwhile: start it again, or restore a checkpoint of it"
        if any(effect.kind == "gpu-checkpointed" for effect in self.journal.effects):
            return "the container runs on as soon as it has its GPUs back"
        return "the container runs on"

    def finish(self) -> None:
        """Undo whatever is left, trying until it succeeds; then close the journal."""
        while True:
            try:
                undo_all(self.journal, Patience())
                self.journal.finish(self._keep)
            except (OcihookError, OSError) as error:
                log.error("%s", error)
            except Exception:
                log.exception("session %s", self.journal.session_id)
            else:
                return
            Patience().sleep(RETRY_S)

    def _keep(self, session_id: str, record: Mapping[str, Any]) -> None:
        settings = self._settings()
        history.keep(Path(settings.history_dir), session_id, record, limit=settings.history_kept)

    def _settings(self) -> Settings:
        try:
            return self._load()
        except ConfigError:  # it was reported when the session began
            return Settings()

    def serve(self, control: socket.socket) -> None:
        """Handle stages that arrive on `control` (a packet with the caller's connection) until CRIU is gone."""
        pidfd = self.journal.criu.open()
        if pidfd is not None:
            for effect in self.journal.effects:  # of an agent that was killed
                effect.take_over(self.journal)
            work_directory = open_work_directory(self.journal.criu.pid)
            attempt = Attempt(self.journal.criu, self.journal.runtime)
            self._watch(pidfd, control, attempt)
            note_end(self.journal, work_directory)  # at once: the engine removes the statistics
            self._explain(attempt, is_over=True)  # likewise: the runtime is about to end
            attempt.close()
            os.close(pidfd)
        control.close()  # the agent starts another session should a request still be in it
        log.info("session %s: CRIU has ended", self.journal.session_id)
        if self.journal.find(AwaitsMemory) is not None:
            self.handle(wire.Request(wire.SNAPSHOT_STAGE, self.journal.criu.pid, 0, ""))
        self.finish()

    def _watch(self, criu: int, control: socket.socket, attempt: Attempt) -> None:
        """Serve until CRIU has ended.

        Whether the runtime ended first, only events show that are in the order in which they happened: both may have
        ended by the time that a stage is done. epoll keeps that order (fs/eventpoll.c), poll(2) does not.
        """
        with select.epoll() as events:
            for fd in (criu, control.fileno(), attempt.runtime):
                if fd >= 0:
                    events.register(fd, select.EPOLLIN)
            while criu not in (ready := [fd for fd, _ in events.poll(self._look_s)]):  # waits: for CRIU, and its end
                if not ready:
                    self._finish_detached(attempt)
                    self._end_stuck(attempt)
                elif attempt.runtime in ready:
                    events.unregister(attempt.runtime)
                    self._give_up()
                    self._explain(attempt, is_over=False)
                else:
                    self._answer(control, attempt)
        if attempt.runtime in ready[: ready.index(criu)]:
            self._give_up()

    @property
    def _look_s(self) -> float | None:
        if is_kept_from_end(self.journal):
            return _LOOK_S
        return _LOOK_AT_CONTAINER_S if self._lost.may_be() or self._failed.may_be() else None

    def _give_up(self) -> None:
        """Note that the runtime has ended before CRIU."""
        self.journal.give_up()
        log.warning("the engine of container %s has given up on CRIU", self.journal.container)

    def _finish_detached(self, attempt: Attempt) -> None:
        """Do what was to wait for CRIU to detach, if it has."""
        if is_due(self.journal):
            verdict = self.handle(wire.Request(wire.DETACHED_STAGE, self.journal.criu.pid, 0, ""))
            if verdict[0] != 0:
                attempt.report(verdict[1])
            for connection in self._waiting:
                self._send(connection, verdict)

    def _end_stuck(self, attempt: Attempt) -> None:
        """End CRIU if its container was killed, or its restore has failed, and it does not end."""
        if self._failed.may_be() and attempt.has_given_up:
            self._failed.end_criu()
        if self._killed is None and self._lost.may_be() and (why := self._lost.end_criu()):
            self._killed = why
            attempt.report(message_of(self.journal, why))

    def _explain(self, attempt: Attempt, *, is_over: bool) -> None:
        """Report why CRIU has failed, if it has: to the engine, and once it is over in the journal and the log, too."""
        explanation, text = self._report(attempt, is_over=is_over)
        verdict = self.journal.verdict_of(wire.DETACHED_STAGE)
        is_killed_by_us = verdict is not None and verdict[0] != 0  # which CRIU's log cannot know
        if explanation is not None and is_over and not is_killed_by_us:
            if explanation.name != "ocihook":  # that we refused something is in the log, with its state
                log.error("%s", message_of(self.journal, explanation))
            kept = keep_log(Path(self._settings().history_dir) / "logs", self.journal.session_id, text)
            record_failure(self.journal, explanation, kept)
        attempt.release()

    def _report(self, attempt: Attempt, *, is_over: bool) -> tuple[Explanation | None, str]:
        """Report to the engine why CRIU has failed; return that, and CRIU's log."""
        explanation, text = attempt.explain()
        explanation = self._killed or explanation
        if explanation is not None and (is_over or explanation.name != "killed"):
            is_ours = explanation.name == "ocihook"
            attempt.report(explanation.what if is_ours else message_of(self.journal, explanation))
        return explanation, text

    def _answer(self, control: socket.socket, attempt: Attempt) -> None:
        packet, fds, _, _ = socket.recv_fds(control, wire.PACKET_BYTES, 1)  # waits: no, it is ready
        connection = socket.socket(fileno=fds[0])
        request = wire.Request.decode(packet)
        if request.stage in wire.RESTORE_STAGES:
            attempt.delay_exit()
        if request.stage == wire.DETACHED_STAGE and is_kept_from_end(self.journal):
            self._waiting.append(connection)
            return
        if request.stage == wire.FAILED_STAGE:
            dump.failed(self.journal)
        if request.stage in (wire.FAILED_STAGE, wire.DETACHED_STAGE):
            self._report(attempt, is_over=False)
            verdict = 0, ""
        else:
            verdict = self.handle(request)
        if verdict[0] != 0:
            attempt.report(verdict[1])
        self._send(connection, verdict)

    def _send(self, connection: socket.socket, verdict: tuple[int, str]) -> None:
        with connection:
            try:
                connection.send(wire.encode_verdict(*verdict))
            except OSError as error:
                log.warning("session %s: the hook has gone: %s", self.journal.session_id, error)
