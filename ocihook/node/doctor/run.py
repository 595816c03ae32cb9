"""Runs the checks of a node or of a workload, and repairs what is safe to repair."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ocihook.container.running import container_of, find_container
from ocihook.criu.version import find_program
from ocihook.errors import plain
from ocihook.linux import soft_dirty
from ocihook.node.doctor import container, handler, kernel_objects, machine, network, node, store
from ocihook.node.doctor.finding import Finding, Repair, Status, without_commands
from ocihook.node.doctor.host_memory import HOST_MEMORY, check_host_memory
from ocihook.node.doctor.workload import Workload, read_workload
from ocihook.node.install import NODE, apply_install, default_libexec, goes_on_tracking, listen, plan_install

_NAMED = 3  # findings of one kind
_PROGRAMS = ("criu", "runc", "crun", "podman", "containerd", "crio")


def check_node() -> list[Finding]:
    """Run every check of the node; those that call programs run at the same time."""
    tracking = partial(node.check_tracking, works=soft_dirty.works())
    return _run_all((*machine.CHECKS, *node.CHECKS, tracking, *network.CHECKS, *handler.CHECKS, *store.CHECKS))


def check_container(name: str) -> list[Finding]:
    """Run every check of the node and of a running container: what fails on the node fails for the container.

    Raises:
        IdentificationError: if there is none with this id or name.
        UnsupportedError: if it may not be inspected.
    """
    found = find_container(name)
    return [*check_node(), *_check_workload(read_workload(found.init_pid, found))]


def check_process(pid: int) -> list[Finding]:
    """Run every check of a process and its descendants, and of CRIU; if it is a container's init, of that container.

    Raises:
        UnsupportedError: if there is no such process, or it may not be inspected.
    """
    found = container_of(pid)
    of_node = check_node() if found else _run_all(node.CRIU_CHECKS)
    return [*of_node, *_check_workload(read_workload(pid, found))]


def _check_workload(workload: Workload) -> list[Finding]:
    """Run every check; of what many processes have, name a few."""
    checks = [
        *(partial(check, workload) for check in (*container.CHECKS, *kernel_objects.CHECKS, *network.WORKLOAD_CHECKS)),
        partial(check_host_memory, workload, marks_writes=soft_dirty.works()),
    ]
    findings = list(map(without_commands, _run_all(checks)))
    kinds: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        own = finding.detail if finding.check == HOST_MEMORY else ""  # says as little of small processes by itself
        kinds.setdefault((finding.check, finding.status, own), []).append(finding)
    shown = []
    for alike in kinds.values():
        *first, last = alike[:_NAMED]
        more = len(alike) - _NAMED
        shown += [*first, last._replace(detail=f"{last.detail}; and {more} more like it") if more > 0 else last]
    return shown


def _run_all(checks: Iterable[Callable[[], Iterator[Finding]]]) -> list[Finding]:
    with ThreadPoolExecutor() as pool:
        list(pool.map(find_program, _PROGRAMS))
        return [finding for findings in pool.map(run_check, checks) for finding in findings]


def run_check(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return what a check finds; what cannot be read is a finding, too."""
    try:
        return list(check())
    except OSError as error:
        function = check.func if isinstance(check, partial) else check
        name = function.__name__.removeprefix("_check_").replace("_", " ")
        return [Finding(name, Status.WARN, f"could not be checked: {plain(error)}", "run `sudo ocihook doctor`")]


def repair(findings: Iterable[Finding], recover: Callable[[], Iterable[str]], *, root: Path = NODE) -> list[str]:
    """Apply the safe remedies of findings; return what was done, a line each.

    Args:
        findings: of checks.
        recover: recovers sessions, a line each.
        root: of the node.

    Raises:
        OcihookError: if the installation cannot be changed.
    """
    wanted = {finding.repair for finding in findings}
    done = []
    if Repair.INSTALL in wanted:
        changes = plan_install(root, default_libexec(), track_memory=goes_on_tracking(root))
        apply_install(changes, root)
        done += [f"{'removed' if change.after is None else 'wrote'} {change.path}" for change in changes]
    if Repair.LISTEN in wanted:
        done.append(listen())
    if Repair.RECOVER in wanted:
        done += recover()
    return done
