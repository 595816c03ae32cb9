"""Checks of the runtime handler: whether a container that is created again would be restored here, and why not."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook.config import load_settings
from ocihook.criu.version import find_program, run_output
from ocihook.errors import ConfigError, OcihookError
from ocihook.gpu.library import CDI_DIRS
from ocihook.node.handlers import DROP_INS, HANDLER, RUNTIMES, program_of, read_containerd
from ocihook.node.install import NODE, PACKAGE_LIBEXEC, default_libexec
from ocihook.preflight.finding import Finding, Status
from ocihook.session import history

_CHECK = "runtime handler"
_INSTALL = "ocihook install --runtime"
_KUBELET_CONFIG = Path("/var/lib/kubelet/config.yaml")
_NVIDIA = Path("/proc/driver/nvidia")
_TIMEOUT_S = 10
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _check_handler() -> Iterator[Finding]:
    """Engines that know the handler, and the handler itself."""
    engines = [engine for engine in DROP_INS if find_program(engine)]
    known = [engine for engine in engines if DROP_INS[engine].exists()]
    if not known:
        if engines:
            detail = f"no engine knows it ({', '.join(engines)}): nothing is checkpointed by being stopped"
            yield Finding(_CHECK, Status.SKIP, detail, _INSTALL)
        return
    programs = [path for name in RUNTIMES if (path := program_of(_libexec(), name)).exists()]
    if not programs:
        detail = f"{', '.join(known)} knows it, and there is none in {_libexec()}: its containers cannot be made"
        yield Finding(_CHECK, Status.FAIL, detail, _INSTALL)
    for program in programs:
        yield from _starts(program)
    if missing := [engine for engine in engines if engine not in known]:
        yield Finding(_CHECK, Status.WARN, f"{', '.join(missing)} does not know it", _INSTALL)
    if "containerd" in known:
        yield from _containerd()


def _libexec() -> Path:
    return default_libexec() if program_of(default_libexec(), "runc").exists() else PACKAGE_LIBEXEC


def _starts(program: Path) -> Iterator[Finding]:
    runtime = program.name.removeprefix("ocihook-")
    if find_program(runtime) is None:  # a package has both
        return
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(_CHECK, Status.FAIL, f"{program} cannot be run: {error}", _INSTALL)
        return
    if done.returncode != 0:
        yield Finding(_CHECK, Status.FAIL, f"{program} fails: {done.stderr.strip()[-200:]}", _INSTALL)
    else:
        yield Finding(_CHECK, Status.OK, f"{program}, before {done.stdout.partition(chr(10))[0]}")


def _containerd() -> Iterator[Finding]:
    """What it has read, and whether pods of the handler are in the kubelet's kind of cgroup."""
    try:
        config = read_containerd(NODE)
    except ConfigError as error:
        yield Finding(_CHECK, Status.FAIL, str(error.args[0]), "correct the file")
        return
    dumped = run_output("containerd", "config", "dump")
    if f"runtimes.{HANDLER}]" not in dumped:
        remedy = f'add `imports = ["{DROP_INS["containerd"].parent}/*.toml"]` at the top of its config.toml, restart it'
        yield Finding(_CHECK, Status.FAIL, "containerd does not read the handler's drop-in", remedy)
    driver = _kubelet_setting("cgroupDriver")
    is_systemd = f"SystemdCgroup = {str(config.has_systemd_cgroup).lower()}"
    if driver and (driver == "systemd") != config.has_systemd_cgroup:
        detail = f"the kubelet's cgroup driver is {driver}, and containerd's handlers have {is_systemd}"
        yield Finding(
            _CHECK, Status.FAIL, detail, f"set SystemdCgroup for containerd's default handler, then {_INSTALL}"
        )


def _check_gpus() -> Iterator[Finding]:
    """NVIDIA's own runtime edits what `create` gets, which a restore is not."""
    if not _NVIDIA.exists() or not any(path.exists() for path in DROP_INS.values()):
        return
    if not any(directory.is_dir() and any(directory.iterdir()) for directory in CDI_DIRS):
        detail = "no CDI specification: a container that is restored has none of its GPU's devices"
        remedy = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and have the device plugin use CDI"
        yield Finding(_CHECK, Status.WARN, detail, remedy)
    if DROP_INS["containerd"].exists() and "enable_cdi = false" in run_output("containerd", "config", "dump"):
        detail = "containerd does not use CDI: its pods get GPUs by NVIDIA's own runtime alone, and not when restored"
        yield Finding(_CHECK, Status.WARN, detail, "set enable_cdi = true in containerd's CRI plugin, and restart it")


def _check_grace() -> Iterator[Finding]:
    """A node that shuts down kills what it is not configured to wait for."""
    if not any(path.exists() for path in DROP_INS.values()) or not _KUBELET_CONFIG.exists():
        return
    grace = _kubelet_setting("shutdownGracePeriod")
    grace_s, longest_s = _seconds(grace), _longest_dump_s()
    remedy = f"set shutdownGracePeriod in {_KUBELET_CONFIG} to what the largest checkpoint takes"
    if not grace_s:
        detail = "the kubelet has no shutdownGracePeriod: a node that shuts down checkpoints nothing"
        yield Finding(_CHECK, Status.WARN, detail, remedy)
    elif grace_s < longest_s:
        detail = f"the kubelet's shutdownGracePeriod is {grace}, and a dump on this node has taken {longest_s:.1f} s"
        yield Finding(_CHECK, Status.WARN, detail, remedy)


def _seconds(duration: str) -> float:
    """Return a duration in seconds, 0 if it is none: as Go writes one (time.ParseDuration), which the kubelet reads."""
    if not re.fullmatch(r"([0-9.]+(h|m|s|ms|us|µs|ns))+", duration):
        return 0.0
    parts = re.findall(r"([0-9]+\.?[0-9]*|\.[0-9]+)(h|ms|m|us|µs|ns|s)", duration)
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _longest_dump_s() -> float:
    """Return how long the longest dump in the history has taken, 0 if there is none."""
    try:
        records = history.read(Path(load_settings().history_dir))
        done = [
            record for record in records if history.act_of(record) == "dump" and history.outcome_of(record) == "done"
        ]
        return max((float(record["ended"]) - float(record["began"]) for record in done), default=0.0)
    except (OcihookError, OSError):  # which other checks report
        return 0.0


def _kubelet_setting(name: str) -> str:
    try:
        text = _KUBELET_CONFIG.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    found = re.search(rf"^{name}:\s*[\"']?([\w.]+)", text, re.MULTILINE)
    return found[1] if found else ""


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_check_handler, _check_gpus, _check_grace)
