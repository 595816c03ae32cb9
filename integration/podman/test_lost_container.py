"""A container at its memory limit, which the kernel kills for what CRIU needs there: the dump ends, and says so."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.criu.logs import record as record_log
from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman import test_clean_pages
from integration.podman.engine import IMAGE, Podman
from integration.podman.test_clean_pages import assert_runs_on, no_room
from integration.podman.test_faults import end_agent, start_agent
from integration.podman.test_gpu_faults import assert_nothing_is_left, processes
from ocihook.linux.procfs import status_fields
from ocihook.session.journal import open_journals

STOPPING_AGENT = Path(__file__).parents[1] / "stopping_agent.py"
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here: several processes, threads, and a PID namespace."""
    return mappings


@pytest.fixture
def limited_podman(podman: Podman) -> Podman:
    """One with a container whose groups a test can change."""
    options = ["--network", "none", "--pids-limit", "0", "--cgroupns", "host"]  # CRIU looks for its groups there
    podman("run", "--detach", "--name", "c", *options, IMAGE, "/workload", "28+5!")
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    return podman


def stopped_criu(podman: Podman) -> int:
    """Return the CRIU that is stopped in a dump; 0 if there is none yet."""
    for path in open_journals(podman.namespace.path("/run/ocihook")):
        pid = int(path.name.split("-")[0])
        if status_fields(pid).get("State", "").startswith("T"):
            return pid
    return 0


@pytest.mark.parametrize("options", [(), ("--leave-running",)])
@pytest.mark.parametrize("pages", [1, 8])
def test_the_kernel_kills_it_while_criu_dumps_it(
    limited_podman: Podman, monkeypatch: pytest.MonkeyPatch, pages: int, options: tuple[str, ...]
) -> None:
    """With one page CRIU waits for ever, and is ended. With some more it comes further, and notices."""
    podman = limited_podman
    monkeypatch.setitem(test_clean_pages.NO_MORE, "memory", ("memory.limit_in_bytes", str(pages * PAGE_BYTES)))
    pids = processes(podman)
    start_agent(podman, STOPPING_AGENT, "pre-dump")
    with ThreadPoolExecutor() as pool:
        dump = pool.submit(podman.checkpoint, "c", podman.scratch / "c.tar", *options, check=False)
        wait_for("CRIU to be stopped", lambda: stopped_criu(podman) > 0)
        with no_room(podman, "memory", pids=pids, kills=True):
            os.kill(stopped_criu(podman), signal.SIGCONT)
            output = dump.result()
    assert "of the container was killed while CRIU dumped it" in output
    assert ("which CRIU does not notice" in output) == (pages == 1)
    wait_for("it to be over", lambda: not podman.is_running("c"))
    assert_nothing_is_left(podman)
    record = last_session(podman.namespace, "pre-dump")
    assert record["outcome"] == "failed"
    failure = record["facts"]["failure"]
    assert failure["name"] == "container-killed"
    if pages > 1:
        log = podman.namespace.path(failure["log"]).read_text()
        record_log("dump-container-killed", log, podman.scratch)
    assert not (podman.scratch / "c.tar").exists()
    end_agent(podman)
    podman.remove("c")


def test_it_is_not_dumped_where_the_kernel_would_kill_it(
    limited_podman: Podman, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = limited_podman
    monkeypatch.setitem(test_clean_pages.NO_MORE, "memory", ("memory.limit_in_bytes", str(64 * PAGE_BYTES)))
    before, archive = podman.count("c"), podman.scratch / "c.tar"
    with no_room(podman, "memory"):
        output = podman.checkpoint("c", archive, check=False)
        assert "its memory limit leaves it" in output
        assert "or the kernel kills it: raise the limit a little" in output
        name = podman("inspect", "--format", "{{.Id}}", "c").strip()
        assert "CRIU needs 1 MiB there" in podman.ocihook("doctor", "--container", name, check=False)
        assert_runs_on(podman, before)
    podman.checkpoint("c", archive)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
