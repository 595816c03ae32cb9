"""What cannot come back from a checkpoint is refused with the reason and the remedy; what can, is not."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ocihook.config import Policy, Settings
from ocihook.errors import PreflightError
from ocihook.gpu import preflight
from ocihook.gpu import restore as gpu_restore
from ocihook.gpu import signs as signs_module
from ocihook.gpu.nvml import Gpu
from ocihook.gpu.preflight import Situation, driver_major, memory_refusals, refusals, restore_refusals
from ocihook.gpu.signs import Signs, count_device_files, read_signs
from ocihook.linux.mounts import is_in_memory
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Restore

PROBED = Path(__file__).parents[2] / "integration/gpu/results/probes-580.json"
RECORDED = Path(__file__).parents[2] / "integration/gpu/results/driver-limits-580.json"
GIB = 1 << 30
SURVIVING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
GPU = Gpu(uuid="GPU-a", name="H200", minor=0, total_bytes=140 * GIB, free_bytes=100 * GIB, held_bytes={7: 40 * GIB})
PROCESS = Signs(pid=7, has_driver=True, device_files=38, gpu_minors=frozenset({0}))
FINE = Situation(
    init_pid=7,
    driver_version="580.159.04",
    machine="x86_64",
    processes=(PROCESS,),
    cuda_pids=frozenset({7}),
    gpus=(GPU,),
    available_ram_bytes=41 * GIB,
    cgroup_room_bytes=None,
    packs_dir=Path("/packs"),
    free_disk_bytes=41 * GIB,
)


def with_process(**changes: Any) -> dict[str, Any]:
    return {"processes": (dataclasses.replace(PROCESS, **changes),)}


def test_nothing_is_refused_without_a_reason() -> None:
    assert refusals(FINE) == []
    assert refusals(dataclasses.replace(FINE, free_disk_bytes=None, cgroup_room_bytes=40 * GIB)) == []
    assert refusals(dataclasses.replace(FINE, packs_in_memory=True, available_ram_bytes=80 * GIB)) == []


@pytest.mark.parametrize(
    ("ram", "room", "reasons"),
    [
        (41 * GIB, None, []),
        (41 * GIB, 40 * GIB, []),
        (39 * GIB, None, [r"a restore copies 40.0 GiB .* has 39.0 GiB left: free memory on the node"]),
        (41 * GIB, GIB, [r"limit leaves 1.0 GiB; .*: raise the container's memory limit"]),
        (GIB, GIB, ["on the node", "memory limit"]),
    ],
)
def test_a_restore_needs_memory(ram: int, room: int | None, reasons: list[str]) -> None:
    found = restore_refusals(40 * GIB, ram, room)
    assert len(found) == len(reasons)
    assert all(re.search(reason, line) for reason, line in zip(reasons, found, strict=True))


def test_a_restore_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process.find(os.getpid())
    assert process is not None
    restore = Restore(
        journal=Journal.create(tmp_path, process),
        patience=Patience(),
        criu_pid=process.pid,
        init_pid=0,
        image_dir="",
        directory=tmp_path,
        settings=Settings(),
    )
    monkeypatch.setattr(gpu_restore, "available_bytes", lambda: GIB)
    gpu_restore.check_memory(restore, GIB)
    with pytest.raises(PreflightError, match="free memory on the node"):
        gpu_restore.check_memory(restore, 1 << 50)
    restore.journal.note(CallFacts(policy=Policy(preflight="warn")))
    gpu_restore.check_memory(restore, 1 << 50)
    assert "free memory on the node" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"driver_version": "565.57.01"}, "driver 565.57.01 cannot checkpoint: install 570 or later"),
        ({"driver_version": "unknown"}, "driver unknown cannot checkpoint"),
        ({"plugin": Path("/x/cuda_plugin.so")}, "CRIU would load /x/cuda_plugin.so.*: `ocihook install`"),
        ({"machine": "aarch64"}, "on Arm: install 610 or later"),
        ({"available_ram_bytes": 39 * GIB}, r"copies 40.0 GiB .* has 39.0 GiB left: free memory on the node"),
        ({"cgroup_room_bytes": 39 * GIB}, r"the kernel would kill it: raise the container's memory limit"),
        ({"free_disk_bytes": 39 * GIB}, r"has 39.0 GiB free: free space there"),
        (
            {"packs_in_memory": True, "available_ram_bytes": 79 * GIB},
            "has 79.0 GiB left, and packs may take as much again .* tmpfs: free memory",
        ),
        ({"packs_in_memory": True, "available_ram_bytes": 39 * GIB}, r"has 39.0 GiB left: free memory on the node"),
        (with_process(has_mig=True), "process 7 uses a MIG instance"),
        ({"gpus": (dataclasses.replace(GPU, mig=True),)}, "process 7 uses a MIG instance"),
        ({"gpus": (dataclasses.replace(GPU, mps_pids=frozenset({7})),)}, "process 7 is a client of MPS"),
        (with_process(environment={"CUDA_MPS_PIPE_DIRECTORY": "/x"}), "process 7 is a client of MPS"),
        ({"cuda_pids": frozenset()}, "process 7 holds 38 of NVIDIA's device files without a CUDA context"),
        (
            with_process(has_io_uring=True),
            "process 7 uses io_uring.*: keep it away by a seccomp filter .podman's default",
        ),
        (with_process(has_ipc=True), "process 7 shares GPU memory .* by CUDA IPC.* install driver 610"),
        (with_process(has_managed_memory=True), "process 7 has managed memory .*: have it allocated on the GPU"),
        (with_process(has_nccl=True), "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 NCCL_NVLS_EN"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    (found,) = refusals(dataclasses.replace(FINE, **changes))
    assert re.search(reason, found)


def test_what_is_held_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is no longer a reason to refuse, more is one; only room is checked again."""
    monkeypatch.setattr(preflight, "available_bytes", lambda: 50 * GIB)
    monkeypatch.setattr(preflight, "memory_headroom_bytes", lambda pid: 55 * GIB if pid == os.getpid() else None)
    situation = dataclasses.replace(FINE, packs_dir=tmp_path, driver_version="none", init_pid=os.getpid())

    def again(held_bytes: int) -> Situation:
        gpu = dataclasses.replace(GPU, held_bytes={7: held_bytes})
        monkeypatch.setattr(preflight, "read_node", lambda _: ("580", [gpu]))
        found = situation.read_again(Patience())
        assert found.free_disk_bytes not in (None, FINE.free_disk_bytes)
        return dataclasses.replace(found, free_disk_bytes=80 * GIB)

    less, more = again(GIB), again(60 * GIB)
    assert (less.held_bytes, more.held_bytes) == (GIB, 60 * GIB)
    assert memory_refusals(less) == []
    assert len(refusals(less)) == 1
    assert ["node's, which" in memory_refusals(more)[0], "container's" in memory_refusals(more)[1]] == [True, True]


def test_where_packs_go_may_be_memory(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert not is_in_memory(Path("/proc"))
    with pytest.raises(FileNotFoundError):
        is_in_memory(tmp_path / "none")


def test_nccl_that_survives_is_not_refused() -> None:
    assert refusals(dataclasses.replace(FINE, **with_process(has_nccl=True, environment=SURVIVING))) == []


@pytest.mark.parametrize("variable", sorted(SURVIVING))
def test_each_transport_that_does_not_survive_is_named(variable: str) -> None:
    environment = {name: value for name, value in SURVIVING.items() if name != variable}
    (found,) = refusals(dataclasses.replace(FINE, **with_process(has_nccl=True, environment=environment)))
    assert found.endswith(f"start the container with {variable}={SURVIVING[variable]}")


def test_it_agrees_with_what_was_seen_on_a_real_node() -> None:
    """Every recorded NCCL transport whose restore failed is refused for that; those that continued are not."""
    cases = json.loads(RECORDED.read_text())["cases"]
    verdicts = {}
    for name, case in cases.items():
        if not name.startswith("nccl") or "at rest" in name:
            continue
        environment = dict(variable.split("=", 1) for variable in case["signs"][0]["environment"])
        assert any("nccl-socket" in socket_name for socket_name in case["unix sockets"])
        reasons = refusals(dataclasses.replace(FINE, **with_process(has_nccl=True, environment=environment)))
        refused = any("its restore fail" in reason for reason in reasons)
        verdicts[name] = (refused, case["goes on"] == [True, True])
    assert len(verdicts) == 5
    assert all(refused != went_on for refused, went_on in verdicts.values()), verdicts
    assert any(refused for refused, _ in verdicts.values())
    assert not all(refused for refused, _ in verdicts.values())


def test_ipc_is_refused_until_the_driver_restores_it() -> None:
    """As recorded: nobody's order brings the importer back, and where events are shared, too, both map one file."""
    cases = json.loads(RECORDED.read_text())["cases"]
    for name in ("ipc, at once", "ipc, exporter first", "ipc, importer first"):
        assert any("restore: " in answer and "INVALID_VALUE" in answer for answer in cases[name]["answers"])
        assert cases[name]["mappings gone, come"] == [[[], []], [[], []]], "memory alone shows, after all"
    for signs in cases["torch ipc"]["signs"]:
        assert any(re.fullmatch("rw-s /dev/shm/cuda.shm.[0-9a-f.]+", mapped) for mapped in signs["mapped"])
    assert refusals(dataclasses.replace(FINE, driver_version="610.1", **with_process(has_ipc=True))) == []


def test_managed_memory_is_told_from_what_the_driver_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorded: whatever has managed memory cannot be checkpointed; torch, pools, VMM and pinned memory can."""
    cases = {name: case for name, case in json.loads(PROBED.read_text())["cases"].items() if name.startswith("maps: ")}
    read_text = Path.read_text
    verdicts = {}
    for name, case in cases.items():
        libcuda = "7f0000000000-7f0000001000 r-xp 0 08:01 9 /usr/lib/libcuda.so.580.159.04\n"
        lines = re.sub(r"(?m)^(\S+) (\S+) \S+ offset (\S+) (\S+)$", r"\1 \2 \3 00:05 449   \4", "\n".join(case["uvm"]))
        maps = f"{libcuda}{lines}\n"
        monkeypatch.setattr(
            Path, "read_text", lambda path, maps=maps, **how: maps if path.name == "maps" else read_text(path, **how)
        )
        could = any("checkpoint: CUDA_SUCCESS" in answer for answer in case["answers"])
        verdicts[name] = (read_signs(os.getpid()).has_managed_memory, could)
    assert len(verdicts) == 16
    assert all(managed != could for managed, could in verdicts.values()), verdicts
    assert verdicts["maps: torch"] == (False, True)
    assert verdicts["maps: managed variable of a module"] == (True, False)


def test_driver_major() -> None:
    assert [driver_major(version) for version in ("580.159.04", "610", "", "x.y")] == [580, 610, 0, 0]


def test_a_process_without_cuda_shows_nothing() -> None:
    assert read_signs(os.getpid()) == Signs(pid=os.getpid())
    assert read_signs(1 << 22) == Signs(pid=1 << 22)
    assert count_device_files(os.getpid()) == 0


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file that is mapped under the name of the driver's library."""
    path = tmp_path / "libcuda.so.580.159.04"
    path.write_bytes(bytes(4096))
    return path


def test_signs_of_a_real_process(library: Path, tmp_path: Path) -> None:
    """A child maps libcuda and IPC's events, holds an NCCL socket and an io_uring; another mapping does not count."""
    program = """
import ctypes, mmap, os, socket, sys
name = sys.argv[1]
area = mmap.mmap(os.open(name, os.O_RDONLY), 4096, prot=mmap.PROT_READ)
events = f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"
fd = os.open(events, os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.ftruncate(fd, 81920)
shared = mmap.mmap(fd, 81920)
os.unlink(events)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sock.bind("\\0tmp/nccl-socket-0-" + str(os.getpid()))
ring = ctypes.CDLL(None).syscall(425, 4, (ctypes.c_char * 120)())
print("ready", ring >= 0, flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0", "OTHER": "x"}
    for name, has_driver in ((library, True), (tmp_path / "libcudart.so.13", False)):
        name.write_bytes(bytes(4096))
        with subprocess.Popen(
            [sys.executable, "-c", program, name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            has_ring = process.stdout.readline() == "ready True\n"
            signs = read_signs(process.pid)
            process.communicate("")
        assert signs.has_driver is has_driver
        if has_driver:
            assert signs.has_nccl
            assert signs.has_io_uring is has_ring
            assert signs.has_ipc
            assert {"NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"}.items() <= signs.environment.items()
            assert "OTHER" not in signs.environment
        else:
            assert signs == Signs(pid=signs.pid)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A process with a root of its own, and that root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: chroot")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", "import os, sys; os.chroot(sys.argv[1]); print('ready', flush=True); input()", root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid, root
        process.communicate("\n")


def test_configuration_of_nccl_is_read_where_the_container_has_it(inside: tuple[int, Path]) -> None:
    pid, root = inside
    (root / "etc/nccl.conf").write_text("NCCL_P2P_DISABLE=1\nOTHER=1\n")
    assert signs_module._environment(pid)["NCCL_P2P_DISABLE"] == "1"


@pytest.mark.parametrize("link", ["etc", "etc/nccl.conf", "root"])
def test_a_link_of_the_container_does_not_lead_to_the_nodes_files(inside: tuple[int, Path], link: str) -> None:
    pid, root = inside
    nodes = root.parent / "nodes"
    nodes.mkdir()
    for name in ("nccl.conf", ".nccl.conf"):
        (nodes / name).write_text("NCCL_OF_THE_NODE=1\n")
    if link == "etc":
        (root / "etc").rmdir()
    (root / link).symlink_to(nodes / "nccl.conf" if link.endswith("conf") else nodes)
    assert "NCCL_OF_THE_NODE" not in signs_module._environment(pid)


def test_device_files_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/null",
        "/tmp/nvidia0",
    ]
    monkeypatch.setattr(signs_module, "_links", lambda _pid: [(str(n), link) for n, link in enumerate(links)])
    monkeypatch.setattr(signs_module, "_minor", lambda _pid, fd: {"0": 4, "3": 1}.get(fd, -1))
    found = read_signs(os.getpid())
    assert (found.device_files, found.gpu_minors, found.has_mig) == (4, frozenset({4}), False)
    monkeypatch.setattr(signs_module, "_minor", lambda _pid, fd: {"0": 4, "3": 12}.get(fd, -1))
    assert read_signs(os.getpid()).has_mig


def test_somebody_elses_nccl_socket_does_not_count(library: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0tmp/nccl-socket-1-{os.getpid()}")
        assert str(os.fstat(other.fileno()).st_ino) in signs_module._nccl_sockets(os.getpid())
        pid = os.fork()
        if pid == 0:
            os.closerange(3, 1000)
            import mmap

            mmap.mmap(os.open(library, os.O_RDONLY), 4096, prot=mmap.PROT_READ)
            os._exit(0 if not read_signs(os.getpid()).has_nccl else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
