"""The program of a bundle: its arguments, environment and working directory, without what identifies its pod.

A record has digests alone: values may be secrets. A variable that identifies a pod, a node, a device or a place in a
job is left out; a name, id or address of the container's own within another value counts as equal to the new one.
"""

import hashlib
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Variables that identify a pod and not a program, by what sets them.
_IDENTITY_NAMES = (
    r"HOSTNAME|KUBERNETES_.*",  # runtimes and engines; the kubelet
    # The downward API, by the usual names; values are recognised whatever their variable is called.
    r"(.+_)?POD_?(NAME|UID|ID|IPS?)",
    r"((MY|K8S|KUBE|CURRENT|THIS|LOCAL|RAY|VLLM)_)?(NODE|HOST)_?(NAME|IPS?)",
    # Indexes: Job, LeaderWorkerSet, Volcano, TPU, torchrun, MPI, Slurm.
    r"JOB_COMPLETION_INDEX|LWS_(WORKER|GROUP)_INDEX|V[CK]_TASK_INDEX|TPU_WORKER_ID",
    r"((LOCAL|NODE|GROUP|GLOBAL|WORLD|PET_NODE|PET_GROUP)_)?RANK|(WORKER|TASK|NODE|REPLICA)_(ID|INDEX)",
    r"(OMPI_COMM_WORLD|MPI|MPIR|MV2_COMM_WORLD)(_.*)?_RANK|PMI_.*|PMIX_(?!MCA_).*|SLURM_.*|PALS_.*|FLUX_.*",
    # The attempt that a pod is: JobSet, torchrun, Argo, Flyte.
    r"JOBSET_RESTART_ATTEMPT|TORCHELASTIC_RESTART_COUNT|ARGO_(NODE_ID|DEADLINE)|FLYTE_ATTEMPT_NUMBER",
    # Addresses of the other members.
    r"((PET|PYTORCH|TORCH|DIST|JAX|MEGASCALE)_)?(MASTER|LEADER|COORDINATOR)_(ADDR|ADDRESS|PORT|HOST|IP)",
    r"LWS_LEADER_ADDRESS|TPU_WORKER_HOSTNAMES|TF_CONFIG|PET_RDZV_ENDPOINT|VC_.+_HOSTS",
    r"RAY_(ADDRESS|IP|CLOUD_INSTANCE_ID)|FQ_RAY_IP",
    # Tokens that are issued anew, and no token of a language model.
    r"(?!(?:.+_)?(PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP|END|START|SPECIAL)_TOKEN)(.+_)?TOKEN",
    # Devices that the node has given: device plugins.
    r"(NVIDIA|CUDA|ROCR|HIP|ASCEND|HABANA)_VISIBLE_DEVICES|NEURON_RT_VISIBLE_CORES|PCIDEVICE_.*",
    r"TERM",  # of the terminal, which is compared by itself
    # systemd, for an engine's own caller.
    r"INVOCATION_ID|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_(FDS|PID|FDNAMES)|SYSTEMD_EXEC_PID|TRACEPARENT",
)
_IDENTITY = re.compile("|".join(_IDENTITY_NAMES))
# Services, as the kubelet names them (pkg/kubelet/envvars): they come and go, and are not the container's.
_SERVICE = re.compile(r"(.+)_SERVICE_HOST")
_OF_SERVICE = re.compile(r"SERVICE_(HOST|PORT(_.+)?)|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_LINK = re.compile(r"(tcp|udp|sctp)://.+:[0-9]+")
_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z0-9._-]{0,62})(?:=.*)?", re.DOTALL)
_PLAIN_NAME = re.compile(r"[!-~]{1,128}")
_DIGEST_CHARS = 16
_MOST = 1024  # arguments, or variables, on record one by one
_REST = "others"
_OWN = "\0"  # in place of a name of the container's own: no argument can have it


class Value(NamedTuple):
    """An argument, or all values of a variable."""

    digest: str
    without_own: str  # digest with the container's own names replaced
    option: str = ""  # name of the option that an argument is

    def is_as(self, other: "Value") -> bool:
        """Return whether another container has the same value, or the one that corresponds to its own names."""
        return self.digest == other.digest or self.without_own == other.without_own


class Program(NamedTuple):
    """The program of a container."""

    arguments: tuple[Value, ...]
    directory: Value
    environment: Mapping[str, Value]  # by name


def read_program(process: Mapping[str, Any], own: Iterable[str]) -> Program:
    """Return the program of `process` of a bundle.

    Args:
        process: of config.json.
        own: names, ids and addresses of the container and its pod.

    Raises:
        TypeError: if it is malformed.
    """
    names = _own_pattern(own)
    arguments = [_value(str(word), names)._replace(option=_option(str(word))) for word in process.get("args") or ()]
    return Program(
        arguments=(*arguments[:_MOST], *_rest(arguments[_MOST:])),
        directory=_value(str(process.get("cwd") or ""), names),
        environment=_environment([str(entry) for entry in process.get("env") or ()], names),
    )


def changes_of_program(then: Program, now: Program) -> Iterator[str]:
    """Yield what differs between two programs, without any value."""
    yield from _changed_arguments(then.arguments, now.arguments)
    if not then.directory.is_as(now.directory):
        yield "the working directory differs"
    before = {name: value for name, value in then.environment.items() if not _is_identity(name)}
    after = {name: value for name, value in now.environment.items() if not _is_identity(name)}
    both = before.keys() & after.keys()
    rows = (
        ("missing", before.keys() - both),
        ("new", after.keys() - both),
        ("changed", {name for name in both if not before[name].is_as(after[name])}),
    )
    for word, names in rows:
        if names:
            yield f"environment variables that are {word}: {', '.join(sorted(names))}"


def _changed_arguments(then: Sequence[Value], now: Sequence[Value]) -> Iterator[str]:
    pairs = zip(then, now, strict=False)
    at = next((at for at, (old, new) in enumerate(pairs) if not old.is_as(new)), min(len(then), len(now)))
    if at == len(then) == len(now):
        return
    count = f"{len(now)}" if len(then) == len(now) else f"{len(then)} then, {len(now)} now"
    is_order = Counter(value.digest for value in then) == Counter(value.digest for value in now)
    option = (now[at].option if at < len(now) else "") or (then[at].option if at < len(then) else "")
    named = f"argument {at}{f' ({option})' if option else ''} is the first that differs"
    yield f"arguments are in another order: {named}" if is_order else f"arguments differ ({count}): {named}"


def _environment(entries: Sequence[str], own: re.Pattern[str] | None) -> dict[str, Value]:
    """Return the variables that belong to the program, by name."""
    texts: dict[str, list[str]] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        texts.setdefault(name, []).append(value)
    services = {found[1] for name, held in texts.items() if (found := _SERVICE.fullmatch(name)) and _is_address(held)}
    named = {
        _shown(name): _value(_OWN.join(held), own)
        for name, held in texts.items()
        if not _is_identity(name) and not _is_of_service(name, held[-1], services)
    }
    kept = sorted(named)
    rest = _rest([Value(name, name) for name in kept[_MOST:]], [named[name] for name in kept[_MOST:]])
    return {name: named[name] for name in kept[:_MOST]} | dict(zip((_REST,), rest, strict=False))


def _is_identity(name: str) -> bool:
    return _IDENTITY.fullmatch(name) is not None


def _is_of_service(name: str, value: str, services: Iterable[str]) -> bool:
    for service in services:
        suffix = name.removeprefix(f"{service}_")
        if suffix != name and (_OF_SERVICE.fullmatch(suffix) or (suffix == "PORT" and _LINK.fullmatch(value))):
            return True
    return False


def _is_address(texts: Sequence[str]) -> bool:
    try:
        ipaddress.ip_address(texts[-1])
    except ValueError:
        return False
    return True


def _own_pattern(own: Iterable[str]) -> re.Pattern[str] | None:
    names = sorted({name for name in own if name}, key=len, reverse=True)
    return re.compile(rf"(?<![0-9A-Za-z])(?:{'|'.join(map(re.escape, names))})(?![0-9A-Za-z])") if names else None


def _value(text: str, own: re.Pattern[str] | None) -> Value:
    return Value(_digest(text), _digest(own.sub(_OWN, text) if own else text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]


def _rest(*groups: Sequence[Value]) -> list[Value]:
    """Return one value for all of these; none if there are none."""
    values = [value for group in groups for value in group]
    return [Value(*(_digest(" ".join(part)) for part in list(zip(*values, strict=True))[:2]))] if values else []


def _option(word: str) -> str:
    found = _OPTION.fullmatch(word)
    return found[1] if found else ""


def _shown(name: str) -> str:
    """Return a variable's name as a record has it: short, and without what no message can show."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return f"{name.encode('ascii', 'backslashreplace').decode()[:64]}~{_digest(name)[:8]}"
