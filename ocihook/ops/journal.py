"""The journal of a session: what a dump or restore has done to a node, on disk before it is done.

Whoever finds a journal whose session is dead can put everything back: each effect names its own inverse
(ops/undo.py). One JSON file a session, replaced as a whole; of finished ones the history has a record (ops/history.py).
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ocihook import wire
from ocihook.errors import OcihookError
from ocihook.linux.files import replace_file
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.ops.spans import Spans

_VERSION = 1

log = logging.getLogger(__name__)


class Journal:
    """One session's record: who, which stages with which verdicts, and the effects that still have to be undone."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.stage = ""  # that is being handled
        self._data = data

    @classmethod
    def create(cls, runtime_dir: Path, criu: Process) -> "Journal":
        """Start a session's journal."""
        data = {
            "version": _VERSION,
            "criu": list(criu),
            "began": time.time(),
            "container": None,
            "image_dir": None,
            "stages": {},
            "effects": [],
            "phases": [],
            "spans": [],
            "facts": {},
        }
        journal = cls(runtime_dir / "sessions" / f"{criu.pid}-{criu.start_ticks}.json", data)
        journal._write()
        return journal

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """Read a journal.

        Raises:
            OcihookError: if it is not one; it is left in place for a person to look at.
        """
        try:
            data = json.loads(path.read_bytes())
            Process(*data["criu"])
            if data["version"] != _VERSION or not isinstance(data["effects"], list):
                raise ValueError(f"version {data['version']}")
        except (ValueError, KeyError, TypeError) as error:
            raise OcihookError(f"{path} is no journal of this version: {error!r}") from error
        return cls(path, data)

    @property
    def session_id(self) -> str:
        """CRIU's pid and start time: unique on this boot."""
        return self.path.stem

    @property
    def criu(self) -> Process:
        """The CRIU process that this session serves."""
        pid, start_ticks = self._data["criu"]
        return Process(pid, start_ticks)

    @property
    def container(self) -> ContainerRef | None:
        """The container, once identified."""
        value = self._data["container"]
        return None if value is None else ContainerRef.from_json(value)

    @property
    def effects(self) -> list[dict[str, Any]]:
        """Effects that are to be undone, oldest first: each has `kind` and what its inverse needs."""
        return list(self._data["effects"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the session found out or measured."""
        return dict(self._data["facts"])

    @property
    def pins(self) -> Path:
        """Where files are kept alive that this session still needs, whoever removes them elsewhere."""
        return self.path.with_suffix(".pins")

    @property
    def image_dir(self) -> Path | None:
        """The image directory as the agent's own mount namespace may see it."""
        value = self._data["image_dir"]
        return None if value is None else Path(value)

    def to_json(self) -> dict[str, Any]:
        """Return everything, for display."""
        return dict(self._data)

    def identify(self, container: ContainerRef | None, image_dir: str, **facts: object) -> None:
        """Record which container and image directory this is about."""
        self._data["container"] = container.to_json() if container else None
        self._data["image_dir"] = image_dir
        self._data["facts"] |= facts
        self._write()

    def note(self, **facts: object) -> None:
        """Record facts."""
        self._data["facts"] |= facts
        self._write()

    def verdict_of(self, stage: str) -> tuple[int, str] | None:
        """Return the verdict on a stage that was already handled; CRIU <= 4.1.1 asks twice."""
        entry = self._data["stages"].get(stage)
        return None if entry is None or "status" not in entry else (entry["status"], entry["message"])

    def begin_stage(self, stage: str) -> bool:
        """Record that a stage is being handled; True if it was begun before and never ended."""
        self.stage = stage
        was_begun = stage in self._data["stages"]
        self._data["stages"][stage] = {"began": time.time()}
        self._write()
        return was_begun

    def end_stage(self, stage: str, status: int, message: str) -> None:
        """Record the verdict."""
        entry = self._data["stages"][stage]
        entry |= {"seconds": time.time() - entry["began"], "status": status, "message": message}
        self._write()

    def push(self, kind: str, **facts: object) -> None:
        """Record an effect, before it is made."""
        self._data["effects"].append({"kind": kind, "stage": self.stage, **facts})
        self._write()

    def amend(self, kind: str, **facts: object) -> None:
        """Record more of the newest effect of this kind."""
        effect = self.effect(kind)
        assert effect is not None, kind
        effect.update(facts)
        self._write()

    def effect(self, kind: str) -> dict[str, Any] | None:
        """Return the newest effect of this kind; None if there is none to undo."""
        return next((effect for effect in reversed(self._data["effects"]) if effect["kind"] == kind), None)

    def pop(self, kind: str) -> None:
        """Forget the newest effect of this kind: it has been undone, or needs no undoing any more."""
        effects = self._data["effects"]
        for number in range(len(effects) - 1, -1, -1):
            if effects[number]["kind"] == kind:
                del effects[number]
                break
        self._write()

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
        """Record what went wrong; its `code` is what metrics count. The last error stands.

        Args:
            error: what happened.
            outcome: of the session, where its stages do not tell: degraded, failed.
        """
        code = getattr(error, "code", "system" if isinstance(error, OSError) else "defect")
        self._data |= {"error": str(error), "error_code": code, "outcome": outcome}

    def finish(self, keep: Callable[[str, Mapping[str, Any]], None] | None = None) -> None:
        """End the session's journal.

        Args:
            keep: given the session's id and its whole record, keeps it.
        """
        self._data.setdefault("ended", time.time())
        self._write()
        if keep is not None:
            try:
                keep(self.session_id, self._data)
            except OSError as error:  # whatever a session did is undone by now: nothing is to be tried again
                log.warning("session %s is not in the history: %s", self.session_id, error)
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self.path, json.dumps(self._data, indent=1).encode(), mode=0o600)


def open_journals(runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> list[Path]:
    """Return the journals of sessions that have not ended."""
    return sorted((runtime_dir / "sessions").glob("*.json"))
