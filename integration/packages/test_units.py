"""Every unit as it is shipped, started by a real systemd on a node in the default mode."""

import os
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.packages.conftest import Built, MakeNode, copy_to
from integration.packages.engine import Node
from integration.packages.test_packages import systemctl
from tests.fakes.images import make_archive, make_image_set, mixed_pages

_ARCHIVES = "/var/lib/kubelet/checkpoints"
_RETENTION = f'[agent]\narchive_dir = "{_ARCHIVES}"\nkeep_last = 1\n'
# Condition and result of each unit once it was started. Where memory is not tracked the kernel's has nothing to do.
_RESULTS = {
    "ocihook.socket": "yes success",
    "ocihook.service": "yes success",
    "ocihook-prune.service": "yes success",
    "ocihook-prune.timer": "yes success",
    "ocihook-kernel.service": "no exec-condition",
}
_BY_AN_ADMINISTRATOR = {"ocihook-coordinator.service"}  # with certificates: test_packages.py


@pytest.fixture
def node(built: Built, make_node: MakeNode) -> Node:
    made = make_node("trixie", systemd=True)
    (package,) = copy_to(made, built.debs[0])
    made.run("dpkg", "--install", package)
    made.ocihook("install")
    return made


def test_units_work_in_the_default_mode(built: Built, node: Node) -> None:
    shipped = {path.name for path in (built.tree / "usr/lib/systemd/system").iterdir()}
    assert shipped == {*_RESULTS, *_BY_AN_ADMINISTRATOR}
    assert node.run("systemd-analyze", "verify", "--man=no", *sorted(shipped)) == ""
    assert not node.namespace.path("/var/lib/ocihook/store").exists()
    for unit, expected in _RESULTS.items():
        systemctl(node, "start", unit)
        properties = [f"--property={name}" for name in ("ConditionResult", "Result")]
        shown = " ".join(systemctl(node, "show", "--value", name, unit) for name in properties)
        assert (unit, shown) == (unit, expected)
    assert systemctl(node, "show", "--property=NextElapseUSecRealtime", "--value", "ocihook-prune.timer")
    for unit in ("ocihook.socket", "ocihook-prune.timer", "ocihook.service", "ocihook-kernel.service"):
        assert systemctl(node, "is-enabled", unit) == "enabled"


def test_retention_of_archives_runs_by_itself(node: Node) -> None:
    """By the timer's service, and by the agent once a dump has ended, in mode inline, which makes no store."""
    node.put("/etc/ocihook/config.d/retention.toml", _RETENTION)
    archives = make_archives(node)
    systemctl(node, "start", "ocihook-prune.service")
    assert [path.exists() for path in archives] == [False, False, True]
    for path in archives[:2]:
        path.write_bytes(archives[2].read_bytes())
        os.utime(path, (1000, 1000))
    node.start("c")
    node.checkpoint("c", node.scratch / "c.tar", "--leave-running")
    wait_for("the agent to prune", lambda: [path.exists() for path in archives] == [False, False, True])
    assert not node.namespace.path("/var/lib/ocihook/store").exists()
    assert node.agent_log().count("by the retention configured") == 2


def make_archives(node: Node) -> list[Path]:
    """Put three archives of one container where the kubelet would have, made an hour apart."""
    make_image_set(node.scratch / "images", {1: mixed_pages(5)})
    directory = node.namespace.path(_ARCHIVES)
    directory.mkdir(parents=True)
    archives = [directory / f"checkpoint-{number}.tar" for number in range(3)]
    for number, path in enumerate(archives):
        make_archive(path, node.scratch / "images", "containerd")
        os.utime(path, (3600 * (number + 1), 3600 * (number + 1)))
    return archives
