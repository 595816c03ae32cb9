"""The journal of a session: what a dump or restore has done to a node, on disk before it is done.

With the journal of a dead session any process can undo everything: each effect in it knows its own inverse. One JSON
file a session, replaced as a whole; of finished ones the history has a record (session/history.py).
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ocihook import wire
from ocihook.errors import OcihookError, plain
from ocihook.linux.files import replace_file
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.session.effect import Effect, Facts
from ocihook.session.record import from_json, to_json
from ocihook.session.timing import Spans

_VERSION = 2
_KEYS = {"runtime", "began", "container", "given_up", "stages", "effects", "phases", "spans", "facts"}

E = TypeVar("E", bound=Effect)
F = TypeVar("F", bound=Facts)

log = logging.getLogger(__name__)


class Journal:
    """One session's record: who, which stages with which verdicts, and the effects that still have to be undone."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.stage = ""  # the one that is being handled
        self.effects = [Effect.from_json(effect) for effect in data["effects"]]  # to be undone, oldest first
        self._data = data
        self._read: dict[type[Facts], Facts] = {}  # facts by kind, as `facts` gave them

    @classmethod
    def create(cls, runtime_dir: Path, criu: Process, runtime: Process | None = None) -> "Journal":
        """Start the journal of a session that CRIU has begun, called by a runtime or directly."""
        data = {
            "version": _VERSION,
            "criu": list(criu),
            "runtime": list(runtime) if runtime else None,
            "began": time.time(),
            "container": None,
            "image_dir": None,
            "given_up": None,
            "stages": {},
            "effects": [],
            "phases": [],
            "spans": [],
            "facts": {},
        }
        journal = cls(runtime_dir / "sessions" / f"{criu.pid}-{criu.start_ticks}.json", data)
        journal.save()
        return journal

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """Read a journal.

        Raises:
            OcihookError: if it is not one; it is left in place for inspection.
        """
        data = read_journal(path)
        try:
            return cls(path, data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OcihookError(f"{path} is no journal of this version: {error!r}") from error

    @property
    def session_id(self) -> str:
        """CRIU's pid and start time: unique on this boot."""
        return self.path.stem

    @property
    def criu(self) -> Process:
        """The CRIU process that this session serves."""
        return Process(*self._data["criu"])

    @property
    def runtime(self) -> Process | None:
        """The runtime that called CRIU, if one did."""
        runtime = self._data["runtime"]
        return Process(*runtime) if runtime else None

    @property
    def is_given_up(self) -> bool:
        """Return whether the runtime has ended before CRIU: its engine no longer waits, and resumes nothing."""
        return self._data["given_up"] is not None

    def give_up(self) -> None:
        """Record that the engine no longer waits."""
        if not self.is_given_up:
            self._data["given_up"] = time.time()
            self.save()

    def patience(self) -> Patience:
        """Return how long the work of a stage may take: while CRIU and the runtime live."""
        return Patience({"CRIU": self.criu, **({"the runtime": self.runtime} if self.runtime else {})})

    @property
    def container(self) -> ContainerRef | None:
        """The container, once identified."""
        value = self._data["container"]
        return None if value is None else ContainerRef.from_json(value)

    @property
    def image_dir(self) -> str:
        """The image directory, as the agent's own mount namespace may see it; "" until the container is identified."""
        return self._data["image_dir"] or ""

    @property
    def runtime_dir(self) -> Path:
        """The agent's directory."""
        return self.path.parents[1]

    @property
    def pins(self) -> Path:
        """Where files that this session still needs are pinned, in case they are removed elsewhere."""
        return self.path.with_suffix(".pins")

    def to_json(self) -> dict[str, Any]:
        """Return everything, for display."""
        return {**self._data, "effects": [effect.to_json() for effect in self.effects]}

    def identify(self, container: ContainerRef, image_dir: str) -> None:
        """Record which container and image directory this is about."""
        self._data |= {"container": container.to_json(), "image_dir": image_dir}
        self.save()

    def note(self, *facts: Facts) -> None:
        """Record facts; those of the same kind that were known are forgotten."""
        for one in facts:
            known = {**self._data["facts"], **to_json(one)}
            self._data["facts"] = {name: value for name, value in known.items() if value is not None}
        self._read.clear()
        self.save()

    def facts(self, kind: type[F]) -> F:
        """Return the facts of a kind; what is not known has its default."""
        found = self._read.get(kind)
        if not isinstance(found, kind):
            found = self._read[kind] = from_json(kind, self._data["facts"])
        return found

    def knows(self, kind: type[Facts]) -> bool:
        """Return whether facts of a kind were noted."""
        return not kind.__dataclass_fields__.keys().isdisjoint(self._data["facts"])

    def verdict_of(self, stage: str) -> tuple[int, str] | None:
        """Return the verdict on a stage that was already handled; CRIU <= 4.1.1 asks twice."""
        entry = self._data["stages"].get(stage)
        return None if entry is None or "status" not in entry else (entry["status"], entry["message"])

    @property
    def is_interrupted(self) -> bool:
        """Return whether a stage was begun and has no verdict: CRIU is waiting for it, or was killed meanwhile."""
        stages = self._data["stages"].items()
        return any("status" not in entry for stage, entry in stages if stage != wire.SNAPSHOT_STAGE)  # CRIU has ended

    def begin_stage(self, stage: str) -> bool:
        """Record that a stage is being handled; True if it was begun before and never ended."""
        self.stage = stage
        was_begun = stage in self._data["stages"]
        self._data["stages"][stage] = {"began": time.time()}
        self.save()
        return was_begun

    def end_stage(self, stage: str, status: int, message: str) -> None:
        """Record the verdict."""
        entry = self._data["stages"][stage]
        entry |= {"seconds": time.time() - entry["began"], "status": status, "message": message}
        self.save()
        if status == 0:
            self.pass_over(stage)

    def pass_over(self, *stages: str) -> None:
        """Let CRIU go on from stages without asking: they are over, or there is nothing to be done in them."""
        with contextlib.suppress(OSError):  # without it the agent is asked, and answers the same
            for stage in stages:
                self._go_on(stage).touch(mode=0o600)

    def _go_on(self, stage: str) -> Path:
        """Return the file that shows hook/criu-action that CRIU passes a stage: it need not ask, or not again."""
        return self.path.with_suffix(f".{stage}")

    def add(self, effect: E, *, undone_last: bool = False) -> E:
        """Record an effect, before it is made; `undone_last`: it can be undone only once all others are."""
        effect.stage = self.stage
        self.effects.insert(0 if undone_last else len(self.effects), effect)
        self.save()
        return effect

    def find(self, kind: type[E]) -> E | None:
        """Return the newest effect of a kind; None if there is none to undo."""
        return next((effect for effect in reversed(self.effects) if isinstance(effect, kind)), None)

    def forget(self, effect: Effect) -> None:
        """Forget an effect: it has been undone, or no longer needs to be."""
        self.effects = [other for other in self.effects if other is not effect]
        self.save()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure a phase of the work; the caller may add its `bytes`."""
        began, started = time.time(), time.monotonic()
        entry: dict[str, Any] = {"name": name, "began": began, "bytes": 0}
        try:
            yield entry
        except BaseException:
            entry["failed"] = True
            raise
        finally:
            self._data["phases"].append(entry | {"seconds": time.monotonic() - started})

    def add_phase(self, name: str, began: float) -> None:
        """Record a phase that began in another stage, at `began` (seconds since 1970), and ends now."""
        seconds = max(0.0, time.time() - began)
        self._data["phases"].append({"name": name, "began": began, "bytes": 0, "seconds": seconds})

    @contextlib.contextmanager
    def spans(self, phase: Mapping[str, Any]) -> Iterator[Spans]:
        """Measure what workers do in a phase, process by process."""
        spans = Spans()
        try:
            yield spans
        finally:
            found = self._data.setdefault("spans", [])  # journals of earlier versions have none
            found += [{"phase": phase["name"], **span} for span in spans.collect()]
            spans.close()

    def note_error(self, error: Exception, outcome: str = "") -> None:
        """Record what went wrong; its `code` is what metrics count. The last error is kept.

        Args:
            error: what happened.
            outcome: of the session, where its stages do not show it: degraded, failed.
        """
        code = getattr(error, "code", "system" if isinstance(error, OSError) else "defect")
        self._data |= {"error": plain(error), "error_code": code, "outcome": outcome}

    def finish(self, keep: Callable[[str, Mapping[str, Any]], None] | None = None) -> None:
        """End the session's journal.

        Args:
            keep: given the session's id and its whole record, keeps it.
        """
        self._data.setdefault("ended", time.time())
        self.save()
        if keep is not None:
            try:
                keep(self.session_id, self.to_json())
            except OSError as error:  # all that the session did is undone by now: there is nothing to retry
                log.warning("session %s is not in the history: %s", self.session_id, error)
        for stage in {*self._data["stages"], *wire.RESTORE_STAGES}:
            self._go_on(stage).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def save(self) -> None:
        """Write everything to disk, with the progress of effects."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self.path, json.dumps(self.to_json(), indent=1).encode(), mode=0o600)


def read_journal(path: Path) -> dict[str, Any]:
    """Return what a journal says, for display; effects as they are written.

    Raises:
        OcihookError: if it is not a journal.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        Process(*data["criu"])
        if missing := _KEYS - data.keys():
            raise KeyError(*missing)
    except (ValueError, KeyError, TypeError) as error:
        raise OcihookError(f"{path} is no journal of this version: {error!r}") from error
    return data


def open_journals(runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> list[Path]:
    """Return the journals of sessions that have not ended."""
    return sorted((runtime_dir / "sessions").glob("*.json"))


def other_journals(mine: Journal) -> Iterator[Journal]:
    """Yield the journals of the other sessions that have not ended, as far as this version can read them."""
    for path in mine.path.parent.glob(f"*{mine.path.suffix}"):
        if path != mine.path:
            with contextlib.suppress(OcihookError, FileNotFoundError):  # it has ended meanwhile
                yield Journal.load(path)


def remove_unwritten(runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> None:
    """Remove what processes killed while writing journals have left. Only with the agent's lock held."""
    for partial in (runtime_dir / "sessions").glob("*.partial"):
        partial.unlink(missing_ok=True)
