"""podman over the handler: what is stopped is checkpointed, what is created again continues where it was."""

from pathlib import Path

import pytest

from integration.namespace import CommandError, wait_for
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman, assert_streamed
from ocihook.linux.cgroup import find_freezer

STOPPED = {"checkpoint_on_stop": "true"}
AGAIN = {"restore_from": "latest", **STOPPED}


def assert_went_on(podman: HandledPodman, name: str, last: int, *, is_new: bool = True) -> None:
    """Check that no count is missing and none comes twice."""
    podman.wait_to_count(name)
    counts = podman.counts(name)
    assert counts == list(range(last + 1 if is_new else counts[0], counts[0] + len(counts))), counts


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_container_that_is_made_again_goes_on(make_handled: MakeHandled, runtime: str) -> None:
    podman = make_handled(runtime)
    logs = [podman.scratch / f"{number}.log" for number in range(3)]
    words = [["--volume", "/cache", "--log-opt", f"path={log}"] for log in logs]
    stream = ("stream", "4")
    podman.make("run", "job", *words[0], workload=stream, **AGAIN)  # there is none yet: it begins anew
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "kept")
    podman.write("job", "/cache/file", "kept, too")
    before = podman.count("job")
    podman.stop_unread("job")
    last = podman.counts("job")[-1]
    podman("rm", "job")
    assert last >= before[0]

    podman.make("run", "job", *words[1], workload=stream, **AGAIN)
    assert_went_on(podman, "job", last)
    assert podman.count("job")[1] == before[1]
    assert podman.file("job", "/state/file") == "kept"
    assert podman.file("job", "/cache/file") == "kept, too"
    assert podman("inspect", "--format", "{{.State.Status}}", "job").strip() == "running"
    container = podman("inspect", "--format", "{{.Id}}", "job").strip()
    assert container in Path(f"/proc/{podman.init_pid('job')}/cgroup").read_text()
    assert podman("exec", "job", "/workload", "say", "said").strip() == "said"
    podman("pause", "job")
    still = podman.counts("job")
    podman("unpause", "job")
    podman.wait_to_count("job")
    assert podman.counts("job")[: len(still)] == still
    podman("container", "checkpoint", "job")  # podman's own, of what was restored
    podman("container", "restore", "job")
    podman.wait_to_count("job")
    counts = podman.counts("job")
    assert counts == list(range(counts[0], counts[0] + len(counts)))

    last = podman.stop("job")  # a second generation, held until it is started
    podman.make("create", "job", *words[2], workload=stream, **AGAIN)
    podman("init", "job")
    container = podman("inspect", "--format", "{{.Id}}", "job").strip()
    assert '"status": "created"' in podman.namespace.run(podman.runtime, "state", container)
    freezer = find_freezer(podman.init_pid("job"))
    assert freezer is not None
    assert freezer.is_frozen()
    assert freezer.directory.name == f"libpod-{container}"
    assert podman.counts("job") == []  # it has not run for a moment
    podman("start", "job")
    assert_went_on(podman, "job", last)
    podman("kill", "job")
    wait_for("the end", lambda: not podman.is_running("job"))
    podman("rm", "job")
    assert_streamed(*(log.read_text() for log in logs))
    assert list(podman.namespace.path("/run/ocihook/containers").iterdir()) == []


def test_what_is_wrong_or_changed(make_handled: MakeHandled) -> None:
    """Wrong annotations fail, what cannot continue starts over or fails as requested, and nothing continues twice."""
    podman = make_handled("runc")
    for key, value, message in (
        (
            "restore_from",
            "../../etc",
            "annotation ocihook.io/restore-from: restore_from must be the id of a checkpoint",
        ),
        ("checkpoint_on_stop", "yes", "checkpoint_on_stop must be true or false, not 'yes'"),
    ):
        with pytest.raises(CommandError, match=message):
            podman.make("run", "wrong", **{key: value})
        podman("rm", "--force", "wrong")
    with pytest.raises(CommandError, match=r"there is no checkpoint job of a stopped container.*Nothing was started"):
        podman.make("run", "job", restore_from="latest", on_no_checkpoint="fail")
    podman("rm", "--force", "job")

    podman.make("run", "job", "--tty", **STOPPED)
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "kept")
    last = podman.stop("job")
    podman.make("run", "job", "--tty", **AGAIN)
    assert_went_on(podman, "job", last)
    with pytest.raises(CommandError, match=r"runs already, as container job.*two must not resume"):
        podman.make("run", "twin", "--tty", restore_from="latest", member="job", on_restore_error="fail")
    podman("rm", "--force", "twin")
    podman.stop("job")

    with pytest.raises(CommandError, match=r"terminal was True, is False; mounts that are new: /more"):
        podman.make("run", "job", "--volume", "/more", restore_from="latest", on_restore_error="fail")
    podman("rm", "--force", "job")
    for pack in podman.namespace.path("/var/lib/ocihook/store/domains").glob("*/packs/*"):
        damage(pack)
    podman.make("run", "job", "--tty", **AGAIN)
    assert_went_on(podman, "job", 0)
    assert podman.file("job", "/state/file") == ""


def damage(pack: Path) -> None:
    """Change bytes in the middle of a file."""
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 0xFF
    pack.write_bytes(data)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_kills_in_a_restore(make_handled: MakeHandled, runtime: str) -> None:
    """The container starts over, or is not made: never twice, and never with the files of another."""
    podman = make_handled(runtime)
    podman.make("run", "job", **STOPPED)
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "kept")
    podman.stop("job")
    podman.stall()
    for stage in ("setup-namespaces", "post-restore", "post-resume"):
        for who in ("criu", runtime, "worker", "caller"):
            podman.restore_killing(who, stage, "job", restore_from="latest")
            if podman.is_running("job"):
                podman.wait_to_count("job")
                counts = podman.counts(
                    "job"
                )  # at the last stage the restored one may have said some before it was ended
                new = counts[len(counts) - 1 - counts[::-1].index(1) :]
                assert new == list(range(1, len(new) + 1)), (who, stage, counts)
                assert podman.file("job", "/state/file") == ""
            running = podman.is_running("job")
            wait_for(f"{who} killed at {stage} to have left no other", lambda: len(podman.workloads()) == running)  # noqa: B023
            podman.remove("job")
            podman.namespace.run("sh", "-c", "rm -f /var/lib/ocihook/store/restoring/*.attempts")
    podman.make("run", "job", restore_from="latest")
    wait_for("the job", lambda: podman.counts("job") != [])
    assert podman.counts("job")[0] > 1
    assert podman.file("job", "/state/file") == "kept"


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_limits_of_cgroups_v1_count_for_what_was_restored(make_handled: MakeHandled, runtime: str) -> None:
    podman = make_handled(runtime, cgroup_version=1)
    podman.make("run", "job", "--memory", "64m", **AGAIN)
    podman.wait_to_count("job")
    last = podman.stop("job")
    podman.make("create", "job", "--memory", "56m", **AGAIN)
    podman("init", "job")
    container = podman("inspect", "--format", "{{.Id}}", "job").strip()
    (init,) = podman.workloads()
    lines = Path(f"/proc/{init}/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: Path(line.split(":")[2]).name for line in lines if not line.startswith("0:")}
    assert set(own.values()) == {f"libpod-{container}"}, own
    assert podman.counts("job") == []  # it has not run for a moment
    podman("start", "job")
    assert_went_on(podman, "job", last)
    stats = podman("stats", "--no-stream", "--format", "{{.Name}} {{.PIDs}} {{.MemUsageBytes}}", "job").split()
    assert stats[:2] == ["job", "1"]
    assert stats[-1] == "56MiB"  # of the new configuration
    with pytest.raises(CommandError, match="137"):
        podman("exec", "job", "/workload", "200")
    assert podman.is_running("job")
    podman.wait_to_count("job")
