"""Containers of several processes, in whatever state a program may leave them: each resumes where it was."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HYBRID, HandledPodman
from ocihook.linux.procfs import Process, descendants

AGAIN = {"restore_from": "latest", "on_restore_error": "fail", "checkpoint_on_stop": "true"}
FAMILIES = (("stopped",), ("zombie", "2"), ("children", "3"), ("ends", "3"), ("daemon",), ("criu",))
_TIME_NS = 10**18 + 123_456_789


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that containers run here."""
    binary = tmp_path_factory.mktemp("family") / "family"
    source = Path(__file__).with_name("family.c")
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", binary, source], check=True, timeout=120)
    return binary


@pytest.mark.parametrize(
    ("runtime", "cgroup_version"), [("runc", 2), ("runc", HYBRID), ("runc", 1), ("crun", 2), ("crun", 1)]
)
def test_each_goes_on(make_handled: MakeHandled, family: Path, runtime: str, cgroup_version: int) -> None:
    podman = make_handled(runtime, cgroup_version=cgroup_version, program=family)
    for words in FAMILIES if cgroup_version == 2 else FAMILIES[1:]:
        name = words[0]
        podman.make("run", name, workload=words, **AGAIN)
        podman.wait_to_count(name)
        before = len(descendants(podman.init_pid(name)))
        last = podman.stop(name)
        podman.make("run", name, workload=words, **AGAIN)
        podman.wait_to_count(name)
        assert podman.counts(name)[0] == last + 1, podman.agent_log()
        assert name == "ends" or len(descendants(podman.init_pid(name))) == before
        assert_in_own_cgroup(podman, name)
        podman.remove(name)


def test_a_stopped_process_under_the_freezer_of_v1_is_refused(make_handled: MakeHandled, family: Path) -> None:
    """CRIU would wait for it, and nothing could end that CRIU: so the container gets its signal."""
    podman = make_handled("runc", cgroup_version=HYBRID, program=family)
    podman.make("run", "job", workload=("stopped",), **AGAIN)
    podman.wait_to_count("job")
    podman("stop", "job")
    wait_for("job to be over", lambda: not podman.is_running("job"))
    assert "is stopped without a checkpoint" in podman.agent_log()
    assert "kill -CONT" in podman.agent_log()


def assert_in_own_cgroup(podman: HandledPodman, name: str) -> None:
    container = podman("inspect", "--format", "{{.Id}}", name).strip()
    for pid in descendants(podman.init_pid(name)):
        if Process.find(pid):
            assert container in Path(f"/proc/{pid}/cgroup").read_text()


def test_times_of_files_are_as_they_were(make_handled: MakeHandled) -> None:
    """Caches of compiled code are thrown away where the time of a file differs in the least."""
    podman = make_handled("runc")
    podman.make("run", "job", **AGAIN)
    podman.wait_to_count("job")
    podman.write("job", "/cache/compiled", "code")
    for place in ("cache/compiled", "cache"):
        os.utime(f"/proc/{podman.init_pid('job')}/root/{place}", ns=(_TIME_NS, _TIME_NS))
    podman.stop("job")
    podman.make("run", "job", **AGAIN)
    podman.wait_to_count("job")
    for place in ("cache/compiled", "cache"):
        assert os.stat(f"/proc/{podman.init_pid('job')}/root/{place}").st_mtime_ns == _TIME_NS


def test_one_that_cannot_resume_is_named_and_pinned(make_handled: MakeHandled, family: Path) -> None:
    podman = make_handled("runc", program=family)
    podman.make("run", "job", workload=("zombie",), **AGAIN)
    podman.wait_to_count("job")
    podman.stop("job")
    conf = podman.namespace.path("/etc/criu/runc.conf")
    kept = conf.read_text()
    conf.write_text(f"{kept}action-script /bin/false\n")
    again = {**AGAIN, "on_restore_error": "start"}
    podman.make("run", "job", workload=("zombie",), **again)
    wait_for("it to count from 1", lambda: podman.counts("job")[:1] == [1])
    podman("rm", "--force", "--time", "0", "job")
    conf.write_text(kept)
    listed = podman.ocihook("store", "list")
    assert "pinned" in listed
    said = podman.agent_log()
    assert "starts from scratch" in said
    assert "is pinned: see the runbook" in said
    assert re.search(r"^resume-2", podman.ocihook("ps", "--all"), re.MULTILINE)
    assert "/bin/false" in podman.namespace.path("/var/lib/ocihook/store/restoring/restore.log").read_text()
    podman.make("run", "job", workload=("zombie",), **AGAIN)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] > 1
    assert "pinned" not in podman.ocihook("store", "list")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_container_sees_its_own_cgroup_alone(make_handled: MakeHandled, family: Path, runtime: str) -> None:
    podman = make_handled(runtime, program=family)
    for _ in range(3):
        podman.make("run", "job", "--cgroupns", "private", workload=("children",), **AGAIN)
        podman.wait_to_count("job")
        init = podman.init_pid("job")
        inside = {os.readlink(f"/proc/{pid}/ns/cgroup") for pid in descendants(init)}
        assert len(inside - {os.readlink("/proc/self/ns/cgroup")}) == 1
        procs = Path(f"/proc/{init}/root/sys/fs/cgroup/cgroup.procs").read_text().split()
        assert sorted(map(int, procs)) == sorted(descendants(init))
        podman.stop("job")
