"""Checks of a workload's files, sockets and processes: what CRIU will refuse, or take only with an option.

What CRIU takes was tried out with CRIU 4.1.1 and 4.2.1; integration/criu/test_doctor.py tries it with the CRIU of the
machine, which CI has at 4.1.1. A finding that fails has the name that criu/explain.py gives the failure of the dump.
"""

import os
import platform
import signal
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

from ocihook.container.identity import engine_of
from ocihook.criu.deleted_files import has_place, refused_files
from ocihook.criu.explain import IO_URING_REMEDY, TRACED_INSIDE_REMEDY
from ocihook.criu.version import FIRST_CRIU_FOR_6_16, find_program
from ocihook.linux.open_files import (
    OpenFile,
    Watch,
    can_open_handle,
    locks,
    mount_id,
    mounts,
    namespaces,
    watches,
)
from ocihook.linux.procfs import has_pending, has_session_outside, is_session_leader, thread_ids, tracer_pid
from ocihook.linux.sockets import Socket, hides_socket_options
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import UnixSocket, unix_sockets
from ocihook.node.doctor.finding import Finding, Status
from ocihook.node.doctor.network import about_connection
from ocihook.node.doctor.workload import Workload

_ANONYMOUS = "anon_inode:"
# Kinds that CRIU dumps (criu/files.c); the names are the kernel's.
_DUMPED_KINDS = ("[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[fanotify]", "bpf-map", "[pidfd]")
_FIRST_CRIU_WITH_PIDFD = (4, 1)
_MEMORY_MAJOR, _TTY_MAJORS, _MISC_MAJOR, _NVIDIA_MAJOR = 1, (4, 5, *range(136, 144)), 10, 195
_TUN_MINOR, _HPET_MINOR = 200, 228
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET)
_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE, 0)
_NOT_NESTED = ("pid", "ipc", "uts", "user", "time")  # CRIU has but one of these for a tree
# Where CRIU looks for a watched file that its handle does not open (criu/irmap.c).
_SCANNED = ("/etc", "/var/spool", "/var/log", "/usr/share/dbus-1/system-services", "/usr/share/polkit-1", "/lib/udev")
_MAX_SCANNED = 20_000
_KFD = "/dev/kfd"
_NAMED_BY_KERNEL = ("proc", "sysfs", "cgroup", "cgroup2")  # where names come and go with what they are about


def _check_descriptors(workload: Workload) -> Iterator[Finding]:
    criu = find_program("criu")
    for file in workload.files:
        who = workload.who(file.pid)
        if file.name.startswith(_ANONYMOUS) and (kind := file.name.removeprefix(_ANONYMOUS)) not in _DUMPED_KINDS:
            if kind == "[io_uring]":
                detail = f"{who} uses io_uring, which CRIU cannot dump"
                yield Finding("io-uring", Status.FAIL, detail, IO_URING_REMEDY)
            else:
                detail = f"{who} has {kind.strip('[]')} open (descriptor {file.fd}), which CRIU cannot dump"
                yield Finding("anonymous-file", Status.FAIL, detail, "have the application close it before the dump")
        elif file.name == f"{_ANONYMOUS}[pidfd]" and criu and criu.version < _FIRST_CRIU_WITH_PIDFD:
            yield Finding("anonymous-file", Status.FAIL, f"{who} has a pidfd open", "install CRIU 4.1 or later")
        elif file.is_device:
            yield from _about_device(file, who, workload)


def _about_device(file: OpenFile, who: str, workload: Workload) -> Iterator[Finding]:
    major, minor = os.major(file.device), os.minor(file.device)
    detail = f"{who} has {file.name} open, which CRIU cannot dump"
    if major == _MISC_MAJOR and minor == _TUN_MINOR:
        if namespaces(workload.init_pid).get("net") == namespaces(os.getpid()).get("net"):
            remedy = "run the container in a network of its own"
            yield Finding("tun", Status.FAIL, f"{who} has a tun device open in the node's network", remedy)
    elif file.name == _KFD:
        remedy = "install CRIU's amdgpu plugin; ocihook does nothing for AMD GPUs"
        yield Finding("device", Status.WARN, f"{who} uses an AMD GPU ({_KFD})", remedy)
    elif file.name.startswith("/dev/nvidia") or major == _NVIDIA_MAJOR:
        return  # the driver's checkpoint closes them; where it cannot, the preflight says so
    elif major not in (_MEMORY_MAJOR, *_TTY_MAJORS) and (major, minor) != (_MISC_MAJOR, _HPET_MINOR):
        yield Finding("device", Status.FAIL, detail, "have the application close it, or run it without that device")


def _check_deleted_files(workload: Workload) -> Iterator[Finding]:
    for file in refused_files(workload.files, workload.options):
        yield Finding(file.check, Status.FAIL, f"{workload.who(file.pid)} {file.what}", file.remedy)


def _check_lost_mounts(workload: Workload) -> Iterator[Finding]:
    """A file may be open through a mount that its process does not see, as a message queue's is."""
    for file in workload.files:
        if file.fd >= 0 and file.is_regular and has_place(file) and not _is_on_mount(file):
            detail = f"{workload.who(file.pid)} has {file.name} open, which is on no mount that it sees"
            yield Finding("lost-mount", Status.FAIL, detail, "have the application close it before the dump")


def _is_on_mount(file: OpenFile) -> bool:
    """Return whether the mount through which a file was opened is one that the process sees."""
    number = mount_id(file.pid, file.fd)
    return number < 0 or any(mount.id == number for mount in mounts(file.pid))


def _check_hidden_files(workload: Workload) -> Iterator[Finding]:
    """Something may be mounted over an open file: by its name there is nothing any more, or another one."""
    for file in workload.files:
        if file.fd < 0 or not file.is_regular or file.is_deleted or not has_place(file):
            continue
        seen = [mount for mount in mounts(file.pid) if mount.id == mount_id(file.pid, file.fd)]
        roots = (file.pid, workload.init_pid)  # its own may be another directory (chroot)
        if seen and seen[0].kind not in _NAMED_BY_KERNEL and not any(file.is_at(f"/proc/{pid}/root") for pid in roots):
            detail = f"{workload.who(file.pid)} has {file.name} open, over which something was mounted since"
            remedy = "unmount what hides it, or have the application close it and keep it elsewhere"
            yield Finding("hidden-file", Status.FAIL, detail, remedy)


def _check_watches(workload: Workload) -> Iterator[Finding]:
    for file in workload.files:
        if file.name != f"{_ANONYMOUS}inotify":
            continue
        lost = [w for w in watches(file.pid, file.fd) if not can_open_handle(file.pid, w)]
        lost = [watch for watch in lost if not _is_found(workload, watch)]
        if lost:
            detail = (
                f"{workload.who(file.pid)} watches {len(lost)} files (inotify) that CRIU cannot find, as on overlay"
            )
            remedy = f"{workload.options.add('irmap-scan-path DIRECTORY')}, or turn watching off in the application"
            yield Finding("inotify", Status.FAIL, detail, remedy)


def _is_found(workload: Workload, watch: Watch) -> bool:
    """Return whether CRIU will find a file by searching the places that it knows."""
    left = _MAX_SCANNED
    for place in (*_SCANNED, *workload.options.scanned):
        for directory, names, others in os.walk(f"/proc/{workload.init_pid}/root{place}"):
            for name in (".", *names, *others):
                left -= 1
                try:
                    status = os.stat(f"{directory}/{name}", follow_symlinks=False)
                except OSError:
                    continue
                if (status.st_dev, status.st_ino) == (watch.device, watch.inode):
                    return True
            if left < 0:
                return False
    return False


def _check_locks(workload: Workload) -> Iterator[Finding]:
    held = [(f, kind) for f in workload.files if f.fd >= 0 and f.is_regular for kind in locks(f.pid, f.fd)]
    if held and not workload.options.has("file-locks"):
        file, kind = held[0]
        others = f" and {len(held) - 1} more" if len(held) > 1 else ""
        detail = f"{workload.who(file.pid)} holds a lock ({kind}) on {file.name}{others}"
        yield Finding("file-locks", Status.FAIL, detail, workload.options.add("file-locks"))
    elif held and engine_of(workload.container.annotations if workload.container else {}) == "cri-o":
        detail = "a process holds file locks, which CRI-O has CRIU dump but not restore"
        remedy = f"{workload.options.add('file-locks')}, where it is restored"
        yield Finding("file-locks", Status.WARN, detail, remedy)


def _check_sockets(workload: Workload) -> Iterator[Finding]:
    criu = find_program("criu")
    internet = [s for s in workload.sockets if s.family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET)]
    if internet and criu and criu.version < FIRST_CRIU_FOR_6_16 and hides_socket_options():
        detail = f"{workload.who(internet[0].pid)} has an Internet socket; CRIU {criu.version_text} cannot dump it on "
        remedy = "install CRIU 4.2 or later"
        yield Finding("kernel-6.16", Status.FAIL, f"{detail}Linux {platform.release()}", remedy)
    for sock in workload.sockets:
        yield from _about_socket(sock, workload)
    yield from _about_unix(workload)


def _about_socket(sock: Socket, workload: Workload) -> Iterator[Finding]:
    who, options = workload.who(sock.pid), workload.options
    is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
    if sock.family not in _FAMILIES:
        detail = f"{who} has a socket of family {sock.family}, which CRIU cannot dump"
        yield Finding("socket-kind", Status.FAIL, detail, "have the application close it before the dump")
    elif sock.is_multipath:
        detail = f"{who} uses multipath TCP, which CRIU cannot dump"
        yield Finding(
            "mptcp", Status.FAIL, detail, "GODEBUG=multipathtcp=0 for Go programs; sysctl net.mptcp.enabled=0"
        )
    elif sock.is_corked:
        detail = f"{who} has a UDP socket that holds back what it sends (UDP_CORK)"
        yield Finding("udp-corked", Status.FAIL, detail, "have the application take UDP_CORK off before the dump")
    elif is_ip and sock.kind != socket.SOCK_RAW and sock.protocol not in _PROTOCOLS:
        detail = f"{who} has a socket of protocol {sock.protocol}, which CRIU cannot dump"
        yield Finding("socket-kind", Status.FAIL, detail, "have the application close it before the dump")
    elif sock.is_connected:
        yield from about_connection(sock, workload, _by_podman(workload))
    elif sock.waiting and not options.has("skip-in-flight"):
        detail = f"{who} has not accepted {sock.waiting} connections yet"
        yield Finding("tcp-in-flight", Status.FAIL, detail, options.add("skip-in-flight"))
    elif sock.waiting:
        detail = f"{who} has not accepted {sock.waiting} connections yet: a restore loses them"
        yield Finding("tcp-in-flight", Status.WARN, detail, "have it accept them before the dump")
    elif sock.is_listening and workload.container is None and not _is_everywhere(sock.address):
        detail = f"{who} listens on {sock.address}, which a restore elsewhere does not have"
        yield Finding("address-gone", Status.WARN, detail, "have it listen on all addresses")


def _by_podman(workload: Workload) -> str:
    """Return what podman offers for open connections, in words after a remedy; other engines offer nothing."""
    if engine_of(workload.container.annotations if workload.container else {}) != "podman":
        return ""
    return (
        "; or by podman: `container checkpoint --tcp-established`, then `container restore` with the same, or with "
        "--tcp-close where it has that"
    )


def _is_everywhere(address: str) -> bool:
    """Return whether each network has an address: that of all interfaces, and those of the loopback device."""
    return ip_address(address).is_unspecified or ip_address(address).is_loopback


def _about_unix(workload: Workload) -> Iterator[Finding]:
    ours = {s.inode: s for s in workload.sockets if s.family == socket.AF_UNIX}
    if not ours:
        return
    known = unix_sockets(NetNamespace.of(workload.init_pid))
    for inode, sock in ours.items():
        who, found = workload.who(sock.pid), known.get(inode, UnixSocket(0, (), 0))
        if any(client not in known or known[client].unread_bytes for client in found.clients):
            detail = f"{who} has not accepted a Unix connection yet that its client has used or closed"
            remedy = "have the application accept connections, or close its listening socket"
            yield Finding("unix-in-flight", Status.FAIL, detail, remedy)
        if not found.peer or found.peer in ours:
            continue
        if sock.kind != socket.SOCK_DGRAM:
            detail = f"{who} is connected by a Unix socket to a process outside, which CRIU cannot dump"
            name = "unix-half" if workload.options.has("ext-unix-sk") else "unix-external"
            yield Finding(name, Status.FAIL, detail, "have the application close it before the dump")
        elif not workload.options.has("ext-unix-sk"):
            detail = f"{who} sends to a Unix socket of a process outside, as for logging"
            yield Finding("unix-external", Status.FAIL, detail, workload.options.add("ext-unix-sk"))


def _check_processes(workload: Workload) -> Iterator[Finding]:
    own = namespaces(workload.init_pid)
    for pid in workload.pids:
        nested = [kind for kind in _NOT_NESTED if namespaces(pid).get(kind, own.get(kind)) != own.get(kind)]
        if nested == ["time"]:
            detail = f"{workload.who(pid)} is in a time namespace of its own, which CRIU cannot dump"
            yield Finding("nested-namespace", Status.FAIL, detail, "start it without `unshare --time`")
        elif nested:
            detail = f"{workload.who(pid)} is in a nested {nested[0]} namespace, as a sandbox or a container makes"
            yield Finding("nested-namespace", Status.FAIL, detail, "turn the sandbox off; run no containers inside")
        if (tracer := tracer_pid(pid)) in workload.pids:
            detail = f"{workload.who(pid)} is traced by {workload.who(tracer)}, which is of the container, too"
            yield Finding("traced", Status.FAIL, detail, TRACED_INSIDE_REMEDY)
        elif tracer:
            detail = f"{workload.who(pid)} is traced by {workload.who(tracer)}"
            yield Finding("traced", Status.FAIL, detail, f"end the tracer: kill {tracer}")
        if any(has_pending(tid, signal.SIGTRAP) for tid in thread_ids(pid)):
            detail = f"{workload.who(pid)} blocks SIGTRAP while one waits for it, with which CRIU cannot dump it"
            remedy = "have the application take the signal, or send it none while it is blocked"
            yield Finding("pending-sigtrap", Status.FAIL, detail, remedy)
        if has_session_outside(pid) and "pid" not in nested:
            detail = f"{workload.who(pid)} belongs to a session outside its PID namespace"
            yield Finding("session-leader", Status.FAIL, detail, "start it with setsid")
    if workload.container is None and not is_session_leader(workload.init_pid):
        if not (workload.options.has("shell-job") or has_session_outside(workload.init_pid)):
            detail = f"{workload.who(workload.init_pid)} belongs to a session outside"
            yield Finding("session-leader", Status.FAIL, detail, "start it with setsid, or dump it with --shell-job")
    elif workload.container and not workload.has_own_pids:
        detail = "it shares the node's (or a pod's) PID namespace: a restore fails if one of its pids is taken"
        yield Finding("pid-taken", Status.WARN, detail, "run it in a PID namespace of its own")


def _check_terminals(workload: Workload) -> Iterator[Finding]:
    """A terminal's slave without its master is somebody else's; that of a container's own console CRIU knows."""
    if workload.options.has("shell-job") or workload.container:
        return
    slaves = {file.name: file for file in workload.files if file.name.startswith("/dev/pts/")}
    has_master = any(file.name in ("/dev/ptmx", "/dev/pts/ptmx") for file in workload.files)
    for name, file in slaves.items():
        if not has_master and not name.endswith("ptmx"):
            detail = f"{workload.who(file.pid)} uses the terminal {name}, whose other end is outside"
            yield Finding("terminal", Status.FAIL, detail, "start it without a terminal, or dump it with --shell-job")


def _check_shared_memory(workload: Workload) -> Iterator[Finding]:
    if namespaces(workload.init_pid).get("ipc") != namespaces(os.getpid()).get("ipc"):
        return
    for pid in workload.pids:
        try:
            has_any = "/SYSV" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue
        if has_any:
            detail = f"{workload.who(pid)} has System V shared memory of the node's"
            yield Finding("sysv-ipc", Status.FAIL, detail, "run it in an IPC namespace of its own (no hostIPC)")


CHECKS: tuple[Callable[[Workload], Iterator[Finding]], ...] = (
    _check_descriptors,
    _check_deleted_files,
    _check_lost_mounts,
    _check_hidden_files,
    _check_watches,
    _check_locks,
    _check_sockets,
    _check_processes,
    _check_terminals,
    _check_shared_memory,
)
