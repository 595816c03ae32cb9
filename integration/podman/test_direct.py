"""Direct restore with a real podman: most memory goes past CRIU, and whatever goes wrong, nothing runs without it."""

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
    start_agent,
    start_dying_agent,
)
from tests.damage import flip_bit

MIB = 72  # of each of three mappings
KILLING_AGENT = Path(__file__).parents[1] / "killing_agent.py"


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


def test_a_damaged_pack_fails_the_restore_and_a_killed_criu_leaves_nothing(podman: Podman) -> None:
    """Whatever happens between CRIU's making processes and their running, none of them runs, and nothing is left."""
    archive = podman.scratch / "c.tar"
    podman.start("c", MIB)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    pack, middle = largest_pack(archive)
    flip_bit(archive, middle)
    podman.restore(archive, check=False)
    refused = last_session(podman.namespace, "pre-restore")
    assert refused["effects"] == []
    assert "is damaged" in refused["stages"]["post-restore"]["message"], pack
    assert "The restore fails, CRIU kills what it has started" in refused["stages"]["post-restore"]["message"]
    assert not podman.is_running("c")
    wait_for("CRIU to end its processes", lambda: not podman.namespace.pids("/workload"))
    podman.remove("c")
    flip_bit(archive, middle)
    for words in (["post-restore"], ["post-restore", "runtime"]):
        podman.namespace.path("/run/ocihook/killed").unlink(missing_ok=True)
        end_agent(podman)
        start_agent(podman, KILLING_AGENT, *words)
        output = podman.restore(archive, check=False)
        session = last_session(podman.namespace, "pre-restore")
        assert session["effects"] == []
        assert podman.namespace.path("/run/ocihook/killed").exists(), output
        wait_for("no process to be left", lambda: not podman.namespace.pids("/workload"))
        podman.remove("c")
    end_agent(podman)
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert written_bytes(podman) > MIB << 20


def test_agent_killed_at_any_step(podman: Podman) -> None:
    """The hook starts another agent, which begins the stage anew; memory written twice is the same."""
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
