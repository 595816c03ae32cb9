"""Installs the runtime handler before a node's runtimes, and removes it: its programs, and a drop-in for each engine.

No file of an engine is changed: each reads a directory of drop-ins. The programs come first and go last, and stay as
long as a container needs them: an engine calls the handler that made a container until that is removed.
"""

import contextlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.container.identity import GRACE_ANNOTATION
from ocihook.criu.version import find_program, find_program_in
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.linux.procfs import command_line
from ocihook.node import distribution
from ocihook.node.install import (
    MADE,
    NODE,
    PACKAGE_LIBEXEC,
    SIGN,
    Change,
    apply_change,
    below,
    is_signed,
    made_directories,
    missing_directories,
    read,
    render,
)

HANDLER = "ocihook"  # what engines and RuntimeClasses call it
RUNTIMES = ("runc", "crun")
CONTAINERD_CONFIG = Path("/etc/containerd/config.toml")
CONTAINERD_DROP_IN = Path("/etc/containerd/conf.d/ocihook.toml")
CRIO_DROP_IN = Path("/etc/crio/crio.conf.d/50-ocihook.conf")
PODMAN_DROP_IN = Path("/etc/containers/containers.conf.d/50-ocihook.conf")
# Neither podman nor CRI-O looks anywhere else, unless its `hooks_dir` is set: not in /etc/containers/oci/hooks.d.
HOOK_FILE = Path("/usr/share/containers/oci/hooks.d/50-ocihook.json")
HOOK_NAME = "oci-hook"
DROP_INS = {"containerd": CONTAINERD_DROP_IN, "crio": CRIO_DROP_IN, "podman": PODMAN_DROP_IN}

_HOOK_TIMEOUT_S = 30
_HOOK = {  # oci-hooks(5); hooks.d/ at the top of the project has it for packages
    "version": "1.0.0",
    "when": {"annotations": {r"^ocihook\.io/": ".*"}},
    "stages": ["createRuntime"],
}
_PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}  # by the version of a configuration
_CONTAINERD = """version = {version}
[plugins."{plugin}".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["ocihook.io/*"]
container_annotations = ["{grace}"]
[plugins."{plugin}".containerd.runtimes.{handler}.options]
BinaryName = "{program}"
SystemdCgroup = {systemd}
"""
_CRIO = """[crio.runtime.runtimes.{handler}]
runtime_path = "{program}"
runtime_type = "oci"
"""
_PODMAN = """[engine.runtimes]
{handler} = ["{program}"]
"""
_TASKS = "run/containerd/io.containerd.runtime.v2.task/*/*/options.json"  # of containers that a shim has made


class ContainerdConfig(NamedTuple):
    """What of containerd's configuration counts."""

    version: int
    has_systemd_cgroup: bool  # of the handler that is copied
    reads_drop_ins: bool


def program_of(libexec: Path, runtime: str) -> Path:
    """Return where the handler before a runtime is, or goes."""
    return libexec / f"ocihook-{runtime}"


def plan_handlers(root: Path, libexec: Path) -> list[Change]:
    """Return what puts the handler before the runtimes below `root`, in the order in which it must be made.

    Raises:
        ConfigError: if containerd's configuration cannot be read.
        UnsupportedError: if there is no runtime, or a file of others is in the way.
    """
    find = find_program if root == NODE else partial(find_program_in, root)
    runtimes = {name: found.path for name in RUNTIMES if (found := find(name))}
    if not runtimes:
        raise UnsupportedError("there is neither runc nor crun; nothing was changed", hint="install one of them")
    changes = []
    is_packaged = distribution.is_packaged() and libexec == PACKAGE_LIBEXEC  # programs and hooks are the package's
    if not is_packaged:
        for name, path in runtimes.items():
            text = _template("handler").replace("@RUNTIME@", path)
            changes.append(_written(root, program_of(libexec, name), text, 0o755))
    wants_hook = not is_packaged and bool(find("podman") or find("crio")) and _can_have_hook(root, libexec)
    if wants_hook:  # the program before the file that names it
        changes.append(_written(root, libexec / HOOK_NAME, _template(HOOK_NAME), 0o755))
        changes.append(_hook(root, libexec / HOOK_NAME))
    for engine, place in DROP_INS.items():
        if find(engine):
            chosen = "crun" if "crun" in runtimes and (engine == "podman" or "runc" not in runtimes) else "runc"
            changes.append(_written(root, place, _drop_in(engine, root, program_of(libexec, chosen)), 0o644))
    return [change for change in changes if change.is_needed()]


def plan_refresh(root: Path, libexec: Path) -> list[Change]:
    """Return what brings an installed handler in order: its programs name the release that they run; [] without one.

    Raises:
        OcihookError: as `plan_handlers` does.
    """
    programs = tuple(program_of(libexec, name) for name in RUNTIMES)
    return plan_handlers(root, libexec) if any(_signed(root, (*DROP_INS.values(), *programs))) else []


def plan_removal(root: Path, libexec: Path) -> list[Change]:
    """Return what removes the handler: drop-ins first, then its programs.

    Raises:
        UnsupportedError: if containers need it.
    """
    programs = [program_of(libexec, name) for name in RUNTIMES]
    changes = [_hook(root, None)] if _hook_path(root) == str(libexec / HOOK_NAME) else []
    changes += [
        Change(path, content, None)
        for path, content in _signed(root, (*DROP_INS.values(), libexec / HOOK_NAME, *programs))
    ]
    changes = [change for change in changes if change.is_needed()]
    users = list(_users(programs)) if root == NODE else []
    if users:
        raise UnsupportedError(
            f"{len(users)} containers were made by the runtime handler, {', '.join(users[:3])} among them, and their "
            "engine calls it until they are removed; nothing was changed",
            hint="remove these containers, or move their pods to another node (`kubectl drain`)",
        )
    return changes


def remove(changes: list[Change], root: Path) -> None:
    """Make the changes of `plan_removal`, and remove the directories that were made for these files.

    Raises:
        UnsupportedError: if something cannot be removed; a second call continues.
    """
    directories = made_directories(change.path for change in changes if change.path.suffix != ".json")
    for change in changes:
        apply_change(change)
    for directory in sorted(directories, reverse=True):
        with contextlib.suppress(OSError):  # not empty: not only ours
            below(root, directory).rmdir()


def read_containerd(root: Path) -> ContainerdConfig:
    """Read containerd's configuration.

    Raises:
        ConfigError: if it cannot be read.
    """
    path = below(root, CONTAINERD_CONFIG)
    try:
        config = tomllib.loads((read(path) or b"version = 3").decode())
        version = int(config.get("version", 2))
        cri = config.get("plugins", {}).get(_PLUGINS.get(version, _PLUGINS[3]), {}).get("containerd", {})
        handler = cri.get("runtimes", {}).get(cri.get("default_runtime_name", "runc"), {})
        has_systemd_cgroup = bool(handler.get("options", {}).get("SystemdCgroup", False))
        imports = [str(pattern) for pattern in config.get("imports", ())]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; nothing was changed") from error
    reads = any(CONTAINERD_DROP_IN.match(pattern) for pattern in imports)
    return ContainerdConfig(version if version in _PLUGINS else 3, has_systemd_cgroup, reads)


def notes(root: Path) -> Iterator[str]:
    """Yield what an administrator still has to do, a sentence each."""
    if below(root, CONTAINERD_DROP_IN).exists():
        if not read_containerd(root).reads_drop_ins:
            pattern = CONTAINERD_DROP_IN.parent / "*.toml"
            yield f'{CONTAINERD_CONFIG} does not read it yet: add `imports = ["{pattern}"]` at its top'
        yield "restart containerd to make it load the handler: running containers are not touched"
    if any(below(root, place).exists() for place in (PODMAN_DROP_IN, CRIO_DROP_IN)) and not _hook_path(root):
        yield f"wrong annotations are reported by the handler and by dumps alone: {HOOK_FILE} cannot be written"
    if below(root, CRIO_DROP_IN).exists():
        yield "reload CRI-O to make it load the handler (`systemctl reload crio`)"


def _drop_in(engine: str, root: Path, program: Path) -> str:
    header = f"# {SIGN}\n"
    if engine == "containerd":
        config = read_containerd(root)
        return header + _CONTAINERD.format(
            version=config.version,
            plugin=_PLUGINS[config.version],
            handler=HANDLER,
            program=program,
            systemd=str(config.has_systemd_cgroup).lower(),
            grace=GRACE_ANNOTATION,
        )
    return header + (_CRIO if engine == "crio" else _PODMAN).format(handler=HANDLER, program=program)


def _template(name: str) -> str:
    return render((distribution.PACKAGE_DIR / "hook" / name).read_text(), SIGN, distribution.SITE)


def _hook(root: Path, program: Path | None) -> Change:
    """Return what has engines call the OCI hook, or not any more; JSON has no comments that could say whose it is."""
    place = below(root, HOOK_FILE)
    hook = {**_HOOK, "hook": {"path": str(program), "timeout": _HOOK_TIMEOUT_S}}
    return Change(place, read(place), None if program is None else f"{json.dumps(hook, indent=4)}\n".encode(), 0o644)


def _hook_path(root: Path) -> str:
    """Return the program that an installed hook calls, a package's or ours; "" if none is installed."""
    return str((_json(below(root, HOOK_FILE)).get("hook") or {}).get("path", ""))


def _can_have_hook(root: Path, libexec: Path) -> bool:
    """Return whether the hook is ours, or can be: there may be a package's already, or /usr may be read-only."""
    place = below(root, HOOK_FILE)
    if place.exists():
        return _hook_path(root) == str(libexec / HOOK_NAME)
    return os.access(next(parent for parent in place.parents if parent.exists()), os.W_OK)


def _written(root: Path, path: Path, text: str, mode: int) -> Change:
    place = below(root, path)
    content = read(place)
    if content is not None and not is_signed(content):
        raise UnsupportedError(f"{place} is not ocihook's; nothing was changed", hint="move it elsewhere")
    further = [below(root, HOOK_FILE)] if path.name == HOOK_NAME else []  # which cannot say so itself
    made = sorted({*made_directories([place]), *missing_directories(root, [place, *further])})
    record = "".join(f"{MADE}{directory}\n" for directory in made)
    return Change(place, content, f"{text.rstrip()}\n{record}".encode(), mode)


def _signed(root: Path, paths: tuple[Path, ...]) -> Iterator[tuple[Path, bytes]]:
    for path in paths:
        place = below(root, path)
        content = read(place)
        if content is not None and is_signed(content):
            yield place, content


def _users(programs: list[Path]) -> Iterator[str]:
    """Yield the containers of this node whose engine calls one of these programs: through conmon, or a shim."""
    names = {str(program) for program in programs}
    for path in NODE.glob(_TASKS):
        if names & {str(_json(path).get("binary_name"))}:
            yield path.parent.name[:12]
    for process in Path("/proc").glob("[0-9]*"):
        words = command_line(int(process.name))
        if words and Path(words[0]).name == "conmon" and names & set(words):
            yield words[words.index("-c") + 1][:12] if "-c" in words else process.name


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
