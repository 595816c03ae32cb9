"""Asks a real driver about pools, managed memory, the time of a lock and memory that shrinks, and records its answers.

    probes.py RESULTS.json [CASE...]     on a GPU node, as root, driver >= 570, torch for two cases; below 6 minutes

Every case is a process of its own with a limit on its time; so is every call to the driver. The programs that are
checkpointed take orders by their standard input, and have none while they are locked.
"""

import contextlib
import ctypes
import itertools
import json
import os
import platform
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.driver_contract import call_apart

MIB = 1 << 20
WORD = 1 << 20  # of a block, bytes that are compared at its begin and its end
LIMIT_S = 75  # of a case
ALL_S = 340  # of all cases
LOCK_S = 30
ROUNDS = 5
LOCK_CASE_S = 22  # one way of locking a busy program, all rounds
MAX = (1 << 64) - 1
PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .global .attribute(.managed) .align 4 .b32 shared_by_both;
.visible .entry nothing() { ret; }
\0"""


# --- the program that is checkpointed


class Properties(ctypes.Structure):
    """CUmemPoolProps, the beginning of which is CUmemAllocationProp."""

    _fields_ = [  # type: ignore[mutable-override]
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 128),
    ]


class Program:
    """A CUDA process with 64 MiB of device memory."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        self.pool = ctypes.c_void_p()
        self.blocks: list[tuple[str, int, int, int]] = []  # kind, address, size, the words in it
        self.handles: dict[int, ctypes.c_uint64] = {}
        self.numbers = itertools.count(0x01010101)
        self.busy = threading.Event()
        self.threads: list[threading.Thread] = []
        self.torch: list[Any] = []
        self.failures: Counter[str] = Counter()
        self.get("plain", 64, 1)

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes'
        code = getattr(self.cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode()} {code}")

    # orders

    def use_pool(self, kind: str, threshold: int) -> None:
        """Take from the device's own pool, from a new one, or from one whose memory can be exported."""
        if kind == "default":
            self.call("cuDeviceGetDefaultMemPool", ctypes.byref(self.pool), 0)
        else:
            properties = Properties(1, int(kind == "exported"), 1, 0)
            self.call("cuMemPoolCreate", ctypes.byref(self.pool), ctypes.byref(properties))
        self.call("cuMemPoolSetAttribute", self.pool, 4, ctypes.byref(ctypes.c_uint64(threshold)))

    def threshold(self, size: int) -> None:
        self.call("cuMemPoolSetAttribute", self.pool, 4, ctypes.byref(ctypes.c_uint64(size)))

    def trim(self) -> None:
        self.call("cuMemPoolTrimTo", self.pool, ctypes.c_size_t(0))

    def destroy_pool(self) -> None:
        self.call("cuMemPoolDestroy", self.pool)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def get(self, kind: str, mib: float, count: int) -> None:
        """Allocate blocks, and write into each."""
        for _ in range(count):
            size, number = int(mib * MIB), next(self.numbers)
            address = self.allocate(kind, size, None)
            if kind == "module":
                continue
            if kind in ("managed", "managed, not touched", "pinned"):
                if kind == "managed":
                    ctypes.memset(address, 7, min(size, 2 * MIB))
                self.blocks.append((kind, address, size, 0))
                continue
            self.call("cuMemsetD32_v2", ctypes.c_uint64(address), number, ctypes.c_size_t(size // 4))
            self.blocks.append((kind, address, size, number))
        self.call("cuCtxSynchronize")

    def give(self, kind: str) -> None:
        """Free all blocks of a kind."""
        for block in [block for block in self.blocks if block[0] == kind]:
            self.free(kind, block[1], block[2], None)
            self.blocks.remove(block)
        self.call("cuCtxSynchronize")

    def allocate(self, kind: str, size: int, stream: Any) -> int:  # noqa: ANN401 - CUstream
        pointer = ctypes.c_uint64()
        if kind == "plain":
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        elif kind == "pool":
            self.call(
                "cuMemAllocFromPoolAsync", ctypes.byref(pointer), ctypes.c_size_t(size), self.pool, stream
            )  # fmt: skip
        elif kind.startswith("managed"):
            self.call("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(size), 1)
        elif kind == "pinned":
            self.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), 2)
        elif kind == "module":
            module = ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        elif kind == "vmm":
            properties, handle = Properties(1, 0, 1, 0), ctypes.c_uint64()
            self.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties),
                      ctypes.c_uint64(0))  # fmt: skip
            none = ctypes.c_uint64(0)
            self.call("cuMemAddressReserve", ctypes.byref(pointer), ctypes.c_size_t(size), none, none, none)
            self.call("cuMemMap", pointer, ctypes.c_size_t(size), none, handle, none)
            access = (ctypes.c_int * 3)(1, 0, 3)
            self.call("cuMemSetAccess", pointer, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
            self.handles[pointer.value] = handle
        return pointer.value

    def free(self, kind: str, address: int, size: int, stream: Any) -> None:  # noqa: ANN401 - CUstream
        pointer = ctypes.c_uint64(address)
        if kind == "pool":
            self.call("cuMemFreeAsync", pointer, stream)
        elif kind == "vmm":
            self.call("cuMemUnmap", pointer, ctypes.c_size_t(size))
            self.call("cuMemRelease", self.handles.pop(address))
            self.call("cuMemAddressFree", pointer, ctypes.c_size_t(size))
        elif kind == "pinned":
            self.call("cuMemFreeHost", pointer)
        else:
            self.call("cuMemFree_v2", pointer)

    def use_torch(self) -> None:
        import torch

        self.torch.append(torch.ones(64 * MIB, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()

    def verify(self) -> dict[str, Any]:
        """Return whether all memory is as it was, and whether more can be had."""
        for kind, address, size, number in self.blocks:
            if number:
                for at in (0, size - WORD):
                    data = ctypes.create_string_buffer(WORD)
                    self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address + at), ctypes.c_size_t(WORD))
                    if data.raw != number.to_bytes(4, "little") * (WORD // 4):
                        raise RuntimeError(f"{kind} of {size} bytes is not what it was")
        address = self.allocate("plain", MIB, None)
        self.free("plain", address, MIB, None)
        return {"blocks": len(self.blocks)}

    def pool_numbers(self) -> dict[str, int]:
        found = {}
        for name, attribute in (("reserved", 5), ("used", 7)):
            value = ctypes.c_uint64()
            self.call("cuMemPoolGetAttribute", self.pool, attribute, ctypes.byref(value))
            found[name] = value.value
        return found

    def start(self, work: str, threads: int) -> None:
        """Keep so many threads busy."""
        self.busy.set()
        self.failures.clear()
        self.threads = [threading.Thread(target=self.work, args=(work,), daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()
        time.sleep(0.5)

    def stop(self) -> dict[str, Any]:
        """Have the threads end."""
        self.busy.clear()
        for thread in self.threads:
            thread.join(20)
        left = sum(thread.is_alive() for thread in self.threads)
        self.call("cuCtxSynchronize")
        return {"left": left, "failures": dict(self.failures)}

    def work(self, work: str) -> None:
        try:
            self.call("cuCtxSetCurrent", self.context)
            stream = ctypes.c_void_p()
            self.call("cuStreamCreate", ctypes.byref(stream), 1)
            getattr(self, "work_" + work)(stream)
            self.call("cuStreamSynchronize", stream)
            self.call("cuStreamDestroy_v2", stream)
        except Exception as error:  # noqa: BLE001 - it is told
            self.failures[str(error)] += 1

    def work_pool(self, stream: Any, *, every: int = 16) -> None:  # noqa: ANN401 - CUstream
        """Allocate from the pool and free, several blocks at a time."""
        held: list[tuple[int, int]] = []
        for count in itertools.count():
            if not self.busy.is_set():
                break
            size = random.randint(1, 32) * MIB
            address = self.allocate("pool", size, stream)
            self.call("cuMemsetD8Async", ctypes.c_uint64(address), 1, ctypes.c_size_t(size), stream)
            held.append((address, size))
            if len(held) > 4:
                self.free("pool", *held.pop(0), stream)
            if count % every == 0:
                self.call("cuStreamSynchronize", stream)
        for address, size in held:
            self.free("pool", address, size, stream)

    def work_pool_synchronized(self, stream: Any) -> None:  # noqa: ANN401 - CUstream
        self.work_pool(stream, every=1)

    def work_plain(self, stream: Any) -> None:  # noqa: ANN401 - CUstream
        """Allocate plainly and free."""
        while self.busy.is_set():
            size = random.randint(1, 32) * MIB
            address = self.allocate("plain", size, None)
            self.call("cuMemsetD8Async", ctypes.c_uint64(address), 1, ctypes.c_size_t(size), stream)
            self.call("cuStreamSynchronize", stream)
            self.free("plain", address, size, None)

    def work_kernels(self, stream: Any, *, queued: int = 1) -> None:  # noqa: ANN401 - CUstream
        """Start kernels, and wait for them."""
        address = ctypes.c_uint64(self.allocate("plain", 256 * MIB, None))
        while self.busy.is_set():
            for _ in range(queued):
                self.call("cuMemsetD8Async", address, 1, ctypes.c_size_t(256 * MIB), stream)
            self.call("cuStreamSynchronize", stream)

    def work_queued_kernels(self, stream: Any) -> None:  # noqa: ANN401 - CUstream
        self.work_kernels(stream, queued=200)

    def work_torch(self, _: Any) -> None:  # noqa: ANN401 - CUstream
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            matrix = torch.randn(2048, 2048, device="cuda")
            while self.busy.is_set():
                for _ in range(20):
                    matrix = torch.tanh(matrix @ matrix)
                torch.cuda.current_stream().synchronize()
                float(matrix.sum())

    def _sawtooth(self, kind: str) -> None:
        while self.busy.is_set():
            held = [(self.allocate(kind, 64 * MIB, None), 64 * MIB) for _ in range(24)]
            time.sleep(0.002)
            for address, size in held:
                self.free(kind, address, size, None)
                time.sleep(0.001)

    def work_sawtooth_plain(self, _: Any) -> None:  # noqa: ANN401 - CUstream
        self._sawtooth("plain")

    def work_sawtooth_vmm(self, _: Any) -> None:  # noqa: ANN401 - CUstream
        self._sawtooth("vmm")

    def serve(self) -> None:
        for line in sys.stdin:
            number, name, *arguments = json.loads(line)
            try:
                answer = {"number": number, "done": getattr(self, name)(*arguments)}
            except Exception as error:  # noqa: BLE001 - it is told
                answer = {"number": number, "failed": f"{type(error).__name__} {error}"}
            print(json.dumps(answer), flush=True)


# --- giving it orders, and looking at it


class Running:
    """A program, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.buffer = b""
        self.orders = 0

    def order(self, name: str, *arguments: Any, limit_s: float = 30) -> Any:  # noqa: ANN401 - JSON
        """Have it do something; return what it answers, a string if that is an error."""
        assert self.process.stdin is not None
        try:
            self.orders += 1
            self.process.stdin.write(json.dumps([self.orders, name, *arguments]).encode() + b"\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = {}
            while answer.get("number") != self.orders:  # those before may be answered late
                answer = json.loads(self.line(limit_s))
        except OSError as error:
            return f"{name}: {error}"
        return f"{name}: {answer['failed']}" if "failed" in answer else answer["done"]

    def line(self, limit_s: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError("no answer")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise ConnectionError(f"ended: {self.process.wait(5)}")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def works(self) -> Any:  # noqa: ANN401 - JSON
        return self.order("verify", limit_s=10)


@contextlib.contextmanager
def running(**environment: str) -> Iterator[Running]:
    with subprocess.Popen(
        [sys.executable, __file__, "--program"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as process:
        try:
            program = Running(process)
            assert program.line(60) == b"ready"
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def say(verb: str, pid: int, **more: float) -> str:
    answer = call_apart(verb, pid, **more)
    return f"{verb}: {answer['name']} {answer.get('value', '')} {answer.get('s', -1):.3f}s"


def attempt(program: Running) -> list[str]:
    """Go from running through a checkpoint and back; what fails is unlocked."""
    pid = program.pid
    answers = [say("lock", pid), say("checkpoint", pid)]
    if "SUCCESS" in answers[-1]:
        answers += [say("restore", pid), say("unlock", pid)]
    else:
        answers += [say("state", pid), say("unlock", pid)]
    return [*answers, say("state", pid)]


def mappings(pid: int) -> dict[str, tuple[int, str, str, str]]:
    """Return size, mode, offset, name of every mapping by its addresses."""
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, mode, offset, _, _, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        found[addresses] = (end - start, mode, offset, name[0] if name else "")
    return found


def anonymous_new(before: dict[str, Any], after: dict[str, Any]) -> list[int]:
    """Return the sizes of what is new in a process's writable anonymous memory, from 1 MiB on."""
    had = [tuple(int(a, 16) for a in key.split("-")) for key, value in before.items() if not value[3]]
    found = []
    for key, value in after.items():
        if value[3] or value[0] < MIB or not value[1].startswith("rw"):
            continue
        start, end = (int(a, 16) for a in key.split("-"))
        size = end - start - sum(max(0, min(end, e) - max(start, s)) for s, e in had)
        if size >= MIB:
            found.append(size)
    return found


def signs(pid: int) -> dict[str, Any]:
    """Return what the kernel shows: NVIDIA's mappings, device files with their details, threads."""
    shown: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            details = " ".join(Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().split())
            link = re.sub(r"\d{4,}", "N", os.readlink(fd))
            shown[f"{link} {re.sub('ino: *[0-9]+', '', details)}"] += 1
    nvidia = [
        f"{key} {value[1]} {value[0]:#x} offset {value[2]} {value[3]}"
        for key, value in mappings(pid).items()
        if "nvidia" in value[3] and ".so" not in value[3]
    ]
    kinds = Counter(re.sub(r"^\S+ (\S+ \S+) offset \S+", r"\1", line) for line in nvidia)
    threads = Counter(Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir())
    return {
        "uvm": [line for line in nvidia if "uvm" in line],
        "mappings": dict(sorted(kinds.items())),
        "files": dict(sorted(shown.items())),
        "threads": dict(threads),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what is gone and what has come of files, threads, NVIDIA's mappings."""
    found = {}
    for name in ("mappings", "files", "threads"):
        gone = Counter(before[name]) - Counter(after[name])
        come = Counter(after[name]) - Counter(before[name])
        if gone or come:
            found[name] = {"gone": dict(gone), "come": dict(come)}
    return found


class Nvml:
    """What NVML says that a process holds, with the time that it took."""

    class Info(ctypes.Structure):
        _fields_ = [  # type: ignore[mutable-override]
            ("pid", ctypes.c_uint),
            ("bytes", ctypes.c_ulonglong),
            ("gi", ctypes.c_uint),
            ("ci", ctypes.c_uint),
        ]

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.library.nvmlInit_v2()
        count = ctypes.c_uint()
        self.library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self.devices = []
        for number in range(count.value):
            device = ctypes.c_void_p()
            self.library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
            self.devices.append(device)

    def held(self, pid: int) -> int:
        """Return the bytes; -1 if NVML does not answer."""
        total = 0
        for device in self.devices:
            infos, size = (self.Info * 64)(), ctypes.c_uint(64)
            if self.library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(size), infos):
                return -1
            total += sum(info.bytes for info in infos[: size.value] if info.pid == pid)
        return total


# --- cases: each fills in what it finds, so that something is left of one that does not end

Case = Callable[[dict[str, Any]], None]


def pool_at_rest(kind: str, threshold: int, live: int, idle: int, *, trim: bool = False) -> Case:
    """Checkpoint a process with so many blocks of a pool in use, and so many given back to it."""

    def case(found: dict[str, Any]) -> None:
        with running() as program:
            before, maps = signs(program.pid), mappings(program.pid)
            found["orders"] = [program.order("use_pool", kind, threshold)]
            found["orders"] += [program.order("get", "pool", 64, idle), program.order("give", "pool")]
            found["orders"] += [program.order("get", "pool", 64, live)]
            if trim:
                found["orders"] += [program.order("trim")]
            found["pool"] = program.order("pool_numbers")
            found["signs"] = changes(before, signs(program.pid))
            found["new in memory"] = anonymous_new(maps, mappings(program.pid))
            found["nvml"] = Nvml().held(program.pid)
            found["attempts"], found["works"] = [], []
            for _ in range(2):
                found["attempts"].append(attempt(program))
                found["works"].append(program.works())
            found["pool after"] = program.order("pool_numbers")

    return case


def churn(work: str, threads: int, kind: str = "default", threshold: int = 0) -> Case:
    """Checkpoint a process whose threads allocate and free all the time; several times, then when they have ended."""

    def case(found: dict[str, Any]) -> None:
        with running() as program:
            found |= {"attempts": {}, "works": {}, "orders": []}
            has_pool = work != "plain"

            def attempts(name: str, count: int) -> None:
                found["attempts"][name] = [attempt(program) for _ in range(count)]
                found["works"][name] = program.works()

            if has_pool:
                found["orders"] += [program.order("use_pool", kind, threshold), program.order("get", "pool", 64, 2)]
            before = signs(program.pid)
            found["orders"].append(program.order("start", work, threads))
            found["signs"] = changes(before, signs(program.pid))
            attempts("under churn", 5)
            answers = [say("lock", program.pid), *(say("checkpoint", program.pid) for _ in range(3))]
            if "SUCCESS" in answers[1]:
                answers.append(say("restore", program.pid))
            found["attempts"]["several in one lock"] = [*answers, say("unlock", program.pid)]
            found["orders"].append(program.order("stop", limit_s=40))
            attempts("stopped", 2)
            if has_pool:
                found["pool when stopped"] = program.order("pool_numbers")
                found["orders"].append(program.order("trim"))
                attempts("trimmed", 2)
                found["orders"] += [program.order("give", "pool"), program.order("trim")]
                attempts("empty", 2)
            if kind != "default":
                found["orders"].append(program.order("destroy_pool"))
                attempts("destroyed", 2)

    return case


def seen(*orders: list[Any], **environment: str) -> Case:
    """Record the mappings of a process that has done this, and what a checkpoint of it gives."""

    def case(found: dict[str, Any]) -> None:
        with running(**environment) as program:
            before = signs(program.pid)
            found |= {"uvm before": before["uvm"], "orders": [program.order(*o) for o in orders]}
            after = signs(program.pid)
            found["uvm"] = after["uvm"]
            found["signs"] = changes(before, after)
            maps = mappings(program.pid)
            answers = [say("lock", program.pid), say("checkpoint", program.pid)]
            found["new"] = anonymous_new(maps, mappings(program.pid))
            if "SUCCESS" in answers[-1]:
                answers.append(say("restore", program.pid))
            found["answers"] = [*answers, say("unlock", program.pid)]
            found["works"] = program.works()

    return case


def lock_time(work: str, threads: int) -> Case:
    """Measure one attempt that has all time, and attempts that grow, of a process that is busy."""

    def lock(pid: int, limit_s: float) -> tuple[str, float]:
        os.environ["LOCK_TIMEOUT_MS"] = str(int(limit_s * 1000))
        answer = call_apart("lock", pid, limit_s + 10)
        return str(answer["name"]), float(answer.get("s", -1))

    def at_once(pid: int) -> dict[str, Any]:
        name, seconds = lock(pid, LOCK_S)
        return {"name": name, "s": round(seconds, 3)}

    def in_attempts(pid: int) -> dict[str, Any]:
        start, limit_s, count = time.monotonic(), 0.5, 0
        while True:
            count += 1
            name, _ = lock(pid, limit_s)
            spent = time.monotonic() - start
            if name in ("CUDA_SUCCESS", "no answer") or spent > LOCK_S:
                return {"name": name, "s": round(spent, 3), "attempts": count}
            time.sleep(random.uniform(0.01, 0.1))
            limit_s = max(0.1, min(limit_s * 1.5, 5.0, LOCK_S - spent))

    def case(found: dict[str, Any]) -> None:
        with running() as program:
            found["orders"] = [program.order("start", work, threads, limit_s=60)]
            time.sleep(1)
            found["at once"], found["in attempts"] = [], []
            for name, way in (("at once", at_once), ("in attempts", in_attempts)):
                begin = time.monotonic()
                while len(found[name]) < ROUNDS and time.monotonic() - begin < LOCK_CASE_S:
                    found[name].append(way(program.pid))
                    if found[name][-1]["name"] == "CUDA_SUCCESS":
                        found[name][-1]["unlock"] = say("unlock", program.pid)
                    time.sleep(0.3)
            found["orders"].append(program.order("stop", limit_s=40))
            found["works"] = program.works()

    return case


def shrinking(work: str, kind: str) -> Case:
    """Read what NVML says before a lock, in it, and what the checkpoint then maps, of memory that comes and goes."""

    def case(found: dict[str, Any]) -> None:
        nvml = Nvml()
        with running() as program:
            pid = program.pid
            found["orders"] = [program.order("use_pool", "default", 0)] if kind == "pool" else []
            found["orders"].append(program.order("get", kind, 64, 4))
            found["orders"].append(program.order("start", work, 1 if "sawtooth" in work else 4))
            found["rounds"] = []
            for _ in range(8):
                row: dict[str, Any] = {"running": [nvml.held(pid)]}
                time.sleep(random.uniform(0, 0.05))
                row["running"].append(nvml.held(pid))
                answers = [say("lock", pid)]
                start = time.perf_counter()
                row["locked"] = [nvml.held(pid)]
                row["nvml_s"] = time.perf_counter() - start
                for _ in range(2):
                    time.sleep(0.1)
                    row["locked"].append(nvml.held(pid))
                maps = mappings(pid)
                answers.append(say("checkpoint", pid))
                row["mapped"] = anonymous_new(maps, mappings(pid))
                row["checkpointed"] = nvml.held(pid)
                if "SUCCESS" in answers[-1]:
                    answers.append(say("restore", pid))
                    row["restored"] = nvml.held(pid)
                row["answers"] = [*answers, say("unlock", pid)]
                found["rounds"].append(row)
                time.sleep(random.uniform(0, 0.05))
            found["orders"].append(program.order("stop"))
            found["works"] = program.works()

    return case


SIDE_BY_SIDE: dict[str, Case] = {
    "maps: plain": seen(),
    "maps: plain 1 GiB more": seen(["get", "plain", 1024, 1]),
    "maps: many plain": seen(["get", "plain", 2, 200]),
    "maps: managed 64 MiB": seen(["get", "managed", 64, 1]),
    "maps: managed 64 MiB, not touched": seen(["get", "managed, not touched", 64, 1]),
    "maps: managed 1 GiB": seen(["get", "managed", 1024, 1]),
    "maps: managed 4 KiB": seen(["get", "managed", 1 / 256, 1]),
    "maps: three managed 2 MiB": seen(["get", "managed", 2, 3]),
    "maps: managed, freed": seen(["get", "managed", 64, 1], ["give", "managed"]),
    "maps: managed variable of a module": seen(["get", "module", 0, 1]),
    "maps: pinned": seen(["get", "pinned", 64, 1]),
    "maps: vmm": seen(["get", "vmm", 64, 2]),
    "maps: pool": seen(["use_pool", "default", MAX], ["get", "pool", 64, 2]),
    "maps: torch": seen(["use_torch"]),
    "maps: torch, expandable segments": seen(["use_torch"], PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "maps: torch, cudaMallocAsync": seen(["use_torch"], PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"),
    "pool: not used": pool_at_rest("default", 0, 0, 0),
    "pool: idle, released": pool_at_rest("default", 0, 0, 4),
    "pool: idle, kept": pool_at_rest("default", MAX, 0, 4),
    "pool: idle, trimmed": pool_at_rest("default", MAX, 0, 4, trim=True),
    "pool: live": pool_at_rest("default", 0, 4, 0),
    "pool: live and idle, kept": pool_at_rest("default", MAX, 2, 4),
    "pool: live and idle, trimmed": pool_at_rest("default", MAX, 2, 4, trim=True),
    "pool: own, live": pool_at_rest("own", 0, 4, 0),
    "pool: own, live and idle, kept": pool_at_rest("own", MAX, 2, 4),
    "pool: exported, live": pool_at_rest("exported", 0, 4, 0),
    "churn: plain, 8 threads": churn("plain", 8),
    "churn: pool, 1 thread": churn("pool", 1),
    "churn: pool, 1 thread, synchronized": churn("pool_synchronized", 1),
    "churn: pool, 8 threads": churn("pool", 8),
    "churn: pool, 8 threads, kept": churn("pool", 8, threshold=MAX),
    "churn: pool, 8 threads, synchronized": churn("pool_synchronized", 8),
    "churn: pool, 8 threads, synchronized, kept": churn("pool_synchronized", 8, threshold=MAX),
    "churn: own pool, 8 threads": churn("pool", 8, kind="own"),
    "churn: own pool, 8 threads, kept": churn("pool", 8, kind="own", threshold=MAX),
    "shrinking: plain": shrinking("sawtooth_plain", "plain"),
    "shrinking: vmm": shrinking("sawtooth_vmm", "vmm"),
    "shrinking: pool": shrinking("pool_synchronized", "pool"),
}
ALONE: dict[str, Case] = {
    "lock: kernels, 8 threads": lock_time("kernels", 8),
    "lock: torch, 8 threads": lock_time("torch", 8),
    "lock: queued kernels, 8 threads": lock_time("queued_kernels", 8),
    "lock: allocations, 8 threads": lock_time("plain", 8),
}
CASES = SIDE_BY_SIDE | ALONE


def run(name: str, gpu: int, limit_s: float) -> Any:  # noqa: ANN401 - JSON
    """Run a case in a process of its own; return what it found, a string if it found nothing."""
    if limit_s < 10:
        return "no time was left"
    with subprocess.Popen(
        [sys.executable, __file__, "--case", name],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output, errors = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
        found = json.loads(output) if output else {"error": "it has ended"}
        return {**found, "errors": errors[-1500:]} if "error" in found else found


def row(found: Any) -> str:  # noqa: ANN401 - JSON
    """Return a case in a line or a few."""
    if isinstance(found, str):
        return found.strip()[-300:]

    def short(answers: list[str]) -> str:
        return " ".join(re.sub(r"(\w)\w*: (CUDA_(ERROR_)?)?(\S+).*", r"\1:\4", a) for a in answers if "state" not in a)

    lines = [f"UVM {line}" for line in found.get("uvm", [])]
    if "answers" in found:
        lines.append(short(found["answers"]))
    attempts = found.get("attempts", [])
    for name, each in attempts.items() if isinstance(attempts, dict) else [("", attempts)]:
        flat = [short(a) for a in each] if each and isinstance(each[0], list) else [short(each)] if each else []
        lines += [f"{count}x {name} {text}" for text, count in Counter(flat).items()]
    for name in ("at once", "in attempts"):
        if name in found:
            lines.append(f"{name}: " + ", ".join(f"{r['name'][5:]} {r['s']}s" for r in found[name]))
    for each in found.get("rounds", []):
        numbers = {key: each.get(key) for key in ("running", "locked", "mapped", "checkpointed", "restored")}
        lines.append(f"{numbers} {short(each['answers'])}")
    failed = [order for order in found.get("orders", []) if isinstance(order, str)]
    lines += [f"ERROR {found['error']} {found['errors'][-300:]}"] if "error" in found else []
    return "\n    ".join([*lines, f"works {found.get('works')}", *([f"FAILED ORDERS {failed}"] if failed else [])])


def main() -> None:
    if sys.argv[1] == "--program":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        program = Program()
        print("ready", flush=True)
        program.serve()
        return
    if sys.argv[1] == "--case":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("too long"))  # so that the program is ended, too
        found: dict[str, Any] = {}
        try:
            CASES[sys.argv[2]](found)
        except BaseException as error:  # noqa: BLE001 - it is told
            found["error"] = f"{type(error).__name__} {error}"
        print(json.dumps(found))
        return
    begin = time.monotonic()
    gpus, facts = 1, {"kernel": platform.release().split("-")[0], "date": datetime.now(UTC).date().isoformat()}
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        gpus = len(facts["gpu"].splitlines())
    results = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    cases: dict[str, Any] = {}
    writing = threading.Lock()

    def one(name: str, gpu: int) -> None:
        start = time.monotonic()
        answer = run(name, gpu, min(LIMIT_S, ALL_S - (start - begin)))
        with writing:
            cases[name] = answer
            print(f"== {name} {time.monotonic() - start:.1f}s\n    {row(answer)}", flush=True)
            in_order = {name: cases[name] for name in CASES if name in cases}
            results.write_text(json.dumps({**facts, "cases": in_order}, indent=1) + "\n")

    with ThreadPoolExecutor(6) as pool:
        side_by_side = [name for name in names if name in SIDE_BY_SIDE]
        list(pool.map(one, side_by_side, [number % gpus for number in range(len(side_by_side))]))
    for name in [name for name in names if name in ALONE]:
        one(name, 0)
    print(f"all: {time.monotonic() - begin:.0f}s")


if __name__ == "__main__":
    main()
