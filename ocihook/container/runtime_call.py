"""Finds out from CRIU's pid which runtime called it, for which container, and how.

CRIU's parent is `runc|crun [--root R] checkpoint|restore ... ID`, whatever the program is called: runc-1.3,
/usr/libexec/crio/crun, a wrapper that executes a copy of either. runc keeps R/ID/state.json, crun R/ID/status; both
name the bundle. All paths are the caller's, so they are read below /proc/<criu>/root.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import IdentificationError, reason
from ocihook.linux.procfs import Process, command_line, parent_pid

_DEFAULT_ROOTS = {"runc": "/run/runc", "crun": "/run/crun"}
# Global options that take a value: main.go of runc, crun.c of crun.
_VALUE_OPTIONS = ("--root", "--log", "--log-format", "--criu", "--rootless", "--cgroup-manager")
_NVIDIA_DEVICE = re.compile(r"/dev/(nvidia(?:[0-9]+|ctl|-uvm|-uvm-tools|-modeset))")
_MAX_ANCESTORS = 4  # a wrapper or a shell may stand between
_NAME = re.compile(r"(?:.*[^a-z])?(runc|crun)(?:[^a-z].*)?")
# What each program has in it, stripped or not: the module that runc is built from, the library of crun.
_MARKS = {"runc": b"github.com/opencontainers/runc/", "crun": b"libcrun"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCall:
    """One `checkpoint` or `restore` that a runtime was asked for."""

    runtime: str  # runc, crun
    verb: str  # checkpoint, restore
    container_id: str
    bundle: str  # "" if it is not known
    leave_running: bool
    cgroup: str = ""  # name of the one that the runtime gave the container; "" if it is not known
    options: frozenset[str] = frozenset()  # their names, as in --link-remap: link-remap


def runtime_named(program: str) -> str:
    """Return which runtime a program is by its name: runc, crun; "" if the name does not say."""
    found = _NAME.fullmatch(os.path.basename(program).lower())
    return found[1] if found else ""


def runtime_of(program: Path) -> str:
    """Return which runtime a program is by its name, or else by its content: runc, crun; "" if it is neither."""
    if named := runtime_named(str(program.resolve())) or runtime_named(program.name):
        return named
    return _runtime_inside(program)


def _runtime_inside(program: Path) -> str:
    try:
        with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return next((runtime for runtime, mark in _MARKS.items() if content.find(mark) >= 0), "")
    except (OSError, ValueError):  # it has ended, or is empty
        return ""


def _call_of(pid: int) -> tuple[RuntimeCall, str] | None:
    """Return the call that a process serves, as `parse_runtime_call` does; None if it is not a runtime."""
    argv = command_line(pid)
    if not _is_call(_split(argv)[1]):
        return None
    link = f"/proc/{pid}/exe"
    with contextlib.suppress(OSError):
        if named := runtime_named(os.readlink(link).removesuffix(" (deleted)")):
            return parse_runtime_call(argv, named)
    return parse_runtime_call(argv) or parse_runtime_call(argv, _runtime_inside(Path(link)))


def _is_call(words: Sequence[str]) -> bool:
    return len(words) > 1 and words[0] in ("checkpoint", "restore")


def parse_runtime_call(argv: Sequence[str], runtime: str = "") -> tuple[RuntimeCall, str] | None:
    """Read a runtime's command line.

    Args:
        argv: the command line.
        runtime: the runtime; "": as its name says.

    Returns:
        The call and the state root; None if it is not a checkpoint or restore.
    """
    runtime = runtime or runtime_named(argv[0] if argv else "")
    settings, words = _split(argv)
    if runtime not in _DEFAULT_ROOTS or not _is_call(words):
        return None
    root = settings.get("--root", _DEFAULT_ROOTS[runtime])
    verb, *options = words
    call = RuntimeCall(
        runtime=runtime,
        verb=verb,
        container_id=options[-1],
        bundle=_option(options, "--bundle", "-b"),
        leave_running="--leave-running" in options or "-R" in options,
        options=frozenset(o.removeprefix("--").partition("=")[0] for o in options if o.startswith("--")),
    )
    return call, root


def _split(argv: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Split a runtime's command line into its global options and the rest, which begins with the verb."""
    settings, position = {}, 1
    while position < len(argv) and argv[position].startswith("-"):
        name, equals, value = argv[position].partition("=")
        if not equals and name in _VALUE_OPTIONS:
            position += 1
            value = argv[position] if position < len(argv) else ""
        settings[name] = value
        position += 1
    return settings, argv[position:]


def find_error_log(runtime_pid: int) -> Path | None:
    """Return the file to which a runtime writes its errors for its engine, as JSON lines; None without such a file."""
    settings, _ = _split(command_line(runtime_pid))
    if settings.get("--log-format") != "json" or not settings.get("--log"):
        return None
    return _seen_by(runtime_pid, settings["--log"])


def _option(options: Sequence[str], *names: str) -> str:
    for number, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name in names:
            return value if equals else options[number + 1]
    return ""


def find_runtime(criu_pid: int) -> Process | None:
    """Return the runtime that called CRIU; None when it was not called by runc or crun."""
    pid = criu_pid
    for _ in range(_MAX_ANCESTORS):
        pid = parent_pid(pid)
        if pid <= 1:
            return None
        if _call_of(pid):
            return Process.find(pid)
    return None


def find_runtime_call(criu_pid: int) -> RuntimeCall | None:
    """Return the call that CRIU serves, with its bundle; None when CRIU was not called by runc or crun."""
    runtime = find_runtime(criu_pid)
    found = _call_of(runtime.pid) if runtime else None
    if runtime is None or found is None:
        return None
    call, root = found
    bundle, cgroup = _state_of(criu_pid, call, root)
    bundle = call.bundle or bundle
    if call.verb == "restore" and not bundle:
        bundle = os.readlink(f"/proc/{runtime.pid}/cwd")
    return dataclasses.replace(call, bundle=bundle, cgroup=cgroup)


def _state_of(criu_pid: int, call: RuntimeCall, root: str) -> tuple[str, str]:
    """Return bundle and cgroup of a container as its runtime keeps them, "" for what it does not record."""
    if "/" in call.container_id or call.container_id.startswith("."):
        raise IdentificationError(f"{call.runtime} was called for {call.container_id!r}, which is not a container id")
    name = "state.json" if call.runtime == "runc" else "status"
    try:
        state = _read_json(_seen_by(criu_pid, f"{root}/{call.container_id}/{name}"))
    except FileNotFoundError:
        return "", ""
    if call.runtime == "crun":
        return str(state.get("bundle", "")), os.path.basename(str(state.get("cgroup-path", "")))
    config, paths = state.get("config"), state.get("cgroup_paths")
    labels = config.get("labels") if isinstance(config, Mapping) else None
    labels = [str(label) for label in labels or ()]
    bundle = next((label.removeprefix("bundle=") for label in labels if label.startswith("bundle=")), "")
    cgroups = [str(path) for path in paths.values()] if isinstance(paths, Mapping) else []
    return bundle, os.path.basename(next(filter(None, cgroups), ""))


def read_annotations(criu_pid: int, bundle: str) -> dict[str, str]:
    """Return the annotations of a bundle; {} without one.

    Raises:
        IdentificationError: if its config.json cannot be read.
    """
    annotations = read_config(criu_pid, bundle).get("annotations")
    if not isinstance(annotations, Mapping):
        return {}
    return {str(key): str(value) for key, value in annotations.items()}


def read_config(criu_pid: int, bundle: str) -> Mapping[str, object]:
    """Return the configuration of a bundle; {} without a bundle.

    Raises:
        IdentificationError: if its config.json cannot be read.
    """
    if not bundle:
        return {}
    try:
        return _read_json(_seen_by(criu_pid, f"{bundle}/config.json"))
    except FileNotFoundError as error:
        raise IdentificationError(f"bundle {bundle} has no config.json") from error


def find_network_namespace(criu_pid: int, bundle: str) -> str | None:
    """Return where the network namespace is that a bundle gives its container; None if it has the node's own.

    Returns:
        A path; "" if the container gets a new one, which CRIU makes, with its addresses, from its images.

    Raises:
        IdentificationError: if the bundle's config.json cannot be read, or the namespace is not there.
    """
    linux = _read_json(_seen_by(criu_pid, f"{bundle}/config.json")).get("linux")
    namespaces = linux.get("namespaces") if isinstance(linux, Mapping) else None
    for namespace in namespaces or ():
        if isinstance(namespace, Mapping) and namespace.get("type") == "network":
            path = str(namespace.get("path") or "")
            return _namespace_file(criu_pid, path) if path else ""
    return None


def _namespace_file(criu_pid: int, path: str) -> str:
    """Return the path of a namespace as this process can open it; /var/run may be a link that leads to our own /run."""
    kind = os.stat("/proc/self/ns/net").st_dev  # of the file system that only namespaces are in
    for name in dict.fromkeys((path, path.replace("/var/run/", "/run/", 1))):
        with contextlib.suppress(OSError):
            found = _seen_by(criu_pid, name)
            if os.stat(found).st_dev == kind:
                return str(found)
    raise IdentificationError(f"{path}, which the container's bundle names, is not a network namespace")


class DeviceNode(NamedTuple):
    """A device that a bundle gives its container."""

    name: str  # below /dev
    major: int
    minor: int


def read_nvidia_devices(criu_pid: int, bundle: str) -> list[DeviceNode]:
    """Return NVIDIA's devices that a bundle gives its container by name; none if it says nothing of them.

    Raises:
        IdentificationError: if its config.json cannot be read.
    """
    linux = _read_json(_seen_by(criu_pid, f"{bundle}/config.json")).get("linux")
    devices = linux.get("devices") if isinstance(linux, Mapping) else None
    found = []
    for device in devices or ():
        match = _NVIDIA_DEVICE.fullmatch(str(device.get("path"))) if isinstance(device, Mapping) else None
        if match:
            found.append(DeviceNode(match[1], int(device.get("major", -1)), int(device.get("minor", -1))))
    return [device for device in found if device.major >= 0 and device.minor >= 0]


def _seen_by(pid: int, path: str) -> Path:
    """Return a path as the process `pid` sees it, whatever mount namespace that is in."""
    return Path(f"/proc/{pid}/root") / path.lstrip("/")


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text("utf-8", "replace"))
    except (ValueError, PermissionError) as error:
        raise IdentificationError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(value, Mapping):
        raise IdentificationError(f"{path} is not a JSON object")
    return value
