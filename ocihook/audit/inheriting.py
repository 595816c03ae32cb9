"""Gives CRIU the state that restored tasks inherit from it, and that nothing outside can set later.

CRIU's process waits for us before it makes the first task. It is made to call the kernel there, so that what CRIU never
sets is right in all tasks from the beginning:
- setgroups(2): CRIU sets the groups of a task that has some. One that has none keeps those of CRIU's caller.
- keyctl(2): tasks have the session keyring of CRIU's caller, with keys of the node. They get an empty one.
- personality(2), set_mempolicy(2), what prctl(2) says of speculation: no image has them.
"""

import contextlib
import sys
from typing import NamedTuple

from ocihook.audit.mapped import TASK_POLICY
from ocihook.audit.state import ContainerState
from ocihook.linux.memory import read_mappings, read_memory
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import status_fields
from ocihook.linux.ptrace import HeldThread, find_call_instruction
from ocihook.linux.task_state import parse_cpus

_JOIN_SESSION_KEYRING = 1  # linux/keyctl.h
# linux/personality.h: ADDR_NO_RANDOMIZE, ADDR_COMPAT_LAYOUT, SHORT_INODE, WHOLE_SECONDS, STICKY_TIMEOUTS. The others
# would change what CRIU itself maps, or the version of the kernel that it reads.
_HARMLESS = 0x0040000 | 0x0200000 | 0x1000000 | 0x2000000 | 0x4000000
# linux/mempolicy.h; the kernel reads one bit of a mask less than `maxnode` says.
_POLICIES = {"prefer": 1, "bind": 2, "interleave": 3, "prefer (many)": 5, "weighted interleave": 6}
_POLICY_FLAGS = {"": 0, "static": 1 << 15, "relative": 1 << 14}
_MOST_NODES = 64
# linux/prctl.h, and what proc_pid_status(5) calls them: only what is switched off.
_SET_SPECULATION = 53
_SPECULATIONS = {0: "Speculation_Store_Bypass", 1: "SpeculationIndirectBranch"}
_SPECULATION_CONTROLS = {
    "thread mitigated": 4,
    "thread force mitigated": 8,
    "conditional disabled": 4,
    "conditional force disabled": 8,
}
_SEARCHED_BYTES = 1 << 20  # of each mapping


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
    for number, name in _SPECULATIONS.items():
        controls = {_SPECULATION_CONTROLS.get(value, 0) for value in _of_first_threads(recorded, name)}
        if len(controls) == 1 and (control := controls.pop()):
            calls.append(InheritedCall("prctl", (_SET_SPECULATION, number, control, 0, 0)))
    return calls


class NumaPolicy(NamedTuple):
    """A policy as set_mempolicy(2) takes it."""

    mode: int
    nodes: int  # a bit for each

    @classmethod
    def of_text(cls, text: str) -> "NumaPolicy | None":
        """Return what numa_maps names so ("interleave=static:0-3"); None if it is another."""
        name, _, nodes = text.partition(":")
        name, _, flag = name.partition("=")
        if name not in _POLICIES or flag not in _POLICY_FLAGS:
            return None
        numbers = parse_cpus(nodes)  # a list of the same form
        if not numbers or max(numbers) >= _MOST_NODES:
            return None
        return cls(_POLICIES[name] | _POLICY_FLAGS[flag], sum(1 << number for number in numbers))


def numa_policy(recorded: ContainerState) -> NumaPolicy | None:
    """Return the policy that all processes had; None if that is the usual one, or they had several."""
    found = {process.own.get(TASK_POLICY, "") for process in recorded.processes.values()}
    return NumaPolicy.of_text(found.pop()) if len(found) == 1 else None


def _find_in_memory(pid: int, wanted: bytes) -> int:
    """Return where a process has some bytes, in a file that it has mapped; 0 if it has not."""
    content = bytearray(_SEARCHED_BYTES)
    for mapping in read_mappings(pid):
        if mapping.inode and mapping.mode.startswith("r"):
            size = read_memory(pid, memoryview(content)[: mapping.span.size_bytes], mapping.span.start)
            if (at := content.find(wanted, 0, size)) >= 0:
                return mapping.span.start + at
    return 0


def personalities(state: ContainerState) -> set[str]:
    """Return those of first threads: CRIU makes other threads from these."""
    return {value or "0" for value in _of_first_threads(state, "personality")}


def _of_first_threads(state: ContainerState, name: str) -> set[str]:
    return {process.threads.get(pid, {}).get(name, "") for pid, process in state.processes.items()}


def make_inherit(criu_pid: int, recorded: ContainerState, patience: Patience) -> None:
    """Have CRIU call what `inherited_calls` names; one that the kernel refuses shows in the later comparison.

    Raises:
        OSError, TraceError: if CRIU cannot be stopped for that; it has not changed.
        GivenUp: if it has ended.
    """
    calls = inherited_calls(recorded, status_fields(criu_pid).get("Groups", ""))
    policy = numa_policy(recorded)
    if policy is not None and (at := _find_in_memory(criu_pid, policy.nodes.to_bytes(8, sys.byteorder))):
        calls.append(InheritedCall("set_mempolicy", (policy.mode, at, _MOST_NODES + 1)))
    instruction = find_call_instruction(criu_pid)
    thread = HeldThread(criu_pid, patience)
    try:
        with thread.without_filter():
            for name, arguments in calls:
                with contextlib.suppress(OSError):  # a kernel without keyrings, or one that forbids them
                    thread.make_call(name, instruction, *arguments, patience=patience)
    finally:
        thread.release()
