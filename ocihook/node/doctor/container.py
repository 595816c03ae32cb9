"""Checks of a container's surroundings: its policy, network, GPUs and size."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ocihook.config import Settings, apply_annotations, load_settings
from ocihook.container.identity import container_ref
from ocihook.criu.files import loaded_plugin
from ocihook.errors import ConfigError, IdentificationError, OcihookError
from ocihook.gpu.driver import CudaDriver, CudaState, has_driver, no_driver
from ocihook.gpu.preflight import Situation, refusals
from ocihook.gpu.processes import find_gpu_processes, states
from ocihook.linux.memory import own_bytes
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.memory.clean_pages import is_asked_to_track
from ocihook.node.doctor.left_locks import left_locks
from ocihook.node.doctor.machine import about_locks, image_set_places
from ocihook.preflight.finding import Finding, Repair, Status
from ocihook.preflight.observation import Observation

_MIB, _GIB = 1 << 20, 1 << 30


def _check_network(seen: Observation) -> Iterator[Finding]:
    if not seen.has_own("net"):
        return
    inside = ("nsenter", "-t", str(seen.init_pid), "-n")
    yield from about_locks(left_locks(*inside), Status.FAIL, *inside)


def _check_gpu(seen: Observation) -> Iterator[Finding]:
    """What ocihook's own preflight would say."""
    signs = find_gpu_processes(seen.init_pid)
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
        container = seen.container
        named = container.annotations.get("org.criu.config", "") if container else ""
        plugin = loaded_plugin(container.runtime, named) if container else None
        situation = Situation.read(seen.init_pid, signs, known, ENDLESS, plugin=plugin)
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


def check_size(seen: Observation) -> Iterator[Finding]:
    """CRIU writes memory as it is; ocihook compresses it afterwards, or where CRIU does not write it."""
    need = needed_bytes(seen)
    detail = f"{len(seen.pids)} processes with {need // _MIB} MiB of memory"
    free = {place: _free_bytes(place) for place in _places(seen) if Path(place).exists()}
    lacking = [place for place, free_bytes in free.items() if free_bytes < need]
    if not lacking:
        yield Finding("size", Status.OK, detail)
        return
    status = Status.FAIL if len(lacking) == len(free) else Status.WARN
    named = ", ".join(f"{place} has {free[place] // _MIB} MiB free" for place in lacking)
    yield Finding("no-space", status, f"{detail}; {named}", f"free space in {' and '.join(lacking)}")


def needed_bytes(seen: Observation) -> int:
    """Return how much memory a dump writes: each process's own, and once each deleted or nameless file in use."""
    files = {(file.device, file.inode): file.stored_bytes for file in seen.files if file.is_deleted and file.is_regular}
    own = 0
    for pid in seen.pids:
        with contextlib.suppress(OSError):  # it has exited
            own += own_bytes(pid)
    return own + sum(files.values())


def _places(seen: Observation) -> tuple[str, ...]:
    """Return where memory may be written: the engine decides, or ocihook, which reads it into the store."""
    with contextlib.suppress(IdentificationError):  # reported by the check of the policy
        if seen.policy().mode == "store" and is_asked_to_track(seen.options):
            return (*image_set_places(seen.engine), _settings().store_dir)
    return image_set_places(seen.engine)


def _free_bytes(place: str) -> int:
    state = os.statvfs(place)
    return state.f_bavail * state.f_frsize


def _check_policy(seen: Observation) -> Iterator[Finding]:
    if seen.container is None:
        return
    named = seen.container.annotations.get("org.criu.config")
    if named:
        detail = f"org.criu.config has CRIU read {named} in place of ocihook's configuration"
        yield Finding("org.criu.config", Status.WARN, detail, "remove the annotation")
    annotations = seen.container.annotations
    try:
        container = container_ref(annotations, container_id=seen.container.id, runtime="", bundle="")
    except IdentificationError as error:
        yield Finding("policy", Status.FAIL, str(error.args[0]), error.hint)
        return
    policy, refused, unknown = apply_annotations(_settings(), annotations, in_pod=container.is_in_pod)
    for reason in refused:
        yield Finding("policy", Status.FAIL, str(reason.args[0]), reason.hint or "correct the annotation")
    for sentence in unknown:
        yield Finding("policy", Status.WARN, sentence, "correct the annotation, or have the same ocihook on all nodes")
    if not refused:
        yield Finding("policy", Status.OK, f"mode {policy.mode}; CRIU's options come from {seen.options.file}")


def _settings() -> Settings:
    try:
        return load_settings()
    except ConfigError:  # reported by the check of the node
        return Settings()


# A dump decides these by itself, where it knows more: policy (stages/dump.py), GPUs (gpu/dump.py).
CHECKS: tuple[Callable[[Observation], Iterator[Finding]], ...] = (
    check_size,
    _check_policy,
    _check_network,
    _check_gpu,
)
