"""Tells whether a checkpoint will work on this node, and what to do if not: one check for each thing that breaks it.

A finding of `fail` means that a checkpoint or its restore will not work; `warn`, that some will not, or not well.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ocihook import wire
from ocihook.config import Settings, load_settings
from ocihook.criu.conf import action_scripts, options, read_block
from ocihook.criu.version import Program, crun_reads_its_conf, find_program, run_output
from ocihook.cuda.driver import CudaDriver, has_driver
from ocihook.errors import ConfigError, CudaError
from ocihook.ops.install import CRIU_CONF_DIR

_GIB = 1 << 30
_CUDA_PLUGINS = tuple(Path(where, "criu/cuda_plugin.so") for where in ("/usr/lib", "/usr/lib64", "/usr/libexec"))
# Options of a CRIU configuration file that break checkpoints made through a runtime.
_HARMFUL_OPTIONS = {
    "stream": "CRIU aborts: a runtime cannot stream images",
    "lazy-pages": "a dump waits for a page server that nobody starts",
    "leave-running": "the runtime believes the container has stopped",
    "leave-stopped": "the runtime does not know that the container is stopped",
    "mntns-compat-mode": "every dump fails",
    "log-file": "the runtime does not find CRIU's log",
    "images-dir": "the engine archives an empty directory",
}
# Where engines keep image sets until they are archived, or unpacked.
_IMAGE_SET_PLACES = {
    "podman": ("/var/lib/containers/storage",),
    "crio": ("/var/lib/containers/storage",),
    "containerd": ("/var/lib/containerd", os.environ.get("TMPDIR", "/tmp")),  # noqa: S108 - containerd's own default
}
_KUBELET_ARCHIVES = Path("/var/lib/kubelet/checkpoints")


class Status(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(NamedTuple):
    """What a check found."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def run_checks() -> list[Finding]:
    """Run every check; those that call programs run at the same time."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(find_program, ("criu", "runc", "crun", "podman", "containerd", "crio")))
        return [finding for findings in pool.map(lambda check: list(check()), _CHECKS) for finding in findings]


def _check_privileges() -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield Finding("privileges", Status.OK, "root")
    else:
        yield Finding("privileges", Status.WARN, "not root: some checks see less", "run `sudo ocihook doctor`")


def _check_kernel() -> Iterator[Finding]:
    release = platform.release()
    if tuple(int(part) for part in release.split(".")[:2]) < (5, 9):
        remedy = "use a kernel of 5.9 or later (CAP_CHECKPOINT_RESTORE, close_range, pidfds)"
        yield Finding("kernel", Status.FAIL, release, remedy)
    else:
        yield Finding("kernel", Status.OK, release)


def _check_criu() -> Iterator[Finding]:
    criu = find_program("criu")
    if criu is None:
        yield Finding("criu", Status.FAIL, "not installed", "install CRIU 4.1.1 or later (Debian 13, Fedora 42)")
        return
    if criu.version < (3, 19):
        remedy = "install CRIU 4.1.1 or later: older ones do not run scripts of a configuration file for a runtime"
        yield Finding("criu", Status.FAIL, criu.version_text, remedy)
        return
    if os.geteuid() == 0 and "Looks good" not in (output := run_output(criu.path, "check")):
        problem = next((line for line in output.splitlines() if "rror" in line), output.strip() or "no answer")
        yield Finding(
            "criu", Status.FAIL, f"{criu.version_text}: {problem}", "install CRIU 4.1.1 or later; `criu check`"
        )
    elif criu.version < (4, 1, 1):
        yield Finding("criu", Status.WARN, criu.version_text, "CRIU 4.1.1 or later is what this is tested with")
    else:
        yield Finding("criu", Status.OK, criu.version_text)


def _check_runtimes() -> Iterator[Finding]:
    found = [program for name in ("runc", "crun") if (program := find_program(name))]
    if not found:
        yield Finding("runtime", Status.FAIL, "neither runc nor crun", "install runc or crun")
    for program in found:
        if program.name == "crun" and "+CRIU" not in run_output(program.path, "--version"):
            yield Finding("runtime crun", Status.WARN, "built without CRIU", "use runc, or a crun that has +CRIU")
        else:
            yield Finding(f"runtime {program.name}", Status.OK, program.version_text)


def _check_engines() -> Iterator[Finding]:
    engines = [program for name in ("podman", "containerd", "crio") if (program := find_program(name))]
    if not engines:
        yield Finding("engine", Status.WARN, "no podman, containerd or CRI-O on PATH", "install one, if this is a node")
    for engine in engines:
        if engine.name == "containerd":
            yield _containerd(engine)
        else:
            yield Finding(f"engine {engine.name}", Status.OK, engine.version_text)


def _containerd(engine: Program) -> Finding:
    """Containerd's restore through CreateContainer comes and goes: here, off by default, gone."""
    name, text, version = "engine containerd", engine.version_text, engine.version
    if version < (2, 0):
        return Finding(name, Status.WARN, f"{text}: its CRI has no CheckpointContainer", "use containerd 2.1 to 2.3")
    if version < (2, 1):
        return Finding(name, Status.WARN, f"{text} checkpoints, but cannot restore", "use containerd 2.1 to 2.3")
    if version >= (2, 4):
        return Finding(name, Status.WARN, f"{text} checkpoints, but no longer restores", "restore with CRI-O or podman")
    if (2, 2, 7) <= version < (2, 3) or version >= (2, 3, 4):
        remedy = "set enable_experimental_restore_via_create = true for its CRI runtime plugin"
        return Finding(name, Status.WARN, f"{text} restores only where that is switched on", remedy)
    return Finding(name, Status.OK, text)


def _check_installation() -> Iterator[Finding]:
    """Each runtime reads other files; our block must be in those."""
    crun, criu = find_program("crun"), find_program("criu")
    blocks = {name: _block(name) for name in ("runc.conf", "crun.conf", "default.conf")}
    broken = [f"{name}: {block}" for name, block in blocks.items() if isinstance(block, ConfigError)]
    if broken:
        yield Finding("installation", Status.FAIL, "; ".join(broken), "mend the file, then `ocihook install`")
        return
    for runtime in ("runc", "crun"):
        program = find_program(runtime)
        if program is None:
            continue
        names = ["default.conf"]
        if runtime == "runc":
            names.append("runc.conf")
        elif crun and crun_reads_its_conf(crun, criu):
            names.append("crun.conf" if (CRIU_CONF_DIR / "crun.conf").exists() else "runc.conf")
        launchers = [str(blocks[name]) for name in names if blocks[name]]
        if launchers:
            yield from _launcher(runtime, Path(launchers[-1]))
        else:
            detail = f"{runtime} does not call ocihook: none of {', '.join(names)} has its block"
            yield Finding("installation", Status.FAIL, detail, "ocihook install")


def _block(name: str) -> str | ConfigError | None:
    try:
        content = (CRIU_CONF_DIR / name).read_bytes()
        block = read_block(content, where=str(CRIU_CONF_DIR / name))
    except OSError:
        return None
    except ConfigError as error:
        return error
    return block.action_script if block else None


def _launcher(runtime: str, launcher: Path) -> Iterator[Finding]:
    name = f"installation, {runtime}"
    try:
        status = launcher.stat()
    except OSError as error:
        yield Finding(name, Status.FAIL, f"{launcher}: {error.strerror}; every checkpoint fails", "ocihook install")
        return
    if status.st_uid != 0 or status.st_mode & 0o022:
        yield Finding(name, Status.FAIL, f"{launcher} can be changed by others than root", "ocihook install")
        return
    environment = {"PATH": "/usr/bin:/bin", "CRTOOLS_SCRIPT_ACTION": wire.SELF_TEST_STAGE}
    try:
        done = subprocess.run([launcher], env=environment, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(name, Status.FAIL, f"{launcher} cannot be run: {error}", "ocihook install")
        return
    if done.returncode != 0:
        yield Finding(name, Status.FAIL, f"{launcher} fails: {done.stderr.strip()[-200:]}", "ocihook install")
    else:
        yield Finding(name, Status.OK, str(launcher))


def _check_configuration() -> Iterator[Finding]:
    try:
        load_settings()
    except ConfigError as error:
        yield Finding("configuration", Status.FAIL, str(error.args[0]), error.hint or "mend the file")
    else:
        yield Finding("configuration", Status.OK, "/etc/ocihook")


def _check_criu_configuration() -> Iterator[Finding]:
    for name in ("runc.conf", "crun.conf", "default.conf"):
        path = CRIU_CONF_DIR / name
        try:
            content = path.read_bytes()
        except OSError:
            continue
        for option, value in options(content):
            if option in _HARMFUL_OPTIONS:
                yield Finding(
                    "criu configuration",
                    Status.FAIL,
                    f"{path}: {option}: {_HARMFUL_OPTIONS[option]}",
                    f"remove {option}",
                )
            if option == "network-lock" and name != "default.conf":
                detail = f"{path}: network-lock crashes CRIU up to 4.2 when a runtime calls it"
                yield Finding("criu configuration", Status.FAIL, detail, f"move it to {CRIU_CONF_DIR}/default.conf")
            if option == "manage-cgroups" and value and b"manage-cgroups " in content:
                detail = f"{path}: `manage-cgroups {value}` silently means soft"
                yield Finding("criu configuration", Status.WARN, detail, f"write manage-cgroups={value}")
        ours = _block(name)
        foreign = [script for script in action_scripts(content) if script != ours]
        if foreign:
            detail = f"{path} also names {', '.join(foreign)}: it runs too, before ours if it is named after it"
            yield Finding("other action scripts", Status.OK, detail)


def _check_cuda_plugin() -> Iterator[Finding]:
    plugin = next((path for path in _CUDA_PLUGINS if path.exists()), None)
    if plugin is None or not Path("/proc/driver/nvidia").exists():
        yield Finding("criu's cuda plugin", Status.OK, "not in the way")
    elif shutil.which("cuda-checkpoint") is None:
        yield Finding("criu's cuda plugin", Status.OK, f"{plugin} is idle: there is no cuda-checkpoint")
    else:
        detail = f"{plugin} handles CUDA processes one after the other, through CRIU's single-threaded memory path"
        remedy = "set `libdir` to an empty directory in CRIU's configuration, or remove the plugin's package"
        yield Finding("criu's cuda plugin", Status.WARN, detail, remedy)


def _check_cuda() -> Iterator[Finding]:
    if not has_driver():
        yield Finding("cuda", Status.SKIP, "no NVIDIA driver; containers without a GPU need none")
        return
    try:
        version = CudaDriver().version
    except CudaError as error:
        yield Finding("cuda", Status.WARN, str(error.args[0]), error.hint)
    else:
        yield Finding("cuda", Status.OK, f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}")


def _check_disk() -> Iterator[Finding]:
    """A dump needs its memory twice while it is packed, a restore twice while it is unpacked."""
    places = [place for engine, where in _IMAGE_SET_PLACES.items() if find_program(engine) for place in where]
    for place in [*dict.fromkeys(places), str(_KUBELET_ARCHIVES)]:
        if not Path(place).exists():
            continue
        file_system = os.statvfs(place)
        free_bytes = file_system.f_bavail * file_system.f_frsize
        detail = f"{place}: {free_bytes / _GIB:.1f} GiB free"
        if free_bytes < _GIB:
            yield Finding("disk", Status.FAIL, detail, "free space: a dump needs twice the memory of its container")
        elif _file_system_type(place) == "tmpfs":
            yield Finding(
                "disk", Status.WARN, f"{detail}, but it is memory (tmpfs)", "set TMPDIR for the engine to a disk"
            )
        else:
            yield Finding("disk", Status.OK, detail)


def _file_system_type(path: str) -> str:
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, name, *_ = line.split(" ")
        if len(mount_point) >= len(best) and (path + "/").startswith(mount_point.rstrip("/") + "/"):
            best, kind = mount_point, name
    return kind


def _check_memory_bound() -> Iterator[Finding]:
    try:
        settings = load_settings()
    except ConfigError:
        settings = Settings()
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free_bytes < settings.memory_bound_bytes:
        detail = f"{free_bytes >> 20} MiB free, the agent may use {settings.memory_bound_bytes >> 20} MiB"
        yield Finding("memory", Status.WARN, detail, "lower memory_bound_bytes in /etc/ocihook/config.toml")
    else:
        yield Finding("memory", Status.OK, f"the agent's bound is {settings.memory_bound_bytes >> 20} MiB")


def _check_cgroups() -> Iterator[Finding]:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    kinds = {line.split(" ")[2] for line in mounts if line.split(" ")[2] in ("cgroup", "cgroup2")}
    if kinds == {"cgroup", "cgroup2"}:
        remedy = "boot with systemd.unified_cgroup_hierarchy=1; crun cannot restore into hybrid cgroups"
        yield Finding("cgroups", Status.WARN if find_program("crun") else Status.OK, "hybrid: v1 and v2", remedy)
    elif kinds:
        yield Finding("cgroups", Status.OK, "v2" if kinds == {"cgroup2"} else "v1")
    else:
        yield Finding("cgroups", Status.FAIL, "no cgroup file system is mounted", "mount cgroup2 at /sys/fs/cgroup")


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_privileges,
    _check_kernel,
    _check_criu,
    _check_runtimes,
    _check_engines,
    _check_installation,
    _check_configuration,
    _check_criu_configuration,
    _check_cuda,
    _check_cuda_plugin,
    _check_cgroups,
    _check_memory_bound,
    _check_disk,
)
