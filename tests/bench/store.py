"""Times the content store: two versions of the same memory in and out, against borg, restic and zstd; and downtime."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman
from ocihook.checkpoints.complete import complete
from ocihook.checkpoints.rehydrate import rehydrate_stored
from ocihook.checkpoints.stage import choose_place, stage
from ocihook.images.image_set import list_packable
from ocihook.model import ContainerRef
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from tests.fakes.images import make_image_set

_WORKLOAD = Path("integration/workload.c")
_ENVIRONMENT = {"BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes", "RESTIC_PASSWORD": "bench", "HOME": "/tmp"}


class OurStore:
    """A store with one domain; checkpoints of one container go in and come out."""

    def __init__(self, root: Path, workers: int) -> None:
        self._root, self._workers = root, workers
        self._images = root / "images"

    def prepare(self, *memory: Path) -> None:
        """Make an image set of processes with this memory, one each; no part of what is timed."""
        self._root.mkdir(exist_ok=True)
        shutil.rmtree(self._images, ignore_errors=True)
        make_image_set(self._images, dict(enumerate(memory, 1)))

    def put(self) -> None:
        """Take it and complete the checkpoint."""
        store, container = Store(self._root / "store"), ContainerRef(id="c")
        place = choose_place(container, store)
        place.pending.mkdir()
        job = stage(place, list_packable(self._images), container, self._images, store=store, host={}, durable=False)
        assert complete(self.domain, job.id, workers=self._workers)
        shutil.rmtree(self._images)

    @property
    def domain(self) -> Domain:
        """The only one."""
        return Store(self._root / "store").open("_node")

    def get(self, out: Path) -> None:
        """Restore the newest checkpoint's memory, of one process, into `out`."""
        directory = self._root / "out"
        directory.mkdir(exist_ok=True)
        self.get_images(directory)
        (directory / "pages-1.img").rename(out)

    def get_images(self, directory: Path) -> None:
        """Restore the newest checkpoint's images."""
        rehydrate_stored(self.domain, self.domain.checkpoints()[-1], directory, workers=self._workers)

    @property
    def stored_bytes(self) -> int:
        """Of all that is stored, the index too."""
        return tree_bytes(self._root / "store")


class Peer(NamedTuple):
    """A program with a repository: the commands that make it, put a file into it, and get the newest out of it."""

    init: list[str]
    put: list[str]
    get: list[str]


def peers(repository: Path) -> dict[str, Peer]:
    """Return borg with chunks that suit it best here, and restic as it comes; both without encryption where they can.

    borg with buzhash of 64 KiB stored the least of the second version of all that was tried.
    """
    borg, restic = str(repository / "borg"), str(repository / "restic")
    return {
        "borg": Peer(
            ["borg", "init", "-e", "none", borg],
            ["borg", "create", "--compression", "lz4", "--chunker-params", "buzhash,14,20,16,4095", "--files-cache",
             "disabled", f"{borg}::{{name}}", "{file}"],
            ["sh", "-c", f"borg extract --stdout {borg}::{{name}} > {{out}}"],
        ),
        "restic": Peer(
            ["restic", "-q", "init", "-r", restic],
            ["restic", "-q", "-r", restic, "backup", "{file}"],
            ["sh", "-c", f"restic -q -r {restic} dump latest {{file}} > {{out}}"],
        ),
    }  # fmt: skip


class PeerStore:
    """A peer's repository."""

    def __init__(self, peer: Peer, repository: Path) -> None:
        self._peer, self._repository = peer, repository
        self._file = Path()

    def prepare(self, memory: Path) -> None:
        """Make the repository if there is none."""
        if not self._repository.exists():
            self._run(self._peer.init)
        self._file = memory

    def put(self) -> None:
        """Take the file."""
        self._run(self._peer.put)

    def get(self, out: Path) -> None:
        """Restore the newest."""
        self._run(self._peer.get, out)

    def _run(self, command: list[str], out: Path = Path()) -> None:
        values = {"name": self._file.stem, "file": self._file, "out": out}
        words = [re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), word) for word in command]
        subprocess.run(words, check=True, env={**os.environ, **_ENVIRONMENT}, stdout=subprocess.DEVNULL)

    @property
    def stored_bytes(self) -> int:
        """Of the repository."""
        return tree_bytes(self._repository)


class ZstdFiles:
    """What has no repository: each version compressed for itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = Path()

    def prepare(self, memory: Path) -> None:
        """Nothing."""
        self._directory.mkdir(exist_ok=True)
        self._file = memory

    def put(self) -> None:
        """Compress the file."""
        subprocess.run(["zstd", "-1", "-T2", "-qf", self._file, "-o", self._compressed], check=True)

    def get(self, out: Path) -> None:
        """Decompress it."""
        subprocess.run(["zstd", "-d", "-qf", self._compressed, "-o", out], check=True)

    @property
    def _compressed(self) -> Path:
        return self._directory / f"{self._file.stem}.zst"

    @property
    def stored_bytes(self) -> int:
        """Of all versions."""
        return tree_bytes(self._directory)


def tree_bytes(directory: Path) -> int:
    """Return the sizes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


class Downtime(NamedTuple):
    """Milliseconds for which a container left running stood still, and those of them that post-dump took, by mode."""

    memory_bytes: int
    by_mode: dict[str, tuple[int, int]]


def downtimes(dataset: Path, sizes: list[int]) -> list[Downtime]:
    """Checkpoint containers of several sizes, left running: by podman alone, and in modes inline and store."""
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-bench-", dir="/var/tmp"))
    workload = scratch / "workload"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", workload, _WORKLOAD], check=True)
    rows = []
    try:
        for size in sizes:
            memory = scratch / "memory"
            repeat(dataset, memory, size)
            by_mode = {mode: _downtime(scratch / f"{size}-{mode}", workload, memory, mode) for mode in _MODES}
            rows.append(Downtime(size, by_mode))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return rows


_MODES = ("podman", "inline", "store")
_ROUNDS = 3


def repeat(dataset: Path, memory: Path, size: int) -> None:
    """Write a data set again and again, up to a size in bytes."""
    with memory.open("wb") as out:
        while out.tell() < size:
            with dataset.open("rb") as source:
                while out.tell() < size and (data := source.read(min(16 << 20, size - out.tell()))):
                    out.write(data)


def _downtime(scratch: Path, workload: Path, memory: Path, mode: str) -> tuple[int, int]:
    """Return the medians over a few checkpoints of the longest pause and of our part of it, in milliseconds."""
    scratch.mkdir()
    node = Podman(scratch, "runc", workload)
    try:
        if mode != "podman":
            node.install()
            settings = f'[policy]\nmode = "{mode}"\n[agent]\nidle_timeout_s = 2\nstore_dir = "{scratch}/podman/store"\n'
            node.configure(settings)
        volume = f"--volume={memory}:/memory:ro"
        command = ["run", "--detach", "--name", "c", "--network", "host", "--pids-limit", "0", volume]
        node(*command, IMAGE, "/workload", "beat", "/memory")
        wait_for("the container to run", lambda: "gap" in node("logs", "c"))
        gaps, parts = [], []
        for _ in range(_ROUNDS):
            before = node("logs", "c").count("gap")
            node.checkpoint("c", scratch / "c.tar", "--leave-running")
            found = [int(gap) for gap in re.findall(r"gap (\d+) ms", node("logs", "c"))[before:]]
            gaps.append(max(found))
            if mode == "podman":
                parts.append(0)
            else:
                stage = last_session(node.namespace, "post-dump")["stages"]["post-dump"]
                parts.append(int(1000 * stage["seconds"]))
            if mode == "store":
                node.ocihook("wait")
        return sorted(gaps)[_ROUNDS // 2], sorted(parts)[_ROUNDS // 2]
    finally:
        node.close()
        shutil.rmtree(scratch, ignore_errors=True)
