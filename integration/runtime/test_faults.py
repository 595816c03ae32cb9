"""What a stop and a restore by the handler meet: a killed agent, a remote that is away, a full disk, a deletion."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from integration.namespace import CommandError, wait_for
from integration.podman.engine import IMAGE
from integration.podman.test_faults import end_dying_agent, kill_at_any_step, start_dying_agent
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman
from integration.runtime.test_podman import assert_went_on, damage
from integration.runtime.test_stop import Stop

STOPPED = {"checkpoint_on_stop": "true"}
AGAIN = {"restore_from": "latest", **STOPPED}
STRICT = {"on_restore_error": "fail", **AGAIN}
MEMBER = {"member": "job", **STRICT}
STORE = "/var/lib/ocihook/store"
REMOTE = """[agent]
idle_timeout_s = 2
remote = "{}"
[policy]
push = "always"
"""


def test_agent_killed_at_any_step(make_handled: MakeHandled) -> None:
    """Another one finishes its work: each stop is a checkpoint, and each container resumes from it."""
    podman = make_handled("runc")
    podman.make("run", "job", **STRICT, on_no_checkpoint="start")

    def round_trip(last_of_stop: int, last_of_restore: int) -> tuple[list[str], list[str]]:
        podman.wait_to_count("job")
        podman.write("job", "/state/file", f"kept {last_of_stop}")
        start_dying_agent(podman, last_of_stop)
        last = podman.stop("job")
        stop = end_dying_agent(podman)
        start_dying_agent(podman, last_of_restore)
        podman.make("run", "job", **STRICT)
        restore = end_dying_agent(podman)
        assert_went_on(podman, "job", last)
        assert podman.file("job", "/state/file") == f"kept {last_of_stop}"
        return stop, restore

    kill_at_any_step(round_trip, rounds=4)


def refused(podman: HandledPodman, *message: str, name: str = "job", **annotations: str) -> None:
    """Check that a container is not created, for this reason, and that nothing of it is left."""
    with pytest.raises(CommandError) as failure:
        podman.make("run", name, **annotations)
    for part in (*message, "Nothing was started"):
        assert part in str(failure.value)
    podman("rm", "--force", name)
    assert podman.workloads() == []
    left = [
        path
        for top in ("/run/ocihook/containers", f"{STORE}/restoring")
        for path in podman.namespace.path(top).glob("*")
    ]
    assert [path for path in left if path.suffix not in (".lock", ".attempts")] == []


def checkpoints(place: Path) -> set[str]:
    """Return the complete checkpoints of a store or a remote."""
    return {path.stem for path in place.glob("domains/*/checkpoints/*.manifest")}


def test_a_remote_that_is_away(make_handled: MakeHandled) -> None:
    """A stop does not wait for it, a restore does, for a while; what it has may be half there, or damaged."""
    podman = make_handled("runc")
    remote = podman.scratch / "remote"
    store = podman.namespace.path(STORE)
    podman.configure(REMOTE.format(remote))
    podman.make("run", "job", **STOPPED)
    podman.wait_to_count("job")
    podman.stop("job")
    wait_for("the push to fail", lambda: "is no directory. Is it mounted?" in podman.agent_log())
    refused(podman, str(remote), **STRICT)
    first = checkpoints(store)
    remote.mkdir()
    podman.make("run", "job", **STRICT)
    podman.wait_to_count("job")
    last = podman.stop("job")
    wait_for("it to be stored", lambda: len(checkpoints(store)) > len(first))
    (newest,) = checkpoints(store) - first
    wait_for("it to be pushed, by nobody else's doing", lambda: newest in checkpoints(remote))

    podman.namespace.run("rm", "-rf", STORE)
    packs = sorted(remote.glob("domains/*/packs/**/*"), key=lambda path: path.stat().st_size)
    whole = packs[-1].read_bytes()
    packs[-1].write_bytes(whole[: len(whole) // 2])
    refused(podman, **STRICT)
    packs[-1].write_bytes(whole)
    damage(packs[-1])
    refused(podman, "damaged", **STRICT)
    assert not list(podman.namespace.path(STORE).glob("restoring/*.attempts"))  # of what never was here
    packs[-1].write_bytes(whole)
    podman.make("run", "job", **STRICT)
    assert_went_on(podman, "job", last)
    podman.remove("job")

    remote.rename(podman.scratch / "away")
    podman.namespace.run("rm", "-rf", STORE)
    podman.make("run", "job", restore_from="latest")  # by policy
    assert_went_on(podman, "job", 0)


def test_a_checkpoint_runs_on_one_node_at_a_time(make_handled: MakeHandled, scratch: Path, workload: Path) -> None:
    """Two nodes have it from the same remote: the second one is refused until the container of the first has ended."""
    one = make_handled("runc")
    remote = scratch / "remote"
    remote.mkdir()
    one.configure(REMOTE.format(remote))
    one.make("run", "job", **STOPPED)
    one.wait_to_count("job")
    last = one.stop("job")
    wait_for("it to be pushed", lambda: checkpoints(remote) != set())
    one.make("run", "job", **STRICT)
    one.wait_to_count("job")

    (scratch / "other").mkdir()
    with contextlib.closing(HandledPodman(scratch / "other", "runc", workload)) as two:
        two.configure(REMOTE.format(remote))
        one("save", "--output", str(scratch / "saved.tar"), IMAGE)
        two("load", "--input", str(scratch / "saved.tar"))
        refused(two, "runs already, on node", "as container job", **STRICT)
        assert one.is_running("job")
        one("rm", "--force", "--time", "0", "job")
        wait_for("the agent to withdraw the claim", lambda: list(remote.glob("domains/*/claims/*")) == [])
        two.make("run", "job", **STRICT)
        assert_went_on(two, "job", last)
        assert len(list(remote.glob("domains/*/claims/*"))) == 1


def wait_for_a_stop(podman: HandledPodman) -> int:
    """Restore a container whose checkpoint the agent is still at; stop it again, and return its last count."""
    stop = Stop(podman, "post-dump")
    waiting = podman.spawn_run("second", podman.scratch / "waiting", **MEMBER)
    wait_for("the handler to wait", lambda: len(podman.namespace.pids("ocihook.hook.handler")) > 1)
    assert waiting.poll() is None
    stop.end()
    wait_for("podman to end", lambda: waiting.poll() is not None)
    assert waiting.poll() == 0, (podman.scratch / "waiting").read_text()
    assert_went_on(podman, "second", podman.counts("job")[-1])
    podman("rm", "job")
    return podman.stop("second")


def delete_meanwhile(podman: HandledPodman) -> None:
    """Delete a container while it is restored, as an engine does that has killed its call; nothing is left of it."""
    podman.stall_at("post-restore")
    running = podman.spawn_run("job", podman.scratch / "deleted", **MEMBER)
    podman.wait_for_stall()
    (container,) = (path.name for path in podman.namespace.path("/run/ocihook/containers").iterdir())
    caller = podman.restorer("caller")
    deleting = podman.namespace.spawn(podman.runtime, "delete", "--force", container, log=podman.scratch / "delete")
    os.kill(caller, signal.SIGKILL)
    podman.go_on()
    wait_for("both to end", lambda: running.poll() is not None and deleting.poll() is not None)
    assert deleting.poll() == 0, (podman.scratch / "delete").read_text()
    wait_for("it to be gone", lambda: podman.workloads() == [])
    podman("rm", "--force", "job")


def remove_what_is_held(podman: HandledPodman) -> None:
    """Remove a container before it is started."""
    podman.make("create", "job", **MEMBER)
    podman("init", "job")
    assert len(podman.workloads()) == 1
    podman("rm", "--force", "--time", "0", "job")
    wait_for("what was held to be gone", lambda: podman.workloads() == [])


def test_what_a_restore_meets(make_handled: MakeHandled) -> None:
    """A stop that is not over, a full disk, its own deletion: in the end it is restored as if never begun."""
    podman = make_handled("runc")
    podman.stall()
    podman.make("run", "job", **STOPPED)
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "kept")
    last = wait_for_a_stop(podman)

    disk = podman.namespace.path("/var/lib/ocihook")
    podman.namespace.run("mount", "-o", "remount,size=64m", "/var/lib/ocihook")
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - (16 << 10))
    refused(podman, "o space left", **MEMBER)
    (disk / "filler").unlink()

    lock = next(podman.namespace.path(f"{STORE}/restoring").glob("*.lock"))
    attempts = lock.with_suffix(".attempts")
    assert not attempts.exists()
    for made, message in (("2", "could not be restored 2 times and is not tried again"), ("x", "is damaged")):
        attempts.write_text(made)
        refused(podman, message, **MEMBER)
    attempts.unlink()
    delete_meanwhile(podman)
    attempts.unlink()  # that one had begun
    remove_what_is_held(podman)
    assert not attempts.exists()

    first = podman("inspect", "--type", "image", "--format", "{{.Id}}", IMAGE).strip()
    podman("import", "--change", "LABEL changed=1", str(podman.scratch / "image.tar"), IMAGE)
    refused(podman, "image was", **MEMBER)
    podman("tag", first, IMAGE)
    podman.make("run", "job", **MEMBER)
    assert_went_on(podman, "job", last)
    assert podman.file("job", "/state/file") == "kept"
