"""Gives CRIU the state that restored tasks inherit from it, and that nothing outside can set later.

CRIU's process waits for us before it makes the first task. It is made to call the kernel there, so that what CRIU never
sets is right in all tasks from the beginning:
- setgroups(2): CRIU sets the groups of a task that has some. One that has none keeps those of CRIU's caller.
- keyctl(2): tasks have the session keyring of CRIU's caller, with keys of the node. They get an empty one.
- personality(2): no image has it.
"""

import contextlib
from typing import NamedTuple

from ocihook.audit.state import ContainerState
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import status_fields
from ocihook.linux.ptrace import HeldThread, find_call_instruction

_JOIN_SESSION_KEYRING = 1  # linux/keyctl.h
# linux/personality.h: ADDR_NO_RANDOMIZE, ADDR_COMPAT_LAYOUT, SHORT_INODE, WHOLE_SECONDS, STICKY_TIMEOUTS. The others
# would change what CRIU itself maps, or the version of the kernel that it reads.
_HARMLESS = 0x0040000 | 0x0200000 | 0x1000000 | 0x2000000 | 0x4000000


class InheritedCall(NamedTuple):
    """A system call that CRIU is made to make."""

    name: str
    arguments: tuple[int, ...]


def inherited_calls(recorded: ContainerState, criu_groups: str) -> list[InheritedCall]:
    """Return what CRIU must call so that tasks inherit what they had.

    Args:
        recorded: the state at the dump.
        criu_groups: the supplementary groups of CRIU.
    """
    calls = [InheritedCall("keyctl", (_JOIN_SESSION_KEYRING, 0))]
    if criu_groups:
        calls.append(InheritedCall("setgroups", (0, 0)))
    found = {int(value, 16) for value in personalities(recorded)}
    if len(found) == 1:
        value = found.pop()
        if value and not value & ~_HARMLESS:
            calls.append(InheritedCall("personality", (value,)))
    return calls


def personalities(state: ContainerState) -> set[str]:
    """Return those of first threads: CRIU makes other threads from these."""
    return {process.threads.get(pid, {}).get("personality", "0") for pid, process in state.processes.items()}


def make_inherit(criu_pid: int, recorded: ContainerState, patience: Patience) -> None:
    """Have CRIU call what `inherited_calls` names; one that the kernel refuses shows in the later comparison.

    Raises:
        OSError, TraceError: if CRIU cannot be stopped for that; it has not changed.
        GivenUp: if it has ended.
    """
    calls = inherited_calls(recorded, status_fields(criu_pid).get("Groups", ""))
    instruction = find_call_instruction(criu_pid)
    thread = HeldThread(criu_pid, patience)
    try:
        with thread.without_filter():
            for name, arguments in calls:
                with contextlib.suppress(OSError):  # a kernel without keyrings, or one that forbids them
                    thread.make_call(name, instruction, *arguments, patience=patience)
    finally:
        thread.release()
