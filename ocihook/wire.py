"""What hook and agent say to each other: one packet each way over a Unix socket, NUL-separated.

Imports nothing, because the hook's start-up time is downtime.

Request: version, stage, CRIU's pid, init's pid ("" if CRIU does not know it yet), image directory.
Verdict: "0" (go on) or "1" (veto), message.
"""

VERSION = b"1"
RUNTIME_DIR = "/run/ocihook"
SOCKET_NAME = "agent.sock"
LOCK_NAME = "agent.lock"  # held by the agent, with its pid in it
CONTAINERS_NAME = "containers"  # in RUNTIME_DIR: a directory for each container of the runtime handler, by its id
CONTAINER_RECORD_NAME = "container.json"  # in it: who it is
HANDLER_LOG_NAME = "handler.log"  # in RUNTIME_DIR, of the runtime handler and of the OCI hook
RESTORING_NAME = "restoring.json"  # in it: the handler restores it, and holds it until it is started
GANG_SOCKET_NAME = "gang.sock"  # of this node's coordinator of gangs, which speaks HTTP; not for the hook
PACKET_BYTES = 16384

# Without the inventory, which CRIU writes last, it unlocks the network of a dump that has failed, and then releases the
# container. The cause is reported then, before the runtime reports anything, of which containerd shows the first line.
FAILED_STAGE = "network-unlock"
DUMP_STAGES = ("pre-dump", "post-dump", FAILED_STAGE)
DETACHED_STAGE = "detached"  # none of CRIU's: it has detached from a container that runs on, and is kept from its end
SNAPSHOT_STAGE = "snapshot"  # none of CRIU's: it has ended, and memory is read of which its dump took a snapshot
KEPT_NAME = "stats-dump.kept"  # in CRIU's work directory as long as it is kept from its end; see criu/ending.py
STOP_STAGE = (
    "stop"  # none of CRIU's: the runtime handler has a container checkpointed; its id is in place of a directory
)
SELF_TEST_STAGE = "self-test"  # none of CRIU's: `ocihook doctor` sees with it whether the hook can start
RESTORE_STAGES = ("pre-restore", "setup-namespaces", "post-restore", "pre-resume", "post-resume")


class ProtocolError(Exception):
    """A packet is not what it must be; hook and agent are of different versions, or somebody else is talking."""


class Request:
    """One stage that CRIU has reached."""

    __slots__ = ("criu_pid", "image_dir", "init_pid", "stage")

    def __init__(self, stage: str, criu_pid: int, init_pid: int, image_dir: str) -> None:
        self.stage = stage
        self.criu_pid = criu_pid
        self.init_pid = init_pid  # 0: not known yet
        self.image_dir = image_dir

    def encode(self) -> bytes:
        """Return the packet."""
        init_pid = str(self.init_pid) if self.init_pid else ""
        parts = (self.stage, str(self.criu_pid), init_pid, self.image_dir)
        return b"\0".join((VERSION, *(part.encode("utf-8", "surrogateescape") for part in parts)))

    @classmethod
    def decode(cls, packet: bytes) -> "Request":
        """Read a packet.

        Raises:
            ProtocolError: if it is not a request of this version.
        """
        parts = packet.split(b"\0")
        if len(parts) != 5 or parts[0] != VERSION:
            raise ProtocolError(f"not a request of version {VERSION.decode()}")
        stage, criu_pid, init_pid, image_dir = (part.decode("utf-8", "surrogateescape") for part in parts[1:])
        if not criu_pid.isascii() or not criu_pid.isdigit() or not (init_pid or "0").isdigit():
            raise ProtocolError("a pid is not a number")
        return cls(stage, int(criu_pid), int(init_pid or "0"), image_dir)


def encode_verdict(status: int, message: str) -> bytes:
    """Return the packet that answers a request: status 0 lets CRIU go on, 1 is a veto."""
    return b"%d\0" % status + message.encode("utf-8", "replace")[: PACKET_BYTES - 16]


def decode_verdict(packet: bytes) -> tuple[int, str]:
    """Read a verdict: (status, message).

    Raises:
        ProtocolError: if it is none.
    """
    status, separator, message = packet.partition(b"\0")
    if status not in {b"0", b"1"} or not separator:
        raise ProtocolError("not a verdict")
    return int(status), message.decode("utf-8", "replace")
