"""Finds NVIDIA's libraries: where the loader looks, in a driver that lies in a container, or where CDI takes them from.

The GPU Operator installs the driver in a container, whose file system a node sees at /run/nvidia/driver
(github.com/NVIDIA/gpu-operator, assets/state-driver). Others name its place in the configuration of their toolkit, or
have CDI mount libraries from there (github.com/cncf-tags/container-device-interface, SPEC.md, containerEdits.mounts).
"""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
DRIVER_CONTAINER = Path("/run/nvidia/driver")
KERNEL_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
CDI_DIRS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_TOOLKIT_CONFIG = Path("/etc/nvidia-container-runtime/config.toml")
_ROOT = re.compile(r'^\s*root\s*=\s*"(/[^"]+)"', re.MULTILINE)  # of nvidia-container-cli
_PLACES = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "lib/*-linux-gnu", "lib64", "lib")
_MAX_SPECIFICATION_BYTES = 1 << 20


def load(name: str) -> bool:
    """Load one of NVIDIA's libraries, which the loader then gives by its name; False if there is none.

    Args:
        name: CUDA or NVML.
    """
    for candidate in (name, *map(str, _elsewhere(name))):
        with contextlib.suppress(OSError):
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return True
    return False


def has_kernel_driver() -> bool:
    """Return whether the kernel has NVIDIA's driver, whatever is there of its libraries."""
    return any(path.exists() for path in KERNEL_DRIVER)


def driver_roots() -> list[Path]:
    """Return where the file system of a driver may lie that is not the node's own."""
    return [DRIVER_CONTAINER, *(Path(root) for root in _ROOT.findall(_text(_TOOLKIT_CONFIG)) if root != "/")]


def _elsewhere(name: str) -> Iterator[Path]:
    """Yield where a library is that the loader does not find; the file itself, as links lead elsewhere from here."""
    stem = name.removesuffix(".1")
    for root in driver_roots():
        for place in _PLACES:
            yield from sorted(path for path in root.glob(f"{place}/{stem}.*.*") if not path.is_symlink())
    host_path = re.compile(rf'hostPath"?\s*:\s*"?(/[^"\s]*/{re.escape(stem)}\.[0-9.]+)')
    for directory in CDI_DIRS:
        for specification in sorted(directory.glob("*")):
            yield from map(Path, host_path.findall(_text(specification)))


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_MAX_SPECIFICATION_BYTES)
    except OSError:
        return ""
