"""Records how NVML counts pieces of GPU memory, and how large the mapping is that a checkpoint makes of them.

    odd_sizes.py RESULTS.json     on a GPU node, as root, driver >= 570; takes half a minute

Nothing but ctypes is needed. `nvml` is by how much each kind of pieces lets NVML's count for the process grow;
`mapping` by how much the driver's mapping of a checkpoint grows.
"""

import ctypes
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.driver_contract import call_apart, looks, running

# Pieces, bytes of each, and of how many one is freed again; 0: none.
KINDS = (
    (12, 9 << 18, 0),
    (12, (1 << 20) + 4096, 0),
    (12, 1 << 20, 0),
    (12, 1 << 18, 0),
    (4, (100 << 18) + (1 << 17), 0),
    (12, 2 << 20, 0),
    (24, 9 << 18, 2),
)


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h."""

    _fields_ = [  # type: ignore[mutable-override]
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]  # fmt: skip


def held(pid: int) -> int:
    """Return what NVML says that a process holds on all GPUs."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    assert nvml.nvmlInit_v2() == 0
    devices, total = ctypes.c_uint(), 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(devices)) == 0
    for number in range(devices.value):
        device, infos, count = ctypes.c_void_p(), (_Process * 64)(), ctypes.c_uint(64)
        assert nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0
        assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), infos) == 0
        total += sum(info.used for info in infos[: count.value] if info.pid == pid)
    nvml.nvmlShutdown()
    return total


def program(pieces: int, size: int, freed: int) -> None:
    """Be a process that holds such pieces at rest."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointers = ctypes.c_void_p(), []
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    for number in range(pieces):
        pointer = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
        assert cuda.cuMemsetD8_v2(pointer, number % 255 + 1, ctypes.c_size_t(size)) == 0
        pointers.append(pointer)
    for pointer in pointers[::freed] if freed else []:
        assert cuda.cuMemFree_v2(pointer) == 0
    assert cuda.cuCtxSynchronize() == 0
    print("ready", flush=True)
    time.sleep(3600)


def measure(pieces: int, size: int, freed: int) -> tuple[int, int, list[str]]:
    """Return what NVML counts for such a process, and the size of the mapping of its checkpoint."""
    with running(sys.executable, __file__, "--program", *map(str, (pieces, size, freed))) as process:
        before = looks(process.pid)["mappings"]
        answers = [call_apart("lock", process.pid)["name"]]
        counted = held(process.pid)
        answers.append(call_apart("checkpoint", process.pid)["name"])
        after = looks(process.pid)["mappings"]
        new = [value[0] for start, value in after.items() if start not in before and value[1:] == ("rw-p", "0", "")]
        answers += [call_apart(verb, process.pid)["name"] for verb in ("restore", "unlock")]
        return counted, sum(size for size in new if size >= 1 << 20), answers


def main() -> None:
    """Record, write, and print a table."""
    if sys.argv[1] == "--program":
        program(*map(int, sys.argv[2:]))
        return
    base_nvml, base_mapping, _ = measure(0, 0, 0)
    cases: list[dict[str, Any]] = []
    for pieces, size, freed in KINDS:
        counted, mapping, answers = measure(pieces, size, freed)
        assert set(answers) == {"CUDA_SUCCESS"}, answers
        kept = pieces - len(range(0, pieces, freed)) if freed else pieces
        cases.append(
            {"pieces": pieces, "size": size, "freed": freed, "held": kept * size,
             "nvml": counted - base_nvml, "mapping": mapping - base_mapping}
        )  # fmt: skip
        print(cases[-1], flush=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except FileNotFoundError:
        gpu = "a stand-in"
    facts: dict[str, Any] = {
        "gpu": gpu,
        "kernel": platform.release().split("-")[0],
        "date": datetime.now(UTC).date().isoformat(),
    }
    facts |= {"context_nvml": base_nvml, "context_mapping": base_mapping, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")
    print(base_nvml, base_mapping)


if __name__ == "__main__":
    main()
