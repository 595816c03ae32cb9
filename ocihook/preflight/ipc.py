"""Checks of objects of System V IPC, which CRIU dumps and may not restore, and of POSIX queues, which it refuses."""

import contextlib
import os
from collections.abc import Iterator

from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation

_LONGEST_BYTES = 8192  # criu/ipc_ns.c, MSGMAX


def _full_queue(seen: Observation) -> Iterator[Problem]:
    found = seen.sysv_objects
    for queue in found.queues:
        if queue.bytes > found.most_bytes:
            detail = (
                f"System V message queue {queue.id} holds {queue.bytes} bytes; a new one may hold {found.most_bytes}"
            )
            yield fail(
                f"{detail}: CRIU dumps and does not restore it",
                f"nsenter -t {seen.init_pid} -i sysctl kernel.msgmnb={queue.bytes}, or have messages read",
            )


def _long_message(seen: Observation) -> Iterator[Problem]:
    found = seen.sysv_objects
    for queue in found.queues:
        detail = f"System V message queue {queue.id} has a message longer than {_LONGEST_BYTES} bytes"
        remedy = "have the application read it before the dump, or send shorter ones"
        if queue.bytes > _LONGEST_BYTES * queue.messages:
            yield fail(f"{detail}, which CRIU dumps and does not restore", remedy)
        elif queue.bytes > _LONGEST_BYTES and found.longest_bytes > _LONGEST_BYTES:
            yield warn(detail.replace(" has ", " may have ") + ", which CRIU would not restore", remedy)


def _removed_segment(seen: Observation) -> Iterator[Problem]:
    removed = seen.sysv_objects.removed
    if removed:
        detail = f"{len(removed)} segments of System V shared memory are removed when no process has them (IPC_RMID)"
        yield warn(f"{detail}; restored ones stay", "remove them when their users have ended: ipcs -m, ipcrm -m ID")


def _message_queue(seen: Observation) -> Iterator[Problem]:
    for mount in seen.init.mounts:
        if mount.kind != "mqueue":
            continue
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(f"/proc/{seen.init_pid}/root{mount.place}"))
            if names:
                detail = f"{mount.place} has POSIX message queues ({', '.join(names[:3])}), which CRIU cannot dump"
                yield fail(
                    detail, f"have the application remove them (mq_unlink), or rm {mount.place}/{names[0]} in it"
                )


CHECKS = (
    Check(name="full-queue", find=_full_queue),
    Check(name="long-message", find=_long_message),
    Check(name="removed-segment", find=_removed_segment),
    Check(name="message-queue", find=_message_queue),
)
