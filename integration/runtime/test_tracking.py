"""Memory of the handler's containers goes past CRIU in their own dumps, with nothing in the node's configuration."""

import json
import re
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import IMAGE
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman
from integration.soft_dirty import lose_soft_dirty, seem_to_have_soft_dirty

MIB = 72  # of each of three mappings


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


def foretold_bytes(podman: HandledPodman) -> int:
    """Return how much of a container's memory would go past CRIU when it is stopped, as doctor says."""
    name = podman("inspect", "--format", "{{.Id}}", "job").strip()
    said = json.loads(podman.ocihook("doctor", "--container", name, "--json", check=False))
    details = " ".join(finding["detail"] for finding in said["findings"])
    return sum(map(int, re.findall(r"but not in its engine's own dumps (\d+) MiB go past CRIU", details))) << 20


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_stop_reads_memory_past_criu(make_handled: MakeHandled, runtime: str) -> None:
    """And a node that has no such kernel, or no longer, restores it."""
    podman = make_handled(runtime)
    seem_to_have_soft_dirty(podman.namespace)
    notes = ["--annotation=ocihook.io/checkpoint-on-stop=true", "--annotation=ocihook.io/restore-from=latest"]
    options = ["--network", "host", "--pids-limit", "0", "--stop-timeout", "60", *notes]
    podman("run", "--detach", "--name", "job", *options, IMAGE, "/workload", str(MIB))
    wait_for("the children to have answered", lambda: podman.count("job")[0] > 4)
    foretold = foretold_bytes(podman)
    podman("stop", "job")
    before = podman.count("job")
    dump = last_session(podman.namespace, "pre-dump")
    assert dump["effects"] == []
    (read,) = (phase["bytes"] for phase in dump["phases"] if phase["name"] == "merge")
    assert read > 3 * MIB << 20
    assert abs(read - foretold) < 8 << 20
    podman("rm", "job")
    lose_soft_dirty(podman.namespace)
    podman("run", "--detach", "--name", "job", *options, IMAGE, "/workload", str(MIB))
    podman.assert_goes_on("job", before)
    assert not any("track-mem" in path.read_text() for path in podman.namespace.path("/etc/criu").glob("*.conf"))
