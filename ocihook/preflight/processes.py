"""Checks of processes and threads: namespaces, tracers, signals, sessions, terminals."""

import signal
from collections.abc import Iterator

from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation, ProcessSeen, Task

_TRACED_INSIDE_REMEDY = "have the application trace none of its own processes, as sandboxes and crash handlers do"
_ENTERED = ("uts", "ipc", "mnt")
_NOT_NESTED = ("pid", "ipc", "uts", "user", "time", "cgroup")  # CRIU has but one of these for a tree


def _living(seen: Observation) -> Iterator[ProcessSeen]:
    return (process for process in seen.processes if not process.is_zombie)


def _nested_kinds(seen: Observation, process: ProcessSeen) -> list[str]:
    own = seen.init.namespaces
    return [kind for kind in _NOT_NESTED if process.namespaces.get(kind, own.get(kind)) != own.get(kind)]


def _nested_namespace(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        nested = _nested_kinds(seen, process)
        if nested == ["time"]:
            detail = f"{seen.who(process.pid)} is in a time namespace of its own, which CRIU cannot dump"
            yield fail(detail, "start it without `unshare --time`")
        elif nested:
            detail = f"{seen.who(process.pid)} is in a nested {nested[0]} namespace, as a sandbox or a container makes"
            yield fail(detail, "turn the sandbox off; run no containers inside")


def _nested_network(seen: Observation) -> Iterator[Problem]:
    """With runc, CRIU takes one network for all (`empty-ns`); with crun it does not."""
    own = seen.init.namespaces.get("net")
    for process in _living(seen) if seen.container and seen.container.runtime == "runc" else ():
        if process.namespaces.get("net", own) != own:
            detail = f"{seen.who(process.pid)} is in a network namespace of its own, which runc cannot have CRIU dump"
            yield fail(detail, "run the container by crun, or have the application make no network namespace")


def _foreign_namespace(seen: Observation) -> Iterator[Problem]:
    """CRIU must be able to enter them from the container's user namespace (criu/namespaces.c, check_user_ns)."""
    own = seen.init.namespaces.get("user", "")
    for kind in _ENTERED if own and seen.has_own("user") else ():
        if seen.has_own(kind) and seen.made_in.get(kind, own) != own:
            detail = f"the {kind} namespace of {seen.who(seen.init_pid)} was made outside its user namespace"
            yield fail(
                f"{detail}: CRIU cannot dump that",
                "give the container namespaces of its own; have its engine make the user namespace",
            )
            return


def _first_root(seen: Observation) -> Iterator[Problem]:
    """CRIU looks for mounts below the first process's root directory, which must be one (criu/proc_parse.c)."""
    root = seen.init.used.get("root")
    if root and root.name != "/" and all(mount.place != "/" for mount in seen.init.mounts):
        detail = f"{seen.who(seen.init_pid)}, the first process, has a root directory that is no mount (chroot)"
        yield fail(f"{detail}: CRIU cannot dump that", "have a process without chroot start it, or use pivot_root")


def _traced(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        tracers = (int(task.status.get("TracerPid") or 0) for task in process.threads)
        tracer = next(filter(None, tracers), 0)
        if tracer in seen.pids:
            detail = f"{seen.who(process.pid)} is traced by {seen.who(tracer)} of the same container"
            yield fail(detail, _TRACED_INSIDE_REMEDY)
        elif tracer:
            detail = f"{seen.who(process.pid)} is traced by {seen.who(tracer)}"
            yield fail(detail, f"end that tracer, a debugger or strace: kill {tracer}")


def _pending_sigtrap(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        if any(_has_pending(task, signal.SIGTRAP) for task in process.threads):
            detail = f"{seen.who(process.pid)} blocks SIGTRAP while one is pending, and CRIU cannot dump that"
            yield fail(detail, "have the application take the signal, or send it none while it is blocked")


def _has_pending(task: Task, number: signal.Signals) -> bool:
    pending = int(task.status.get("SigPnd", "0"), 16) | int(task.status.get("ShdPnd", "0"), 16)
    return bool(pending & 1 << number - 1)


def _stopped(seen: Observation) -> Iterator[Problem]:
    """CRIU dumps one that is stopped by SIGSTOP or SIGTSTP; the kernel does not show by which signal it is."""
    for process in _living(seen):
        stat = process.stat
        if stat.state == "T" and stat.terminal and stat.group != stat.foreground:
            detail = f"{seen.who(process.pid)} is stopped in the background of a terminal"
            yield warn(
                f"{detail}: if by SIGTTIN or SIGTTOU, CRIU cannot dump it",
                f"kill -CONT {process.pid}, or start it with its input from /dev/null",
            )


def _has_session_outside(process: ProcessSeen) -> bool:
    """Return whether the leader of its session is outside its PID namespace: there that session has no number."""
    return process.status.get("NSsid", "").split()[-1:] == ["0"]


def _session_leader(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        if _has_session_outside(process) and "pid" not in _nested_kinds(seen, process):
            detail = f"{seen.who(process.pid)} belongs to a session outside its PID namespace"
            if process.is_zombie:
                parent = process.stat.parent
                detail = f"{detail}, has exited, and {seen.who(parent)} has not waited for it"
                yield fail(detail, "run an init that waits for its children (podman run --init)")
            else:
                yield fail(detail, "start it with setsid")


def _no_first_process(seen: Observation) -> Iterator[Problem]:
    if seen.init.is_zombie and all(task.stat.state in ("Z", "X") for task in seen.init.threads):
        yield fail(f"{seen.who(seen.init_pid)}, the container's first process, has exited", "start the container again")


def _session_of_a_process(seen: Observation) -> Iterator[Problem]:
    """Of a process that is in no container."""
    init = seen.init
    if seen.container is None and init.stat.session != init.pid and not _has_session_outside(init):
        detail = f"{seen.who(init.pid)} belongs to a session outside"
        yield fail(detail, "start it with setsid, or dump it with --shell-job")


def _pid_taken(seen: Observation) -> Iterator[Problem]:
    if seen.container and not (seen.has_own("pid") and _is_first(seen.init)):
        whose = "another container's (its pod's)" if seen.has_own("pid") else "the node's"
        detail = f"it shares {whose} PID namespace: a restore fails if one of its pids is taken"
        yield warn(detail, "run it in a PID namespace of its own")


def _is_first(process: ProcessSeen) -> bool:
    """Return whether it is the first process of its PID namespace, as far as is known."""
    return process.status.get("NSpid", "1").split()[-1:] == ["1"]


def _terminal(seen: Observation) -> Iterator[Problem]:
    """CRIU does not know a terminal's other end if it is outside; runtimes name that of a container's console."""
    if seen.container:
        return
    slaves = {file.name: file for file in seen.files if file.name.startswith("/dev/pts/")}
    has_master = any(file.name in ("/dev/ptmx", "/dev/pts/ptmx") for file in seen.files)
    for name, file in slaves.items():
        if not has_master and not name.endswith("ptmx"):
            detail = f"{seen.who(file.pid)} uses the terminal {name}, whose other end is outside"
            yield fail(detail, "start it without a terminal, or dump it with --shell-job")


CHECKS = (
    Check(name="nested-namespace", find=_nested_namespace),
    Check(name="nested-network", find=_nested_network),
    Check(name="traced", find=_traced),
    Check(name="pending-sigtrap", find=_pending_sigtrap),
    Check(name="stopped", find=_stopped),
    Check(name="no-first-process", find=_no_first_process),
    Check(name="first-root", find=_first_root),
    Check(name="nested-namespace", find=_foreign_namespace),
    Check(name="session-leader", find=_session_leader),
    Check(name="session-leader", find=_session_of_a_process, unless=("shell-job",)),
    Check(name="pid-taken", find=_pid_taken),
    Check(name="terminal", find=_terminal, unless=("shell-job",)),
)
