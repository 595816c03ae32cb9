"""Gangs of this node's podman: all members checkpointed into one directory or restored from it, at the same time.

A directory is a whole checkpoint or not there: archives are written beside it, under the same name with `.partial`, and
that gets its name when all of them are complete and fit together.
"""

import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ocihook.checkpoints.gang_note import GANG_NAME, MAX_NOTE_BYTES, GangNote, read_note
from ocihook.container.conmon import conmon_name
from ocihook.container.engine_archive import Member, read_facts
from ocihook.container.identity import container_ref, gang_ref
from ocihook.container.running import containers
from ocihook.criu.socket_images import FILES_NAME
from ocihook.errors import GangError, IntegrityError, OcihookError, OutputExists
from ocihook.gang.cut import connection_ends, contradictions, described
from ocihook.linux.files import sync_directory
from ocihook.model import GangRef

_PODMAN = "podman"
_MAX_IMAGE_BYTES = 128 << 20  # of one connection with all that is queued
_LAST_LINES = 3  # of what podman says of a failure


class GangCheckpoint(NamedTuple):
    """The archives of one epoch."""

    note: GangNote
    archives: Mapping[str, Path]  # by member
    connections: int  # between members, of which both ends are there


def running_members(name: str) -> dict[str, tuple[str, GangRef]]:
    """Return ids and places of the containers on this node that are of a gang and in no pod, by member.

    Raises:
        GangError: if there are none.
    """
    found = {}
    for container in containers():
        named = conmon_name(container.init_pid, container.id)
        known = {"container_id": container.id, "runtime": container.runtime, "bundle": container.bundle}
        try:
            ref = gang_ref(container.annotations, container_ref(container.annotations, name=named, **known))
        except OcihookError:  # its annotations are wrong, so it is in no gang
            continue
        if ref is not None and (ref.namespace, ref.name) == ("", name):
            found[ref.member] = container.id, ref
    if not found:
        raise GangError(
            f"no container of gang {name} runs here", hint="containers say ocihook.io/gang and ocihook.io/gang-size"
        )
    return found


def checkpoint(name: str, directory: Path, *, leave_running: bool = False, podman: str = _PODMAN) -> GangCheckpoint:
    """Checkpoint all containers of a gang into archives in a new directory.

    Args:
        name: of the gang.
        directory: is made; nothing of that name exists unless all succeed.
        leave_running: let the containers run on.
        podman: the command, with its global options.

    Raises:
        GangError: if it fails; all containers run on.
        OutputExists: if the directory is there.
    """
    members = running_members(name)
    size = next(ref.size for _, ref in members.values())
    if len(members) != size:
        raise GangError(
            f"{len(members)} of the {size} members of gang {name} run here: {', '.join(sorted(members))}",
            hint="where members are on several nodes, let each node's engine checkpoint its own at the same time",
        )
    partial = directory.with_name(directory.name + ".partial")
    for path in (directory, partial):
        if path.exists():
            raise OutputExists(f"{path} is there already", hint="name another directory, or remove it")
    partial.mkdir(mode=0o700, parents=True)
    archives = {member: partial / f"{member.replace('/', '_')}.tar" for member in members}
    options = ["--leave-running"] if leave_running else []
    failures = _podman(
        podman,
        {
            member: ["checkpoint", "--compress", "none", "--export", str(archives[member]), *options, container_id]
            for member, (container_id, _) in members.items()
        },
    )
    if failures:
        _discard(partial, archives, failures)
        raise GangError(f"gang {name} is not checkpointed: {_in_words(failures)}")
    found = verify(list(archives.values()))
    partial.rename(directory)
    sync_directory(directory.parent)
    return found._replace(archives={member: directory / path.name for member, path in found.archives.items()})


def _discard(partial: Path, archives: Mapping[str, Path], failures: Mapping[str, str]) -> None:
    """Remove what there is of archives; of a container that has ended its archive is all that is left."""
    if len(failures) == len(archives):
        for archive in archives.values():
            archive.unlink(missing_ok=True)
        partial.rmdir()


def restore(directory: Path, *, podman: str = _PODMAN) -> GangCheckpoint:
    """Restore all containers of a gang from the archives in a directory.

    Raises:
        IntegrityError: if it is not a whole checkpoint of a gang; nothing was started.
        GangError: if it fails; none of them runs.
    """
    found = verify(sorted(directory.glob("*.tar*")))
    commands = {member: ["restore", "--import", str(path)] for member, path in found.archives.items()}
    failures = _podman(podman, commands)
    if failures:
        raise GangError(f"gang {found.note.gang} is not restored: {_in_words(failures)}")
    return found


def verify(archives: Sequence[Path]) -> GangCheckpoint:
    """Check that archives are all members of one epoch, and that their connections fit together.

    Raises:
        IntegrityError: if not.
        ArchiveError: if one is not an archive, or damaged.
    """
    notes, ends = {}, {}
    for path in archives:
        with tempfile.TemporaryDirectory(prefix="ocihook-gang-") as scratch:
            _take_sockets(path, Path(scratch))
            note = read_note(Path(scratch))
            if note is None:
                raise IntegrityError(f"{path} was not made with a gang")
            notes[note.gang.member] = note, path
            ends[note.gang.member] = list(connection_ends(Path(scratch)))
    if not notes:
        raise IntegrityError("there are no archives of a gang", hint="name the archives of all its members")
    first = next(iter(notes.values()))[0]
    for note, path in notes.values():
        if note.gang[:2] != first.gang[:2] or note.gang.epoch != first.gang.epoch:
            raise IntegrityError(
                f"{path} is of epoch {note.gang.epoch} of gang {note.gang}, others of epoch {first.gang.epoch} "
                f"of gang {first.gang}"
            )
    if missing := first.gang.size - len(notes):
        there = ", ".join(sorted(notes))
        raise IntegrityError(f"epoch {first.gang.epoch} of gang {first.gang} lacks {missing} members beside {there}")
    wrong, fitting = contradictions(ends)
    if wrong:
        raise IntegrityError(described(wrong))
    return GangCheckpoint(first, {member: path for member, (_, path) in sorted(notes.items())}, fitting)


def _take_sockets(archive: Path, scratch: Path) -> None:
    """Extract what an archive has of its gang and its connections into a directory."""

    def visit(member: Member) -> None:
        name = member.image_name
        if name == GANG_NAME:
            (scratch / name).write_bytes(member.content(MAX_NOTE_BYTES))
        elif name == FILES_NAME or name.startswith("tcp-stream-"):
            (scratch / name).write_bytes(member.content(_MAX_IMAGE_BYTES))

    read_facts(archive, visit)


def _podman(podman: str, commands: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run podman for all members at once; return what it says of each that failed."""
    running = {
        member: subprocess.Popen(
            [*shlex.split(podman), "container", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for member, command in commands.items()
    }
    said = {member: process.communicate()[1] for member, process in running.items()}
    return {member: said[member] for member, process in running.items() if process.returncode != 0}


def _in_words(failures: Mapping[str, str]) -> str:
    """Return in words what failed; the member whose failure ended it for all comes first."""
    last = {member: " ".join(text.strip().splitlines()[-_LAST_LINES:]) for member, text in failures.items()}
    ordered = sorted(last.items(), key=lambda item: "is over for all members" in item[1])
    return "; ".join(f"{member}: {text}" for member, text in ordered)
