"""Records what a checkpoint of the driver cannot hold, how that ends, and what the kernel shows of it beforehand.

    driver_limits.py RESULTS.json     on a GPU node, as root, driver >= 570, with torch; two GPUs show most; 4 minutes

What the preflight refuses (ocihook/gpu/preflight.py) is what is seen here to fail, by the signs recorded here.
"""

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.driver_contract import call_apart, looks
from ocihook.gpu.driver import CudaDriver
from ocihook.gpu.processes import checkpoint_all, driver_threads, lock_all
from ocihook.linux.hold import Hold
from ocihook.linux.memory import Mapping, ProcessMemory, anonymous_spans, read_mappings, subtract
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process, thread_ids
from ocihook.linux.ptrace import HeldThread, find_call_instruction

MIB = 1 << 20
NCCL_WITHOUT = {
    "p2p": {"NCCL_NVLS_ENABLE": "0"},
    "p2p without cumem": {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"},
    "shared memory with cumem": {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    "shared memory": {
        "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
    },
    "sockets": {
        "NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    },
}  # fmt: skip


# --- programs that are checkpointed


def ready() -> None:
    print("ready", flush=True)


def count_forever(step: Callable[[int], object]) -> None:
    count = 0
    while True:
        step(count)
        count += 1
        print("count", count, flush=True)
        time.sleep(0.05)


def program(name: str) -> None:
    if name == "nvml":
        library = ctypes.CDLL("libnvidia-ml.so.1")
        assert library.nvmlInit_v2() == 0
        ready()
        time.sleep(300)
    import torch

    if name == "busy":
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(int(4e10))  # about 20 s
        ready()
        time.sleep(300)
    weights = torch.arange(64 * MIB // 4, dtype=torch.int32, device="cuda")
    if name == "all devices":
        for number in range(1, torch.cuda.device_count()):
            torch.zeros(MIB, device=f"cuda:{number}")
    pinned = torch.zeros(MIB).pin_memory() if name == "pinned" else None
    sum_before = int(weights.sum(dtype=torch.int64))
    if name == "fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(300)
        print("child", pid, flush=True)
    if name == "managed":
        cuda = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64()
        assert cuda.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(64 * MIB), 1) == 0
        ctypes.memset(pointer.value, 7, 64 * MIB)
        assert cuda.cuMemsetD8_v2(pointer, 9, ctypes.c_size_t(32 * MIB)) == 0
        torch.cuda.synchronize()
    if name == "ipc":
        cuda = ctypes.CDLL("libcuda.so.1")
        pointer, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 * MIB)) == 0
        assert cuda.cuIpcGetMemHandle(ctypes.byref(handle), pointer) == 0
        child = subprocess.Popen([sys.executable, __file__, "--import", bytes(handle).hex()], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        print("child", child.pid, flush=True)
    if name == "torch ipc":
        share(weights)
    ready()

    def step(_: int) -> None:
        assert int(weights.sum(dtype=torch.int64)) == sum_before
        if pinned is not None:
            pinned.add_(1)

    count_forever(step)


def share(tensor: Any) -> None:  # noqa: ANN401 - torch's
    """Give a tensor to a child as torch does it, and one in the processor's memory of about the same kind."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue, has_come = context.Queue(), context.Event()
    child = context.Process(target=receive, args=(queue, has_come), daemon=True)
    child.start()
    queue.put(tensor)
    queue.put(torch.zeros(10000, dtype=torch.int64))
    has_come.wait()
    print("child", child.pid, flush=True)


def receive(queue: Any, has_come: Any) -> None:  # noqa: ANN401 - torch.multiprocessing's
    got = [queue.get(), queue.get()]
    assert all(tensor.sum() is not None for tensor in got)
    has_come.set()
    time.sleep(300)


def import_handle(text: str) -> None:
    import torch

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()

    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_ubyte * 64)]  # type: ignore[mutable-override]

    handle = Handle.from_buffer_copy(bytes.fromhex(text))
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ready()
    signal.sigwait([signal.SIGUSR1])
    assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, 1) == 0
    imported(os.getpid()).touch()
    time.sleep(300)


def imported(pid: int) -> Path:
    """Return the file that a process makes when it has opened another's memory."""
    return Path(f"/tmp/ocihook-imported-{pid}")


def nccl_rank(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    ones = torch.ones(MIB, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    ready()

    def step(count: int) -> None:
        ones.fill_(count)
        dist.all_reduce(ones)
        torch.cuda.synchronize()
        assert float(ones[0]) == count * world

    count_forever(step)


# --- looking at them


@contextlib.contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a program of this file until it is ready; also give the pids of its children that it named."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        start_new_session=True,
    ) as process:
        children = []
        try:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != "ready\n":
                assert line, f"{arguments} ended"
                if line.startswith("child"):
                    children.append(int(line.split()[1]))
            yield process, children
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def goes_on(process: subprocess.Popen[str]) -> bool:
    """Return whether it still counts; what it has printed before is skipped."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(TypeError, BlockingIOError):
        process.stdout.read()
    time.sleep(1.5)
    with contextlib.suppress(TypeError, BlockingIOError):
        return "count" in (process.stdout.read() or "")
    return False


def signs(pid: int) -> dict[str, Any]:
    """Return what the kernel shows of a process beside its plain libraries."""
    links: dict[str, int] = {}
    devices = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            link = re.sub(r"\d{4,}", "N", os.readlink(fd))
            links[link] = links.get(link, 0) + 1
            status = os.stat(fd)
            if "nvidia" in link and status.st_rdev:
                devices.add(f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)} {link}")
    names = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and not re.search(r"\.so|/usr/|/opt/|\[|python", fields[5]):
            names.add(f"{fields[1]} {re.sub(r'[0-9]{4,}', 'N', fields[5])}")
        elif len(fields) == 6 and re.search(r"libcuda|libnccl|libnvidia", fields[5]):
            names.add(Path(fields[5]).name)
    threads = sorted({Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()})
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return {
        "fds": links,
        "devices": sorted(devices),
        "mapped": sorted(names),
        "threads": threads,
        "environment": sorted(v for v in environment if re.match(r"NCCL_(?!VERSION)|CUDA_VISIBLE|PYTORCH", v)),
    }


def shared_files(pid: int) -> list[str]:
    """Return what a process has mapped of /dev/shm, with the sizes of the mapping and of the file."""
    found = []
    for mapping in read_mappings(pid):
        if mapping.name.startswith("/dev/shm/"):
            size = os.stat(f"/proc/{pid}/map_files/{mapping.span.start:x}-{mapping.span.end:x}").st_size
            found.append(f"{mapping.mode} {mapping.span.size_bytes} {size} {re.sub(r'[0-9]{4,}', 'N', mapping.name)}")
    return found


def unix_sockets() -> list[str]:
    names = {line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    return sorted({re.sub(r"[0-9a-f]{4,}", "N", name) for name in names if "nccl" in name or "cuda" in name})


def verbs(pids: list[int], *names: str) -> list[str]:
    """Make the calls one after the other, each on all processes at once."""
    answers = []
    with ThreadPoolExecutor(len(pids)) as pool:
        for name in names:
            results = list(pool.map(lambda pid, verb=name: call_apart(verb, pid), pids))
            answers.append(
                f"{name}: " + ", ".join(f"{r['name']} {r.get('value', '')} {r.get('s', 0):.2f}s" for r in results)
            )
    return answers


ALL = ("state", "lock", "checkpoint", "state", "restore", "state", "unlock", "state")


def nvml() -> dict[str, Any]:
    """Return what NVML shows: devices, their use, the processes with their memory."""
    start = time.perf_counter()
    library = ctypes.CDLL("libnvidia-ml.so.1")
    library.nvmlInit_v2()
    init_s = time.perf_counter() - start

    class Info(ctypes.Structure):
        _fields_ = [  # type: ignore[mutable-override]
            ("pid", ctypes.c_uint),
            ("bytes", ctypes.c_ulonglong),
            ("gi", ctypes.c_uint),
            ("ci", ctypes.c_uint),
        ]

    class Memory(ctypes.Structure):
        _fields_ = [  # type: ignore[mutable-override]
            ("total", ctypes.c_ulonglong),
            ("free", ctypes.c_ulonglong),
            ("used", ctypes.c_ulonglong),
        ]

    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    devices = []
    for number in range(count.value):
        device, minor, memory = ctypes.c_void_p(), ctypes.c_uint(), Memory()
        library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
        uuid, name = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        library.nvmlDeviceGetUUID(device, uuid, 96)
        library.nvmlDeviceGetName(device, name, 96)
        library.nvmlDeviceGetMinorNumber(device, ctypes.byref(minor))
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        infos, size = (Info * 64)(), ctypes.c_uint(64)
        code = library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(size), infos)
        devices.append(
            {
                "name": name.value.decode(), "uuid_length": len(uuid.value), "minor": minor.value, "used": memory.used,
                "code": code, "processes": [(i.pid, i.bytes) for i in infos[: size.value]],
            }
        )  # fmt: skip
    return {"init_s": init_s, "total_s": time.perf_counter() - start, "devices": devices}


def plain(name: str, **environment: str) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        with running("--program", name, **environment) as (process, _):
            found: dict[str, Any] = {"signs": signs(process.pid), "nvml": nvml()}
            before = anonymous_spans(process.pid)
            found["answers"] = verbs([process.pid], *ALL[:4])
            found["new"] = [f"{span.size_bytes:#x}" for span in subtract(anonymous_spans(process.pid), before)]
            found["devices when checkpointed"] = len(looks(process.pid)["devices"])
            found["nvml when checkpointed"] = nvml()
            found["answers"] += verbs([process.pid], *ALL[4:])
            found["goes on"] = goes_on(process)
            return found

    return case


def with_child(name: str) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        with running("--program", name) as (process, (child,)):
            found: dict[str, Any] = {"signs": [signs(process.pid), signs(child)]}
            found["shared"] = [shared_files(process.pid), shared_files(child)]
            found["child alone"] = verbs([child], "state", "lock", "unlock")
            found["parent"] = verbs([process.pid], "lock", "checkpoint", "state")
            found["devices when checkpointed"] = [len(looks(pid)["devices"]) for pid in (process.pid, child)]
            found["both"] = verbs([process.pid], "restore", "unlock", "state")
            found["goes on"] = goes_on(process)
            return found

    return case


def ipc(way: str) -> Callable[[], dict[str, Any]]:
    """Record what shows when a process opens memory of another one, and how a checkpoint of both ends."""
    return lambda: _ipc(way)


def _ipc(way: str) -> dict[str, Any]:
    with running("--program", "ipc") as (process, (child,)):
        pids = [process.pid, child]
        before = [(everything(pid), read_mappings(pid)) for pid in pids]
        os.kill(child, signal.SIGUSR1)
        while not imported(child).exists():
            time.sleep(0.01)
        imported(child).unlink()
        after = [(everything(pid), read_mappings(pid)) for pid in pids]
        found: dict[str, Any] = {"names": ["exporter", "importer"]}
        found["mappings gone, come"] = [changes(b[1], a[1]) for b, a in zip(before, after, strict=True)]
        found["gone, come"] = [[list(b[0] - a[0]), list(a[0] - b[0])] for b, a in zip(before, after, strict=True)]
        found["nvml"] = nvml()
        if way == "at once":
            found["answers"] = verbs(pids, *ALL) + verbs(pids[1:], "restore", "state")
        else:
            spans = [anonymous_spans(pid) for pid in pids]
            found["answers"] = verbs(pids, "lock", "checkpoint")
            new = [subtract(anonymous_spans(pid), had) for pid, had in zip(pids, spans, strict=True)]
            found["new"] = [[span.size_bytes for span in of_one] for of_one in new]
            for pid in pids if way == "exporter first" else reversed(pids):
                found["answers"] += verbs([pid], "restore", "unlock", "state")
        found["goes on"] = goes_on(process)
        found["kernel log"] = kernel_log()
        return found


def everything(pid: int) -> Counter[str]:
    """Return what the kernel shows of a process's files, threads and sockets."""
    shown: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            details = " ".join(Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().split())
            shown[f"{os.readlink(fd)} {re.sub('ino: *[0-9]+', '', details)}"] += 1
    for task in Path(f"/proc/{pid}/task").iterdir():
        shown[f"thread {task.joinpath('comm').read_text().strip()}"] += 1
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        if "cuda" in line or "nv" in line:
            shown["unix " + " ".join(line.split()[1:6] + line.split()[7:])] += 1
    return shown


def lock_timeout() -> dict[str, Any]:
    with running("--program", "busy") as (process, _):
        os.environ["LOCK_TIMEOUT_MS"] = "500"
        try:
            return {"answers": verbs([process.pid], "lock", "state", "lock", "state")}
        finally:
            del os.environ["LOCK_TIMEOUT_MS"]


def host_memory() -> dict[str, Any]:
    with running("--program", "plain") as (process, _):
        answers = verbs([process.pid], "lock")
        used = int(re.findall(r"VmSize:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0]) << 10
        resource.prlimit(process.pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        answers += verbs([process.pid], "checkpoint", "state")
        resource.prlimit(process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        answers += verbs([process.pid], "checkpoint", "state", "restore", "unlock", "state")
        return {"answers": answers, "goes on": goes_on(process)}


def device_memory() -> dict[str, Any]:
    import torch

    with running("--program", "plain") as (process, _):
        answers = verbs([process.pid], "lock", "checkpoint")
        torch.zeros(1, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        hog = torch.empty(free - 16 * MIB, dtype=torch.uint8, device="cuda")
        answers += verbs([process.pid], "restore", "state", "unlock", "state")
        del hog
        torch.cuda.empty_cache()
        answers += verbs([process.pid], "state", "restore", "unlock", "state")
        return {"answers": answers, "goes on": goes_on(process)}


def held_threads() -> dict[str, Any]:
    """Checkpoint and restore while a tracer holds every thread but the one that the driver names."""
    libc = ctypes.CDLL(None, use_errno=True)
    with running("--program", "plain") as (process, _):
        answers = verbs([process.pid], "thread", "lock")
        able = call_apart("thread", process.pid)["value"]
        held = [int(t.name) for t in Path(f"/proc/{process.pid}/task").iterdir() if int(t.name) != able]
        for tid in held:
            assert libc.ptrace(0x4206, tid, None, None) == 0  # PTRACE_SEIZE
            assert libc.ptrace(0x4207, tid, None, None) == 0  # PTRACE_INTERRUPT
            os.waitpid(tid, 0x40000000)
        answers += verbs([process.pid], "state", "checkpoint", "state")
        threads = len(list(Path(f"/proc/{process.pid}/task").iterdir()))
        answers += verbs([process.pid], "restore", "state")
        for tid in held:
            libc.ptrace(17, tid, None, None)
        answers += verbs([process.pid], "unlock")
        return {"held": len(held), "threads": threads, "answers": answers, "goes on": goes_on(process)}


def gpu_map() -> dict[str, Any]:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    uuids = [cu.cuDeviceGetUuid(cu.cuDeviceGet(i)[1])[1] for i in range(cu.cuDeviceGetCount()[1])]

    def restore(pid: int, pairs: list[tuple[int, int]]) -> str:
        code = os.fork()
        if code == 0:
            arguments, row = cu.CUcheckpointRestoreArgs(), []
            for old, new in pairs:
                pair = cu.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = uuids[old], uuids[new]
                row.append(pair)
            arguments.gpuPairs, arguments.gpuPairsCount = row, len(row)
            os._exit(int(cu.cuCheckpointProcessRestore(pid, arguments)[0]) % 256)
        return str(os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]))

    found: dict[str, Any] = {}
    maps: dict[str, list[tuple[int, int]]] = {
        "identity": [(0, 0), (1, 1)],
        "first only": [(0, 0)],
        "swap": [(0, 1), (1, 0)],
    }
    for visible in ("", "0"):
        for name, pairs in maps.items():
            environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
            with running("--program", "plain", **environment) as (process, _):
                answers = verbs([process.pid], "lock", "checkpoint")
                answers.append("restore code % 256: " + restore(process.pid, pairs))
                answers += verbs([process.pid], "state")
                if not answers[-1].endswith("1 "):
                    answers += verbs([process.pid], "restore")
                answers += verbs([process.pid], "unlock", "state")
                found[f"visible {visible or 'all'}, {name}"] = [
                    *answers,
                    goes_on(process),
                    signs(process.pid)["devices"],
                ]
    return found


def nccl(name: str) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(2) as pool:
                entered = [
                    pool.submit(stack.enter_context, running("--rank", str(rank), "2", **NCCL_WITHOUT[name]))
                    for rank in (0, 1)
                ]
                ranks = [future.result(90)[0] for future in entered]
            pids = [rank.pid for rank in ranks]
            found: dict[str, Any] = {"signs": [signs(pid) for pid in pids], "unix sockets": unix_sockets()}
            found["answers"] = verbs(pids, *ALL)
            found["goes on"] = [goes_on(rank) for rank in ranks]
            return found

    return case


def nccl_at_rest(way: str) -> Callable[[], dict[str, Any]]:
    """Checkpoint two ranks over sockets and leave them so for a while, as a dump does.

    Their own threads run meanwhile (`free`), or are held by a tracer (`held`), and what the driver has put into their
    memory is taken from them for the while (`moved`); or all is as ocihook does it (`ours`).
    """

    def case() -> dict[str, Any]:
        found: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(2) as pool:
                entered = [
                    pool.submit(stack.enter_context, running("--rank", str(number), "2", **NCCL_WITHOUT["sockets"]))
                    for number in (0, 1)
                ]
                ranks = [future.result(60)[0] for future in entered]
            processes = [process for rank in ranks if (process := Process.find(rank.pid))]
            pids = [process.pid for process in processes]
            driver = CudaDriver()
            lock_all(driver, processes, ENDLESS, 30)
            held, taken, hold = [], [], None
            before = [read_mappings(pid) for pid in pids]
            if way == "ours":
                threads = driver_threads(driver, processes, ENDLESS)
                hold = Hold()
                stack.callback(hold.release)
                hold.add(threads, ENDLESS)
                found["spans"] = [
                    sum(span.size_bytes for span in one.spans) for one in checkpoint_all(driver, threads, ENDLESS)
                ]
            else:
                ables = [driver.restore_thread_id(pid) for pid in pids]
                if way in ("held", "moved"):
                    held = [HeldThread(tid, ENDLESS) for pid in pids for tid in thread_ids(pid) if tid not in ables]
                found["answers"] = verbs(pids, "checkpoint")
                if way == "moved":
                    taken = [
                        take(process, able, was) for process, able, was in zip(processes, ables, before, strict=True)
                    ]
            found["mappings gone, come"] = [
                changes(was, read_mappings(pid)) for pid, was in zip(pids, before, strict=True)
            ]
            found["alive"] = []
            for _ in range(10):
                found["alive"].append([rank.poll() for rank in ranks])
                time.sleep(0.5)
            for process, parts in zip(processes, taken, strict=False):
                for address, data in parts:
                    ProcessMemory(process).write([data], address)
            found["answers"] = [*found.get("answers", []), *verbs(pids, "state", "restore", "state", "unlock", "state")]
            for thread in held:
                thread.release()
            if hold:
                hold.release()
            found["goes on"] = [goes_on(rank) for rank in ranks]
            found["kernel log"] = kernel_log()
            return found

    return case


def take(process: Process, able: int, before: list[Mapping]) -> list[tuple[int, memoryview]]:
    """Read what is new in a process's memory, and make it drop that."""
    old = [mapping.span for mapping in before if mapping.is_anonymous]
    memory, thread, parts = ProcessMemory(process), HeldThread(able, ENDLESS), []
    for span in subtract(anonymous_spans(process.pid), old):
        data = memoryview(bytearray(span.size_bytes))
        assert memory.read_into(data, span.start) == len(data)
        thread.make_call("madvise", find_call_instruction(process.pid), span.start, span.size_bytes, 4)
        parts.append((span.start, data))
    thread.release()
    return parts


def changes(before: list[Mapping], after: list[Mapping]) -> list[list[str]]:
    """Return which mappings are gone and which are new, by mode, size and name."""

    def said(mappings: set[Mapping]) -> list[str]:
        counts = Counter(f"{m.mode} {m.span.size_bytes:#x} {re.sub(r'[0-9]{4,}', 'N', m.name)}" for m in mappings)
        return sorted(f"{count} times {what}" for what, count in counts.items())

    return [said(set(before) - set(after)), said(set(after) - set(before))]


def kernel_log() -> list[str]:
    """Return what the kernel says of processes that died."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20, check=False)
    return [line for line in done.stdout.splitlines() if re.search(r"segfault|traps:|killed process|Xid", line)][-10:]


def nvml_only() -> dict[str, Any]:
    with running("--program", "nvml") as (process, _):
        return {"signs": signs(process.pid), "answers": verbs([process.pid], "state", "lock")}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "nvml only": nvml_only,
    "plain": plain("plain"),
    "visible device 0": plain("plain", CUDA_VISIBLE_DEVICES="0"),
    "all devices": plain("all devices"),
    "expandable segments": plain("plain", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "pinned": plain("pinned"),
    "managed": plain("managed"),
    "fork": with_child("fork"),
    "torch ipc": with_child("torch ipc"),
    **{f"ipc, {way}": ipc(way) for way in ("at once", "exporter first", "importer first")},
    "lock timeout": lock_timeout,
    "host memory": host_memory,
    "device memory": device_memory,
    "held threads": held_threads,
    "gpu map": gpu_map,
    **{f"nccl {name}": nccl(name) for name in NCCL_WITHOUT},
    **{f"nccl sockets at rest, {way}": nccl_at_rest(way) for way in ("free", "held", "moved", "ours")},
}


def main() -> None:
    if sys.argv[1] == "--program":
        program(sys.argv[2])
    elif sys.argv[1] == "--import":
        import_handle(sys.argv[2])
    elif sys.argv[1] == "--rank":
        nccl_rank(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "--case":
        print(json.dumps(CASES[sys.argv[2]]()))
    else:
        facts: dict[str, Any] = {
            "kernel": platform.release().split("-")[0],
            "date": datetime.now(UTC).date().isoformat(),
            "cases": {},
        }
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        for name in sys.argv[2:] or CASES:
            start = time.time()
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--case", name],
                    capture_output=True, text=True, timeout=80, check=False,
                )  # fmt: skip
                sys.stderr.write(done.stderr[-3000:])
                facts["cases"][name] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-1500:]
            except subprocess.TimeoutExpired as error:
                facts["cases"][name] = f"no end within {error.timeout} s"
            print(f"== {name} {time.time() - start:.1f}s", json.dumps(facts["cases"][name])[:1500], flush=True)
            Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
