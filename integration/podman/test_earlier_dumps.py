"""podman's --pre-checkpoint and --with-previous beside other dumps that track memory: no page is missing.

To CRIU all pages are clean here (integration/soft_dirty.py), as they are on a kernel that marks what is written where
they were written before another dump. Those that are written after it are dirty there: integration/vm.
"""

from pathlib import Path

import pytest

from integration.journals import last_session
from integration.namespace import wait_for
from integration.overwrite import overwrite
from integration.podman.engine import Podman, image_names
from integration.podman.test_faults import end_agent
from integration.podman.test_gpu_faults import processes
from integration.soft_dirty import track_memory

MIB = 72
COMPARED = 8 << 20  # less than this is dumped where CRIU leaves out what it has


def dumped_bytes(podman: Podman, archive: Path) -> int:
    """Return how much memory the last dump has of its own."""
    packed = last_session(podman.namespace, "pre-dump")["facts"].get("raw_bytes")
    if packed is not None:
        return int(packed)
    listed = podman.namespace.run("tar", "-tvf", str(archive)).splitlines()
    return sum(int(line.split()[2]) for line in listed if "/pages-" in line and "pre-checkpoint/" not in line)


def write_anew(podman: Podman) -> None:
    """Have the container's memory be another one."""
    before = podman.count("c")[1]
    overwrite(processes(podman)[0])
    wait_for("it to have other memory", lambda: podman.count("c")[1] != before)


@pytest.mark.parametrize("mode", ["inline", "off"])
def test_what_was_written_before_another_dump_is_not_missing(podman: Podman, mode: str) -> None:
    """Each dump that tracks memory is another one, also an engine's own that is compared with the same earlier one."""
    track_memory(podman.namespace)
    first, later = podman.scratch / "first.tar", podman.scratch / "later.tar"
    podman.start("c", MIB, mode=mode)
    for options in ([], ["--with-previous"]):
        podman.checkpoint("c", first, "--pre-checkpoint")
        if options:
            podman.checkpoint("c", later, "--leave-running", *options)
            assert dumped_bytes(podman, later) < COMPARED, "nothing was dumped in between"
            assert not last_session(podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
            write_anew(podman)
        else:
            write_anew(podman)
            podman.checkpoint("c", later, "--leave-running")
        podman.checkpoint("c", later, "--with-previous")
        before = podman.count("c")
        said = last_session(podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
        assert said.endswith("All of its memory is dumped")
        assert dumped_bytes(podman, later) >= MIB << 19  # once restored, pages that are all zero are not there
        assert "parent" in image_names(later), "podman's own link"
        podman.remove("c")
        podman.restore(later, check=False)
        assert not podman.is_running("c"), "as from any archive with that link"
        podman.remove("c")
        podman.restore(later, "--import-previous", str(first))
        podman.assert_goes_on("c", before)
    end_agent(podman)
