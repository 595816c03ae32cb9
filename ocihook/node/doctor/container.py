"""Checks of what is around a workload's processes: its policy, mounts, network, GPUs and size."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shlex import quote

from ocihook.config import Settings, apply_annotations, load_settings
from ocihook.container.identity import container_ref, engine_of
from ocihook.criu.files import loaded_plugin
from ocihook.errors import ConfigError, IdentificationError, OcihookError
from ocihook.gpu.driver import CudaDriver, CudaState, has_driver, no_driver
from ocihook.gpu.preflight import Situation, refusals
from ocihook.gpu.processes import find_gpu_processes, states
from ocihook.linux.open_files import Mount, mounts, namespaces, resolve_inside
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.memory.parasite_room import HINT, lacking_for_criu
from ocihook.node.doctor.finding import Finding, Repair, Status
from ocihook.node.doctor.machine import REMOVE_LOCK, image_set_places, left_network_locks
from ocihook.node.doctor.workload import Workload

_MIB, _GIB = 1 << 20, 1 << 30
_LARGE_TMPFS_BYTES = 64 * _MIB  # CRIU writes it with tar and gzip, on one core


def _check_mounts(workload: Workload) -> Iterator[Finding]:
    container = workload.container
    if container is None or not container.config:
        return
    known = _configured_mounts(container.config, workload.init_pid)
    for mount in mounts(workload.init_pid):
        if mount.kind == "tmpfs" and mount.place not in known.get("bind", set()):
            yield from _about_tmpfs(workload, mount)
        if mount.place == "/" or any(mount.place in places for places in known.values()):
            continue
        if "nvidia" in mount.place:
            detail = f"NVIDIA's hook mounted {mount.place} behind the runtime's back; CRIU cannot dump it"
            remedy = 'nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and mode = "cdi" in its config.toml'
            yield Finding("nvidia-mount", Status.FAIL, detail, remedy)
        elif mount.root != "/" and mount.kind not in ("proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts"):
            detail = f"{mount.place} was mounted after the container was made; CRIU cannot dump it"
            remedy = f"nsenter -t {workload.init_pid} -m umount {quote(mount.place)}, or mount it through the engine"
            yield Finding("mount", Status.FAIL, detail, remedy)


def _configured_mounts(config: Mapping[str, object], pid: int) -> dict[str, set[str]]:
    """Return the places where a bundle has its runtime mount, by what for: /var/run may be a link to /run."""
    linux = config.get("linux")
    linux = linux if isinstance(linux, Mapping) else {}
    rows = [m for m in (config.get("mounts") or ()) if isinstance(m, Mapping)]  # type: ignore[attr-defined]
    binds = {str(m.get("destination")) for m in rows if m.get("type") == "bind" or "bind" in (m.get("options") or ())}
    places = {
        "bind": binds,
        "mount": {str(m.get("destination")) for m in rows},
        "device": {str(d.get("path")) for d in (linux.get("devices") or ()) if isinstance(d, Mapping)},
        "masked": {*map(str, linux.get("maskedPaths") or ()), *map(str, linux.get("readonlyPaths") or ())},
        "console": {"/dev/console", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"},
    }
    return {purpose: {resolve_inside(pid, place) for place in named} for purpose, named in places.items()}


def _about_tmpfs(workload: Workload, mount: Mount) -> Iterator[Finding]:
    try:
        state = os.statvfs(f"/proc/{workload.init_pid}/root{mount.place}")
    except OSError:
        return
    used_bytes = (state.f_blocks - state.f_bfree) * state.f_frsize
    if used_bytes > _LARGE_TMPFS_BYTES:
        detail = (
            f"{mount.place} is memory (tmpfs) with {used_bytes // _MIB} MiB, which CRIU packs with gzip on one core"
        )
        yield Finding(
            "tmpfs", Status.WARN, detail, f"remove from {quote(mount.place)} what can be recreated, or use a volume"
        )


def _check_network(workload: Workload) -> Iterator[Finding]:
    if namespaces(workload.init_pid).get("net") == namespaces(os.getpid()).get("net"):
        return
    inside = ("nsenter", "-t", str(workload.init_pid), "-n")
    if left := left_network_locks(*inside):
        detail = f"a killed CRIU left its network locked ({left}): no packet passes"
        yield Finding("network-lock-left", Status.FAIL, detail, f"{' '.join(inside)} {REMOVE_LOCK}")


def _check_gpu(workload: Workload) -> Iterator[Finding]:
    """What ocihook's own preflight would say."""
    signs = find_gpu_processes(workload.init_pid)
    if not signs:
        return
    if not has_driver():
        who = ", ".join(str(one.pid) for one in signs)
        detail = f"processes {who} use NVIDIA's driver, which cannot be asked: {no_driver().args[0]}"
        yield Finding("gpu", Status.FAIL, detail, no_driver().hint)
        return
    try:
        driver = CudaDriver()
        known = states(driver, [process for s in signs if (process := Process.find(s.pid))], ENDLESS)
        container = workload.container
        named = container.annotations.get("org.criu.config", "") if container else ""
        plugin = loaded_plugin(container.runtime, named) if container else None
        situation = Situation.read(workload.init_pid, signs, known, ENDLESS, plugin=plugin)
    except OcihookError as error:
        yield Finding("gpu", Status.FAIL, str(error.args[0]), error.hint)
        return
    for reason in refusals(situation):
        what, _, remedy = reason.partition(": ")
        yield Finding("gpu", Status.FAIL, what, remedy)
    stuck = [process.pid for process, state in known.items() if state not in (None, CudaState.RUNNING)]
    if stuck:
        detail = f"processes {', '.join(map(str, stuck))} are locked or checkpointed and wait for their GPU"
        yield Finding("gpu-state", Status.FAIL, detail, "ocihook recover", Repair.RECOVER)
    if not stuck and situation.cuda_pids:
        detail = f"{len(situation.cuda_pids)} CUDA processes hold {situation.held_bytes / _GIB:.1f} GiB of GPU memory"
        yield Finding("gpu", Status.OK, detail)


def _check_size(workload: Workload) -> Iterator[Finding]:
    """CRIU writes what is resident; the engine then archives it."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    resident = 0
    for pid in workload.pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        resident += (int(fields[1]) - int(fields[2])) * page_bytes  # without what is files'
    detail = f"{len(workload.pids)} processes with {resident // _MIB} MiB of memory"
    engine = engine_of(workload.container.annotations) if workload.container else ""
    for place in image_set_places(engine):
        if not Path(place).exists():
            continue
        state = os.statvfs(place)
        if resident > state.f_bavail * state.f_frsize:
            free = state.f_bavail * state.f_frsize // _MIB
            yield Finding("no-space", Status.FAIL, f"{detail}; {place} has {free} MiB free", f"free space in {place}")
            return
    yield Finding("size", Status.OK, detail)


def _check_policy(workload: Workload) -> Iterator[Finding]:
    if workload.container is None:
        return
    named = workload.container.annotations.get("org.criu.config")
    if named:
        detail = f"org.criu.config has CRIU read {named} in place of ocihook's configuration"
        yield Finding("org.criu.config", Status.WARN, detail, "remove the annotation")
    annotations = workload.container.annotations
    try:
        container = container_ref(annotations, container_id=workload.container.id, runtime="", bundle="")
    except IdentificationError as error:
        yield Finding("policy", Status.FAIL, str(error.args[0]), error.hint)
        return
    policy, refused, unknown = apply_annotations(_settings(), annotations, in_pod=container.is_in_pod)
    for reason in refused:
        yield Finding("policy", Status.FAIL, str(reason.args[0]), reason.hint or "correct the annotation")
    for sentence in unknown:
        yield Finding("policy", Status.WARN, sentence, "correct the annotation, or have the same ocihook on all nodes")
    if not refused:
        yield Finding("policy", Status.OK, f"mode {policy.mode}; CRIU's options come from {workload.options.file}")


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:  # reported by the check of the node
        return Settings()


def _check_memory_limit(workload: Workload) -> Iterator[Finding]:
    if reason := lacking_for_criu(workload.init_pid):
        yield Finding("memory-limit", Status.FAIL, reason, HINT)


CHECKS: tuple[Callable[[Workload], Iterator[Finding]], ...] = (
    _check_size,
    _check_memory_limit,
    _check_policy,
    _check_mounts,
    _check_network,
    _check_gpu,
)
