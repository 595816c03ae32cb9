"""Checks of programs and mappings: what CRIU refuses, and what it dumps and cannot map again.

integration/criu/test_states.py tries each with two versions of CRIU.
"""

from collections.abc import Iterator
from shlex import quote

from ocihook.criu.causes import remedy_of
from ocihook.linux.open_files import FileMapping, Mount, mapped_mount_id
from ocihook.preflight.check import Check
from ocihook.preflight.finding import Problem, fail
from ocihook.preflight.observation import Observation, ProcessSeen

_MEMFD, _SECRET, _DELETED = "/memfd:", "/secretmem", " (deleted)"
_EXECUTE = 0o111
_NAMES = {"cwd": "its working directory", "root": "its root directory"}


def _living(seen: Observation) -> Iterator[ProcessSeen]:
    return (process for process in seen.processes if not process.is_zombie and process.maps)


def _no_program_file(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        program = process.used.get("exe")
        if program and program.name.startswith(_MEMFD):
            detail = f"{seen.who(process.pid)} runs a program that is in no file system ({program.name})"
            yield fail(f"{detail}: CRIU dumps and does not restore that", "have it run from a file")


def _program_mode(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        program = process.used.get("exe")
        if program and not program.mode & _EXECUTE:
            detail = f"the program of {seen.who(process.pid)}, {program.name}, has no execute bit"
            yield fail(
                f"{detail}, without which CRIU cannot restore it", f"chmod +x {quote(program.name)} in the container"
            )


def _noexec(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        for mapping in seen.mappings[process.pid]:
            mount = _mount_of(process, mapping) if "x" in mapping.rights else None
            if mount and "noexec" in mount.options:
                detail = (
                    f"{seen.who(process.pid)} runs code of {mapping.name.removesuffix(_DELETED)}, and {mount.place} is"
                )
                yield fail(
                    f"{detail} mounted noexec since: CRIU cannot map it again",
                    f"mount -o remount,bind,exec {mount.place}",
                )
                break


def _mount_of(process: ProcessSeen, mapping: FileMapping) -> Mount | None:
    """Return the mount on which a mapped file is, by its path; None if none has its device."""
    found = [
        mount for mount in process.mounts if mapping.device == mount.device and _is_below(mapping.name, mount.place)
    ]
    return max(found, key=lambda mount: len(mount.place), default=None)


def _is_below(path: str, place: str) -> bool:
    return place in ("/", path) or path.startswith(f"{place}/")


def _no_vdso(seen: Observation) -> Iterator[Problem]:
    with open("/proc/self/maps") as file:
        has_any = "[vdso]" in file.read()
    for process in _living(seen) if has_any else ():
        if "[stack]" in process.maps and "[vvar" in process.maps and "[vdso]" not in process.maps:
            detail = (
                f"{seen.who(process.pid)} has unmapped its vDSO and kept its data, which CRIU does not restore alone"
            )
            yield fail(detail, "have the application keep both mapped, or neither")


def _secret_memory(seen: Observation) -> Iterator[Problem]:
    for process in _living(seen):
        if f" {_SECRET}" in process.maps or any(file.name == _SECRET for file in process.files):
            detail = f"{seen.who(process.pid)} has secret memory (memfd_secret), which no other process can read"
            yield fail(detail, remedy_of("secret-memory"))


def _anonymous_mapping(seen: Observation) -> Iterator[Problem]:
    """Of a file of the kernel's that is closed: its descriptor would be refused by itself."""
    for process in _living(seen):
        for mapping in seen.mappings[process.pid] if " anon_inode:" in process.maps else ():
            kind = mapping.name.removeprefix("anon_inode:").strip("[]")
            if mapping.name.startswith("anon_inode:") and kind != "io_uring":
                yield fail(
                    f"{seen.who(process.pid)} has {kind} mapped, which CRIU cannot dump",
                    "have it unmapped before the dump",
                )


def _lost_mount(seen: Observation) -> Iterator[Problem]:
    """What a process runs, has mapped, or is in may be on a mount that no process sees, as after a lazy unmount."""
    mounts = [mount for process in seen.processes for mount in process.mounts]
    ids, devices = {-1, *(mount.id for mount in mounts)}, {mount.device for mount in mounts}
    for process in _living(seen) if mounts else ():
        used = {
            _NAMES.get(kind, file.name): file.mount_id for kind, file in process.used.items() if _has_place(file.name)
        }
        others = {
            one.name: one for one in seen.mappings[process.pid] if one.device not in devices and _has_place(one.name)
        }
        used = {name: mapped_mount_id(process.pid, one.span) for name, one in others.items()} | used
        for name, number in used.items():
            if number not in ids:
                detail = (
                    f"{seen.who(process.pid)} uses {name.removesuffix(_DELETED)}, which is on no mount of the container"
                )
                yield fail(
                    detail, "have it leave or unmap that, or end it; mount a file system that was unmounted again"
                )


def _has_place(name: str) -> bool:
    return not name.startswith((_MEMFD, _SECRET, "/SYSV", "/dev/zero", "/[aio]", "anon_inode:"))


def _hidden(seen: Observation) -> Iterator[Problem]:
    """Something may be mounted over the working directory or the program of a process."""
    for process in _living(seen):
        ids = {mount.id for mount in process.mounts}
        for file in (process.used[kind] for kind in ("cwd", "exe") if kind in process.used):
            has_name = file.name.startswith("/") and not file.is_deleted and file.mount_id in ids
            if has_name and not any(file.is_at(f"/proc/{pid}/root") for pid in (process.pid, seen.init_pid)):
                detail = f"{seen.who(process.pid)} uses {file.name}, over which something was mounted since"
                yield fail(detail, "unmount what hides it, or end the process")


CHECKS = (
    Check(name="no-program-file", find=_no_program_file),
    Check(name="program-mode", find=_program_mode),
    Check(name="noexec", find=_noexec),
    Check(name="no-vdso", find=_no_vdso),
    Check(name="secret-memory", find=_secret_memory),
    Check(name="anonymous-file", find=_anonymous_mapping),
    Check(name="lost-mount", find=_lost_mount),
    Check(name="hidden-file", find=_hidden),
)
