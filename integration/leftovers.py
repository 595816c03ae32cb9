"""What a dump or restore that went wrong may have left on a node, beside its record: nothing of it may be."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from integration.journals import sessions
from integration.namespace import wait_for
from integration.podman.engine import Podman
from ocihook.criu.parent_images import LINK_NAME, PARENT_NAME
from ocihook.linux.cgroup import find_freezer
from ocihook.linux.procfs import descendants, status_fields, thread_ids

_ENCLOSURES = "ocihook-*"  # cgroups


def assert_nothing_is_left(podman: Podman, *names: str, zombies: int = 0) -> None:
    """Check that nothing is left of any dump or restore.

    Args:
        podman: whose node it is.
        names: of containers that run.
        zombies: that these have of their own doing.
    """
    assert all(session["effects"] == [] for session in sessions(podman.namespace))
    assert not list(podman.namespace.path("/run/ocihook/sessions").iterdir()), "records"
    mounts = podman.namespace.run("cat", "/proc/self/mountinfo").splitlines()
    left = [mount for mount in mounts if "/run/ocihook" in mount and "/run/ocihook/staged" not in mount]  # to be stored
    assert left == [], left
    for images in podman.scratch.glob("podman/**/userdata"):
        names_left = {path.name for path in images.rglob("*")}
        assert not names_left & {LINK_NAME, PARENT_NAME}, names_left
        has_packs = any(name.endswith(".pack") for name in names_left)
        assert "ocihook.manifest" in names_left or not has_packs, names_left
    running = int(podman.namespace.path("/run/ocihook/agent.lock").read_text())
    for agent in {running} & {*podman.namespace.pids("")}:
        wait_for("the processes of sessions to be gone", lambda: not descendants(agent)[1:])  # noqa: B023
        assert not [name for name in _open_files(agent) if name.startswith((f"{podman.scratch}/podman", "/proc/"))]
    for name in names:
        assert_runs_freely(podman, name, zombies=zombies)


def assert_runs_freely(podman: Podman, name: str, *, zombies: int = 0) -> None:
    """Check that nobody holds any task of a container, and that it has no task that is not its own."""
    pids = descendants(int(podman("inspect", "--format", "{{.State.Pid}}", name)))
    fields = {pid: status_fields(pid) for pid in pids}
    assert sum(found.get("State", "").startswith("Z") for found in fields.values()) == zombies
    threads = [status_fields(tid) for pid in pids for tid in thread_ids(pid)]
    assert not [found for found in threads if found and (found["TracerPid"] != "0" or found["State"][0] in "tT")]
    freezer = find_freezer(pids[0])
    assert freezer is not None
    assert not freezer.is_frozen()
    assert not freezer.is_set()
    assert not list(freezer.directory.glob(_ENCLOSURES))


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has left meanwhile
        for path in Path(f"/proc/{pid}/fd").iterdir():
            yield os.readlink(path)
