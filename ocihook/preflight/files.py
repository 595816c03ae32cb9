"""Checks of open files: what CRIU refuses, or dumps only with an option.

integration/criu/test_doctor.py tries each with the CRIU of the machine.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from shlex import quote

from ocihook.criu.causes import remedy_of
from ocihook.criu.deleted_files import RefusedFile, has_place, linked_files, refused_files, replaced_files
from ocihook.linux.open_files import Mount, OpenFile, Watch, can_open_handle
from ocihook.preflight.check import Check, before
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen

_ANONYMOUS = "anon_inode:"
_IO_URING = f"{_ANONYMOUS}[io_uring]"
_PIDFD = f"{_ANONYMOUS}[pidfd]"
# Kinds that CRIU dumps (criu/files.c); the names are the kernel's.
_DUMPED_KINDS = ("[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[fanotify]", "bpf-map", "[pidfd]")
_CLOSE = "have the application close it before the dump"
_MEMORY_MAJOR, _MISC_MAJOR, _NVIDIA_MAJOR = 1, 10, 195
TTY_MAJORS = (4, 5, *range(136, 144))
_TUN_MINOR, _AUTOFS_MINOR = 200, 235  # the only ones of _MISC_MAJOR that CRIU dumps (criu/files.c, get_misc_dev_ops)
_KFD = "/dev/kfd"
_OTHERS_CHECKS = ("/dev/nvidia", "/dev/infiniband/")  # gpu/preflight.py, memory.py
_NAMED_BY_KERNEL = ("proc", "sysfs", "cgroup", "cgroup2")  # where names come and go with what they are about
# Where CRIU looks for a watched file that its handle does not open (criu/irmap.c).
_SCANNED = (
    *("/etc", "/var/spool", "/var/log", "/usr/share/dbus-1/services", "/usr/share/dbus-1/system-services"),
    *("/var/lib/polkit-1/localauthority", "/usr/share/polkit-1/actions", "/lib/udev"),
)
_MAX_SCANNED = 20_000  # files
_NAMED_PLACES = 3


def _io_uring(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        if _IO_URING in process.maps or any(file.name == _IO_URING for file in process.files):
            yield fail(f"{seen.who(process.pid)} uses io_uring, which CRIU cannot dump", remedy_of("io-uring"))


def _anonymous_file(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        kind = file.name.removeprefix(_ANONYMOUS)
        if file.name.startswith(_ANONYMOUS) and file.name != _IO_URING and kind not in _DUMPED_KINDS:
            number = f" (descriptor {file.fd})" if file.fd >= 0 else ""
            detail = f"{seen.who(file.pid)} has {kind.strip('[]')} open{number}, which CRIU cannot dump"
            yield fail(detail, _CLOSE)


def _pidfd(seen: Observation) -> Iterator[Problem]:
    for file in seen.files:
        if file.name == _PIDFD:
            yield fail(f"{seen.who(file.pid)} has a pidfd open", "install CRIU 4.1 or later")


def _devices(seen: Observation) -> Iterator[tuple[OpenFile, int, int]]:
    """Yield the devices that are open, with major and minor number, but for those that other checks name."""
    for file in seen.files:
        major, minor = os.major(file.device), os.minor(file.device)
        if file.is_device and not file.name.startswith(_OTHERS_CHECKS) and major != _NVIDIA_MAJOR:
            yield file, major, minor


def _tun(seen: Observation) -> Iterator[Problem]:
    for file, major, minor in _devices(seen):
        if (major, minor) == (_MISC_MAJOR, _TUN_MINOR) and not seen.has_own("net"):
            detail = f"{seen.who(file.pid)} has a tun device open in the node's network"
            yield fail(detail, "run the container in a network of its own")


def _device(seen: Observation) -> Iterator[Problem]:
    for file, major, minor in _devices(seen):
        who = seen.who(file.pid)
        if file.name == _KFD:
            remedy = "install CRIU's amdgpu plugin; ocihook does nothing for AMD GPUs"
            yield warn(f"{who} uses an AMD GPU ({_KFD})", remedy)
        elif major == _MISC_MAJOR and minor in (_TUN_MINOR, _AUTOFS_MINOR):
            continue
        elif major not in (_MEMORY_MAJOR, *TTY_MAJORS):
            detail = f"{who} has {file.name} open, which CRIU cannot dump"
            yield fail(detail, "have the application close it, or run it without that device")


def _ghost_file(seen: Observation) -> Iterator[Problem]:
    return _deleted(seen, "ghost-file")


def _replaced_file(seen: Observation) -> Iterator[Problem]:
    if any(mount.kind == "overlay" for mount in seen.init.mounts):
        for file in replaced_files(seen.files, seen.options):
            yield warn(f"{seen.who(file.pid)} {file.what}", file.remedy)


def _link_gone(seen: Observation) -> Iterator[Problem]:
    """Where the container goes on, CRIU removes its links at the end of a dump (criu/cr-dump.c, cr_dump_finish).

    What is archived afterwards lacks them, and so does a volume; CRIU itself has the content of a tmpfs. On an overlay
    CRIU copies a file of the image for which it can make no link, and the kernel does not show for which.
    """
    mounts = {mount.id: mount for process in seen.processes for mount in process.mounts}
    for file in linked_files(seen.files) if seen.options.has("leave-running") else ():
        mount = mounts.get(file.mount_id)
        is_bound = mount is not None and mount.place in seen.configured_places.get("bind", ())
        kind = mount.kind if mount else ""
        if kind == "tmpfs" and not is_bound:
            continue
        detail = f"{seen.who(file.pid)} uses a file by a name that it no longer has, {file.name}, and is left running"
        problem = warn if kind in ("", "overlay") and not is_bound else fail
        yield problem(
            f"{detail}: a restore needs CRIU's link to it, which is removed at the end of the dump",
            "checkpoint it without --leave-running, or have the application open the file anew",
        )


def _link_remap(seen: Observation) -> Iterator[Problem]:
    return _deleted(seen, "link-remap")


def _deleted(seen: Observation, check: str) -> Iterator[Problem]:
    refused: Iterator[RefusedFile] = refused_files(seen.files, seen.options)
    for file in refused:
        if file.check == check:
            yield fail(f"{seen.who(file.pid)} {file.what}", file.remedy)


def _immutable_file(seen: Observation) -> Iterator[Problem]:
    """What is open for writing since before cannot be opened so again."""
    for file in seen.files:
        if file.fd >= 0 and file.is_regular and not file.is_deleted and has_place(file) and file.is_locked_to_writers():
            detail = f"{seen.who(file.pid)} has {file.name} open for writing, which is immutable or append-only since"
            yield fail(
                f"{detail}: CRIU dumps and does not restore that", f"chattr -i -a {quote(file.name)} in the container"
            )


def _lost_mount(seen: Observation) -> Iterator[Problem]:
    """A file may be open through a mount that no process sees, as a message queue's is; one may see less (chroot)."""
    visible = {mount.id for process in seen.processes for mount in process.mounts}
    for process in seen.processes:
        for file in process.files:
            is_lost = file.mount_id >= 0 and file.mount_id not in visible
            if file.fd >= 0 and not file.is_device and has_place(file) and is_lost:
                detail = f"{seen.who(file.pid)} has {file.name} open, which is on no mount of the container"
                yield fail(detail, _CLOSE)


def _hidden_file(seen: Observation) -> Iterator[Problem]:
    """Something may be mounted over an open file: its name then leads nowhere, or to another file."""
    for process in seen.processes:
        by_id = {mount.id: mount for mount in process.mounts}
        below = _hidden_mounts(process.mounts)
        for file in process.files:
            if file.mount_id in below and has_place(file):
                detail = f"{seen.who(file.pid)} has {file.name} open, on a mount that another one hides"
                yield fail(detail, "unmount what hides it, or have the application close it and keep it elsewhere")
                continue
            if file.fd < 0 or not file.is_regular or file.is_deleted or not has_place(file):
                continue
            mount = by_id.get(file.mount_id)
            roots = (process.pid, seen.init_pid)  # its own may be another directory (chroot)
            is_seen = any(file.is_at(f"/proc/{pid}/root") for pid in roots)
            if mount and mount.kind not in _NAMED_BY_KERNEL and not is_seen:
                detail = f"{seen.who(file.pid)} has {file.name} open, over which something was mounted since"
                remedy = "unmount what hides it, or have the application close it and keep it elsewhere"
                yield fail(detail, remedy)


def _hidden_mounts(mounts: Sequence[Mount]) -> set[int]:
    """Return the ids of mounts at whose very place a later one is."""
    last = {mount.place: mount.id for mount in mounts}
    return {mount.id for mount in mounts if last[mount.place] != mount.id}


def _inotify(seen: Observation) -> Iterator[Problem]:
    # One of each mount namespace: CRIU knows all mounts, and the process itself may see less of them (chroot).
    views = {process.namespaces.get("mnt"): process.pid for process in reversed(seen.processes)}.values()
    for file in seen.files:
        if file.name != f"{_ANONYMOUS}inotify":
            continue
        lost = [watch for watch in file.watches if not any(can_open_handle(pid, watch) for pid in views)]
        lost = [watch for watch in lost if not _find(seen, watch, (*_SCANNED, *seen.options.scanned))]
        if lost:
            detail = f"{seen.who(file.pid)} watches {len(lost)} files (inotify) that CRIU cannot find, as on overlay"
            yield fail(detail, _how_to_find(seen, lost))


def _how_to_find(seen: Observation, lost: Sequence[Watch]) -> str:
    """Return what to do about watches: name their directories, unless what is watched has no name, as in /proc."""
    places = [_find(seen, watch, ("",)) for watch in lost]
    if not all(places):
        return "have the application remove the watch: what it watches has no name any longer, or is of /proc or /sys"
    ways = [seen.options.add(f"irmap-scan-path {quote(place)}") for place in dict.fromkeys(places)]
    return f"{' && '.join(ways[:_NAMED_PLACES])}, or turn watching off in the application"


def _find(seen: Observation, watch: Watch, places: Sequence[str]) -> str:
    """Return the directory of a file, or the directory that it is, if a search of some places finds it; else ""."""
    root, left = f"/proc/{seen.init_pid}/root", _MAX_SCANNED
    for place in places:
        for directory, names, others in os.walk(f"{root}{place}"):
            _leave_out_other_mounts(directory, names, watch)
            for name in (".", *names, *others):
                left -= 1
                if _is(watch, f"{directory}/{name}"):
                    return (directory if name in (".", *others) else f"{directory}/{name}").removeprefix(root)
            if left < 0:
                return ""
    return ""


def _leave_out_other_mounts(directory: str, names: list[str], watch: Watch) -> None:
    """Have os.walk enter no other file system: not /proc, and no volume."""
    names[:] = [name for name in names if _device_of(f"{directory}/{name}") == watch.device]


def _device_of(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_dev
    return -1


def _is(watch: Watch, path: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.stat(path, follow_symlinks=False)
        return (status.st_dev, status.st_ino) == (watch.device, watch.inode)
    return False


def _inotify_deleted(seen: Observation) -> Iterator[Problem]:
    """On tmpfs CRIU needs the path of what it opens by its handle (criu/fsnotify.c, check_open_handle)."""
    for process in seen.processes:
        tmpfs = {mount.device for mount in process.mounts if mount.kind == "tmpfs"}
        for file in process.files:
            for watch in file.watches if file.name == f"{_ANONYMOUS}inotify" else ():
                is_there = f"{os.major(watch.device)}:{os.minor(watch.device)}" in tmpfs
                if is_there and can_open_handle(file.pid, watch) and _is_deleted(process, watch):
                    detail = f"{seen.who(file.pid)} watches a deleted file of a tmpfs (inotify), which CRIU cannot find"
                    yield fail(detail, "have the application remove the watch, or close the file")


def _is_deleted(process: ProcessSeen, watch: Watch) -> bool:
    """Return whether what is watched is open and deleted: else the kernel would have removed the watch with it."""
    return any((file.device, file.inode) == (watch.device, watch.inode) and not file.links for file in process.files)


def _held_locks(seen: Observation) -> list[tuple[OpenFile, str]]:
    return [(file, kind) for file in seen.files if file.fd >= 0 for kind in file.locks]


def _file_locks(seen: Observation) -> Iterator[Problem]:
    if held := _held_locks(seen):
        file, kind = held[0]
        others = f" and {len(held) - 1} more" if len(held) > 1 else ""
        remedy = seen.options.add("file-locks")
        if seen.engine == "podman":
            remedy = (
                f"podman container checkpoint --file-locks, then podman container restore --file-locks; or {remedy}"
            )
        yield fail(f"{seen.who(file.pid)} holds a lock ({kind}) on {file.name}{others}", remedy)


def _file_locks_of_crio(seen: Observation) -> Iterator[Problem]:
    if seen.engine == "cri-o" and _held_locks(seen):
        detail = "a process holds file locks, which CRI-O has CRIU dump but not restore"
        yield warn(detail, f"{seen.options.add('file-locks')}, where it is restored")


CHECKS = (
    Check(name="io-uring", find=_io_uring),
    Check(name="anonymous-file", find=_anonymous_file),
    Check(name="anonymous-file", find=_pidfd, criu=before(4, 1)),
    Check(name="device", find=_device),
    Check(name="tun", find=_tun),
    Check(name="ghost-file", find=_ghost_file),
    Check(name="link-remap", find=_link_remap, unless=("link-remap",)),
    Check(name="ghost-file", find=_replaced_file, only_with=("link-remap",)),
    Check(name="link-gone", find=_link_gone, only_with=("link-remap",)),
    Check(name="immutable-file", find=_immutable_file),
    Check(name="lost-mount", find=_lost_mount),
    Check(name="hidden-file", find=_hidden_file),
    Check(name="inotify", find=_inotify),
    Check(name="inotify-deleted", find=_inotify_deleted),
    Check(name="file-locks", find=_file_locks, unless=("file-locks",)),
    Check(name="file-locks", find=_file_locks_of_crio, only_with=("file-locks",)),
)
