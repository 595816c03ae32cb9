"""Direct restore with a real podman: most memory goes past CRIU, and whatever goes wrong, nothing runs without it."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman, image_names
from integration.podman.test_faults import (
    end_agent,
    end_dying_agent,
    kill_at_any_step,
    start_dying_agent,
)
from integration.podman.test_gpu_faults import assert_nothing_is_left, processes_with, start_killing_agent
from tests.damage import flip_bit

MIB = 72  # of each of three mappings


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static program that containers run here."""
    binary = tmp_path_factory.mktemp("mappings") / "workload"
    source = Path(__file__).parents[1] / "mappings.c"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-pthread", "-o", binary, source], check=True, timeout=120)
    return binary


def pss_bytes(podman: Podman, name: str) -> int:
    """Return the memory that the processes of a container have, what they share once."""
    pids = podman("top", name, "hpid").split()[1:]
    rows = [podman.namespace.path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return sum(int(line.split()[1]) << 10 for lines in rows for line in lines if line.startswith("Pss:"))


def written_bytes(podman: Podman) -> int:
    """Return how much of the last restore went past CRIU."""
    restore = last_session(podman.namespace, "pre-restore")
    assert restore["effects"] == []
    return sum(phase["bytes"] for phase in restore["phases"] if phase["name"] == "memory write back")


def largest_pack(archive: Path) -> tuple[str, int]:
    """Return the name of a pack in an archive, and where its middle is."""
    with tarfile.open(archive) as tar:
        pack = max((m for m in tar if m.name.endswith(".pack")), key=lambda member: member.size)
    return pack.name, pack.offset_data + pack.size // 2


def assert_failed(podman: Podman, mark: str) -> None:
    """Check that a restore has failed and that nothing is left of it."""
    assert_nothing_is_left(podman)
    assert not podman.is_running("c")
    wait_for("what CRIU made to be gone", lambda: not processes_with(mark))


@pytest.fixture
def patient_podman(podman: Podman) -> Podman:
    """One whose agents do not leave while podman unpacks an archive."""
    podman.configure("[agent]\nidle_timeout_s = 60\n")
    return podman


@pytest.mark.parametrize(("runtime", "mode"), [("runc", "inline"), ("crun", "store"), ("runc", "off")])
def test_memory_of_every_kind(make_podman: MakePodman, runtime: str, mode: str) -> None:
    podman = make_podman(runtime)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    archive = podman.scratch / "c.tar"
    podman.start("c", MIB, mode=mode)
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    memory = pss_bytes(podman, "c")
    podman.checkpoint("c", archive)
    before = podman.count("c")
    assert before[1] != "torn"
    podman.remove("c")
    podman.restore(archive, "--keep")
    podman.assert_goes_on("c", before)
    assert pss_bytes(podman, "c") <= memory * 1.1
    # Both large mappings, but for a part that is not readable, one that is not writable, and one that is not there.
    assert (2 * MIB - 6) << 20 < written_bytes(podman) < (2 * MIB + 8) << 20
    (images,) = podman.scratch.glob("podman/**/userdata/checkpoint")
    assert {path.name for path in images.iterdir() if path.name.startswith(("pagemap", "pages"))} == {
        name for name in image_names(archive) if name.startswith(("pagemap", "pages"))
    }, "image directories are as they were"


def test_a_damaged_pack_fails_the_restore_and_a_killed_criu_leaves_nothing(patient_podman: Podman) -> None:
    """Whatever happens between CRIU's making processes and their running, none of them runs, and nothing is left."""
    podman = patient_podman
    archive, mark = podman.scratch / "c.tar", f"{MIB}.{os.getpid()}"
    podman.start("c", mark)
    assert processes_with(mark)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    pack, middle = largest_pack(archive)
    flip_bit(archive, middle)
    podman.restore(archive, check=False)
    assert_failed(podman, mark)
    message = last_session(podman.namespace, "pre-restore")["stages"]["post-restore"]["message"]
    assert "is damaged" in message, pack
    assert "The restore fails, CRIU kills what it has started" in message
    podman.remove("c")
    flip_bit(archive, middle)
    for victim in ([], ["runtime"]):
        podman.namespace.path("/run/ocihook/killed").unlink(missing_ok=True)
        start_killing_agent(podman, "post-restore", *victim)
        podman.restore(archive, check=False)
        assert podman.namespace.path("/run/ocihook/killed").exists()
        assert_failed(podman, mark)
        podman.remove("c")
    end_agent(podman)
    podman.restore(archive, "--name", "d")  # a runc that is killed leaves the name of the first for good
    podman.assert_goes_on("d", before)
    assert written_bytes(podman) > MIB << 20


def test_agent_killed_at_any_step(patient_podman: Podman) -> None:
    """The hook starts another agent, which starts the stage over; memory written twice is the same."""
    podman = patient_podman
    archive = podman.scratch / "c.tar"
    podman.start("c", MIB)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")

    def restore(_last_of_dump: int, last: int) -> tuple[list[str], list[str]]:
        end_agent(podman)
        start_dying_agent(podman, last)
        podman.restore(archive)
        steps = end_dying_agent(podman)
        podman.assert_goes_on("c", before)
        podman.remove("c")
        return [], steps

    kill_at_any_step(restore, rounds=6)


def test_switched_off_all_goes_through_criu(podman: Podman) -> None:
    archive = podman.scratch / "c.tar"
    podman.start("c", MIB)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.configure('[agent]\nidle_timeout_s = 2\n[policy]\nhost_memory = "criu"\n')
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert written_bytes(podman) == 0
