"""Direct restore with a real podman: most memory goes past CRIU, and whatever goes wrong, nothing runs without it."""

import json
import os
import re
import signal
import tarfile
import threading
from collections.abc import Iterator
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
from integration.podman.test_gpu_faults import assert_nothing_is_left, processes_with, start_killing_agent
from ocihook.node.doctor.host_memory import check_host_memory
from ocihook.preflight.observation import predict
from tests.damage import flip_bit

MIB = 72  # of each of three mappings
HOLDING_AGENT = Path(__file__).parents[1] / "holding_agent.py"

# Have the image set in a tmpfs that nothing can be written to.
_IN_MEMORY = """
mount -t tmpfs tmpfs /mnt && cp -a "$1/." /mnt
[ "$2" = ro ] && mount -o remount,ro /mnt
[ "$2" = ro ] || mount -o remount,size=$(($(du -s -B 4096 /mnt | cut -f 1) * 4096)) /mnt
mount --move /mnt "$1"
"""


@pytest.fixture(scope="module")
def workload(mappings: Path) -> Path:
    """Containers run this one here."""
    return mappings


def pss_bytes(podman: Podman, name: str) -> int:
    """Return the memory that the processes of a container have, what they share once."""
    pids = podman("top", name, "hpid").split()[1:]
    rows = [podman.namespace.path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return sum(int(line.split()[1]) << 10 for lines in rows for line in lines if line.startswith("Pss:"))


def first_pid(podman: Podman, name: str) -> int:
    """Return the first process of a container."""
    return int(podman("inspect", "--format", "{{.State.Pid}}", name))


def special_areas(podman: Podman, name: str) -> list[tuple[str, str]]:
    """Return what the first process of a container has asked of the kernel about its memory, by addresses."""
    text = podman.namespace.path(f"/proc/{first_pid(podman, name)}/smaps").read_text()
    found = re.findall(r"^(\w+-\w+) (?:(?!VmFlags).*\n)+VmFlags: (.*)$", text, re.MULTILINE)
    asked = {"lo", "dc", "hg", "nh"}  # mlock(2); madvise(2): dontfork, hugepage, nohugepage (CRIU loses wipeonfork)
    return [(place, " ".join(sorted(asked & {*flags.split()}))) for place, flags in found if asked & {*flags.split()}]


def written_bytes(podman: Podman) -> int:
    """Return how much of the last restore went past CRIU."""
    restore = last_session(podman.namespace, "pre-restore")
    assert restore["effects"] == []
    return sum(phase["bytes"] for phase in restore["phases"] if phase["name"] == "memory write back")


def foretold_bytes(podman: Podman, name: str) -> int:
    """Return how much of a container's memory would go past CRIU, as doctor says."""
    findings = check_host_memory(predict(first_pid(podman, name)))
    found = re.findall(r"in a restore (\d+) MiB go past CRIU", " ".join(finding.detail for finding in findings))
    return sum(map(int, found)) << 20


def largest_pack(archive: Path) -> tuple[str, int]:
    """Return the name of a pack in an archive, and a place in it that is in memory which goes past CRIU.

    What the first process shares with its children comes at the end of its page image, and the children's behind that.
    """
    with tarfile.open(archive) as tar:
        pack = max((m for m in tar if m.name.endswith(".pack")), key=lambda member: member.size)
    return pack.name, pack.offset_data + pack.size // 8


def assert_failed(podman: Podman, mark: str) -> None:
    """Check that a restore has failed and that nothing is left of it."""
    assert_nothing_is_left(podman)
    assert not podman.is_running("c")
    wait_for("what CRIU made to be gone", lambda: not processes_with(mark))


@pytest.fixture
def patient_podman(podman: Podman) -> Iterator[Podman]:
    """One whose agents do not leave while podman unpacks an archive."""
    podman.configure("[agent]\nidle_timeout_s = 60\n")
    yield podman
    end_agent(podman)  # conmon would wait for one that a hook has started


@pytest.mark.parametrize(
    ("runtime", "mode", "idle"), [("runc", "inline", 197), ("crun", "store", 9), ("runc", "off", 9)]
)
def test_memory_of_every_kind(make_podman: MakePodman, runtime: str, mode: str, idle: int) -> None:
    """Each stage is called twice, as this CRIU calls them."""
    podman = make_podman(runtime)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nworkers = 4\nstore_dir = "{podman.scratch}/store"\n')
    archive = podman.scratch / "c.tar"
    podman.start("c", f"{MIB}+{idle}", mode=mode)
    wait_for("the children to have answered", lambda: podman.count("c")[0] > 4)
    memory, special = pss_bytes(podman, "c"), special_areas(podman, "c")
    foretold = foretold_bytes(podman, "c")
    podman.checkpoint("c", archive)
    before = podman.count("c")
    assert before[1] != "torn"
    inspected = json.loads(podman.ocihook("archive", "inspect", "--json", str(archive)))["memory"]
    podman.remove("c")
    podman.restore(archive, "--keep")
    podman.assert_goes_on("c", before)
    assert pss_bytes(podman, "c") <= memory * 1.1
    assert special_areas(podman, "c") == special
    # Both large mappings, but for a part that is not readable, one that is not writable, and one that is not there.
    assert (2 * MIB - 6) << 20 < written_bytes(podman) < (2 * MIB + 8) << 20
    assert written_bytes(podman) == sum(process["direct_bytes"] for process in inspected)
    assert abs(written_bytes(podman) - foretold) < 2 << 20
    reasons = {process["reason"] for process in inspected}
    assert any("no parent or child has mapped alike" in reason for reason in reasons), "the children"
    assert "it has less than 64 MiB" in reasons, "the idle ones"
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
    pack, place = largest_pack(archive)
    flip_bit(archive, place)
    podman.restore(archive, check=False)
    assert_failed(podman, mark)
    message = last_session(podman.namespace, "pre-restore")["stages"]["post-restore"]["message"]
    assert "is damaged" in message, pack
    assert "The restore fails, CRIU kills what it has started" in message
    podman.remove("c")
    flip_bit(archive, place)
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


def test_no_process_runs_while_its_memory_is_written(patient_podman: Podman) -> None:
    """A signal that arrives meanwhile is handled later: what its handler writes is in memory, and not written over."""
    podman = patient_podman
    archive, mark = podman.scratch / "c.tar", f"{MIB}.{os.getpid()}"
    podman.start("c", mark)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    end_agent(podman)
    start_agent(podman, HOLDING_AGENT, "post-restore")
    restore = threading.Thread(target=podman.restore, args=[archive])
    restore.start()
    try:
        wait_for("memory to be written", podman.namespace.path("/run/ocihook/held").exists)
        (session,) = podman.namespace.path("/run/ocihook/sessions").glob("*.json")
        (made,) = (e for e in json.loads(session.read_text())["effects"] if e["kind"] == "half-restored")
        os.kill(made["processes"][0][0], signal.SIGUSR1)
    finally:
        podman.namespace.path("/run/ocihook/go").touch()
        restore.join()
    podman.assert_goes_on("c", before)
    assert "signals 1" in podman("logs", "c")


@pytest.mark.parametrize("mode", ["inline", "off"])
def test_images_that_cannot_be_written(podman: Podman, mode: str) -> None:
    """Packs are refused, and can be restored later; of plain page images all goes through CRIU."""
    podman.configure("[agent]\nidle_timeout_s = 2\nworkers = 4\n")
    podman.start("c", MIB, mode=mode)
    podman("container", "checkpoint", "c")
    before = podman.count("c")
    (images,) = podman.scratch.glob("podman/**/userdata/checkpoint")
    for option, message in (("ro", "Read-only file system"), ("full", "are free")):
        if podman.is_running("c"):
            podman("container", "checkpoint", "--keep", "c")
            before = podman.count("c")
        podman.namespace.run("sh", "-c", _IN_MEMORY, "mount", str(images), option)
        podman("container", "restore", "--keep", "c", check=mode == "off")
        podman.namespace.run("umount", str(images))
        stages = last_session(podman.namespace, "pre-restore")["stages"]
        if mode == "inline":
            assert message in stages["pre-restore"]["message"]
            assert "The restore is refused, nothing was started" in stages["pre-restore"]["message"]
            continue
        podman.assert_goes_on("c", before)
        assert written_bytes(podman) == 0
    if mode == "inline":
        podman("container", "restore", "c")
        podman.assert_goes_on("c", before)
        assert written_bytes(podman) > MIB << 20


def test_a_link_to_an_earlier_dump_that_leads_nowhere(podman: Podman) -> None:
    """CRIU refuses it. Whose it is, it stays; and without it the same images are restored."""
    podman.configure("[agent]\nidle_timeout_s = 2\nworkers = 4\n")
    podman.start("c", MIB, mode="inline")
    podman("container", "checkpoint", "c")
    before = podman.count("c")
    (images,) = podman.scratch.glob("podman/**/userdata/checkpoint")
    (images / "parent").symlink_to("../gone")
    podman("container", "restore", "--keep", "c", check=False)
    assert not podman.is_running("c")
    assert last_session(podman.namespace, "pre-restore")["effects"] == []
    (images / "parent").unlink()
    podman("container", "restore", "--keep", "c")
    podman.assert_goes_on("c", before)
    assert written_bytes(podman) > MIB << 20
