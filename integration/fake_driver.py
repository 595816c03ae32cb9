"""A node with a stand-in for NVIDIA's driver, and the container that uses it."""

import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from integration.namespace import Namespace

HERE = Path(__file__).parent
SCRIPT = "/run/ocihook-fake-cuda"
PLUGIN_CALLS = "/run/ocihook-fake-cuda-calls"
_HELD_MS = 600_000
# Device files of the stand-in are nodes that exist everywhere; their minors tell them apart.
GPU_NODES = {3: "/dev/null", 5: "/dev/zero", 7: "/dev/full"}


def build(directory: Path) -> Path:
    """Build the stand-in and the workload; return the directory with them."""
    library = directory / "libcuda.so.1"
    strict = ["-O2", "-Wall", "-Wextra", "-Werror"]
    source = HERE.parent / "tests/fakes/cuda/libcuda.c"
    programs: tuple[list[str | Path], ...] = (
        ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source, "-lpthread"],
        # Like the real one it brings libcuda along, and here all of it is in there.
        ["-shared", "-Wl,-soname,libnvidia-ml.so.1,--no-as-needed", "-o", directory / "libnvidia-ml.so.1", library],
        ["-o", directory / "cuda-checkpoint", source.with_name("cuda-checkpoint.c"), library, "-lpthread"],
        ["-o", directory / "cuda_workload", HERE / "cuda_workload.c", library, "-lpthread", "-ldl"],
    )
    for options in programs:
        subprocess.run(["gcc", *strict, *options], check=True, timeout=60)
    return directory


def add_to_image(tar: tarfile.TarFile, built: Path) -> None:
    """Put the workload and the libraries that it needs into a container's file system."""
    tar.add(built / "cuda_workload", "cuda_workload")
    tar.add(built / "libcuda.so.1", "lib/x86_64-linux-gnu/libcuda.so.1")
    listed = subprocess.run(["ldd", "/bin/true"], capture_output=True, text=True, check=True, timeout=60).stdout
    for path in re.findall(r"(/\S+) \(0x", listed):
        tar.add(Path(path).resolve(), path.lstrip("/"))


def install_driver(namespace: Namespace, built: Path) -> None:
    """Let every program of a node find the stand-in."""
    namespace.path("/etc/ld.so.conf.d/000-ocihook-test.conf").write_text(f"{built}\n")
    namespace.run("ldconfig")


def install_plugin(namespace: Namespace, plugin: Path, built: Path) -> None:
    """Install CRIU's CUDA plugin on a node, with the program that it calls, and have it see a GPU there."""
    namespace.run("mount", "-t", "tmpfs", "tmpfs", "/proc/driver")
    namespace.path("/proc/driver/nvidia/gpus").mkdir(parents=True)
    namespace.path("/usr/bin/cuda-checkpoint").symlink_to(built / "cuda-checkpoint")
    namespace.path("/usr/lib/criu").mkdir()
    shutil.copy(plugin, namespace.path("/usr/lib/criu/cuda_plugin.so"))
    namespace.path(PLUGIN_CALLS).touch()


def plugin_calls(namespace: Namespace) -> list[str]:
    """Return what the plugin has asked its program to do since this was last called."""
    path = namespace.path(PLUGIN_CALLS)
    lines = path.read_text().splitlines()
    path.write_text("")
    return lines


def devices(minors: Sequence[int]) -> list[dict[str, str]]:
    """Return the CRI's devices of a container with these GPUs."""
    nodes = {f"/dev/nvidia{number}": GPU_NODES[minor] for number, minor in enumerate(minors)}
    if nodes:
        nodes["/dev/nvidiactl"] = "/dev/null"
    return [{"container_path": name, "host_path": node, "permissions": "rw"} for name, node in nodes.items()]


def script(namespace: Namespace, *lines: str) -> None:
    """Set what is to go wrong in the stand-in from now on; nothing: all works."""
    path = namespace.path(SCRIPT)
    path.with_name("ocihook-fake-cuda.new").write_text("".join(f"{line}\n" for line in lines))
    path.with_name("ocihook-fake-cuda.new").replace(path)


def hold(namespace: Namespace, verb: str) -> None:
    """Let a verb take until the stand-in has another script, however slow the machine is."""
    script(namespace, f"{verb} -1 {_HELD_MS}")
