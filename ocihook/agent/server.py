"""The agent's main process: takes requests and hands each to the process of its session.

One process a session, forked from a warm interpreter: sessions cannot disturb one another, each is single-threaded
(so it may fork workers), and all die with the agent, whose lock they hold. A restarted agent finds their journals.
"""

import contextlib
import importlib
import logging
import os
import select
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ocihook import wire
from ocihook.agent.listening import Listener, is_passed_by_systemd, turn_away, waiting
from ocihook.agent.session import Session
from ocihook.checkpoints.complete import complete_all, has_pending, unreported
from ocihook.checkpoints.prune import prune_by_policy, prunes_archives
from ocihook.checkpoints.pushing import has_due_pushes, next_push_s, push_due
from ocihook.config import Settings, load_settings
from ocihook.container.runtime_call import find_runtime
from ocihook.errors import AgentError, ConfigError, IntegrityError, OcihookError, StoreError, plain
from ocihook.gang.completion import report_complete
from ocihook.gang.epochs import all_gangs
from ocihook.gang.link import Link, load_http
from ocihook.gpu.driver import load_bindings
from ocihook.linux.cgroup import join_namespace_of_node, leave_cgroup
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.workers import die_with_parent, run_at_low_priority
from ocihook.log import add_fields, set_up_logging
from ocihook.net.netlink import load_messages
from ocihook.runtime.announced import has_announcements, has_due_announcements, tend_announcements
from ocihook.runtime.claims import has_claims, has_due_claims, tend_claims
from ocihook.runtime.gang_call import listen, members_that_listen
from ocihook.runtime.left_behind import has_due_left, has_left, tend_left
from ocihook.runtime.stop_record import stops_under_way
from ocihook.runtime.stopping import Stopping, remove_stale
from ocihook.session.journal import Journal, open_journals, remove_unwritten
from ocihook.session.lock import is_locked_by, lock_agent
from ocihook.store.store import Store

REQUEST_TIMEOUT_S = 5.0  # a hook sends its request at once
_UCRED = struct.Struct("3i")  # pid, uid, gid: socket(7), SO_PEERCRED
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MOST_SCRAPES = 4  # at a time
_REPORT_S = 60.0  # for a coordinator to hear of complete checkpoints
_ASK_AGAIN_S = 10.0  # members of a gang that wait ask every 2 s (gang/coordinator.py)
_SCRAPE_TIMEOUT_S = 30
_LEAST_WAIT_S = 1.0  # from one attempt to push, or to be an agent, to the next, whatever becomes of it
_STOP = "stop of "  # what a child that stops a container is called, with the container's id

log = logging.getLogger(__name__)


class _Background(NamedTuple):
    """Work beside sessions."""

    name: str
    is_due: Callable[[Settings], bool]
    act: Callable[[Settings], object]
    is_waited_for: bool = False


def _complete(settings: Settings) -> None:
    complete_all(settings)
    prune_by_policy(settings)
    patience = Patience(timeout_s=_REPORT_S)
    for domain, checkpoint_id in unreported(Store.of(settings)):  # by this process, or by one that needed it at once
        try:
            has_answered = report_complete(domain.read(checkpoint_id).container, Link.of(settings), patience)
        except (StoreError, IntegrityError) as error:  # removed just now, or damaged
            log.warning("checkpoint %s in domain %s is not reported: %s", checkpoint_id, domain.name, error)
            continue
        if has_answered:  # else it is reported after the next session, or by the next agent
            domain.marks.note_reported(checkpoint_id)


def _has_to_complete(settings: Settings) -> bool:
    store = Store.of(settings)
    return has_pending(store) or bool(unreported(store))


def _tend(settings: Settings) -> None:
    tend_announcements(settings)  # first: containers elsewhere wait for it
    tend_left(settings)
    tend_claims(Path(settings.store_dir), settings.remote)


def _holds_claims(settings: Settings) -> bool:
    return has_claims(Path(settings.store_dir)) or has_announcements(settings) or has_left(settings)


def _has_listeners(settings: Settings) -> bool:
    return any(True for _ in members_that_listen(settings))


_STORE = _Background("pending checkpoints", _has_to_complete, _complete)
_PUSH = _Background("pushes", lambda settings: has_due_pushes(Store.of(settings)), push_due)
_CLAIMS = _Background(
    "claims of checkpoints",
    lambda settings: (
        has_due_announcements(settings) or has_due_left(settings) or has_due_claims(Path(settings.store_dir))
    ),
    _tend,
    is_waited_for=True,  # on a node whose processors are busy an announcement would expire
)
_ARCHIVES = _Background("retention of archives", prunes_archives, prune_by_policy)
_CALLS = _Background("calls of gangs", _has_listeners, lambda _: listen(load_settings), is_waited_for=True)


class Agent:
    """Accepts requests, keeps one child for each session, leaves when idle."""

    def __init__(
        self,
        listener: Listener,
        runtime_dir: Path,
        load: Callable[[], Settings],
        metrics: socket.socket | None = None,
        gangs: Listener | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours  # the place where clients look for an agent
        self._runtime_dir = runtime_dir
        self._load = load
        self._controls: dict[str, socket.socket] = {}  # by session id
        self._children: dict[int, tuple[str, int]] = {}  # pidfd -> session id, pid
        self._background: dict[int, tuple[_Background, int]] = {}  # pidfd -> what is done, pid
        self._again: set[_Background] = set()  # there may be checkpoints that these have not seen
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._metrics = metrics
        self._scrapes: dict[int, int] = {}  # pidfd -> pid of what answers one
        if metrics is not None:
            self._selector.register(metrics, selectors.EVENT_READ)
        self._gangs = gangs
        self._coordinator: tuple[int, int] | None = None  # pidfd and pid of what answers members of gangs
        if gangs is not None:
            self._selector.register(gangs.socket, selectors.EVENT_READ)
        self._asked: int | None = None  # a pipe with a byte for each of their requests
        self._asked_until_s = 0.0  # by the monotonic clock: whoever has asked may ask again
        self._push_at_s: float | None = None  # by the monotonic clock: what could not be pushed is tried again
        self._settings: Settings | None = None  # that the agent has worked by, and so where claims are on record
        self._is_stopping = False

    def run(self, idle_timeout_s: float) -> None:
        """Serve until there has been nothing to do for so long, or until it is stopped and no session is left."""
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: self._stop())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        remove_unwritten(self._runtime_dir)
        for path in open_journals(self._runtime_dir):
            self._adopt(path)
        with contextlib.suppress(ConfigError):  # each checkpoint reports it
            remove_stale(self._load())
        self._take_over_stops()
        self._start_background()
        idle_since = time.monotonic()
        while self._is_needed(time.monotonic() - idle_since < idle_timeout_s):
            if not self._is_stopping or self._children:
                self._see_to_be_found()
            if self._push_at_s is not None and time.monotonic() >= self._push_at_s and not self._is_running(_PUSH):
                self._start_background(_PUSH)
            if self._settings is not None and not self._is_running(_CLAIMS) and _CLAIMS.is_due(self._settings):
                self._start_background(_CLAIMS)
            for key, _ in self._selector.select(timeout=1.0):
                self._serve(key)
                idle_since = time.monotonic()
        if self._coordinator is not None:
            os.kill(self._coordinator[1], signal.SIGKILL)  # it shares the agent's lock, which the next one needs
            os.waitpid(self._coordinator[1], 0)

    def _serve(self, key: selectors.SelectorKey) -> None:
        """Do what a descriptor is ready for."""
        if key.fileobj is self._listener.socket:
            self._take(self._listener.socket.accept()[0])
        elif key.fileobj is self._metrics:
            self._accept_scrape()
        elif self._gangs is not None and key.fileobj is self._gangs.socket:
            self._start_coordinator()
        elif key.fd == self._asked:
            if os.read(key.fd, wire.PACKET_BYTES):
                self._asked_until_s = time.monotonic() + _ASK_AGAIN_S
            else:  # the coordinator has ended
                self._selector.unregister(key.fd)
        elif self._coordinator is not None and key.fd == self._coordinator[0]:
            self._reap_coordinator()
        elif key.fd in self._scrapes:
            self._reap_scrape(key.fd)
        elif key.fd in self._background:
            self._reap_background(key.fd)
        else:
            self._reap(key.fd)
            self._start_background(_STORE, _PUSH, _CALLS, _ARCHIVES)
            if not self._children:  # nobody waits; it may have been the first gang
                with contextlib.suppress(ConfigError):  # each checkpoint reports it
                    load_for_members(self._load())

    def _is_needed(self, is_recent: bool) -> bool:  # noqa: FBT001 - its only argument
        if self._is_stopping:
            return bool(self._children)  # what is pending stays so, for the next agent
        is_asked = time.monotonic() < self._asked_until_s
        return (
            bool(self._children or self._background or self._metrics or is_asked)
            or is_recent
            or self._push_at_s is not None
            or (self._settings is not None and _holds_claims(self._settings))
        )

    def _stop(self) -> None:
        log.info("stopping; %d sessions will end first", len(self._children))
        self._is_stopping = True

    def _see_to_be_found(self) -> None:
        """Make sure that clients find this agent, or leave so that they start another one: two looks a second or so."""
        listeners = [self._listener, *filter(None, [self._gangs])]
        if all(listener.is_found for listener in listeners):
            return
        if not self._is_ours():
            self._leave(f"{self._listener.path.parent} was removed, or another file system covers it")
        elif self._listener.is_replaced and not self._children:  # as by systemd, which now listens there
            self._leave(f"{self._listener.path} leads to another process")
        else:
            self._bind_again()

    def _leave(self, why: str) -> None:
        if not self._is_stopping:
            log.warning("%s: this agent leaves once its %d sessions have ended", why, len(self._children))
        self._is_stopping = True

    def _bind_again(self) -> None:
        try:
            if not self._listener.is_found:
                former = self._listener.bind_again()
                log.warning("%s was removed or replaced; made again", self._listener.path)
                self._selector.register(self._listener.socket, selectors.EVENT_READ)
                self._selector.unregister(former)
                with former:
                    for connection in waiting(former):
                        self._take(connection)
            if self._gangs is not None and not self._gangs.is_found:
                self._bind_gangs_again(self._gangs)
        except OSError as error:
            self._leave(f"{self._listener.path} is missing and cannot be made again ({error})")

    def _bind_gangs_again(self, gangs: Listener) -> None:
        former = gangs.bind_again()
        log.warning("%s was removed or replaced; made again", gangs.path)
        if self._coordinator is None:
            self._selector.unregister(former)
            self._selector.register(gangs.socket, selectors.EVENT_READ)
        else:  # it listens where no member finds it
            signal.pidfd_send_signal(self._coordinator[0], signal.SIGKILL)
        former.close()

    def _take(self, connection: socket.socket) -> None:
        """Hand a request to the process of its session."""
        with connection:
            try:
                request = self._read_request(connection)
                if request is None:
                    self._start_background(_CALLS)
                    return
                control = self._session_for(request)
            except (OcihookError, wire.ProtocolError, OSError) as error:
                log.error("request refused: %s", error)
                with contextlib.suppress(OSError):
                    connection.send(wire.encode_verdict(1, f"the agent refused the request: {plain(error)}"))
                return
            # A session that has just died takes nothing: the hook then finds its connection closed and asks again.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(control, [request.encode()], [connection.fileno()])

    def _start_background(self, *kinds: "_Background") -> None:
        """Do background work, in one process at a time of each kind."""
        for kind in kinds or (_STORE, _PUSH, _CALLS):
            if self._is_running(kind):
                self._again.add(kind)
                continue
            if self._is_stopping:
                continue
            try:
                settings = self._load()
                self._settings = settings
                if kind is _PUSH:
                    self._push_at_s = self._next_push_at_s(settings)
                if not kind.is_due(settings):
                    continue
            except (OcihookError, OSError) as error:
                log.error("%s: %s", kind.name, error)
                continue
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._be_background(kind, settings, parent)
            pidfd = os.pidfd_open(pid)
            self._background[pidfd] = kind, pid
            self._selector.register(pidfd, selectors.EVENT_READ)

    def _next_push_at_s(self, settings: Settings) -> float | None:
        wait_s = next_push_s(Store.of(settings))
        return None if wait_s is None else time.monotonic() + max(wait_s, _LEAST_WAIT_S)

    def _is_running(self, kind: "_Background") -> bool:
        return any(running is kind for running, _ in self._background.values())

    def _be_background(self, kind: "_Background", settings: Settings, parent: int) -> None:
        """Body of a process that does such work; never returns."""
        try:
            die_with_parent(parent)
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)  # it can be interrupted at any point
            self._let_go()
            if not kind.is_waited_for:
                run_at_low_priority()
            kind.act(settings)
        except Exception:
            log.exception("%s", kind.name)
        finally:
            logging.shutdown()
            os._exit(0)

    def _reap_background(self, pidfd: int) -> None:
        kind, pid = self._background.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        if kind in self._again:
            self._again.discard(kind)
            self._start_background(kind)
        if kind is _STORE:
            self._start_background(_PUSH)
        if kind is _PUSH and not self._is_running(_PUSH):
            with contextlib.suppress(OcihookError, OSError):  # reported when it was loaded before
                self._push_at_s = self._next_push_at_s(self._load())

    def _accept_scrape(self) -> None:
        """Serve metrics by a process of its own: the agent waits for nobody."""
        assert self._metrics is not None
        try:
            connection, _ = self._metrics.accept()
        except OSError as error:  # whoever asked has gone
            log.warning("metrics: %s", error)
            return
        with connection:
            if len(self._scrapes) >= _MOST_SCRAPES:
                return
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._be_scrape(connection, parent)
        pidfd = os.pidfd_open(pid)
        self._scrapes[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _be_scrape(self, connection: socket.socket, parent: int) -> None:
        """Body of the process that serves metrics; never returns."""
        try:
            die_with_parent(parent)
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(_SCRAPE_TIMEOUT_S)  # which ends this process
            self._let_go()
            run_at_low_priority()
            from ocihook.agent.metrics import answer  # loaded only where somebody is to ask

            answer(connection, self._load(), self._runtime_dir)
        except (OcihookError, OSError) as error:
            log.error("metrics: %s", error)
        except Exception:
            log.exception("metrics")
        finally:
            logging.shutdown()
            os._exit(0)

    def _reap_scrape(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(self._scrapes.pop(pidfd), 0)

    def _start_coordinator(self) -> None:
        """Have members of gangs answered by a process of its own, from the first of them on."""
        assert self._gangs is not None
        self._selector.unregister(self._gangs.socket)
        parent = os.getpid()
        asked, asking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(asked)
            self._be_coordinator(self._gangs.socket, parent, asking)
        os.close(asking)
        self._asked = asked
        self._selector.register(asked, selectors.EVENT_READ)
        pidfd = os.pidfd_open(pid)
        self._coordinator = pidfd, pid
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _be_coordinator(self, gangs: socket.socket, parent: int, asking: int) -> None:
        """Body of the process that coordinates gangs; never returns."""

        def note_request() -> None:
            with contextlib.suppress(OSError):  # a full pipe says enough
                os.write(asking, b"\0")

        try:
            die_with_parent(parent)
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # it ends with the agent, when all sessions have
            self._gangs = self._asked = None
            self._let_go()
            from ocihook.gang.server import serve  # loaded only where there are gangs

            serve(gangs, Path(_settings().gang_dir), asked=note_request)
        except Exception:
            log.exception("the coordinator of gangs")
        finally:
            logging.shutdown()
            os._exit(1)

    def _reap_coordinator(self) -> None:
        assert self._coordinator is not None
        assert self._gangs is not None
        pidfd, pid = self._coordinator
        self._coordinator = None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        if self._asked is not None:
            with contextlib.suppress(KeyError):  # its end was noticed before
                self._selector.unregister(self._asked)
            os.close(self._asked)
            self._asked = None
        log.error("the coordinator of gangs has ended; open dumps and restores of gangs end, too")
        self._selector.register(self._gangs.socket, selectors.EVENT_READ)

    def _let_go(self) -> None:
        """Close in a child what is the agent's."""
        self._selector.close()
        self._listener.socket.close()
        for control in self._controls.values():
            control.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._gangs is not None:
            self._gangs.socket.close()
        if self._asked is not None:
            os.close(self._asked)
        if self._coordinator is not None:
            os.close(self._coordinator[0])
        for pidfd in [*self._children, *self._scrapes, *self._background]:
            os.close(pidfd)

    def _read_request(self, connection: socket.socket) -> wire.Request | None:
        """Return what is asked for; None if nothing is: an agent was to be here, for a member of a gang."""
        _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != 0:
            raise AgentError(f"user {uid} is not root")
        connection.settimeout(REQUEST_TIMEOUT_S)
        packet = connection.recv(wire.PACKET_BYTES)
        if not packet:
            return None
        request = wire.Request.decode(packet)
        known = (*wire.DUMP_STAGES, wire.DETACHED_STAGE, *wire.RESTORE_STAGES, wire.STOP_STAGE)
        if request.stage not in known:
            raise wire.ProtocolError(f"unknown stage {request.stage!r}")
        return request

    def _session_for(self, request: wire.Request) -> socket.socket:
        if request.stage == wire.STOP_STAGE:
            if _STOP + request.image_dir not in self._controls:
                self._start_stop(request.image_dir)
            return self._controls[_STOP + request.image_dir]
        criu = Process.find(request.criu_pid)
        if criu is None:
            raise AgentError(f"process {request.criu_pid}, which should be CRIU, is gone")
        session_id = f"{criu.pid}-{criu.start_ticks}"
        if session_id not in self._controls:
            path = self._runtime_dir / "sessions" / f"{session_id}.json"
            self._start_session(
                Journal.load(path) if path.exists() else Journal.create(self._runtime_dir, criu, find_runtime(criu.pid))
            )
        return self._controls[session_id]

    def _take_over_stops(self) -> None:
        """Continue stops whose process was killed; one that ended well has nothing left to do."""
        for container_id in stops_under_way():
            if _STOP + container_id not in self._controls:
                self._start_stop(container_id)

    def _adopt(self, path: Path) -> None:
        """Take over a session whose agent died."""
        try:
            journal = Journal.load(path)
        except OcihookError as error:
            log.error("%s", error)
            return
        log.warning("taking over session %s, container %s", journal.session_id, journal.container)
        self._start_session(journal)

    def _start_session(self, journal: Journal) -> None:
        session = Session(journal, self._load)
        self._start(journal.session_id, session.serve, session.log_fields)

    def _start_stop(self, container_id: str) -> None:
        """Have a container that is stopped checkpointed.

        Raises:
            OcihookError: if none of this id is to be stopped.
        """
        stopping = Stopping(container_id, self._load)
        self._start(_STOP + container_id, partial(_serve_stop, stopping), stopping.log_fields)

    def _start(self, name: str, serve: Callable[[socket.socket], None], fields: Callable[[], dict[str, str]]) -> None:
        """Start a process that handles requests for something."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be(name, partial(serve, theirs), fields, parent)
        theirs.close()
        pidfd = os.pidfd_open(pid)
        self._controls[name] = ours
        self._children[pidfd] = (name, pid)
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _be(self, name: str, serve: Callable[[], None], fields: Callable[[], dict[str, str]], parent: int) -> None:
        """Body of such a process; never returns."""
        status = 1
        try:
            die_with_parent(parent)
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # a checkpoint that runs is finished
            self._let_go()
            add_fields(fields)
            serve()
            status = 0
        except Exception:
            log.exception("session %s", name)
        finally:
            logging.shutdown()
            os._exit(status)

    def _reap(self, pidfd: int) -> None:
        session_id, pid = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._controls.pop(session_id).close()
        if session_id.startswith(_STOP):
            self._take_over_stops()
            return
        path = self._runtime_dir / "sessions" / f"{session_id}.json"
        if status != 0 and path.exists():
            log.error("session %s ended with wait status %d; its journal is taken over", session_id, status)
            self._adopt(path)


def _serve_stop(stopping: Stopping, control: socket.socket) -> None:
    """Stop a container, then answer all who have asked for it; another process answers who asks later."""
    verdict = stopping.finish()
    control.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            _, fds, _, _ = socket.recv_fds(control, wire.PACKET_BYTES, 1)  # waits: no, it does not block
            with socket.socket(fileno=fds[0]) as connection, contextlib.suppress(OSError):
                connection.send(wire.encode_verdict(*verdict))
    stopping.delete_if_left()


def main(*, detached: bool = False, runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> None:
    """Run an agent: on systemd's socket if there is one, else on a socket of its own; leave if another one runs."""
    os.umask(0o077)
    os.chdir("/")
    join_namespace_of_node()
    runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    substitute = _leave_substitute(runtime_dir) if detached else 0
    try:
        _serve(runtime_dir, detached=detached)
    finally:
        if substitute:
            os.kill(substitute, signal.SIGKILL)


def _leave_substitute(runtime_dir: Path) -> int:
    """Leave a process that becomes the next agent if this one is killed in the middle of something; return its pid.

    Where systemd starts agents, it does that itself (Restart=on-failure). Else nobody would: of a dump whose CRIU and
    runtime were killed, too, no further stage calls an agent, and what it has frozen would stay so.
    """
    while True:
        agent = Process.find(os.getpid())
        substitute = os.fork()
        if substitute != 0:
            return substitute
        os.setsid()  # whoever kills the agent's group does not mean this one
        leave_cgroup()
        pidfd = agent.open() if agent is not None else None
        if pidfd is not None:
            select.select([pidfd], [], [])  # waits: for as long as the agent lives
            os.close(pidfd)
        if not _has_work_left(runtime_dir):
            os._exit(0)
        time.sleep(_LEAST_WAIT_S)  # waits: what kills each agent at once must not keep the node busy


def _has_work_left(runtime_dir: Path) -> bool:
    """Return whether there is something that only an agent ends."""
    if open_journals(runtime_dir) or any(True for _ in stops_under_way()):
        return True
    try:
        return _holds_claims(load_settings())
    except (OcihookError, OSError):
        return False


def _serve(runtime_dir: Path, *, detached: bool) -> None:
    set_up_logging(logging.INFO, runtime_dir / "agent.log" if detached else None)
    lock = lock_agent(runtime_dir)
    if lock is None:
        log.info("another agent runs in %s", runtime_dir)
        if is_passed_by_systemd():
            turn_away()
        return
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())  # for people
    if detached:
        leave_cgroup()
    settings = _settings()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # until `run` heeds them: else sockets would stay behind
    metrics = _metrics_listener(settings.metrics_address)
    listener = _listener(runtime_dir)  # last: a client that reaches it can read metrics, too
    if metrics is not None:
        importlib.import_module("ocihook.agent.metrics")  # its files may be another version's when it is asked
    gangs = Listener(runtime_dir / wire.GANG_SOCKET_NAME, socket.SOCK_STREAM, 1024)
    load_for_members(settings)
    load_bindings()  # while the files that this agent was started from are still there
    is_ours = partial(is_locked_by, runtime_dir, lock)
    try:
        Agent(listener, runtime_dir, load_settings, metrics, gangs, is_ours).run(settings.idle_timeout_s)
    finally:
        gangs.close()
        if metrics is not None:
            metrics.close()
        listener.close()
        os.close(lock)


def load_for_members(settings: Settings) -> None:
    """Where there are gangs, import what each member needs: they come at once, each with a process of its own."""
    if settings.coordinator or any(all_gangs(Path(settings.gang_dir))):
        load_http()
        load_messages()


def _listener(runtime_dir: Path) -> Listener:
    """Return the socket to accept requests on."""
    make = Listener.of_systemd if is_passed_by_systemd() else Listener
    return make(runtime_dir / wire.SOCKET_NAME, socket.SOCK_SEQPACKET, 64)


def _metrics_listener(address: str) -> socket.socket | None:
    """Return the socket to serve metrics on; None if none is wanted, or there can be none."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    is_unix = host == "unix"
    try:
        if is_unix and Path(port).is_socket():  # stale: there is one agent
            Path(port).unlink()
        family = socket.AF_UNIX if is_unix else socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(port if is_unix else (host.strip("[]"), int(port)))
            listener.listen()
            listener.setblocking(False)
            stack.pop_all()
    except (OSError, OverflowError) as error:  # no reason not to checkpoint
        log.error("metrics cannot be served on %s: %s", address, error)
        return None
    return listener


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError as error:  # each checkpoint reports it; it is no reason not to listen
        log.error("%s", error)
        return Settings()
