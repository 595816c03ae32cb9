"""Runs the checks of a node, a container or a process, and repairs what is safe to repair."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ocihook.container.running import container_of, find_container
from ocihook.criu.version import find_program
from ocihook.errors import plain
from ocihook.linux import soft_dirty
from ocihook.linux.patience import Patience
from ocihook.node.doctor import container, gangs, handler, left_locks, machine, network, node, store
from ocihook.node.doctor.host_memory import HOST_MEMORY, check_host_memory
from ocihook.node.install import NODE, apply_install, default_libexec, goes_on_tracking, listen, plan_install
from ocihook.preflight.checks import CHECKS, alike_as_one, lasting, run
from ocihook.preflight.finding import Finding, Repair, Status, without_commands
from ocihook.preflight.observation import Observation, predict
from ocihook.preflight.sockets import CONNECTIONS

_PROGRAMS = ("criu", "runc", "crun", "podman", "containerd", "crio")


def check_node() -> list[Finding]:
    """Run every check of the node; those that call programs run at the same time."""
    tracking = partial(node.check_tracking, works=soft_dirty.works())
    return _run_all(
        (*machine.CHECKS, *node.CHECKS, tracking, *network.CHECKS, *handler.CHECKS, *store.CHECKS, *gangs.CHECKS)
    )


def check_container(name: str) -> list[Finding]:
    """Run every check of the node and of a running container: what fails on the node fails for the container.

    Raises:
        IdentificationError: if there is none with this id or name.
        UnsupportedError: if it may not be inspected.
    """
    found = find_container(name)
    return [*_of_node(), *_check_container(lambda: predict(found.init_pid, found))]


def check_process(pid: int) -> list[Finding]:
    """Run every check of a process and its descendants, and of CRIU; if it is a container's init, of that container.

    Raises:
        UnsupportedError: if there is no such process, or it may not be inspected.
    """
    found = container_of(pid)
    of_node = _of_node() if found else _run_all(node.CRIU_CHECKS)
    return [*of_node, *_check_container(lambda: predict(pid, found))]


def _check_container(observe: Callable[[], Observation]) -> list[Finding]:
    """Run the checks that a dump runs, and those that it decides by itself; name a few of many findings alike."""
    seen = observe()
    others = _run_all(
        [
            *(partial(check, seen) for check in container.CHECKS),
            partial(gangs.check_gang, seen),
            partial(check_host_memory, seen, marks_writes=soft_dirty.works()),
        ]
    )
    found = [*lasting(observe, Patience(), CHECKS), *run(seen, (CONNECTIONS,)), *others]
    return [_with_exception(one) for one in alike_as_one(map(without_commands, found), all_of=HOST_MEMORY)]


def _with_exception(finding: Finding) -> Finding:
    """Return a container's finding with what it rules out: a warning says what a restore may lose, or need."""
    return finding._replace(rules_out=finding.check) if finding.status is Status.WARN else finding


def _of_node() -> list[Finding]:
    """Return the node's findings where a container's own say what is ruled out for it."""
    return [finding._replace(rules_out="") for finding in check_node()]


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
    if Repair.TABLES in wanted:
        done += left_locks.remove_empty()
    return done
