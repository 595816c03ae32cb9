"""A process's memory as it is at one instant: in a child that the process is made to fork, and that never runs.

The child shares the memory until one of the two writes to it, or the child drops it. It is traced from its first
moment, and dies with its tracer; if that is killed in the microseconds before the kernel knows so, the child exits at
its first instruction (linux/ptrace.py), with all signals blocked. It sends its parent no signal. It shares the
parent's descriptors only until the parent runs again: it keeps no pipe and no port open, and of files only those that
were mapped, whose file system then cannot be unmounted. It shares the working directory, which the parent may leave. A
program that the parent executes meanwhile gets no rights from its file (set-user-ID), as under any tracer. If memory
runs out the kernel ends it before others.

Its parent knows nothing of it, and does not wait for it: when it has ended, the parent is made to.
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from ocihook.errors import TraceError, plain
from ocihook.linux.cgroup import find_freezer, is_frozen
from ocihook.linux.memory import Span, huge_spans
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Child, Process, can_be_interrupted, children, pid_below, thread_ids
from ocihook.linux.ptrace import BornHeld, CallInstruction, HeldThread, find_call_instruction, held

# linux/sched.h, linux/wait.h, linux/close_range.h, asm-generic/mman-common.h
_CLONE_FS, _CLONE_FILES, _CLONE_PTRACE = 0x200, 0x400, 0x2000
_WNOHANG, _WALL = 1, 0x40000000
_CLOSE_RANGE_UNSHARE = 2
_MADV_DONTNEED = 4
_ALL_DESCRIPTORS = (1 << 32) - 1
_FLAGS = _CLONE_PTRACE | _CLONE_FILES | _CLONE_FS
_MOST_EXPENDABLE = "1000"
_CALL_TIMEOUT_S = 20.0  # of a child's: it is in a cgroup that may be frozen any time
_END_TIMEOUT_S = 20.0
_TRIES = 5


class Fork:
    """A child that has the memory of its parent, as it was."""

    def __init__(self, parent: Process, process: Process, thread: HeldThread, instruction: CallInstruction) -> None:
        self.parent = parent
        self.process = process
        self._thread = thread
        self._instruction = CallInstruction(instruction.address, 0)  # it has no stack to leave a frame on
        self._can_call = True

    def drop(self, span: Span) -> None:
        """Have it drop memory, which its parent then need not copy to write to it. Whether it could does not matter."""
        self._call("madvise", span.start, span.size_bytes, _MADV_DONTNEED)

    def leave_parent(self) -> None:
        """Have it let go of what it would keep its parent from: descriptors, and private pages of hugetlbfs.

        For a copy of one of those the parent may find none left, and get SIGBUS.

        Raises:
            OSError: if it could not.
        """
        patience = Patience(timeout_s=_CALL_TIMEOUT_S)
        call = partial(self._thread.make_call, patience=patience)
        call("close_range", self._instruction, 0, _ALL_DESCRIPTORS, _CLOSE_RANGE_UNSHARE)
        for span in huge_spans(self.process.pid):
            call("madvise", self._instruction, span.start, span.size_bytes, _MADV_DONTNEED)

    def _call(self, name: str, *arguments: int) -> None:
        if self._can_call and not is_frozen(self.process.pid):
            try:
                patience = Patience(timeout_s=_CALL_TIMEOUT_S)
                self._thread.make_call(name, self._instruction, *arguments, patience=patience)
            except OSError as error:
                # Else it has ended, or is on its way into a call: it is frozen.
                self._can_call = error.errno in (errno.EINVAL, errno.EPERM, errno.ENOMEM, errno.ENOSYS)


def end(fork: Process) -> None:
    """End a fork, whoever traces it; its parent has not been made to wait for it then.

    Raises:
        TraceError: if it does not end in time, as in a frozen cgroup (v1).
    """
    fork.send(signal.SIGKILL)
    if not Patience(timeout_s=_END_TIMEOUT_S).until(lambda: _has_ended(fork)):
        raise TraceError(f"process {fork.pid}, which has the memory of another one, does not end")


def _has_ended(fork: Process) -> bool:
    child = Child.find(fork.pid)
    if child is None or child.process != fork:
        return True
    try:
        found, status = os.waitpid(fork.pid, os.WNOHANG | _WALL)
    except ChildProcessError:  # this process does not trace it, or does not any more
        return child.has_ended
    return bool(found) and not os.WIFSTOPPED(status)


def clock_ticks() -> int:
    """Return the time in the unit and from the start that `Process` has."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def fork(process: Process, threads: Sequence[HeldThread], instruction: CallInstruction) -> Fork:
    """Have a process fork, all of whose threads are held by this one, and have stopped.

    Args:
        process: whose memory is wanted.
        threads: all of it that live.
        instruction: of `find_call_instruction`.

    Raises:
        TraceError: if it cannot: too many processes, too little memory, a seccomp filter that this process may not
            suspend, children that would be in a PID namespace of their own. It is as it was then.
    """
    thread = next((thread for thread in threads if thread.has_settled() and Process.find(thread.tid)), None)
    try:
        if thread is None:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        if not _keeps_namespace(process.pid):
            raise PermissionError(errno.EPERM, "its next child would be the first of a new PID namespace")
        with thread.without_filter():
            number = thread.fork(instruction, _FLAGS)
        child = _find_child(process.pid, number)
        taken = BornHeld(child.pid)
    except OSError as error:
        raise TraceError(f"process {process.pid} cannot be forked: {plain(error)}") from error
    forked = Fork(process, child, taken, instruction)
    try:
        thread.put_back(child.pid)
        Path(f"/proc/{child.pid}/oom_score_adj").write_text(_MOST_EXPENDABLE)
        forked.leave_parent()
    except OSError as error:
        end(child)
        raise TraceError(f"the fork of process {process.pid} cannot be used: {plain(error)}") from error
    return forked


def _keeps_namespace(pid: int) -> bool:
    """Return whether children of a process are in its own PID namespace: ending the first of a new one closes it."""
    return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{pid}/ns/pid_for_children")


def _find_child(parent: int, number: int) -> Process:
    """Return the child that its parent knows by a number, which is another one outside its PID namespace."""
    for pid in children(parent):
        if pid_below(parent, pid).split("/")[0] == str(number) and (child := Child.find(pid)):
            return child.process
    raise ProcessLookupError(errno.ESRCH, f"its child {number} is not found")


def find_forks(parent: Process, since_ticks: int) -> list[Process]:
    """Return the children of a process that may be such forks: made since then, and ending without a signal.

    That is also those that a thread makes once it goes on after its tracer was killed.

    Raises:
        TraceError: if the process cannot be held for a moment.
    """
    if not parent.is_alive():
        return []
    instruction, patience = find_call_instruction(parent.pid), Patience(timeout_s=_CALL_TIMEOUT_S)

    def is_quiet() -> bool:
        with _all_held(parent.pid) as threads:
            return not any(thread.is_in_fork(instruction, _FLAGS) for thread in threads)

    patience.until(is_quiet)
    found = filter(None, map(Child.find, children(parent.pid)))
    return [child.process for child in found if not child.end_signal and child.process.start_ticks >= since_ticks]


@contextlib.contextmanager
def _all_held(pid: int) -> Iterator[list[HeldThread]]:
    """Hold all threads of a process, and give those that live.

    Raises:
        TraceError: if it is frozen, traced, or does not stop.
    """
    _check_not_frozen(pid)
    with held(pid, Patience(timeout_s=_CALL_TIMEOUT_S)) as threads:
        yield [thread for thread in threads if Process.find(thread.tid)]


@contextlib.contextmanager
def _one_held(pid: int) -> Iterator[HeldThread]:
    """Hold one thread of a process, that can stop at once; the others go on.

    Raises:
        TraceError: if there is none now, or it is frozen or traced.
    """
    _check_not_frozen(pid)
    able = next((tid for tid in thread_ids(pid) if can_be_interrupted(tid)), None)
    if able is None:
        raise TraceError(f"no thread of process {pid} can be interrupted")
    thread = HeldThread(able, Patience(timeout_s=_CALL_TIMEOUT_S))
    try:
        yield thread
    finally:
        thread.release()


def _check_not_frozen(pid: int) -> None:
    freezer = find_freezer(pid)
    if freezer and freezer.is_frozen():
        raise TraceError(f"process {pid} is frozen")


def reap(ended: Process, parents: Collection[Process]) -> None:
    """Have the parent of a fork that has ended wait for it, unless it is a process outside that does so by itself.

    Args:
        ended: the fork; nothing is done if it is gone.
        parents: processes that have forked: theirs are children of others when they have ended themselves.

    Raises:
        TraceError: if that is not possible now: it has not ended, or its parent is frozen, traced, or does not stop.
    """
    for _ in range(_TRIES):
        child = Child.find(ended.pid)
        if child is None or child.process != ended:
            return
        if not child.has_ended:
            raise TraceError(f"process {ended.pid}, which has the memory of another one, has not ended yet")
        parent = Process.find(child.parent)
        if parent is not None and not (parent in parents or _is_inside(parent.pid)):
            return  # the init of the node, or the supervisor of a container: they wait for whatever ends
        if parent is not None:
            _wait_for(parent, ended)
        # It may have another parent by now: the one that it had has ended.
    raise TraceError(f"nobody can be made to wait for process {ended.pid}, which has ended")


def _wait_for(parent: Process, ended: Process) -> None:
    number = int(pid_below(parent.pid, ended.pid).split("/")[0] or 0)
    if not number:  # somebody has waited for it; 0 would be any child
        return
    try:
        instruction = find_call_instruction(parent.pid)
        with _one_held(parent.pid) as thread, thread.without_filter():
            thread.make_call("wait4", instruction, number, 0, _WNOHANG | _WALL, 0)
    except (OSError, TraceError) as error:
        if parent.is_alive() and Child.find(ended.pid) is not None:
            what = f"process {parent.pid} cannot wait for its ended child {ended.pid}"
            raise TraceError(f"{what}: {plain(error)}") from error


def _is_inside(pid: int) -> bool:
    """Return whether a process is in another PID namespace than this one."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    return False
