"""Checks of a restore: what CRIU would fail for on this node, with this root file system and these volumes.

`ocihook doctor --archive` prints what they find, and a restore is refused for it before anything is made.
"""

import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ocihook.criu.causes import remedy_of
from ocihook.criu.needs import NeededFile
from ocihook.linux.open_files import resolve_below
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.target import Restoration

_SAME_FILES = "give the container the same image and the same volumes with their files"
_RING_HEAD_BYTES, _EVENT_BYTES, _PAGE_BYTES = 32, 32, 4096  # fs/aio.c: struct aio_ring, struct io_event
_EXECUTE = 0o111
_MODULES = {0: "no security module", 1: "SELinux", 2: "AppArmor"}
_APPEND_ONLY = os.O_WRONLY | os.O_APPEND


class _Found(NamedTuple):
    """A file of a checkpoint, and where it is on this node."""

    needed: NeededFile
    place: Path
    is_read_only: bool


def _found(seen: Restoration) -> Iterator[_Found]:
    """Yield the files that this node must have: of the root file system, as far as that is made, and of volumes."""
    for needed in seen.needs.files:
        mount = seen.needs.mounts.get(needed.mount)
        if not needed.path.startswith("/") or mount is None or (not mount.is_external and mount.place != "/"):
            continue  # of a mount whose content CRIU brings, or the kernel
        if mount.place == "/":
            place = resolve_below(seen.root, needed.path) if seen.root else None
            is_read_only = False
        else:
            place, is_read_only = _in_volume(seen, needed.path, mount.place)
        if place:
            yield _Found(needed, place, is_read_only)


def _in_volume(seen: Restoration, path: str, mount: str) -> tuple[Path | None, bool]:
    """Return where a file of a bind mount is, None if that is unknown, and whether the mount is read-only."""
    bind = seen.binds.get(mount)
    if bind is None:
        return None, False
    inside = posixpath.relpath(path, mount)
    return bind.source if inside == "." else resolve_below(bind.source, inside), bind.is_read_only


def _file_missing(seen: Restoration) -> Iterator[Problem]:
    for needed, place, is_read_only in _found(seen):
        try:
            status = os.stat(place, follow_symlinks=False)
        except FileNotFoundError:
            is_link = "link_remap." in needed.path
            remedy = remedy_of("link-gone") if is_link else _SAME_FILES
            yield fail(f"{needed.path} was open when the checkpoint was made, and is missing here", remedy)
            continue
        if needed.mode is not None and stat.S_IFMT(status.st_mode) != stat.S_IFMT(needed.mode):
            yield fail(f"{needed.path} was open when the checkpoint was made, and is of another kind here", _SAME_FILES)
        if is_read_only and needed.flags & os.O_ACCMODE != os.O_RDONLY:
            detail = f"{needed.path} was open for writing, and its volume is read-only here"
            yield fail(detail, "mount the volume writable, as it was")


def _file_size(seen: Restoration) -> Iterator[Problem]:
    for needed, place, _ in _found(seen):
        size = _size_of(place)
        if needed.size is None or size is None or size == needed.size:
            continue
        if needed.flags & (os.O_ACCMODE | os.O_APPEND) == _APPEND_ONLY:
            continue  # CRIU takes that for a log
        detail = f"{needed.path} has {size} bytes, when the checkpoint was made it had {needed.size}"
        yield fail(detail, remedy_of("file-size"))


def _size_of(place: Path) -> int | None:
    try:
        status = os.stat(place, follow_symlinks=False)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _file_mode(seen: Restoration) -> Iterator[Problem]:
    for needed, place, _ in _found(seen):
        try:
            mode = os.stat(place, follow_symlinks=False).st_mode
        except OSError:
            continue
        if needed.mode is not None and stat.S_IFMT(mode) == stat.S_IFMT(needed.mode) and mode != needed.mode:
            detail = f"{needed.path} has mode {mode:o}, when the checkpoint was made it had {needed.mode:o}"
            yield fail(detail, f"chmod it back, or {seen.options.add('skip-file-rwx-check')}")


def _pid_taken(seen: Restoration) -> Iterator[Problem]:
    if seen.taken_pids:
        named = ", ".join(map(str, sorted(seen.taken_pids)[:3]))
        detail = (
            f"of the pids that the checkpoint needs {len(seen.taken_pids)} are taken in its PID namespace ({named})"
        )
        yield fail(detail, remedy_of("pid-taken"))


def _limits(seen: Restoration) -> Iterator[Problem]:
    needs, sysctls = seen.needs, seen.sysctls
    most = sysctls.get("kernel/pid_max")
    if most is not None and max(needs.pids, default=0) >= most:
        detail = f"the checkpoint has pid {max(needs.pids)}, and kernel.pid_max is {most} here"
        yield fail(detail, f"sysctl kernel.pid_max={max(needs.pids) + 1}")
    most = sysctls.get("fs/nr_open")
    if most is not None and needs.highest_descriptor >= most:
        detail = f"the checkpoint has descriptor {needs.highest_descriptor}, and fs.nr_open is {most} here"
        yield fail(detail, f"sysctl fs.nr_open={needs.highest_descriptor + 1}")
    if seen.most_tasks is not None and len(needs.pids) > seen.most_tasks:
        detail = f"the checkpoint has {len(needs.pids)} processes and threads, its cgroup may have {seen.most_tasks}"
        yield fail(detail, "raise the container's limit of processes (pids.max)")
    most = sysctls.get("fs/pipe-max-size")
    if seen.has_user_namespace and most is not None and needs.largest_pipe_bytes > most:
        detail = f"the checkpoint has a pipe of {needs.largest_pipe_bytes} bytes, and fs.pipe-max-size is {most} here"
        yield fail(detail, f"sysctl fs.pipe-max-size={needs.largest_pipe_bytes}")


def _aio_ring(seen: Restoration) -> Iterator[Problem]:
    """The kernel makes a ring for at least four requests of each possible processor (fs/aio.c, ioctx_alloc)."""
    for requests, length in sorted(seen.needs.rings) if seen.possible_cpus else ():
        made = _ring_bytes(max(requests, 4 * seen.possible_cpus))
        if made != length:
            detail = f"asynchronous I/O (io_setup) has a ring of {length} bytes, which has {made} on this node"
            yield fail(detail, "restore on a node with as many possible processors")
    most, used = (seen.sysctls.get(f"fs/aio-{name}", 0) for name in ("max-nr", "nr"))
    wanted = sum(requests for requests, _ in seen.needs.rings)
    if wanted and used + wanted > most:
        detail = (
            f"the checkpoint has {wanted} requests of asynchronous I/O; {used} of {most} are in use (fs.aio-max-nr)"
        )
        yield fail(detail, f"sysctl fs.aio-max-nr={used + 2 * wanted}")


def _ring_bytes(requests: int) -> int:
    size = _RING_HEAD_BYTES + _EVENT_BYTES * (2 * requests + 2)
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _memfd(seen: Restoration) -> Iterator[Problem]:
    level, modes = seen.sysctls.get("vm/memfd_noexec", 0), seen.needs.memfd_modes
    if modes and (level > 1 or (level == 1 and any(mode & _EXECUTE for mode in modes))):
        detail = f"the checkpoint has memory files (memfd) that vm.memfd_noexec={level} does not allow here"
        yield fail(detail, "sysctl vm.memfd_noexec=0")


def _huge_pages(seen: Restoration) -> Iterator[Problem]:
    for size, wanted in seen.needs.huge_bytes.items():
        free = seen.free_huge_bytes.get(size, 0)
        if free < wanted:
            detail = (
                f"the checkpoint has {wanted >> 20} MiB in huge pages of {size >> 10} KiB; {free >> 20} MiB are free"
            )
            place = f"/sys/kernel/mm/hugepages/hugepages-{size >> 10}kB/nr_hugepages"
            yield fail(detail, f"provide {-(-(wanted - free) // size)} more in {place}")


def _kernel_memory(seen: Restoration) -> Iterator[Problem]:
    if seen.unknown_advice:
        named = ", ".join(map(str, sorted(seen.unknown_advice)))
        detail = f"this kernel does not know advice {named} of madvise(2), which memory of the checkpoint has"
        yield fail(detail, remedy_of("kernel-memory"))
    if not seen.has_droppable:
        detail = "this kernel has no memory that it may drop (MAP_DROPPABLE), which the checkpoint has"
        yield fail(detail, "restore on Linux 6.11 or later")


def _security_module(seen: Restoration) -> Iterator[Problem]:
    needs = seen.needs
    if not needs.profiles or not needs.security_module:
        return
    if needs.security_module != seen.security_module:
        was, now = _MODULES.get(needs.security_module, "another"), _MODULES[seen.security_module]
        detail = f"the checkpoint's processes were confined by {was}, and this node has {now}"
        yield fail(detail, "restore on a node with the same security module")
    elif seen.profiles is not None:
        names = {profile.partition(" (")[0] for profile in needs.profiles} - {"unconfined"}
        if missing := sorted(names - seen.profiles):
            detail = f"AppArmor's profile {missing[0]}, which the checkpoint has, is not loaded here"
            yield warn(detail, f"load it: apparmor_parser -r FILE, of the profile {missing[0]}")


def _seccomp(seen: Restoration) -> Iterator[Problem]:
    if seen.needs.has_filters and seen.is_filtered:
        yield fail("the checkpoint has seccomp filters, and CRIU itself runs under one here", remedy_of("seccomp"))


def _tmpfs_content(seen: Restoration) -> Iterator[Problem]:
    if seen.needs.has_tmpfs and seen.missing_programs:
        names = " and ".join(seen.missing_programs)
        yield fail(f"the checkpoint has the content of a tmpfs, and this node lacks {names}", f"install {names}")


def _tcp_close(seen: Restoration) -> Iterator[Problem]:
    if seen.needs.closes_tcp:
        yield fail(
            "the checkpoint was made with tcp-close, and the restore is without it", seen.options.add("tcp-close")
        )


def _uprobes(seen: Restoration) -> Iterator[Problem]:
    if seen.needs.has_uprobes:
        detail = "the checkpoint was made with allow-uprobes, and the restore is without it"
        yield fail(detail, seen.options.add("allow-uprobes"))


CHECKS: tuple[Check[Restoration], ...] = (
    Check(name="file-missing", find=_file_missing),
    Check(name="file-size", find=_file_size),
    Check(name="file-mode", find=_file_mode, unless=("skip-file-rwx-check",)),
    Check(name="pid-taken", find=_pid_taken),
    Check(name="limits", find=_limits),
    Check(name="aio-ring", find=_aio_ring),
    Check(name="memfd", find=_memfd),
    Check(name="no-huge-pages", find=_huge_pages),
    Check(name="kernel-memory", find=_kernel_memory),
    Check(name="lsm", find=_security_module),
    Check(name="seccomp", find=_seccomp),
    Check(name="tmpfs-content", find=_tmpfs_content),
    Check(name="tcp-in-image", find=_tcp_close, unless=("tcp-close",)),
    Check(name="uprobes", find=_uprobes, unless=("allow-uprobes",)),
)
