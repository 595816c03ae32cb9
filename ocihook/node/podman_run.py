"""Makes a podman container that resumes from a checkpoint, as the one was made that was checkpointed.

podman records the command line by which a container was made, and an archive has that: so the new one has the same
options, and what this program knows nothing of. Other nodes are reached as podman's own client does, by URL or by a
name of `podman system connection`: it is there, knows ssh, and streams an archive from there to here.
"""

import json
import os
import re
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocihook.archive.places import fetched_archives
from ocihook.archive.repack import read_origin
from ocihook.checkpoints.pending import is_here
from ocihook.config import ANNOTATION_PREFIX, Settings
from ocihook.container.engine_archive import read_document
from ocihook.container.runtime_call import runtime_named
from ocihook.errors import ConfigError, NoCheckpoint, OcihookError, RestoreError, UnsupportedError, printable
from ocihook.linux.files import make_directory
from ocihook.linux.patience import Patience
from ocihook.node.gang_engines import connection_to
from ocihook.node.handlers import HANDLER, PODMAN_DROP_IN
from ocihook.packs.domain_names import NODE_DOMAIN
from ocihook.runtime import containers
from ocihook.runtime.choice import MADE_S, Known, known_checkpoints, whole
from ocihook.store.lineage import lineage
from ocihook.store.store import Store

_VERBS = ("run", "create")
# Of `podman run`: what is one container's own. Those with a value first.
_OWN = ("--name", "--cidfile", "--pidfile", "--conmon-pidfile")
_OWN_FLAGS = ("--replace", "--detach", "-d")
_RESTORE_FROM = f"{ANNOTATION_PREFIX}restore-from="
_FULL_ID = re.compile(r"[0-9a-f]{64}")
_LEAST_ID = 12  # characters by which podman shows an id
_REASON = re.compile(r"container .* is not restored: (.*)\. Nothing was started", re.DOTALL)


class Recipe(NamedTuple):
    """How a container was made."""

    options: tuple[str, ...]  # of `podman run`
    image: str  # its id
    image_name: str
    arguments: tuple[str, ...]  # behind the image
    directory: str = ""  # where podman was called, if its options show that: relative sources of volumes are there


class Made(NamedTuple):
    """A container that resumes from a checkpoint."""

    container: str  # its id
    name: str
    checkpoint: Known


def checkpoint_there(
    node: str, name: str, settings: Settings, *, new_name: str = "", given: Sequence[str] = ()
) -> Known | None:
    """Checkpoint a container that runs on another node, which ends it; None if it does not run there any more.

    First everything is checked that it needs here.

    Args:
        node: URL of its podman's service, or a name of `podman system connection`.
        name: of the container, or its id.
        settings: of this node, whose archives get it.
        new_name: as for `run_from`.
        given: as for `run_from`.

    Raises:
        NoCheckpoint: if there is no such container there.
        UnsupportedError: if the handler or the image is not here, or it is not known how it was made.
        OcihookError: if it cannot be checkpointed, or not restored from here; where the archive is then.
    """
    connection = connection_to(node)
    found = _inspect(name, *connection)
    if found is None:
        raise NoCheckpoint(f"there is no container {name} on {node}")
    if not (found.get("State") or {}).get("Running"):
        return None
    runtime = runtime_named(str(found.get("OCIRuntime", ""))) or "runc"
    _check_ready(runtime, new_name or str(found.get("Name", "")))
    if not given:
        _words(_recipe_of(found))
    directory = fetched_archives(settings)
    make_directory(directory, within=directory.parent.parent)
    path = directory / f"{str(found['Id'])[:_LEAST_ID]}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar"
    try:
        words = ["--tcp-established", "--file-locks", "--compress", "none", "--export", str(path)]
        _podman(*connection, "container", "checkpoint", *words, str(found["Id"]))
    except OcihookError:
        path.unlink(missing_ok=True)
        raise
    facts, origin, thin = read_origin(path)
    if origin is None:
        raise UnsupportedError(
            f"container {facts.container} was checkpointed by {node}, where ocihook is not installed",
            hint=f"it is in {path}: podman container restore --import {path}",
        )
    if thin is not None and not settings.remote and not is_here(Store.of(settings), thin):
        raise UnsupportedError(
            f"container {facts.container} was checkpointed, and its memory is in the store of {node}",
            hint=f"push {thin.checkpoint_id} there to a remote, and configure that here; the rest is in {path}",
        )
    return Known(thin.checkpoint_id if thin else origin.id, origin.container, origin.created, archive=path)


def find_checkpoint(name: str, settings: Settings, patience: Patience) -> Known:
    """Return the checkpoint with this id, or the newest one of the podman container with this name or id.

    Raises:
        NoCheckpoint: if there is none.
        OcihookError: if several containers have that name, or the store or the remote cannot be read.
    """
    known = known_checkpoints(NODE_DOMAIN, settings, patience)
    if named := [one for one in known if one.id == name]:
        return named[0]
    of_container = [one for one in known if _is_called(one, name)]
    of_container = whole(of_container, Store.of(settings, patience), NODE_DOMAIN, patience.within(MADE_S))
    if not of_container:
        raise NoCheckpoint(
            f"neither the store nor the remote nor an archive has a checkpoint {name}, or of a container {name}",
            hint="`ocihook store list` and `ocihook archive list` show what there is",
        )
    newest = {lineage(one.container): one for one in sorted(of_container, key=lambda one: (one.created, one.sequence))}
    if len(newest) > 1:
        ids = ", ".join(f"{one.id} of {one.container}" for one in newest.values())
        raise OcihookError(f"several containers are called {name}", hint=f"name a checkpoint: {printable(ids)}")
    return next(iter(newest.values()))


def _is_called(known: Known, name: str) -> bool:
    container = known.container
    return name in (container.name, container.member) or (len(name) >= _LEAST_ID and container.id.startswith(name))


def run_from(known: Known, name: str, given: Sequence[str]) -> Made:
    """Make a container that resumes from a checkpoint, and start it.

    Args:
        known: the checkpoint.
        name: of the new container; "": as the one that was checkpointed.
        given: options, image and arguments of `podman run`; none: those that the other one was made with.

    Raises:
        RestoreError: if it runs already, or cannot be restored; nothing is left then.
        UnsupportedError: if the handler or the image is not here, or it is not known how the container was made.
        OcihookError: if podman refuses the container.
    """
    for kept in containers.all_kept():
        if kept.checkpoint == known.id and kept.init is not None and kept.init.is_alive():
            raise RestoreError(
                f"checkpoint {known.id} runs already, as container {kept.container}",
                hint="stop that one first: two must not resume from the same state",
            )
    if any(_RESTORE_FROM in word for word in given):
        raise ConfigError(f"{_RESTORE_FROM} is set by --from", hint="leave that annotation out")
    wanted_name = name or known.container.name
    program = _check_ready(known.container.runtime, wanted_name)
    recipe = None if given else _recipe(known)
    words = given if recipe is None else _words(recipe)
    notes = {"restore-from": known.id, "restore-on-change": "true", "on-no-checkpoint": "fail"}
    notes["on-restore-error"] = "fail"
    options = [f"--annotation={ANNOTATION_PREFIX}{key}={value}" for key, value in notes.items()]
    options += [f"--name={wanted_name}"] if wanted_name else []
    with tempfile.TemporaryDirectory(prefix="ocihook-") as scratch:
        file = Path(scratch) / "id"
        directory = recipe.directory if recipe is not None and Path(recipe.directory).is_dir() else ""
        done = _call(
            *("--runtime", str(program), "run", "--detach", f"--cidfile={file}", *options, *words), directory=directory
        )
        container = file.read_text().strip() if file.exists() else ""
    if done.returncode != 0:
        reason = _REASON.search(done.stderr)
        if not container:
            raise OcihookError(f"podman refuses the container: {_last_words(done)}")
        _podman("rm", "--force", "--ignore", "--time", "0", container)
        raise RestoreError(
            f"checkpoint {known.id} is not restored, and no container is left: "
            f"{reason[1] if reason else _last_words(done)}",
            hint=f"the checkpoint stays: `ocihook run --from {known.id}` tries again",
        )
    return Made(container, str((_inspect(container) or {}).get("Name", wanted_name)), known)


def _words(recipe: Recipe) -> list[str]:
    if _inspect_image(recipe.image) is None:
        raise UnsupportedError(
            f"image {recipe.image_name} ({recipe.image[:_LEAST_ID]}) is not here",
            hint="pull it, or bring it by `podman save` and `podman load`",
        )
    return [*recipe.options, recipe.image, *recipe.arguments]


def _check_ready(runtime: str, name: str) -> Path:
    """Check that a container with this name can be made here; return the program that stands before its runtime."""
    if name and _inspect(name) is not None:
        raise OcihookError(f"there is a container {name} here", hint="remove it, or choose another name by --name")
    try:
        named = tomllib.loads(PODMAN_DROP_IN.read_text())["engine"]["runtimes"][HANDLER][0]
        program = Path(named).parent / f"ocihook-{runtime}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UnsupportedError(
            "podman does not know the runtime handler here", hint="`ocihook install --runtime` has it know it"
        ) from error
    if not program.exists():
        raise UnsupportedError(
            f"there is no {program}, and {runtime} has made the checkpoint", hint=f"install {runtime}"
        )
    return program


def _recipe(known: Known) -> Recipe:
    """Return how the container was made that was checkpointed: its archive has that, or podman, if it is still here."""
    if known.archive is not None:
        return parse_recipe(read_document(known.archive, "config.dump"), str(known.container))
    found = _inspect(known.container.id)
    if found is None:
        raise UnsupportedError(
            f"container {known.container} is not here any more, and its checkpoint does not say how it was made",
            hint="give its options, image and arguments after --, as for `podman run`",
        )
    return _recipe_of(found)


def _recipe_of(found: Mapping[str, Any]) -> Recipe:
    """Return how a container was made that podman has."""
    config = found.get("Config") or {}
    named: dict[str, Any] = {"rootfsImageID": found.get("Image"), "rootfsImageName": found.get("ImageName")}
    mounts = [{key.lower(): mount.get(key) for key in ("Source", "Destination")} for mount in found.get("Mounts") or ()]
    named["spec"] = {"mounts": mounts}
    made = {"CreateCommand": config.get("CreateCommand"), "command": config.get("Cmd")}
    return parse_recipe({**made, **named}, str(found.get("Name", "")))


def parse_recipe(config: Mapping[str, Any], name: str) -> Recipe:
    """Read how a container was made from what podman has of it, by its names in libpod's ContainerConfig.

    Raises:
        UnsupportedError: if that does not say it.
    """
    words = [str(word) for word in config.get("CreateCommand") or ()]
    arguments = [str(word) for word in config.get("command") or ()]
    image, image_name = str(config.get("rootfsImageID") or ""), str(config.get("rootfsImageName") or "")
    raw = str(config.get("RawImageName") or "")
    begin = next((at + 1 for at, word in enumerate(words) if at and word in _VERBS), 0)
    for at in (len(words) - len(arguments) - 1, len(words) - 1):  # the image's own arguments are not in the command
        is_end = words[at + 1 :] in (arguments, [])
        if begin and begin <= at and is_end and image and _names(words[at], raw, image_name, image):
            directory = _directory(words[begin:at], (config.get("spec") or {}).get("mounts") or ())
            return Recipe(_others(words[begin:at]), image, image_name, tuple(words[at + 1 :]), directory)
    raise UnsupportedError(
        f"podman does not know by which command container {name} was made",
        hint="give its options, image and arguments after --, as for `podman run`",
    )


def _directory(options: Sequence[str], mounts: Iterable[Mapping[str, Any]]) -> str:
    """Return where podman was called, by its relative sources of volumes and what these were; "" if that is unknown."""
    sources = {os.path.normpath(str(mount.get("destination"))): str(mount.get("source")) for mount in mounts}
    found = set()
    for source, place in _volumes(options):
        inner, whole = os.path.normpath(source), sources.get(os.path.normpath(place), "")
        if inner == "." or inner.startswith(".."):
            found.add(whole if inner == "." else "")
        elif source.startswith("."):
            found.add(whole.removesuffix(f"/{inner}") if whole.endswith(f"/{inner}") else "")
    return found.pop() if len(found) == 1 else ""


def _volumes(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield source and place of what options of podman mount."""
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(options[at + 1 : at + 2])
        if name in ("-v", "--volume"):
            source, _, place = value.partition(":")
            yield source, place.partition(":")[0]
        elif name == "--mount":
            fields = dict(field.partition("=")[::2] for field in value.split(","))
            place = next((fields[key] for key in ("target", "destination", "dst") if key in fields), "")
            yield fields.get("source", fields.get("src", "")), place


def _names(word: str, raw: str, name: str, image: str) -> bool:
    """Return whether a word names an image."""
    if word == raw or (len(word) >= _LEAST_ID and image.startswith(word.removeprefix("sha256:"))):
        return True
    return f"/{name}".endswith((f"/{word}", f"/{word}:latest"))


def _others(options: Sequence[str]) -> tuple[str, ...]:
    """Return options without those that are one container's own, and without what it was restored from."""
    kept, rest = [], [*options]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        taken = [rest.pop(0)] if rest and not equals and name in (*_OWN, "--annotation") else []
        is_source = name == "--annotation" and (value or "".join(taken)).startswith(_RESTORE_FROM)
        if name not in (*_OWN, *_OWN_FLAGS) and not is_source:
            kept += [word, *taken]
    return tuple(kept)


def _inspect(name: str, *connection: str) -> Mapping[str, Any] | None:
    return _one("container", name, connection)


def _inspect_image(name: str) -> Mapping[str, Any] | None:
    return _one("image", name, ())


def _one(kind: str, name: str, connection: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what podman knows of a container or an image; None if there is none."""
    done = _call(*connection, kind, "inspect", "--", name)
    if done.returncode != 0 and re.search(r"no such (container|object|image)|image not known", done.stderr):
        return None
    found = json.loads(_checked(done, kind, "inspect"))
    return found[0] if found else None


def _podman(*words: str) -> str:
    return _checked(_call(*words), *words)


def _checked(done: subprocess.CompletedProcess[str], *words: str) -> str:
    if done.returncode != 0:
        verb = next((word for word in words if word in ("checkpoint", "rm", "inspect")), "")
        raise OcihookError(f"podman {verb} fails: {_last_words(done)}")
    return done.stdout


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return printable(done.stderr.strip().rpartition("Error: ")[2])


def _call(*words: str, directory: str = "") -> subprocess.CompletedProcess[str]:
    """Call podman, in this directory or in another one."""
    command = ["podman", *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=directory or None
        )
    except FileNotFoundError as error:
        raise UnsupportedError("podman is not installed here") from error
