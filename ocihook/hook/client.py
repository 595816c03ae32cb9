"""Asks the agent what to do at one stage, starts it where none is listening, and gives CRIU the verdict."""

import os
import sys
import time
from _socket import AF_UNIX, SOCK_SEQPACKET, socket  # the module `socket` would double this program's start-up time

from ocihook import wire

AGENT_START_S = 10.0
RETRY_S = 0.1
VERDICT_S = 3600.0  # packing a large image set takes minutes; an agent that dies is noticed at once
OURS = "ocihook"  # what every file of ours in an image directory begins with
ATTEMPTS = 5  # an agent killed at work is started again and finishes what it began


def main() -> int:
    """Handle the stage that the environment names; return 0 to let CRIU go on, 1 to veto."""
    stage = os.environ.get("CRTOOLS_SCRIPT_ACTION", "")
    image_dir = os.environ.get("CRTOOLS_IMAGE_DIR", "")
    init_pid = os.environ.get("CRTOOLS_INIT_PID", "")
    if stage not in wire.DUMP_STAGES + wire.RESTORE_STAGES:
        return 0
    request = wire.Request(stage, os.getppid(), int(init_pid) if init_pid.isdigit() else 0, image_dir)
    try:
        if os.geteuid() != 0:
            raise PermissionError("only root can checkpoint and restore containers with ocihook")
        status, message = ask(request.encode())
    except (OSError, wire.ProtocolError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        status, message = _without_agent(stage, image_dir, why, is_at_work=isinstance(error, TimeoutError))
    if message:
        sys.stderr.write(f"ocihook: {message}\n")  # into CRIU's log
    if stage == "post-dump" and status == 0 and _is_kept_from_end() and os.fork() == 0:
        _stay(wire.Request(wire.DETACHED_STAGE, request.criu_pid, request.init_pid, image_dir))
    return status


def _is_kept_from_end() -> bool:
    """Return whether CRIU, whose work directory this process is in, waits at its end, or will."""
    return os.path.lexists(wire.KEPT_NAME)


def _stay(request: wire.Request) -> None:
    """Body of a process that sees to it that CRIU can end, whatever becomes of the agent; never returns."""
    try:
        os.closerange(0, 1024)  # for whose end the engine may wait
        os.open("/dev/null", os.O_RDWR)
        os.dup(0)
        os.dup(0)
        os.setsid()
        criu = os.pidfd_open(request.criu_pid)
        try:
            ask(request.encode())
        except TimeoutError:
            pass  # there is an agent
        except (OSError, wire.ProtocolError):
            if _is_kept_from_end():
                import signal  # which is slow, and needed only here

                signal.pidfd_send_signal(criu, signal.SIGKILL)  # the dump fails, the container runs on
    finally:
        os._exit(0)


def ask(packet: bytes) -> tuple[int, str]:
    """Send the agent a request, and again if it dies over it; return its verdict.

    Raises:
        OSError: if there is no agent, or it gives none in time.
        ProtocolError: if it is of another version.
    """
    for _ in range(ATTEMPTS):
        connection = _connect()
        try:
            connection.settimeout(VERDICT_S)
            connection.send(packet)
            answer = connection.recv(wire.PACKET_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        finally:
            connection.close()
        if answer:
            return wire.decode_verdict(answer)
        time.sleep(RETRY_S)
    raise ConnectionError(f"the agent died {ATTEMPTS} times over this stage")


def wake() -> None:
    """Start an agent if none runs: members of gangs ask its coordinator.

    Raises:
        OSError: if none can be started.
    """
    _connect().close()


def _connect() -> socket:
    """Return a connection to the agent; start one if nobody listens."""
    path = f"{wire.RUNTIME_DIR}/{wire.SOCKET_NAME}"
    deadline = time.monotonic() + AGENT_START_S
    agent = 0
    while True:
        connection = socket(AF_UNIX, SOCK_SEQPACKET)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise ConnectionError(_why_none_listens(path)) from None
            # One that leaves in peace has met another agent, which may have been leaving itself.
            if not agent or _has_left(agent):
                agent = _start_agent()
            time.sleep(0.01)
        else:
            return connection


def _start_agent() -> int:
    """Start an agent that outlives this process. If two hooks do so at once, the second agent leaves by itself."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from ocihook.agent.server import main; main(detached=True)"
    site = sys.path[0]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-c", code, site],
        {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ],
        setsid=True,
    )


def _has_left(agent: int) -> bool:
    """Return whether an agent that was started here has left in peace.

    Raises:
        OSError: if it failed; another one would, too.
    """
    pid, status = os.waitpid(agent, os.WNOHANG)
    if pid and status:
        raise OSError(f"the agent cannot start; `{sys.executable} -m ocihook agent` says why")
    return bool(pid)


def _why_none_listens(path: str) -> str:
    """Return what keeps an agent from listening, for an error."""
    lock = f"{wire.RUNTIME_DIR}/{wire.LOCK_NAME}"
    try:
        with open(lock) as file:
            holder = file.read().strip()
    except OSError:
        holder = ""
    if holder and os.access(f"/proc/{holder}", os.F_OK):
        return f"process {holder} holds {lock}, but does not listen at {path}: end it"
    return f"no agent listens at {path} after {AGENT_START_S:g} s"


def _without_agent(stage: str, image_dir: str, error: str, *, is_at_work: bool) -> tuple[int, str]:
    """Decide alone. Nothing may be half done: where nothing of ours is, CRIU's images are complete.

    An agent that gives no verdict in time may still be at work; so it is in a dump that fails, and undoes what it did
    when CRIU is gone.
    """
    names = os.listdir(image_dir) if stage in ("pre-restore", "post-dump") else []
    has_ours = is_at_work or any(name.startswith(OURS) for name in names)
    if stage == "pre-restore" and has_ours:
        return 1, f"no agent unpacks the checkpoint ({error}); nothing was started; see `ocihook doctor`"
    if stage == "pre-dump" and os.geteuid() == 0:
        return 1, f"no agent ({error}); the dump is refused, the container runs on; see `ocihook doctor`"
    if stage == "post-restore":
        return 1, f"memory cannot be written, nor connections released ({error}); the restore fails"
    if stage == "post-dump" and has_ours:
        return 1, f"the checkpoint is incomplete ({error}); the dump fails, the container runs on"
    if stage == "post-dump":
        return 0, f"the checkpoint is complete but not packed: {error}"
    return 0, f"nothing was done in {stage}: {error}"
