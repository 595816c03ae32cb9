"""Finds out whether a checkpointed CUDA process may be forked, so that it has its GPU again before its memory is read.

    fork.py RESULTS.json [GIB...]     on a GPU node, as root, driver >= 570; with torch a second program; 4 minutes

The driver has moved GPU memory into a mapping of the process. Here the process is made to fork then, and gets its GPU
back at once, while the child is read. Each program goes three ways, one after the other in one process, and its GPU
memory is compared after each: `plain` (no fork: what the driver takes alone), `forked`, and `dropped` (forked, and the
child drops what has been read). Of each: is the driver's mapping in the child, is it equal to what the parent had, does
it stay so while the driver restores, how long did what take, how much memory of the machine was used. No call to the
driver is made about a process whose driver's thread is stopped. A program that takes longer than TIMEOUT_S is killed.
"""

import ctypes
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import xxhash

from ocihook.gpu.driver import CudaDriver
from ocihook.gpu.processes import checkpoint_all, driver_threads, lock_all
from ocihook.linux.forked import Fork, end, fork, reap
from ocihook.linux.memory import ProcessMemory, Span, available_bytes, read_detailed_mappings, read_mappings
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Child, Process, children, thread_ids
from ocihook.linux.ptrace import HeldThread, find_call_instruction, held
from ocihook.linux.workers import call_each, die_with_parent, start_call

TIMEOUT_S = 240
CALL_TIMEOUT_S = 60
MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
PIECE_BYTES = 64 * MIB
PINNED_BYTES = int(os.environ.get("PINNED_BYTES", str(256 * MIB)))
WAYS = ("plain", "forked", "dropped")


# --- programs: each line on stdin is answered by a checksum of all that it has on the GPU, which it then changes


def answer_forever(checksum: Callable[[], str], change: Callable[[int], object]) -> None:
    print("ready", flush=True)
    for count, _ in enumerate(sys.stdin, 1):
        before = checksum()
        change(count)
        print(before, checksum(), flush=True)


def driver_program(size: int) -> None:
    """Hold GPU memory by the driver API alone, and host memory that is registered with it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)) == 0
    block = ctypes.create_string_buffer(os.urandom(BLOCK_BYTES), BLOCK_BYTES)
    for at in range(0, size, BLOCK_BYTES):
        ctypes.memmove(block, at.to_bytes(8, "little"), 8)
        assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(memory.value + at), block, ctypes.c_size_t(BLOCK_BYTES)) == 0
    pinned = (ctypes.c_ubyte * PINNED_BYTES)()
    if hasattr(cuda, "cuMemHostRegister_v2"):
        ctypes.memset(pinned, 0x3C, PINNED_BYTES)
        assert cuda.cuMemHostRegister_v2(pinned, ctypes.c_size_t(PINNED_BYTES), 0) == 0

    def checksum() -> str:
        digest = xxhash.xxh3_64()
        for at in range(0, size, BLOCK_BYTES):
            assert cuda.cuMemcpyDtoH_v2(block, ctypes.c_uint64(memory.value + at), ctypes.c_size_t(BLOCK_BYTES)) == 0
            digest.update(block)
        digest.update(pinned)
        return digest.hexdigest()

    def change(count: int) -> None:
        for at in range(0, size, BLOCK_BYTES):
            assert cuda.cuMemsetD8_v2(ctypes.c_uint64(memory.value + at + 64), count, ctypes.c_size_t(64)) == 0
        pinned[::4096] = [count] * len(pinned[::4096])

    answer_forever(checksum, change)


def torch_program(size: int) -> None:
    """Hold weights and pinned memory, and compute with them."""
    import torch

    weights = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    matrix = torch.randn(2048, 2048, device="cuda")
    pinned = torch.empty(PINNED_BYTES // 8, dtype=torch.int64, pin_memory=True).random_()
    torch.cuda.synchronize()

    def checksum() -> str:
        digest = xxhash.xxh3_64()
        for part in (weights, pinned.to("cuda")):
            digest.update(part.view(-1, 512).sum(1).cpu().numpy().tobytes())
        digest.update((matrix @ matrix).cpu().numpy().tobytes())
        return digest.hexdigest()

    def change(count: int) -> None:
        weights.add_(count)
        pinned.add_(count)
        torch.cuda.synchronize()

    answer_forever(checksum, change)


PROGRAMS = {"driver": driver_program, "torch": torch_program}


# --- looking at them


def content(pid: int, spans: list[Span], after: Callable[[Span], object] = lambda _: None) -> str:
    """Return a checksum of the memory of a process."""
    process = Process.find(pid)
    assert process is not None, f"process {pid} has ended"
    memory, view, digest = ProcessMemory(process), memoryview(bytearray(BLOCK_BYTES)), xxhash.xxh3_64()
    for span in spans:
        for piece in range(span.start, span.end, PIECE_BYTES):
            end = min(piece + PIECE_BYTES, span.end)
            for at in range(piece, end, BLOCK_BYTES):
                part = view[: min(BLOCK_BYTES, end - at)]
                assert memory.read_into(part, at) == len(part), f"not all of {at:#x} can be read"
                digest.update(part)
            after(Span(piece, end))
    return digest.hexdigest()


def looks(pid: int, spans: list[Span]) -> list[dict[str, Any]]:
    """Return what the kernel shows of the mappings of a process that spans are in."""
    return [
        {"size": one.mapping.span.size_bytes, "mode": one.mapping.mode, "anonymous": one.anonymous_bytes,
         "flags": " ".join(sorted(one.flags))}
        for one in read_detailed_mappings(pid)
        if any(one.mapping.span.start < span.end and span.start < one.mapping.span.end for span in spans)
    ]  # fmt: skip


class Clock:
    """Seconds of each step, and the machine's free memory after it."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.free: dict[str, int] = {"at first": available_bytes() // MIB}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.found[name] = round(time.monotonic() - began, 4)
            self.free[name] = available_bytes() // MIB


def bounded(function: Callable[[int], Any], pid: int) -> Any:  # noqa: ANN401 - what the function gives
    """Call the driver in a process of its own, within a limit."""
    (outcome,) = call_each(function, [pid], Patience(timeout_s=CALL_TIMEOUT_S))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def read_until(item: tuple[int, int, list[Span]]) -> tuple[list[str], float]:
    """Read a child again and again, until something is written to a pipe."""
    pipe, pid, spans = item
    began, found = time.monotonic(), [content(pid, spans)]
    while not select.select([pipe], [], [], 0)[0]:
        found.append(content(pid, spans))
    return found, time.monotonic() - began


def go(way: str, process: Process, driver: CudaDriver, found: dict[str, Any]) -> None:
    """Take the GPU away from a process and give it back, with or without a fork in between; add what is found."""
    clock, patience = Clock(), Patience(timeout_s=TIMEOUT_S)
    found |= {"seconds": clock.found, "available_mib": clock.free}
    threads = driver_threads(driver, [process], patience)
    able = threads[process]
    found["threads"] = len(thread_ids(process.pid))
    with clock.step("lock"):
        lock_all(driver, [process], patience, 10)
    with held(process.pid, patience, without=able) as still:
        with clock.step("checkpoint"):
            (checkpointed,) = checkpoint_all(driver, threads, patience, workers=len(os.sched_getaffinity(0)))
        spans = list(checkpointed.spans)
        found["mapping"] = looks(process.pid, spans)
        with clock.step("read parent"):
            found["parent"] = content(process.pid, spans)
        forked = None
        if way != "plain":
            forked = fork_now(process, still, able, clock, patience)
            found["child has"] = looks(forked.process.pid, spans)
            found["child lacks"] = lacking(process.pid, forked.process.pid)
        reader, writer = os.pipe()
        item = (reader, forked.process.pid if forked else process.pid, spans)
        try:
            if way == "forked":
                with start_call(read_until, item) as call:
                    found["driver"] = give_back(driver, process, clock)
                    os.write(writer, b"x")
                    outcome = call.outcome(Patience(timeout_s=CALL_TIMEOUT_S))
                    is_read = isinstance(outcome, tuple)
                    found["child meanwhile"], found["child was read for"] = outcome if is_read else ([repr(outcome)], 0)
            else:
                found["driver"] = give_back(driver, process, clock)
        finally:
            os.close(reader)
            os.close(writer)
        found["parent's mapping afterwards"] = looks(process.pid, spans)
    if forked:
        with clock.step("read child"):
            after = forked.drop if way == "dropped" else lambda _: None
            found["child after restore"] = content(forked.process.pid, spans, after)
        with clock.step("end"):
            end(forked.process)
            reap(forked.process, [process])
        found["zombie"] = Child.find(forked.process.pid) is not None
        equal = {*found.get("child meanwhile", []), found["child after restore"], found["parent"]}
        found["child is equal"] = len(equal) == 1
    found["children"] = len(children(process.pid))


def fork_now(process: Process, still: list[HeldThread], able: int, clock: Clock, patience: Patience) -> Fork:
    """Fork with all threads stopped, the driver's, too, for this moment."""
    instruction = find_call_instruction(process.pid)
    with clock.step("fork"):
        own = HeldThread(able, patience)
        try:
            return fork(process, [*still, own], instruction)
        finally:
            own.release()


def lacking(parent: int, child: int) -> list[str]:
    """Return what of the parent is not mapped in the child, by size and name."""
    there = {mapping.span for mapping in read_mappings(child)}
    gone = [mapping for mapping in read_mappings(parent) if mapping.span not in there]
    return [f"{mapping.span.size_bytes} {mapping.mode} {mapping.name}" for mapping in gone]


def give_back(driver: CudaDriver, process: Process, clock: Clock) -> str:
    """Restore and unlock; return the driver's last state."""
    with clock.step("restore"):
        bounded(driver.restore, process.pid)
    with clock.step("unlock"):
        bounded(driver.unlock, process.pid)
    return str(bounded(driver.state, process.pid))


def case(name: str, size: int) -> dict[str, Any]:
    """Send one program all ways."""
    command = [sys.executable, __file__, "--program", name, str(size)]
    found: dict[str, Any] = {"program": name, "bytes": size, "ways": []}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n", "the program has ended"

            def ask() -> list[str]:
                program.stdin.write("\n")  # type: ignore[union-attr]
                program.stdin.flush()  # type: ignore[union-attr]
                return str(program.stdout.readline()).split()  # type: ignore[union-attr]

            process, driver = Process.find(program.pid), CudaDriver()
            assert process is not None
            found["threads"] = sorted(
                Path(f"/proc/{process.pid}/task/{tid}/comm").read_text().strip() for tid in thread_ids(process.pid)
            )
            had = ask()
            for way in WAYS:
                outcome: dict[str, Any] = {"way": way}
                try:
                    go(way, process, driver, outcome)
                except Exception as error:  # noqa: BLE001 - it is the finding
                    outcome["error"] = repr(error)
                    with suppress(Exception):
                        outcome["state"] = str(bounded(driver.state, process.pid))
                    found["ways"].append(outcome)
                    break
                answer = ask()
                outcome["GPU memory is intact"] = answer[:1] == had[1:]
                outcome["goes on"] = len(answer) == 2 and answer[0] != answer[1]
                found["ways"].append(outcome)
                had = answer
        finally:
            program.kill()
    return found


def bounded_case(name: str, size: int) -> dict[str, Any]:
    """Run a case in a process of its own, which is killed with all that it has started if it takes too long."""
    command = [sys.executable, __file__, "--case", name, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as runner:
        try:
            output, _ = runner.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            runner.send_signal(signal.SIGKILL)
            output = runner.communicate()[0] + f"\nno end within {TIMEOUT_S} s"
    lines = output.splitlines()
    with suppress(ValueError, IndexError):
        return dict(json.loads(lines[-1]))
    return {"program": name, "bytes": size, "error": lines[-12:]}


def main() -> None:
    """Record, write, and print."""
    if sys.argv[1] == "--program":
        die_with_parent(os.getppid())
        PROGRAMS[sys.argv[2]](int(sys.argv[3]))
        return
    if sys.argv[1] == "--case":
        die_with_parent(os.getppid())
        print(json.dumps(case(sys.argv[2], int(sys.argv[3]))))
        return
    sizes = [int(float(gib) * (1 << 30)) // BLOCK_BYTES * BLOCK_BYTES for gib in sys.argv[2:] or ["1", "8"]]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = "a stand-in"
    if shutil.which(query[0]):
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    facts: dict[str, Any] = {
        "gpu": gpu,
        "kernel": platform.release().split("-")[0],
        "cores": os.cpu_count(),
        "huge pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "cases": [],
    }
    has_torch = (
        gpu != "a stand-in" and subprocess.run([sys.executable, "-c", "import torch"], check=False).returncode == 0
    )
    for size in sizes:
        for name in PROGRAMS if has_torch else ["driver"]:
            facts["cases"].append(bounded_case(name, size))
            Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")
            print(json.dumps(facts["cases"][-1], indent=1), flush=True)


if __name__ == "__main__":
    main()
