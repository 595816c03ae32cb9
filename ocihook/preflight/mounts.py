"""Checks of mounts: made without the engine, or slow to dump."""

import os
from collections.abc import Iterator, Mapping
from shlex import quote

from ocihook.linux.open_files import Mount
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail, warn
from ocihook.preflight.observation import Observation

_MIB = 1 << 20
_LARGE_TMPFS_BYTES = 64 * _MIB  # CRIU writes it with tar and gzip, on one core
_KERNELS = ("proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts")
# File systems that CRIU can mount again by their names (criu/filesystems.c); not fuse, which it knows and refuses.
_MADE_AGAIN = (
    *_KERNELS,
    *("devtmpfs", "binfmt_misc", "tmpfs", "simfs", "btrfs", "pstore", "securityfs", "fusectl", "debugfs", "tracefs"),
    *("aufs", "overlay", "autofs"),
)


def _nvidia_mount(seen: Observation) -> Iterator[Problem]:
    for place in sorted(_unknown_places(seen)):
        if "nvidia" in place:
            detail = f"NVIDIA's hook mounted {place} without the runtime's knowledge; CRIU cannot dump it"
            remedy = 'nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, and mode = "cdi" in its config.toml'
            yield fail(detail, remedy)


def _mount(seen: Observation) -> Iterator[Problem]:
    unknown = _unknown_places(seen)
    for mount in seen.init.mounts:
        is_part = mount.root != "/" and mount.kind not in _KERNELS
        if mount.place in unknown and is_part and "nvidia" not in mount.place and not _has_whole(seen, mount):
            detail = f"{mount.place} was mounted after the container was made; CRIU cannot dump it"
            remedy = f"nsenter -t {seen.init_pid} -m umount {quote(mount.place)}, or mount it through the engine"
            yield fail(detail, remedy)


def _has_whole(seen: Observation, mount: Mount) -> bool:
    """Return whether CRIU can make a bind mount from another one (criu/mount.c, find_fsroot_mount_for)."""
    alike = [one for one in seen.init.mounts if one.device == mount.device and one.id != mount.id]
    return any(one.root == "/" or (one.place == "/" and mount.root.startswith(one.root)) for one in alike)


def _secret(seen: Observation) -> Iterator[Problem]:
    """Podman keeps a secret's file in its container's directory, and makes none for one from an archive."""
    config = seen.container.config if seen.container and seen.engine == "podman" else {}
    for mount in config.get("mounts") or ():  # type: ignore[attr-defined]
        if isinstance(mount, Mapping) and "/userdata/secrets/" in str(mount.get("source")):
            place = str(mount.get("destination"))
            detail = f"{place} is a secret: podman restores it in place, but not from an archive (--export, --import)"
            yield warn(detail, f"give it by --secret NAME,type=env, or by --volume FILE:{quote(place)}:ro")


def _inside(seen: Observation) -> Iterator[Mount]:
    """Yield the whole file systems that the container's processes have mounted, each once."""
    unknown, known = _unknown_places(seen), {mount.id for mount in seen.init.mounts}
    yield from (mount for mount in seen.init.mounts if mount.place in unknown and mount.root == "/")
    own = {mount.id: mount for process in seen.processes for mount in process.mounts if mount.id not in known}
    if unknown or seen.container:
        inherited = {(mount.device, mount.place) for mount in seen.init.mounts}
        yield from (one for one in own.values() if one.root == "/" and (one.device, one.place) not in inherited)


def _mount_kind(seen: Observation) -> Iterator[Problem]:
    for mount in _inside(seen):
        if mount.kind.partition(".")[0] not in _MADE_AGAIN:
            detail = f"{mount.place} is a file system ({mount.kind}) mounted inside the container; CRIU cannot dump it"
            yield fail(
                detail, f"unmount {quote(mount.place)} in the container, or mount it outside and make it a volume"
            )


def _overlay_mount(seen: Observation) -> Iterator[Problem]:
    for mount in _inside(seen):
        if mount.kind == "overlay":
            detail = (
                f"{mount.place} is an overlay of the container's own directories: CRIU dumps and does not restore it"
            )
            yield fail(detail, f"unmount {quote(mount.place)} in the container before the dump")


def _tracefs(seen: Observation) -> Iterator[Problem]:
    for mount in _inside(seen):
        if mount.kind == "tracefs":
            yield warn(f"a restore does not mount {mount.place} (tracefs) again", "mount it again after a restore")


def _tmpfs(seen: Observation) -> Iterator[Problem]:
    places = seen.configured_places
    for mount in seen.init.mounts if places else ():
        if mount.kind == "tmpfs" and mount.place not in places["bind"] and (size := _used_bytes(seen, mount.place)):
            detail = f"{mount.place} is memory (tmpfs) with {size // _MIB} MiB, which CRIU packs with gzip on one core"
            yield warn(detail, f"remove from {quote(mount.place)} what can be recreated, or use a volume")


def _used_bytes(seen: Observation, place: str) -> int:
    """Return how much a large tmpfs has; 0 if it is small."""
    try:
        state = os.statvfs(f"/proc/{seen.init_pid}/root{place}")
    except OSError:
        return 0
    used_bytes = (state.f_blocks - state.f_bfree) * state.f_frsize
    return used_bytes if used_bytes > _LARGE_TMPFS_BYTES else 0


def _unknown_places(seen: Observation) -> set[str]:
    """Return the places where something is mounted that the container's configuration does not name."""
    places = seen.configured_places
    if not places:
        return set()
    named = set().union(*places.values())
    return {mount.place for mount in seen.init.mounts if mount.place != "/" and mount.place not in named}


CHECKS = (
    Check(name="nvidia-mount", find=_nvidia_mount),
    Check(name="mount", find=_mount),
    Check(name="mount", find=_secret),
    Check(name="mount-kind", find=_mount_kind),
    Check(name="overlay-mount", find=_overlay_mount),
    Check(name="tracefs", find=_tracefs),
    Check(name="tmpfs", find=_tmpfs),
)
