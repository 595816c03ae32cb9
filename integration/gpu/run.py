"""Checkpoints and restores GPU containers on a real node, under stock runc and CRIU, and prints what it took.

    run.py RESULTS_DIR CASE...     on a GPU node, as root, with torch and driver >= 570; no network needed

Before, on a machine with network: `integration/node-setup forky DIR; integration/gpu/carry DIR 3.12` fills .gpu-node/.
A case is PROGRAM:SIZE with options behind it, each after a colon: `criu` (all memory goes through CRIU: the baseline),
`always` (huge pages for everybody; else for those who ask), `never` (for nobody, which is what the driver gets where it
would have to ask), `driver` (its own calls and nothing else: what its part takes without ocihook), `running` (left
running), `gpus=N`, `swap` (restored with the first two GPUs changed for one another), `onto=N` (restored with the GPU
of that minor), `warm=GIB` (memory of the machine to touch before), `store=N` (mode `store`: N checkpoints of a
container left running, 15 rounds apart, and a restore of the last; with `ram=GIB` GPU memory may wait in so much
memory, else on the disk), `disk` (images go to a disk, inline; `ram` likewise), `plugin` (CRIU's own CUDA plugin is
installed as well; `plugin=both`: and made to act although ocihook does; `plugin=alone`: without ocihook). One JSON
object a case is written, and a table printed.

    run.py results hold:1 hold:16:criu hold:16 hold:16:always:running train:400 nccl:1:gpus=2 hold:4:gpus=2:swap \\
        lora:8:store=5 lora:8:store=5:ram=24
"""

import contextlib
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))
CARRIED = PROJECT / ".gpu-node"
WORK = Path("/tmp/ocihook-gpu")
IMAGES = WORK / "images"
CRIU_CONF = Path("/etc/criu/runc.conf")
PLUGIN_DIR = Path("/usr/lib/criu")  # where this CRIU looks if nothing else is said
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SESSIONS = Path("/run/ocihook")
HISTORY = Path("/var/lib/ocihook/history")
COMMAND_TIMEOUT_S = 300
_MADV_POPULATE_WRITE = 23
NCCL = {
    "NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "USE_LIBUV": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip


def command(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401 - subprocess.run's
    return subprocess.run([str(word) for word in words], text=True, timeout=COMMAND_TIMEOUT_S, check=False, **options)


def set_up(*install_options: str, has_networks: bool = False) -> None:
    """Install what was carried, the driver's library path, and ocihook.

    Args:
        install_options: of `ocihook install`.
        has_networks: whether containers have networks of their own; else their connections are on loopback.
    """
    wheels = CARRIED / "wheels"
    if wheels.exists():
        command(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", wheels,
                *(path.name.split("-")[0].replace("_", "-") for path in wheels.iterdir()))  # fmt: skip
    for program in ("criu", "runc", "ip"):
        if (CARRIED / "bin" / program).exists():
            link = Path("/usr/sbin") / program
            link.unlink(missing_ok=True)
            link.symlink_to(CARRIED / "bin" / program)
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    Path("/etc/ld.so.conf.d/000-ocihook-gpu.conf").write_text("".join(f"{path}\n" for path in paths if path))
    Path("/etc/ld.so.conf.d/zz-ocihook-carried.conf").write_text(f"{CARRIED / 'lib'}\n")
    command("ldconfig", stderr=subprocess.DEVNULL)
    # These containers have no network of their own: those of NCCL's connections that end would keep its ports.
    Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").write_text("0")
    command("umount", IMAGES, stderr=subprocess.DEVNULL)  # of an earlier run
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(HISTORY, ignore_errors=True)  # its containers had the same names
    IMAGES.mkdir(parents=True)
    command("mount", "-t", "tmpfs", "-o", "size=90%,huge=always", "tmpfs", IMAGES)
    Path("/etc/criu").mkdir(exist_ok=True)
    install(*install_options)
    with CRIU_CONF.open("a") as file:
        if not has_networks:
            file.write("network-lock skip\n")  # both ends of each connection are in the container
        file.write("ghost-limit 512M\n")  # NCCL keeps deleted files of 33 MiB in /dev/shm
    Path("/etc/ocihook").mkdir(exist_ok=True)
    configure()


@contextlib.contextmanager
def plugged(how: str) -> Iterator[None]:
    """Have CRIU's CUDA plugin on this node: "installed", "both", "alone"; or not: ""."""
    if not how:
        yield
        return
    before = {path: path.read_text() for path in CRIU_CONF.parent.glob("*.conf")}
    links = {
        PLUGIN_DIR / "cuda_plugin.so": CARRIED / "lib/criu/cuda_plugin.so",
        Path("/usr/sbin/cuda-checkpoint"): CARRIED / "bin/cuda-checkpoint",
    }
    try:
        for link, carried in links.items():
            assert carried.exists(), f"{carried} was not carried"
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(carried)
        if how == "installed":
            install()
        elif how == "both":
            CRIU_CONF.write_text(f"{before[CRIU_CONF]}libdir {PLUGIN_DIR}\n")
        else:
            for path, text in before.items():
                path.write_text(text.partition("# END ocihook\n")[2] + f"timeout {COMMAND_TIMEOUT_S}\n")
        yield
    finally:
        for link in links:
            link.unlink(missing_ok=True)
        for path, text in before.items():
            path.write_text(text)


def install(*options: str) -> None:
    words: list[str | Path] = [sys.executable, "-m", "ocihook", "install", "--libexec", WORK / "libexec", *options]
    installed = command(*words, cwd=PROJECT)
    assert installed.returncode == 0


def configure(room_gib: int = 0, **policy: str) -> None:
    """Write ocihook's configuration, with so much memory for GPU memory on its way into the store, and a policy."""
    bound = (((os.cpu_count() or 1) * 32 + 64) << 20) + (room_gib << 30)  # a worker a core
    lines = ["[agent]", f"memory_bound_bytes = {bound}", f'store_dir = "{WORK}/store"', "[policy]"]
    lines += [f'{key} = "{text}"' for key, text in policy.items()]
    Path("/etc/ocihook/config.toml").write_text("\n".join([*lines, ""]))


def warm(gib: int) -> None:
    """Touch memory once: a virtual machine gets it from its host only then, which is no part of a checkpoint."""
    cores = os.cpu_count() or 1
    release, hold = os.pipe()
    children = []
    for _ in range(cores):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(hold)
            memory = mmap.mmap(-1, (gib << 30) // cores, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(_MADV_POPULATE_WRITE)
            os.close(writer)
            os.read(release, 1)  # until all of it is there
            os._exit(0)
        os.close(writer)
        children.append(reader)
    for reader in children:
        os.read(reader, 1)
        os.close(reader)
    os.close(hold)
    os.close(release)
    for _ in children:
        os.wait()


class Container:
    """A program under runc, whose output is read as it comes."""

    def __init__(
        self, name: str, program: list[str], gpus: list[int], annotations: dict[str, str], network: str = ""
    ) -> None:
        """Make the bundle.

        Args:
            name: of the container.
            program: that runs in it.
            gpus: that it has, by their minors.
            annotations: of ocihook, without prefix.
            network: the network namespace that it is in, by name (ip-netns(8)); "": the node's own.
        """
        self.name, self.network, self.annotations = name, network, annotations
        self.lines: list[tuple[float, int, str]] = []
        self.output: list[str] = []
        self.bundle = WORK / name
        self._program = program
        shutil.rmtree(self.bundle, ignore_errors=True)
        (self.bundle / "rootfs").mkdir(parents=True)
        command("runc", "spec", cwd=self.bundle)
        self.configure(gpus)
        self._reader, self._writer = os.pipe()
        threading.Thread(target=self._read, daemon=True).start()

    def configure(self, gpus: list[int]) -> None:
        """Write config.json with these GPUs (their minors)."""
        path = self.bundle / "config.json"
        config = json.loads(path.read_text())
        config["root"]["readonly"] = False
        process = config["process"]
        process["terminal"] = False
        process["cwd"] = "/tmp"
        process["args"] = self._program
        kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
        own = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"} if self.network else {}
        process["env"] = [f"{key}={value}" for key, value in {**kept, **NCCL, **own, "HOME": "/root",
                          "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1"}.items()]  # fmt: skip
        config["annotations"] = {f"ocihook.io/{key}": value for key, value in self.annotations.items()}
        config["mounts"] = [
            m for m in config["mounts"] if m["destination"] in ("/proc", "/dev", "/dev/pts", "/dev/shm")
        ]
        for mount in config["mounts"]:
            if mount["destination"] == "/dev/shm":  # NCCL's bootstrap takes more than the default, 64 MiB
                mount["options"] = ["nosuid", "noexec", "nodev", "mode=1777", "size=8g"]
        shared = ("/usr", "/opt", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/usr/local/nvidia", "/tmp", str(PROJECT))
        config["mounts"] += [
            {"destination": d, "source": os.path.realpath(d), "type": "bind", "options": ["bind", "rw"]}
            for d in dict.fromkeys(shared)
            if Path(d).is_dir()
        ]
        linux = config["linux"]
        linux["namespaces"] = [n for n in linux["namespaces"] if n["type"] in ("pid", "mount", "ipc", "uts")]
        if self.network:
            linux["namespaces"].append({"type": "network", "path": f"/run/netns/{self.network}"})
        names = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", *(f"/dev/nvidia{n}" for n in gpus)]
        linux["devices"] = [
            {"path": name, "type": "c", "major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev),
             "fileMode": 0o666, "uid": 0, "gid": 0}
            for name in names if Path(name).exists() and (status := os.stat(name))
        ]  # fmt: skip
        linux["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        for key in ("maskedPaths", "readonlyPaths", "seccomp"):
            linux.pop(key, None)
        path.write_text(json.dumps(config))

    def _read(self) -> None:
        with open(self._reader, errors="replace", closefd=False) as stream:
            for line in stream:
                match = re.match(r"count (\d+) checksum (\w+)", line)
                if match:
                    self.lines.append((time.time(), int(match[1]), match[2]))
                else:
                    self.output.append(line.rstrip())

    def stdio(self) -> dict[str, Any]:
        return {"stdin": subprocess.DEVNULL, "stdout": self._writer, "stderr": self._writer}

    def start(self, lines: int = 10) -> None:
        """Start it and wait for so many lines."""
        command("runc", "run", "-d", self.name, cwd=self.bundle, **self.stdio())
        self.wait_for(lines)

    def wait_for(self, more: int, limit_s: float = 90) -> None:
        """Wait for so many more lines."""
        wanted, deadline = len(self.lines) + more, time.time() + limit_s
        while len(self.lines) < wanted:
            if time.time() > deadline:
                raise TimeoutError(f"{self.name} prints nothing more: {self.output[-5:]}")
            time.sleep(0.005)

    def _words(self, image_dir: Path) -> list[str]:
        connections = [] if self.network else ["--tcp-established"]
        return [*connections, "--image-path", str(image_dir), "--work-path", str(self.bundle), self.name]

    def dump(self, image_dir: Path, *, leave_running: bool) -> float:
        options = ["--leave-running"] if leave_running else []
        began = time.time()
        done = command("runc", "checkpoint", *options, *self._words(image_dir), capture_output=True)
        seconds = time.time() - began
        if done.returncode:
            time.sleep(1)  # for what the program says of it
            raise RuntimeError(f"{self.complaints('dump.log')}; the program: {self.output[-30:]}")
        return seconds

    def restore(self, image_dir: Path) -> float:
        began = time.time()
        done = command("runc", "restore", "-d", *self._words(image_dir), cwd=self.bundle, **self.stdio())
        seconds = time.time() - began
        if done.returncode:
            raise RuntimeError(f"{self.output[-5:]} {self.complaints('restore.log')}")
        return seconds

    def said_by_plugin(self, name: str) -> list[str]:
        """Return what CRIU's CUDA plugin did, by CRIU's log, without numbers of processes."""
        path = self.bundle / name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        said = (
            line.partition(") ")[2] for line in lines if re.search("cuda_plugin: |cuda-checkpoint|unfreezing", line)
        )
        return list(dict.fromkeys(re.sub(r"\d+", "N", line) for line in said))

    def complaints(self, name: str) -> list[str]:
        path = self.bundle / name
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [line for line in lines if re.search(r"Error|ocihook", line) and "RLIMIT" not in line][-8:]

    def remove(self) -> None:
        """Remove it; the driver may take longer to end its processes than runc waits."""
        deadline = time.time() + 60
        while command("runc", "state", self.name, capture_output=True).returncode == 0:
            done = command("runc", "delete", "-f", self.name, capture_output=True)
            if time.time() > deadline:
                raise TimeoutError(f"{self.name} is not removed: {done.stderr}")


def last_session(stage: str, container: str) -> dict[str, Any]:
    """Return the journal of the newest session for a container that handled a stage, once it has ended."""
    deadline = time.time() + 60
    while list((SESSIONS / "sessions").glob("*.json")) and time.time() < deadline:
        time.sleep(0.02)
    found = [json.loads(path.read_text()) for path in HISTORY.glob("*.json")]
    found = [s for s in found if stage in s["stages"] and s["container"] and s["container"]["id"] == container]
    return max(found, key=lambda session: float(session["began"]), default={"phases": [], "facts": {}, "stages": {}})


def phases(session: dict[str, Any]) -> dict[str, float]:
    return {phase["name"]: round(phase["seconds"], 3) for phase in session["phases"]}


def prepare(
    name: str, program: str, size: str, options: list[str], gpus: int, more: Mapping[str, str] | None = None
) -> Container:
    """Set the machine up for a case and return its container, with more annotations."""
    THP.write_text(huge_pages(options))
    for option in options:
        if option.startswith("warm="):
            warm(int(option.removeprefix("warm=")))
    annotations = {"mode": "off"} if "criu" in options else {}
    if value(options, "store"):
        annotations = {"mode": "store"}
    configure(value(options, "ram"))
    if plugin(options) == "both":
        annotations["preflight"] = "warn"
    if "swap" in options:
        uuids = re.findall(r"UUID: (GPU-[0-9a-f-]+)", command("nvidia-smi", "-L", capture_output=True).stdout)
        first, second = uuids[:2]
        annotations["gpu-map"] = f"{first}={second},{second}={first}"
    words = [sys.executable, str(PROJECT / "integration/gpu/programs.py"), program, size]
    if program == "c":  # cuda_workload.c, to try this script where there is no torch
        words = ["/tmp/ocihook-cuda/cuda_workload", size]
    return Container(name, words, list(range(gpus)), annotations | dict(more or {}))


def huge_pages(options: list[str]) -> str:
    """Return the system's setting for a case."""
    return next((option for option in options if option in ("always", "never")), "madvise")


def plugin(options: list[str]) -> str:
    """Return how CRIU's CUDA plugin is to be there, "" if it is not."""
    found = next((option for option in options if option.partition("=")[0] == "plugin"), "")
    return found and (found.partition("=")[2] or "installed")


def value(options: list[str], name: str) -> int:
    """Return the number behind an option, 0 if it is not given."""
    return int(next((option.partition("=")[2] for option in options if option.startswith(f"{name}=")), "0"))


def ocihook(*words: str) -> dict[str, Any]:
    """Run a command of ocihook; return what it prints."""
    done = command(sys.executable, "-m", "ocihook", *words, "--json", cwd=PROJECT, capture_output=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_store_case(container: Container, case: str, count: int) -> dict[str, Any]:
    """Checkpoint a container several times into the store while it continues to run, and restore the last one."""
    row: dict[str, Any] = {"case": case, "checkpoints": []}
    image_dirs = [IMAGES / f"{container.name}-{number}" for number in range(count)]
    try:
        container.start()
        for image_dir in image_dirs:
            container.wait_for(15)
            first = len(container.lines)
            dump_s = container.dump(image_dir, leave_running=True)
            container.wait_for(3)
            times = [line[0] for line in container.lines[first - 1 :]]
            began = time.time()
            ocihook("wait")
            session = last_session("pre-dump", container.name)
            stored = ocihook("store", "list")["checkpoints"][-1]
            taken: dict[str, Any] = {
                "dump_s": dump_s,
                "frozen_s": max(b - a for a, b in pairwise(times)),
                "store_s": time.time() - began,
            }
            taken |= {"raw_bytes": stored["raw_bytes"], "added_bytes": stored["added_bytes"]}
            taken |= {"skipped": 1 - stored["added_bytes"] / stored["raw_bytes"], "phases": phases(session)}
            row["checkpoints"].append(taken)
            print("    ", {key: _shown(value) for key, value in taken.items()}, flush=True)
        command("runc", "kill", container.name, "KILL", capture_output=True)
        time.sleep(1)
        container.remove()
        row["restore_s"] = container.restore(image_dirs[-1])
        container.wait_for(10)
        row["restore_phases"] = phases(last_session("post-resume", container.name))
        seen: dict[int, set[str]] = {}
        for _, step, loss in container.lines:
            seen.setdefault(step, set()).add(loss)
        again = [step for _, step, _ in container.lines]
        row["verified"] = all(len(losses) == 1 for losses in seen.values()) and len(again) > len(set(again))
    finally:
        container.remove()
        for image_dir in image_dirs:
            shutil.rmtree(image_dir, ignore_errors=True)
        ocihook("wait")
        shutil.rmtree(WORK / "store", ignore_errors=True)
    return row


def run_driver(container: Container, row: dict[str, Any]) -> dict[str, Any]:
    """Let the driver checkpoint and restore the first process of a container, and nothing else."""
    from ocihook.gpu.driver import CudaDriver  # what it needs has been installed by now

    driver = CudaDriver()
    try:
        container.start()
        pid = json.loads(command("runc", "state", container.name, capture_output=True).stdout)["pid"]
        began = time.time()
        driver.lock(pid, COMMAND_TIMEOUT_S)
        driver.checkpoint(pid)
        row["dump_driver_s"] = time.time() - began
        driver.restore(pid)
        driver.unlock(pid)
        row["restore_driver_s"] = time.time() - began - row["dump_driver_s"]
        row["restore_phases"] = {}
        container.wait_for(5)
        row["verified"] = len({checksum for _, _, checksum in container.lines}) == 1
    finally:
        container.remove()
    return row


def run_case(case: str, number: int) -> dict[str, Any]:
    """Run one case; return its row."""
    program, size, *options = case.split(":")
    is_baseline, leave_running = "criu" in options, "running" in options
    count = value(options, "gpus") or 1
    container = prepare(f"case{number}", program, size, options, count)
    if value(options, "store"):
        return run_store_case(container, case, value(options, "store"))
    image_dir = (WORK if "disk" in options else IMAGES) / container.name / "images"
    image_dir.parent.mkdir(parents=True, exist_ok=True)
    row: dict[str, Any] = {"case": case, "gpus": count, "left_running": leave_running}
    row["memory_path"] = not is_baseline and plugin(options) != "alone"
    row["thp"] = huge_pages(options)
    if "driver" in options:
        return run_driver(container, row | {"memory_path": None})
    try:
        container.start()
        row["dump_s"] = container.dump(image_dir, leave_running=leave_running)
        if leave_running:
            before = len(container.lines)
            container.wait_for(3)
            times = [line[0] for line in container.lines[: before + 3]]
            row["frozen_s"] = max(after - before for before, after in pairwise(times))
        lines_at_dump = len(container.lines)
        session = last_session("pre-dump", container.name)
        dump = phases(session)
        row["dump_phases"] = dump
        if plugin(options):
            row["plugin"] = {"dump": container.said_by_plugin("dump.log")}
        if dump:  # there was an ocihook
            row["dump_driver_s"] = dump.get("gpu lock", 0) + dump.get("gpu checkpoint", 0)
            row["vram_bytes"] = sum(p["bytes"] for p in session["phases"] if p["name"] == "gpu checkpoint")
        row["stored_bytes"] = sum(path.stat().st_size for path in image_dir.iterdir())
        if leave_running:
            row["resume_driver_s"] = dump.get("gpu resume", 0)
            command("runc", "kill", container.name, "KILL", capture_output=True)
            time.sleep(1)
            lines_at_dump = len(container.lines)
            container.remove()
        for option in options:
            if option.startswith("onto="):
                container.configure([int(option.removeprefix("onto="))])
        row["restore_s"] = container.restore(image_dir)
        container.wait_for(5)
        session = last_session("post-resume", container.name)
        row["restore_phases"] = phases(session)
        if plugin(options):
            row["plugin"]["restore"] = container.said_by_plugin("restore.log")
        row["restore_driver_s"] = row["restore_phases"].get("gpu resume")
        row["verified"] = verify(container, program, lines_at_dump, leave_running=leave_running)
    finally:
        container.remove()
        shutil.rmtree(image_dir, ignore_errors=True)
    return row


def verify(container: Container, program: str, lines_at_dump: int, *, leave_running: bool) -> bool:
    """Return whether it continued where it was with the memory it had; a training's losses are compared elsewhere."""
    before, after = container.lines[:lines_at_dump], container.lines[lines_at_dump:]
    if program == "train":
        container.wait_for(max(0, 120 - len(container.lines)))
        losses: dict[int, set[str]] = {}
        for _, step, loss in container.lines + reference_losses():
            losses.setdefault(step, set()).add(loss)
        steps = [step for _, step, _ in container.lines]
        return len(steps) >= 120 and all(len(seen) == 1 for seen in losses.values())
    same = len({checksum for _, _, checksum in container.lines}) == 1
    return same and (leave_running or after[0][1] == before[-1][1] + 1) and after[-1][1] > after[0][1]


def reference_losses() -> list[tuple[float, int, str]]:
    """Return the losses of the same training without an interruption."""
    reference = Container(
        "reference", [sys.executable, str(PROJECT / "integration/gpu/programs.py"), "train", "150"], [0], {}
    )
    reference.start()
    try:
        reference.wait_for(130)
    finally:
        reference.remove()
    return reference.lines


def node_facts() -> dict[str, Any]:
    """Return what a result was measured on, and when."""
    query = command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", capture_output=True)
    name, _, driver = query.stdout.strip().split("\n")[0].partition(", ")
    kernel, date = platform.release().split("-")[0], datetime.now(UTC).date().isoformat()
    return {"gpu": name, "driver": driver, "kernel": kernel, "date": date, "cores": os.cpu_count()}


COLUMNS = (
    "case", "gpus", "thp", "dump_s", "dump_driver_s", "frozen_s", "restore_s", "restore_driver_s", "stored_bytes",
    "verified",
)  # fmt: skip


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)  # before anything of this machine is changed
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    set_up()
    facts = {**node_facts(), "run_began": datetime.now(UTC).isoformat(timespec="minutes")}
    rows = []
    print(" ".join(f"{column:>16}" for column in COLUMNS), flush=True)
    for number, case in enumerate(sys.argv[2:]):
        began = time.time()
        try:
            with plugged(plugin(case.split(":"))):
                row = {**facts, **run_case(case, number)}
            print(
                " ".join(f"{_shown(row.get(column)):>16}" for column in COLUMNS),
                f"({time.time() - began:.0f} s)",
                flush=True,
            )
            print("    ", row.get("dump_phases", ""), row["restore_phases"], flush=True)
            if "plugin" in row:
                print("     the plugin:", row["plugin"], flush=True)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired, AssertionError) as error:
            row = {**facts, "case": case, "verified": False, "error": str(error)}
            print(case, "FAILED", error, flush=True)
            log = SESSIONS / "agent.log"
            with contextlib.suppress(OSError):
                print("\n".join(log.read_text().splitlines()[-15:]), flush=True)
            print("\n".join(command("dmesg", capture_output=True).stdout.splitlines()[-8:]), flush=True)
        rows.append(row)
        (results / "checkpoint-restore.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
