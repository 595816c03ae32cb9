"""Memory that is read while the container runs, with a real podman: whatever it does meanwhile, a restore is right."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.journals import last_session
from integration.podman.engine import Podman
from integration.podman.test_clean_pages import MIB, READ, assert_runs_on, read_bytes, start
from integration.podman.test_faults import end_agent, end_dying_agent, kill_at_any_step, start_agent
from integration.podman.test_gpu_faults import agent_log
from integration.soft_dirty import track_memory

PRE_COPYING_AGENT = Path(__file__).parents[1] / "pre_copying_agent.py"


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


def phases(podman: Podman) -> dict[str, Any]:
    """Return the bytes of the last dump's phases; of those of one name, the last."""
    return {phase["name"]: phase["bytes"] for phase in last_session(podman.namespace, "pre-dump")["phases"]}


def test_a_container_that_goes_on_writing(patient_podman: Podman) -> None:
    podman, archive = patient_podman, patient_podman.scratch / "c.tar"
    start(podman, pre_copy="true")

    start_agent(podman, PRE_COPYING_AGENT, "changes")
    podman.checkpoint("c", archive)
    end_agent(podman)
    before = podman.count("c")
    assert before[1] != "torn"
    copied = phases(podman)
    assert copied["pre-copy"] > READ << 20
    assert 2 * MIB << 20 < copied["memory read"] < 4 * MIB << 20, "what nobody writes to is not read again"
    assert "runs another program now: its memory is read once more" in agent_log(podman)
    assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)

    start_agent(podman, PRE_COPYING_AGENT, "dies")
    podman.checkpoint("c", archive, "--leave-running")  # with the next one, which reads when all stand still
    end_agent(podman)
    assert "no pre-copy: this kernel does not mark the pages that are written to" in agent_log(podman)
    assert "pre-copy" not in phases(podman)
    assert read_bytes(podman) > (READ - MIB) << 20  # one of the processes has ended
    assert_runs_on(podman, before)
    assert "torn" not in podman("logs", "c")


@pytest.mark.skipif("OCIHOOK_NIGHTLY" not in os.environ, reason="minutes; one step is in the test above")
def test_a_full_disk_and_agents_killed_at_any_step(patient_podman: Podman) -> None:
    podman, archive = patient_podman, patient_podman.scratch / "c.tar"
    start(podman, pre_copy="true")
    before = podman.count("c")

    start_agent(podman, PRE_COPYING_AGENT, "full")
    podman.checkpoint("c", archive, "--leave-running")
    end_agent(podman)
    assert "what was pre-copied is of no use: No space left on device" in agent_log(podman)
    assert read_bytes(podman) > READ << 20
    assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
    assert_runs_on(podman, before)

    def dump(last: int, _last_of_restore: int) -> tuple[list[str], list[str]]:
        end_agent(podman)
        (podman.namespace.path("/run/ocihook") / "steps").unlink(missing_ok=True)
        start_agent(podman, PRE_COPYING_AGENT, str(last))
        podman.checkpoint("c", archive, "--leave-running")
        steps = end_dying_agent(podman)
        assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
        assert read_bytes(podman) > READ << 20
        assert_runs_on(podman, before)
        return steps, []

    kill_at_any_step(dump)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
