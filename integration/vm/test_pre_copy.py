"""Memory that is read while its process runs, on a kernel with soft-dirty bits that outlive the merging of mappings."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.vm.machine import HISTORY, OCIHOOK, WAIT_S, Machine

pytestmark = pytest.mark.skipif("OCIHOOK_VM_ROOT" not in os.environ, reason="minutes of emulation: `make vm`")
STILL_BYTES = 56 << 20  # of moves.c

# What the kernel marks: a page that is written to; new mappings, merged ones too; all that another program maps.
FACTS = """
import ctypes, mmap, os, subprocess, sys
from ocihook.linux import page_moves, soft_dirty
from ocihook.linux.memory import Span, subtract
from ocihook.linux.page_scan import scan_dirty, scan_private

PAGE, SIZE, BASE = 4096, 1 << 20, 0x200000000000
libc = ctypes.CDLL(None, use_errno=True)
place = [ctypes.c_void_p, ctypes.c_size_t]
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [*place, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes, libc.mprotect.argtypes = place, [*place, ctypes.c_int]

def new(start, size):
    assert libc.mmap(start, size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0) == start
    ctypes.memset(start, 1, size)

def dirty(span):
    clean = subtract([span], scan_dirty(os.getpid()))
    return span.size_bytes - sum(one.size_bytes for one in clean)

assert soft_dirty.measure() and soft_dirty.outlive_merging() and page_moves.works()
whole, middle = Span(BASE, BASE + 3 * SIZE), Span(BASE + SIZE, BASE + 2 * SIZE)
new(whole.start, whole.size_bytes)
assert dirty(whole) == whole.size_bytes
soft_dirty.clear(os.getpid())
assert dirty(whole) == 0
ctypes.memset(BASE + 5 * PAGE, 2, 1)
assert PAGE <= dirty(whole) < whole.size_bytes
soft_dirty.clear(os.getpid())
libc.munmap(middle.start, SIZE)
new(middle.start, SIZE)
assert dirty(middle) == SIZE
soft_dirty.clear(os.getpid())
libc.munmap(middle.start, SIZE)
assert libc.mmap(middle.start, SIZE, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0) == middle.start
libc.mprotect(middle.start, SIZE, 3)
ctypes.memset(middle.start, 3, SIZE)
assert dirty(middle) == SIZE, "merged by mprotect"

with subprocess.Popen(["sh", "-c", "read line; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    while b"read line" not in open(f"/proc/{child.pid}/cmdline", "rb").read():
        pass
    soft_dirty.clear(child.pid)
    child.stdin.write(b"\\nword\\n")
    child.stdin.flush()
    child.stdout.read1()
    clean = subtract(scan_private(child.pid), scan_dirty(child.pid))
    assert not clean, clean
    child.stdin.close()
print("as expected")
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    directory = Path(tempfile.mkdtemp(prefix="ocihook-vm-"))
    started = Machine(Path(os.environ["OCIHOOK_VM_ROOT"]) / "newer", directory)
    yield started
    started.close()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The program that containers run."""
    binary = tmp_path_factory.mktemp("moves") / "moves"
    source = Path(__file__).parent / "moves.c"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", binary, source], check=True, timeout=120)
    return binary.read_bytes()


def config_of(directory: Path, *words: str) -> bytes:
    """Return a config.json of a container that is pre-copied, in the node's own network."""
    subprocess.run(["runc", "spec", "--bundle", directory], check=True, timeout=60)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.unlink()
    config["process"] |= {"args": ["/moves", *words], "terminal": False}
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
    config["linux"]["cgroupsPath"] = "/" + "-".join(("job", *words))
    config["annotations"] = {"ocihook.io/pre-copy": "true"}
    return json.dumps(config).encode()


def test_what_this_kernel_marks(machine: Machine) -> None:
    program = machine.put("facts.py", FACTS.encode())
    assert machine.run(f"{sys.executable} {program}").strip() == "as expected"


def test_a_process_that_changes_its_mappings_meanwhile(machine: Machine, moves: bytes, tmp_path: Path) -> None:
    program = machine.put("moves", moves)
    machine.run(f"{OCIHOOK} install --track-memory; mkdir -p /tmp/b/rootfs/proc; cp {program} /tmp/b/rootfs/moves")
    machine.start_agent()
    for words in ((), ("mremap",)):
        _dump_and_restore(machine, tmp_path, *words)


def _dump_and_restore(machine: Machine, directory: Path, *words: str) -> None:
    name = "-".join(("job", *words))
    config = machine.put("config.json", config_of(directory, *words))
    machine.run(f"cp {config} /tmp/b/config.json; rm -rf {HISTORY}/*.json")
    machine.run(f"cd /tmp/b; (runc run --detach {name} </dev/null 2>&1 | cat >/tmp/{name}) &")
    wait_for("the program to count", lambda: len(machine.counts(name)) > 1, WAIT_S)
    images = f"--image-path /tmp/{name}-images --work-path /tmp/{name}-log"
    done = machine.run(f"runc checkpoint {images} {name} && echo done", check=False)
    said = machine.run(f"tail -n 30 /tmp/{name}-log/dump.log", check=False) + machine.agent_log()
    assert "done" in done.split(), said
    before = machine.counts(name)
    wait_for(
        "the session to be over", lambda: machine.run(f"cat {HISTORY}/*.json", check=False).startswith("{"), WAIT_S
    )
    phases = {one["name"]: one["bytes"] for one in json.loads(machine.run(f"cat {HISTORY}/*.json"))["phases"]}
    assert phases["pre-copy"] > STILL_BYTES, said
    if words:
        assert phases["memory read"] > STILL_BYTES, said
        assert "has moved memory meanwhile" in said
    else:
        assert phases["memory read"] < phases["pre-copy"] - STILL_BYTES + (8 << 20), said

    machine.run(f"cd /tmp/b; (runc restore --detach {images} {name} </dev/null 2>&1 | cat >/tmp/{name}-again) &")
    wait_for("it to count on", lambda: len(machine.counts(f"{name}-again")) > 1, WAIT_S)
    after = machine.counts(f"{name}-again")
    assert after[0][0] == before[-1][0] + 1
    assert {word for _, word in before + after} == {"right"}
    machine.run(f"runc delete --force {name}")
