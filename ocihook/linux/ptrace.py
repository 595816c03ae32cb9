"""Holds threads of another process, and lets one of them make a system call: what CRIU's compel does, without code.

A thread that is held resumes by itself when its tracer dies. One that is making an injected call would come back
with the wrong registers, so a tracer does not die with its parent then.
"""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ocihook.errors import TraceError
from ocihook.linux.memory import memory_path, read_mappings
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, thread_ids, tracer_pid
from ocihook.linux.workers import outliving_parent

# linux/ptrace.h, linux/elf.h, linux/wait.h
_SINGLESTEP, _DETACH, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 9, 17, 0x4204, 0x4205, 0x4206, 0x4207
_SYSCALL, _CONT, _SETOPTIONS = 24, 7, 0x4200
_GETSIGMASK, _SETSIGMASK, _GET_SYSCALL_INFO = 0x420A, 0x420B, 0x420E
_O_TRACESYSGOOD = 1
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_SYSCALL_INFO = struct.Struct("<B3xIQQQ6Q")  # op, arch, ip, sp; of an entry: number, arguments; of an exit: result
_ENTRY, _EXIT = 1, 2
_MAP_ANONYMOUS, _MAP_POPULATE = 0x20, 0x8000
_NT_PRSTATUS = 1
_WALL = 0x40000000
_EVENT_STOP = 128
_ALL_SIGNALS = (1 << 64) - 1
_POLL_S = 0.001
# What an interrupted system call returns inside the kernel when it is to be made again: linux/errno.h.
_RESTART_SAME = (-512, -513, -514)
_RESTART_BLOCK = -516

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
    restart_syscall: int
    numbers: Mapping[str, int]


_MACHINES: Mapping[str, _Machine] = {
    # arch/x86/include/asm/user_64.h: r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip ...
    "x86_64": _Machine(27, b"\x0f\x05", 16, 10, (14, 13, 12, 7, 9, 8), 10, 15, 219, {"madvise": 28, "mmap": 9}),
    # arch/arm64/include/uapi/asm/ptrace.h: x0 to x30, sp, pc, pstate. The kernel winds an interrupted call back
    # before a tracer looks, so that nothing is left to do; a timed wait then begins anew.
    "aarch64": _Machine(
        34, b"\x01\x00\x00\xd4", 32, 8, (0, 1, 2, 3, 4, 5), 0, None, 128, {"madvise": 233, "mmap": 222}
    ),
}


def _ptrace(request: int, tid: int, address: int = 0, data: object = None) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of thread {tid}: {os.strerror(number)}")


class HeldThread:
    """A thread that this process has stopped, whatever it was doing; `release` lets it go on as if nothing had been."""

    def __init__(self, tid: int, *, waits: bool = True) -> None:
        """Stop it.

        Args:
            tid: of the thread.
            waits: until it has stopped. One that is frozen (cgroup v1) does so when it is thawed, before it runs.

        Raises:
            OSError: if it is gone, or somebody else traces it.
        """
        self.tid = tid
        _ptrace(_SEIZE, tid)
        self._signal, self._has_stopped, self._has_ended = 0, False, False
        try:
            _ptrace(_INTERRUPT, tid)
            if waits:
                self._signal, self._has_stopped = self._wait(), True
        except OSError:
            with contextlib.suppress(OSError):
                _ptrace(_DETACH, tid)
            raise

    def _wait(self) -> int:
        """Wait for a stop; return the signal that is then to be delivered, 0 for none."""
        _, status = os.waitpid(self.tid, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"thread {self.tid} has ended")
        return self._stop_signal(status)

    @staticmethod
    def _stop_signal(status: int) -> int:
        number = os.WSTOPSIG(status)
        return 0 if status >> 16 == _EVENT_STOP or number == _SYSCALL_STOP else number

    def release(self) -> None:
        """Let it go on. One that is gone is let go, too."""
        release_all([self])

    def has_settled(self) -> bool:
        """Tell whether it has stopped or ended by now."""
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
        """Let it go on if it has settled; False: it has not, and must be asked again."""
        if self.has_settled() and not self._has_ended:
            try:
                _ptrace(_DETACH, self.tid, 0, self._signal)
                self._has_ended = True  # for its tracer
            except OSError:  # it was killed; its parent is told of its end only when its tracer has taken note of it
                self._has_stopped = False
        return self._has_ended

    def make_call(self, name: str, instruction: int, *arguments: int) -> int:
        """Let the thread make a system call at the address of an instruction that does so; return its result.

        Signals wait meanwhile. Afterwards the thread is as it was, an interrupted call of its own is made again.

        Raises:
            OSError: with the call's own error number, or if the thread died.
        """
        machine = _machine()
        with outliving_parent():
            saved = self._registers(machine)
            mask = ctypes.c_uint64()
            _ptrace(_GETSIGMASK, self.tid, 8, ctypes.byref(mask))
            _ptrace(_SETSIGMASK, self.tid, 8, ctypes.byref(ctypes.c_uint64(_ALL_SIGNALS)))
            changed = type(saved)(*saved)
            changed[machine.program_counter] = instruction
            for register, value in zip(machine.arguments, arguments, strict=False):
                changed[register] = value
            changed[machine.number] = machine.numbers[name]
            if machine.original is not None:
                changed[machine.original] = _ALL_SIGNALS
            try:
                result = self._step_over(machine, changed)
            finally:
                self._set_registers(_made_again(machine, saved))
                _ptrace(_SETSIGMASK, self.tid, 8, ctypes.byref(mask))
        if result < 0:
            raise OSError(-result, f"{name} in thread {self.tid}: {os.strerror(-result)}")
        return result

    def _step_over(self, machine: _Machine, registers: "ctypes.Array[ctypes.c_uint64]") -> int:
        """Let the thread make one instruction, the call, with these registers; return the call's result."""
        self._set_registers(registers)
        instruction = registers[machine.program_counter]
        while registers[machine.program_counter] == instruction:  # SIGSTOP, which cannot be held back, comes before
            _ptrace(_SINGLESTEP, self.tid)
            number = self._wait()
            self._signal = self._signal if number in {0, signal.SIGTRAP} else number
            registers = self._registers(machine)
        return ctypes.c_int64(registers[machine.result]).value

    def watch_mappings(self, child: int, least_bytes: int, tell: Callable[[int, int], object]) -> None:
        """Let the thread go on until `child` of this process has ended; tell of the first large mapping that it makes.

        That is anonymous memory, and told before any of it is there: the thread is stopped, and is not to fill it at
        once even if it asked for that.

        Args:
            child: a process that this one has forked, and does not wait for elsewhere.
            least_bytes: what is large.
            tell: called with address and size; may let this thread make a call.
        """
        _ptrace(_SETOPTIONS, self.tid, 0, _O_TRACESYSGOOD)
        request, size = _SYSCALL, 0
        _ptrace(request, self.tid, 0, self._signal)
        while True:
            pid, status = os.waitpid(-1, _WALL)
            if pid == child:
                return
            if pid != self.tid or not os.WIFSTOPPED(status):
                continue  # another thread, or this one, has ended
            number = os.WSTOPSIG(status)
            if number == _SYSCALL_STOP:
                number = 0
                operation, call, arguments = self._system_call()
                if operation == _ENTRY:
                    size = self._large_mapping(call, arguments, least_bytes)
                elif operation == _EXIT and size and call < 1 << 63:  # else the error of mmap
                    request = _CONT
                    try:
                        tell(call, size)
                    except BaseException:
                        _ptrace(request, self.tid)  # else it could not be stopped anew
                        raise
            elif status >> 16 == _EVENT_STOP:
                number = 0
            _ptrace(request, self.tid, 0, number)

    def _system_call(self) -> tuple[int, int, tuple[int, ...]]:
        """Return entry or exit, the number or the result, and the arguments."""
        data = ctypes.create_string_buffer(_SYSCALL_INFO.size)
        _ptrace(_GET_SYSCALL_INFO, self.tid, len(data), ctypes.byref(data))
        operation, _, _, _, value, *arguments = _SYSCALL_INFO.unpack(data.raw)
        return operation, value, tuple(arguments)

    def _large_mapping(self, call: int, arguments: tuple[int, ...], least_bytes: int) -> int:
        """Return the size of the mapping that a call is about to make, 0 for any other call."""
        machine = _machine()
        _, size, _, flags, *_ = arguments
        if call != machine.numbers["mmap"] or size < least_bytes or not flags & _MAP_ANONYMOUS:
            return 0
        if flags & _MAP_POPULATE:
            registers = self._registers(machine)
            registers[machine.arguments[3]] = flags & ~_MAP_POPULATE
            self._set_registers(registers)
        return size

    def stop(self) -> None:
        """Stop it again after `watch_mappings`, which leaves it running."""
        _ptrace(_INTERRUPT, self.tid)
        self._signal = self._wait()

    def _registers(self, machine: _Machine) -> "ctypes.Array[ctypes.c_uint64]":
        registers = (ctypes.c_uint64 * machine.registers)()
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))  # struct iovec
        _ptrace(_GETREGSET, self.tid, _NT_PRSTATUS, ctypes.byref(vector))
        return registers

    def _set_registers(self, registers: "ctypes.Array[ctypes.c_uint64]") -> None:
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))  # struct iovec
        _ptrace(_SETREGSET, self.tid, _NT_PRSTATUS, ctypes.byref(vector))


def _made_again(machine: _Machine, registers: "ctypes.Array[ctypes.c_uint64]") -> "ctypes.Array[ctypes.c_uint64]":
    """Return registers with which an interrupted system call is made again, as the kernel itself would have seen to.

    The kernel only does so on the way out of the stop that interrupted the call, and that way has been used.
    """
    if machine.original is None:
        return registers
    result = ctypes.c_int64(registers[machine.result]).value
    if ctypes.c_int64(registers[machine.original]).value != -1 and result in (*_RESTART_SAME, _RESTART_BLOCK):
        number = machine.restart_syscall if result == _RESTART_BLOCK else registers[machine.original]
        registers[machine.result] = number
        registers[machine.program_counter] -= len(machine.instruction)
    registers[machine.original] = _ALL_SIGNALS
    return registers


def _machine() -> _Machine:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise TraceError(f"system calls cannot be injected on {platform.machine()}")
    return machine


def find_call_instruction(pid: int) -> int:
    """Return the address of an instruction in a process that makes a system call; the vDSO has one.

    Raises:
        TraceError: if there is none.
    """
    wanted = _machine().instruction
    executable = [mapping for mapping in read_mappings(pid) if "x" in mapping.mode and mapping.name != "[vsyscall]"]
    try:
        fd = os.open(memory_path(pid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"the memory of process {pid} cannot be read: {error.strerror}") from error
    try:
        for mapping in sorted(executable, key=lambda mapping: (mapping.name != "[vdso]", "libc" not in mapping.name)):
            with contextlib.suppress(OSError):
                at = os.pread(fd, mapping.span.size_bytes, mapping.span.start).find(wanted)
                if at >= 0:
                    return mapping.span.start + at
    finally:
        os.close(fd)
    raise TraceError(f"process {pid} has no instruction that makes a system call")


def release_all(threads: Iterable[HeldThread]) -> None:
    """Let threads go on, in whatever order they can be: the end of one that was killed may wait for another's."""
    left = list(threads)
    while left := [thread for thread in left if not thread.try_release()]:
        time.sleep(_POLL_S)


@contextlib.contextmanager
def held(
    pid: int, patience: Patience | None = None, *, without: int = 0, waits: bool = True
) -> Iterator[list[HeldThread]]:
    """Hold every thread of a process but one, so that its memory changes by nobody else's hand.

    What this process holds already is not touched.

    Args:
        pid: of the process.
        patience: how long to wait until they have stopped; None: as long as it takes.
        without: the thread that goes on.
        waits: until they have stopped, as HeldThread does.

    Raises:
        TraceError: if a thread cannot be held; all are let go then.
        GivenUp: if nobody waits for it any more; likewise.
    """
    threads: dict[int, HeldThread] = {}
    passed = {without}
    try:
        while new := [t for t in thread_ids(pid) if t not in passed and tracer_pid(t) != os.getpid()]:
            for tid in new:
                passed.add(tid)
                try:
                    threads[tid] = HeldThread(tid, waits=False)
                except OSError as error:
                    if Process.find(tid) is not None:  # it has not just ended
                        raise TraceError(
                            f"process {pid} cannot be held: {error}",
                            hint="no debugger or tracer may be attached during a dump",
                        ) from error
            if waits:
                (patience or Patience()).until(
                    lambda: not [thread for thread in threads.values() if not thread.has_settled()],
                    longest_poll_s=_POLL_S,
                )
        yield list(threads.values())
    finally:
        release_all(threads.values())
