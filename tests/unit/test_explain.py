"""Each way to fail is recognized in the log of a real failure, by its cause and not by CRIU's last line."""

from pathlib import Path
from string import Formatter

import pytest

from ocihook.criu.causes import Cause, catalogue
from ocihook.criu.explain import Explanation, explain

# Real logs, cut short. integration/criu and integration/podman make most of them again, with OCIHOOK_RECORD_LOGS=1; by
# hand, the same way, were made: those of 4.2.1, dump-unix-half, dump-no-network-lock, dump-script-missing,
# restore-address-gone, restore-address-taken, restore-newer-images and restore-tcp-in-image.
LOGS = Path(__file__).parents[1] / "data/criu-logs"
CAUSES = {
    "dump-container-killed": "container-killed",
    "dump-device_fuse": "device",
    "dump-device_tun": "tun",
    "dump-flock": "file-locks",
    "dump-ghost_large": "ghost-file",
    "dump-ghost_mapped": "ghost-file",
    "dump-hidden_file": "hidden-file",
    "dump-hidden_file-link-remap": "hidden-file",
    "dump-hidden_mount": "hidden-file",
    "dump-hidden_name": "hidden-file",
    "dump-icmp": "kernel-6.16",
    "dump-inotify_overlay": "inotify",
    "dump-io_uring": "io-uring",
    "dump-io_uring-4.2.1": "io-uring",
    "dump-lease": "file-locks",
    "dump-link_remap": "link-remap",
    "dump-mount": "mount",
    "dump-mptcp": "mptcp",
    "dump-mptcp-4.2.1": "mptcp",
    "dump-mqueue": "lost-mount",
    "dump-nested_ipc": "nested-namespace",
    "dump-nested_pid": "nested-namespace",
    "dump-nested_time": "nested-namespace",
    "dump-nested_user": "nested-namespace",
    "dump-nested_uts": "nested-namespace",
    "dump-no-network-lock": "no-network-lock",
    "dump-no-space": "no-space",
    "dump-packet": "kernel-6.16",
    "dump-perf_event": "anonymous-file",
    "dump-posix_lock": "file-locks",
    "dump-script-missing": "script-missing",
    "dump-semaphore": "link-remap",
    "dump-session_outside": "session-leader",
    "dump-session_unseen": "session-leader",
    "dump-shm_sysv": "sysv-ipc",
    "dump-sigtrap": "pending-sigtrap",
    "dump-tcp_established": "tcp-established",
    "dump-tcp_established-4.2.1": "tcp-established",
    "dump-tcp_in_flight": "tcp-in-flight",
    "dump-tcp_listen": "kernel-6.16",
    "dump-terminal": "terminal",
    "dump-traced": "traced",
    "dump-traced-frozen": "traced",
    "dump-traced_inside": "traced",
    "dump-traced_inside-frozen": "traced",
    "dump-udp_corked": "udp-corked",
    "dump-unix-half": "unix-half",
    "dump-unix_closed_in_flight": "unix-in-flight",
    "dump-unix_external": "unix-external",
    "dump-unix_sent_in_flight": "unix-in-flight",
    "dump-userfaultfd": "anonymous-file",
    "dump-vsock": "socket-kind",
    "restore-address-gone": "address-gone",
    "restore-address-taken": "address-taken",
    "restore-cpu": "cpu",
    "restore-file-missing": "file-missing",
    "restore-file-mode": "file-mode",
    "restore-file-size": "file-size",
    "restore-good": "",
    "restore-image-damaged": "image-damaged",
    "restore-image-missing": "image-missing",
    "restore-newer-images": "newer-images",
    "restore-pid-taken": "pid-taken",
    "restore-tcp-in-image": "tcp-in-image",
    "state-ambient_without_raise-4.2": "capabilities",
    "state-bound_freely-4.2": "address-gone",
    "state-bpf_hash-4.2": "bpf-map",
    "state-closed_queue-4.2": "message-queue",
    "state-deadline-4.2": "scheduling",
    "state-deep_directory-4.2": "long-path",
    "state-deleted_directory_filled_anew-4.2": "deleted-directory",
    "state-epoll_of_a_childs-4.2": "epoll",
    "state-first_thread_ended-4.2": "first-thread-ended",
    "state-full_queue-4.2": "full-queue",
    "state-guard_pages-4.1.1": "guard-pages",
    "state-immutable_file-4.2": "immutable-file",
    "state-limit_of_memory-4.2": "address-space",
    "state-long_message-4.2": "long-message",
    "state-many_groups-4.2": "many-groups",
    "state-many_pipes-4.2": "many-pipes",
    "state-many_signals-4.2": "pending-signals",
    "state-mounted_fuse-4.2": "mount-kind",
    "state-mounted_overlay-4.2": "overlay-mount",
    "state-mounted_ramfs-4.2": "mount-kind",
    "state-namespace_without_process-4.2": "lost-namespace",
    "state-nested_net-4.2": "nested-network",
    "state-owner_outside-4.2": "file-owner",
    "state-packet_pipe-4.2": "packet-pipe",
    "state-path_of_a_socket-4.2": "socket-path",
    "state-pidfd_of_a_thread-4.2": "pidfd",
    "state-pidfd_of_exec-4.2": "pidfd",
    "state-proc_of_a_thread-4.2": "proc-file",
    "state-program_of_memfd-4.2": "no-program-file",
    "state-program_on_noexec-4.2": "noexec",
    "state-program_without_execute_bit-4.2": "program-mode",
    "state-sealed_unreadable_memory-4.2": "sealed-memory",
    "state-secret_memory-4.2": "secret-memory",
    "state-sends_to_all-4.2": "udp-broadcast",
    "state-session_below_subreaper-4.2": "session-order",
    "state-shared_directory-4.2": "shared-parts",
    "state-shared_memory_space-4.2": "shared-parts",
    "state-socket_on_read_only_mount-4.2": "socket-place",
    "state-stopped_by_signal-4.1.1": "stopped",
    "state-stopped_by_terminal-4.2": "stopped",
    "state-timer_for_a_dead_thread-4.2": "timer-thread",
    "state-timer_of_alarm-4.2": "timer-clock",
    "state-user_without_rights-4.2": "no-sys-resource",
    "state-waits_for_vfork-4.1.1": "waits-in-kernel",
    "state-watch_of_deleted-4.2": "inotify-deleted",
    "state-watch_of_proc-4.2": "inotify",
    "state-without_vdso-4.2": "no-vdso",
    "veto-pre-dump": "ocihook",
    "veto-pre-restore": "ocihook",
}


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_every_log_has_its_cause() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(CAUSES)


@pytest.mark.parametrize("name", CAUSES)
def test_real_logs(name: str) -> None:
    explanation = explain(read(name))
    assert (explanation.name if explanation else "") == CAUSES[name]
    if explanation is not None:
        assert explanation.remedy or explanation.name == "ocihook"
        assert "{" not in str(explanation)
        assert explanation.line in read(name).replace("\t", " ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dump-ghost_large", "/scratch/ghost is deleted but in use, and with 3145728 bytes larger than"),
        ("dump-mount", "/tmp was mounted into the container after"),
        ("dump-device_fuse", "has a device (chr 10:229) open"),
        ("dump-session_unseen", "30675 belongs to a session outside its PID namespace. Start it with `setsid`"),
        ("dump-nested_user", "is in a nested user namespace, as a sandbox"),
        ("dump-nested_time", "its children are in different time namespaces, which CRIU cannot dump. Start them"),
        ("dump-hidden_file", "has /scratch/hidden/file open, which is not found by that name"),
        ("dump-hidden_name", "has /scratch/hidden/file open, which is not found by that name"),
        ("dump-hidden_mount", "has /scratch/hidden/file open, on a mount that is hidden by another one. Unmount"),
        ("dump-traced", "is being traced: by a debugger"),
        ("dump-traced_inside-frozen", "or by a process of its own container. End the tracer (`grep TracerPid /proc/"),
        ("dump-userfaultfd", "has a file of the kind userfaultfd open"),
        ("dump-no-network-lock", "still with iptables-restore, which this node does not have. Install iptables"),
        ("restore-file-size", "/scratch/data has 1 bytes, when the checkpoint was made it had 1000"),
        ("veto-pre-dump", "pre-dump of container c: the reason. The end"),
    ],
)
def test_what_is_said(name: str, said: str) -> None:
    assert said in str(explain(read(name)))


# Messages as CRIU's source writes them (4.2); integration/criu/test_states.py makes most of these failures.
@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("Unknown shit 100600 (/secretmem (deleted))", "secret-memory"),
        ("Can't dump file 3 of that type [600] (anon anon_inode:bpf-map)", "bpf-map"),
        ("CRIU does not currently support dumping BPF map type 27!", "bpf-map"),
        ("pidfd: pidfd pid 29687 is not a part of process tree..", "pidfd"),
        ("pidfd: PIDFD_THREAD flag is currently not supported", "pidfd"),
        ("Unknown clock type 9 for 0", "timer-clock"),
        ("Dump eventpoll (pid: 23487) failed with -1", "epoll"),
        ("The packetized mode for pipes is not supported yet", "packet-pipe"),
        ("OOM storing pipe", "many-pipes"),
        ("sockets: Can't get 1:39 opt: Bad file descriptor", "socket-path"),
        ("Can't read link of fd 21: File name too long", "long-path"),
        ("fsnotify: Can't find suitable path for handle (dev 0x2e ino 0x2): -2", "inotify-deleted"),
        ("Can't open ghost original file: Stale file handle", "network-file"),
        ("netlink: The socket has data to read", "netlink-unread"),
        ("netlink: The netlink socket 0x1f has more than 32 groups", "netlink-groups"),
        ("sk queue: Control messages in queue, not supported", "unix-credentials"),
        ("sk queue: sys_recvmsg failed: truncated", "unix-large"),
        ("unix: Unix socket 7 without peer 8", "unix-peer"),
        ("Sockets (family 2 proto 17) are not collected", "no-diag-module"),
        ("inet: couldn't find ifname for 3, can't bind", "link-local"),
        ("Can't make VM id for 4048", "shared-parts"),
        ("Can't make FS id for 4165", "shared-parts"),
        ("Zombies with threads are not supported", "first-thread-ended"),
        ("SEIZE 14850: unsupported stop signal 21", "stopped"),
        ("A root task is dead", "no-first-process"),
        ("bfd: The bfd buffer is too small", "many-groups"),
        ("Can't get rlimit 0: Operation not permitted", "no-sys-resource"),
        ("remote mmap() failed: Cannot allocate memory", "address-space"),
        ("Unable to convert the notify thread id 29546", "timer-thread"),
        ("Can't dump task 7 running in 32-bit mode", "compat"),
        ("7 has rseq but kernel lacks get_rseq_conf feature", "rseq"),
        ("A session leader of zombie process 7(7) is outside of its pid namespace", "session-leader"),
        ("net: Unable to dump more than one netns if the --emptyns is set", "nested-network"),
        ("No NS ID with kid 4026532305", "lost-namespace"),
        ("One or more namespaces doesn't belong to the target user namespace", "nested-namespace"),
        ("tty: No CTL for TTY dump, likely SCM case", "terminal"),
        ("mqueue isn't empty", "message-queue"),
        ("mnt: FS mnt ./made/place dev 0x30 root / unsupported id 76", "mount-kind"),
        ("failed to dump fs ./made/place (fuse): always fail", "mount-kind"),
        ("Can't restore tmpfs content", "tmpfs-content"),
        ("PID 7 has uprobes vma. Consider using --allow-uprobes.", "uprobes"),
        ("Unsupported mapping found 00007f00-00007f01", "device-mapping"),
        ("Can't splice pages to pipe (-14/1/0)", "guard-pages"),
        ("Unsupported link 3 (type 1 kind vlan)", "net-link"),
        ("Can't open file proc/6/task/7/status on restore: No such file or directory", "proc-file"),
        ("Can't open file made/file on restore: Operation not permitted", "immutable-file"),
        ("No entry for reg-file-ID 0x9", "no-program-file"),
        ("sys_prctl(PR_SET_MM, PR_SET_MM_MAP) failed with -13", "program-mode"),
        ("Can't restore 0x401000 mapping with 0xffffffffffffffff", "noexec"),
        ("Can't restore 0x401000 mapping with 0xfffffffffffffff4", "no-huge-pages"),
        ("vdso: Can't find vDSO area in image", "no-vdso"),
        ("Couldn't unlink remap /tmp/.criu.mntns.3L4oEW/mnt-0000000120/a/b: Directory not empty", "deleted-directory"),
        ("Inconsistent sched params received (6.0.0)", "scheduling"),
        ("Can't find a session leader for 7", "session-order"),
        ("Requested sid 8 doesn't match inherited 7", "session-order"),
        ("Unable to restore capabilities: -1", "capabilities"),
        ("Unable to raise ambient capability 0: -1", "capabilities"),
        ("Unable to send siginfo 34 0xffffffff with code -11", "pending-signals"),
        ("Can't setup 3 file owner pid: No such process", "file-owner"),
        ("Unsupported message size: 9000 (MAX: 8192)", "long-message"),
        ("Failed to send IPC message: Resource temporarily unavailable", "full-queue"),
        ("Failed to create shm set: File exists", "ipc-taken"),
        ("mnt: Unable to mount overlay /tmp/.criu.mntns.C/mnt-77 (id=77): No such file or directory", "overlay-mount"),
        ("unix: Can't bind id 0x7 ino 842658 addr /run/socket: Read-only file system", "socket-place"),
        ("inet: Can't connect inet socket back: Permission denied", "udp-broadcast"),
        ("inet: Can't connect inet socket back: Network is unreachable", "no-route"),
        ("inet: Can't bind inet socket (id 7): Cannot assign requested address", "address-gone"),
        ("The mount 7 has readonly sb", "read-only-mount"),
        ("Can't link tmp/link_remap.1 -> tmp/file: No such file or directory", "link-gone"),
        ("Need to set the --tcp-close options.", "tcp-in-image"),
        ("Dumped with --allow-uprobes. Need to set it on restore as well.", "uprobes"),
        ("Missing required plugin: cuda_plugin", "plugin-missing"),
        ("wrong aio: tail=0 head=0 req=0 old_nr=1 new_nr=2 expect=3", "aio-ring"),
        ("Can't create memfd:x: Permission denied", "memfd"),
        ("madvise(7f00, 4096, 14) failed with -22", "kernel-memory"),
        ("Can not set posix lock!", "lock-taken"),
        ("Too big FD number to restore 2000000", "limits"),
        ("Unable to create a thread: -11", "limits"),
        ("Can't restore pipe size: Operation not permitted", "limits"),
        ("timens: Unable to set a monotonic clock offset: Numerical result out of range", "clock"),
        ("mismatched lsm types and lsm profile specified", "lsm"),
        ("recv failed (100, want 201): Invalid argument", "urgent-inline"),
        ("apparmor LSM specified but apparmor not supported by kernel", "lsm"),
        ("seccomp: SECCOMP_SET_MODE_FILTER returned -1 on tid 7", "seccomp"),
        ("Can't restore high memory region 1-2 because kernel does only support vmas up to 3", "cpu"),
    ],
)
def test_messages_of_criu(error: str, name: str) -> None:
    explanation = _explained(error)
    assert explanation.name == name
    assert explanation.remedy
    assert "{" not in str(explanation)
    assert "''" not in str(explanation)


def _explained(*errors: str) -> Explanation:
    lines = [f"(00.1) Error (criu/x.c:1): {error}\n" for error in errors]
    explanation = explain(f"(00.0) Version: 4.1.1\n{''.join(lines)}(00.2) Error (criu/cr-dump.c:1): Dumping FAILED.\n")
    assert explanation is not None
    return explanation


def test_a_process_that_waits_in_the_kernel_is_named() -> None:
    waits = "Unseizable non-zombie 5204 found, state D, err -1/4"
    assert _explained("Timeout reached. Try to interrupt: 0", waits).name == "waits-in-kernel"


def test_a_stopped_process_for_which_criu_waited_without_end_is_named() -> None:
    log = "(00.0) Version: 4.1.1\n(00.1) Detected cgroup V1 freezer\n(00.2) SEIZE 8370 (comm states): success\n"
    explanation = explain(log)
    assert explanation is not None
    assert (explanation.name, "process 8370 is stopped" in explanation.what) == ("stopped", True)


# Messages of failures that need a GPU, another security module or another kernel, as the issues quote them.
@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("Can't dump file 7 of that type [20666] (chr 195:255)", "nvidia-device"),
        ("Unknown shit 600 (anon_inode:[io_uring])", "io-uring"),
        ("Timeout reached. Try to interrupt: 0", "freeze-timeout"),
        ("handle_device_vma plugin failed: No such file or directory", "device-mapping"),
        ("undefined symbol: check_and_remove_inventory_plugin", "plugin-version"),
        ("Missing 401000 in parent pagemap", "earlier-dump"),
        ("Can't open parent path: No such file or directory", "earlier-dump"),
        ("Tracking memory is not available. Consider omitting --track-mem option.", "memory-tracking"),
        ("mnt: Mount 970 ./proc/driver/nvidia/gpus/0 (master_id: 13) has unreachable sharing.", "nvidia-mount"),
        ("mnt: 970:./usr/bin/nvidia-smi doesn't have a proper root mount", "nvidia-mount"),
        ("mnt: Mount 9 ./data (master_id: 1) has unreachable sharing.", "mount"),
        ("mnt: No mapping for 651:/srv/x mountpoint", "mount"),
        ("Unable to connect a transport socket: Permission denied", "lsm"),
        ("mnt-v2: Failed to copy sharing from 21 to 22: Invalid argument", "copy-sharing"),
        ("Magic doesn't match for inventory.img", "image-damaged"),
        ("Can't send response: Broken pipe", "runtime-gone"),
        ("Unable to seek freezer FD: No such device", "cgroup-gone"),
        ("cg: Can't move 1 into unified//pod/c/cgroup.procs (-1/-1): No such file or directory", "cgroup-gone"),
        ("cg: bad cgroup path: pids/c/pids.max: No such file or directory", "cgroup-gone"),
        ("mnt-v2: Can't stat mountpoint /tmp/.criu.mntns.Q/mnt-157/word: No such file or directory", "mount-point"),
    ],
)
def test_quoted_messages(error: str, name: str) -> None:
    explanation = explain(
        f"(00.0) Version: 4.1.1\n(00.1) Error (criu/x.c:1): {error}\n(00.2) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert explanation is not None
    assert explanation.name == name


def test_what_is_not_known_is_quoted() -> None:
    log = read("dump-vsock").replace("BUG! Unknown socket collected", "something new of")
    explanation = explain(log)
    assert explanation is not None
    assert explanation.name == "unknown"
    assert str(explanation) == "CRIU says «sockets: something new of (family 40)»"


def test_a_zombie_is_not_traced() -> None:
    """CRIU cannot seize it either, and continues."""
    head, _, tail = read("dump-flock").partition("Dumping task")
    zombie = (
        "(00.1) Warn  (compel/src/lib/infect.c:133): Unable to interrupt task: 7 (Operation not permitted)\n"
        "(00.1) Seized task 7, state 6\n"
    )
    for end in (f"Dumping task{tail}", "Error (criu/cr-dump.c:1791): Timeout reached. Try to interrupt: 0\n"):
        explanation = explain(f"{head}\n{zombie}(00.2) {end}")
        assert explanation is not None
        assert explanation.name == ("file-locks" if end.startswith("Dumping") else "freeze-timeout")


def test_a_name_that_is_gone_is_not_hidden() -> None:
    """Only the very file that has its name still is; which CRIU logs at the level that runtimes use."""
    log = read("dump-hidden_file")
    for other in (
        log.replace("hidden/file]", "hidden/file (deleted)]"),
        "".join(line for line in log.splitlines(keepends=True) if "Dumping path" not in line),
    ):
        explanation = explain(other)
        assert explanation is not None
        assert explanation.name == "link-remap"


def test_killed() -> None:
    log = read("dump-no-space").partition("page-xfer")[0].rpartition("\n")[0] + "\n"
    explanation = explain(log)
    assert explanation is not None
    assert explanation.name == "killed"
    assert explanation.what.startswith("CRIU was killed after it wrote «")
    helper = "(00.05) Error (criu/cgroup.c:1289): cg: cgroupd: recv req error: No such file or directory\n"
    explanation = explain(log + helper)
    assert explanation is not None
    assert explanation.name == "killed"


def test_what_our_hook_said_earlier_is_not_the_cause() -> None:
    """A warning of ours does not stand for what fails after it."""
    head, _, tail = read("dump-flock").partition("Dumping task")
    explanation = explain(f"{head}\nocihook: warning: something harmless\n(00.1) Dumping task{tail}")
    assert explanation is not None
    assert explanation.name == "file-locks"


def test_scripts_of_others() -> None:
    explanation = explain(read("veto-pre-dump").replace("ocihook: ", "other: "))
    assert explanation is not None
    assert (explanation.name, "the action script /scratch/veto refused" in explanation.what) == ("other-script", True)


def test_nothing_to_explain() -> None:
    assert explain("") is None
    assert explain("(00.1) Error (criu/x.c:1): harmless\n(00.2) Dumping finished successfully\n") is None


def test_names_of_files_are_no_commands_for_a_terminal() -> None:
    explanation = explain(read("dump-ghost_large").replace("/scratch/ghost", "/scratch/\x1b[2Jghost"))
    assert explanation is not None
    assert explanation.name == "ghost-file"
    assert "\x1b" not in str(explanation) + explanation.line


@pytest.mark.parametrize("cause", catalogue(), ids=lambda cause: cause.name)
def test_texts_of_the_catalogue_name_what_their_pattern_finds(cause: Cause) -> None:
    found = {*cause.pattern.groupindex, "who", "opened"}
    for text in (cause.what, cause.remedy):
        assert {name for _, name, _, _ in Formatter().parse(text) if name is not None} <= found
