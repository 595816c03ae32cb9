"""Memory of the handler's containers goes past CRIU in their own dumps, with nothing in the node's configuration."""

import json
import re
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import IMAGE, image_names
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman
from integration.soft_dirty import lose_soft_dirty, seem_to_have_soft_dirty

MIB = 72  # of each of three mappings
OPTIONS = ("--network", "host", "--pids-limit", "0", "--stop-timeout", "60")


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


def foretold_bytes(podman: HandledPodman) -> int:
    """Return how much of a container's memory would go past CRIU in a dump, as doctor says."""
    name = podman("inspect", "--format", "{{.Id}}", "job").strip()
    said = json.loads(podman.ocihook("doctor", "--container", name, "--json", check=False))
    details = " ".join(finding["detail"] for finding in said["findings"])
    return sum(map(int, re.findall(r"in a dump (\d+) MiB go past CRIU", details))) << 20


def read_bytes(podman: HandledPodman) -> int:
    """Return how much of the last dump was read past CRIU."""
    dump = last_session(podman.namespace, "pre-dump")
    assert dump["effects"] == []
    return sum(phase["bytes"] for phase in dump["phases"] if phase["name"] == "merge")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_stop_reads_memory_past_criu(make_handled: MakeHandled, runtime: str) -> None:
    """And a node that has no such kernel, or no longer, restores it."""
    podman = make_handled(runtime)
    seem_to_have_soft_dirty(podman.namespace)
    notes = ["--annotation=ocihook.io/checkpoint-on-stop=true", "--annotation=ocihook.io/restore-from=latest"]
    options = [*OPTIONS, *notes]
    podman("run", "--detach", "--name", "job", *options, IMAGE, "/workload", str(MIB))
    wait_for("the children to have answered", lambda: podman.count("job")[0] > 4)
    foretold = foretold_bytes(podman)
    podman("stop", "job")
    before = podman.count("job")
    read = read_bytes(podman)
    assert read > 3 * MIB << 20
    assert abs(read - foretold) < 8 << 20
    podman("rm", "job")
    lose_soft_dirty(podman.namespace)
    podman("run", "--detach", "--name", "job", *options, IMAGE, "/workload", str(MIB))
    podman.assert_goes_on("job", before)
    assert not any("track-mem" in path.read_text() for path in podman.namespace.path("/etc/criu").glob("*.conf"))


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_an_engines_own_dump_does_beside_those_that_it_builds_on(make_handled: MakeHandled, runtime: str) -> None:
    """One that is compared with an earlier dump is whole where memory was read past CRIU since."""
    podman = make_handled(runtime)
    seem_to_have_soft_dirty(podman.namespace)
    note = "--annotation=ocihook.io/checkpoint-on-stop=true"
    podman("run", "--detach", "--name", "job", *OPTIONS, note, IMAGE, "/workload", str(MIB))
    wait_for("the children to have answered", lambda: podman.count("job")[0] > 4)
    before = podman.count("job")
    archive, first, later, last = (podman.scratch / f"{name}.tar" for name in ("job", "first", "later", "last"))
    podman.checkpoint("job", archive, "--leave-running")
    assert read_bytes(podman) > 3 * MIB << 20
    assert "parent" not in image_names(archive)
    podman.assert_goes_on("job", before)
    podman.checkpoint("job", first, "--pre-checkpoint")
    podman.assert_goes_on("job", before)
    assert foretold_bytes(podman) > 3 * MIB << 20
    podman.checkpoint("job", later, "--leave-running")
    assert read_bytes(podman) > 3 * MIB << 20
    podman.assert_goes_on("job", before)
    podman.checkpoint("job", last, "--with-previous", "--leave-running")
    assert read_bytes(podman) > 3 * MIB << 20, "it is compared with none"
    podman.remove("job")
    for one, options in ((archive, []), (later, []), (last, ["--import-previous", str(first)])):
        podman.restore(one, *options)
        podman.assert_goes_on("job", (1, before[1]))
        podman.remove("job")
    assert not any("track-mem" in path.read_text() for path in podman.namespace.path("/etc/criu").glob("*.conf"))
