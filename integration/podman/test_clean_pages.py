"""Memory read past CRIU, with a real podman: whatever goes wrong, the container runs on with all that it had."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import CommandError, wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import IMAGE, Podman, assert_packed, image_names
from integration.podman.test_direct import pss_bytes
from integration.podman.test_faults import (
    end_agent,
    end_dying_agent,
    kill_at_any_step,
    start_agent,
    start_dying_agent,
)
from integration.podman.test_gpu_faults import assert_nothing_is_left, processes, start_killing_agent
from integration.soft_dirty import lose_soft_dirty, track_memory
from ocihook.criu.parent_images import LINK_NAME, PARENT_NAME

MIB = 72  # of each of three mappings
READ = 5 * MIB  # at least: by the first process all three, and one by each child
NO_MORE = {"memory": ("memory.limit_in_bytes", str(16 << 20)), "pids": ("pids.max", "1")}
FAULTY_AGENT = Path(__file__).parents[1] / "faulty_agent.py"
# What the engine says of a dump that fails; "": CRIU writes all memory by itself, and the dump succeeds.
FAULTS = {
    "forgetful": "does not have all that is unchanged since",
    "missing": "the earlier dump that CRIU compares memory with is gone",
    "damaged": "the image inventory.img is damaged",
    "unknown": "",
    "cut-short": "",
    "refused": "",
}
OF_ONE = {"unknown", "cut-short"}  # where CRIU writes that of the first process alone


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


@pytest.fixture
def patient_podman(podman: Podman) -> Iterator[Podman]:
    """One whose CRIU tracks memory."""
    track_memory(podman.namespace)
    yield podman
    end_agent(podman)  # conmon would wait for one that a hook has started


def read_bytes(podman: Podman) -> int:
    """Return how much of the last dump was read past CRIU."""
    dump = last_session(podman.namespace, "pre-dump")
    assert dump["effects"] == []
    return sum(phase["bytes"] for phase in dump["phases"] if phase["name"] == "merge")


def start(podman: Podman, memory: int | str = MIB, **annotations: str) -> None:
    """Run a workload until its children have answered."""
    podman.start("c", memory, **annotations)
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)


def assert_runs_on(podman: Podman, before: tuple[int, str]) -> None:
    """Check that the container runs on with all its memory, and that nothing is left."""
    assert_nothing_is_left(podman)
    podman.assert_goes_on("c", before)
    (images,) = podman.scratch.glob("podman/**/userdata")
    left = {path.name for path in images.rglob("*")}
    assert not {name for name in left if name in (LINK_NAME, PARENT_NAME)}


def sealed(podman: Podman) -> list[int]:
    """Return the processes at work that have a filter of system calls of their own, besides podman's."""
    found = []
    for pid in processes(podman):
        facts = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if facts["Seccomp_filters"].strip() == "2" and facts["State"].startswith("R"):
            found.append(pid)
    return found


@contextlib.contextmanager
def no_room(podman: Podman, *controllers: str, pids: Sequence[int] = (), kills: bool = False) -> Iterator[None]:
    """Put a container's processes where they may have no further task, and no more memory than CRIU's parasite; or one.

    By hand in hierarchies of v1, where those controllers are on the machines that these tests were made on. Memory that
    a process has already is not counted in its new group. `pids`: its processes, for when podman does not answer, as
    while it makes a checkpoint. `kills`: the kernel kills some of them.
    """
    groups, pids = {}, pids or processes(podman)
    for controller in controllers or NO_MORE:
        mount = podman.scratch / controller
        mount.mkdir()
        try:
            podman.namespace.run("mount", "-t", "cgroup", "-o", controller, "cgroup", str(mount))
        except CommandError:
            pytest.skip(f"the {controller} controller is not in a v1 hierarchy")
        group = podman.namespace.path(str(mount / podman.scratch.name))
        group.mkdir()
        name, value = NO_MORE[controller]
        (group / name).write_text(value)
        groups[controller] = group
    try:
        for group in groups.values():
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
        yield
        if "memory" in groups:
            assert kills != ("oom_kill 0" in (groups["memory"] / "memory.oom_control").read_text())
    finally:
        for group in groups.values():
            for left in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    (group.parent / "cgroup.procs").write_text(left)
            wait_for("what was killed in it to be gone", partial(_removed, group))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.parametrize(("runtime", "mode", "idle"), [("runc", "inline", 197), ("crun", "store", 5)])
def test_memory_of_every_kind(make_podman: MakePodman, runtime: str, mode: str, idle: int) -> None:
    """Each stage is called twice, as this CRIU calls them; what was read is a page image like any other.

    The archive goes to a node whose kernel has no such bits. What processes share since a fork they share afterwards.
    """
    podman = make_podman(runtime)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman.namespace)
    archive = podman.scratch / "c.tar"
    start(podman, f"{MIB}+{idle}", mode=mode)
    before, memory = podman.count("c"), pss_bytes(podman, "c")
    podman.checkpoint("c", archive, "--leave-running")
    assert_runs_on(podman, before)
    assert pss_bytes(podman, "c") <= memory * 1.1
    podman.checkpoint("c", archive)
    before = podman.count("c")
    assert before[1] != "torn"
    assert READ << 20 < read_bytes(podman) < (READ + 24) << 20
    if mode == "inline":
        assert_packed(archive)
        assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
    assert not {name.split("/")[0] for name in image_names(archive)} & {LINK_NAME, PARENT_NAME}
    podman.remove("c")
    if mode == "inline":
        lose_soft_dirty(podman.namespace)
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert pss_bytes(podman, "c") <= memory * 1.1


def test_a_filter_that_allows_nothing_and_limits_that_leave_no_room(patient_podman: Podman) -> None:
    """Memory is read from without: no process runs code of ours, nor gets a task or memory for it."""
    podman = patient_podman
    archive = podman.scratch / "c.tar"
    options = ["--network", "host", "--pids-limit", "0", "--cgroupns", "host"]  # CRIU looks for its groups there
    podman("run", "--detach", "--name", "c", *options, IMAGE, "/workload", f"{MIB}+5!")
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    before = podman.count("c")
    (child,) = sealed(podman)
    with no_room(podman):
        podman.checkpoint("c", archive, "--leave-running")
        assert read_bytes(podman) > READ << 20
        assert_runs_on(podman, before)
    assert sealed(podman) == [child]
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert len(sealed(podman)) == 1


def test_what_goes_wrong_costs_a_checkpoint_at_most(patient_podman: Podman) -> None:
    podman = patient_podman
    archive = podman.scratch / "c.tar"
    start(podman)
    before = podman.count("c")
    for fault, message in FAULTS.items():
        start_agent(podman, FAULTY_AGENT, fault)
        output = podman.checkpoint("c", archive, "--leave-running", check=not message)
        end_agent(podman)
        assert message in output
        if not message:
            assert (read_bytes(podman) > 0) == (fault in OF_ONE)
            assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
        assert_runs_on(podman, before)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    assert read_bytes(podman) > READ << 20
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


@pytest.mark.parametrize("mode", ["inline", "store"])
def test_killed_criu_and_agents_killed_at_any_step(patient_podman: Podman, mode: str) -> None:
    podman = patient_podman
    podman.configure(f'[agent]\nidle_timeout_s = 2\nstore_dir = "{podman.scratch}/store"\n')
    archive = podman.scratch / "c.tar"
    start(podman, mode=mode, snapshot="off")
    before = podman.count("c")
    for stage in ("pre-dump", "post-dump") if mode == "inline" else ():
        podman.namespace.path("/run/ocihook/killed").unlink(missing_ok=True)
        start_killing_agent(podman, stage)
        podman.checkpoint("c", archive, check=False)
        assert podman.namespace.path("/run/ocihook/killed").exists()
        end_agent(podman)
        assert_runs_on(podman, before)

    def dump(last: int, _last_of_restore: int) -> tuple[list[str], list[str]]:
        end_agent(podman)
        start_dying_agent(podman, last)
        podman.checkpoint("c", archive, "--leave-running")
        steps = end_dying_agent(podman)
        if mode == "store":
            podman.ocihook("wait")
        assert re.search("every (byte|checksum) right", podman.ocihook("archive", "verify", str(archive)))
        assert read_bytes(podman) > READ << 20
        assert_runs_on(podman, before)
        return steps, []

    kill_at_any_step(dump, rounds=4 if mode == "inline" else 2)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
