"""Reads what belongs to a container and to none of its tasks: its mounts, and limits of cgroups that it has made.

Formats: proc_pid_mountinfo(5), Documentation/admin-guide/cgroup-v2.rst.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from ocihook.audit.state import Values
from ocihook.linux.attributes import read_attributes
from ocihook.linux.task_state import read_file

MOUNT, CGROUP, TMPFS_FILE = "mount", "cgroup", "file"
_MOST_FILES = 300  # of all tmpfs of a container, whose attributes are looked at
_MOST_CGROUPS = 50  # below the container's own
# To look a name up in others may wait for a server, which may be a stopped process of the container.
_WITHOUT_SERVER = ("overlay", "tmpfs", "ramfs", "devtmpfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs")
_MASKED = ("/proc/", "/sys/")  # what is mounted there hides files, and the runtime handler sees to it
_PEERS = re.compile(r"shared|master|unbindable")
_OPTIONS_OF = ("tmpfs", "proc", "mqueue", "devpts")  # file systems whose options are a container's own
_NOT_OWN = re.compile(r"^(seclabel|inode\d+|lowerdir|.*dir=.*)$")
# Files that a program writes and that CRIU does not (criu/cgroup-props.c); a cgroup has those of its controllers.
CGROUP_FILES = (
    "memory.max", "memory.high", "memory.low", "memory.min", "memory.swap.max", "memory.swap.high", "memory.zswap.max",
    "memory.oom.group", "cpu.max", "cpu.max.burst", "cpu.weight", "cpu.idle", "cpu.uclamp.min", "cpu.uclamp.max",
    "io.max", "io.weight", "io.latency", "io.prio.class", "pids.max", "cpuset.cpus", "cpuset.mems",
    "cpuset.cpus.partition", "cgroup.max.depth", "cgroup.max.descendants", "hugetlb.2MB.max", "hugetlb.1GB.max",
    "misc.max",
)  # fmt: skip


def read_mounts(pid: int, proc: str) -> Iterator[tuple[str, Values]]:
    """Yield the mounts that a process sees, by their places; those over another at the same place with a number."""
    met: dict[str, int] = {}
    for line in read_file(f"{proc}/{pid}/mountinfo").decode(errors="replace").splitlines():
        own, _, of_system = line.partition(" - ")
        fields, system = own.split(" "), of_system.split(" ")
        if len(fields) < 6 or len(system) < 3:
            continue
        place = fields[4]
        if place.startswith(_MASKED):
            continue
        met[place] = met.get(place, 0) + 1
        name = f"{MOUNT} {place}" if met[place] == 1 else f"{MOUNT} {place} #{met[place]}"
        values = {"file system": system[0], "options": _sorted(fields[5])}
        peers = set(_PEERS.findall(" ".join(fields[6:])))
        if place == "/":  # runtimes make it a slave where the node's own root is shared
            peers.discard("master")
        values["propagation"] = " ".join(sorted(peers)) or "private"
        if system[0] in _OPTIONS_OF:
            values["file system options"] = _sorted(system[2])
        yield name, values


def tmpfs_places(mounts: Mapping[str, Values]) -> Iterator[str]:
    """Yield where whole file systems in memory are mounted, of what `read_mounts` has found, without what is behind."""
    kinds = {name.removeprefix(f"{MOUNT} "): values["file system"] for name, values in mounts.items()}
    for place, kind in kinds.items():
        above = (str(one) for one in (Path(place), *Path(place).parents))
        is_safe = all(kinds.get(f"{one} #2", kinds.get(one, kind)) in _WITHOUT_SERVER for one in above)
        if kind == "tmpfs" and is_safe and " #" not in place and f"{place} #2" not in kinds:
            yield place


def read_files(pid: int, mounts: Mapping[str, Values], proc: str) -> Iterator[tuple[str, Values]]:
    """Yield the files of tmpfs that have extended attributes or ACLs, among so many as can be looked at."""
    found = chain.from_iterable(read_attributes(pid, place, proc) for place in tmpfs_places(mounts))
    for _, (path, text) in zip(range(_MOST_FILES), found, strict=False):
        if text:
            yield f"{TMPFS_FILE} {path}", {"attributes": text}


def _sorted(options: str) -> str:
    return ",".join(sorted(word for word in options.split(",") if not _NOT_OWN.match(word)))


def has_inner(cgroup: Path) -> bool:
    """Return whether there are cgroups below one."""
    try:
        with os.scandir(cgroup) as entries:
            return any(entry.is_dir(follow_symlinks=False) for entry in entries)
    except OSError:
        return False


def read_cgroups(directory: Path | None) -> Iterator[tuple[str, Values]]:
    """Yield the limits of cgroups (v2) below one, by their paths from there.

    Args:
        directory: of the container's own; None: unknown.
    """
    if directory is None or not (directory / "cgroup.controllers").exists():
        return
    found = (Path(one) for one, _, _ in os.walk(directory) if Path(one) != directory)
    for _, inner in zip(range(_MOST_CGROUPS), found, strict=False):
        values = {}
        for name in CGROUP_FILES:
            with contextlib.suppress(OSError):
                values[name] = (inner / name).read_text().strip()
        yield f"{CGROUP} {inner.relative_to(directory)}", values
