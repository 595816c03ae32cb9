"""The mounts of a bundle, reduced to what binds a process: what is mounted, how, and how large it may be.

Sources in directories that an engine makes for each pod or container lose the part that names the pod: a container that
is created again has them under another id.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

STORAGE = re.compile(r"(?P<root>/.+)/\w+-containers/(?P<id>[0-9a-f]{64})/userdata")  # bundles of containers/storage
_RESTRICTIONS = {"ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "nosymfollow": "symfollow"}
_LIFTED = {lifted: restriction for restriction, lifted in _RESTRICTIONS.items()}
_PROPAGATION = {"private": 0, "unbindable": 0, "slave": 1, "shared": 2}
_LIMITS = ("size", "nr_blocks", "nr_inodes")  # of a tmpfs
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_LIMIT = re.compile(r"([0-9]+)([kmgt]?)", re.IGNORECASE)
# Words that bind no process: times of access, what a mount call is asked to do, and labels, which the runtime applies.
_FREE = re.compile(
    r"bind|rbind|defaults|remount|r?(no)?(rel|strict|dir)?(a|dira)time|(no)?lazytime|a?sync|dirsync|(no)?mand|silent|loud"
    r"|(no)?iversion|tmpcopyup|copy-symlink|src-nofollow|dest-nofollow|(root|fs|def)?context=.*|seclabel|z|Z"
)
_POD = r"/pods/[^/]+/(?=volumes/kubernetes\.io~|volumes/[^/]+~|volume-subpaths/|containers/|etc-hosts$)"
_MADE_BY_ENGINES = (
    (re.compile(r"^.*/overlay-containers/[0-9a-f]{64}/userdata(?=/|$)"), "container:"),  # containers/storage
    (re.compile(r"^.*/volumes/[0-9a-f]{64}/_data(?=/|$)"), "volume:"),  # podman's volumes without a name
    (re.compile(r"^.*/io\.containerd\.grpc\.v1\.cri/sandboxes/[0-9a-f]{64}(?=/|$)"), "pod:"),
    (re.compile(r"^.*/io\.containerd\.grpc\.v1\.cri/containers/[0-9a-f]{64}/volumes/[0-9a-f]{64}(?=/|$)"), "volume:"),
    (re.compile(rf"^/.*{_POD}"), "kubelet:/"),
)
# Names within these directories that are new for each pod: its service account's token, the termination message.
_RANDOM = (
    (re.compile(r"^(kubelet:/volumes/kubernetes\.io~projected/kube-api-access)-[a-z0-9]{5}(?=/|$)"), r"\1"),
    (re.compile(r"^(kubelet:/containers/[^/]+)/[0-9a-f]{8}$"), r"\1"),
)


class Mount(NamedTuple):
    """One mount."""

    kind: str  # "bind", or the type of its file system
    source: str  # of a bind mount, or the lower directory of an overlay; without what names the pod
    restrictions: tuple[str, ...]  # ro, nosuid, ...
    propagation: int  # 0: private, 1: mounts of the node appear in it, 2: its mounts appear on the node, too
    limits: Mapping[str, int]  # bytes, or how many
    data: tuple[str, ...]  # all other options


def parse_mounts(mounts: Iterable[Mapping[str, Any]] | None, bundle: Path, pod_uid: str) -> dict[str, Mount]:
    """Read `mounts` of a bundle; return them by their places in the container.

    Args:
        mounts: of config.json.
        bundle: where it is.
        pod_uid: of its pod; "" if it is in none.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if they are malformed.
    """
    return {os.path.normpath(mount["destination"]): _mount(mount, bundle, pod_uid) for mount in mounts or ()}


def _mount(mount: Mapping[str, Any], bundle: Path, pod_uid: str) -> Mount:
    words = [str(word) for word in mount.get("options") or ()]
    kind = str(mount.get("type") or "bind")
    is_bind = kind in ("bind", "none") or not {"bind", "rbind"}.isdisjoint(words)
    values = dict(word.partition("=")[::2] for word in words if "=" in word)
    is_overlay = kind == "overlay" and not is_bind
    source = str(mount.get("source") or "") if is_bind else values.get("lowerdir", "") if is_overlay else ""
    limits = {name: limit for name in _LIMITS if (limit := _limit(values.get(name, ""))) is not None}
    data = [] if is_overlay else [word for word in words if not _is_known(word, limits)]
    data += [f"{key}={mount[key]!r}" for key in ("uidMappings", "gidMappings") if mount.get(key)]
    return Mount(
        kind="bind" if is_bind else kind,
        source=source_name(source, bundle, pod_uid) if source.startswith("/") else source,
        restrictions=_restrictions(words),
        propagation=_propagation(words),
        limits=limits,
        data=tuple(sorted(data)),
    )


def _limit(text: str) -> int | None:
    found = _LIMIT.fullmatch(text)
    return int(found[1]) << _UNITS[found[2].lower()] if found else None


def _is_known(word: str, limits: Mapping[str, int]) -> bool:
    name = word.partition("=")[0]
    return bool(_FREE.fullmatch(word)) or name in limits or _plain(word) in {*_RESTRICTIONS, *_LIFTED, *_PROPAGATION}


def _plain(word: str) -> str:
    """Return an option without its recursive form: rro, rnosuid, rshared."""
    inner = word.removeprefix("r")
    return inner if inner in {*_RESTRICTIONS, *_LIFTED, *_PROPAGATION} else word


def _restrictions(words: Iterable[str]) -> tuple[str, ...]:
    """Return the restrictions in force; a later word lifts an earlier one."""
    found: set[str] = set()
    for word in words:
        recursive = "r" if _plain(word) != word else ""
        if _plain(word) in _RESTRICTIONS:
            found |= {_plain(word), f"{recursive}{_plain(word)}"}
        elif _plain(word) in _LIFTED:
            found -= {f"r{_LIFTED[_plain(word)]}"} if recursive else {_LIFTED[_plain(word)]}
    is_bind_alone = "bind" in words and "rbind" not in words
    return tuple(sorted(found | ({"bind without mounts below"} if is_bind_alone else set())))


def _propagation(words: Iterable[str]) -> int:
    return next((_PROPAGATION[_plain(word)] for word in reversed([*words]) if _plain(word) in _PROPAGATION), 0)


def source_name(source: str, bundle: Path, pod_uid: str) -> str:
    """Return a source without what names its pod or container.

    Args:
        source: a path of the node.
        bundle: of the container.
        pod_uid: of its pod; "" if it is in none.
    """
    source = os.path.normpath(source)
    for pattern, name in _MADE_BY_ENGINES:
        if found := pattern.match(source):
            if name == "kubelet:/" and f"/pods/{pod_uid}/" not in source:
                continue  # of another pod's
            source = name + source[found.end() :]
            break
    for pattern, name in _RANDOM:
        source = pattern.sub(name, source)
    storage = STORAGE.fullmatch(str(bundle))
    named = f"{storage['root']}/volumes/" if storage else ""
    return f"volume:{source.removeprefix(named)}" if named and source.startswith(named) else source
