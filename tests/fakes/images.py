"""Image sets and archives as CRIU and the engines make them, small: real messages, real framing, made-up memory."""

import contextlib
import json
import random
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ocihook.criu.images import PAGE_BYTES
from ocihook.criu.proto import message_class
from ocihook.packs.runs import PageRuns
from ocihook.packs.unpacking import Packs
from ocihook.store.assemble import StoredPart
from ocihook.store.extents import Extents, Layout
from ocihook.store.pack_directory import PackDirectory, StoredPacks

_PRESENT = 4
_MAGICS = {
    "mm": struct.pack("<II", 0x54564319, 0x57492820),
    "pagemap": struct.pack("<II", 0x54564319, 0x56084025),
    "core": struct.pack("<II", 0x54564319, 0x55053847),
    "inventory": struct.pack("<I", 0x58313116),
    "pstree": struct.pack("<II", 0x54564319, 0x50273030),
    "stats": struct.pack("<II", 0x55105940, 0x57093306),
}


def _message(kind: str, **fields: Any) -> bytes:
    data: bytes = message_class(kind)(**fields).SerializeToString()
    return struct.pack("<I", len(data)) + data


def read_pages(packs: Packs, image_name: str) -> Iterator[bytes]:
    """Yield the content of a packed image from its start, in pieces."""
    yield from _pieces(packs.parts[image_name])


def read_stored(extents: Extents, layout: Layout, packs: PackDirectory) -> Iterator[bytes]:
    """Yield the content of a stored image from its start, in pieces."""
    with contextlib.closing(StoredPart(extents, layout, StoredPacks(packs, layout.packs))) as part:
        yield from _pieces(part)


def _pieces(image: PageRuns) -> Iterator[bytes]:
    for pages, contents in image.runs(0, image.size_bytes):
        yield b"".join(contents) if contents else bytes(pages * PAGE_BYTES)


def mixed_pages(count: int, seed: int = 1) -> bytes:
    """Return pages of which some are zero, some compress, and some do not."""
    chooser = random.Random(seed)
    pages: list[bytes] = []
    while len(pages) < count:
        run = chooser.randint(1, 40)
        kind = chooser.randint(0, 2)
        for _ in range(run):
            pages.append((bytes(PAGE_BYTES), chooser.randbytes(PAGE_BYTES), bytes([len(pages) % 7]) * PAGE_BYTES)[kind])
    return b"".join(pages[:count])


def make_image_set(directory: Path, memory: Mapping[int, bytes | Path]) -> None:
    """Write an image set of processes with this memory, which is mapped in two runs with a hole between.

    Args:
        directory: new or empty.
        memory: whole pages by pid, or a file of them, which is linked.
    """
    directory.mkdir(exist_ok=True)
    processes = b"".join(_message("pstree_entry", pid=pid, ppid=0, pgid=pid, sid=pid, threads=[pid]) for pid in memory)
    (directory / "pstree.img").write_bytes(_MAGICS["pstree"] + processes)
    (directory / "inventory.img").write_bytes(_MAGICS["inventory"] + _message("inventory_entry", img_version=1))
    (directory / "descriptors.json").write_text("[]")
    for pages_id, (pid, content) in enumerate(memory.items(), 1):
        pages = (content.stat().st_size if isinstance(content, Path) else len(content)) // PAGE_BYTES
        first = pages // 3
        runs = [(0x10000000, first), (0x20000000, pages - first)]
        entries = [
            _message("pagemap_entry", vaddr=vaddr, compat_nr_pages=count, nr_pages=count, flags=_PRESENT)
            for vaddr, count in runs
            if count
        ]
        head = _message("pagemap_head", pages_id=pages_id)
        (directory / f"pagemap-{pid}.img").write_bytes(_MAGICS["pagemap"] + head + b"".join(entries))
        image = directory / f"pages-{pages_id}.img"
        if isinstance(content, Path):
            image.hardlink_to(content)
        else:
            image.write_bytes(content)
        (directory / f"core-{pid}.img").write_bytes(_MAGICS["core"] + _message("core_entry"))


def make_address_space(directory: Path, pid: int, areas: Sequence[tuple[int, int]]) -> None:
    """Write what a process had mapped."""
    plain = {"prot": 3, "flags": 0x22, "status": 1 | 1 << 9}
    vmas = [message_class("vma_entry")(start=low, end=end, pgoff=0, shmid=0, fd=-1, **plain) for low, end in areas]
    numbers = ["start_code", "end_code", "start_data", "end_data", "start_stack", "start_brk", "brk"]
    numbers += ["arg_start", "arg_end", "env_start", "env_end"]
    mm = _message("mm_entry", **{f"mm_{name}": 0 for name in numbers}, exe_file_id=1, vmas=vmas)
    (directory / f"mm-{pid}.img").write_bytes(_MAGICS["mm"] + mm)


def stats_dump(frozen_us: int) -> bytes:
    """Return a stats-dump."""
    required = dict.fromkeys(("pages_scanned", "pages_skipped_parent", "pages_written", "pages_lazy"), 0)
    times = {"freezing_time": 1, "frozen_time": frozen_us, "memdump_time": 3, "memwrite_time": 4}
    return _MAGICS["stats"] + _message("stats_entry", dump={**times, **required})


def make_archive(
    path: Path, image_set: Path, engine: str = "podman", *, extra: Mapping[str, bytes] | None = None
) -> None:
    """Write the archive that an engine would make of an image set."""
    annotations = {
        "podman": {"io.container.manager": "libpod"},
        "containerd": {
            "io.kubernetes.cri.container-name": "c1",
            "io.kubernetes.cri.sandbox-name": "p1",
            "io.kubernetes.cri.sandbox-namespace": "default",
        },
        "cri-o": {
            "io.kubernetes.container.name": "c1",
            "io.kubernetes.pod.name": "p1",
            "io.kubernetes.pod.namespace": "default",
            "io.kubernetes.cri-o.Annotations": "{}",
        },
    }[engine]
    config = {"id": "ab" * 32, "name": "c1", "rootfsImageName": "example.org/train:1", "runtime": "runc"}
    documents = {
        "config.dump": json.dumps(config).encode(),
        "spec.dump": json.dumps({"annotations": annotations}).encode(),
        "stats-dump": stats_dump(250_000),
        **({"status.dump": b"{}"} if engine == "containerd" else {}),
        **({"bind.mounts": b"[]"} if engine == "cri-o" else {}),
        **(extra or {}),
    }
    with tarfile.open(path, "w") as tar:
        for name, data in documents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))
        tar.add(image_set, "checkpoint", recursive=False)
        for file in sorted(image_set.iterdir()):
            tar.add(file, f"checkpoint/{file.name}")
