"""A member of a gang that is stopped alone calls the others: those on this node are checkpointed, and run on.

No node can be reached, so each asks the coordinator whether a gang of its own calls. Members that are all stopped get
their signals within a second or so; each is checkpointed by its own stop, and nobody calls.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ocihook.checkpoints.belongings import note_call, read_call, stopping_dir
from ocihook.config import Settings, apply_annotations
from ocihook.container.identity import gang_ref
from ocihook.errors import GangError, OcihookError, plain
from ocihook.linux.patience import ENDLESS
from ocihook.runtime import containers, dumping
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import read_config, read_stop

if TYPE_CHECKING:
    import subprocess

_BUSY_S = 0.5  # that the coordinator is waited for while members are dumped
_RETRY_S = 5.0  # to a coordinator that cannot be reached

log = logging.getLogger(__name__)


class _Dump(NamedTuple):
    """A dump that was begun here."""

    runtime: "subprocess.Popen[bytes]"
    until_s: float  # by the monotonic clock


def members_that_listen(settings: Settings) -> Iterator[tuple[tuple[str, str], Kept]]:
    """Yield the containers that are to be checkpointed with others of their gang, with its namespace and its name."""
    for kept in containers.all_kept():
        try:
            notes = read_config(kept).get("annotations") or {}
            policy = apply_annotations(settings, notes, in_pod=kept.container.is_in_pod).policy
            gang = gang_ref(notes, kept.container)
        except (OcihookError, OSError) as error:
            if kept.bundle.exists():  # else it is being removed
                log.warning("container %s is not checkpointed with its gang: %s", kept.container, plain(error))
            continue
        if gang is not None and policy.on_member_stop == "checkpoint":
            yield gang[:2], kept


class Listening:
    """Answers calls as long as there are such containers."""

    def __init__(self, load: Callable[[], Settings], ask: Callable[[Settings, dict[str, Any]], Any]) -> None:
        """Begin to listen.

        Args:
            load: returns the node's settings, which may change.
            ask: asks the coordinator; raises OcihookError or OSError.
        """
        self._load, self._ask = load, ask
        self._seen: dict[tuple[str, str], str] = {}  # the last attempt that has called, by gang
        self._dumps: dict[Path, _Dump] = {}
        self._is_reached = True

    def serve(self) -> None:
        """Listen until there are none any more."""
        while self._look() or self._dumps:
            pass

    def _look(self) -> bool:
        """Ask the coordinator once, and begin what it asks for; return whether there are such containers."""
        settings = self._load()
        self._collect(settings)
        gangs = sorted({gang for gang, _ in members_that_listen(settings)})
        request: dict[str, Any] = {"verb": "watch", "gangs": [[*gang, self._seen.get(gang, "")] for gang in gangs]}
        if self._dumps:
            request["wait_s"] = _BUSY_S
        try:
            calls = [((str(space), str(name)), str(attempt)) for space, name, attempt in self._ask(settings, request)]
        except (OcihookError, OSError, ValueError, TypeError) as error:
            if self._is_reached:
                log.warning("members of gangs that are stopped alone cannot call those of this node: %s", plain(error))
            self._is_reached = False
            ENDLESS.sleep(_RETRY_S)
            return bool(gangs)
        self._is_reached = True
        for gang, attempt in calls:
            self._seen[gang] = attempt
            for member, kept in members_that_listen(settings):
                if member == gang:
                    self._dump(kept, attempt, settings)
        return bool(gangs)

    def _dump(self, kept: Kept, attempt: str, settings: Settings) -> None:
        """Begin to dump a container that is not being stopped itself. If it cannot be dumped, none of them can."""
        container_id = kept.container.id
        place = stopping_dir(Path(settings.store_dir), container_id)
        try:
            dumping.check_sizes(kept, settings)
            if _is_stopped(container_id) or dumping.runtime_at(place) is not None:
                return
            dumping.make_place(kept, settings, place)
            note_call(place, attempt)
            if _is_stopped(container_id):  # its stop sees the note, or we see the stop
                _remove(place)
                return
            runtime = dumping.begin(kept, place, leave_running=True)
            self._dumps[place] = _Dump(runtime, time.monotonic() + settings.stop_timeout_s)
        except (OcihookError, OSError) as error:
            log.error("container %s is not checkpointed with its gang: %s", kept.container, plain(error))

    def _collect(self, settings: Settings) -> None:
        """Remove what dumps leave that are over; each dump's session reports what came of it."""
        for place, (runtime, until_s) in list(self._dumps.items()):
            if runtime.poll() is None and time.monotonic() >= until_s:
                runtime.kill()
            if runtime.poll() is not None:
                _remove(place)
                del self._dumps[place]
        for place in stopping_dir(Path(settings.store_dir), "x").parent.glob("*"):  # of an agent that was killed
            if place not in self._dumps and read_call(place) and dumping.runtime_at(place) is None:
                _remove(place)


def _remove(place: Path) -> None:
    """Remove a place at once, as a stop may wait for that; what is left of one that has begun is in nobody's way."""
    with contextlib.suppress(FileNotFoundError):
        leaving = place.rename(place.with_name(f".{place.name}"))
        shutil.rmtree(leaving, ignore_errors=True)


def _is_stopped(container_id: str) -> bool:
    is_ended = (containers.directory_of(container_id) / containers.ENDED_NAME).exists()
    return is_ended or read_stop(container_id) is not None


def listen(load: Callable[[], Settings]) -> None:
    """Answer calls as long as there are containers that are to be checkpointed with others of their gang."""
    from ocihook.gang.link import Link  # for gangs alone

    def ask(settings: Settings, request: dict[str, Any]) -> Any:  # noqa: ANN401 - as it was sent
        answer = Link.of(settings).ask(request, ENDLESS)
        if "calls" not in answer:
            raise GangError("the coordinator gave a malformed answer")
        return answer["calls"]

    Listening(load, ask).serve()
