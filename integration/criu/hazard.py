"""A process that has one of the things that CRIU refuses, or that need an option: `hazard.py NAME DIRECTORY PORT`.

It makes DIRECTORY/ready and waits. DIRECTORY/peer.sock and PORT of 127.0.0.1 are listened on by somebody outside.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_KEPT: list[Any] = []  # what must stay open
_READY, _TOLD = os.pipe()  # a process that was started tells that it is what it is to be
_CLONE = {
    "time": 1 << 7,
    "mount": 1 << 17,
    "cgroup": 1 << 25,
    "uts": 1 << 26,
    "ipc": 1 << 27,
    "user": 1 << 28,
    "pid": 1 << 29,
    "net": 1 << 30,
}


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def nothing(_directory: Path) -> None:
    """A process that any CRIU can dump."""


def io_uring(_directory: Path) -> None:
    _call(425, 8, ctypes.create_string_buffer(120))


def userfaultfd(_directory: Path) -> None:
    _call(323, 0o2000000)


def perf_event(_directory: Path) -> None:
    software, size = 1, 128  # PERF_TYPE_SOFTWARE, and of the structure
    attributes = ctypes.create_string_buffer(software.to_bytes(4, "little") + size.to_bytes(4, "little"), size)
    _call(298, attributes, 0, -1, -1, 0)


def pidfd(_directory: Path) -> None:
    _KEPT.append(os.pidfd_open(os.getpid()))


def inotify(directory: Path) -> None:
    """A watch on a directory that can be found again."""
    fd = _libc.inotify_init()
    assert _libc.inotify_add_watch(fd, os.fsencode(directory), 2) >= 0


def inotify_overlay(directory: Path) -> None:
    """A watch on a file of an overlay, which the test has mounted."""
    fd = _libc.inotify_init()
    assert _libc.inotify_add_watch(fd, os.fsencode(directory / "overlay/file"), 2) >= 0


def inotify_deleted(directory: Path) -> None:
    """A watch on a file that is deleted, and still open."""
    path = directory / "watched"
    _KEPT.append(path.open("w"))
    fd = _libc.inotify_init()
    assert _libc.inotify_add_watch(fd, os.fsencode(path), 2) >= 0
    path.unlink()


def ghost_small(directory: Path) -> None:
    _ghost(directory, 64 << 10)


def ghost_large(directory: Path) -> None:
    _ghost(directory, 3 << 20)


def ghost_sparse(directory: Path) -> None:
    file = (directory / "sparse").open("wb")
    file.truncate(3 << 20)
    file.flush()
    (directory / "sparse").unlink()
    _KEPT.append(file)


def _ghost(directory: Path, size_bytes: int) -> None:
    file = (directory / "ghost").open("wb")
    file.write(b"x" * size_bytes)
    file.flush()
    (directory / "ghost").unlink()
    _KEPT.append(file)


def ghost_mapped(directory: Path) -> None:
    """A deleted file that is mapped, not open."""
    with (directory / "mapped").open("w+b") as file:
        file.write(b"x" * (3 << 20))
        file.flush()
        _KEPT.append(mmap.mmap(file.fileno(), 0))
    (directory / "mapped").unlink()


def link_remap(directory: Path) -> None:
    """Opened by a name that is gone while another is there."""
    file = (directory / "first").open("w")
    os.link(directory / "first", directory / "second")
    (directory / "first").unlink()
    _KEPT.append(file)


def semaphore(directory: Path) -> None:
    """A POSIX semaphore: the C library maps it by a name that it then renames."""
    sem_open = _libc.sem_open
    sem_open.restype = ctypes.c_void_p
    assert sem_open(b"/ocihook-" + directory.name.encode(), os.O_CREAT, 0o600, 1)


def unix_external(directory: Path) -> None:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(str(directory / "peer.sock"))
    _KEPT.append(peer)


def unix_peer(directory: Path) -> None:
    """A socket that sends to one of another network namespace."""

    def listen() -> None:
        assert _libc.unshare(_CLONE["net"]) == 0
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        peer.bind(str(directory / "other.sock"))
        _KEPT.append(peer)

    _outside(listen)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(str(directory / "other.sock"))
    _KEPT.append(sender)


def unix_sender(directory: Path) -> None:
    """A socket that sends to one outside, of the same network namespace."""

    def listen() -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        peer.bind(str(directory / "other.sock"))
        _KEPT.append(peer)

    _outside(listen)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(str(directory / "other.sock"))
    _KEPT.append(sender)


def unix_credentials(_directory: Path) -> None:
    """Unread data that comes with the credentials of its sender."""
    receiver, sender = socket.socketpair()
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    sender.send(b"x")
    _KEPT.append((receiver, sender))


def unix_unread(_directory: Path) -> None:
    """Unread data without more, which CRIU dumps."""
    receiver, sender = socket.socketpair()
    sender.send(b"x" * 1000)
    _KEPT.append((receiver, sender))


def unix_large(_directory: Path) -> None:
    """An unread datagram that is larger than its receiver's own send buffer."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender.send(b"x" * 65536)
    _KEPT.append((receiver, sender))


def netlink_unread(_directory: Path) -> None:
    """An answer of the kernel's that has not been read."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    get_link, request_dump = 18, 0x301  # RTM_GETLINK; NLM_F_REQUEST and NLM_F_DUMP
    netlink.send(struct.pack("=IHHIIBxHiII", 32, get_link, request_dump, 1, 0, 0, 0, 0, 0, 0))
    _KEPT.append(netlink)


def netlink_groups(_directory: Path) -> None:
    """A group above 32."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    netlink.setsockopt(270, 1, 33)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, RTNLGRP_BRVLAN
    _KEPT.append(netlink)


def netlink_group(_directory: Path) -> None:
    """A group of the first 32, which CRIU dumps."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    netlink.bind((0, 1))
    _KEPT.append(netlink)


def unix_pair(_directory: Path) -> None:
    _KEPT.append(socket.socketpair())


def tcp_listen(_directory: Path) -> None:
    _KEPT.append(socket.create_server(("127.0.0.1", 0)))


def tcp_established(_directory: Path) -> None:
    _KEPT.append(socket.create_connection(("127.0.0.1", int(sys.argv[3]))))


def tcp_in_flight(_directory: Path) -> None:
    """A connection that is made but not accepted, by a client that has gone on."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    _outside(server.close)
    client.close()
    _KEPT.append(server)


def mptcp(_directory: Path) -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    server.bind(("127.0.0.1", 0))
    server.listen()
    _KEPT.append(server)


def icmp(_directory: Path) -> None:
    _KEPT.append(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))


def vsock(_directory: Path) -> None:
    _KEPT.append(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))


def netlink(_directory: Path) -> None:
    _KEPT.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))


def packet(_directory: Path) -> None:
    _KEPT.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))


def flock(directory: Path) -> None:
    file = (directory / "locked").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _KEPT.append(file)


def posix_lock(directory: Path) -> None:
    file = (directory / "locked").open("w")
    fcntl.lockf(file, fcntl.LOCK_EX)
    _KEPT.append(file)


def lease(directory: Path) -> None:
    (directory / "leased").touch()
    file = (directory / "leased").open("r")
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    _KEPT.append(file)


def shm_sysv(_directory: Path) -> None:
    identifier = _libc.shmget(0, 4096, 0o1600)
    _libc.shmat.restype = ctypes.c_void_p
    assert _libc.shmat(identifier, None, 0)
    _libc.shmctl(identifier, 0, None)  # goes with us


def mqueue(_directory: Path) -> None:
    name = b"/ocihook-queue"
    rt = ctypes.CDLL("librt.so.1")
    assert rt.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
    rt.mq_unlink(name)


def memfd(_directory: Path) -> None:
    os.write(os.memfd_create("x"), b"x" * 8192)


def device_fuse(_directory: Path) -> None:
    os.open("/dev/fuse", os.O_RDWR)


def device_kvm(_directory: Path) -> None:
    os.open("/dev/kvm", os.O_RDWR)


def device_tty(_directory: Path) -> None:
    os.open("/dev/tty20", os.O_RDWR | os.O_NOCTTY)


def device_null(_directory: Path) -> None:
    os.open("/dev/null", os.O_RDWR)
    os.open("/dev/urandom", os.O_RDONLY)


def device_kmsg(_directory: Path) -> None:
    os.open("/dev/kmsg", os.O_RDONLY)


def device_loop(_directory: Path) -> None:
    os.open("/dev/loop-control", os.O_RDONLY)


def device_tun(_directory: Path) -> None:
    os.open("/dev/net/tun", os.O_RDWR)


def device_mapped(_directory: Path) -> None:
    fd = os.open("/dev/mem", os.O_RDONLY)
    _KEPT.append(mmap.mmap(fd, 4096, prot=mmap.PROT_READ))
    os.close(fd)


def terminal(_directory: Path) -> None:
    """A terminal whose other end is held outside."""
    master, slave = os.openpty()
    _outside(lambda: os.close(slave))
    os.close(master)


def _outside(prepare: Callable[[], object]) -> None:
    """Start a process that is no child of ours and keeps what is open; the test ends it, by its group."""
    if os.fork() == 0:
        if os.fork() == 0:
            prepare()
            os.write(_TOLD, b"x")
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    os.read(_READY, 1)


def nested(kind: str) -> None:
    """A child in a namespace of its own."""
    if kind in ("pid", "time"):  # these are for children
        assert _libc.unshare(_CLONE[kind]) == 0
    if os.fork() == 0:
        if kind not in ("pid", "time"):
            assert _libc.unshare(_CLONE[kind]) == 0
        os.write(_TOLD, b"x")
        while True:
            signal.pause()


def traced(_directory: Path) -> None:
    """A child that is traced by somebody outside."""
    victim = os.fork()
    if victim == 0:
        while True:
            signal.pause()
    _outside(lambda: _call(101, 0x4206, victim, 0, 0))  # PTRACE_SEIZE


def traced_inside(_directory: Path) -> None:
    """A child that is traced by us, since it asked for it (PTRACE_TRACEME)."""
    if os.fork() == 0:
        _call(101, 0, 0, 0, 0)
        os.write(_TOLD, b"x")
        while True:
            signal.pause()
    os.read(_READY, 1)


def sigtrap(_directory: Path) -> None:
    """A signal of debuggers' that waits, since it is blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTRAP])
    os.kill(os.getpid(), signal.SIGTRAP)


def hidden_file(directory: Path) -> None:
    """A file in a directory on which something is mounted afterwards; the test gives us mounts of our own."""
    (directory / "hidden").mkdir()
    _KEPT.append((directory / "hidden/file").open("w"))
    _mount_tmpfs(directory / "hidden")


def hidden_mount(directory: Path) -> None:
    """A file on a mount on which another one is mounted."""
    _mount_tmpfs(directory / "hidden")
    _KEPT.append((directory / "hidden/file").open("w"))
    _mount_tmpfs(directory / "hidden")


def hidden_name(directory: Path) -> None:
    """A file in a directory on which one is mounted that has another file of this name."""
    (directory / "hidden").mkdir()
    _KEPT.append((directory / "hidden/file").open("w"))
    _mount_tmpfs(directory / "hidden")
    (directory / "hidden/file").touch()


def _mount_tmpfs(place: Path) -> None:
    place.mkdir(exist_ok=True)
    assert _libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, None) == 0


def unix_closed_in_flight(_directory: Path) -> None:
    """A connection that was closed before it was accepted."""
    _unix_client().close()


def unix_sent_in_flight(_directory: Path) -> None:
    """A connection over which something was sent before it was accepted."""
    client = _unix_client()
    client.send(b"x")
    _KEPT.append(client)


def _unix_client() -> socket.socket:
    server, client = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    server.bind(f"\0ocihook-{os.getpid()}")
    server.listen()
    client.connect(server.getsockname())
    _KEPT.append(server)
    return client


def udp_corked(_directory: Path) -> None:
    """A socket that holds back what is sent."""
    cork = 1
    corked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    corked.setsockopt(socket.IPPROTO_UDP, cork, 1)
    _KEPT.append(corked)


def session_outside(_directory: Path) -> None:
    """Of a session whose leader is not in the tree: the test does not make it a leader."""


def session_unseen(_directory: Path) -> None:
    """Of a session whose leader is not even in its PID namespace: the test makes it one of its own."""


def file_open(directory: Path) -> None:
    file = (directory / "data").open("w")
    file.write("x" * 1000)
    file.flush()
    _KEPT.append(file)


def main(name: str, directory: Path) -> None:
    """Become a process with the hazard, and stay."""
    if name.startswith("nested_"):
        nested(name.removeprefix("nested_"))
        os.read(_READY, 1)
    else:
        globals()[name](directory)
    os.close(_READY)
    os.close(_TOLD)
    (directory / "ready").touch()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
