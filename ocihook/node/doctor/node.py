"""Checks of a node's programs and configuration: CRIU, runtimes, engines, the kubelet, ocihook itself."""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook import wire
from ocihook.config import load_settings
from ocihook.criu.conf import CRIU_CONF_DIR, action_scripts, options, plugin_dir, read_block, remove_block
from ocihook.criu.files import content, files_read_for
from ocihook.criu.options import Known, Script, faults, scripts
from ocihook.criu.plugin import find_plugin
from ocihook.criu.version import Program, find_program, libcriu_reads_conf, run_output
from ocihook.errors import ConfigError, OcihookError, reason
from ocihook.gpu.library import CDI_DIRS
from ocihook.gpu.preflight import KEEP_PLUGIN_OUT
from ocihook.linux.procfs import Process, status_fields
from ocihook.model import ContainerRef
from ocihook.node.install import CONF_NAMES, LISTEN, SOCKET, TRACKING
from ocihook.preflight.finding import Finding, Repair, Status
from ocihook.session import history
from ocihook.session.journal import open_journals, read_journal

_OF_CRUN, _BY_CONTAINERD, _BY_CRIO = "containers of crun", "restores by containerd", "restores by CRI-O"
_CONTAINERDS = "use containerd 2.1 to 2.3"
_RESTORE_SWITCH = "enable_experimental_restore_via_create"
_CRIO_CHECKS_SIGNATURES = (1, 31)  # server/container_create.go, verifyImageSignature
_RUNTIMES = ("runc", "crun")
_SYSTEMD = Path("/run/systemd/system")
_ENGINE_CONFIGS = (
    "containerd/config.toml",
    "containerd/conf.d/*.toml",
    "crio/crio.conf",
    "crio/crio.conf.d/*",
    "containers/containers.conf",
    "containers/containers.conf.d/*.conf",
)
_ETC = Path("/etc")
_KUBELET_CONFIG = Path("/var/lib/kubelet/config.yaml")
_KUBELET_TIMEOUT_S = 120  # kubelet's runtimeRequestTimeout, if nothing else is set
_NVIDIA = Path("/proc/driver/nvidia")
_NVIDIA_RUNTIME = "nvidia-container-runtime/config.toml"
_PLUGIN_SYMBOL = b"check_and_remove_inventory_plugin"  # of CRIU 4.1 and later (criu#2521)
_RECENT_S = 24 * 3600.0
# Options of a CRIU configuration file that break checkpoints made through a runtime.
_HARMFUL_OPTIONS = {
    "stream": "CRIU aborts: a runtime cannot stream images",
    "lazy-pages": "a dump waits for a page server that nobody starts",
    "leave-running": "the runtime believes the container has stopped",
    "leave-stopped": "the runtime does not know that the container is stopped",
    "mntns-compat-mode": "every dump fails",
    "log-file": "the runtime does not find CRIU's log",
    "images-dir": "the engine archives an empty directory",
    "auto-dedup": "a restore punches holes into the page images that it reads",
}
_TRACKING = {line.split()[0] for line in TRACKING}
_NO_TUN = "tun: Unable to create tun"  # printed wherever there is no /dev/net/tun, and no reason to fail (criu/tun.c)
_BAD_CRUN = ((1, 29), (1, 29, 0))  # its NEWS: corrected by 1.29.1
_TAKE_JOINED_VALUES_ONLY = ("cpu-cap", "ext-unix-sk", "manage-cgroups", "verbosity")
_NETWORK_LOCK_CRASHES_UP_TO = (4, 2)  # an option that CRIU parses once more than there are arguments (config.c)


def _check_criu() -> Iterator[Finding]:
    criu = find_program("criu")
    if criu is None:
        yield Finding("criu", Status.FAIL, "not installed", "install CRIU 4.1.1 or later (Debian 13, Fedora 42)")
        return
    if criu.version < (3, 19):
        remedy = "install CRIU 4.1.1 or later: older ones do not run scripts of a configuration file for a runtime"
        yield Finding("criu", Status.FAIL, criu.version_text, remedy)
        return
    if os.geteuid() == 0 and "Looks good" not in (output := _checked(criu)):
        errors = (line for line in output.splitlines() if "rror" in line and _NO_TUN not in line)
        problem = next(errors, output.strip() or "no answer")
        remedy = "see `criu check`" if criu.version >= (4, 1, 1) else "install CRIU 4.1.1 or later; `criu check`"
        yield Finding("criu", Status.FAIL, f"{criu.version_text}: {problem}", remedy)
    elif criu.version < (4, 1, 1):
        yield Finding("criu", Status.WARN, criu.version_text, "CRIU 4.1.1 or later is what this is tested with")
    else:
        yield Finding("criu", Status.OK, criu.version_text)


def _checked(criu: Program) -> str:
    """Return what `criu check` prints. It makes a link beside its images where the configuration tracks memory."""
    with tempfile.TemporaryDirectory() as place:
        return run_output(criu.path, "check", "--images-dir", place)


def _check_runtimes() -> Iterator[Finding]:
    found = [program for name in _RUNTIMES if (program := find_program(name))]
    if not found:
        yield Finding("runtime", Status.FAIL, "neither runc nor crun", "install runc or crun")
    for program in found:
        if program.name == "crun" and "+CRIU" not in run_output(program.path, "--version"):
            remedy = "use runc, or a crun that has +CRIU"
            yield Finding("runtime crun", Status.WARN, "built without CRIU", remedy, rules_out=_OF_CRUN)
        elif program.name == "crun" and libcriu_reads_conf() is None:
            detail = f"{program.version_text}: libcriu.so.2 is not there, so it cannot checkpoint"
            remedy = "install libcriu2 (Debian) or criu-libs (Fedora)"
            yield Finding("runtime crun", Status.WARN, detail, remedy, rules_out=_OF_CRUN)
        elif program.name == "crun" and program.version in _BAD_CRUN:
            detail = f"{program.version_text} may leave a container frozen, and changes the modes of mounts (/dev/shm)"
            yield Finding("runtime crun", Status.WARN, detail, "install crun 1.29.1 or later")
        else:
            yield Finding(f"runtime {program.name}", Status.OK, program.version_text)


def _check_engines() -> Iterator[Finding]:
    engines = [program for name in ("podman", "containerd", "crio") if (program := find_program(name))]
    if not engines:
        yield Finding("engine", Status.WARN, "no podman, containerd or CRI-O on PATH", "install one, if this is a node")
    for engine in engines:
        if engine.name == "containerd":
            yield _containerd(engine)
        elif engine.name == "crio":
            yield _crio(engine)
        else:
            yield Finding(f"engine {engine.name}", Status.OK, engine.version_text)


def _containerd(engine: Program) -> Finding:
    """Containerd's restore through CreateContainer comes and goes: here, off by default, gone."""
    name, text, version = "engine containerd", engine.version_text, engine.version
    if version < (2, 0):
        detail = f"{text}: its CRI has no CheckpointContainer"
        return Finding(name, Status.WARN, detail, _CONTAINERDS, rules_out="containers of containerd")
    if version < (2, 1):
        return Finding(
            name, Status.WARN, f"{text} checkpoints, but cannot restore", _CONTAINERDS, rules_out=_BY_CONTAINERD
        )
    configuration = run_output(engine.path, "config", "dump")
    if re.search(r"enable_criu\s*=\s*false", configuration):
        detail = f"{text}: enable_criu = false: the kubelet's checkpoints, and restores from images, are refused"
        remedy = "set enable_criu = true for its CRI runtime plugin, and restart it"
        return Finding(name, Status.WARN, detail, remedy, rules_out="containers of containerd")
    if version >= (2, 4):
        detail, remedy = f"{text} checkpoints, but no longer restores", "restore with CRI-O or podman"
        return Finding(name, Status.WARN, detail, remedy, rules_out=_BY_CONTAINERD)
    has_switch = (2, 2, 7) <= version < (2, 3) or version >= (2, 3, 4)
    if has_switch and not re.search(rf"{_RESTORE_SWITCH}\s*=\s*true", configuration):
        remedy = f"set {_RESTORE_SWITCH} = true for its CRI runtime plugin"
        detail = f"{text} restores only where that is switched on"
        return Finding(name, Status.WARN, detail, remedy, rules_out=_BY_CONTAINERD)
    return Finding(name, Status.OK, text)


def _crio(engine: Program) -> Finding:
    """CRI-O's own switch; and from 1.31 on it restores nothing where it checks signatures, as its packages have it."""
    name, text = "engine crio", engine.version_text
    switches = _crio_switches()
    for key, off in (("enable_criu_support", "false"), ("container_level_enabled", "none")):
        if key in switches and switches[key][1] == off:
            detail = f"{text}: {switches[key][0]} switches checkpoints off"
            remedy = f"remove {key} = {off} there, and restart CRI-O"
            return Finding(name, Status.WARN, detail, remedy, rules_out="containers of CRI-O")
    if (switch := switches.get("container_level_enabled")) and switch[1] == "checkpoint_only":
        detail = f"{text}: {switch[0]} lets it checkpoint, but not restore"
        remedy = 'set container_level_enabled = "checkpoint_restore" there, and restart CRI-O'
        return Finding(name, Status.WARN, detail, remedy, rules_out=_BY_CRIO)
    if engine.version >= _CRIO_CHECKS_SIGNATURES and (path := _crio_signature_policy()):
        detail = f"{text}: {path} sets signature_policy, with which it checkpoints but cannot restore"
        remedy = (
            'have the policy in /etc/containers/policy.json, and signature_policy = "" in a later file of crio.conf.d'
        )
        return Finding(name, Status.WARN, detail, remedy, rules_out=_BY_CRIO)
    return Finding(name, Status.OK, text)


def _engine_configs() -> Iterator[tuple[Path, str]]:
    """Yield the engines' configuration files, the later ones overriding the earlier, without comments."""
    for pattern in _ENGINE_CONFIGS:
        for path in sorted(_ETC.glob(pattern)):
            lines = path.read_text(errors="replace").splitlines()
            yield path, "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def _crio_switches() -> dict[str, tuple[Path, str]]:
    """Return the file and value of each switch of CRI-O's checkpoints, the last that counts."""
    found = {}
    for path, text in _engine_configs():
        for key, value in re.findall(r'(enable_criu_support|container_level_enabled)\s*=\s*["\']?(\w+)', text):
            found[key] = path, value
    return found


def _crio_signature_policy() -> Path | None:
    """Return the file that has CRI-O check signatures by a policy of its own."""
    found = None
    for path, text in _engine_configs():
        for value in re.findall(r"""^\s*signature_policy\s*=\s*["'](.*)["']""", text, re.MULTILINE):
            found = path if value else None
    return found


def _check_annotations() -> Iterator[Finding]:
    """Where a container may name CRIU's configuration, ours is not read; and containerd passes few on by default."""
    containerd = find_program("containerd")
    if containerd and containerd.version >= (2, 0):
        passing = r"pod_annotations\s*=\s*\[[^\]]*[\"'](\*|ocihook\.io/)"
        if not re.search(passing, run_output(containerd.path, "config", "dump")):
            detail = "containerd passes no ocihook.io/… of pods on; only the node's configuration applies"
            remedy = 'set pod_annotations = ["ocihook.io/*"] for its runtimes, if pods are to have their own'
            yield Finding("annotations", Status.SKIP, detail, remedy)
    allowing = r"annotations\s*=\s*\[[^\]]*[\"'](\*|org\.\*|org\.criu[^\"']*)[\"']"
    for path, text in _engine_configs():
        if match := re.search(allowing, text):
            detail = f"{path} lets containers annotate {match[1]}: CRIU then reads, as root, the file that they name"
            remedy = "allow org.criu.config to nobody, or have those files name ocihook's action script"
            yield Finding("org.criu.config", Status.WARN, detail, remedy)


def _check_installation() -> Iterator[Finding]:
    """Each runtime reads other files; our block must be in those."""
    scripts, broken = {}, []
    for name in CONF_NAMES:
        try:
            block = read_block(content(name), where=str(CRIU_CONF_DIR / name))
        except ConfigError as error:
            broken.append(str(error.args[0]))
        else:
            scripts[name] = block.action_script if block else ""
    if broken:
        yield Finding("installation", Status.FAIL, "; ".join(broken), "correct the file, then `ocihook install`")
        return
    for runtime in _RUNTIMES:
        names = files_read_for(runtime)
        launchers = [scripts[name] for name in names if scripts[name]]
        if launchers:
            yield _launcher(f"installation, {runtime}", Path(launchers[-1]))
        elif names:
            detail = f"{runtime} does not call ocihook: none of {', '.join(names)} has its block"
            yield Finding("installation", Status.FAIL, detail, "ocihook install", Repair.INSTALL)


def _launcher(name: str, launcher: Path) -> Finding:
    try:
        status = launcher.stat()
    except OSError as error:
        detail = f"{launcher}: {error.strerror}; every checkpoint fails"
        return Finding(name, Status.FAIL, detail, "ocihook install", Repair.INSTALL)
    if status.st_uid != 0 or status.st_mode & 0o022:
        return Finding(
            name, Status.FAIL, f"{launcher} can be changed by others than root", "ocihook install", Repair.INSTALL
        )
    environment = {"PATH": "/usr/bin:/bin", "CRTOOLS_SCRIPT_ACTION": wire.SELF_TEST_STAGE}
    started = time.perf_counter()
    try:
        done = subprocess.run([launcher], env=environment, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(
            name, Status.FAIL, f"{launcher} cannot be run: {reason(error)}", "ocihook install", Repair.INSTALL
        )
    took_ms = (time.perf_counter() - started) * 1000
    if done.returncode != 0:
        return Finding(
            name, Status.FAIL, f"{launcher} fails: {done.stderr.strip()[-200:]}", "ocihook install", Repair.INSTALL
        )
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


def _is_filtered() -> bool:
    """Return whether the agent, if it runs now, has a filter: then it may not suspend that of a container."""
    pid = run_output("systemctl", "show", "--property=MainPID", "--value", "ocihook.service").strip()
    return pid not in ("", "0") and status_fields(int(pid)).get("Seccomp", "0") != "0"


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
    elif socket == "active" and not (Path(wire.RUNTIME_DIR) / wire.SOCKET_NAME).exists():
        detail = f"{SOCKET} is active, but {wire.RUNTIME_DIR}/{wire.SOCKET_NAME} is missing: the hook starts the agent"
        yield Finding("agent", Status.WARN, detail, f"systemctl restart {SOCKET}")
    elif socket == "active" and _is_filtered():
        detail = "ocihook.service may not make all system calls: no container with a filter of its own is checkpointed"
        remedy = "remove SystemCallFilter, Restrict*, Lock* and Protect* from its drop-ins (`systemctl cat ocihook`)"
        yield Finding("agent", Status.WARN, detail, remedy, rules_out="containers with a seccomp filter")
    elif socket == "active":
        yield Finding("agent", Status.OK, "systemd starts it")
    else:
        detail = f"ocihook.socket is {socket or 'unknown'}: the hook starts the agent, outside systemd's care"
        loaded = run_output("systemctl", "show", "--property=LoadState", "--value", SOCKET).strip()
        if loaded == "masked":
            yield Finding("agent", Status.WARN, detail, f"systemctl unmask {SOCKET}, then {LISTEN}")
        elif loaded == "loaded":
            yield Finding("agent", Status.WARN, detail, LISTEN, Repair.LISTEN)
        else:
            yield Finding("agent", Status.WARN, detail, "ocihook install", Repair.INSTALL)


def _check_sessions(runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> Iterator[Finding]:
    """What a killed agent left, and the last failure on this node."""
    for path in open_journals(runtime_dir):
        try:
            journal = read_journal(path)
        except FileNotFoundError:  # it has just ended
            continue
        except OcihookError as error:
            yield Finding("sessions", Status.WARN, str(error), f"look at it and remove it: {path}")
            continue
        if not Process(*journal["criu"]).is_alive():
            kinds = ", ".join(effect["kind"] for effect in journal["effects"]) or "nothing to undo"
            container = ContainerRef.from_json(journal["container"]) if journal["container"] else "unknown"
            detail = f"session {path.stem} of container {container} was left behind: {kinds}"
            yield Finding("sessions", Status.WARN, detail, "ocihook recover", Repair.RECOVER)
    with contextlib.suppress(ConfigError):  # reported by another check
        yield from _last_failure(Path(load_settings().history_dir))


def _last_failure(directory: Path) -> Iterator[Finding]:
    for record in reversed(history.read(directory)):
        failure = record["facts"].get("failure", {})
        _, text = history.error_of(record)
        if text and record["ended"] > time.time() - _RECENT_S:
            container = ContainerRef.from_json(record["container"]) if record.get("container") else "unknown"
            detail = f"the last {history.act_of(record)} that failed, of {container}: {failure.get('what', text)}"
            yield Finding("last failure", Status.OK, detail, failure.get("remedy", "ocihook timeline"))
            return


def _check_kubelet() -> Iterator[Finding]:
    """The kubelet's own switch and deadline; both are left to their defaults where they are not named."""
    try:
        text = _KUBELET_CONFIG.read_text(errors="replace")
    except FileNotFoundError:
        return
    if re.search(r"^\s+ContainerCheckpoint:\s*false", text, re.MULTILINE):
        detail = f"{_KUBELET_CONFIG} switches its checkpoint API off: it answers 404"
        remedy = "remove ContainerCheckpoint: false from featureGates"
        yield Finding("kubelet", Status.WARN, detail, remedy, rules_out="checkpoints by the kubelet")
    match = re.search(r"^runtimeRequestTimeout:\s*[\"']?([0-9hms.]+)", text, re.MULTILINE)
    timeout_s = _seconds(match[1]) if match else 0
    if (timeout_s or _KUBELET_TIMEOUT_S) <= _KUBELET_TIMEOUT_S:
        detail = (
            f"a restore has {timeout_s or _KUBELET_TIMEOUT_S:.0f} s (runtimeRequestTimeout), a dump as long or what "
        )
        remedy = f"set runtimeRequestTimeout: 15m in {_KUBELET_CONFIG} and restart the kubelet"
        yield Finding("kubelet", Status.WARN, detail + "?timeout= says: large containers take longer", remedy)
    else:
        yield Finding("kubelet", Status.OK, f"a restore has {timeout_s:.0f} s")


def _seconds(text: str) -> float:
    """Return a Go duration in seconds."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)([hms])", text))


def _check_configuration() -> Iterator[Finding]:
    try:
        load_settings()
    except ConfigError as error:
        yield Finding("configuration", Status.FAIL, str(error.args[0]), error.hint or "correct the file")
    else:
        yield Finding("configuration", Status.OK, "/etc/ocihook")


def _check_criu_configuration() -> Iterator[Finding]:
    criu = find_program("criu")
    crashes = criu is not None and criu.version <= _NETWORK_LOCK_CRASHES_UP_TO
    check = "criu configuration"
    for name in CONF_NAMES:
        path, text = CRIU_CONF_DIR / name, content(name)
        yield from _lines_that_end_criu(name, text)
        for option in options(text):
            if option.name in _HARMFUL_OPTIONS:
                detail = f"{path}: {option.name}: {_HARMFUL_OPTIONS[option.name]}"
                yield Finding(check, Status.FAIL, detail, f"remove {option.name}")
            elif option.name == "network-lock" and name != "default.conf" and crashes:
                detail = f"{path}: network-lock crashes CRIU up to 4.2 when a runtime calls it"
                yield Finding(check, Status.FAIL, detail, f"move it to {CRIU_CONF_DIR}/default.conf")
            elif option.name in _TAKE_JOINED_VALUES_ONLY and option.value and not option.is_joined:
                detail = f"{path}: CRIU silently drops the value of `{option.name} {option.value}`"
                yield Finding(check, Status.WARN, detail, f"write {option.name}={option.value}")
        try:
            foreign = action_scripts(remove_block(text, where=str(path)))
        except ConfigError:  # reported by the check of the installation
            continue
        if foreign:
            detail = f"{path} also names {', '.join(foreign)}: it runs too, before ours if it is named after it"
            yield Finding("other action scripts", Status.OK, detail)


def check_tracking(*, works: bool) -> Iterator[Finding]:
    """Options with which CRIU refuses all that it is to do where the kernel does not mark what is written.

    Args:
        works: whether it does; asked before, since the answer takes a fork, and checks run in threads.
    """
    check = "memory tracking"
    told = [name for name in CONF_NAMES if _TRACKING & {option.name for option in options(content(name))}]
    if works:
        whose = f"CRIU tracks it by {', '.join(told)}" if told else "used for containers of the runtime handler"
        yield Finding(check, Status.OK, f"the kernel marks what is written; {whose}")
        return
    for name in told:
        path, text = CRIU_CONF_DIR / name, content(name)
        detail = (
            f"{path}: this kernel does not mark what is written: with track-mem CRIU refuses every dump and restore"
        )
        try:
            foreign = options(remove_block(text, where=str(path)))
        except ConfigError:  # reported by the check of the installation
            foreign = options(text)
        if named := sorted(_TRACKING & {option.name for option in foreign}):
            yield Finding(check, Status.FAIL, detail, f"remove {' and '.join(named)} from {path}")
        else:
            yield Finding(check, Status.FAIL, detail, "ocihook install", Repair.INSTALL)


def _lines_that_end_criu(name: str, text: bytes) -> Iterator[Finding]:
    """What CRIU refuses to read, and scripts that it cannot run: engines report neither."""
    path = CRIU_CONF_DIR / name
    read = [file for runtime in _RUNTIMES for file in files_read_for(runtime)]
    status = Status.FAIL if name in read or not read else Status.WARN  # no runtime of this node has CRIU read it
    for line, what, remedy in faults(text, _known_options() if text else Known()):
        detail = f"{path}, line {line}: {what}; CRIU misreads it or ends at once, and engines say no more than EOF"
        yield Finding("criu configuration", status, detail, f"{remedy} ({path}, line {line})")
    try:
        block = read_block(text, where=str(path))
    except ConfigError:  # reported by the check of the installation
        block = None
    for script in scripts(text):
        if (block is None or script.path != block.action_script) and (wrong := _not_runnable(script)):
            detail = f"{path}, line {script.line}: the action script {script.path} {wrong}: every checkpoint fails"
            remedy = f"put it there, as a program (chmod +x), or remove line {script.line} of {path}"
            yield Finding("action script", status, detail, remedy)


def _known_options() -> Known:
    criu = find_program("criu")
    if criu is None:
        return Known()
    try:
        program = Path(criu.path).read_bytes()
    except OSError:
        return Known(criu.version_text)
    is_ours = program.startswith(b"\x7fELF")  # else a script that starts it
    return Known(criu.version_text, program if is_ours else None, run_output(criu.path, "--help"))


def _not_runnable(script: Script) -> str:
    """Return what is wrong with an action script, "" if nothing is, or if that is not known."""
    path = script.path if "/" in script.path else shutil.which(script.path) or script.path  # as execvp(3) has it
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return ""
    except OSError as error:
        return f"cannot be run ({reason(error)})"
    if not stat.S_ISREG(mode):
        return "is not a file"
    return "" if mode & 0o111 else "is not executable"


def _check_cuda_plugin() -> Iterator[Finding]:
    """CRIU's own, which does to CUDA processes what ocihook does, at other times."""
    name, plugin, criu = "criu's cuda plugin", _cuda_plugin(), find_program("criu")
    if plugin is None:
        kept_out = find_plugin()
        detail = f"{kept_out} is kept out by CRIU's libdir; a restore of what it has checkpointed needs it"
        yield Finding(name, Status.OK, detail if kept_out else "not in the way")
    elif criu and _PLUGIN_SYMBOL in plugin.read_bytes() and _PLUGIN_SYMBOL not in Path(criu.path).read_bytes():
        detail = f"{plugin} is newer than CRIU {criu.version_text} and cannot be loaded: every dump fails"
        yield Finding(
            name, Status.FAIL, detail, f"install both in the same version, or {KEEP_PLUGIN_OUT}", Repair.INSTALL
        )
    elif not _NVIDIA.exists():
        yield Finding(name, Status.OK, f"{plugin} is idle: there is no GPU of NVIDIA's")
    else:
        detail = (
            f"{plugin} would act, too: in a dump it thaws what stands still without its GPU memory, so those of CUDA "
            "processes are refused"
        )
        yield Finding(name, Status.FAIL, detail, KEEP_PLUGIN_OUT, Repair.INSTALL)


def _check_nvidia_runtime() -> Iterator[Finding]:
    """NVIDIA's hook mounts behind a runtime's back, what CRIU then cannot place; with CDI the runtime mounts."""
    try:
        text = (_ETC / _NVIDIA_RUNTIME).read_text(errors="replace")
    except FileNotFoundError:
        return
    found = re.search(r'^\s*mode\s*=\s*"(\w+)"', text, re.MULTILINE)
    mode = found[1] if found else "auto"
    has_cdi = any(directory.is_dir() and any(directory.iterdir()) for directory in CDI_DIRS)
    remedy = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    if mode == "legacy":
        detail = f"{_ETC / _NVIDIA_RUNTIME}: mode legacy mounts by a hook; CRIU cannot dump such mounts"
        remedy = f'{remedy}; set mode = "cdi" there'
        yield Finding("nvidia-mount", Status.WARN, detail, remedy, rules_out="containers with a GPU")
    elif not has_cdi:
        detail = "no CDI specification: GPUs are given by NVIDIA's hook, whose mounts CRIU cannot dump"
        yield Finding("nvidia-mount", Status.WARN, detail, remedy, rules_out="containers with a GPU")
    else:
        yield Finding("nvidia-mount", Status.OK, f"mode {mode}, with CDI")


def _cuda_plugin() -> Path | None:
    """Return CRIU's CUDA plugin if it is where CRIU looks for plugins, for any of the runtimes."""
    read = [names for runtime in _RUNTIMES if (names := files_read_for(runtime))]
    found = (find_plugin(plugin_dir(*map(content, names))) for names in read)
    return next(filter(None, found), None)


# Of these, what concerns somebody's own `criu dump` of a process, too.
CRIU_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_check_criu, _check_configuration)
CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_criu,
    _check_runtimes,
    _check_engines,
    _check_kubelet,
    _check_installation,
    _check_agent,
    _check_sessions,
    _check_configuration,
    _check_criu_configuration,
    _check_annotations,
    _check_cuda_plugin,
    _check_nvidia_runtime,
)
