"""Each row of the list of checks finds its condition in an observation, for the right versions of CRIU."""

import dataclasses
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ocihook.audit.state import ContainerState, ProcessState
from ocihook.config import Policy
from ocihook.container.running import RunningContainer
from ocihook.criu.files import CriuOptions
from ocihook.errors import PreflightError
from ocihook.linux.open_files import Mount, OpenFile, open_files
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process, Stat
from ocihook.linux.ptrace import HeldThread
from ocihook.linux.socket_queues import Queue
from ocihook.linux.sockets import Socket
from ocihook.model import ContainerRef
from ocihook.net.netlink import UnixSocket
from ocihook.preflight import checks, participant
from ocihook.preflight.check import ALL_VERSIONS, Check, before, since
from ocihook.preflight.checks import CHECKS, alike_as_one, lasting
from ocihook.preflight.finding import Finding, Problem, Repair, Status, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen, Task, observe
from ocihook.preflight.participant import Preflight
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump

PID = 7
NODE = dict.fromkeys(("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"), "node's")
OWN = dict.fromkeys(NODE, "own")
CONTAINER = RunningContainer("0717d827f3ce", "runc", PID, "", {}, {"mounts": []})
FILE = OpenFile(PID, 3, "/data/log", is_deleted=False, mode=stat.S_IFREG, device=1, inode=2, links=1, stored_bytes=0)
SOCKET = Socket(PID, 5, socket.AF_INET, socket.SOCK_STREAM, 6, False, False, 0, "0.0.0.0")
MIB = 1 << 20


def run(seen: Observation) -> list[Finding]:
    """Return what all checks find."""
    return checks.run(seen, CHECKS)


def process(pid: int = PID, *, status: Mapping[str, str] | None = None, state: str = "S", **facts: Any) -> ProcessSeen:
    """Return a process of one thread, in the container's namespaces."""
    stat_ = facts.pop("stat", Stat(state, 1, pid, pid))
    task = Task(tid=pid, stat=stat_, status={"Name": "job", **(status or {})})
    return ProcessSeen(**{"pid": pid, "threads": (task,), "namespaces": OWN, **facts})


def container(*processes: ProcessSeen, **facts: Any) -> Observation:
    """Return an observation of a container that has namespaces of its own, dumped by CRIU 4.2 without options."""
    known: dict[str, Any] = {"criu": (4, 2), "node": NODE, "container": CONTAINER}
    return Observation(**{"init_pid": PID, "processes": processes or (process(),), **known, **facts})


def with_file(**changes: Any) -> Observation:
    return container(process(files=(FILE._replace(**changes),)))


def with_socket(**changes: Any) -> Observation:
    return container(process(sockets=(SOCKET._replace(**changes),)))


def with_semaphore(number: int) -> ContainerState:
    files = {"3": {"kind": "[eventfd]", "[eventfd]": f"eventfd-semaphore:{number}"}}
    return ContainerState(processes={"1": ProcessState(name="job", files=files)})


def with_memory(flag: str) -> ContainerState:
    return ContainerState(processes={"1": ProcessState(name="job", own={flag: "1000-2000"})})


def ended(status: int) -> ProcessSeen:
    return process(8, stat=Stat("Z", 7, 7, 7, exit_code=status))


def options(*names: str) -> CriuOptions:
    return CriuOptions(names=frozenset(names))


def device(name: str, major: int, minor: int) -> Observation:
    return with_file(name=name, mode=stat.S_IFCHR, device=os.makedev(major, minor))


WHOLE = Mount(8, "8:1", "/", "/all", "ext4", "/dev/sda1")
ROOT = Mount(8, "8:1", "/rootfs", "/", "ext4", "/dev/sda1")
BOUND = Mount(9, "8:1", "/rootfs/data", "/mnt", "ext4", "/dev/sda1")
BY_CRUN = container(process(), process(8, namespaces={**OWN, "net": "x"}), container=CONTAINER._replace(runtime="crun"))
PIPES = container(
    process(files=tuple(FILE._replace(name=f"pipe:[{n}]", inode=n, mode=stat.S_IFIFO) for n in range(1025)))
)
ENDED_FIRST = ProcessSeen(pid=PID, threads=(Task(tid=PID, stat=Stat("Z")), Task(tid=8, stat=Stat("S"))), namespaces=OWN)
STACK = "7f0-7f1 rw-p 0 00:00 0 [stack]\n"
LIBRARY = "7f0-7f1 r-xp 0 08:01 5 /opt/lib.so\n"
LIBRARIES = Mount(9, "8:1", "/", "/opt", "btrfs", "/dev/sdb", frozenset({"rw", "noexec"}))


def with_options(names: tuple[str, ...], **changes: Any) -> Observation:
    """Return a container with a file open that is dumped with options of CRIU."""
    return container(process(files=(FILE._replace(name="/nowhere/log", **changes),)), options=options(*names))


def left_running(kind: str, *, is_bound: bool = False) -> Observation:
    """Return a container that uses a file without its name, on a file system of a kind, and that is left running."""
    mount = Mount(5, "0:9", "/", "/nowhere", kind, "source")
    config = {"mounts": [{"destination": "/nowhere", "type": "bind" if is_bound else kind}]}
    return container(
        process(files=(FILE._replace(name="/nowhere/log", is_deleted=True, info="mnt_id:\t5\n"),), mounts=(mount,)),
        options=options("link-remap", "leave-running"),
        container=CONTAINER._replace(config=config),
    )


def proc_file(name: str) -> Observation:
    """Return a container whose process has a file of /proc open, as descriptor 3."""
    proc = Mount(5, "0:9", "/", "/proc", "proc", "proc")
    of = process(files=(FILE._replace(name=name, info="mnt_id:\t5\n"),), mounts=(proc,), status={"NSpid": "7 1"})
    return container(of)


def session(*, of_leader: int, below: int) -> Observation:
    """Return a container with a process 9 of a session, whose parent is another one."""
    own = process(8, stat=Stat("S", PID, 8, 8 if of_leader == 7 else PID))
    member = process(9, stat=Stat("S", below, 9, own.stat.session if of_leader == 7 else 55))
    return container(process(), own, member)


def unix(path: str, how: frozenset[str]) -> Observation:
    """Return a container with a Unix socket that is bound on a mount."""
    sock = SOCKET._replace(family=socket.AF_UNIX, kind=socket.SOCK_DGRAM, address=path)
    return container(process(sockets=(sock,), mounts=(Mount(6, "0:8", "/", "/run", "btrfs", "/dev/sdb", how),)))


def sent(**changes: Any) -> Observation:
    """Return a container with a descriptor on its way through a Unix socket."""
    return container(process(queues={5: Queue(in_flight=(FILE._replace(fd=-1, **changes),))}))


def limited(*, used: int, limit: int) -> Observation:
    """Return a container whose second process has some descriptors, and a limit of them."""
    files = tuple(FILE._replace(fd=number, name="anon_inode:[eventpoll]") for number in range(used))
    return container(process(), process(8, files=files, limits={resource.RLIMIT_NOFILE: (limit, 4096)}))


PINGS = with_socket(kind=socket.SOCK_DGRAM, protocol=socket.IPPROTO_ICMP)
UNIX = SOCKET._replace(family=socket.AF_UNIX, protocol=0, address="")
DATAGRAMS = UNIX._replace(kind=socket.SOCK_DGRAM)
BOTH = {5: UnixSocket(9, (), 0), 9: UnixSocket(0, (), 0)}
UNREAD = Queue(socket.SOCK_DGRAM, unread_bytes=9, has_unread=True, send_buffer_bytes=4096)
PACKETS = FILE._replace(name="pipe:[2]", mode=stat.S_IFIFO, info="flags:\t040000\n")
AUTOFS = Mount(8, "0:9", "/", "/auto", "autofs", "systemd-1", frozenset({"fd=9", "pipe_ino=2"}))
SYSV = "7f00-7f01 rw-s 0 00:01 5 /SYSV00000000\n"
PROBED = "7f00-7f01 r-xp 0 08:01 5 /usr/lib/libcuda.so.580.1\n7fff-7fff --xp 0 00:00 0 [uprobes]\n"
ROWS: list[tuple[Observation, str, Status | None]] = [
    (container(), "", None),
    (with_file(name="anon_inode:[io_uring]"), "io-uring", Status.FAIL),
    (with_file(name="anon_inode:[userfaultfd]"), "anonymous-file", Status.FAIL),
    (with_file(name="anon_inode:[eventpoll]"), "", None),
    (device("/dev/fuse", 10, 229), "device", Status.FAIL),
    (device("/dev/hpet", 10, 228), "device", Status.FAIL),
    (device("/dev/net/tun", 10, 200), "", None),
    (device("/dev/null", 1, 3), "", None),
    (device("/dev/nvidia0", 195, 0), "", None),
    (device("/dev/kfd", 240, 0), "device", Status.WARN),
    (device("/dev/infiniband/uverbs0", 231, 192), "rdma", Status.FAIL),
    (container(process(maps="7f00-7f01 -w-s 0 00:01 5 /dev/infiniband/uverbs0\n")), "rdma", Status.FAIL),
    (container(process(maps=PROBED)), "uprobes", Status.FAIL),
    (container(process(maps=PROBED), options=options("allow-uprobes")), "uprobes", Status.WARN),
    (
        dataclasses.replace(device("/dev/net/tun", 10, 200), processes=(), node=OWN),
        "",
        None,
    ),
    (with_file(is_deleted=True, links=0, stored_bytes=2 * MIB), "ghost-file", Status.FAIL),
    (with_file(is_deleted=True), "link-remap", Status.FAIL),
    (with_file(info="mnt_id:\t9\n"), "lost-mount", Status.FAIL),
    (  # of a process that has another root (chroot), and sees none of its mounts
        container(process(mounts=(ROOT,)), process(8, files=(FILE._replace(info="mnt_id:\t8\n"),))),
        "",
        None,
    ),
    (container(process(mounts=(BOUND,))), "mount", Status.FAIL),
    (container(process(mounts=(ROOT._replace(root="/srv/rootfs"), BOUND))), "mount", Status.FAIL),
    (container(process(mounts=(ROOT, BOUND))), "", None),
    (container(process(mounts=(WHOLE._replace(kind="btrfs"), BOUND._replace(kind="btrfs")))), "", None),
    (container(process(mounts=(WHOLE,))), "mount-kind", Status.FAIL),
    (container(process(mounts=(WHOLE._replace(kind="fuse.sshfs"),))), "mount-kind", Status.FAIL),
    (container(process(mounts=(WHOLE._replace(kind="overlay"),))), "overlay-mount", Status.FAIL),
    (container(process(mounts=(WHOLE._replace(kind="tracefs"),))), "tracefs", Status.WARN),
    (with_file(info="lock:\t1: FLOCK  ADVISORY  WRITE 7 08:01:2 0 EOF\n"), "file-locks", Status.FAIL),
    (
        with_file(mode=stat.S_IFDIR, info="lock:\t1: FLOCK  ADVISORY  WRITE 7 08:01:2 0 EOF\n"),
        "file-locks",
        Status.FAIL,
    ),
    (with_socket(family=socket.AF_VSOCK), "socket-kind", Status.FAIL),
    (with_socket(protocol=132), "socket-kind", Status.FAIL),
    (PINGS, "", None),
    (dataclasses.replace(PINGS, criu=(4, 1, 1)), "socket-kind", Status.FAIL),
    (with_socket(kind=socket.SOCK_RAW, protocol=1), "", None),
    (with_socket(protocol=262), "mptcp", Status.FAIL),
    (with_socket(kind=socket.SOCK_DGRAM, protocol=17, is_corked=True), "udp-corked", Status.FAIL),
    (with_socket(is_connected=True), "tcp-established", Status.FAIL),
    (with_socket(is_listening=True, waiting=2), "tcp-in-flight", Status.FAIL),
    (container(process(sockets=(UNIX,)), unix={5: UnixSocket(9, (), 0)}), "unix-external", Status.FAIL),
    (
        container(process(sockets=(UNIX, UNIX._replace(inode=9))), unix={5: UnixSocket(9, (), 0)}),
        "",
        None,
    ),
    (container(process(sockets=(UNIX,)), unix={5: UnixSocket(0, (0,), 0)}), "unix-in-flight", Status.FAIL),
    (container(process(sockets=(DATAGRAMS,)), unix={5: UnixSocket(9, (), 0)}), "unix-peer", Status.FAIL),
    (container(process(sockets=(DATAGRAMS,)), unix=BOTH), "unix-external", Status.FAIL),
    (container(process(queues={5: Queue(is_netlink=True, has_unread=True)})), "netlink-unread", Status.FAIL),
    (container(process(queues={5: Queue(is_netlink=True, group_words=1)})), "", None),
    (container(process(queues={5: Queue(is_netlink=True, group_words=3)})), "netlink-groups", Status.FAIL),
    (container(process(queues={5: UNREAD})), "", None),
    (
        container(process(queues={5: Queue(socket.SOCK_DGRAM, has_empty=True, send_buffer_bytes=4096)})),
        "unread-datagrams",
        Status.WARN,
    ),
    (container(process(queues={5: UNREAD._replace(names_senders=True)})), "unix-credentials", Status.FAIL),
    (container(process(queues={5: UNREAD._replace(send_buffer_bytes=40)})), "unix-large", Status.FAIL),
    (container(process(stat=Stat("T", 1, PID, PID, 5, foreground=99))), "stopped", Status.WARN),
    (container(process(stat=Stat("T", 1, PID, PID))), "", None),
    (container(process(), process(8, namespaces={**OWN, "ipc": "x"})), "nested-namespace", Status.FAIL),
    (container(process(), process(8, namespaces={**OWN, "net": "x"})), "nested-network", Status.FAIL),
    (BY_CRUN, "", None),
    (with_file(name="anon_inode:[pidfd]", info="flags:\t02000002\nPid:\t99\n"), "pidfd", Status.FAIL),
    (with_options(("link-remap",), is_deleted=True), "", None),
    (with_options(("link-remap", "leave-running"), is_deleted=True), "link-gone", Status.WARN),
    (left_running("overlay"), "link-gone", Status.WARN),
    (left_running("btrfs"), "link-gone", Status.FAIL),
    (left_running("tmpfs"), "", None),
    (left_running("tmpfs", is_bound=True), "link-gone", Status.FAIL),
    (with_options(("link-remap", "leave-running")), "", None),
    (with_file(name="anon_inode:[pidfd]", info="flags:\t02000202\nPid:\t7\n"), "pidfd", Status.FAIL),
    (with_file(name="anon_inode:[pidfd]", info="flags:\t02000002\nPid:\t7\n"), "", None),
    (with_file(name="anon_inode:[pidfd]", info="flags:\t02000002\nPid:\t-1\n"), "", None),
    (with_file(name="anon_inode:[timerfd]", info="clockid: 9\n"), "timer-clock", Status.FAIL),
    (with_file(name="anon_inode:[timerfd]", info="clockid: 7\n"), "", None),
    (with_file(name="pipe:[5]", mode=stat.S_IFIFO, info="flags:\t040000\n"), "packet-pipe", Status.FAIL),
    (with_file(name="pipe:[5]", mode=stat.S_IFIFO, info="flags:\t04000\n"), "", None),
    (container(process(files=(PACKETS,), mounts=(AUTOFS,))), "", None),
    (container(process(files=(PACKETS._replace(inode=3),), mounts=(AUTOFS,))), "packet-pipe", Status.FAIL),
    (PIPES, "many-pipes", Status.FAIL),
    (with_file(name="/run/socket", mode=stat.S_IFSOCK), "socket-path", Status.FAIL),
    (with_file(name=""), "long-path", Status.FAIL),
    (with_file(name="net:[1]", mode=stat.S_IFREG), "lost-namespace", Status.FAIL),
    (with_file(name="own", mode=stat.S_IFREG), "", None),
    (proc_file("/proc/1/task/8/status"), "proc-file", Status.FAIL),
    (proc_file("/proc/1/task/1/status"), "", None),
    (proc_file("/proc/1/fdinfo/4"), "proc-file", Status.FAIL),
    (proc_file("/proc/1/fdinfo/3"), "", None),
    (proc_file("/proc/meminfo"), "", None),
    (container(process(stat=Stat("S", 1, PID, PID, policy=6))), "scheduling", Status.FAIL),
    (session(of_leader=8, below=8), "session-order", Status.FAIL),
    (session(of_leader=8, below=7), "", None),
    (session(of_leader=7, below=8), "", None),
    (container(process(), process(8), sharing_memory=((7, 8),)), "shared-parts", Status.FAIL),
    (container(process(), process(8), sharing_directory=((7, 8),)), "shared-parts", Status.FAIL),
    (container(ENDED_FIRST), "first-thread-ended", Status.FAIL),
    (container(process(status={"Groups": " ".join(map(str, range(2000)))})), "many-groups", Status.FAIL),
    (container(process(status={"Groups": "0 1000"})), "", None),
    (container(process(status={"CapInh": "3", "CapBnd": "1"})), "capabilities", Status.FAIL),
    (container(process(status={"CapInh": "1", "CapBnd": "3"})), "", None),
    (container(process(status={"SigQ": "20/5", "ShdPnd": "0000000200000000"})), "pending-signals", Status.FAIL),
    (container(process(status={"SigQ": "2/5", "ShdPnd": "0000000200000000"})), "", None),
    (container(outside=(process(9),)), "exec", Status.WARN),
    (container(process(maps=STACK)), "", None),
    (container(process(maps=f"{STACK}7e0-7e1 r--p 0 00:00 0 [vvar]\n")), "no-vdso", Status.FAIL),
    (container(process(maps=f"{STACK}7f0-7f1 r-xp 0 00:00 0 [vdso]\n")), "", None),
    (container(process(maps="7f0-7f1 rw-s 0 00:12 5 /secretmem (deleted)\n")), "secret-memory", Status.FAIL),
    (container(process(maps="7f0-7f1 rw-s 0 00:12 5 anon_inode:[perf_event]\n")), "anonymous-file", Status.FAIL),
    (container(process(maps=LIBRARY, mounts=(LIBRARIES,))), "noexec", Status.FAIL),
    (container(process(maps=LIBRARY, mounts=(LIBRARIES._replace(options=frozenset({"rw"})),))), "", None),
    (unix("/run/s", frozenset({"ro"})), "socket-place", Status.FAIL),
    (unix("/run/s", frozenset({"rw"})), "", None),
    (container(tasks=with_semaphore(1)), "lost-state", Status.WARN),
    (container(tasks=with_semaphore(0)), "", None),
    (container(tasks=with_memory("wf")), "", None),
    (container(tasks=with_memory("sl")), "lost-state", Status.WARN),
    (container(process(), process(8, stat=Stat("S", 7, 7, 7, exit_signal=12))), "exit-signal", Status.WARN),
    (container(process(), ended(200 << 8)), "exit-status", Status.WARN),
    (container(process(), ended(signal.SIGSEGV | 0x80)), "exit-status", Status.WARN),
    (container(process(), ended(34)), "exit-status", Status.WARN),
    (container(process(), ended(127 << 8)), "", None),
    (container(process(), ended(signal.SIGKILL)), "", None),
    (container(process(maps="7f0-7f1 rw-s 0 00:12 5 /[aio] (deleted)\n")), "asynchronous-io", Status.WARN),
    (with_file(name="/proc/pressure/memory"), "trigger", Status.WARN),
    (with_file(name="/sys/fs/cgroup/a/io.pressure"), "trigger", Status.WARN),
    (
        container(container=CONTAINER._replace(config={"linux": {"seccomp": {"listenerPath": "/s"}}})),
        "seccomp-listener",
        Status.WARN,
    ),
    (container(process(), process(8, status={"TracerPid": "99"})), "traced", Status.FAIL),
    (container(process(), process(8, status={"TracerPid": "7"})), "traced", Status.FAIL),
    (container(process(), process(8, state="T"), freezer_version=1), "stopped", Status.FAIL),
    (container(process(), process(8, state="T"), freezer_version=2), "", None),
    (container(process(status={"SigPnd": f"{1 << signal.SIGTRAP - 1:x}"})), "pending-sigtrap", Status.FAIL),
    (container(process(status={"NSsid": "12\t0"})), "session-leader", Status.FAIL),
    (container(node={**NODE, "pid": "own"}), "pid-taken", Status.WARN),
    (container(process(status={"NSpid": "700\t7"})), "pid-taken", Status.WARN),  # its pod's
    (container(process(status={"NSpid": "700\t1"})), "", None),
    (container(room_bytes=5 << 10), "memory-limit", Status.FAIL),
    (container(room_bytes=5 << 10, swap_bytes=4096), "", None),
    (container(room_bytes=MIB), "", None),
    (
        container(process(maps="7f00-7f01 rw-s 0 00:01 5 /SYSV00000000\n"), node={**NODE, "ipc": "own"}),
        "sysv-ipc",
        Status.FAIL,
    ),
    (container(process(maps="7f00-7f01 rw-s 0 00:01 5 /SYSV00000000\n")), "", None),
    (container(process(used={"root": FILE._replace(name="/srv/root")})), "first-root", Status.FAIL),
    (container(process(used={"root": FILE._replace(name="/")})), "", None),
    (container(made_in={"uts": "user:[1]", "ipc": "own"}), "nested-namespace", Status.FAIL),
    (container(made_in={"uts": "own", "net": "user:[1]"}), "", None),
    (with_socket(network="net:[9]"), "lost-namespace", Status.FAIL),
    (with_socket(network="own"), "", None),
    (with_socket(kind=socket.SOCK_DGRAM, protocol=17, unread_bytes=9), "unread-datagrams", Status.WARN),
    (
        container(process(queues={5: Queue(is_netlink=True, group_words=1, has_port=False)})),
        "netlink-groups",
        Status.FAIL,
    ),
    (sent(name="anon_inode:[userfaultfd]"), "anonymous-file", Status.FAIL),
    (sent(name="/dev/pts/0", mode=stat.S_IFCHR, device=os.makedev(136, 0)), "terminal", Status.FAIL),
    (sent(), "", None),
    (limited(used=10, limit=13), "", None),
    (limited(used=10, limit=12), "few-descriptors", Status.FAIL),
    (container(process(), process(8, state="Z", status={"NSsid": "12\t0"})), "session-leader", Status.FAIL),
    (container(process(state="Z", stat=Stat("Z", 1, PID, PID))), "no-first-process", Status.FAIL),
]


@pytest.mark.parametrize(("seen", "name", "status"), ROWS)
def test_rows(seen: Observation, name: str, status: Status | None) -> None:
    found = run(seen)
    assert [(finding.check, finding.status) for finding in found] == ([(name, status)] if status else [])
    assert all(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("state", "name", "status"),
    [
        ({"upper": "tls"}, "kernel-tls", Status.FAIL),
        ({"has_urgent": True}, "connection-state", Status.WARN),
        ({"has_urgent": True, "has_urgent_inline": True}, "urgent-inline", Status.FAIL),
        ({"is_zero_copy": True}, "connection-state", Status.WARN),
    ],
)
def test_what_a_connection_does_not_keep(state: Mapping[str, Any], name: str, status: Status) -> None:
    """A connection that is closed has none of it."""
    seen = dataclasses.replace(with_socket(is_connected=True, address="127.0.0.1", **state), container=None)
    for option, found in (("tcp-established", {(name, status)}), ("tcp-close", set())):
        findings = run(dataclasses.replace(seen, options=options(option)))
        assert {(one.check, one.status) for one in findings if one.check != "tcp-established"} == found


@pytest.mark.parametrize(
    ("seen", "name", "option"),
    [
        (with_file(is_deleted=True), "link-remap", "link-remap"),
        (with_file(info="lock:\t1: FLOCK  ADVISORY  WRITE 7 08:01:2 0 EOF\n"), "file-locks", "file-locks"),
        (with_socket(is_connected=True), "tcp-established", "tcp-close"),
        (with_socket(is_connected=True), "tcp-established", "tcp-established"),
    ],
)
def test_an_option_of_criu_that_solves_it(seen: Observation, name: str, option: str) -> None:
    assert [finding.check for finding in run(seen)] == [name]
    assert run(dataclasses.replace(seen, options=options(option))) == []


def test_a_row_holds_for_some_versions() -> None:
    seen = dataclasses.replace(with_socket(kind=socket.SOCK_DGRAM, protocol=17), hides_socket_options=True)
    said = {
        version: [f.status for f in run(dataclasses.replace(seen, criu=version))] for version in ((4, 1, 1), (4, 2), ())
    }
    assert said == {(4, 1, 1): [Status.FAIL], (4, 2): [], (): [Status.WARN]}
    assert run(dataclasses.replace(seen, hides_socket_options=False, criu=(4, 1, 1))) == []
    assert [before(4, 2).has((4, 1, 1)), since(4, 2).has((4, 1, 1)), ALL_VERSIONS.has(())] == [True, False, True]


def test_what_cannot_be_read_is_a_warning() -> None:
    def find(_seen: Observation) -> list[Problem]:
        raise PermissionError(13, "Permission denied")

    (finding,) = checks.run(container(), [Check(name="x", find=find)])
    assert (finding.check, finding.status) == ("x", Status.WARN)


def test_a_failure_that_passes_is_a_warning() -> None:
    """As a lock that is held for a moment: whether the dump meets it nobody knows."""
    looks = iter([with_file(name="anon_inode:[io_uring]"), container()])
    (finding,) = lasting(lambda: next(looks, container()), ENDLESS, CHECKS)
    assert (finding.check, finding.status) == ("io-uring", Status.WARN)
    assert finding.remedy.startswith("try again, or ")
    (finding,) = lasting(lambda: with_file(name="anon_inode:[io_uring]"), ENDLESS, CHECKS)
    assert finding.status is Status.FAIL


def test_findings_alike_are_summed_up() -> None:
    alike = [Finding("device", Status.FAIL, str(number), "close it") for number in range(5)]
    findings = alike_as_one([*alike, Finding("size", Status.OK, "small")])
    assert [finding.detail for finding in findings] == ["0", "1", "2; and 2 more like it", "small"]


@pytest.mark.parametrize(("manager", "is_named"), [("libpod", True), ("cri-o", False), ("", False)])
def test_podmans_own_options_for_connections_are_named(manager: str, *, is_named: bool) -> None:
    found = CONTAINER._replace(annotations={"io.container.manager": manager})
    (finding,) = run(dataclasses.replace(with_socket(is_connected=True, address="10.0.0.1"), container=found))
    assert finding.remedy.startswith("ocihook install")
    assert ("podman: `container checkpoint --tcp-established`" in finding.remedy) is is_named
    assert finding.repair is Repair.INSTALL


def test_what_containers_name_gives_no_commands() -> None:
    """Neither to a shell, in a remedy that is copied, nor to a terminal."""
    mount = Mount(9, "8:1", "/x", "/a; rm -rf $HOME\n\x1b[2J", "ext4", "/dev/sda1")
    (finding,) = run(container(process(mounts=(mount,))))
    assert finding.remedy.startswith(f"nsenter -t {PID} -m umount '/a; rm -rf $HOME\n\x1b[2J', or")
    assert CriuOptions(file="/x;reboot").add("tcp-close") == "echo tcp-close >> '/x;reboot'"


def test_a_real_process_is_observed() -> None:
    """All its threads, files and sockets; and who traces it."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    script = (
        "import socket, threading, time; kept = [open('/dev/zero'), socket.socket(), socket.socketpair()]; "
        "threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        thread = HeldThread(child.pid, ENDLESS)
        try:
            seen = observe(child.pid, criu=(4, 2), options=CriuOptions(), container=None)
        finally:
            thread.release()
            child.kill()
    assert [len(one.threads) for one in seen.processes] == [2]
    assert seen.init.leader.tid == child.pid
    assert "/dev/zero" in {file.name for file in seen.files}
    assert {sock.family for sock in seen.sockets} == {socket.AF_INET, socket.AF_UNIX}
    assert len({sock.inode for sock in seen.sockets} & seen.unix.keys()) == 2
    assert [f"kill {os.getpid()}" in f.remedy for f in run(seen) if f.check == "traced"] == [True]


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    me = Process.find(os.getpid())
    assert me is not None
    journal = Journal.create(tmp_path, me)
    journal.identify(ContainerRef(id="ab" * 32, engine="podman", runtime="runc", name="job"), str(tmp_path))
    journal.note(CallFacts(criu_version="4.2"))
    return Dump(journal, ENDLESS, me.pid, me.pid, str(tmp_path), tmp_path)


def set_checks(monkeypatch: pytest.MonkeyPatch, *problems: Problem, is_final: bool = False) -> None:
    check: Check[Observation] = Check(name="x", find=lambda _seen: problems, is_final=is_final)
    monkeypatch.setattr(participant, "CHECKS", (check,))


def test_a_dump_is_refused_with_every_failure(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    set_checks(monkeypatch, fail("it has this", "do that"), fail("and those", "do more"), warn("odd", "look"))
    with pytest.raises(PreflightError, match=r"^it has this: do that; and those: do more"):
        Preflight().refuse(dump)


def test_a_dump_goes_ahead_with_warnings(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    set_checks(monkeypatch, warn("odd", "look"))
    Preflight().refuse(dump)
    assert dump.remark == "warning: odd: look."


@pytest.mark.parametrize("is_final", [False, True])
def test_the_policy_takes_a_risk_but_for_what_kills(
    dump: Dump, monkeypatch: pytest.MonkeyPatch, *, is_final: bool
) -> None:
    set_checks(monkeypatch, fail("it has this", "do that"), is_final=is_final)
    dump.journal.note(CallFacts(criu_version="4.2", policy=Policy(preflight="warn")))
    if is_final:
        with pytest.raises(PreflightError):
            Preflight().refuse(dump)
    else:
        Preflight().refuse(dump)
        assert dump.remark == "warning: it has this: do that."


def test_an_application_that_quiesces_is_checked_afterwards(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may close by then what CRIU cannot dump."""
    set_checks(monkeypatch, fail("it has this", "do that"))
    dump.journal.note(CallFacts(criu_version="4.2", policy=Policy(quiesce_signal="USR1")))
    Preflight().refuse(dump)
    with pytest.raises(PreflightError):
        Preflight().prepare(dump)


def test_processes_that_have_ended_share_nothing() -> None:
    """The kernel finds the memory of any two of them equal: they have none."""
    children = [subprocess.Popen(["true"]) for _ in range(2)]
    for child in children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    seen = observe(os.getpid(), criu=(4, 2), options=CriuOptions(), container=None)
    for child in children:
        child.wait(10)
    assert {child.pid for child in children} <= set(seen.pids)
    assert (seen.sharing_memory, seen.sharing_directory) == ((), ())


def test_a_pipe_whose_other_end_is_outside() -> None:
    """One whose other end is closed stays as it is."""
    reader, writer = os.pipe()
    me = os.getpid()

    def found(*numbers: int) -> list[Status]:
        files = tuple(file for file in open_files(me) if file.fd in numbers)
        findings = run(container(process(me, files=files), init_pid=me))
        return [one.status for one in findings if one.check == "half-pipe"]

    try:
        assert found(reader) == [Status.WARN]
        assert found(reader, writer) == []
        os.close(writer)
        assert found(reader) == []
    finally:
        os.close(reader)
