"""Records what a real driver answers to every checkpoint call in every state: what a fake driver must answer, too.

    driver_contract.py RESULTS.json     on a GPU node, as root, driver >= 570; takes half a minute

Nothing but ctypes is needed. Each call is made in a process of its own that is killed when it does not return.
"""

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERBS = ("state", "thread", "lock", "checkpoint", "restore", "unlock")
CALL_TIMEOUT_S = 30
STOPPED_TIMEOUT_S = 2
LOCK_TIMEOUT_MS = int(os.environ.get("LOCK_TIMEOUT_MS", "5000"))
VRAM_BYTES = int(os.environ.get("VRAM_BYTES", str(1 << 30)))
# From running through every state and back, every verb that does not fit first.
SEQUENCE = (
    ("state", "thread", "unlock", "restore", "checkpoint", "state"),
    ("lock", "state", "lock", "restore", "state"),
    ("checkpoint", "state", "thread", "checkpoint", "lock", "unlock", "state"),
    ("restore", "state", "restore", "lock", "state"),
    ("unlock", "state", "unlock", "state"),
)


def call(verb: str, pid: int) -> dict[str, Any]:
    """Make one call to the driver; return its result code and what it gave back."""
    cuda = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int(-1)
    lock_arguments = (ctypes.c_uint32 * 16)(LOCK_TIMEOUT_MS)  # CUcheckpointLockArgs: timeoutMs, reserved
    start = time.perf_counter()
    if verb == "state":
        code = cuda.cuCheckpointProcessGetState(pid, ctypes.byref(value))
    elif verb == "thread":
        code = cuda.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(value))
    elif verb == "lock":
        code = cuda.cuCheckpointProcessLock(pid, ctypes.byref(lock_arguments))
    else:
        code = getattr(cuda, f"cuCheckpointProcess{verb.capitalize()}")(pid, None)
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    answer = {"verb": verb, "code": code, "name": (name.value or b"").decode(), "s": time.perf_counter() - start}
    return answer | ({"value": value.value} if verb in ("state", "thread") else {})


def call_apart(verb: str, pid: int, limit_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """Make a call in a process of its own; one that does not return is an answer, too."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--call", verb, str(pid)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"verb": verb, "name": "no answer", "limit_s": limit_s}
    if done.returncode != 0:
        return {"verb": verb, "name": f"the caller ended with {done.returncode}: {done.stderr[-200:]}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def program(kind: str) -> None:
    """Be a process that checkpoints are tried on: `init` has no context, `context` holds VRAM and uses it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    if kind == "context":
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert cuda.cuCtxSetCurrent(context) == 0
        assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(VRAM_BYTES)) == 0
        assert cuda.cuMemsetD8_v2(memory, 0x5A, ctypes.c_size_t(VRAM_BYTES)) == 0
    print("ready", flush=True)
    word = ctypes.c_uint32()
    count = 0
    while True:
        if kind == "context":
            assert cuda.cuMemcpyDtoH_v2(ctypes.byref(word), memory, ctypes.c_size_t(4)) == 0
            assert word.value == 0x5A5A5A5A
        count += 1
        print("count", count, flush=True)
        time.sleep(0.05)


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says when it is ready."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.set_blocking(process.stdout.fileno(), False)
            yield process
        finally:
            process.kill()


def looks(pid: int) -> dict[str, Any]:
    """Return what the kernel shows of a process and what the driver changes of it."""
    mappings = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, mode, _, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        mappings[start] = (end - start, mode, inode, path[0] if path else "")
    fds = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            fds.append(os.readlink(fd))
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    return {"mappings": mappings, "devices": sorted(fd for fd in fds if "nvidia" in fd), "threads": threads}


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return how a process changed: sizes of its new large mappings, device files, threads."""
    new = [value for start, value in after["mappings"].items() if start not in before["mappings"]]
    gone = [value for start, value in before["mappings"].items() if start not in after["mappings"]]
    large = [value for value in new if value[0] >= VRAM_BYTES // 2]
    return {
        "new_mappings": len(new),
        "gone_mappings": len(gone),
        "gone_nvidia_mappings": sum("nvidia" in value[3] for value in gone),
        "new_large_mappings": large,
        "device_files": [len(before["devices"]), len(after["devices"])],
        "threads": [before["threads"], after["threads"]],
    }


def record() -> dict[str, Any]:
    """Return every answer."""
    cases: dict[str, Any] = {}
    with running("sh", "-c", "echo ready; exec sleep 60") as process:
        cases["no cuda"] = [call_apart(verb, process.pid) for verb in VERBS]
    cases["no process"] = [call_apart(verb, process.pid) for verb in VERBS]
    with running(sys.executable, __file__, "--program", "init") as process:
        cases["cuInit only"] = [
            call_apart(verb, process.pid) for verb in ("state", "thread", "lock", "state", "unlock")
        ]
    with running(sys.executable, __file__, "--program", "context") as process:
        steps = []
        before = looks(process.pid)
        for row in SEQUENCE:
            answers = [call_apart(verb, process.pid) for verb in row]
            steps.append({"answers": answers, "changed": compare(before, looks(process.pid))})
        assert process.stdout is not None
        process.stdout.read()
        time.sleep(1)
        cases["context"] = steps
        cases["goes on afterwards"] = "count" in (process.stdout.read() or "")
        process.send_signal(signal.SIGSTOP)
        cases["stopped"] = [call_apart(verb, process.pid, STOPPED_TIMEOUT_S) for verb in ("thread", "state")]
    with running(sys.executable, __file__, "--program", "context") as process:
        for verb in ("lock", "checkpoint"):
            call_apart(verb, process.pid)
        process.kill()
        process.wait(10)
        cases["killed while checkpointed"] = [call_apart(verb, process.pid) for verb in ("state", "restore", "unlock")]
    return cases


def main() -> None:
    """Record, write, and print a table."""
    if sys.argv[1] == "--call":
        print(json.dumps(call(sys.argv[2], int(sys.argv[3]))))
        return
    if sys.argv[1] == "--program":
        program(sys.argv[2])
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = "a stand-in"
    if shutil.which(query[0]):
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    cases = record()
    facts = {
        "gpu": gpu,
        "kernel": platform.release().split("-")[0],
        "date": datetime.now(UTC).date().isoformat(),
        "cases": cases,
    }
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")
    for name, answers in cases.items():
        rows = answers if isinstance(answers, list) else [answers]
        for row in rows:
            inner = row.get("answers", [row]) if isinstance(row, dict) else []
            text = ", ".join(f"{a['verb']} {a['name']} {a.get('value', '')}".strip() for a in inner) or str(row)
            print(f"{name}: {text}")
            if isinstance(row, dict) and "changed" in row:
                print(f"    {row['changed']}")


if __name__ == "__main__":
    main()
