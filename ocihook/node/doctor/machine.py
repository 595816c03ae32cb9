"""Checks of the machine: privileges, kernel, network, GPUs, memory, disks."""

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ocihook.config import Settings, load_settings
from ocihook.container.storage import storage_root
from ocihook.criu.conf import options
from ocihook.criu.files import content
from ocihook.criu.version import FIRST_CRIU_FOR_6_16, FIRST_CRIU_FOR_7_1, find_program
from ocihook.errors import ConfigError, CudaError, OcihookError
from ocihook.gpu.driver import CudaDriver, has_driver, no_driver
from ocihook.gpu.library import driver_roots, has_kernel_driver
from ocihook.gpu.preflight import FIRST_DRIVER, FIRST_DRIVER_ON_ARM, driver_major
from ocihook.gpu.processes import read_node
from ocihook.linux.patience import ENDLESS
from ocihook.linux.sockets import hides_socket_options
from ocihook.net.nftables import LIBRARY, has_nftables
from ocihook.node.doctor.left_locks import SBIN, LeftLock, left_locks
from ocihook.node.doctor.left_locks import commands as removal
from ocihook.preflight.finding import Finding, Repair, Status

_GIB = 1 << 30
_SELINUX = Path("/sys/fs/selinux/enforce")
_STATUS = Path("/proc/self/status")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PERSISTENCED = Path("run/nvidia-persistenced/socket")  # in the driver's root
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}  # bits of CapEff
_ENGINES = ("podman", "crio", "containerd")
_KUBELET_ARCHIVES = Path("/var/lib/kubelet/checkpoints")
_MANY_ARCHIVES = 20
_IPTABLES = "iptables-restore"  # which CRIU calls

_WITH_GPU = "containers with a GPU"


def image_set_places(engine: str) -> tuple[str, ...]:
    """Return where an engine keeps image sets until they are archived, or unpacked; () for one that is not known."""
    if engine in ("podman", "crio", "cri-o"):
        return (str(storage_root()),)
    if engine == "containerd":
        return ("/var/lib/containerd", os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - containerd's own default
    return ()


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
    criu = find_program("criu")
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if version < (5, 9):
        remedy = "use a kernel of 5.9 or later (CAP_CHECKPOINT_RESTORE, close_range, pidfds)"
        yield Finding("kernel", Status.FAIL, release, remedy)
    else:
        yield Finding("kernel", Status.OK, release)
    if hides_socket_options() and criu and criu.version < FIRST_CRIU_FOR_6_16:
        detail = f"CRIU {criu.version_text} cannot dump containers with Internet sockets on Linux 6.16 and later"
        yield Finding(
            "kernel-6.16",
            Status.WARN,
            detail,
            "install CRIU 4.2 or later",
            rules_out="containers with Internet sockets",
        )
    if version >= (7, 1) and criu and criu.version < FIRST_CRIU_FOR_7_1:
        detail = f"CRIU {criu.version_text} as released dumps no container on Linux 7.1 and later (criu#3002)"
        remedy = "install a later CRIU, or one that your distribution has corrected: `ocihook demo` tries a dump"
        yield Finding("kernel-7.1", Status.WARN, detail, remedy)


def _check_network_lock() -> Iterator[Finding]:
    """CRIU keeps packets out of a container's own network namespace while it dumps it."""
    method = "iptables"
    for option in options(content("default.conf")):
        method = option.value if option.name == "network-lock" else method
    missing = ""
    if method == "iptables" and not shutil.which(_IPTABLES, path=SBIN):
        missing = _IPTABLES
    elif method == "nftables" and not has_nftables():
        missing = LIBRARY
    if missing:
        detail = f"{missing} is not there: containers with a network of their own cannot be dumped"
        yield Finding(
            "no-network-lock",
            Status.WARN,
            detail,
            f"install {method}",
            rules_out="containers with a network of their own",
        )
    elif found := list(about_locks(left_locks(), Status.WARN)):
        yield from found
    else:
        yield Finding("network lock", Status.OK, method)


def _check_empty_tables() -> Iterator[Finding]:
    """A dump that stops a container of the node's own network leaves one (CRIU 4.2); each costs every packet a look."""
    empty = [lock for lock in left_locks() if lock.is_empty]
    if empty:
        detail = f"CRIU left {len(empty)} tables of nftables that block nothing, {empty[0].name} among them"
        yield Finding("empty-tables", Status.SKIP, detail, "ocihook doctor --fix", Repair.TABLES)


def about_locks(locks: Iterable[LeftLock], status: Status, *inside: str) -> Iterator[Finding]:
    """Yield what locks that a killed CRIU has left do, with the commands that remove them."""
    closed = [lock for lock in locks if lock.blocks_all]
    if closed:
        names = ", ".join(lock.name for lock in closed)
        detail = f"a killed CRIU left the network locked ({names}): no packet passes"
        yield Finding("network-lock-left", status, detail, removal(closed, *inside))
    for lock in locks:
        if lock.entries and not lock.blocks_all:
            detail = f"CRIU's {lock.name} blocks connections ({lock.entries} entries) of a container that it dumped"
            remedy = f"a restore of it on this node removes that; if there is to be none: {removal([lock], *inside)}"
            yield Finding("connections-blocked", Status.WARN, detail, remedy)


def _check_selinux() -> Iterator[Finding]:
    if _SELINUX.exists() and _SELINUX.read_text().strip() == "1":
        yield Finding("selinux", Status.OK, "enforcing; `ausearch -m avc -c criu-action` shows what it denies")


def _check_cuda() -> Iterator[Finding]:
    if not has_driver():
        if has_kernel_driver():
            yield Finding("cuda", Status.FAIL, str(no_driver().args[0]), no_driver().hint)
        else:
            yield Finding("cuda", Status.SKIP, "no NVIDIA driver; containers without a GPU need none")
        return
    try:
        version = CudaDriver().version
    except CudaError as error:
        yield Finding("cuda", Status.WARN, str(error.args[0]), error.hint, rules_out=_WITH_GPU)
    else:
        yield Finding("cuda", Status.OK, f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}")
        yield from _check_gpus()


def _check_gpus() -> Iterator[Finding]:
    try:
        version, gpus = read_node(ENDLESS)
    except OcihookError as error:
        yield Finding("gpus", Status.FAIL, str(error.args[0]), error.hint)
        return
    major = driver_major(version)
    first = FIRST_DRIVER_ON_ARM if platform.machine() == "aarch64" else FIRST_DRIVER
    if major < first:
        yield Finding("gpus", Status.FAIL, f"driver {version} cannot checkpoint", f"install driver {first} or later")
        return
    names = ", ".join(f"{g.name} ({g.free_bytes / _GIB:.0f} of {g.total_bytes / _GIB:.0f} GiB free)" for g in gpus)
    yield Finding("gpus", Status.OK, f"driver {version}: {names or 'none'}")
    if any(gpu.mig for gpu in gpus):
        detail = "a GPU is partitioned; containers on MIG instances cannot be checkpointed"
        yield Finding("mig", Status.WARN, detail, "give them whole GPUs", rules_out="containers on MIG instances")
    if not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text():
        detail = f"{_HUGE_PAGES} is `never`; a dump and a restore of GPU memory take a third longer"
        yield Finding("huge pages", Status.WARN, detail, f"echo madvise > {_HUGE_PAGES}")
    if not any((root / _PERSISTENCED).exists() for root in (Path("/"), *driver_roots())):
        detail = "nvidia-persistenced does not run: each first use of an idle GPU, so each restore, takes seconds more"
        yield Finding("persistence", Status.WARN, detail, "systemctl enable --now nvidia-persistenced")


def _check_disk() -> Iterator[Finding]:
    """A dump needs its memory twice while it is packed, a restore twice while it is unpacked."""
    places = [place for engine in _ENGINES if find_program(engine) for place in image_set_places(engine)]
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
    if free_bytes < settings.bound_bytes:
        detail = f"{free_bytes >> 20} MiB free, the agent may use {settings.bound_bytes >> 20} MiB"
        yield Finding("memory", Status.WARN, detail, "lower memory_bound_bytes in /etc/ocihook/config.toml")
    else:
        yield Finding("memory", Status.OK, f"the agent's bound is {settings.bound_bytes >> 20} MiB")


def _check_cgroups() -> Iterator[Finding]:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    kinds = {line.split(" ")[2] for line in mounts if line.split(" ")[2] in ("cgroup", "cgroup2")}
    if kinds == {"cgroup", "cgroup2"}:
        remedy = "boot with systemd.unified_cgroup_hierarchy=1; crun cannot restore into hybrid cgroups"
        status, detail = Status.WARN if find_program("crun") else Status.OK, "hybrid: v1 and v2"
        yield Finding("cgroups", status, detail, remedy, rules_out="restores by crun")
    elif kinds:
        yield Finding("cgroups", Status.OK, "v2" if kinds == {"cgroup2"} else "v1")
    else:
        yield Finding("cgroups", Status.FAIL, "no cgroup file system is mounted", "mount cgroup2 at /sys/fs/cgroup")


def _check_archives() -> Iterator[Finding]:
    """The kubelet never removes archives; and what was in memory is in them."""
    try:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(_KUBELET_ARCHIVES)]
        mode = _KUBELET_ARCHIVES.stat().st_mode
    except FileNotFoundError:
        return
    if mode & 0o077:
        detail = f"{_KUBELET_ARCHIVES} is open to others than root: archives hold all that was in memory, secrets too"
        yield Finding("archives", Status.WARN, detail, f"chmod 700 {_KUBELET_ARCHIVES}")
    try:
        is_pruned = bool(load_settings().archive_dir)
    except ConfigError:
        is_pruned = False
    detail = f"{len(sizes)} with {sum(sizes) / _GIB:.1f} GiB in {_KUBELET_ARCHIVES}"
    if len(sizes) > _MANY_ARCHIVES and not is_pruned:
        remedy = f'set archive_dir = "{_KUBELET_ARCHIVES}" and keep_last in /etc/ocihook/config.toml'
        yield Finding("archives", Status.WARN, f"{detail}, which nobody removes", remedy)
    else:
        yield Finding("archives", Status.OK, detail)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _check_privileges,
    _check_kernel,
    _check_selinux,
    _check_cgroups,
    _check_network_lock,
    _check_empty_tables,
    _check_cuda,
    _check_memory_bound,
    _check_disk,
    _check_archives,
)
