"""Checks of memory: room for CRIU, and mappings that CRIU cannot dump."""

from collections.abc import Iterator

from ocihook.linux.page_scan import has_guard_pages
from ocihook.preflight.check import Check, before
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation

# CRIU runs code of its own in each process, one after the other, whose memory counts as the container's. Without swap,
# and where nothing can be reclaimed, the kernel kills a process of the job for it. CRIU 4.1.1 needs 256 KiB.
_NEEDED_BYTES = 1 << 20
_RDMA = "/dev/infiniband/"


def _memory_limit(seen: Observation) -> Iterator[Problem]:
    room = seen.room_bytes
    if room is None or room >= _NEEDED_BYTES or seen.swap_bytes:
        return
    detail = (
        f"its memory limit leaves it {max(0, room) >> 10} KiB; CRIU needs {_NEEDED_BYTES >> 20} MiB there, or the "
        "kernel kills it"
    )
    yield fail(detail, "raise the limit a little, or have the application free memory")


def _sysv_ipc(seen: Observation) -> Iterator[Problem]:
    if seen.has_own("ipc"):
        return
    for process in seen.processes:
        if "/SYSV" in process.maps:
            detail = f"{seen.who(process.pid)} has System V shared memory of the node's"
            yield fail(detail, "run it in an IPC namespace of its own (no hostIPC)")


def _probed(seen: Observation) -> Iterator[str]:
    """Yield which processes have run into a uprobe; the kernel keeps the mapping until they execute another program."""
    for process in seen.processes:
        if "[uprobes]" in process.maps:
            own = " (it has libcuda mapped)" if "/libcuda.so" in process.maps else ""
            yield f"{seen.who(process.pid)}{own} has run into a uprobe, as monitoring sets them,"


def _uprobes(seen: Observation) -> Iterator[Problem]:
    for who in _probed(seen):
        yield fail(f"{who} which CRIU cannot dump", "end the probe (bpftrace, eBPF monitoring, perf), start it again")


def _uprobes_in_images(seen: Observation) -> Iterator[Problem]:
    for who in _probed(seen):
        detail = f"{who} whose breakpoints are dumped: where the probe is not, a restored process ends by SIGTRAP"
        yield warn(detail, "end the probe (bpftrace, eBPF monitoring, perf) before a dump")


def _guard_pages(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        if not process.is_zombie and has_guard_pages(process.pid):
            detail = f"{seen.who(process.pid)} has guard pages (MADV_GUARD_INSTALL, as stacks of glibc 2.42)"
            yield fail(f"{detail}, which CRIU before 4.2 cannot read", "install CRIU 4.2 or later")


def _rdma(seen: Observation) -> Iterator[Problem]:
    for process in seen.processes:
        is_open = any(file.name.startswith(_RDMA) for file in process.files)
        if is_open or f" {_RDMA}" in process.maps:
            detail = f"{seen.who(process.pid)} uses RDMA ({_RDMA}), which CRIU cannot dump"
            yield fail(detail, "have it use TCP: UCX_TLS=tcp,self,sm for UCX and MPI, NCCL_IB_DISABLE=1 for NCCL")


CHECKS = (
    Check(name="memory-limit", find=_memory_limit, is_final=True),
    Check(name="sysv-ipc", find=_sysv_ipc),
    Check(name="uprobes", find=_uprobes, unless=("allow-uprobes",)),
    Check(name="uprobes", find=_uprobes_in_images, only_with=("allow-uprobes",)),
    Check(name="rdma", find=_rdma),
    Check(name="guard-pages", find=_guard_pages, criu=before(4, 2)),
)
