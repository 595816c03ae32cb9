"""Forked workers that share a queue of numbered tasks: parallel work without threads, locks or a permanent pool.

Processes and not threads, because most of the work is many short calls (checksum, LZ4) under the GIL.
The caller must be single-threaded, as every process of ocihook that packs is.
"""

import contextlib
import ctypes
import fcntl
import os
import pickle
import platform
import signal
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ocihook.errors import GivenUp, OcihookError
from ocihook.linux.patience import ENDLESS, Patience

A = TypeVar("A")
T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_PIPE_BUF = 4096  # writes up to this are atomic, so that all workers may share one pipe (pipe(7))
_TOO_LATE = "the work was not done in time"
_MAX_TEXT = 800  # characters of an error that cannot be passed as it is; at 4 bytes each they fit
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 2, 36  # linux/prctl.h
# Keep freed memory instead of returning it and faulting it in again for the next chunk: a quarter more
# throughput with LZ4's buffers (malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).
_MALLOPT = ((-1, 64 << 20), (-3, 32 << 20))
# linux/ioprio.h; the number of ioprio_set(2)
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_IDLE = 1, 3
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
# The most likely reason, by the exit code of a worker.
_HINTS = {
    -signal.SIGBUS: "a file that it had mapped has become shorter, or its disk fails: see the kernel's log",
    -signal.SIGKILL: "the kernel does that where memory runs out: see its log",
}
_libc = ctypes.CDLL(None, use_errno=True)


class WorkerDied(OcihookError):
    """A worker process ended without an error of its own (killed, or out of memory)."""

    code = "worker-died"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, which forked it, is gone."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def adopt_orphans(*, wanted: bool) -> None:
    """Become the parent of descendants whose parent has ended, or leave that to an ancestor again (prctl(2))."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def run_ahead_of_others() -> Iterator[None]:
    """Run a few instructions that race with another process ahead of all else on this processor."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):  # a cgroup of v1 may allow none
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)


def run_at_low_priority() -> None:
    """Let this process and its children use processors and disks only when no other process needs them."""
    os.nice(19)
    _set_io_priority(_IOPRIO_CLASS_IDLE << 13)


@contextlib.contextmanager
def at_idle_priority() -> Iterator[None]:
    """Let this process, and those that it forks in here, use processors and disks only when no other process does."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    number = _IOPRIO_GET.get(platform.machine())
    io_priority = 0 if number is None else int(_libc.syscall(number, _IOPRIO_WHO_PROCESS, 0))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _set_io_priority(_IOPRIO_CLASS_IDLE << 13)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)
        _set_io_priority(max(0, io_priority))


def restore_priority(pid: int) -> None:
    """Let another process, which is at idle priority, run as others do; one that is gone needs nothing."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    _set_io_priority(0, pid)


@contextlib.contextmanager
def at_normal_priority() -> Iterator[None]:
    """Run this process at normal priority while others may wait for it; without permission, keep its priority."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    number = _IOPRIO_GET.get(platform.machine())
    io_priority = 0 if number is None else int(_libc.syscall(number, _IOPRIO_WHO_PROCESS, 0))
    if nice <= 0:
        yield
        return
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    _set_io_priority(0)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        _set_io_priority(max(0, io_priority))


def _set_io_priority(value: int, pid: int = 0) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        _libc.syscall(number, _IOPRIO_WHO_PROCESS, pid, value)


@contextlib.contextmanager
def outliving_parent() -> Iterator[None]:
    """Keep this process alive when its parent dies in here: for what must not be left half done."""
    armed = ctypes.c_int()
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(armed), 0, 0, 0)
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    try:
        yield
    finally:
        if armed.value:
            die_with_parent(parent)


def run_forked(
    worker: Callable[[int, Iterator[int]], Iterable[T]], *, tasks: int, workers: int, patience: Patience = ENDLESS
) -> Generator[T, None, None]:
    """Run `worker(number, task_numbers)` in forked processes and yield what they yield, as it arrives.

    Each task number in range(tasks) goes to exactly one worker, the next free one. A yielded object must
    pickle into less than 4 KiB. An error in a worker is raised here; the others are then killed. With one
    worker nothing is forked.

    Raises:
        GivenUp: if nobody waits any more, or the time is over.
    """
    if workers <= 1 or tasks <= 1:
        for result in worker(0, iter(range(tasks))):
            patience.check()
            if patience.is_over:
                raise GivenUp(_TOO_LATE)
            yield result
        patience.check()
        return
    # All workers share this open file, so its offset is the head of the queue.
    queue = os.memfd_create("ocihook-tasks", os.MFD_CLOEXEC)
    os.write(queue, b"".join(_LENGTH.pack(n) for n in range(tasks)))
    os.lseek(queue, 0, os.SEEK_SET)
    results, sink = os.pipe()
    pids: dict[int, int] = {}
    try:
        parent = os.getpid()
        for number in range(min(workers, tasks)):
            pid = os.fork()
            if pid == 0:
                _work(worker, number, queue, sink, parent)
            pids[pid] = number
        os.close(sink)
        sink = -1
        yield from _collect(results, patience)
        patience.check()  # many results may have come at once
        while pids:
            pid, status = os.waitpid(next(iter(pids)), 0)  # waits: it is ending, having closed its pipe
            number = pids.pop(pid)
            if status != 0:
                hint = _HINTS.get(os.waitstatus_to_exitcode(status), "")
                raise WorkerDied(f"worker {number} ended with {_describe(status)}", hint=hint)
    finally:
        for fd in (queue, results, sink):
            if fd >= 0:
                os.close(fd)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)  # waits: it was killed


class Call:
    """A call in a process of its own."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        self._reader = reader

    def outcome(self, patience: Patience) -> Any:  # noqa: ANN401 - what was called decides
        """Return its result, an exception if it raised one; a TimeoutError if it has not ended in time.

        Raises:
            GivenUp: if its caller has given up.
        """
        data = _read_to_end(self._reader, patience)
        if data is None:
            os.kill(self.pid, signal.SIGKILL)
            return TimeoutError("there is no answer")
        try:
            return pickle.loads(data)  # noqa: S301 - our own fork wrote it
        except (EOFError, pickle.UnpicklingError):
            return WorkerDied("the process that made the call died")

    def close(self) -> None:
        """End the process if it has not ended."""
        os.close(self._reader)
        with contextlib.suppress(ChildProcessError):  # waited for elsewhere; its pid may have been reused
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)  # waits: it was killed


@contextlib.contextmanager
def start_call(function: Callable[[A], object], item: A) -> Iterator[Call]:
    """Make a call in a process of its own, which ends with the block at the latest."""
    parent = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _call(function, item, writer, parent)
    os.close(writer)
    call = Call(pid, reader)
    try:
        yield call
    finally:
        call.close()


def call_each(function: Callable[[A], T], items: Sequence[A], patience: Patience) -> list[T | Exception]:
    """Call `function` with every item at once, each in a process of its own; return their outcomes, in order.

    For calls that may not return, or must not be made in this process. A call that has not ended in time is killed, and
    its outcome is a TimeoutError. A result must pickle, and may be of any size.

    Args:
        function: to be called.
        items: one for each call.
        patience: for all of them together.

    Raises:
        GivenUp: if nobody waits for them any more; all are killed. What must not be killed halfway is called with a
            patience that watches no process.
    """
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(start_call(function, item)) for item in items]
        return [call.outcome(patience) for call in calls]


def _call(function: Callable[[A], T], item: A, writer: int, parent: int) -> None:
    """Body of a process of `call_each`; never returns."""
    try:
        die_with_parent(parent)
        try:
            outcome: T | Exception = function(item)
        except Exception as error:  # noqa: BLE001 - the outcome
            outcome = error
        try:
            data = pickle.dumps(outcome)
            pickle.loads(data)  # noqa: S301 - an exception may pickle and yet not come back
        except Exception:  # noqa: BLE001
            data = pickle.dumps(OcihookError(f"{type(outcome).__name__}: {outcome}"[:_MAX_TEXT]))
        with open(writer, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)


def _read_to_end(fd: int, patience: Patience) -> bytes | None:
    """Read to the end of a pipe; None if that is not reached in time."""
    data = bytearray()
    while patience.ready(fd):
        part = os.read(fd, 1 << 16)  # waits: no, it is ready
        if not part:
            return bytes(data)
        data += part
    return None


def _collect(results: int, patience: Patience) -> Iterator[T]:
    pending = bytearray()
    while patience.ready(results):
        data = os.read(results, 1 << 16)  # waits: no, it is ready
        if not data:
            return
        pending += data
        while len(pending) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(pending)[0]
            if len(pending) < end:
                break
            failed, value = pickle.loads(pending[_LENGTH.size : end])  # noqa: S301 - our own fork wrote it
            del pending[:end]
            if failed:
                raise value
            yield value
    raise GivenUp(_TOO_LATE)


def _work(worker: Callable[[int, Iterator[int]], Iterable[T]], number: int, queue: int, sink: int, parent: int) -> None:
    """Body of a forked worker; never returns."""
    status = 1
    try:
        die_with_parent(parent)
        for option, value_bytes in _MALLOPT:
            _libc.mallopt(option, value_bytes)

        try:
            for value in worker(number, _task_numbers(queue)):
                _send(sink, failed=False, value=value)
            status = 0
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            _send(sink, failed=True, value=error)
            status = 0
    finally:
        os._exit(status)


def _task_numbers(queue: int) -> Iterator[int]:
    while True:
        # Unlike other files, one from memfd_create does not have its offset locked by the kernel during a read.
        fcntl.lockf(queue, fcntl.LOCK_EX)  # waits: for other workers to do the same; the parent has patience
        record = os.read(queue, _LENGTH.size)  # waits: no, it is memory
        fcntl.lockf(queue, fcntl.LOCK_UN)
        if not record:
            return
        yield _LENGTH.unpack(record)[0]


def _send(sink: int, *, failed: bool, value: object) -> None:
    try:
        data = pickle.dumps((failed, value))
        pickle.loads(data)  # noqa: S301 - an exception may pickle and yet not come back
    except Exception:  # noqa: BLE001
        data = pickle.dumps((True, OcihookError(f"{type(value).__name__}: {value}"[:_MAX_TEXT])))
    if len(data) + _LENGTH.size > _PIPE_BUF:
        what = f"{type(value).__name__}: {value}" if failed else f"a worker's result is too large: {value!r}"
        data = pickle.dumps((True, OcihookError(what[:_MAX_TEXT])))
    os.write(sink, _LENGTH.pack(len(data)) + data)


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
