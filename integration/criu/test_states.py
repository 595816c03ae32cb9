"""The table of states: what doctor and the preflight predict of a container is what then becomes of it.

Each state of states.c is made in a container of plain runc, dumped, removed and restored, by the CRIU of the machine
(CI has 4.1.1) and by that of the forky root (4.2). What works must not fail a check; what fails must, with a remedy;
what is lost must at least be warned of; and the log of a failure must name its cause. States that work are dumped
together, all others each alone; a nightly run dumps each alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.criu.logs import record
from integration.namespace import Namespace
from integration.packages.engine import PIVOTED
from ocihook.criu.explain import explain

HERE = Path(__file__).parent
SOURCE = HERE / "states.c"
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_TIMEOUT_S = 1500
_OWN_ETC = "mount -t tmpfs tmpfs /run\nmkdir -p /etc/criu\nmount -t tmpfs tmpfs /etc/criu"
_LINK = (
    *("ip link set lo up", "ip link add eth0 type veth peer name eth1", "ip link set eth0 up", "ip link set eth1 up"),
    "ip address add fe80::77/64 dev eth0 nodad",
)

STATES = re.findall(r"ROW\((\w+)\)", SOURCE.read_text().partition("#define ROW")[2].partition("\n")[2])
NEED_EXEC = {"pipe_of_exec", "exec_runs", "proc_of_exec", "pidfd_of_exec", "owner_outside"}
# That a machine may not be able to make: it has no huge pages, protection keys, alarm clocks, IPv6.
NOT_EVERYWHERE = {"huge_pages", "memory_with_key", "timer_of_alarm_clock"}
# What the kernel does not show of a process: docs/troubleshooting.md has these.
NOT_SHOWN = {"ambient_without_raise", "sealed_unreadable_memory", "stopped_by_terminal"}
# That work with an option of CRIU, which their remedy names.
NEED_OPTIONS = {
    *("deleted_large_file", "file_of_another_name", "replaced_file", "watch_of_overlay"),
    *("file_lock", "open_file_lock", "locked_directory", "lease"),
}
# For which a CRIU waits until it is killed, or for 10 s.
NIGHTLY_ONLY = {
    *("inheritable_beyond_bounds", "ambient_without_raise"),
    *("waits_for_vfork", "stopped_by_signal", "stopped_by_terminal"),
}
# That ocihook puts back, where plain runc does not.
PUT_BACK = {"affinity", "wiped_memory", "large_eventfd", "waits_in_poll"}
# That CRIU keeps, and that do not disturb one another: they are dumped together.
_TOGETHER = """
program_that_is_deleted shared_descriptors shared_io_context shared_undo shared_descriptors_of_siblings zombie
session_of_dead_leader session_of_grandparent ambient root_elsewhere group_of_dead_leader next_pid_namespace
limit_of_data limit_of_files limit_of_locked limit_of_stack only_file_of_a_deleted_directory deleted_directory
deleted_directory_of_a_deleted_one deleted_file deleted_file_made_anew deleted_mapped_file file_without_name
renamed_file changed_file_of_the_image proc_of_a_dead_child file_of_a_dead_child proc_of_itself
proc_of_the_first_thread path_only fifo deleted_fifo device_of_its_own namespace_file owner_dead epoll_of_closed
epoll_of_replaced proc_of_descriptors proc_of_a_descriptor proc_of_an_early_descriptor proc_of_memory proc_of_maps
proc_of_the_network proc_of_a_zombie proc_of_a_child immutable_file_for_reading odd_name called_deleted
replaced_program deleted_device deleted_link terminal_pair watch_of_services watch_of_etc watch_of_tmpfs fanotify
bind_mount bind_mount_of_a_file bind_mount_of_a_deleted_directory bind_mount_of_tmpfs mounted_tmpfs mounted_proc
mounted_sysfs mounted_queues mounted_terminals mounted_debug read_only_tmpfs full_tmpfs tmpfs_of_few_files
immutable_in_tmpfs shared_mount mounted_twice bind_mount_of_a_deleted_file mounted_cgroups mounted_security
mounted_binfmt mounted_devices fanotify_of_a_file sealed_memory droppable_memory asynchronous_io local_descriptors
memfd_with_seals shared_anonymous zero_device future_sealed_memfd executable_memfd no_exec_memfd beyond_the_end
much_reserved growing_down timer_of_monotonic timer_of_boottime timer timer_of_large_id timers_of_process_clocks
timer_of_tai timer_of_another_process timer_for_a_thread pidfd_of_itself pidfd_of_a_dead_child pidfd_of_a_zombie
message shared_segment removed_segment semaphore socket_of_a_file socket_of_a_deleted_file
socket_of_a_deleted_directory abstract_socket unbound_netlink file_on_its_way memfd_on_its_way pidfd_on_its_way
ended_pipe broken_pipe large_pipe full_pipe terminal_of_its_own terminal_by_name_only three_descriptors_left
"""
# That need the option tcp-established, and CRIU 4.2 on this kernel: whether they are kept.
_CONNECTIONS = {"half_open_connection": True, "urgent_byte": False, "zero_copy": False}


def build(program: Path) -> None:
    """Compile the program of the states."""
    strict = ["-O1", "-Wall", "-Wextra", "-Werror", "-static", "-pthread", "-s"]
    subprocess.run(["gcc", *strict, "-o", program, SOURCE], check=True, timeout=120)


class Node:
    """A machine with one CRIU, and what became of the states on it."""

    def __init__(self, name: str, directory: Path, forky_root: Path | None, wheels: Path | None) -> None:
        self.name = name
        self.directory = directory
        setup, arguments = (PIVOTED, [str(forky_root)]) if forky_root else (_OWN_ETC, [])
        self._python = "python3" if forky_root else sys.executable
        self.namespace = Namespace(setup, [str(directory), *arguments], own_network=True)
        for command in _LINK:
            self.namespace.run(*command.split())
        site = directory / "site"
        if wheels:
            shutil.copytree(wheels, site)
        else:
            shutil.copytree(HERE.parents[1] / "ocihook", site / "ocihook")
        shutil.copy(HERE / "state_runner.py", site)
        build(directory / "states")

    def run(self, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have containers go through their lives."""
        site, listed = self.directory / "site", self.directory / "runs.json"
        listed.write_text(json.dumps(runs))
        place = tempfile.mkdtemp(prefix="c", dir=self.directory)
        script = f"exec {self._python} {site}/state_runner.py {place} {self.directory}/states < {listed}"
        said = self.namespace.run("sh", "-c", script, timeout_s=_TIMEOUT_S, PYTHONPATH=str(site))
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def close(self) -> None:
        """End it, and remove its files: some are immutable."""
        self.namespace.close()
        subprocess.run(["chattr", "-R", "-f", "-ia", self.directory], check=False, timeout=_TIMEOUT_S)
        shutil.rmtree(self.directory, ignore_errors=True)


def runs() -> list[dict[str, Any]]:
    """Return which states are dumped, and with which others."""
    together = [] if IS_NIGHTLY else _TOGETHER.split()
    left_out = set() if IS_NIGHTLY else NIGHTLY_ONLY
    alone = [name for name in STATES if name not in {*together, *left_out}]
    groups = [*([together] if together else []), *([name] for name in alone)]
    return [{"names": names, "exec": bool(NEED_EXEC & set(names))} for names in groups]


@pytest.fixture(scope="module", params=["4.1.1", "4.2"])
def became(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Mapping[str, dict[str, Any]]]]:
    """What became of each state with one CRIU."""
    names = ("forky_root", "wheels") if request.param == "4.2" else ()
    root, wheels = (*(request.getfixturevalue(name) for name in names), None, None)[:2]
    directory = Path(tempfile.mkdtemp(prefix="ocihook-test-", dir="/var/tmp"))
    node = Node(request.param, directory, root, wheels)
    try:
        yield node, {name: one for one in node.run(runs()) for name in one["names"]}
    finally:
        node.close()


@contextmanager
def configured(node: Node, *lines: str) -> Iterator[None]:
    """Let CRIU read these lines when runc calls it."""
    conf = node.namespace.path("/etc/criu/runc.conf")
    conf.parent.mkdir(exist_ok=True)
    conf.write_text("".join(f"{line}\n" for line in lines))
    yield
    conf.unlink()


def test_a_link_is_gone_where_the_container_was_left_running(
    became: tuple[Node, Mapping[str, dict[str, Any]]],
) -> None:
    """The preflight warns of it, which knows how a dump is made; doctor does not."""
    with configured(became[0], "link-remap"):
        (one,) = became[0].run([{"names": ["file_of_another_name"], "options": ["--leave-running"]}])
    assert (one["dumped"], one["restored"]) == (True, False)
    explanation = explain(one["log"])
    assert explanation is not None
    assert explanation.name == "link-gone"


def test_what_connections_keep(became: tuple[Node, Mapping[str, dict[str, Any]]]) -> None:
    if became[0].name != "4.2":
        pytest.skip("this CRIU dumps no Internet socket on Linux 6.16 and later")
    with configured(became[0], "tcp-established"):
        found = became[0].run([{"names": [name]} for name in _CONNECTIONS])
    for one, (name, is_kept) in zip(found, _CONNECTIONS.items(), strict=True):
        assert one["kept"] == {name: "ok" if is_kept else "lost"}, one
        warned = {f["check"] for f in one["predicted"] if f["status"] == "warn"}
        assert warned == (set() if is_kept else {"connection-state"}), one


def test_remedies_that_are_options_work(became: tuple[Node, Mapping[str, dict[str, Any]]]) -> None:
    """All that is named at first is enough: written into the file that it names, it lets the states be kept."""
    node, all_of = became
    remedies = [f["remedy"] for name in NEED_OPTIONS for f in all_of[name]["predicted"] if f["status"] == "fail"]
    lines = {line for remedy in remedies for line in re.findall(r"echo (.*?) >> /etc/criu/runc.conf", remedy)}
    with configured(node, *sorted(lines)):
        (one,) = node.run([{"names": sorted(NEED_OPTIONS)}])
    assert not [f for f in one["predicted"] if f["status"] == "fail"]
    assert one.get("kept") == dict.fromkeys(NEED_OPTIONS, "ok"), one.get("log", "")[-2000:]


@pytest.mark.parametrize("state", STATES)
def test_predicted(became: tuple[Node, Mapping[str, dict[str, Any]]], state: str) -> None:
    node, all_of = became
    if state in NIGHTLY_ONLY and not IS_NIGHTLY:
        pytest.skip("CRIU waits for long: nightly")
    one = all_of[state]
    assert "error" not in one, one
    if one["made"].get(state) not in ("ok", "lost"):
        assert state in NOT_EVERYWHERE, one["made"]
        pytest.skip(f"this machine cannot make it: {one['made']}")
    assert one["made"][state] == "ok"
    found = {f["check"]: f for f in one["predicted"] if f["status"] == "fail"}
    warned = {f["check"] for f in one["predicted"] if f["status"] == "warn"}
    assert all(f["remedy"] for f in found.values())
    if not one["dumped"] or not one["restored"]:
        explanation = explain(one["log"])
        assert explanation is not None
        record(f"state-{state}-{node.name}", one["log"], node.directory)
        assert explanation.remedy, explanation
        assert explanation.name != "unknown", explanation
        assert explanation.name in found or state in NOT_SHOWN, (explanation, one["predicted"])
        assert one.get("lives", {}).get(state, True), "a refused dump must leave it running"
    elif one["kept"][state] == "ok":
        assert not found, found
    elif state not in PUT_BACK:
        assert found or warned, f"{one['kept'][state]}, and predicted to be good"
