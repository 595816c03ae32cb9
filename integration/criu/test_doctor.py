"""What doctor says of a process, real CRIU then does: it dumps it, or fails for the cause that doctor has named."""

from pathlib import Path

import pytest

from integration.criu.logs import record
from integration.criu.process import hazard
from ocihook.criu import files as criu_files
from ocihook.criu.explain import explain
from ocihook.node.doctor.run import check_process
from ocihook.preflight.finding import Status

# What each hazard is found to be; None: nothing, CRIU dumps it. A kernel may have other causes besides (kernel-6.16).
HAZARDS = {
    "nothing": None,
    "pidfd": None,
    "memfd": None,
    "inotify": None,
    "inotify_deleted": None,
    "ghost_small": None,
    "ghost_sparse": None,
    "unix_pair": None,
    "unix_unread": None,
    "netlink": None,
    "netlink_group": None,
    "device_null": None,
    "device_kmsg": None,
    "device_tty": None,
    "nested_net": None,
    "nested_mount": None,
    "tcp_listen": None,
    "icmp": None,
    "packet": None,
    "io_uring": "io-uring",
    "inotify_overlay": "inotify",
    "userfaultfd": "anonymous-file",
    "perf_event": "anonymous-file",
    "ghost_large": "ghost-file",
    "ghost_mapped": "ghost-file",
    "link_remap": "link-remap",
    "semaphore": "link-remap",
    "unix_external": "unix-external",
    "tcp_established": "tcp-established",
    "tcp_in_flight": "tcp-in-flight",
    "mptcp": "mptcp",
    "vsock": "socket-kind",
    "flock": "file-locks",
    "posix_lock": "file-locks",
    "lease": "file-locks",
    "shm_sysv": "sysv-ipc",
    "mqueue": "lost-mount",
    "device_fuse": "device",
    "device_tun": "tun",
    "terminal": "terminal",
    "nested_pid": "nested-namespace",
    "nested_ipc": "nested-namespace",
    "nested_uts": "nested-namespace",
    "nested_user": "nested-namespace",
    "nested_cgroup": "nested-namespace",
    "nested_time": "nested-namespace",
    "sigtrap": "pending-sigtrap",
    "hidden_file": "hidden-file",
    "hidden_mount": "hidden-file",
    "hidden_name": "hidden-file",
    "unix_closed_in_flight": "unix-in-flight",
    "unix_sent_in_flight": "unix-in-flight",
    "unix_peer": "unix-peer",
    "unix_sender": "unix-external",
    "unix_credentials": "unix-credentials",
    "unix_large": "unix-large",
    "netlink_unread": "netlink-unread",
    "netlink_groups": "netlink-groups",
    "udp_corked": "udp-corked",
    "traced": "traced",
    "traced_inside": "traced",
    "session_outside": "session-leader",
    "session_unseen": "session-leader",
}


def failures(pid: int) -> dict[str, str]:
    """Return the remedy of each thing for which doctor says that a dump fails."""
    return {f.check: f.remedy for f in check_process(pid) if f.status is Status.FAIL}


@pytest.mark.parametrize("name", HAZARDS)
def test_doctor_says_what_criu_does(name: str) -> None:
    with hazard(name) as process:
        found = failures(process.pid)
        succeeded, log = process.dump("--leave-running")
        if not succeeded:
            record(f"dump-{name}", log, process.directory)
    assert set(found) - {"kernel-6.16"} == ({HAZARDS[name]} if HAZARDS[name] else set())
    explanation = explain(log)
    assert succeeded is (not found)
    assert (explanation.name if explanation else None) in (found or {None})
    assert all(found.values())


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("ghost_large", "ghost-limit 4M"),
        ("semaphore", "link-remap"),
        ("inotify_overlay", "irmap-scan-path {directory}/overlay"),
        ("flock", "file-locks"),
        ("lease", "file-locks"),
        ("tcp_established", "tcp-close"),
        ("tcp_in_flight", "skip-in-flight"),
        ("unix_external", "ext-unix-sk"),
        ("terminal", "shell-job"),
        ("session_outside", "shell-job"),
    ],
)
def test_remedy_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, option: str) -> None:
    """Doctor reads the very file that CRIU reads; what an option does not solve, it still reports."""
    monkeypatch.setattr(criu_files, "CRIU_CONF_DIR", tmp_path)
    with hazard(name) as process:
        assert failures(process.pid)
        (tmp_path / "default.conf").write_text(option.format(directory=process.directory) + "\n")
        found = failures(process.pid)
        succeeded, log = process.dump("--leave-running", "--config", str(tmp_path / "default.conf"))
    assert HAZARDS[name] not in found
    assert set(found) <= {"kernel-6.16", "unix-half"}
    explanation = explain(log)
    assert succeeded is (not found)
    assert (explanation.name if explanation else None) in (found or {None})
