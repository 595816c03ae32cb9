"""Times whole checkpoints through podman: as it is, with its default compression, and with ocihook."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from integration.podman.engine import Podman

_WORKLOAD = Path("integration/workload.c")


class WholeCheckpoints(NamedTuple):
    """Seconds and archive sizes of checkpoints of the same memory, left running, by what was done with it.

    packed: by ocihook; zstd: by podman, its default; none: neither.
    """

    seconds: dict[str, list[float]]
    archive_bytes: dict[str, int]


def whole_checkpoints(dataset: Path, rounds: int) -> WholeCheckpoints:
    """Checkpoint two containers that hold the data set in turns, one on a node without ocihook."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))  # a disk, as on a node
    workload = scratch / "workload"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", workload, _WORKLOAD], check=True)
    nodes: list[Podman] = []
    try:
        for name in ("plain", "packed"):
            (scratch / name).mkdir()
            node = Podman(scratch / name, "runc", workload)
            nodes.append(node)
            node.start("c", "/dataset", volume=f"{dataset.absolute()}:/dataset:ro")
        plain, packed = nodes
        packed.install()
        seconds: dict[str, list[float]] = {"packed": [], "zstd": [], "none": []}
        sizes: dict[str, int] = {}
        for number in range(rounds + 1):  # the first is not counted
            for name, node in (("packed", packed), ("zstd", plain), ("none", plain)):
                archive = scratch / f"{name}.tar"
                archive.unlink(missing_ok=True)
                begin = time.perf_counter()
                node.checkpoint("c", archive, "--leave-running", compression="zstd" if name == "zstd" else "none")
                if number:
                    seconds[name].append(time.perf_counter() - begin)
                sizes[name] = archive.stat().st_size
        return WholeCheckpoints(seconds, sizes)
    finally:
        for node in nodes:
            node.close()
        shutil.rmtree(scratch, ignore_errors=True)
