"""An observation of a node on which a checkpoint is to be restored, and of what the restore would find there.

It is plain data, as that of a container (observation.py).
"""

import contextlib
import ctypes
import mmap
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ocihook.criu.files import CriuOptions
from ocihook.criu.needs import Needs
from ocihook.linux.procfs import status_fields, thread_ids

_SYSCTLS = (
    *("fs/nr_open", "fs/aio-max-nr", "fs/aio-nr", "fs/pipe-max-size", "kernel/pid_max"),
    "vm/memfd_noexec",
)
_POSSIBLE = Path("/sys/devices/system/cpu/possible")
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
_APPARMOR, _SELINUX = Path("/sys/kernel/security/apparmor/profiles"), Path("/sys/fs/selinux/enforce")
_PACKERS = ("tar", "gzip")  # that CRIU calls for a tmpfs (criu/filesystems.c)
_DROPPABLE = 0x08  # MAP_DROPPABLE (linux/mman.h), since Linux 6.11
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A bind mount that the runtime makes."""

    source: Path  # as this process can see it
    is_read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """A checkpoint, and what a restore of it would meet."""

    needs: Needs
    criu: tuple[int, ...] = ()  # version; (): unknown
    options: CriuOptions = field(default_factory=CriuOptions)
    root: Path | None = None  # the container's root file system, as this process can see it; None: it is not made yet
    binds: Mapping[str, Bind] = field(default_factory=dict)  # by their places in the container
    sysctls: Mapping[str, int] = field(default_factory=dict)  # by their names in /proc/sys
    possible_cpus: int = 0  # 0: unknown
    free_huge_bytes: Mapping[int, int] = field(default_factory=dict)  # by the size of a page
    unknown_advice: frozenset[int] = frozenset()  # of that which the checkpoint needs: that the kernel does not know
    has_droppable: bool = True
    taken_pids: Collection[int] = frozenset()  # in the PID namespace that it joins, of those that it needs
    security_module: int = 0  # as in Needs
    profiles: frozenset[str] | None = None  # that are loaded; None: unknown
    is_filtered: bool = False  # CRIU itself, by seccomp
    has_user_namespace: bool = False
    most_tasks: int | None = None  # of the container's cgroup
    missing_programs: tuple[str, ...] = ()


def observe_restore(
    needs: Needs,
    *,
    criu: tuple[int, ...],
    options: CriuOptions,
    config: Mapping[str, object],
    bundle: str = "",
    seen_from: int = 0,
    has_root: bool = True,
) -> Restoration:
    """Look at this node, for one checkpoint.

    Args:
        needs: of the checkpoint.
        criu: version of the CRIU that restores it; () if it is unknown.
        options: of that CRIU.
        config: of the container's bundle; {} if it is unknown.
        bundle: its directory.
        seen_from: pid of CRIU, whose view of files counts; 0: this process's.
        has_root: whether the container's root file system is made.
    """
    view = Path(f"/proc/{seen_from}/root") if seen_from else Path("/")
    linux = _section(config, "linux")
    resources = _section(_section(linux, "resources"), "pids")
    limit = resources.get("limit")
    return Restoration(
        needs=needs,
        criu=criu,
        options=options,
        root=_root(config, bundle, view) if has_root else None,
        binds=dict(_binds(config, view)),
        sysctls={name: value for name in _SYSCTLS if (value := _number(Path("/proc/sys", name))) is not None},
        possible_cpus=_possible_cpus(),
        free_huge_bytes=_free_huge_bytes(),
        unknown_advice=frozenset(advice for advice in needs.advice if not _knows_advice(advice)),
        has_droppable=not needs.is_droppable or _maps(_DROPPABLE),
        taken_pids=_taken(needs.pids, linux, view) if linux else frozenset(),
        security_module=1 if _SELINUX.exists() else 2 if _APPARMOR.exists() else 0,
        profiles=_profiles(),
        is_filtered=bool(seen_from) and status_fields(seen_from).get("Seccomp", "0") != "0",
        has_user_namespace=any(row.get("type") == "user" for row in _rows(linux, "namespaces")),
        most_tasks=limit if isinstance(limit, int) and limit > 0 else None,
        missing_programs=tuple(name for name in _PACKERS if shutil.which(name) is None),
    )


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _rows(config: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    found = config.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def _root(config: Mapping[str, object], bundle: str, view: Path) -> Path | None:
    path = _section(config, "root").get("path")
    return _seen(view, os.path.join(bundle, path)) if isinstance(path, str) and path else None


def _seen(view: Path, path: str) -> Path:
    return view / path.lstrip("/")


def _binds(config: Mapping[str, object], view: Path) -> Iterator[tuple[str, Bind]]:
    for row in _rows(config, "mounts"):
        options = row.get("options")
        words = options if isinstance(options, list) else []
        if row.get("type") == "bind" or {"bind", "rbind"} & {*map(str, words)}:
            source, place = str(row.get("source")), os.path.normpath(str(row.get("destination")))
            yield place, Bind(source=_seen(view, source), is_read_only="ro" in words)


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _possible_cpus() -> int:
    with contextlib.suppress(OSError, ValueError):
        return 1 + int(_POSSIBLE.read_text().strip().replace(",", "-").split("-")[-1])
    return 0


def _free_huge_bytes() -> Mapping[int, int]:
    found = {}
    for place in _HUGE_PAGES.glob("hugepages-*kB"):
        size = int(place.name.removeprefix("hugepages-").removesuffix("kB")) << 10
        found[size] = (_number(place / "free_hugepages") or 0) * size
    return found


def _knows_advice(advice: int) -> bool:
    """Return whether the kernel knows an advice: tried on a page of our own."""
    address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
    try:
        return bool(_libc.madvise(address, mmap.PAGESIZE, advice) == 0)
    finally:
        _libc.munmap(address, mmap.PAGESIZE)


def _maps(kind: int) -> bool:
    """Return whether the kernel knows a type of mapping."""
    address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, kind | mmap.MAP_ANON, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        return False
    _libc.munmap(address, mmap.PAGESIZE)
    return True


def _taken(pids: Collection[int], linux: Mapping[str, object], view: Path) -> Collection[int]:
    """Return which pids are taken in the PID namespace that a container joins; none if it gets a new one."""
    own = next((row for row in _rows(linux, "namespaces") if row.get("type") == "pid"), None)
    if own is not None and not own.get("path"):
        return frozenset()
    with contextlib.suppress(OSError):
        joined = os.stat(_seen(view, str(own["path"])) if own else f"/proc/{os.getpid()}/ns/pid").st_ino
        return {number for pid in _processes() for number in _numbers_in(joined, pid)} & {*pids}
    return frozenset()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _numbers_in(namespace: int, pid: int) -> Iterator[int]:
    """Yield the numbers of a process's threads in a PID namespace; none if it is not in that."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        is_in = os.stat(f"/proc/{pid}/ns/pid").st_ino == namespace
        for tid in thread_ids(pid) if is_in else ():
            yield int(status_fields(tid)["NSpid"].split()[-1])


def _profiles() -> frozenset[str] | None:
    with contextlib.suppress(OSError):
        return frozenset(line.rpartition(" (")[0] for line in _APPARMOR.read_text().splitlines())
    return None
