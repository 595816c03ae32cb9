"""Settings of a node and policy of a container: defaults < config.toml < config.d/*.toml < annotations.

A wrong key or value is an error that names the file (or annotation) and the key. A pod's annotations are its author's:
they count as far as the administrator allows. A key that only another release knows is no error there, so that two
releases can live in one cluster.
"""

import dataclasses
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ocihook.errors import AdmissionError, ConfigError, printable
from ocihook.tcp_policy import parse

CONFIG_FILE = Path("/etc/ocihook/config.toml")
ANNOTATION_PREFIX = "ocihook.io/"
OWNER_ANNOTATION = ANNOTATION_PREFIX + "owner"  # says whose a container is, nothing of what to do with it
MEMBER_ANNOTATION = ANNOTATION_PREFIX + "member"
GANG_ANNOTATION = ANNOTATION_PREFIX + "gang"  # the job that it is a part of; likewise
GANG_SIZE_ANNOTATION = ANNOTATION_PREFIX + "gang-size"  # how many containers are
GANG_INDEX_ANNOTATION = ANNOTATION_PREFIX + "gang-index"  # which of them it is, if its name may change
IDENTITY_ANNOTATIONS = (OWNER_ANNOTATION, GANG_ANNOTATION, GANG_SIZE_ANNOTATION, GANG_INDEX_ANNOTATION)

_GPU_UUID = r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ADDRESS_MAP = re.compile(r"(?:[0-9a-fA-F.:]+=[0-9a-fA-F.:]+(?:,|$))*")
_LEAST_BOUND_BYTES = 256 << 20
_AGENT_BYTES, _WORKER_BYTES = 48 << 20, 52 << 20  # as packs/packing.py and, for the larger kind, deduplicate.py have it
_COORDINATOR = re.compile(r"|https://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}")
_SIGNALS = ("", "HUP", "USR1", "USR2")
ANY = "*"  # in [restore_from]: every container, every domain
_DOMAIN = re.compile(r"\*|_node|[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # as packs/domain_names.py has it
LATEST = "latest"  # for restore_from


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do with a container. Every key is also an annotation: `quiesce_signal` as ocihook.io/quiesce-signal."""

    mode: str = "inline"  # inline: pack into the engine's archive; store: into this node's store; off: leave all alone
    on_pack_error: str = "keep"  # keep: the checkpoint succeeds unpacked, with a warning; fail: the dump fails
    quiesce_signal: str = ""  # sent to the container's init before the dump, while it runs; "" for none
    quiesce_ack: str = "/run/ocihook-quiesced"  # file in the container that init creates or touches when it is at rest
    quiesce_timeout_s: float = 10.0  # for init to come to rest, else the dump is refused
    host_memory: str = "direct"  # most memory is read and written past CRIU and in parallel; criu: CRIU does all of it
    snapshot: str = "on"  # on: left running in mode store, a copy of its memory is read while it runs; off: it waits
    pre_copy: bool = False  # mode inline: host memory is read while the container runs, then only what has changed
    gpu_memory: str = "packs"  # packs: GPU memory goes straight into packs, in parallel; criu: through CRIU's images
    gpu_lock_timeout_s: float = 30.0  # for all CUDA calls that have begun to end, else the dump is refused
    preflight: str = "refuse"  # refuse: no dump that fails or cannot be restored, no restore without room; warn: log it
    gpu_map: str = ""  # on restore: OLD=NEW,... UUIDs as nvidia-smi -L prints them; "": the same GPUs, or those given
    address_map: str = ""  # on restore: OLD=NEW,... of containers that have moved, too: connections to them live on
    on_gpu_restore_error: str = "kill"  # kill: a container without its GPU state does not go on; keep: leave it stuck
    resume_signal: str = ""  # sent when the container runs again, and after a restore; "" for none
    tcp: str = "auto"  # what becomes of connections: auto, established, close, refuse, and rules (docs/connections.md)
    gang_timeout_s: float = 60.0  # for all members of a gang to come to each of their meetings, else all are refused
    gang_gather_s: float = 5.0  # runtime handler, one of a gang is stopped: for the next member to be stopped, too
    push: str = "never"  # always: what mode store has completed is pushed to the remote, and pulled by a restore
    restore_from: str = ""  # runtime handler: the checkpoint that a new container resumes from; latest: of its member
    member: str = ""  # runtime handler: whose checkpoints `latest` is of; "": by pod and container
    checkpoint_on_stop: bool = False  # runtime handler: a container that is stopped is checkpointed first
    on_no_checkpoint: str = "start"  # runtime handler, without that checkpoint: start afresh, or fail `create`
    on_restore_error: str = "start"  # runtime handler, where a restore fails: start afresh, or fail `create`
    restore_wait_s: float = 300.0  # runtime handler: for a stop that is under way, and the push of its checkpoint
    on_claim: str = "error"  # runtime handler, its checkpoint is in use elsewhere: as for a failed restore; wait; fail
    on_member_stop: str = "last"  # runtime handler, others are not stopped: last (epoch counts); checkpoint all; alone
    restore_on_restart: bool = False  # runtime handler: restore a container that its own pod restarts, too
    restore_on_change: bool = False  # runtime handler: resume although arguments, command or environment have changed


Allowed = bool | float | tuple[str, ...]  # any value or none; at most so much; one of these

# What pods may set by default: nothing that sends memory away, risks a job or the node, holds up others for more than a
# minute, or names a GPU of somebody else.
ALLOWED: Mapping[str, Allowed] = MappingProxyType(
    {
        "mode": ("inline", "store", "off"),
        "on_pack_error": ("keep", "fail"),
        "quiesce_signal": _SIGNALS,
        "quiesce_ack": True,
        "quiesce_timeout_s": 60.0,
        "resume_signal": _SIGNALS,
        "host_memory": ("direct", "criu"),
        "snapshot": ("on", "off"),
        "pre_copy": True,
        "gpu_memory": ("packs", "criu"),
        "gpu_lock_timeout_s": 60.0,
        "preflight": ("refuse",),
        "gpu_map": False,
        "address_map": False,
        "on_gpu_restore_error": ("kill", "keep"),
        "tcp": True,
        "gang_timeout_s": 110.0,
        "gang_gather_s": 60.0,
        "push": ("never",),
        "restore_from": True,
        "member": True,
        "checkpoint_on_stop": True,
        "on_no_checkpoint": ("start", "fail"),
        "on_restore_error": ("start", "fail"),
        "restore_wait_s": 3600.0,
        "on_claim": ("error", "wait", "fail"),
        "on_member_stop": ("last", "checkpoint", "alone"),
        "restore_on_restart": True,
        "restore_on_change": True,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for the whole node."""

    policy: Policy = field(default_factory=Policy)
    allowed: Mapping[str, Allowed] = field(default_factory=lambda: ALLOWED)  # [policy.allowed]: what pods may set
    restore_from: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by namespace: domains beside its own
    idle_timeout_s: float = 60.0  # an agent without a session leaves after this long
    memory_bound_bytes: int = 0  # for the agent, its workers, GPU memory on its way into the store; 0: as cores need
    workers: int = 0  # processes that pack and unpack; 0: one for each core, as far as memory allows
    keep_last: int = 0  # checkpoints of each container, by its owner, in the store; 0 and keep_within_s 0: all
    keep_within_s: float = 0.0  # what is younger stays in the store, too
    max_store_bytes: int = 0  # of the whole store: the oldest checkpoints go, even an owner's newest; 0: no bound
    archive_dir: str = ""  # archives there are pruned likewise: /var/lib/kubelet/checkpoints
    snapshot_share: float = 0.1  # of its memory, that a container needs room for while a snapshot is read
    max_rootfs_bytes: int = 10 << 30  # of changes in a rootfs that are saved when a container is stopped
    max_volumes_bytes: int = 64 << 30  # of its volumes that end with its pod, likewise
    stop_timeout_s: float = 600.0  # for the checkpoint of a container that is stopped; then it is stopped without
    suspend_before_kill: str = "595"  # drivers that need a restored container's GPU back before it is killed; "": none
    max_archive_bytes: int = 0  # of all archives in archive_dir: the oldest go; 0: no bound
    remote_keep_last: int = 0  # checkpoints of each container at the remote; 0 and remote_keep_within_s 0: all
    remote_keep_within_s: float = 0.0  # what is younger stays at the remote, too
    remote: str = ""  # where `store push` and `pull` go: /DIRECTORY, s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY
    key_file: str = ""  # keys of the store, newest first; {domain} in it is a domain's name; "": nothing is encrypted
    key_command: str = ""  # prints the keys instead, {domain} likewise; split as a shell does, run without one
    store_dir: str = "/var/lib/ocihook/store"  # the store of mode store; quickest on the disk where the engine writes
    history_dir: str = "/var/lib/ocihook/history"  # ended sessions, for `ocihook timeline` and `ocihook metrics`
    history_kept: int = 100  # ended sessions of which the record is kept; their totals stay
    coordinator: str = ""  # https://HOST:PORT of the one for gangs on several nodes; "": this node's own agent
    tls_dir: str = "/etc/ocihook/tls"  # has tls.crt, tls.key and ca.crt, of this node or of the coordinator
    gang_dir: str = "/var/lib/ocihook/gangs"  # a coordinator's record of the dumps and restores of gangs
    metrics_address: str = ""  # 127.0.0.1:9748 or unix:/run/ocihook/metrics.sock: the agent stays and serves metrics

    @property
    def bound_bytes(self) -> int:
        """What the agent and its workers may take of memory, whatever a checkpoint's size.

        Unless configured: what a worker on each core needs, but no more than a 64th of the node's memory, and no less
        than 256 MiB.
        """
        if self.memory_bound_bytes:
            return self.memory_bound_bytes
        cores = len(os.sched_getaffinity(0))
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(_LEAST_BOUND_BYTES, min(_AGENT_BYTES + cores * _WORKER_BYTES, memory_bytes // 64))


CHOICES: Mapping[str, tuple[str, ...]] = {
    "mode": ("inline", "store", "off"),
    "on_pack_error": ("keep", "fail"),
    "quiesce_signal": _SIGNALS,
    "resume_signal": _SIGNALS,
    "host_memory": ("direct", "criu"),
    "snapshot": ("on", "off"),
    "gpu_memory": ("packs", "criu"),
    "preflight": ("refuse", "warn"),
    "on_gpu_restore_error": ("kill", "keep"),
    "push": ("never", "always"),
    "on_no_checkpoint": ("start", "fail"),
    "on_restore_error": ("start", "fail"),
    "on_claim": ("error", "wait", "fail"),
    "on_member_stop": ("last", "checkpoint", "alone"),
}
_ABSOLUTE = re.compile(r"(?:/.*)?", re.DOTALL), "an absolute path"
_PATTERNS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "quiesce_ack": (re.compile(r"/(?!(?:.*/)?\.\.(?:/|$)).*", re.DOTALL), "an absolute path without '..'"),
    "gpu_map": (re.compile(rf"(?:{_GPU_UUID}={_GPU_UUID}(?:,{_GPU_UUID}={_GPU_UUID})*)?"), "OLD=NEW,... of GPU UUIDs"),
    "address_map": (_ADDRESS_MAP, "OLD=NEW,... of IP addresses"),
    "restore_from": (  # as store/stored_manifest.py has ids
        re.compile(rf"|{LATEST}|[0-9]{{8}}T[0-9]{{6}}Z-[0-9a-f]{{8}}"),
        f"the id of a checkpoint, as 20261123T120000Z-0123abcd, or {LATEST!r}",
    ),
    "member": (  # as the values of labels in Kubernetes
        re.compile(r"|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"),
        "up to 63 letters, digits and ._-",
    ),
    **dict.fromkeys(("store_dir", "archive_dir", "history_dir", "gang_dir", "tls_dir", "key_file"), _ABSOLUTE),
    "coordinator": (_COORDINATOR, "https://HOST:PORT"),
    "suspend_before_kill": (
        re.compile(r"|[0-9]+(?:\.[0-9]+)*(?:,[0-9]+(?:\.[0-9]+)*)*"),
        "versions of NVIDIA's driver, as 595 or 595.71,600",
    ),
    "remote": (
        re.compile(r"|(?:/|s3://[^/?#]|oci://[^/?#]).*", re.DOTALL),
        "/DIRECTORY, s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY",
    ),
    "metrics_address": (
        re.compile(r"|(?:127\.0\.0\.1|\[::1\]):[0-9]{1,5}|unix:/[^:]{1,100}"),
        "127.0.0.1:PORT, [::1]:PORT or unix:/PATH",
    ),
}
RANGES: Mapping[str, tuple[float, float]] = {
    "quiesce_timeout_s": (0.1, 600),
    "gpu_lock_timeout_s": (0.1, 3600),
    "gang_timeout_s": (0.1, 3600),
    "restore_wait_s": (0, 86400),
    "gang_gather_s": (0.1, 3600),
    "idle_timeout_s": (1, 86400),
    "snapshot_share": (0, 1),
    "memory_bound_bytes": (64 << 20, 1 << 50),
    "workers": (0, 1024),
    "keep_last": (0, 1 << 20),
    "keep_within_s": (0, 1 << 40),
    "max_store_bytes": (0, 1 << 60),
    "max_archive_bytes": (0, 1 << 60),
    "max_rootfs_bytes": (0, 1 << 60),
    "max_volumes_bytes": (0, 1 << 60),
    "stop_timeout_s": (1, 86400),
    "remote_keep_last": (0, 1 << 20),
    "remote_keep_within_s": (0, 1 << 40),
    "history_kept": (1, 100000),
}
_POLICY_KEYS = {f.name: f.default for f in dataclasses.fields(Policy)}
_RENAMED: Mapping[str, str] = {"gpu_preflight": "preflight"}  # keys of the release before this one, of [policy]
TABLES = ("policy", "allowed", "restore_from")  # of Settings that are not in [agent]
_AGENT_KEYS = {f.name: f.default for f in dataclasses.fields(Settings) if f.name not in TABLES}


class Annotated(NamedTuple):
    """What a container's annotations come to."""

    policy: Policy  # with all that may be, and is right
    refused: tuple[AdmissionError | ConfigError, ...] = ()
    unknown: tuple[str, ...] = ()  # a sentence about each that another release may know


class Source(NamedTuple):
    """Where a setting stands."""

    file: Path
    line: int = 0  # the first is 1; 0: it is written in a way that nobody has looked for


def load_settings(root: Path = Path("/")) -> Settings:
    """Read the node's configuration below `root`.

    Raises:
        ConfigError: naming file and key.
    """
    return load_with_sources(root)[0]


def load_with_sources(root: Path = Path("/")) -> tuple[Settings, Mapping[str, Source]]:
    """Read the node's configuration below `root`, and where each setting that is no default comes from.

    These are named as in TOML: `policy.mode`, `policy.allowed.mode`, `agent.workers`, `restore_from.NAMESPACE`.

    Raises:
        ConfigError: naming file and key.
    """
    main = root / CONFIG_FILE.relative_to("/")
    drop_ins = sorted((main.parent / "config.d").glob("*.toml"))
    sources: dict[str, Source] = {}  # where a setting stands last
    policy: dict[str, Any] = {}
    agent: dict[str, Any] = {}
    allowed: dict[str, Allowed] = dict(ALLOWED)
    restore_from: dict[str, tuple[str, ...]] = {}
    for file in (main, *drop_ins):
        tables = _read_toml(file)
        _check_keys(tables, ("policy", "agent", "restore_from"), str(file), "table")
        restore_from |= _read_rules(_table(tables, "restore_from", file), f"{file}: [restore_from]")
        sources |= _sources(file, "restore_from", _table(tables, "restore_from", file))
        inner = _as_now(_table(tables, "policy", file), file)
        tables["policy"] = inner
        may_be = _as_now(_table({"allowed": inner.pop("allowed", {})}, "allowed", file), file)
        allowed |= _read_allowed(may_be, file)
        sources |= _sources(file, "policy.allowed", may_be)
        for name, known, values in (("policy", _POLICY_KEYS, policy), ("agent", _AGENT_KEYS, agent)):
            table = _table(tables, name, file)
            _check_keys(table, known, f"{file}: [{name}]", "key")
            sources |= _sources(file, name, table)
            values |= {key: _check_value(key, value, known[key], str(file)) for key, value in table.items()}
    settings = Settings(policy=Policy(**policy), allowed=allowed, restore_from=restore_from, **agent)
    if settings.policy.push == "always" and not settings.remote:
        raise ConfigError(
            f"{sources['policy.push'].file}: push is 'always', and no remote is configured",
            hint="set remote in [agent]",
        )
    return settings, sources


def _as_now(table: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return a table of the policy with keys as this release has them."""
    for old in _RENAMED.keys() & table.keys():
        log.warning("%s: %s is now called %s; the next release does not know the old name", file, old, _RENAMED[old])
    return {_RENAMED.get(key, key): value for key, value in table.items()}


def _sources(file: Path, table: str, keys: Mapping[str, object]) -> dict[str, Source]:
    """Return where the keys of a table stand in a file."""
    if not keys:
        return {}
    lines, inside = {}, ""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if header := re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?", line):
            inside = re.sub(r"[\s\"']", "", header[1])
        elif key := re.match(r"\s*[\"']?([^\s\"'=#]+)[\"']?\s*=", line):
            lines[f"{inside}.{_RENAMED.get(key[1], key[1])}".lstrip(".")] = number
    return {f"{table}.{key}": Source(file, lines.get(f"{table}.{key}", 0)) for key in keys}


def apply_annotations(settings: Settings, annotations: Mapping[str, str], *, in_pod: bool) -> Annotated:
    """Return the node's policy as a container's annotations want it, as far as they are right and may be set.

    Args:
        settings: the node's.
        annotations: the container's.
        in_pod: whether these are a pod's author's; a container in no pod is root's own, who may set all.
    """
    changes: dict[str, Any] = {}
    refused: list[AdmissionError | ConfigError] = []
    unknown = []
    for name, text in annotations.items():
        if not name.startswith(ANNOTATION_PREFIX) or name in IDENTITY_ANNOTATIONS:
            continue
        key = name.removeprefix(ANNOTATION_PREFIX).replace("-", "_")
        if key in _RENAMED:
            key = _RENAMED[key]
            unknown.append(f"annotation {printable(name)} is now called {ANNOTATION_PREFIX}{key.replace('_', '-')}")
        if key not in _POLICY_KEYS:
            unknown.append(
                f"annotation {printable(name)} is not known here and has no effect; {_unknown(key, _POLICY_KEYS)}"
            )
            continue
        try:
            value = _check_annotation(name, key, text)
            if in_pod:
                _check_allowed(name, key, value, settings)
        except (AdmissionError, ConfigError) as error:
            refused.append(error)
        else:
            changes[key] = value
    return Annotated(dataclasses.replace(settings.policy, **changes), tuple(refused), tuple(unknown))


def _check_annotation(name: str, key: str, text: str) -> object:
    value: object = text
    if isinstance(_POLICY_KEYS[key], bool):
        value = {"true": True, "false": False}.get(text, text)
    elif isinstance(_POLICY_KEYS[key], float):
        try:
            value = float(text)
        except ValueError as error:
            raise ConfigError(f"annotation {name}: {text!r} is not a number") from error
    return _check_value(key, value, _POLICY_KEYS[key], f"annotation {name}")


def _check_allowed(name: str, key: str, value: object, settings: Settings) -> None:
    allowed = settings.allowed[key]
    if isinstance(value, float):
        may_be, bound = (
            (value <= allowed, f"at most {allowed:g}") if isinstance(allowed, float) else (bool(allowed), "")
        )
    else:
        may_be = value in allowed if isinstance(allowed, tuple) else bool(allowed)
        bound = f"only {', '.join(map(repr, allowed))}" if isinstance(allowed, tuple) and allowed else ""
    if not may_be and value != getattr(settings.policy, key):  # what holds anyway nobody has to be allowed
        raise AdmissionError(
            f"annotation {name}: a pod may not set {value!r} on this node{bound and f', {bound}'}",
            hint=f"remove it from the pod, or allow it in {CONFIG_FILE}: [policy.allowed] {key}",
        )


def _table(tables: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} must be a table, as in [{name}]")
    return table


def _read_allowed(table: Mapping[str, Any], file: Path) -> dict[str, Allowed]:
    """Read [policy.allowed]: true, false, the most that a number may be, or the values that a word may have."""
    where = f"{file}: [policy.allowed]"
    _check_keys(table, _POLICY_KEYS, where, "key")
    found: dict[str, Allowed] = {}
    for key, value in table.items():
        if isinstance(value, bool):
            found[key] = value
        elif isinstance(_POLICY_KEYS[key], float):
            found[key] = float(_check_value(key, value, _POLICY_KEYS[key], where))  # type: ignore[arg-type]
        elif key in CHOICES and isinstance(value, list):
            found[key] = tuple(str(_check_value(key, one, "", where)) for one in value)
        else:
            wanted = "a list of its values" if key in CHOICES else "true or false"
            raise ConfigError(f"{where}: {key} must be {wanted}, not {value!r}")
    return found


def _read_rules(table: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    """Read [restore_from]: by a container's namespace the domains that it may have checkpoints of."""
    for name, domains in table.items():
        if not isinstance(domains, list):
            raise ConfigError(f"{where}: {name} must be a list of domains, not {domains!r}")
        for domain in (name, *domains):
            if not isinstance(domain, str) or not _DOMAIN.fullmatch(domain):
                raise ConfigError(
                    f"{where}: {domain!r} is no namespace", hint=f"{ANY!r} stands for all, '_node' for none"
                )
    return {name: tuple(domains) for name, domains in table.items()}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _check_keys(table: Mapping[str, object], known: Any, where: str, what: str) -> None:  # noqa: ANN401 - any container
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown {what} {key!r}", hint=_unknown(key, known))


def _unknown(key: str, known: Any) -> str:  # noqa: ANN401 - likewise
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"


def _check_value(key: str, value: object, default: object, where: str) -> object:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        kinds = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
        raise ConfigError(f"{where}: {key} must be {kinds[type(default)]}, not {value!r}")
    if key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(f"{where}: {key} must be one of {', '.join(map(repr, CHOICES[key]))}, not {value!r}")
    if key in RANGES and isinstance(value, (int, float)):
        low, high = RANGES[key]
        if not low <= value <= high and (key != "memory_bound_bytes" or value):
            raise ConfigError(f"{where}: {key} must be between {low:g} and {high:g}, not {value!r}")
    pattern, wanted = _PATTERNS.get(key, (None, ""))
    if pattern is not None and not pattern.fullmatch(str(value)):
        raise ConfigError(f"{where}: {key} must be {wanted}, not {value!r}")
    if key == "tcp":
        parse(str(value), f"{where}: {key}")
    return value
