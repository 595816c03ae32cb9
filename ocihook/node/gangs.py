"""Gangs whose members engines run: all checkpointed into one directory or restored from it, at the same time.

A directory is a whole checkpoint or not there: archives are written beside it, under the same name with `.partial`, and
that gets its name when all of them are complete and fit together. `nodes.json` in it says which node each is from.
"""

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from ocihook.checkpoints.gang_note import GANG_NAME, MAX_NOTE_BYTES, GangNote, read_note
from ocihook.container.engine_archive import Member, read_facts
from ocihook.criu.socket_images import FILES_NAME
from ocihook.errors import GangError, IntegrityError, OutputExists
from ocihook.gang.cut import connection_ends, contradictions, described
from ocihook.linux.files import sync_directory
from ocihook.node.gang_engines import Engine, find_members, last_lines
from ocihook.node.gang_pods import make_pods, read_recipes, recipes_of, remove_pods, write_recipes

_MAX_IMAGE_BYTES = 128 << 20  # of one connection with all that is queued
_NODES_NAME = "nodes.json"
_LOOK_S = 0.5  # between looks at how far the members are
_PAUSE_S = 2.0  # at most between two tries: a random time, so that a job is not caught in the same step again

Look = Callable[[], object]


class GangCheckpoint(NamedTuple):
    """The archives of one epoch."""

    note: GangNote
    archives: Mapping[str, Path]  # by member
    connections: int  # between members, of which both ends are there


def _look_at_nothing() -> None:
    pass


def checkpoint(
    name: str,
    directory: Path,
    engines: Sequence[Engine],
    *,
    leave_running: bool = False,
    tries: int = 1,
    look: Look = _look_at_nothing,
) -> GangCheckpoint:
    """Checkpoint all containers of a gang into archives in a new directory.

    Args:
        name: of the gang: NAME, or NAMESPACE/NAME of pods.
        directory: is made; nothing of that name exists unless all succeed.
        engines: that run the members.
        leave_running: let the containers run on.
        tries: how often at most; again only if all of them run on. Where one rank of a job has begun a collective and
            another has not, the GPU of one cannot be locked, and the next try meets the job at another step.
        look: is called twice a second meanwhile.

    Raises:
        GangError: if it fails; all containers run on.
        OutputExists: if the directory is there.
    """
    namespace, _, short = name.rpartition("/")
    members = find_members(engines, namespace, short)
    size = next(iter(members.values())).ref.size
    if len(members) != size:
        raise GangError(
            f"{len(members)} of the {size} members of gang {name} run there: {', '.join(sorted(members))}",
            hint="name all nodes that run members with --node",
        )
    left_by_cri = any(engine.is_cri for engine in engines)  # always
    partial = directory.with_name(directory.name + ".partial")
    for path in (directory, partial):
        if path.exists():
            raise OutputExists(f"{path} is there already", hint="name another directory, or remove it")
    recipes = recipes_of(members) if left_by_cri else {}
    partial.mkdir(mode=0o700, parents=True)
    archives = {member: partial / f"{member.replace('/', '_')}.tar" for member in members}
    left = leave_running or left_by_cri
    commands = {
        member: running.engine.checkpoint(running.container_id, archives[member], leave_running=leave_running)
        for member, running in members.items()
    }
    for attempt in range(1, tries + 1):
        failures = _run_all(commands, look)
        if not failures:
            break
        run_on = left or len(failures) == len(members)
        if run_on:  # else of a container that has ended its archive is all that is left
            for archive in archives.values():
                archive.unlink(missing_ok=True)
        if not run_on or attempt == tries:
            if run_on:
                partial.rmdir()
            tried = f" in {tries} tries" if tries > 1 else ""
            raise GangError(f"gang {name} is not checkpointed{tried}: {_in_words(failures)}")
        time.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311 - no secret
    found = verify(list(archives.values()))
    nodes = {member: running.engine.node for member, running in members.items()}
    if recipes:
        write_recipes(partial, recipes)
    (partial / _NODES_NAME).write_text(json.dumps({"version": 1, "nodes": nodes}, indent=1))
    partial.rename(directory)
    sync_directory(directory.parent)
    return found._replace(archives={member: directory / path.name for member, path in found.archives.items()})


def restore(
    directory: Path, podman: str, moved: Mapping[str, str] | None = None, look: Look = _look_at_nothing
) -> GangCheckpoint:
    """Restore all containers of a gang from the archives in a directory, each on the node that it is from.

    Args:
        directory: that `checkpoint` has made.
        podman: the command, with its global options.
        moved: nodes of members that are to be on others; as Engine.podman takes them.
        look: is called twice a second meanwhile.

    Raises:
        IntegrityError: if it is not a whole checkpoint of a gang; nothing was started.
        GangError: if it fails; none of them runs.
    """
    found = verify(sorted(directory.glob("*.tar*")))
    if unknown := ", ".join(sorted({*(moved or {})} - {*found.archives})):
        members = ", ".join(found.archives)
        raise GangError(f"{unknown}: not a member of gang {found.note.gang}", hint=f"its members are {members}")
    nodes = {**_read_nodes(directory), **(moved or {})}
    commands = {
        member: Engine.podman(podman, nodes.get(member, "")).restore(path) for member, path in found.archives.items()
    }
    failures = _run_all(commands, look)
    if failures:
        raise GangError(f"gang {found.note.gang} is not restored: {_in_words(failures)}")
    return found


def restore_pods(directory: Path, engine: Engine, look: Look = _look_at_nothing) -> GangCheckpoint:
    """Make all pods of a gang again from the archives in a directory, on a node without a kubelet.

    Args:
        directory: that `checkpoint` has made.
        engine: what speaks CRI on this node.
        look: is called twice a second meanwhile.

    Raises:
        IntegrityError: if it is not a whole checkpoint of a gang; nothing was started.
        UnsupportedError: if it is not known how the pods were made, or they are a kubelet's; likewise.
        GangError: if it fails; none of them is left.
    """
    found = verify(sorted(directory.glob("*.tar*")))
    recipes = read_recipes(directory)
    if missing := ", ".join(sorted({*found.archives} - {*recipes})):
        raise IntegrityError(f"{directory} does not say how the pods of {missing} were made")
    gang = found.note.gang
    if runs := ", ".join(sorted(one.ref.member for one in engine.members() if one.ref[:2] == gang[:2])):
        raise GangError(f"members of gang {gang} run already: {runs}", hint="remove their pods: crictl rmp --force POD")
    made = make_pods(engine, recipes, found.archives)
    failures = _run_all({member: engine.start(pod.container) for member, pod in made.items()}, look)
    if failures:
        left = remove_pods(engine, made)
        raise GangError(f"gang {gang} is not restored, and its pods are removed{left}: {_in_words(failures)}")
    return found


def _read_nodes(directory: Path) -> dict[str, str]:
    try:
        nodes = json.loads((directory / _NODES_NAME).read_bytes())["nodes"]
        return {str(member): str(node) for member, node in nodes.items()}
    except FileNotFoundError:  # all are of this node
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        path = directory / _NODES_NAME
        raise IntegrityError(f"{path} is damaged: {error!r}", hint="remove it, and name nodes with --on") from error


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


def _run_all(commands: Mapping[str, Sequence[str]], look: Look) -> dict[str, str]:
    """Run a command for each member, all at once; return what those say that failed."""

    def run(command: Sequence[str]) -> tuple[int, str]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            return 1, str(error)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(len(commands)) as pool:
        running = {member: pool.submit(run, command) for member, command in commands.items()}
        while wait(running.values(), _LOOK_S).not_done:
            look()
    ended = {member: one.result() for member, one in running.items()}
    return {member: said for member, (status, said) in ended.items() if status != 0}


def _in_words(failures: Mapping[str, str]) -> str:
    """Return in words what failed; the member whose failure ended it for all comes first."""
    last = {member: last_lines(text) for member, text in failures.items()}
    ordered = sorted(last.items(), key=lambda item: "is over for all members" in item[1])
    return "; ".join(f"{member}: {text}" for member, text in ordered)
