"""The part of a bundle that must fit where its processes resume, as a record of a checkpoint.

What a runtime applies in a restore is left out: cgroup limits, and where a mount comes from, are those of the new
bundle then. All else comes back as CRIU's images have it: capabilities, seccomp filters, limits, mount options, masked
paths (runc libcontainer/criu_linux.go, crun src/libcrun/criu.c).
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ocihook.container.atomic_volumes import AtomicVolume, read_atomic_volumes
from ocihook.container.device_rules import Device, DeviceRule, parse_device_rules, parse_devices
from ocihook.container.identity import container_ref
from ocihook.container.program import Program, read_program
from ocihook.container.seccomp import Seccomp, parse_seccomp
from ocihook.container.spec_mounts import STORAGE, Mount, parse_mounts
from ocihook.errors import UnsupportedError
from ocihook.linux.node_names import node_names

_IMAGES = ("io.kubernetes.cri-o.ImageRef", "io.kubernetes.cri.image-name")  # of CRI-O, a digest; of containerd
_SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")
_UMASK = 0o022  # runtimes' own
_IDS = re.compile(r"[0-9a-f]{64}")
_SHORT_ID = 12  # characters, as engines show it, and podman's HOSTNAME has it
_MAX_HOSTS_BYTES = 64 << 10
# Namespaces by the sysctls that they have (runc libcontainer/configs/validate, crun src/libcrun/utils.c).
_SYSCTLS = {
    "net.": "network",
    "fs.mqueue.": "ipc",
    "kernel.msg": "ipc",
    "kernel.sem": "ipc",
    "kernel.shm": "ipc",
    "kernel.domainname": "uts",
    "kernel.hostname": "uts",
}


class Rights(NamedTuple):
    """What binds the processes of a container, and comes back from CRIU's images."""

    capabilities: Mapping[str, tuple[str, ...]]  # by set
    no_new_privileges: bool
    umask: int
    seccomp: Seccomp
    rlimits: Mapping[str, tuple[int, int]]  # soft and hard
    has_read_only_root: bool
    mounts: Mapping[str, Mount]
    masked_paths: tuple[str, ...]
    read_only_paths: tuple[str, ...]
    devices: Mapping[str, Device]
    device_rules: tuple[DeviceRule, ...]
    shared_namespaces: tuple[str, ...]  # which the container joins
    apparmor: str  # profile; "": unconfined
    sysctls: tuple[str, ...]  # names of those of namespaces of its own
    others: Mapping[str, str]  # JSON of what no order is known of
    oom_score_adj: int | None  # the handler applies the new one, to processes that still have this one
    selinux: str | None = None  # label; "": none; None: the record is of a release that did not note it


class SpecFacts(NamedTuple):
    """What of a bundle must fit for processes to resume in it."""

    image: str  # by id or digest where the engine records it, else by name; "" where it records nothing
    mounts: tuple[str, ...]  # where they are in the container
    user: str  # uid:gid of the first process, and further groups
    namespaces: tuple[str, ...]
    devices: tuple[str, ...]  # their paths
    has_terminal: bool
    rights: Rights | None = None  # None: the record is of a release that did not note them
    program: Program | None = None  # likewise
    volumes: Mapping[str, AtomicVolume] = MappingProxyType({})  # ConfigMaps and the like, by where they are mounted


def spec_facts(config: Mapping[str, Any], bundle: Path, seen: Path = Path("/")) -> SpecFacts:
    """Return what counts of a bundle's config.json.

    Args:
        config: its content.
        bundle: the bundle.
        seen: where the root of the process lies that sees the sources of the container's mounts.

    Raises:
        UnsupportedError: if it is not one.
    """
    try:
        process, linux = config.get("process") or {}, config.get("linux") or {}
        user = process.get("user") or {}
        return SpecFacts(
            image=_image(config.get("annotations") or {}, bundle),
            mounts=tuple(sorted({os.path.normpath(mount["destination"]) for mount in config.get("mounts") or ()})),
            user=":".join(
                str(part) for part in (user.get("uid", 0), user.get("gid", 0), *user.get("additionalGids", ()))
            ),
            namespaces=tuple(sorted({namespace["type"] for namespace in linux.get("namespaces") or ()})),
            devices=tuple(sorted({device["path"] for device in linux.get("devices") or ()})),
            has_terminal=bool(process.get("terminal")),
            rights=_rights(config, bundle),
            program=read_program(process, _own_names(config, bundle)),
            volumes=read_atomic_volumes(config, seen),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{bundle}/config.json is not one that a runtime accepts: {error!r}") from error


def _rights(config: Mapping[str, Any], bundle: Path) -> Rights:
    process, linux = config.get("process") or {}, config.get("linux") or {}
    capabilities = process.get("capabilities") or {}
    umask = (process.get("user") or {}).get("umask")
    apparmor = str(process.get("apparmorProfile") or "")
    return Rights(
        capabilities={
            name: tuple(sorted({str(cap).upper() for cap in capabilities.get(name) or ()})) for name in _SETS
        },
        no_new_privileges=bool(process.get("noNewPrivileges")),
        umask=_UMASK if umask is None else int(umask) & 0o777,
        seccomp=parse_seccomp(linux.get("seccomp")),
        rlimits={
            str(limit["type"]): (int(limit["soft"]), int(limit["hard"])) for limit in process.get("rlimits") or ()
        },
        has_read_only_root=bool((config.get("root") or {}).get("readonly")),
        mounts=parse_mounts(config.get("mounts"), bundle, _pod_uid(config)),
        masked_paths=_paths(linux.get("maskedPaths")),
        read_only_paths=_paths(linux.get("readonlyPaths")),
        devices=parse_devices(linux.get("devices")),
        device_rules=parse_device_rules((linux.get("resources") or {}).get("devices")),
        shared_namespaces=shared_namespaces(config),
        apparmor="" if apparmor == "unconfined" else apparmor,
        sysctls=_own_sysctls(config),
        others=_others(config),
        oom_score_adj=oom_score_adj(config),
        selinux=str(process.get("selinuxLabel") or ""),
    )


def _own_names(config: Mapping[str, Any], bundle: Path) -> set[str]:
    """Return the names, ids and addresses by which the container, its pod and this node are known."""
    notes = {str(name): str(text) for name, text in (config.get("annotations") or {}).items()}
    container = container_ref(notes, container_id="", runtime="", bundle="")
    ids = {container.pod_uid, notes.get("io.kubernetes.cri.sandbox-id", ""), *_IDS.findall(str(bundle))}
    names = {str(config.get("hostname") or ""), container.pod_name}
    short = {name[:_SHORT_ID] for name in ids if _IDS.fullmatch(name)}
    return {*ids, *short, *names, *_addresses(config, names), *node_names()}


def _addresses(config: Mapping[str, Any], names: set[str]) -> set[str]:
    """Return the addresses that the container's hosts(5) gives to its own names."""
    sources = [mount.get("source") for mount in config.get("mounts") or () if mount["destination"] == "/etc/hosts"]
    found = set()
    with contextlib.suppress(OSError):
        for line in _head(Path(str(sources[0]))).splitlines() if sources else ():
            address, *aliases = line.partition("#")[0].split() or [""]
            found |= {address} if names & {*aliases} - {"localhost", ""} else set()
    return {address for address in found if not address.startswith(("127.", "::1"))}


def _head(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_HOSTS_BYTES).decode(errors="replace")


def _paths(paths: Any) -> tuple[str, ...]:  # noqa: ANN401 - whatever is in a bundle
    return tuple(sorted({os.path.normpath(path) for path in paths or ()}))


def _pod_uid(config: Mapping[str, Any]) -> str:
    notes = {str(name): str(text) for name, text in (config.get("annotations") or {}).items()}
    return container_ref(notes, container_id="", runtime="", bundle="").pod_uid


def shared_namespaces(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types of namespaces that a container joins, by a bundle's config.json."""
    namespaces = (config.get("linux") or {}).get("namespaces") or ()
    return tuple(sorted({str(namespace["type"]) for namespace in namespaces if namespace.get("path")}))


def sysctls_to_set(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sysctls of a bundle's config.json, without those of namespaces that are the node's."""
    types = {str(namespace["type"]) for namespace in (config.get("linux") or {}).get("namespaces") or ()}
    sysctls = (config.get("linux") or {}).get("sysctl") or {}
    return {str(name): str(value) for name, value in sysctls.items() if _namespace(name) in types}


def oom_score_adj(config: Mapping[str, Any]) -> int | None:
    """Return the OOM score of a bundle's config.json; None if it leaves that to the runtime."""
    score = (config.get("process") or {}).get("oomScoreAdj")
    return None if score is None else int(score)


def _own_sysctls(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sysctls that CRIU's images may have: in a namespace that the container joins, others are in force."""
    shared = shared_namespaces(config)
    return tuple(sorted(name for name in sysctls_to_set(config) if _namespace(name) not in shared))


def _namespace(sysctl: str) -> str:
    return next((namespace for prefix, namespace in _SYSCTLS.items() if sysctl.startswith(prefix)), "")


def _others(config: Mapping[str, Any]) -> dict[str, str]:
    process, linux = config.get("process") or {}, config.get("linux") or {}
    found = {
        "scheduler": process.get("scheduler"),
        "I/O priority": process.get("ioPriority"),
        "personality": linux.get("personality"),
        "time offsets": linux.get("timeOffsets"),
        "memory policy": linux.get("memoryPolicy"),
    }
    if "user" not in shared_namespaces(config):
        found["ID mappings"] = [linux.get("uidMappings"), linux.get("gidMappings")]
    return {name: json.dumps(value, sort_keys=True) for name, value in found.items() if value and value != [None, None]}


def _image(annotations: Mapping[str, str], bundle: Path) -> str:
    """Return the image: podman writes it into no bundle, but its storage has it."""
    named = next((annotations[name] for name in _IMAGES if annotations.get(name)), "")
    found = STORAGE.fullmatch(str(bundle))
    if named.startswith("sha256:") or "@sha256:" in named or not found:
        return named
    try:
        containers = json.loads((Path(found["root"]) / f"{_kind(bundle)}-containers/containers.json").read_bytes())
        return next((str(entry["image"]) for entry in containers if entry["id"] == found["id"]), named)
    except (OSError, ValueError, KeyError, TypeError):
        return named


def _kind(bundle: Path) -> str:
    return bundle.parts[-3].removesuffix("-containers")
