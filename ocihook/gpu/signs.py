"""What the kernel shows of a process's use of CUDA, without a call to the driver: it may be frozen, or not ours.

What the signs mean was recorded on a real node: integration/gpu/results/driver-limits-580.json, probes-580.json.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ocihook.linux.files import open_inside

_DRIVER_LIBRARY = re.compile(r"/libcuda\.so[.0-9]*( \(deleted\))?$", re.MULTILINE)
_IPC_EVENTS = re.compile(r" rw-s .*/dev/shm/cuda\.shm\.[0-9a-f.]+( \(deleted\))?$", re.MULTILINE)
# The driver maps nvidia-uvm for itself as it does all devices: in a window of its own that begins at 8 GiB. Managed
# memory is mapped from it in full size, where the kernel puts all mappings.
_UVM = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ rw-s .*/dev/nvidia-uvm$", re.MULTILINE)
_DRIVERS_WINDOW_END = 1 << 40
_DEVICE = re.compile(r"/dev/nvidia([0-9]+|ctl|-uvm|-uvm-tools|-modeset|-caps/nvidia-cap[0-9]+)")
_GPU = re.compile(r"/dev/nvidia[0-9]+")
_CAPABILITY = re.compile(r"/dev/nvidia-caps/nvidia-cap[0-9]+")
_MIG_MONITOR = 2  # /proc/driver/nvidia-caps/mig-minors: 1 and 2 are MIG's own, those above are parts of a GPU
_IO_URING = "anon_inode:[io_uring]"
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")
_NCCL_SOCKET = re.compile(r"@/?tmp/nccl-socket-")  # of every communicator, whatever its transport
_NCCL_CONFIGURATION = ("etc/nccl.conf", "root/.nccl.conf")
_MAX_SMALL_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Of one process."""

    pid: int
    has_driver: bool = False  # libcuda is mapped
    device_files: int = 0  # open ones of NVIDIA's
    gpu_minors: frozenset[int] = frozenset()  # of the GPUs it has open, visible to CUDA or not
    has_mig: bool = False
    has_io_uring: bool = False
    has_ipc: bool = False  # CUDA IPC with events, as torch has it; of memory alone the kernel shows nothing
    has_managed_memory: bool = False  # of variables in a module, too
    has_nccl: bool = False  # a communicator, not only the library
    environment: Mapping[str, str] = field(default_factory=dict)  # NCCL_*, CUDA_* that it was started with


def read_signs(pid: int) -> Signs:
    """Return the signs of a process; none when it is gone."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return Signs(pid=pid)
    has_driver = bool(_DRIVER_LIBRARY.search(maps))
    links = _links(pid)
    devices = [(fd, link) for fd, link in links if _DEVICE.fullmatch(link)]
    if not has_driver and not devices:
        return Signs(pid=pid)
    capabilities = {_minor(pid, fd) for fd, link in devices if _CAPABILITY.fullmatch(link)}
    sockets = {match[1] for _, link in links if (match := _SOCKET.fullmatch(link))}
    return Signs(
        pid=pid,
        has_driver=has_driver,
        device_files=len(devices),
        gpu_minors=frozenset(_minor(pid, fd) for fd, link in devices if _GPU.fullmatch(link)) - {-1},
        has_mig=any(minor > _MIG_MONITOR for minor in capabilities),
        has_io_uring=any(link == _IO_URING for _, link in links),
        has_ipc=bool(_IPC_EVENTS.search(maps)),
        has_managed_memory=any(int(start, 16) >= _DRIVERS_WINDOW_END for start in _UVM.findall(maps)),
        has_nccl=not sockets.isdisjoint(_nccl_sockets(pid)),
        environment=_environment(pid),
    )


def count_device_files(pid: int) -> int:
    """Return how many of NVIDIA's device files a process has open."""
    return sum(bool(_DEVICE.fullmatch(link)) for _, link in _links(pid))


def _links(pid: int) -> list[tuple[str, str]]:
    links = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                links.append((fd, os.readlink(f"/proc/{pid}/fd/{fd}")))
    return links


def _minor(pid: int, fd: str) -> int:
    try:
        return os.minor(os.stat(f"/proc/{pid}/fd/{fd}").st_rdev)
    except OSError:
        return -1


def _nccl_sockets(pid: int) -> set[str]:
    """Return the inodes of NCCL's own sockets in the network namespace of a process."""
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    rows = (line.split(maxsplit=7) for line in lines[1:])
    return {row[6] for row in rows if len(row) == 8 and _NCCL_SOCKET.match(row[7])}


def _environment(pid: int) -> dict[str, str]:
    """Return what NCCL and CUDA would read: NCCL's configuration files, and over them the environment.

    A file that the container has behind a link is not seen: it could lead to the node's.
    """
    found: dict[str, str] = {}
    for name in _NCCL_CONFIGURATION:
        with contextlib.suppress(OSError), open(open_inside(pid, name), "rb") as file:
            found |= _variables(file.read(_MAX_SMALL_FILE_BYTES).split(b"\n"))
    with contextlib.suppress(OSError):
        found |= _variables(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return found


def _variables(lines: list[bytes]) -> dict[str, str]:
    pairs = (line.decode(errors="replace").partition("=") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip().startswith(("NCCL_", "CUDA_"))}
