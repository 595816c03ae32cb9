"""What limits the memory path on a node: a process's memory to a tmpfs and back, by it and by plain copies.

    memory_limits.py RESULTS_DIR GIB [WORKERS...]     as root; no GPU needed

Rows: plain copies out (read from the process, written to files) and in, with as many workers, files in small and in
huge pages; the memory path does the same with checksums, LZ4 tries, zero tests and tables. Written to
memory-limits.json: bytes, seconds and GB/s each, and the memory path's share of the plain copy.
"""

import contextlib
import json
import mmap
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ocihook.linux.memory import ProcessMemory
from ocihook.linux.procfs import Process
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import PackFile
from ocihook.packs.packed_manifest import PackedRegion
from ocihook.packs.packing import pack
from ocihook.packs.pages import BATCH_BYTES, Source, Target
from ocihook.packs.unpacking import Packs

PIECE_BYTES = 16 << 20
BLOCK_BYTES = 2 << 20  # copied at a time
PLACE = Path("/tmp/ocihook-limits")
ADVICE_HUGE = 14  # MADV_HUGEPAGE


def hold(size: int) -> tuple[Process, int]:
    """Start a process that has so much incompressible memory in huge pages; return it and the address."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        import ctypes

        memory = mmap.mmap(-1, size)
        memory.madvise(ADVICE_HUGE)
        block = random.Random(1).randbytes(8 << 20)
        for at in range(0, size, len(block)):
            memory[at : at + len(block)] = block
        os.write(writer, ctypes.addressof(ctypes.c_char.from_buffer(memory)).to_bytes(8, "little"))
        signal.pause()
    address = int.from_bytes(os.read(reader, 8), "little")
    process = Process.find(pid)
    assert process is not None
    return process, address


@contextlib.contextmanager
def place(size: int, huge: str) -> Iterator[Path]:
    """Mount a tmpfs."""
    PLACE.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size + (1 << 30)},huge={huge}", "x", PLACE], check=True)
    try:
        yield PLACE
    finally:
        subprocess.run(["umount", PLACE], check=True)


def copy(process: Process, address: int, size: int, directory: Path, workers: int, *, out: bool) -> None:
    """Copy plainly, a file for each piece."""

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        memory, view = ProcessMemory(process), memoryview(bytearray(BLOCK_BYTES))
        for task in tasks:
            fd = os.open(directory / f"piece-{task}", os.O_RDWR | os.O_CREAT)
            for at in range(0, PIECE_BYTES, BLOCK_BYTES):
                if out:
                    memory.read_into(view, address + task * PIECE_BYTES + at)
                    os.pwrite(fd, view, at)
                else:
                    os.preadv(fd, [view], at)
                    memory.write([view], address + task * PIECE_BYTES + at)
            os.close(fd)
            yield task

    for _ in run_forked(worker, tasks=size // PIECE_BYTES, workers=workers):
        pass


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    result = act()
    return time.monotonic() - began, result


def measure(size: int, workers: int, huge: str) -> dict[str, Any]:
    """Return one row."""
    process, address = hold(size)
    try:
        with place(2 * size, huge) as directory:
            plain_out, _ = timed(lambda: copy(process, address, size, directory, workers, out=True))
            plain_in, _ = timed(lambda: copy(process, address, size, directory, workers, out=False))
            source = Source(partial(ProcessMemory, process), address, size)
            ours_out, (rows, infos) = timed(
                lambda: pack([source], directory, prefix="ocihook-region-", workers=workers, durable=False)
            )
            region = PackedRegion("1", address, size, rows[0])
            packs = Packs([region], infos, {info.name: PackFile(directory / info.name) for info in infos})
            target = Target(partial(ProcessMemory, process), address, None, BATCH_BYTES)
            ours_in, _ = timed(lambda: packs.write({region.name: target}, workers=workers))
            packs.close()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
    seconds = {"plain_out_s": plain_out, "plain_in_s": plain_in, "ours_out_s": ours_out, "ours_in_s": ours_in}
    shares = {"out_share": plain_out / ours_out, "in_share": plain_in / ours_in}
    return {"bytes": size, "workers": workers, "tmpfs_huge": huge, **seconds, **shares}


def main() -> None:
    size = int(sys.argv[2]) << 30
    facts = {"kernel": platform.release().split("-")[0], "date": datetime.now(UTC).date().isoformat()}
    facts["cores"] = str(os.cpu_count())
    found = []
    for workers in map(int, sys.argv[3:] or [str(os.cpu_count())]):
        for huge in ("never", "within_size"):
            row = {**facts, **measure(size, workers, huge)}
            found.append(row)
            speeds = {key[:-2]: f"{size / 1e9 / value:.1f} GB/s" for key, value in row.items() if key.endswith("_s")}
            print(workers, huge, speeds, f"{row['out_share']:.2f} {row['in_share']:.2f}", flush=True)
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    (results / "memory-limits.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
