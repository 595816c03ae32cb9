"""Features of this node's processors, as the kernel names them: a process started with more cannot run with fewer."""

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("flags", "Features")  # on x86-64; on aarch64


def features() -> frozenset[str]:
    """Return the names of the first processor's features; none if the kernel does not report them."""
    for line in _CPUINFO.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _NAMES:
            return frozenset(value.split())
    return frozenset()
