"""Tells whether a checkpoint will work on this node, and what to do if not: one check for each thing that breaks it.

A finding of `fail` means that a checkpoint or its restore will not work; `warn`, that some will not, or not well.
"""

import os
import platform
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from ocihook import wire
from ocihook.config import Settings, load_settings
from ocihook.criu.conf import action_scripts, options, read_block, remove_block
from ocihook.criu.version import Program, crun_reads_its_conf, find_program, libcriu_reads_conf, run_output
from ocihook.cuda.driver import CudaDriver, has_driver
from ocihook.errors import ConfigError, CudaError, OcihookError
from ocihook.ops.gpu import read_node
from ocihook.ops.install import CONF_NAMES, CRIU_CONF_DIR

_GIB = 1 << 30
_RESTORE_SWITCH = "enable_experimental_restore_via_create"
_RUNTIMES = ("runc", "crun")
_SYSTEMD = Path("/run/systemd/system")
_SELINUX = Path("/sys/fs/selinux/enforce")
_STATUS = Path("/proc/self/status")
_ENGINE_CONFIGS = (
    "containerd/config.toml",
    "containerd/conf.d/*.toml",
    "crio/crio.conf",
    "crio/crio.conf.d/*",
    "containers/containers.conf",
    "containers/containers.conf.d/*.conf",
)
_ETC = Path("/etc")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PLUGIN_DIRS = ("/usr/lib/criu", "/usr/lib64/criu", "/usr/local/lib/criu", "/usr/libexec/criu")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}  # bits of CapEff
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
_TAKE_JOINED_VALUES_ONLY = ("cpu-cap", "ext-unix-sk", "manage-cgroups", "verbosity")
_NETWORK_LOCK_CRASHES_UP_TO = (4, 2)  # an option that CRIU parses once more than there are arguments (config.c)
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
        return [finding for findings in pool.map(_run, _CHECKS) for finding in findings]


def _run(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except OSError as error:
        name = check.__name__.removeprefix("_check_").replace("_", " ")
        return [Finding(name, Status.WARN, f"cannot be told: {error}", "run `sudo ocihook doctor`")]


def _check_privileges() -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield Finding("privileges", Status.WARN, "not root: some checks see less", "run `sudo ocihook doctor`")
        return
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    held = int(fields["CapEff"], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        detail = f"root, but without {', '.join(missing)}: CRIU cannot work from here"
        yield Finding("privileges", Status.FAIL, detail, "run it on the node itself, not in a container")
    elif fields["Seccomp"].strip() != "0":
        detail = "root, but system calls are filtered (seccomp): what works here may differ from the node"
        yield Finding("privileges", Status.WARN, detail, "run it on the node itself, not in a container")
    else:
        yield Finding("privileges", Status.OK, "root")


def _check_kernel() -> Iterator[Finding]:
    release = platform.release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < (5, 9):
        remedy = "use a kernel of 5.9 or later (CAP_CHECKPOINT_RESTORE, close_range, pidfds)"
        yield Finding("kernel", Status.FAIL, release, remedy)
    else:
        yield Finding("kernel", Status.OK, release)


def _check_selinux() -> Iterator[Finding]:
    if _SELINUX.exists() and _SELINUX.read_text().strip() == "1":
        yield Finding("selinux", Status.OK, "enforcing; what it denies is told by `ausearch -m avc -c criu-action`")


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
    found = [program for name in _RUNTIMES if (program := find_program(name))]
    if not found:
        yield Finding("runtime", Status.FAIL, "neither runc nor crun", "install runc or crun")
    for program in found:
        if program.name == "crun" and "+CRIU" not in run_output(program.path, "--version"):
            yield Finding("runtime crun", Status.WARN, "built without CRIU", "use runc, or a crun that has +CRIU")
        elif program.name == "crun" and libcriu_reads_conf() is None:
            detail = f"{program.version_text}: libcriu.so.2 is not there, so it cannot checkpoint"
            yield Finding("runtime crun", Status.WARN, detail, "install libcriu2 (Debian) or criu-libs (Fedora)")
        else:
            yield Finding(f"runtime {program.name}", Status.OK, program.version_text)


def _check_engines() -> Iterator[Finding]:
    engines = [program for name in ("podman", "containerd", "crio") if (program := find_program(name))]
    if not engines:
        yield Finding("engine", Status.WARN, "no podman, containerd or CRI-O on PATH", "install one, if this is a node")
    for engine in engines:
        if engine.name == "containerd":
            yield _containerd(engine)
        elif engine.name == "crio" and (path := _crio_switch()):
            detail = f"{engine.version_text}: {path} switches checkpoints off"
            yield Finding("engine crio", Status.WARN, detail, "take enable_criu_support = false (or level none) out")
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
    has_switch = (2, 2, 7) <= version < (2, 3) or version >= (2, 3, 4)
    if has_switch and not re.search(rf"{_RESTORE_SWITCH}\s*=\s*true", run_output(engine.path, "config", "dump")):
        remedy = f"set {_RESTORE_SWITCH} = true for its CRI runtime plugin"
        return Finding(name, Status.WARN, f"{text} restores only where that is switched on", remedy)
    return Finding(name, Status.OK, text)


def _engine_configs() -> Iterator[tuple[Path, str]]:
    """Yield the engines' configuration files, the later ones overriding the earlier, without comments."""
    for pattern in _ENGINE_CONFIGS:
        for path in sorted(_ETC.glob(pattern)):
            lines = path.read_text(errors="replace").splitlines()
            yield path, "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def _crio_switch() -> Path | None:
    """Return the file that switches CRI-O's checkpoints off."""
    found = None
    for path, text in _engine_configs():
        for value in re.findall(r'(?:enable_criu_support|container_level_enabled)\s*=\s*"?(\w+)', text):
            found = path if value in ("false", "none") else None
    return found


def _check_annotations() -> Iterator[Finding]:
    """Where a container may name CRIU's configuration, ours is not read."""
    allowing = r"annotations\s*=\s*\[[^\]]*[\"'](\*|org\.\*|org\.criu[^\"']*)[\"']"
    for path, text in _engine_configs():
        if match := re.search(allowing, text):
            detail = f"{path} lets containers annotate {match[1]}: CRIU then reads, as root, the file that they name"
            remedy = "allow org.criu.config to nobody, or have those files name ocihook's action script"
            yield Finding("org.criu.config", Status.WARN, detail, remedy)


def _files_read_for(runtime: str) -> list[str]:
    """Return the configuration files that CRIU reads when a runtime calls it; what the last one says holds."""
    program = find_program(runtime)
    if program is None:
        return []
    if runtime == "runc":
        return ["default.conf", "runc.conf"]
    if not crun_reads_its_conf(program):
        return ["default.conf"]
    return ["default.conf", "crun.conf" if (CRIU_CONF_DIR / "crun.conf").exists() else "runc.conf"]


def _content(name: str) -> bytes:
    try:
        return (CRIU_CONF_DIR / name).read_bytes()
    except FileNotFoundError:
        return b""


def _check_installation() -> Iterator[Finding]:
    """Each runtime reads other files; our block must be in those."""
    scripts, broken = {}, []
    for name in CONF_NAMES:
        try:
            block = read_block(_content(name), where=str(CRIU_CONF_DIR / name))
        except ConfigError as error:
            broken.append(str(error.args[0]))
        else:
            scripts[name] = block.action_script if block else ""
    if broken:
        yield Finding("installation", Status.FAIL, "; ".join(broken), "mend the file, then `ocihook install`")
        return
    for runtime in _RUNTIMES:
        names = _files_read_for(runtime)
        launchers = [scripts[name] for name in names if scripts[name]]
        if launchers:
            yield _launcher(f"installation, {runtime}", Path(launchers[-1]))
        elif names:
            detail = f"{runtime} does not call ocihook: none of {', '.join(names)} has its block"
            yield Finding("installation", Status.FAIL, detail, "ocihook install")


def _launcher(name: str, launcher: Path) -> Finding:
    try:
        status = launcher.stat()
    except OSError as error:
        detail = f"{launcher}: {error.strerror}; every checkpoint fails"
        return Finding(name, Status.FAIL, detail, "ocihook install")
    if status.st_uid != 0 or status.st_mode & 0o022:
        return Finding(name, Status.FAIL, f"{launcher} can be changed by others than root", "ocihook install")
    environment = {"PATH": "/usr/bin:/bin", "CRTOOLS_SCRIPT_ACTION": wire.SELF_TEST_STAGE}
    started = time.perf_counter()
    try:
        done = subprocess.run([launcher], env=environment, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, Status.FAIL, f"{launcher} cannot be run: {error}", "ocihook install")
    took_ms = (time.perf_counter() - started) * 1000
    if done.returncode != 0:
        return Finding(name, Status.FAIL, f"{launcher} fails: {done.stderr.strip()[-200:]}", "ocihook install")
    if place := _open_to_others(launcher):
        remedy = "install ocihook, and the Python that runs it, where only root can write"
        return Finding(name, Status.WARN, f"{place} can be changed by others, and root runs what is there", remedy)
    return Finding(name, Status.OK, f"{launcher}, starts in {took_ms:.0f} ms")


def _open_to_others(launcher: Path) -> Path | None:
    """Return what others than root can change of the launcher, its interpreter, our package and all above them."""
    named = re.findall(r"'(/[^']+)'", launcher.read_text())  # interpreters and site directory
    for path in (launcher, *filter(Path.exists, map(Path, named))):
        for place in (path, *path.parents, path.resolve(), *path.resolve().parents):
            status = place.stat()
            is_writable = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            if status.st_uid != 0 or is_writable:
                return place
    return None


def _check_agent() -> Iterator[Finding]:
    if not _SYSTEMD.is_dir():
        yield Finding("agent", Status.OK, "no systemd: the hook starts it")
        return
    socket, service = (
        run_output("systemctl", "is-active", f"ocihook.{kind}").strip() for kind in ("socket", "service")
    )
    if service == "failed":
        detail = "ocihook.service has failed: dumps are refused while it cannot start"
        yield Finding("agent", Status.WARN, detail, "see `journalctl -u ocihook.service`")
    elif socket == "active":
        yield Finding("agent", Status.OK, "systemd starts it")
    else:
        detail = f"ocihook.socket is {socket or 'unknown'}: the hook starts the agent, outside systemd's care"
        yield Finding("agent", Status.WARN, detail, "ocihook install")


def _check_configuration() -> Iterator[Finding]:
    try:
        load_settings()
    except ConfigError as error:
        yield Finding("configuration", Status.FAIL, str(error.args[0]), error.hint or "mend the file")
    else:
        yield Finding("configuration", Status.OK, "/etc/ocihook")


def _check_criu_configuration() -> Iterator[Finding]:
    criu = find_program("criu")
    crashes = criu is not None and criu.version <= _NETWORK_LOCK_CRASHES_UP_TO
    check = "criu configuration"
    for name in CONF_NAMES:
        path, content = CRIU_CONF_DIR / name, _content(name)
        for option in options(content):
            if option.name in _HARMFUL_OPTIONS:
                detail = f"{path}: {option.name}: {_HARMFUL_OPTIONS[option.name]}"
                yield Finding(check, Status.FAIL, detail, f"remove {option.name}")
            elif option.name == "network-lock" and name != "default.conf" and crashes:
                detail = f"{path}: network-lock crashes CRIU up to 4.2 when a runtime calls it"
                yield Finding(check, Status.FAIL, detail, f"move it to {CRIU_CONF_DIR}/default.conf")
            elif option.name in _TAKE_JOINED_VALUES_ONLY and option.value and not option.is_joined:
                detail = f"{path}: CRIU drops the value of `{option.name} {option.value}` without a word"
                yield Finding(check, Status.WARN, detail, f"write {option.name}={option.value}")
        try:
            foreign = action_scripts(remove_block(content, where=str(path)))
        except ConfigError:  # told by the check of the installation
            continue
        if foreign:
            detail = f"{path} also names {', '.join(foreign)}: it runs too, before ours if it is named after it"
            yield Finding("other action scripts", Status.OK, detail)


def _check_cuda_plugin() -> Iterator[Finding]:
    plugin = _cuda_plugin()
    if plugin is None or not Path("/proc/driver/nvidia").exists():
        yield Finding("criu's cuda plugin", Status.OK, "not in the way")
    elif shutil.which("cuda-checkpoint") is None:
        yield Finding("criu's cuda plugin", Status.OK, f"{plugin} is idle: there is no cuda-checkpoint")
    else:
        detail = (
            f"{plugin} leaves a dump's CUDA processes to ocihook, which has checkpointed them by then; on a restore it "
            "resumes them itself, one after the other; before CRIU 4.2 it hangs where an engine freezes containers"
        )
        remedy = "set `libdir` to an empty directory in CRIU's configuration, or remove the plugin's package"
        yield Finding("criu's cuda plugin", Status.WARN, detail, remedy)


def _cuda_plugin() -> Path | None:
    """Return CRIU's CUDA plugin if it is where CRIU looks for plugins, for any of the runtimes."""
    for runtime in _RUNTIMES:
        names = _files_read_for(runtime)
        named = [option.value for name in names for option in options(_content(name)) if option.name == "libdir"]
        for directory in named[-1:] or _PLUGIN_DIRS:
            plugin = Path(directory, "cuda_plugin.so")
            if names and plugin.exists():
                return plugin
    return None


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
        yield from _check_gpus()


def _check_gpus() -> Iterator[Finding]:
    try:
        version, gpus = read_node()
    except OcihookError as error:
        yield Finding("gpus", Status.FAIL, str(error.args[0]), error.hint)
        return
    names = ", ".join(f"{g.name} ({g.free_bytes / _GIB:.0f} of {g.total_bytes / _GIB:.0f} GiB free)" for g in gpus)
    yield Finding("gpus", Status.OK, f"driver {version}: {names or 'none'}")
    if any(gpu.mig for gpu in gpus):
        yield Finding("mig", Status.WARN, "a GPU is partitioned", "containers on MIG instances cannot be checkpointed")
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text():
        detail = f"{_HUGE_PAGES} is `never`; the driver's copy of GPU memory to the node's takes twice as long"
        yield Finding("huge pages", Status.WARN, detail, f"echo madvise > {_HUGE_PAGES}")


def _check_disk() -> Iterator[Finding]:
    """A dump needs its memory twice while it is packed, a restore twice while it is unpacked."""
    places = [place for engine, where in _IMAGE_SET_PLACES.items() if find_program(engine) for place in where]
    for place in [*dict.fromkeys(places), str(_KUBELET_ARCHIVES)]:
        try:
            file_system = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Finding("disk", Status.SKIP, f"{place}: {error.strerror}")
            continue
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
    _check_selinux,
    _check_criu,
    _check_runtimes,
    _check_engines,
    _check_installation,
    _check_agent,
    _check_configuration,
    _check_criu_configuration,
    _check_annotations,
    _check_cuda,
    _check_cuda_plugin,
    _check_cgroups,
    _check_memory_bound,
    _check_disk,
)
