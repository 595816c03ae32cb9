"""Checks of a container's surroundings: its policy, network, GPUs and size."""

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
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
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


def _check_size(seen: Observation) -> Iterator[Finding]:
    """CRIU writes what is resident; the engine then archives it."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    resident = 0
    for pid in seen.pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        resident += (int(fields[1]) - int(fields[2])) * page_bytes  # without what is files'
    detail = f"{len(seen.pids)} processes with {resident // _MIB} MiB of memory"
    for place in image_set_places(seen.engine):
        if not Path(place).exists():
            continue
        state = os.statvfs(place)
        if resident > state.f_bavail * state.f_frsize:
            free = state.f_bavail * state.f_frsize // _MIB
            yield Finding("no-space", Status.FAIL, f"{detail}; {place} has {free} MiB free", f"free space in {place}")
            return
    yield Finding("size", Status.OK, detail)


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
    _check_size,
    _check_policy,
    _check_network,
    _check_gpu,
)
