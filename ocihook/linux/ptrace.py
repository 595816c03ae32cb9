"""Holds threads of another process, and has one of them make a system call: as CRIU's compel, without injected code.

A tracer may be killed at any moment, and the program is not to notice:
- A thread that is held resumes by itself then. Its stops are those of a system call or of ptrace's own, which leave
  nothing behind; never the one of a signal that this module has caused, which would be delivered. A single step causes
  one, SIGTRAP, and even resets the program's handler of it.
- A thread whose registers are changed restores itself: it returns from the call into a frame below its stack, which has
  them all, and the signal mask. Registers are changed before the mask, and the mask is put back before them. Then what
  was in the frame's place is put back, too: a stack may be a small part of a program's own memory, as Go's are.

Where there can be no such frame (aarch64, a shadow stack, no room on the stack) it comes back with the wrong registers.
For that the tracer at least does not die with its parent.
"""

import contextlib
import ctypes
import errno
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ocihook.errors import GivenUp, TraceError, plain
from ocihook.linux.memory import memory_path, read_mappings, read_memory, write_memory
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import has_exited, status_fields, thread_ids, tracer_pid
from ocihook.linux.sigframe import CALL_AND_RETURN, RESTORERS, STACK_POINTER, build_frame
from ocihook.linux.workers import outliving_parent

# linux/ptrace.h, linux/elf.h, linux/wait.h
_DETACH, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 17, 0x4204, 0x4205, 0x4206, 0x4207
_SYSCALL, _CONT, _SETOPTIONS = 24, 7, 0x4200
_GETEVENTMSG, _LISTEN = 0x4201, 0x4208
_GETSIGMASK, _SETSIGMASK, _GET_SYSCALL_INFO = 0x420A, 0x420B, 0x420E
# Without it, a stop at a system call is one with SIGTRAP, which the thread gets if its tracer dies then.
_O_TRACESYSGOOD = 1
_O_TRACEEXIT, _EVENT_EXIT = 1 << 6, 6
_O_EXITKILL, _O_SUSPEND_SECCOMP = 1 << 20, 1 << 21
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_SYSCALL_INFO = struct.Struct("<B3xIQQQ6Q")  # op, arch, ip, sp; of an entry: number, arguments; of an exit: result
_ENTRY, _EXIT = 1, 2
_MAP_ANONYMOUS, _MAP_POPULATE = 0x20, 0x8000
_NT_PRSTATUS, _NT_X86_XSTATE, _NT_X86_SHSTK = 1, 0x202, 0x204
_MOST_STATE_BYTES = 1 << 15  # AVX-512 takes 2.7 KiB, AMX 11
_WALL = 0x40000000
_EVENT_STOP = 128
_ALL_SIGNALS = (1 << 64) - 1
_NO_CALL = (1 << 64) - 1  # -1
_NO_STACK = 16
_CODE_BYTES = 10  # of the longest of RESTORERS, and of a call and return
_POLL_S = 0.001
_SPIN_S = 0.0003  # most stops come within 0.05 ms, and no timer is as fast
_STOP_TIMEOUT_S = 20.0  # for running threads to stop
# What an interrupted system call returns inside the kernel when it is to be restarted: linux/errno.h.
_RESTARTS = (-512, -513, -514, -516)
_LIBC = re.compile(r"/(libc[.-]|ld-)")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class _Machine:
    """How a machine makes system calls: indices are into its NT_PRSTATUS, an array of 64-bit registers."""

    registers: int
    instruction: bytes
    program_counter: int
    number: int  # register of the call's number
    arguments: tuple[int, ...]
    result: int
    original: int | None  # register with the number of an interrupted call, -1 for none; None: not shown
    has_frames: bool  # sigframe.py knows it
    numbers: Mapping[str, int]


_MACHINES: Mapping[str, _Machine] = {
    # arch/x86/include/asm/user_64.h: r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip ...
    "x86_64": _Machine(
        27, b"\x0f\x05", 16, 10, (14, 13, 12, 7, 9, 8), 10, 15, True,
        {"madvise": 28, "mmap": 9, "clone": 56, "wait4": 61, "exit_group": 231, "close_range": 436,
         "personality": 135, "setgroups": 116, "keyctl": 250, "set_mempolicy": 238, "prctl": 157},
    ),
    # arch/arm64/include/uapi/asm/ptrace.h: x0 to x30, sp, pc, pstate. The kernel winds an interrupted call back
    # before a tracer looks; a timed wait then starts over.
    "aarch64": _Machine(
        34, b"\x01\x00\x00\xd4", 32, 8, (0, 1, 2, 3, 4, 5), 0, None, False,
        {"madvise": 233, "mmap": 222, "clone": 220, "wait4": 260, "exit_group": 94, "close_range": 436,
         "personality": 92, "setgroups": 159, "keyctl": 219, "set_mempolicy": 237, "prctl": 167},
    ),
}  # fmt: skip


def _ptrace(request: int, tid: int, address: int = 0, data: object = None) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of thread {tid}: {os.strerror(number)}")


class CallInstruction(NamedTuple):
    """Where a process has an instruction that makes a system call."""

    address: int
    restorer: int  # code to which the thread returns after it, and which restores it from a frame; 0: none


class HeldThread:
    """A thread that this process has stopped, whatever it was doing; `release` resumes it as if it had not been."""

    def __init__(self, tid: int, patience: Patience | None) -> None:
        """Stop it.

        Args:
            tid: of the thread.
            patience: how long to wait until it has stopped; None: do not. One that is frozen (cgroup v1) does so when
                it is thawed, before it runs.

        Raises:
            OSError: if it is gone, another process traces it, or it does not stop in time.
            GivenUp: if its caller has given up. One that has not stopped is released when this process ends.
        """
        self.tid = tid
        _ptrace(_SEIZE, tid, 0, _O_TRACESYSGOOD)
        self._signal, self._has_stopped, self._has_ended = 0, False, False
        self._covered: list[tuple[int, bytes]] = []
        try:
            _ptrace(_INTERRUPT, tid)
            if patience is not None:
                self._wait(patience.within(_STOP_TIMEOUT_S))
                self._has_stopped = True
        except (OSError, GivenUp):
            with contextlib.suppress(OSError):
                _ptrace(_DETACH, tid)
            raise

    @contextlib.contextmanager
    def without_filter(self) -> Iterator[None]:
        """Let its calls pass its seccomp filter, which may not know them, or end the process for one.

        Raises:
            OSError: if it has a filter, and this process may not suspend it.
        """
        if not self._has_filter():
            yield
            return
        _ptrace(_SETOPTIONS, self.tid, 0, _O_TRACESYSGOOD | _O_SUSPEND_SECCOMP)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it has ended
                _ptrace(_SETOPTIONS, self.tid, 0, _O_TRACESYSGOOD)

    def _has_filter(self) -> bool:
        return status_fields(self.tid).get("Seccomp", "0") != "0"

    def _wait(self, patience: Patience = ENDLESS) -> int:
        """Wait for a stop; return its status, and keep the signal that is then to be delivered, 0 for none.

        What was begun with a thread is completed: the patience is that of the process that waits for this one.
        """
        found, status = _poll_stop(self.tid)
        spun = time.monotonic() + _SPIN_S
        while not found and time.monotonic() < spun:
            os.sched_yield()  # it may need this very processor to reach its stop
            found, status = _poll_stop(self.tid)

        def has_stopped() -> bool:
            nonlocal found, status
            found, status = _poll_stop(self.tid)
            return bool(found)

        if not found and not patience.until(has_stopped, poll_s=_POLL_S, longest_poll_s=_POLL_S):
            raise TimeoutError(f"thread {self.tid} does not stop")
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {self.tid} has ended")
        self._signal = self._stop_signal(status)
        return status

    @staticmethod
    def _stop_signal(status: int) -> int:
        number = os.WSTOPSIG(status)
        return 0 if _is_event(status) or number == _SYSCALL_STOP else number

    def release(self) -> None:
        """Resume it. One that is gone counts as released."""
        release_all([self])

    def has_settled(self) -> bool:
        """Return whether it has stopped or ended by now."""
        if not (self._has_stopped or self._has_ended):
            try:
                found, status = os.waitpid(self.tid, os.WNOHANG | _WALL)
            except ChildProcessError:
                self._has_ended = True
            else:
                self._has_stopped = bool(found) and os.WIFSTOPPED(status)
                self._has_ended = bool(found) and not self._has_stopped
                self._signal = self._stop_signal(status) if self._has_stopped else 0
        return self._has_stopped or self._has_ended

    def try_release(self) -> bool:
        """Resume it if it has settled; False: it has not, and this must be called again."""
        if self.has_settled() and not self._has_ended:
            try:
                _ptrace(_DETACH, self.tid, 0, self._signal)
                self._has_ended = True  # for its tracer
            except OSError:  # it was killed; its parent is notified only when its tracer has reaped it
                self._has_stopped = False
        return self._has_ended

    def make_call(self, name: str, instruction: CallInstruction, *arguments: int, patience: Patience = ENDLESS) -> int:
        """Have the thread make a system call; return its result.

        Signals wait meanwhile. Afterwards the thread is as it was, and an interrupted call of its own continues. That
        holds if this process is killed in here, too, except that a timed wait starts over.

        Args:
            name: of the call.
            instruction: of `find_call_instruction`.
            arguments: of the call.
            patience: how long to wait for it, for a thread that never runs by itself: one that was not in time has not
                stopped, and can make no other call.

        Raises:
            OSError: with the call's own error number, if the thread died, or has not made it in time.
        """
        return self._call(name, instruction, arguments, patience)

    def fork(self, instruction: CallInstruction, flags: int) -> int:
        """Have the thread call clone(2) without sharing memory; return the child's pid as its parent knows it.

        If the child ever runs, since its tracer was killed, it exits; where there are no frames it has no stack.

        Raises:
            OSError: as `make_call`.
        """
        return self._call("clone", instruction, (flags, _NO_STACK, 0, 0, 0), ENDLESS)

    def is_in_fork(self, instruction: CallInstruction, flags: int) -> bool:
        """Return whether a tracer was killed during `fork`, and the thread has not come to its end by itself yet."""
        machine = _machine()
        registers = self._registers(machine)
        at = registers[machine.program_counter]
        places = [instruction.address, *([instruction.restorer] if instruction.restorer else [])]
        is_there = any(place <= at < place + _CODE_BYTES for place in places)
        return is_there and registers[machine.arguments[0]] == flags

    def put_back(self, pid: int) -> None:
        """Put back in a process what the frames of the last call have covered: in the thread's own this was done.

        Raises:
            OSError: if it is gone.
        """
        for address, content in reversed(self._covered):
            write_memory(pid, [content], address)

    def _call(self, name: str, instruction: CallInstruction, arguments: Sequence[int], patience: Patience) -> int:
        machine = _machine()
        self._covered = []
        with outliving_parent():
            saved, mask = self._registers(machine), self._signal_mask()
            changed = type(saved)(*saved)
            changed[machine.program_counter] = instruction.address
            for register, value in zip(machine.arguments, arguments, strict=False):
                changed[register] = value
            changed[machine.number] = machine.numbers[name]
            if machine.original is not None:
                changed[machine.original] = _NO_CALL
            if machine.has_frames and instruction.restorer and not self._has_shadow_stack():
                frame = self._leave_frame(_made_anew(machine, saved), mask, instruction.restorer)
                changed[STACK_POINTER] = frame or saved[STACK_POINTER]
                if frame and name == "clone":
                    leaving = list(changed)
                    leaving[machine.number], leaving[machine.arguments[0]] = machine.numbers["exit_group"], 0
                    own = self._leave_frame(leaving, _ALL_SIGNALS, instruction.restorer)
                    changed[machine.arguments[1]] = own or _NO_STACK
            try:
                self._set_registers(changed)
                self._set_signal_mask(_ALL_SIGNALS)
                self._run_to(_SYSCALL, _is_system_call, patience)
                self._run_to(_SYSCALL, _is_system_call, patience)
                _, result, _ = self._system_call()
                # From a stop of this kind the kernel restarts an interrupted call, as it would have without us.
                _ptrace(_INTERRUPT, self.tid)
                self._run_to(_CONT, _is_event, patience)
            finally:
                self._set_signal_mask(mask)
                self._set_registers(saved)
                self.put_back(self.tid)
        result = ctypes.c_int64(result).value
        if result < 0:
            raise OSError(-result, f"{name} in thread {self.tid}: {os.strerror(-result)}")
        return result

    def _has_shadow_stack(self) -> bool:
        """Return whether the thread has a shadow stack: it can return only to where it was called from."""
        try:
            self._register_set(_NT_X86_SHSTK, 8)
        except OSError:  # the kernel does not support one, or the thread has none
            return False
        return True

    def _leave_frame(self, registers: Sequence[int], mask: int, restorer: int) -> int:
        """Leave a frame on the thread's stack from which it restores itself; return its address, 0 if there is none."""
        try:
            frame = build_frame(registers, mask, self._register_set(_NT_X86_XSTATE, _MOST_STATE_BYTES), restorer)
            if frame is None:
                return 0
            earlier = bytearray(len(frame.data))
            if read_memory(self.tid, memoryview(earlier), frame.address) < len(earlier):
                return 0
            self._covered.append((frame.address, bytes(earlier)))
            if write_memory(self.tid, [frame.data], frame.address) == len(frame.data):
                return frame.address
        except OSError:  # no room
            pass
        return 0

    def _run_to(self, request: int, is_it: Callable[[int], bool], patience: Patience) -> None:
        """Run it until a stop of some kind. A signal that arrives before is passed on, to wait or to stop all."""
        while True:
            _ptrace(request, self.tid, 0, self._signal)
            if is_it(self._wait(patience)):
                return

    def watch_mappings(self, child: int, least_bytes: int, report: Callable[[int, int], object]) -> None:
        """Let the thread run until `child` of this process has ended; report the first large mapping that it makes.

        That is anonymous memory, and reported before any of it is populated: the thread is stopped, and must not
        populate it at once even if it asked for that.

        Args:
            child: a process that this one has forked, and does not wait for elsewhere.
            least_bytes: what is large.
            report: called with address and size; may let this thread make a call.
        """
        request, size, flags = _SYSCALL, 0, 0
        _ptrace(request, self.tid, 0, self._signal)
        while True:
            pid, status = os.waitpid(-1, _WALL)  # waits: for the driver; the caller's process has patience
            if pid == child:
                return
            if pid != self.tid or not os.WIFSTOPPED(status):
                continue  # another thread, or this one, has ended
            if _is_system_call(status):
                operation, call, arguments = self._system_call()
                if operation == _ENTRY:
                    size, flags = _large_mapping(call, arguments, least_bytes)
                    if flags & _MAP_POPULATE:
                        self._set_mapping_flags(flags & ~_MAP_POPULATE)
                elif operation == _EXIT and size:
                    if flags & _MAP_POPULATE:
                        self._set_mapping_flags(flags)
                    if call < 1 << 63:  # else the error of mmap
                        request = _CONT
                        try:
                            report(call, size)
                        except BaseException:
                            _ptrace(request, self.tid)  # else it could not be stopped again
                            raise
            _ptrace(request, self.tid, 0, self._stop_signal(status))

    def _system_call(self) -> tuple[int, int, tuple[int, ...]]:
        """Return entry or exit, the number or the result, and the arguments."""
        data = ctypes.create_string_buffer(_SYSCALL_INFO.size)
        _ptrace(_GET_SYSCALL_INFO, self.tid, len(data), ctypes.byref(data))
        operation, _, _, _, value, *arguments = _SYSCALL_INFO.unpack(data.raw)
        return operation, value, tuple(arguments)

    def _set_mapping_flags(self, flags: int) -> None:
        machine = _machine()
        registers = self._registers(machine)
        registers[machine.arguments[3]] = flags
        self._set_registers(registers)

    def stop(self) -> None:
        """Stop it again after `watch_mappings`, which leaves it running."""
        _ptrace(_INTERRUPT, self.tid)
        while _is_system_call(self._wait()):
            _ptrace(_INTERRUPT, self.tid)  # again: any other stop of a thread replaces that one
            _ptrace(_CONT, self.tid)

    def _registers(self, machine: _Machine) -> "ctypes.Array[ctypes.c_uint64]":
        data = self._register_set(_NT_PRSTATUS, 8 * machine.registers)
        if len(data) < 8 * machine.registers:
            raise OSError(errno.ENOEXEC, f"thread {self.tid} runs a program of another machine, such as a 32-bit one")
        return (ctypes.c_uint64 * machine.registers).from_buffer_copy(data)

    def _register_set(self, kind: int, most_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(most_bytes)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(data), most_bytes)  # struct iovec
        _ptrace(_GETREGSET, self.tid, kind, ctypes.byref(vector))
        return data.raw[: vector[1]]

    def _set_registers(self, registers: "ctypes.Array[ctypes.c_uint64]") -> None:
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))  # struct iovec
        _ptrace(_SETREGSET, self.tid, _NT_PRSTATUS, ctypes.byref(vector))

    def _signal_mask(self) -> int:
        mask = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, self.tid, 8, ctypes.byref(mask))
        return mask.value

    def _set_signal_mask(self, mask: int) -> None:
        _ptrace(_SETSIGMASK, self.tid, 8, ctypes.byref(ctypes.c_uint64(mask)))


class BornHeld(HeldThread):
    """A child that a held thread has made with CLONE_PTRACE: traced as that one is, and stopped before it runs."""

    def __init__(self, tid: int) -> None:  # it need not be seized
        """Take it over: it dies with this process from here on, and no seccomp filter applies to it.

        Raises:
            OSError: if it has ended.
        """
        self.tid = tid
        self._signal, self._has_stopped, self._has_ended = 0, True, False
        self._covered = []
        self._wait()
        suspended = _O_SUSPEND_SECCOMP if self._has_filter() else 0
        _ptrace(_SETOPTIONS, tid, 0, _O_TRACESYSGOOD | _O_EXITKILL | suspended)


def _poll_stop(tid: int) -> tuple[int, int]:
    """Return what waitpid(2) does: 0 for a thread that has not stopped."""
    return os.waitpid(tid, os.WNOHANG | _WALL)


def _is_system_call(status: int) -> bool:
    return os.WSTOPSIG(status) == _SYSCALL_STOP


def _is_event(status: int) -> bool:
    return status >> 16 == _EVENT_STOP


def _large_mapping(call: int, arguments: tuple[int, ...], least_bytes: int) -> tuple[int, int]:
    """Return size and flags of the mapping that a call is about to make, 0 and 0 for any other call."""
    _, size, _, flags, *_ = arguments
    if call != _machine().numbers["mmap"] or size < least_bytes or not flags & _MAP_ANONYMOUS:
        return 0, 0
    return size, flags


def _made_anew(machine: _Machine, registers: "ctypes.Array[ctypes.c_uint64]") -> list[int]:
    """Return registers with which an interrupted system call is restarted from its beginning.

    rt_sigreturn(2) makes the kernel forget its progress. A longer wait is better than one that ends with EINTR, which a
    program without signal handlers never sees. Only a wait that had been interrupted before, too, ends so: it continues
    as restart_syscall(2), and nothing shows which call it was.
    """
    anew = list(registers)
    call = _NO_CALL if machine.original is None else anew[machine.original]
    if call != _NO_CALL and ctypes.c_int64(anew[machine.result]).value in _RESTARTS:
        anew[machine.result] = call
        anew[machine.program_counter] -= len(machine.instruction)
    return anew


def _machine() -> _Machine:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise TraceError(f"system calls cannot be injected on {platform.machine()}")
    return machine


def find_call_instruction(pid: int) -> CallInstruction:
    """Find an instruction in a process that makes a system call, with a restorer to return to if there is one.

    Raises:
        TraceError: if there is none.
    """
    machine = _machine()
    plain, returning, restorer = 0, 0, 0
    for start, code in _executable(pid):
        plain = plain or _place(start, code, [machine.instruction])
        if plain and not machine.has_frames:
            break
        returning = returning or _place(start, code, [CALL_AND_RETURN])
        restorer = restorer or _place(start, code, RESTORERS)
        if returning and restorer:
            return CallInstruction(returning, restorer)
    if not plain:
        raise TraceError(f"process {pid} has no instruction that makes a system call")
    return CallInstruction(plain, 0)


def _executable(pid: int) -> Iterator[tuple[int, bytes]]:
    """Yield address and content of executable mappings, those with system calls first: the vDSO, the libc."""
    found = [mapping for mapping in read_mappings(pid) if "x" in mapping.mode and mapping.name != "[vsyscall]"]
    try:
        fd = os.open(memory_path(pid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"the memory of process {pid} cannot be read: {error.strerror}") from error
    try:
        for mapping in sorted(found, key=lambda mapping: (mapping.name != "[vdso]", not _LIBC.search(mapping.name))):
            with contextlib.suppress(OSError):
                yield mapping.span.start, os.pread(fd, mapping.span.size_bytes, mapping.span.start)
    finally:
        os.close(fd)


def _place(start: int, code: bytes, patterns: Iterable[bytes]) -> int:
    """Return the address of the first of some patterns that is found, 0 if none is."""
    return next((start + at for at in map(code.find, patterns) if at >= 0), 0)


def release_all(threads: Iterable[HeldThread]) -> None:
    """Release threads in any order that works: the end of one that was killed may wait for another's.

    There is no time limit: one that is frozen can be released only when it is thawed, or by the end of this process.
    """
    left = list(threads)

    def are_released() -> bool:
        left[:] = [thread for thread in left if not thread.try_release()]
        return not left

    ENDLESS.until(are_released, poll_s=_POLL_S, longest_poll_s=_POLL_S)


@contextlib.contextmanager
def held(pid: int, patience: Patience | None, *, without: int = 0) -> Iterator[list[HeldThread]]:
    """Hold every thread of a process but one, so that no other thread changes its memory.

    Threads that this process holds already are not touched.

    Args:
        pid: of the process.
        patience: how long to wait until they have stopped; None: do not, as HeldThread.
        without: the thread that continues to run.

    Raises:
        TraceError: if a thread cannot be held, or does not stop in time; all are released then.
        GivenUp: if its caller has given up; likewise.
    """
    threads: dict[int, HeldThread] = {}
    passed = {without}
    try:
        while new := [t for t in thread_ids(pid) if t not in passed and tracer_pid(t) != os.getpid()]:
            for tid in new:
                passed.add(tid)
                try:
                    threads[tid] = HeldThread(tid, None)
                except OSError as error:
                    if not has_exited(tid):
                        raise TraceError(
                            f"process {pid} cannot be held: {plain(error)}",
                            hint="no debugger or tracer may be attached during a dump",
                        ) from error
            if patience is not None and not patience.within(_STOP_TIMEOUT_S).until(
                lambda: not [thread for thread in threads.values() if not thread.has_settled()],
                longest_poll_s=_POLL_S,
            ):
                raise TraceError(f"process {pid} cannot be held: not all of its threads stop")
        yield list(threads.values())
    finally:
        release_all(threads.values())


def await_exit(pid: int) -> int:
    """Trace the first thread of a process until it begins to exit; return the status that wait(2) is to give for it.

    The thread is stopped then, until this process exits.

    Raises:
        OSError: if it cannot be traced.
    """
    _ptrace(_SEIZE, pid, 0, _O_TRACEEXIT)
    while True:
        _, status = os.waitpid(pid, _WALL)  # waits: in a process of its own
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EVENT_EXIT:
            break
        if event == _EVENT_STOP and number != signal.SIGTRAP:  # a group stop lasts until SIGCONT (ptrace(2))
            _ptrace(_LISTEN, pid)
        else:
            _ptrace(_CONT, pid, 0, 0 if event else number)
    found = ctypes.c_ulong()
    _ptrace(_GETEVENTMSG, pid, 0, ctypes.byref(found))
    return found.value
