"""A stop that becomes a checkpoint: whatever is killed meanwhile, a full disk, a short grace period, what is saved."""

import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.namespace import wait_for
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman
from ocihook.linux.procfs import Process

if TYPE_CHECKING:
    import subprocess

STOPPED = {"checkpoint_on_stop": "true"}
AGAIN = {"restore_from": "latest", **STOPPED}


class Stop:
    """A `podman stop` whose CRIU waits at a stage."""

    def __init__(self, podman: HandledPodman, stage: str, *, time_s: int = 60) -> None:
        self.podman, self.init = podman, Process.find(podman.init_pid("job"))
        podman.stall_at(stage)
        command = ["podman", *podman.options(), "stop", "--time", str(time_s), "job"]
        self.running: subprocess.Popen[bytes] = podman.namespace.spawn(*command, log=podman.scratch / "stop.log")
        podman.wait_for_stall()

    def kill(self, who: str) -> None:
        """Kill one of those who are at it, or several together: `wrapper and agent`."""
        for pid in [self.podman.stopper(each) for each in who.split(" and ")]:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Let CRIU continue, and wait until the container is gone."""
        self.podman.go_on()
        wait_for("podman to end", lambda: self.running.poll() is not None)
        if self.podman.is_running("job"):  # its own call was killed: an engine asks again
            self.podman("stop", "--time", "60", "job")
        wait_for("the end", lambda: not self.podman.is_running("job"))
        assert self.init is not None
        assert not self.init.is_alive()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_kills_in_a_stop(make_handled: MakeHandled, runtime: str) -> None:
    """It is checkpointed though its engine's call, or the agent, or both are killed; else it gets its signal."""
    podman = make_handled(runtime)
    podman.stall()
    podman.make("run", "job", **AGAIN)
    podman.wait_to_count("job")
    saved = 0
    together = {"pre-dump": f"wrapper and agent and {runtime}", "post-dump": "wrapper and agent"}
    for stage, several in together.items():
        for who in ("wrapper", "agent", "criu", runtime, *([several] if runtime == "runc" else [])):
            stop = Stop(podman, stage)
            stop.kill(who)
            stop.end()
            last = podman.counts("job")[-1]
            podman("rm", "job")
            podman.make("run", "job", **AGAIN)
            podman.wait_to_count("job")
            first = podman.counts("job")[0]
            if {runtime, "criu"}.isdisjoint(who.split(" and ")):
                assert first == last + 1, (stage, who)
            assert first in {last + 1, saved + 1}, (stage, who)
            saved = first - 1


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_stop_that_takes_longer_than_the_engine_waits(make_handled: MakeHandled, runtime: str) -> None:
    """KILL waits for the checkpoint, another TERM as well; what the runtime is asked afterwards is answered."""
    podman = make_handled(runtime)
    podman.stall()
    podman.make("run", "job", **AGAIN)
    podman.wait_to_count("job")
    container = podman("inspect", "--format", "{{.Id}}", "job").strip()
    stop = Stop(podman, "post-dump", time_s=1)
    calls = [
        podman.namespace.spawn(podman.runtime, "kill", container, name, log=podman.scratch / "kill")
        for name in ("9", "15")
    ]
    wait_for("them to wait", lambda: len(podman.namespace.pids("ocihook.hook.handler")) == 1 + len(calls))
    assert stop.init is not None
    assert stop.init.is_alive()
    stop.end()
    assert [call.wait() for call in calls] == [0, 0], (podman.scratch / "kill").read_text()
    last = podman.counts("job")[-1]
    podman("rm", "job")
    podman.make("run", "job", **AGAIN)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1


def test_what_cannot_be_saved_stops_with_its_signal(make_handled: MakeHandled) -> None:
    """A full disk, too much in the rootfs: the container gets its signal, nothing is left, the reason is reported."""
    podman = make_handled("runc")
    podman.configure("[agent]\nidle_timeout_s = 2\nmax_rootfs_bytes = 1000\n")
    podman.make("run", "job", **STOPPED)
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "x" * 5000)
    podman.stop("job")
    assert "bytes in its rootfs are to be saved, and no more than 1000 may be" in podman.agent_log()

    podman.configure("[agent]\nidle_timeout_s = 2\n")
    podman.namespace.run("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", "/var/lib/ocihook")
    podman.make("run", "job", **STOPPED)
    podman.wait_to_count("job")
    podman.stop("job")
    assert "is stopped without a checkpoint: " in podman.agent_log().split("no more than 1000 may be")[1]
    left = podman.namespace.run("find", "/var/lib/ocihook/store", "-name", "*.img")
    assert left == ""
    assert podman.namespace.run("podman", *podman.options(), "ps", "--all", "--quiet") == ""


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_what_a_container_had_beside_its_processes(make_handled: MakeHandled, runtime: str) -> None:
    """Files that are open in a volume, at /dev/shm and in the rootfs are there again; what it removed is not."""
    podman = make_handled(runtime)
    podman.make("run", "base")
    for path in ("/lib/removed", "/lib/tree/lower", "/lib/kept"):
        podman.write("base", path, "of the image")
    podman("commit", "--quiet", "base", "localhost/more")
    podman.remove("base")
    notes = [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in AGAIN.items()]
    options = [
        "--detach",
        "--tty",
        "--name",
        "job",
        "--network",
        "host",
        "--pids-limit",
        "0",
        "--volume",
        "/cache",
        *notes,
    ]
    run = ["run", *options, "localhost/more", "/workload", "4", "/cache/open", "/dev/shm/open", "/open"]
    podman(*run)
    podman.wait_to_count("job")
    top = Path(f"/proc/{podman.init_pid('job')}/root")
    (top / "lib/removed").unlink()
    shutil.rmtree(top / "lib/tree")
    (top / "lib/tree").mkdir()
    podman.write("job", "/lib/tree/upper", "of the container")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(top / "cache/socket"))
    last = podman.stop("job")
    podman(*run)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1
    top = Path(f"/proc/{podman.init_pid('job')}/root")
    assert sorted(path.name for path in (top / "lib").iterdir()) == ["kept", "tree"]
    assert [path.name for path in (top / "lib/tree").iterdir()] == ["upper"]
    assert [path.name for path in (top / "cache").iterdir()] == ["open"]
    for path in ("cache/open", "dev/shm/open", "open"):
        wait_for(path, lambda path=path: int.from_bytes((top / path).read_bytes(), sys.byteorder) > last)  # type: ignore[misc]


def complete_epochs(podman: HandledPodman, count: int) -> list[int]:
    """Return the complete epochs of the one gang, once there are so many: what is stored is reported then."""

    def found() -> list[int]:
        (gang,) = json.loads(podman.ocihook("gang", "status", "--json"))["gangs"]
        epochs: list[int] = gang["epochs"]
        return epochs

    wait_for("epochs to be complete", lambda: len(found()) >= count)
    return found()


@pytest.mark.parametrize("runtime", ["crun"])
def test_a_member_of_a_gang_is_stopped_alone(make_handled: MakeHandled, runtime: str) -> None:
    """All are checkpointed with it, and the others run on; made again, all resume from that, not from what is newer."""
    podman = make_handled(runtime)
    pair = {**AGAIN, "gang": "job", "gang_size": "2", "on_member_stop": "checkpoint", "gang_timeout_s": "60"}
    run = podman.make
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda name: run("run", name, **pair), "ab")] == [None, None], "there is none: they start"
    for name in "ab":
        podman.wait_to_count(name)
    last = podman.stop("a")
    podman.wait_to_count("b")
    (epoch,) = complete_epochs(podman, 1)
    rows = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"]
    assert [row["gang"].split("/")[:2] for row in rows] == 2 * [["job", str(epoch)]]
    podman.remove("b")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: run("run", name, **pair), "ab"))
    for name in "ab":
        podman.wait_to_count(name)
    assert podman.counts("a")[0] == last + 1
    assert podman.counts("b")[0] > 1


def test_a_member_that_is_stopped_alone_waits_and_gets_its_signal(make_handled: MakeHandled) -> None:
    """There is no checkpoint, the other runs on untouched, and the last complete epoch is what all resume from."""
    podman = make_handled("runc")
    pair = {**AGAIN, "gang": "job", "gang_size": "2"}

    def limit(waits_s: float) -> None:
        limits = f"gang_timeout_s = {waits_s}\ngang_gather_s = {waits_s}\n"
        podman.configure(f"[agent]\nidle_timeout_s = 2\n[policy]\n{limits}")

    def both(call: Callable[[str], int | None]) -> dict[str, int | None]:
        with ThreadPoolExecutor() as pool:
            return dict(zip("ab", pool.map(call, "ab"), strict=True))

    def run(name: str) -> None:
        podman.make("run", name, **pair)
        podman.wait_to_count(name)

    def known_epochs() -> tuple[list[int], list[str]]:
        rows = json.loads(podman.ocihook("store", "list", "--json"))["checkpoints"]
        return complete_epochs(podman, 1), [row["gang"] for row in rows]

    limit(60)
    both(run)
    last = both(podman.stop)
    complete = known_epochs()
    assert [gang.split("/")[1] for gang in complete[1]] == 2 * [str(complete[0][0])]
    both(run)
    limit(2)
    init = podman.init_pid("b")
    podman.stop("a")
    assert podman.init_pid("b") == init
    said = podman.agent_log()
    assert re.search(
        r"container a .* is stopped without a checkpoint: .*a: b \(never joined\) did not reach 'arr", said
    ), said
    podman.wait_to_count("b")
    assert known_epochs() == complete

    podman.remove("b")
    limit(60)
    both(run)
    for name, count in last.items():
        assert count is not None
        assert podman.counts(name)[0] == count + 1
