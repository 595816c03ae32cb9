"""What happens to those who take part while memory goes past CRIU: the job has all of it, and nothing is left."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from integration.leftovers import assert_nothing_is_left
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman
from integration.podman.test_clean_pages import FAULTY_AGENT, read_bytes, start
from integration.podman.test_faults import end_agent, start_agent
from integration.podman.test_gpu_faults import processes_with
from integration.podman.test_snapshot import processes, states
from integration.soft_dirty import seem_to_have_soft_dirty, track_memory
from integration.victims import held_at, kill, meanwhile
from ocihook.criu.explain import explain
from ocihook.criu.images import make_pagemap
from ocihook.criu.parent_images import PAGES_ID, PARENT_NAME, make_parent
from ocihook.linux.cgroup import find_freezer
from ocihook.linux.memory import read_mappings
from ocihook.linux.procfs import descendants

READ_MIB = 24  # of each of three mappings: the first process's is read then, in a dump
DIRECT_MIB = 40  # and this much of each goes past CRIU in a restore
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
NIGHTLY = pytest.mark.skipif(not IS_NIGHTLY, reason="CI takes one runtime, and some of all deaths")
# While memory is read; while CRIU has seized all tasks; while it has its own code in one; while both are joined.
SEIZED, INSIDE = "inventory.img", "pagemap-1.img"  # of the made-up dump: these CRIU reads then
STAGES = ("pre-dump", SEIZED, "post-dump")
RESTORE_STAGES = ("pre-restore", "post-restore")
VICTIMS = ("criu", "runtime", "engine", "agent")
DEATHS = [(INSIDE, "criu"), ("pre-dump", "runtime"), (SEIZED, "agent"), ("post-dump", "engine")]
# With a snapshot, while all stand still and are forked, and before any of it is read: what becomes of the checkpoint.
SNAPSHOT_DEATHS = {
    ("detached", "criu"): "lost",
    ("snapshot", "engine"): "complete",
    ("detached", "agent"): "lost",
    ("detached", "engine"): "complete",
    ("detached", "runtime"): "lost",
    ("snapshot", "agent"): "lost",
}
IN_CI = 3
LIBEXEC = ("--libexec", "/etc/ocihook/libexec")
WHY = "this kernel does not mark what is written"


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


def assert_runs_on(podman: Podman, before: tuple[int, str], *, zombies: int = 0) -> None:
    """Check that the container runs on with all its memory, and that nothing is left."""
    podman.assert_goes_on("c", before)
    assert_nothing_is_left(podman, "c", zombies=zombies)


@contextmanager
def held_in(podman: Podman, stage: str, dump: Callable[[], object]) -> Iterator[None]:
    """Dump, and hold that until the block ends: at a stage, or where CRIU reads a file."""
    if stage not in (SEIZED, INSIDE):
        with held_at(podman, stage, dump):
            yield
        return
    end_agent(podman)
    start_agent(podman, FAULTY_AGENT, "waiting", stage)
    with meanwhile(dump), waiting_criu(podman, stage):
        yield


@contextmanager
def waiting_criu(podman: Podman, name: str) -> Iterator[None]:
    """Wait until CRIU reads a file of the made-up dump; it gets that when the block has ended."""
    found: list[tuple[Path, int]] = []

    def is_read() -> bool:
        for path in podman.scratch.glob(f"podman/**/{PARENT_NAME}/{name}"):
            with suppress(OSError):  # nobody has opened it yet
                if path.is_fifo():
                    found.append((path.with_suffix(".content"), os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
        return bool(found)

    wait_for("CRIU to read", is_read)
    ((content, pipe),) = found
    data = content.read_bytes()
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # it was killed
            os.write(pipe, data)
        os.close(pipe)


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=NIGHTLY)])
def test_kills(make_podman: MakePodman, runtime: str) -> None:
    """While all is read, in CRIU's own dump, and while both are joined. What an agent begins another one ends."""
    podman = make_podman(runtime)
    podman.install()
    track_memory(podman.namespace)
    archive = podman.scratch / "c.tar"
    start(podman, READ_MIB)
    before = podman.count("c")
    for stage, victim in [*DEATHS, *product(STAGES, VICTIMS)] if IS_NIGHTLY else DEATHS:
        archive.unlink(missing_ok=True)
        with held_in(podman, stage, lambda: podman.checkpoint("c", archive, "--leave-running", check=False)):
            kill(podman, victim)
        assert_runs_on(podman, before)
        end_agent(podman)
        assert archive.exists() == (victim == "agent"), (stage, victim)
        if victim == "agent":
            assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
            assert read_bytes(podman) > 3 * READ_MIB << 20
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    end_agent(podman)


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=NIGHTLY)])
def test_kills_when_a_snapshot_is_taken_and_read(make_podman: MakePodman, runtime: str) -> None:
    """In `snapshot` CRIU and its runtime have ended. What the engine has no archive of is in the store all the same."""
    podman = make_podman(runtime)
    podman.install()
    podman.configure(f'[agent]\nidle_timeout_s = 2\nstore_dir = "{podman.scratch}/store"\n')
    track_memory(podman.namespace)
    archive = podman.scratch / "c.tar"
    start(podman, READ_MIB, mode="store")
    before, own = podman.count("c"), processes(podman)
    deaths = [*SNAPSHOT_DEATHS.items()]
    for (stage, victim), state in deaths if IS_NIGHTLY else deaths[:IN_CI]:
        archive.unlink(missing_ok=True)
        stop = ["stop"] * (stage == "snapshot" and victim == "engine")
        with held_at(podman, stage, partial(podman.checkpoint, "c", archive, "--leave-running", check=False), *stop):
            assert len(descendants(own[0])) == len(own) + 1  # podman itself answers nothing meanwhile
            kill(podman, victim)
        wait_for("the session to end", lambda: "No session is open." in podman.ocihook("recover", check=False))
        assert_runs_on(podman, before)
        assert processes(podman) == own
        end_agent(podman)
        podman.ocihook("wait", check=False)
        assert states(podman)[-1] == state, (stage, victim)
        if state == "complete":
            podman.ocihook("store", "verify", "--read-data")
        podman.ocihook("store", "prune")
        assert not archive.exists() or stage == "snapshot"
    podman.checkpoint("c", archive, "--leave-running")
    podman.ocihook("wait")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (1, before[1]))
    end_agent(podman)


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=NIGHTLY)])
def test_kills_in_a_restore(make_podman: MakePodman, runtime: str) -> None:
    """While page images are made for CRIU, and while memory is written past it: nothing runs without all of it."""
    podman = make_podman(runtime)
    podman.install()
    archive, mark = podman.scratch / "c.tar", f"{DIRECT_MIB}.{os.getpid()}"
    start(podman, mark)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    deaths = product(RESTORE_STAGES, VICTIMS) if IS_NIGHTLY else [("post-restore", "agent")]
    for number, (stage, victim) in enumerate(deaths):
        name = f"c{number}"  # a runc that is killed leaves its own for good
        with held_at(podman, stage, partial(podman.restore, archive, "--name", name, check=False)):
            kill(podman, victim)
        if victim == "agent":
            podman.assert_goes_on(name, before)
        if victim in ("criu", "runtime"):
            assert not podman.is_running(name)
            wait_for("what CRIU made to be gone", lambda: not processes_with(mark))
        assert_nothing_is_left(podman, *[name] * podman.is_running(name))
        for restored in re.findall("[0-9a-f]{64}", podman.namespace.run(podman.runtime, "list", "--quiet")):
            podman.namespace.run(
                podman.runtime, "delete", "--force", restored, check=False
            )  # podman knows nothing of it
        podman("rm", "--force", "--time", "0", name, check=False)
        wait_for("all to be gone", lambda: not processes_with(mark))
    end_agent(podman)
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert_nothing_is_left(podman, "c")


def test_a_kernel_that_no_longer_marks_what_is_written(podman: Podman) -> None:
    """With the lines of the one before, CRIU refuses all and says so; at the next boot they go, and all works again."""
    archive = podman.scratch / "c.tar"
    seem_to_have_soft_dirty(podman.namespace)
    podman.ocihook("install", "--track-memory", *LIBEXEC)
    podman.start("c", 1)
    podman.checkpoint("c", archive, "--leave-running")
    saved = podman.count("c")
    seem_to_have_soft_dirty(podman.namespace, works=False)
    before = podman.count("c")
    podman.checkpoint("c", podman.scratch / "refused.tar", "--leave-running", check=False)
    (log,) = podman.scratch.glob("podman/**/userdata/dump.log")
    assert WHY in str(explain(log.read_text()))  # CRIU has asked no script, and the engine only names its log
    podman.assert_goes_on("c", before)
    podman.restore(archive, "--name", "d", check=False)
    assert not podman.is_running("d")
    podman.remove("d")
    assert "with track-mem CRIU refuses every dump and restore" in podman.ocihook("doctor", check=False)
    assert "-track-mem" in podman.ocihook("install", "--refresh", "--dry-run", *LIBEXEC)
    podman.ocihook("install", "--refresh", *LIBEXEC)
    assert "track-mem" not in podman.namespace.path("/etc/criu/runc.conf").read_text()
    before = podman.count("c")
    podman.restore(archive, "--name", "d")
    podman.assert_goes_on("d", saved)
    podman.checkpoint("c", archive)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)
    assert_nothing_is_left(podman, "c", "d")


@NIGHTLY
def test_links_to_earlier_dumps_that_are_none(patient_podman: Podman) -> None:
    """What a dump has left that ended with the node's power is removed, whether or not this one reads memory."""
    podman = patient_podman
    archive = podman.scratch / "c.tar"
    start(podman, READ_MIB)
    before = podman.count("c")
    (container,) = podman.scratch.glob("podman/**/userdata")
    (images := container / "checkpoint").mkdir()
    pid = int(podman("inspect", "--format", "{{.State.Pid}}", "c"))
    all_of_it = make_pagemap([mapping.span for mapping in read_mappings(pid) if mapping.mode == "rw-p"], PAGES_ID)
    for way, made in product(("criu", "direct"), ("whole", "dangling")):
        podman.configure(f'[agent]\nidle_timeout_s = 60\n[policy]\nhost_memory = "{way}"\n')
        make_parent(images, {1: all_of_it})
        if made == "dangling":
            shutil.rmtree(images / PARENT_NAME)
        podman.checkpoint("c", archive, "--leave-running")
        assert (read_bytes(podman) > 0) == (way == "direct")
        assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
        assert_runs_on(podman, before)
        end_agent(podman)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


@pytest.mark.parametrize("where", ["tmpfs", pytest.param("disk", marks=NIGHTLY)])
def test_no_room_in_the_middle_of_the_reading(make_podman: MakePodman, where: str) -> None:
    """CRIU then writes all by itself; if there is no room for that either, the dump is refused."""
    podman = make_podman("runc", size="240m" if where == "tmpfs" else "")
    podman.install()
    track_memory(podman.namespace)
    store = podman.scratch / "store"
    podman.configure(f'[agent]\nidle_timeout_s = 2\nstore_dir = "{store}"\n')
    if where == "disk":
        image = podman.scratch / "disk.img"
        with image.open("wb") as file:
            file.truncate(300 << 20)
        podman.namespace.run("mkfs.ext4", "-q", str(image))
        store.mkdir()
        podman.namespace.run("mount", "-o", "loop", str(image), str(store))
    start(podman, READ_MIB, mode="inline" if where == "tmpfs" else "store")
    before = podman.count("c")
    archives = {fault: podman.scratch / f"c{fault}.tar" for fault in ("filled", "full", "")}
    for fault, archive in archives.items():
        if fault:
            start_agent(podman, FAULTY_AGENT, fault)
        is_refused = fault == "filled" and where == "tmpfs"  # what a store cannot take goes into the engine's archive
        output = podman.checkpoint("c", archive, "--leave-running", check=not is_refused)
        assert archive.exists() != is_refused
        assert not is_refused or "no space was left where CRIU writes" in output
        assert (read_bytes(podman) > 0) == (not fault)
        for filler in podman.namespace.path(str(podman.scratch)).rglob("filler"):
            assert fault == "filled"
            filler.unlink()
        assert_runs_on(podman, before)
        end_agent(podman)
    podman.remove("c")
    if where == "tmpfs":
        podman.namespace.run("mount", "-o", "remount,size=480m", str(podman.scratch / "podman"))
    for archive in filter(Path.exists, archives.values()):
        podman.restore(archive)
        podman.assert_goes_on("c", before)
        podman.remove("c")


def test_processes_that_end_while_they_are_read(patient_podman: Podman) -> None:
    """Nothing runs meanwhile, so none can begin another program; but any can be killed."""
    podman = patient_podman
    archive, later = podman.scratch / "c.tar", podman.scratch / "later.tar"
    start(podman, READ_MIB)
    before = podman.count("c")
    first, child, *_ = descendants(int(podman("inspect", "--format", "{{.State.Pid}}", "c")))
    with held_at(podman, "pre-dump", lambda: podman.checkpoint("c", archive, "--leave-running")):
        freezer = find_freezer(first)
        assert freezer is not None
        assert freezer.is_frozen()
        os.kill(child, signal.SIGKILL)
    assert_runs_on(podman, before, zombies=1)
    end_agent(podman)
    saved = podman.count("c")
    with held_at(podman, "pre-dump", lambda: podman.checkpoint("c", later, "--leave-running", check=False)):
        os.kill(first, signal.SIGKILL)
    wait_for("its end to be seen", lambda: not podman.is_running("c"))
    assert_nothing_is_left(podman)
    assert not later.exists()
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", (0, saved[1]))


class Runc:
    """Restores by hand what podman has checkpointed, beside it."""

    def __init__(self, podman: Podman, bundle: Path) -> None:
        self._podman, self._bundle = podman, bundle

    def _run(self, *words: str) -> str:
        return self._podman.namespace.run("runc", "--root", "/run/by-hand", *words, check=False)

    def restore(self, name: str) -> None:
        """Restore it as another container, or try to."""
        place = self._podman.scratch / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        config = json.loads((self._bundle / "config.json").read_text())
        config["linux"]["cgroupsPath"] = f"/by-hand/{name}"
        (place / "config.json").write_text(json.dumps(config))
        images = ["--image-path", str(self._bundle / "checkpoint"), "--work-path", str(place)]
        words = ["runc", "--root", "/run/by-hand", "restore", "--detach", "--bundle", str(place), *images, name]
        script = f'("$@" </dev/null; echo $? >{place}/status) 2>&1 | cat >{place}/output'
        self._podman.namespace.spawn("sh", "-c", script, "sh", *words, log=place / "log")
        wait_for(f"the restore of {name} to end", lambda: self._content(name, "status") != "")

    def _content(self, name: str, file: str) -> str:
        path = self._podman.scratch / name / file
        return path.read_text() if path.exists() else ""

    def goes_on(self, name: str, total: str) -> bool:
        """Return whether it was restored; if so, it runs with all its memory."""
        if self._content(name, "status").strip() != "0":
            return False

        def counts() -> list[str]:
            return re.findall(r"^count \d+ checksum (\w+)$", self._content(name, "output"), re.MULTILINE)

        wait_for(f"{name} to go on", lambda: len(counts()) > 1)
        assert set(counts()) == {total}
        return True

    def delete(self, name: str) -> None:
        """Remove it, if there is any."""
        self._run("delete", "--force", name)


def test_two_restores_of_one_archive_at_once(patient_podman: Podman) -> None:
    podman = patient_podman
    archive = podman.scratch / "c.tar"
    start(podman, DIRECT_MIB)
    podman.checkpoint("c", archive)
    before = podman.count("c")
    podman.remove("c")
    with meanwhile(partial(podman.restore, archive, "--name", "a")):
        podman.restore(archive, "--name", "b")
    for name in "ab":
        podman.assert_goes_on(name, before)
    assert_nothing_is_left(podman, "a", "b")


@NIGHTLY
def test_two_restores_in_one_directory_at_once(patient_podman: Podman) -> None:
    """Each goes on with all its memory, or does not start; and the images are as they were."""
    podman = patient_podman
    start(podman, DIRECT_MIB)
    podman("container", "checkpoint", "--leave-running", "--keep", "c")
    total = podman.count("c")[1]
    (images,) = podman.scratch.glob("podman/**/userdata/checkpoint")
    names = {path.name for path in images.iterdir()}
    runc = Runc(podman, images.parent)
    for stage in RESTORE_STAGES:
        with held_at(podman, stage, partial(runc.restore, "x")):
            runc.restore("y")
        assert [name for name in "xy" if runc.goes_on(name, total)], stage
        assert {path.name for path in images.iterdir()} == names
        for name in "xy":
            runc.delete(name)
        runc.restore("z")
        assert runc.goes_on("z", total)
        runc.delete("z")
        assert_nothing_is_left(podman, "c")


@NIGHTLY
def test_a_read_only_image_directory_where_memory_is_tracked(patient_podman: Podman) -> None:
    """CRIU makes its link there before it asks any script: that restore is refused, and can be repeated."""
    podman = patient_podman
    podman.start("c", 1, mode="off")
    podman("container", "checkpoint", "--keep", "c")
    before = podman.count("c")
    (images,) = podman.scratch.glob("podman/**/userdata/checkpoint")
    podman.namespace.run("mount", "--bind", str(images), str(images))
    podman.namespace.run("mount", "-o", "remount,bind,ro", str(images))
    podman("container", "restore", "--keep", "c", check=False)
    assert not podman.is_running("c")
    podman.namespace.run("umount", str(images))
    podman("container", "restore", "--keep", "c")
    podman.assert_goes_on("c", before)
    assert_nothing_is_left(podman, "c")
