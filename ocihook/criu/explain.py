"""Finds in CRIU's log why a dump or restore has failed: the cause and its remedy, not the last line.

CRIU reports an error where it occurs and again in every caller, so the first line that is known names the cause; later
ones follow from it. Each pattern was seen in a log of CRIU 4.1.1 or 4.2.1 (tests/data/criu-logs, made by
integration/criu) or is quoted from the issue that is named beside it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_CONF = "/etc/criu/runc.conf (for crun see `ocihook doctor`)"
_PODMAN_DUMP = "; or by podman: `container checkpoint --tcp-established`, and the same in the restore"
_PODMAN_RESTORE = "; or by podman: `container restore --tcp-established`, or --tcp-close where it has that"
# libuv uses io_uring wherever it can: torchrun's agent does so with USE_LIBUV=0, too.
_KILLED_NAME = "container-killed"
_KILLED_WHAT = "process {pid} of the container was killed while CRIU dumped it"
_KILLED_REMEDY = (
    "see whether the kernel did so at its memory limit (`dmesg`); start the container again, or restore a checkpoint"
)
_CLOSE = "have the application close it before the dump"
_NOT_RESTORED = (
    "this checkpoint cannot be restored; have the application do without it, and `ocihook doctor` before a dump"
)
MEMORY_NOT_SHOWN_REMEDY = (
    "boot the node with secretmem.enable=0, or keep the call memfd_secret away by a seccomp filter: applications then "
    "use ordinary memory"
)
SHARED_MEMORY_REMEDY = "try again: a child of vfork or posix_spawn soon runs its program; another must become a thread"
IO_URING_REMEDY = (
    "keep it away by a seccomp filter (podman's default, RuntimeDefault in Kubernetes) or sysctl "
    "kernel.io_uring_disabled=2; UV_USE_IO_URING=0 does for Node, USE_LIBUV=0 does not for torchrun"
)
TRACED_INSIDE_REMEDY = "have the application trace none of its own processes, as sandboxes and crash handlers do"


class Cause(NamedTuple):
    """One way to fail."""

    group: str  # of causes that belong together, as docs/troubleshooting.md has them
    name: str
    pattern: re.Pattern[str]
    what: str  # with the pattern's groups
    remedy: str  # likewise


class Explanation(NamedTuple):
    """Why CRIU failed."""

    name: str  # of the cause; "unknown" or "killed" if the catalogue has none
    what: str
    remedy: str
    line: str  # of the log, that shows it

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else self.what


def explain(log: str) -> Explanation | None:
    """Return why the dump or restore that wrote this log has failed; None if it has not, or no line shows it."""
    lines = log.splitlines()
    has_ended = bool(_HAS_ENDED.search(log))
    # CRIU logs its success only at the log level that runtimes use, or above.
    if _HAS_SUCCEEDED.search(log) or not (has_ended or _IS_VERBOSE.search(log)):
        return None
    before, first_error = _Before(), ""
    for line in lines:
        before.read(line)
        if before.said and _SCRIPT_FAILED.search(line):
            return Explanation("ocihook", before.said.rstrip("."), "", f"{_OURS}{before.said}")
        if not_stopped := _not_stopped(line, before, log):
            return not_stopped
        if cause := _cause_of(line, before):
            return _filled(cause, line, before)
        if not first_error and _ERROR.search(line) and not _NOISE.search(line):
            first_error = line
    if not first_error:
        return _unfinished(lines[-1], before, log)
    return Explanation("unknown", f"CRIU says «{_text(first_error)}»", "", first_error)


def _unfinished(last: str, before: "_Before", log: str) -> Explanation:
    """Return why a log without an error ends: CRIU was killed, maybe since it waited without end."""
    if "Detected cgroup V1 freezer" in log and (seizing := _SEIZING.search(last)):
        return _filled(_STOPPED, seizing[0], before)
    remedy = "see the engine's log for a deadline (kubelet's runtimeRequestTimeout) and the kernel's for memory"
    return Explanation("killed", f"CRIU was killed after it wrote «{_text(last)}»", remedy, last)


def _not_stopped(line: str, before: "_Before", log: str) -> Explanation | None:
    """Return why a process could not be stopped, if this line says so: CRIU names it before or after it."""
    if before.not_seized and _FREEZE_FAILED.search(line):
        return _filled(_TRACED, before.not_seized, before)
    if "Timeout reached" in line and (in_kernel := _IN_KERNEL.search(log)):
        return _filled(_WAITS, in_kernel[0], before)
    return None


def container_killed(pid: int) -> Explanation:
    """Return why a dump failed that CRIU itself would not have ended: a process of the container was killed."""
    what = f"{_KILLED_WHAT.format(pid=pid)}, which CRIU does not notice: it was ended"
    return Explanation(_KILLED_NAME, what, _KILLED_REMEDY, "")


class _Before:
    """What the log has said before a line: whom and what an error is about."""

    def __init__(self) -> None:
        self.process = ""
        self.opened = ""  # the name of a file, as the kernel shows it
        self.said = ""  # by us
        self.not_seized = ""  # the line that says so

    def read(self, line: str) -> None:
        if found := _PROCESS.search(line):
            self.process = found[1]
        elif found := _PATH.search(line):
            self.opened = found[1]
        elif _STAGE.search(line):
            self.said = ""
        elif line.startswith(_OURS):
            self.said = line.removeprefix(_OURS)
        elif _NOT_SEIZED.search(line):
            self.not_seized = line
        if _SEIZED.search(line):
            self.not_seized = ""


def _cause_of(line: str, before: _Before) -> Cause | None:
    if not _ERROR.search(line) or _NOISE.search(line):
        return None
    cause = next((cause for cause in _CAUSES if cause.pattern.search(line)), None)
    has_its_name = bool(before.opened) and f"link remap for {before.opened}. Use" in line  # else it had " (deleted)"
    return _HIDDEN if has_its_name else cause


def _filled(cause: Cause, line: str, before: _Before) -> Explanation:
    match = cause.pattern.search(line)
    assert match is not None
    named = {name: value or "" for name, value in match.groupdict().items()}
    values = {name: _printable(value) for name, value in ({"opened": before.opened} | named).items()}
    who = f"process {before.process}" if before.process else "a process"
    return Explanation(
        cause.name,
        cause.what.format(who=who, **values),
        cause.remedy.format(who=who, **values),
        _printable(line.strip()),
    )


def _text(line: str) -> str:
    """Return a line of the log without time, place and process."""
    return re.sub(r"^(\([0-9.]+\))?\s*(pie: )?([0-9]+: )?\s*(Error|Warn)?\s*(\(\S+\): )?", "", _printable(line)).strip()


def _printable(text: str) -> str:
    """Return text without terminal control sequences: a container chooses the names of its files."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", " "))


def catalogue() -> Sequence[Cause]:
    """Return all causes that are known; docs/troubleshooting.md has them."""
    return _CAUSES


_ERROR = re.compile(r"\bError \(|\bERROR\b|symbol lookup error|undefined symbol")
_OURS = "ocihook: "  # what our hook prints stands in CRIU's log
_STAGE = re.compile(r"Running \S+ scripts")
_SCRIPT_FAILED = re.compile(r"Script \S+ exited with")
_HAS_SUCCEEDED = re.compile(r"(?:Dumping|Restore) finished successfully")
_IS_VERBOSE = re.compile(r"^\([0-9.]+\) (?:Running \S+ scripts|Version: )", re.MULTILINE)
_HAS_ENDED = re.compile(r"(?:Dumping|Restoring) FAILED")
# CRIU logs these before anything is wrong, or after every failure.
_NOISE = re.compile(
    r"rlimit: Can't setup RLIMIT_NOFILE|BPF_MAP|CONFIG_NETFILTER_XT_MARK|exited, status=|No parent image found"
)
_PROCESS = re.compile(r"(?:Dumping (?:task|opened files|path)|Collecting mappings|Dump files)[^(]*\(pid: ([0-9]+)")
_PATH = re.compile(r"Dumping path for -?[0-9]+ fd via self -?[0-9]+ \[(.*)\]$")
# In a frozen cgroup CRIU takes a traced process for one about to end, and retries until its timeout. A zombie cannot be
# seized either: CRIU says so, says that it is seized, and continues.
_NOT_SEIZED = re.compile(r"Unable to interrupt task: \d+ \(Operation not permitted\)")
_SEIZED = re.compile(r"Seized task \d+|Dumping task")
_SEIZING = re.compile(r"SEIZE \d+ .*: success$")
_IN_KERNEL = re.compile(r"Unseizable non-zombie \d+ found, state D.*")
_FREEZE_FAILED = re.compile(r"Timeout reached\. Try to interrupt|Dumping FAILED")


def _causes(group: str, *rows: tuple[str, str, str, str]) -> Iterator[Cause]:
    for name, pattern, what, remedy in rows:
        yield Cause(group, name, re.compile(pattern), what, remedy)


_CAUSES: Sequence[Cause] = (
    *_causes(
        "Action scripts",
        (
            "script-missing",
            r'execvp\("(?P<path>/[^"]*)".*(?P<why>No such file|Permission denied|Exec format error)',
            "the action script {path} cannot be run ({why})",
            "`ocihook doctor` shows the file and the line that name it",
        ),
        (
            "other-script",
            r"Script (?P<path>\S+) exited with",
            "the action script {path} refused",
            "see what it printed",
        ),
    ),
    *_causes(
        "Open files",
        (
            "io-uring",
            r"send_fds failed \(-22\)|anon_inode:\[io_uring\]",  # criu#2131; Linux 6.8 and later pass none on
            "{who} uses io_uring, which CRIU cannot dump",
            IO_URING_REMEDY,
        ),
        (
            "secret-memory",
            r"Unknown shit 100600 \(/secretmem",
            "{who} has secret memory (memfd_secret), which no other process can read",
            MEMORY_NOT_SHOWN_REMEDY,
        ),
        (
            "bpf-map",
            r"of that type \[600\] \(anon anon_inode:bpf-map\)",
            "{who} has a BPF map open, and this CRIU is built without libbpf",
            "have the application close it, or install a CRIU that is built with libbpf",
        ),
        (
            "bpf-map",
            r"does not currently support dumping BPF map type (?P<kind>\d+)",
            "{who} has a BPF map of type {kind} open; CRIU dumps hash tables and arrays only",
            _CLOSE,
        ),
        (
            "pidfd",
            r"pidfd pid (?P<pid>\d+) is not a part of process tree",
            "{who} has a pidfd of process {pid}, which is no process of the container, or one of `exec`",
            _CLOSE,
        ),
        (
            "pidfd",
            r"PIDFD_THREAD flag is currently not supported",
            "{who} has a pidfd of a thread (PIDFD_THREAD), which CRIU cannot dump",
            _CLOSE,
        ),
        (
            "timer-clock",
            r"Unknown clock type (?P<kind>\d+) for",
            "{who} has a timer (timerfd) on the clock {kind}, which wakes a machine and which CRIU cannot dump",
            "have the application use CLOCK_BOOTTIME or CLOCK_REALTIME, or run it without CAP_WAKE_ALARM",
        ),
        (
            "epoll",
            r"Dump eventpoll \(pid: (?P<pid>\d+)\) failed",
            "process {pid} watches (epoll) a file that it has closed and another process still has open",
            "have the application take it out (EPOLL_CTL_DEL) before it closes it",
        ),
        (
            "packet-pipe",
            r"packetized mode for pipes is not supported",
            "{who} has a pipe in packet mode (O_DIRECT), which CRIU cannot dump",
            "have the application make its pipes without O_DIRECT",
        ),
        (
            "many-pipes",
            r"OOM storing pipe",
            "the container has more than 1024 pipes, which is CRIU's limit",
            "run it with fewer processes or event loops, or spread it over containers",
        ),
        (
            "socket-path",
            r"Can't get 1:39 opt: Bad file descriptor",
            "{who} has the path of a socket open (O_PATH), which CRIU takes for a socket",
            _CLOSE,
        ),
        (
            "long-path",
            r"Can't read link of fd \d+: File name too long",
            "{who} has a file open whose path is longer than 4096 bytes, which CRIU cannot dump",
            "have the application close it, or keep it in a directory that is less deep",
        ),
        (
            "inotify-deleted",
            r"Can't find suitable path for handle",
            "{who} watches a file (inotify) that is deleted",
            "have the application remove the watch, or close the file so that the kernel removes it",
        ),
        (
            "anonymous-file",
            r"(?:of that type \[600\] \(anon |Unknown shit 600 \()(?:anon_inode:)?\[?(?P<kind>[^\])]+)",
            "{who} has a file of the kind {kind} open, which CRIU cannot dump",
            "have the application close it, or do without it",
        ),
        (
            "nvidia-device",
            r"of that type \[20\d+\] \(chr (?P<device>195:\d+)\)",  # cuda-checkpoint#7
            "{who} has an NVIDIA device ({device}) open that the driver's checkpoint did not close",
            "see `ocihook doctor --container ID`: workers forked after CUDA was initialised keep such files",
        ),
        (
            "uprobes",
            r"has uprobes vma",  # CRIU 4.2
            "{who} has run into a uprobe, as monitoring sets them, which CRIU cannot dump",
            "end the probe (bpftrace, eBPF monitoring, perf), and start the container again",
        ),
        (
            "device",
            r"of that type \[[26]0\d+\] \((?P<device>(?:chr|blk) \d+:\d+)\)",
            "{who} has a device ({device}) open, which CRIU cannot dump",
            "have the application close it, or run it without that device",
        ),
        (
            "tun",
            r"Net namespace is required to dump tun link",
            "{who} has a tun device open in the node's network namespace",
            "run the container in a network of its own",
        ),
        (
            "ghost-file",
            r"Can't dump ghost file (?P<path>.+) of (?P<size>\d+) size, increase limit",
            "{path} is deleted but in use, and with {size} bytes larger than CRIU's limit for such files",
            f"write `ghost-limit 512M` into {_CONF}",
        ),
        (
            "link-remap",
            r"Can't create link remap for (?P<path>.+)\. Use link-remap option",
            "{path} is in use by a name that it no longer has (POSIX semaphores are)",
            f"write `link-remap` into {_CONF}",
        ),
        (
            "hidden-file",
            r"Unaccessible path opened|Can't (?:create link remap for|link remap to .*: Invalid cross-device)",
            "{who} has {opened} open, which is not found by that name: something was mounted over it since",
            "unmount what hides it, or have the application close it and keep it elsewhere",
        ),
        (
            "hidden-file",
            r"Open files on overmounted mounts are not .* path=(?P<path>.+)$",
            "{who} has {path} open, on a mount that is hidden by another one",
            "unmount what hides it, or have the application close it and keep it elsewhere",
        ),
        (
            "inotify",
            r"Can't dump that handle",  # criu#136, podman#11001
            "{who} watches a file (inotify) whose path CRIU cannot find, as on overlay",
            (
                f"write `irmap-scan-path DIRECTORY` into {_CONF} with the one that `ocihook doctor` names, or turn "
                "watching off in the application"
            ),
        ),
        (
            "network-file",
            r"Can't open ghost original file|Can't seek file data",
            "{who} has a deleted file of a network file system open, which CRIU cannot copy",
            _CLOSE,
        ),
        (
            "file-locks",
            r"Some file locks are hold by dumping tasks",
            "a process holds a file lock",
            f"write `file-locks` into {_CONF}, here and where it is restored",
        ),
    ),
    *_causes(
        "Sockets",
        (
            "kernel-6.16",
            r"sockets: Can't get 1:(?:16|34) opt: Operation not supported",  # criu#2705
            "CRIU before 4.2 cannot dump any Internet socket on Linux 6.16 and later",
            "install CRIU 4.2 or later on this node",
        ),
        (
            "tcp-established",
            r"Connected TCP socket, consider using",
            "{who} has an established TCP connection",
            f"write `tcp-close` (connections are closed) or `tcp-established` (the address must stay) into {_CONF}"
            + _PODMAN_DUMP,
        ),
        (
            "tcp-in-image",
            r"Connected TCP socket in image",
            "the checkpoint has established TCP connections, and nothing says what is to become of them",
            f"write the option that it was made with, `tcp-close` or `tcp-established`, into this node's {_CONF}"
            + _PODMAN_RESTORE,
        ),
        (
            "tcp-in-flight",
            r"In-flight connection",
            "a connection to {who} is made but not accepted yet",
            f"try again, or write `skip-in-flight` into {_CONF}",
        ),
        (
            "mptcp",
            r"Unsupported proto 262 for socket",
            "{who} uses multipath TCP, which CRIU cannot dump",
            "turn it off: GODEBUG=multipathtcp=0 for Go programs, or sysctl net.mptcp.enabled=0",
        ),
        (
            "socket-kind",
            r"Unsupported proto (?P<kind>\d+) for socket|Unknown socket collected \((?P<family>family \d+)\)",
            "{who} has a socket of a kind (protocol {kind}{family}) that CRIU cannot dump",
            "have the application close it",
        ),
        (
            "unix-external",
            r"External socket is used\. Consider using --ext-unix-sk",
            "a process is connected by a Unix socket to one outside the container",
            "have it close the connection before the dump; CRIU can keep datagram sockets alone (ext-unix-sk)",
        ),
        (
            "unix-half",
            r"Can't dump half of stream unix connection.*peer name: (?P<path>.*)$",
            "a process is connected by a Unix socket ({path}) to one outside the container, which cannot be dumped",
            "have it close the connection before the dump",
        ),
        (
            "unix-in-flight",
            r"unix: (?:Found a closed|Non-empty write queue on an) in-flight socket",
            "a Unix connection was used or closed by its client before {who} has accepted it",
            "try again; if it stays so, have the application accept connections or close its listening socket",
        ),
        (
            "udp-corked",
            r"Can't dump corked dgram socket",
            "{who} has a UDP socket that holds back what it sends (UDP_CORK)",
            "have the application take UDP_CORK off before the dump",
        ),
        (
            "netlink-unread",
            r"The socket has data to read",
            "{who} has a netlink socket with unread messages, which CRIU cannot dump",
            "try again; have the application read them, or close the socket",
        ),
        (
            "netlink-groups",
            r"netlink socket 0x\w+ (?:has more than 32 groups|is bound to groups but not to portid)",
            "{who} has a netlink socket of a group above 32, or without an own port, which CRIU cannot dump",
            _CLOSE,
        ),
        (
            "unix-credentials",
            r"Control messages in queue, not supported",
            "{who} has unread messages with credentials (SO_PASSCRED) in a Unix socket, which CRIU cannot dump",
            "try again; have the application read them first",
        ),
        (
            "unix-large",
            r"sys_recvmsg failed: truncated",
            "{who} has an unread message in a Unix socket that is larger than that socket's own send buffer",
            "try again; have the application read it first, or raise SO_SNDBUF of the reading socket",
        ),
        (
            "unix-peer",
            r"unix: (?:Dangling connection|Unix socket \d+ with(?: unreachable|out) peer|Can't dump name-less ext)",
            "{who} has a Unix socket whose other end is outside the container, or is gone",
            _CLOSE,
        ),
        (
            "no-diag-module",
            r"Sockets \(family (?P<family>\d+) proto (?P<kind>\d+)\) are not collected",
            "the kernel lists no sockets of family {family}, protocol {kind}: a module for it is not loaded",
            "modprobe -a tcp_diag udp_diag raw_diag unix_diag netlink_diag af_packet_diag",
        ),
        (
            "link-local",
            r"couldn't find ifname for",
            "{who} has a socket bound to a link-local address (fe80::) of an interface that is gone",
            "have the application bind it again",
        ),
        (
            "tcp-in-flight",
            r"Unknown inet socket \w+ state",
            "{who} has a TCP connection that is still being made",
            "try again",
        ),
        (
            "no-network-lock",
            r'execvp\("(?P<program>ip6?tables-restore|nft)".*No such file',  # criu#2339
            "CRIU holds a container's network still with {program}, which this node does not have",
            "install iptables, or write `network-lock nftables` into /etc/criu/default.conf",
        ),
    ),
    *_causes(
        "Processes",
        (
            "nested-namespace",
            r"Can't dump nested time namespace for (?P<pid>\d+)",
            "process {pid} and its children are in different time namespaces, which CRIU cannot dump",
            "start them without `unshare --time`",
        ),
        (
            "nested-namespace",
            r"Can't dump nested (?P<kind>\w+) namespace for (?P<pid>\d+)",
            "process {pid} is in a nested {kind} namespace, as a sandbox or a container in the container makes",
            "turn the sandbox off, or do not run containers inside",
        ),
        (
            "traced",
            r"(?:Unseizable non-zombie|Unable to interrupt task:) (?P<pid>\d+) (?:found, .*, err -1/1\d*$|\(Oper)",
            "process {pid} is being traced: by a debugger, by strace, or by a process of its own container",
            "end the tracer (`grep TracerPid /proc/{pid}/status`), or have the application trace none of its own",
        ),
        (
            "shared-parts",
            r"Can't make VM id for (?P<pid>\d+)",
            "process {pid} shares its memory with another process (CLONE_VM), as a child between vfork and exec",
            SHARED_MEMORY_REMEDY,
        ),
        (
            "shared-parts",
            r"Can't make (?P<kind>FS|IO|FILES) id for (?P<pid>\d+)",
            "process {pid} shares its {kind} (clone flag CLONE_{kind}) with another process, which CRIU cannot dump",
            "have the application use threads, or processes that share nothing",
        ),
        (
            "waits-in-kernel",
            r"Unseizable non-zombie (?P<pid>\d+) found, state D",
            "process {pid} waits in the kernel and could not be stopped: for a disk, or for its child of vfork to exec",
            "try again; see what it waits for with `cat /proc/{pid}/wchan`",
        ),
        (
            "first-thread-ended",
            r"Zombies with threads are not supported",
            "the first thread of a process has ended while others run (pthread_exit in main), which CRIU cannot dump",
            "have the program's first thread wait for the others (pthread_join)",
        ),
        (
            "stopped",
            r"SEIZE (?P<pid>\d+) .*: success$",  # and nothing after it
            "process {pid} is stopped (SIGSTOP), and CRIU waited for it in its frozen cgroup of version 1 without end",
            "kill -CONT {pid}, or boot the node with cgroups of version 2",
        ),
        (
            "stopped",
            r"SEIZE (?P<pid>\d+): unsupported stop signal (?P<number>\d+)",
            "process {pid} was stopped by its terminal (signal {number}), which CRIU cannot dump",
            "kill -CONT {pid}, or start it with its input from /dev/null",
        ),
        (
            "stopped",
            r"Individually stopped threads not supported",
            "a single thread of a process is stopped, which CRIU cannot dump",
            "send the process SIGCONT",
        ),
        (
            "no-first-process",
            r"A root task is dead",
            "the container's first process has ended",
            "start the container again",
        ),
        (
            "many-groups",
            r"bfd: The bfd buffer is too small",
            "a process is in more groups than CRIU can read (about 900)",
            "start it with fewer supplementary groups",
        ),
        (
            "no-sys-resource",
            r"Can't get rlimit \d+: Operation not permitted",
            "{who} is another user's, and CRIU may not read its limits without CAP_SYS_RESOURCE",
            "run the engine with CAP_SYS_RESOURCE, or the container's processes as root",
        ),
        (
            "address-space",
            r"remote mmap\(\) failed: Cannot allocate memory",
            "a process may have no more address space (RLIMIT_AS), or no more mappings (vm.max_map_count)",
            "raise the limit: `prlimit --pid PID --as=unlimited`, or `sysctl vm.max_map_count`",
        ),
        (
            "sealed-memory",
            r"parasite\.c:\d+\): mprotect\(",
            "{who} has sealed memory (mseal) without the right to read it, which CRIU cannot read",
            "have the application seal only what can be read",
        ),
        (
            "timer-thread",
            r"Unable to convert the notify thread id (?P<pid>\d+)",
            "a timer (timer_create) is to signal the thread {pid}, which has ended",
            "have the application delete the timer (timer_delete)",
        ),
        (
            "compat",
            r"Can't dump task (?P<pid>\d+) (?:with LDT descriptors|running in 32-bit mode)",
            "process {pid} is a 32-bit one, or runs in a segment of its own, which this CRIU cannot dump",
            "run a 64-bit build of it, or install a CRIU that is built with CONFIG_COMPAT",
        ),
        (
            "rseq",
            r"has rseq but kernel lacks get_rseq_conf",
            "this kernel does not show restartable sequences, which the C library uses",
            "run Linux 5.13 or later, or start the program with GLIBC_TUNABLES=glibc.pthread.rseq=0",
        ),
        (
            "session-leader",
            r"A session leader of zombie process (?P<pid>\d+)",
            "process {pid} has ended, its parent has not waited for it, and its session is outside the PID namespace",
            "have its parent wait for it (run an init in the container: podman run --init)",
        ),
        (
            _KILLED_NAME,
            r"si_code=[23] si_pid=(?P<pid>\d+) si_status=(?P<number>\d+)",  # CLD_KILLED, CLD_DUMPED: sigaction(2)
            _KILLED_WHAT + " (signal {number})",
            _KILLED_REMEDY,
        ),
        (
            "pending-sigtrap",
            r"Can't dump the (?P<pid>\d+) thread with a pending SIGTRAP",  # criu#1429
            "thread {pid} blocks SIGTRAP while one waits for it, with which CRIU cannot dump it",
            "have the application take the signal, or send it none while it is blocked",
        ),
        (
            "nested-network",
            r"Unable to dump more than one netns if the --emptyns is set",
            "a process is in a network namespace of its own, which runc cannot have CRIU dump",
            "use crun, or have the application make no network namespace",
        ),
        (
            "lost-namespace",
            r"No NS ID with kid|Unable to dump a socket from an external network namespace",
            "{who} has a namespace open, or a socket of one, in which no process of the container is",
            _CLOSE,
        ),
        (
            "nested-namespace",
            r"namespaces doesn't belong to the target user namespace",
            "a namespace of the container was made outside its user namespace",
            "give the container namespaces of its own (no --network container:, --ipc=host with --userns)",
        ),
        (
            "session-leader",
            r"is not a session leader",
            "the root process belongs to a session outside",
            "start it with `setsid`, or dump it with --shell-job",
        ),
        (
            "session-leader",
            r"A session leader of (?P<pid>\d+)\(\d+\) is outside of its pid namespace",
            "{who} belongs to a session outside its PID namespace",
            "start it with `setsid`",
        ),
        (
            "terminal",
            r"tty: Found (?:slave peer index|dangling tty)",
            "a process has a terminal whose other end is outside the container",
            "start the container without a terminal, and `exec` no shell in it while it is dumped",
        ),
        (
            "sysv-ipc",
            r"with SysVIPC shmem map .* doesn't live in IPC ns",
            "{who} has System V shared memory of the node's",
            "run the container in an IPC namespace of its own (without --ipc=host, hostIPC)",
        ),
        (
            "terminal",
            r"No CTL for TTY dump|ctty inheritance detected",
            "a process has /dev/tty or a terminal open that only another one has as its own",
            _CLOSE,
        ),
        (
            "message-queue",
            r"mqueue isn't empty",
            "the container has POSIX message queues (/dev/mqueue), which CRIU cannot dump",
            "remove them (mq_unlink): `ls /dev/mqueue` in the container",
        ),
        (
            "freeze-timeout",
            r"Timeout reached\. Try to interrupt|PAUSE_DEVICES failed|Unable to read output of cuda-checkpoint",
            "CRIU waited for the processes to stop, and they did not",  # criu#2775
            "install CRIU 4.2 or later, take cuda_plugin.so out of its way (`ocihook doctor`), or raise `timeout`",
        ),
    ),
    *_causes(
        "Mounts",
        (
            "nvidia-mount",
            # runc#4522, criu#2397
            r"(?P<path>/\S*nvidia\S*) .*(?:unreachable sharing|proper root mount)|No mapping for (?P<any>\S*nvidia\S*)",
            "NVIDIA's hook mounted {path}{any} behind the runtime's back",
            'give GPUs by CDI: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`, mode = "cdi"',
        ),
        (
            "mount",
            r" (?:\d+:)?\.?(?P<path>/\S*) .*(?:unreachable sharing|proper root mount)|No mapping for (?P<other>\S+)",
            "{path}{other} was mounted into the container after it was made, or by a hook",
            "unmount it there, or mount it through the engine",
        ),
        (
            "mount-kind",
            (
                r"FS mnt \.?(?P<path>/\S*) dev .* unsupported|failed to dump fs \.?(?P<other>/\S*) \(.*\): always fail|"
                r" \.?(?P<fuse>/\S*) is a fuse mount but not external"
            ),
            "{path}{other}{fuse} was mounted inside the container, and CRIU cannot make such a file system again",
            "unmount it in the container, or mount it outside and give it to the container as a volume",
        ),
        (
            "mount",
            r"Mount (?P<path>\d+) has two children with same",
            "mounts of the container lie one over the other at the same place (mount {path})",
            "unmount one of them in the container",
        ),
        (
            "tmpfs-content",
            r"Can't (?P<verb>dump|restore) tmpfs content",
            "the content of a tmpfs could not be packed or unpacked",
            "install tar and gzip on this node; if they are there, see what they say before this line in the log",
        ),
        (
            "lost-mount",
            r"Can't lookup mount=\d+ for fd=-?\d+ path=(?P<path>.+)$",
            "{who} uses {path}, which is on no mount that it can see: a POSIX message queue, an unmounted file system",
            "have the application close it, end what runs from it, or mount it where the container sees it",
        ),
        (
            "copy-sharing",
            r"Failed to copy sharing",  # ai-dynamo/snapshot#144
            "this kernel's way of making mounts (mount-v2) does not take those of the container",
            "install CRIU 4.2 or later where it is dumped and where it is restored",
        ),
    ),
    *_causes(
        "What the node lacks",
        (
            "no-space",
            r"No space left on device",
            "no space was left where CRIU writes",
            "free space there; `ocihook doctor` shows which places the engines use",
        ),
        (
            "no-memory",
            r"Cannot allocate memory",
            "the node, or the container's memory limit, had no memory left",
            "free memory, or raise the container's limit",
        ),
        (
            "earlier-dump",
            r"Missing \w+ in parent pagemap|Can't open parent path",
            "the earlier dump that CRIU compares memory with is gone, or does not have all that is unchanged since",
            'checkpoint again; `host_memory = "criu"` has CRIU write all memory by itself',
        ),
        (
            "memory-tracking",
            r"Tracking memory is not available",
            "CRIU's configuration has it track memory (track-mem), and this kernel does not mark what is written",
            "take it out: `ocihook install --refresh` does so with what it has written itself",
        ),
        (
            "plugin-version",
            r"undefined symbol: check_and_remove_inventory_plugin",  # criu#2521
            "CRIU's cuda_plugin.so is newer than CRIU",
            "install both in the same version",
        ),
        (
            "uprobes",
            r"has uprobes vma",
            "a process was traced with uprobes (bpftrace, perf, a profiler), which leaves a mapping in it",
            f"write `allow-uprobes` into {_CONF}, here and where it is restored, or start the program again",
        ),
        (
            "device-mapping",
            r"Unsupported mapping found",
            "{who} has a mapping of a device, or was traced with uprobes, and this CRIU knows neither",
            "install CRIU 4.2 or later for uprobes; have the application unmap the device",
        ),
        (
            "guard-pages",
            r"Can't splice (?:pages to pipe \(-14|all pages to pipe)",  # criu#2652
            "{who} has guard pages (MADV_GUARD_INSTALL, as stacks of glibc 2.42), which CRIU cannot read here",
            "install CRIU 4.2 or later, and run Linux before 6.13, or 6.16 and later",
        ),
        (
            "net-link",
            r"Unsupported link \d+ \(type \d+ kind (?P<kind>\S*)\)",
            "the container has a network link of the kind {kind}, which CRIU cannot dump",
            "give the container a network namespace that its engine makes",
        ),
        (
            "device-mapping",
            r"handle_device_vma plugin failed|Can't handle non-regular mapping",  # criu#2515
            "{who} has a device mapped, and no plugin of CRIU knows it",
            "for a GPU: driver 570 or later, and ocihook's preflight must see the process (`ocihook doctor`)",
        ),
        (
            "lsm",
            r"Unable to connect a transport socket: Permission denied",  # cuda-checkpoint#19
            "AppArmor or SELinux keeps CRIU from talking to the code it put into a process",
            "see `ausearch -m avc -c criu` or `dmesg | grep DENIED` and allow it in the container's profile",
        ),
    ),
    *_causes(
        "Restore",
        (
            "pid-taken",
            r"Can't fork for (?P<pid>\d+): File exists",  # nvcf#925
            "pid {pid}, which the checkpoint needs, is taken",
            "remove the container that it was made from, and restore into a PID namespace of its own",
        ),
        (
            "proc-file",
            r"Can't open file (?P<path>proc/\d+/\S*) on restore",
            "/{path} was open, of a thread, descriptor or process that a restore does not have when it opens files",
            _NOT_RESTORED,
        ),
        (
            "no-program-file",
            r"No entry for reg-file-ID",
            "a process runs a program that is in no file system (memfd)",
            _NOT_RESTORED,
        ),
        (
            "program-mode",
            r"PR_SET_MM_MAP\) failed with -13",
            "the program of a process may not be executed: it has no execute bit",
            "chmod +x the program in the container's root file system, and restore again",
        ),
        (
            "noexec",
            r"Can't restore 0x\w+ mapping with 0xf{16}",
            "a program or library lies on a mount that allows no execution (noexec)",
            "mount it without noexec, and restore again; what the container mounts itself, before the dump",
        ),
        (
            "no-huge-pages",
            r"Can't restore 0x\w+ mapping with 0xf{15}4",
            "memory could not be mapped: huge pages are missing, or memory is",
            "provide as many huge pages of that size (vm.nr_hugepages) as where the checkpoint was made",
        ),
        (
            "no-vdso",
            r"Can't find vDSO area in image",
            "a process has unmapped its vDSO, without which CRIU restores none",
            _NOT_RESTORED,
        ),
        (
            "deleted-directory",
            r"Couldn't unlink remap (?:/tmp/\.criu\.mntns\.\w+/mnt-\d+)?(?P<path>.+): Directory not empty",
            "{path} is a deleted directory in use; its name is another's now, or a deleted file of it is in use, too",
            (
                "remove what has that name now (in the volume, or the archive's rootfs-diff.tar), and restore again; "
                "if nothing is, have the application leave it before it is dumped"
            ),
        ),
        (
            "scheduling",
            r"Inconsistent sched params received \((?P<policy>\d+)\.",
            "a thread has the scheduling policy {policy} (6: SCHED_DEADLINE, 7: SCHED_EXT), which CRIU cannot restore",
            "chrt --other --all-tasks --pid 0 PID for the process before it is dumped; it sets its policy again",
        ),
        (
            "session-order",
            r"Can't find a session leader for (?P<pid>\d+)|Can't figure out which sid|Requested sid \d+ doesn't match",
            "a process belongs to a session whose leader has ended, and has another parent than the first process",
            "have the application call setsid in it, or do without PR_SET_CHILD_SUBREAPER",
        ),
        (
            "capabilities",
            r"Unable to (?:restore capabilities|raise ambient capability)",
            (
                "a process has capabilities that it could not get again: inheritable ones outside its bounding set, or "
                "ambient ones with SECBIT_NO_CAP_AMBIENT_RAISE"
            ),
            "have the application drop them before the dump",
        ),
        (
            "pending-signals",
            r"Unable to send siginfo",
            "more signals are pending for a process than its limit (RLIMIT_SIGPENDING) allows",
            "raise the limit before the dump: `prlimit --pid PID --sigpending=N`",
        ),
        (
            "file-owner",
            r"Can't setup \d+ file owner pid: No such process",
            "a descriptor is to signal (F_SETOWN) a process that is not in the container, as one of `exec`",
            "end that process, or have the application take it back, before the dump",
        ),
        (
            "long-message",
            r"Unsupported message size: (?P<size>\d+)",
            "a System V message queue has a message of {size} bytes; CRIU restores none above 8192",
            "have the application read it before the dump, or send shorter ones",
        ),
        (
            "full-queue",
            r"Failed to send IPC message: Resource temporarily unavailable",
            "a System V message queue has more bytes than a queue that is made now may have (kernel.msgmnb)",
            "raise kernel.msgmnb in the container's IPC namespace (sysctl), or read messages, before the dump",
        ),
        (
            "ipc-taken",
            r"Failed to (?:create|restore) (?P<kind>shm|sem|msg)",
            "the IPC namespace already has a System V object ({kind}) with the key or id of one of the container's",
            "restore it into an IPC namespace of its own, or remove what is there (`ipcs`, `ipcrm`)",
        ),
        (
            "overlay-mount",
            r"Unable to mount overlay ",
            "the container has mounted an overlay of its own directories, which CRIU mounts before they are there",
            _NOT_RESTORED,
        ),
        (
            "socket-place",
            r"Can't bind id \w+ ino \d+ addr (?P<path>.+): Read-only file system",
            "the Unix socket {path} lies on a mount that is read-only now",
            "mount it writable while the container is dumped and restored",
        ),
        (
            "udp-broadcast",
            r"Can't connect inet socket back: Permission denied",
            "a UDP socket is connected to a broadcast address, which CRIU does before it allows that",
            "have the application use sendto for broadcasts",
        ),
        (
            "no-route",
            r"Can't connect inet socket back: Network is unreachable",
            "there is no route to where a UDP socket was connected",
            "give the container the same routes, or have the application connect again",
        ),
        (
            "link-local",
            r"Can't connect inet socket back: Invalid argument",
            "a UDP socket is connected to a link-local address (fe80::) without its interface",
            "have the application bind it to the device (SO_BINDTODEVICE), or use another address",
        ),
        (
            "read-only-mount",
            r"The mount \d+ has readonly sb|overmounted so paths are invisible",
            "a deleted file in use lies on a file system that is read-only now, or on a mount that is hidden",
            "mount it writable, or unmount what hides it, before the dump",
        ),
        (
            "link-gone",
            r"Can't link \S+ -> (?P<path>.+): No such file",
            (
                "the link that CRIU made for {path} (link-remap) is not here: it stays in the other node's volume, and "
                "is removed where the container was left running"
            ),
            "checkpoint without --leave-running, or without `link-remap`; restore where the volume has the link",
        ),
        (
            "tcp-in-image",
            r"Need to set the --tcp-close options",
            "the checkpoint was made with `tcp-close`, and the restore does not have that option",
            f"write `tcp-close` into this node's {_CONF}",
        ),
        (
            "uprobes",
            r"Dumped with --allow-uprobes",
            "the checkpoint was made with `allow-uprobes`, and the restore does not have that option",
            f"write `allow-uprobes` into this node's {_CONF}",
        ),
        (
            "plugin-missing",
            r"Missing required plugin: (?P<name>\S+)",
            "the checkpoint was made with CRIU's plugin {name}, which this node does not have",
            "install it (its directory is that of `libdir` in CRIU's configuration)",
        ),
        (
            "aio-ring",
            r"wrong aio|Ring remap failed",
            "a process has asynchronous I/O (io_setup) that this machine makes in another size: it has more processors",
            "restore on a machine with as many possible processors, or raise fs.aio-max-nr",
        ),
        (
            "memfd",
            r"Can't create memfd|Can't set permissions .* of memfd",
            "a memory file (memfd) cannot be made here: its mode is not allowed, or huge pages are missing",
            "set sysctl vm.memfd_noexec=0, or provide huge pages",
        ),
        (
            "kernel-memory",
            r"madvise\(.*failed with -22",
            "this kernel lacks a property of memory that the checkpoint has (huge pages, KSM, guard pages)",
            "restore on a kernel like the one where the checkpoint was made",
        ),
        (
            "lock-taken",
            r"Can not set (?P<kind>flock|posix lock|ofd lock)|Can't set lease",
            "a file lock or lease of the container is another's now",
            "end what holds it (`lslocks`), or restore into a volume of its own",
        ),
        (
            "limits",
            r"Too big FD number to restore (?P<number>\d+)",
            "the checkpoint has the descriptor {number}, above this node's fs.nr_open",
            "raise sysctl fs.nr_open",
        ),
        (
            "limits",
            r"Unable to create a thread: (?P<number>-\d+)",
            "a thread cannot be made ({number}; -17: its number is taken, -11: pids.max or RLIMIT_NPROC)",
            "restore into a PID namespace of its own, and raise the limit of processes",
        ),
        (
            "limits",
            r"Can't restore pipe size",
            "a pipe is larger than this user may have (fs.pipe-max-size)",
            "raise sysctl fs.pipe-max-size",
        ),
        (
            "clock",
            r"Unable to set a (?P<kind>\w+) clock offset",
            "this kernel does not take the {kind} clock of the checkpoint",
            "restore on a node that has been up for a while, with a kernel that has time namespaces",
        ),
        (
            "lsm",
            r"mismatched lsm types|can't write lsm profile",
            "this node has another security module than the one of the checkpoint, or lacks the profile",
            "load the profile (`apparmor_parser`), or restore on a node with the same security module",
        ),
        (
            "seccomp",
            r"SECCOMP_SET_MODE_FILTER returned|failed to suspend seccomp",
            "a seccomp filter cannot be restored: CRIU itself runs under one",
            "run the engine without a seccomp filter",
        ),
        (
            "cpu",
            r"Can't restore high memory region",
            "the checkpoint has memory above what this CPU can address (five-level paging)",
            "restore on the same kind of CPU",
        ),
        (
            "immutable-file",
            r"Can't open file (?P<path>.+) on restore: Operation not permitted",
            "/{path}, which was open for writing, is immutable or append-only now",
            "chattr -i -a the file in the container's root file system or volume, and restore again",
        ),
        (
            "file-missing",
            r"Can't open file (?P<path>.+) on restore: (?P<why>.+)$",
            "/{path}, which was open when the checkpoint was made, cannot be opened ({why})",
            "give the container the same image and the same volumes with their files",
        ),
        (
            "file-size",
            r"File (?P<path>.+) has bad size (?P<now>\d+) \(expect (?P<then>\d+)\)",
            "/{path} has {now} bytes, when the checkpoint was made it had {then}",
            "restore the file as it was then, or checkpoint what the volume holds together with the container",
        ),
        (
            "file-mode",
            r"File (?P<path>.+) has bad mode (?P<now>0\d+) \(expect (?P<then>0\d+)\)",
            "/{path} has mode {now}, when the checkpoint was made it had {then}",
            "chmod it back, or write `skip-file-rwx-check` into " + _CONF,
        ),
        (
            "file-build",
            r"File (?P<path>.+) has bad build-ID",
            "/{path} is another build than the one that was running",
            "use the very image that the container was made from",
        ),
        (
            "cpu",
            r"CPU capabilities do not match run time|cpu: .*(?:not supported|don't match)",  # podman#17496
            "this CPU lacks what the one had on which the checkpoint was made",
            "restore on the same kind of CPU, or write `cpu-cap=none` into " + _CONF,
        ),
        (
            "address-gone",
            r"(?:bind inet socket|connect inet socket back).*Cannot assign requested address",  # criu#167
            "an address that the container used is not there",
            (
                "give it the same address, or listen on 0.0.0.0 and dump it with `tcp-close`; for one that never was "
                "(IP_FREEBIND, IP_TRANSPARENT) set sysctl net.ipv4.ip_nonlocal_bind=1 in its network namespace"
            ),
        ),
        (
            "address-taken",
            r"bind inet socket.*Address already in use",
            "a port that the container listened on is taken",
            "end what has it (`ss -tanp`), wait a minute if that is a connection in TIME-WAIT, or use another network",
        ),
        (
            "image-missing",
            r"Unexpected EOF on \(empty-image\)",
            "an image of the checkpoint is missing",
            "use another copy; `ocihook archive verify` shows which are whole",
        ),
        (
            "image-damaged",
            r"Read \d+ bytes while \d+ expected from|Failed unpacking object|Can't read pages data",
            "an image of the checkpoint is cut short or damaged",
            "use another copy; `ocihook archive verify` shows which are whole",
        ),
        (
            "newer-images",
            r"vdso: ELF header magic mismatch",
            "the memory is not where this CRIU looks for it: pagemaps of CRIU 4.2 and later mislead older ones",
            "install the CRIU here that the checkpoint was made with, or a later one",
        ),
    ),
)
_HIDDEN, _TRACED, _WAITS, _STOPPED = (
    next(cause for cause in _CAUSES if cause.name == name)
    for name in ("hidden-file", "traced", "waits-in-kernel", "stopped")
)
