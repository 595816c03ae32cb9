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
        if before.not_seized and _FREEZE_FAILED.search(line):
            return _filled(_TRACED, before.not_seized, before)
        if cause := _cause_of(line, before):
            return _filled(cause, line, before)
        if not first_error and _ERROR.search(line) and not _NOISE.search(line):
            first_error = line
    if not first_error:
        remedy = "see the engine's log for a deadline (kubelet's runtimeRequestTimeout) and the kernel's for memory"
        return Explanation("killed", f"CRIU was killed after it wrote «{_text(lines[-1])}»", remedy, lines[-1])
    return Explanation("unknown", f"CRIU says «{_text(first_error)}»", "", first_error)


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
            "{who} watches a file (inotify) that CRIU cannot find the name of, as on overlay and tmpfs",
            f"write `irmap-scan-path DIRECTORY` into {_CONF}, or turn watching off in the application",
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
            "lost-mount",
            r"Can't lookup mount=\d+ for fd=-?\d+ path=(?P<path>.+)$",
            "{who} uses {path}, which is on no mount that it can see",
            "have the application close it",
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
            "give it the same address, or have it listen on 0.0.0.0 and dump it with `tcp-close`",
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
_HIDDEN, _TRACED = (next(cause for cause in _CAUSES if cause.name == name) for name in ("hidden-file", "traced"))
