"""Metrics of this node for Prometheus, made from the history and the store: they survive the agent and a reboot."""

import contextlib
import os
import socket
import time
from calendar import timegm
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from ocihook import __version__, wire
from ocihook.checkpoints.listing import Listed, pending_of
from ocihook.checkpoints.prune import archive_bytes, stored_bytes
from ocihook.config import Settings
from ocihook.errors import IntegrityError, OcihookError
from ocihook.linux.procfs import Process
from ocihook.session import history
from ocihook.session.journal import open_journals, read_journal
from ocihook.store.domain import Domain
from ocihook.store.store import Store

_ACTS = ("dump", "restore", "store")
_OUTCOMES = ("done", "degraded", "refused", "failed")


def render(settings: Settings, runtime_dir: Path = Path(wire.RUNTIME_DIR)) -> bytes:
    """Return all metrics in Prometheus's text format."""
    return generate_latest(_registry(settings, runtime_dir))


def answer(connection: socket.socket, settings: Settings, runtime_dir: Path) -> None:
    """Answer one HTTP request on a connection."""
    handler = MetricsHandler.factory(_registry(settings, runtime_dir))
    handler(connection, ("", 0), None)  # it uses nothing of its server


def _registry(settings: Settings, runtime_dir: Path) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Node(settings, runtime_dir))
    return registry


class _Node(Collector):
    def __init__(self, settings: Settings, runtime_dir: Path) -> None:
        self._settings, self._runtime_dir = settings, runtime_dir

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("ocihook_build_info", "1, with the version of ocihook.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from _sessions(history.totals(Path(self._settings.history_dir))["acts"])
        yield _open_sessions(self._runtime_dir)
        yield from _store(Store.of(self._settings))
        yield from _file_systems(self._settings)
        yield from _retention(self._settings)


def _sessions(acts: dict[str, Any]) -> Iterator[Metric]:
    sessions = CounterMetricFamily("ocihook_sessions", "Sessions that ended, by outcome.", labels=["act", "outcome"])
    last = GaugeMetricFamily(
        "ocihook_session_last_end_timestamp_seconds", "When the last one ended so.", labels=["act", "outcome"]
    )
    causes = CounterMetricFamily(
        "ocihook_failures", "Sessions that were not done as wanted, by error code.", labels=["act", "code"]
    )
    whole = HistogramMetricFamily(
        "ocihook_session_duration_seconds", "From CRIU's first stage to the last undoing.", labels=["act"]
    )
    phases = HistogramMetricFamily(
        "ocihook_phase_duration_seconds", "Phases of a session; those of CRIU by its own word.", labels=["act", "phase"]
    )
    moved = CounterMetricFamily("ocihook_phase_bytes", "Bytes that a phase moved.", labels=["act", "phase"])
    memory = CounterMetricFamily(
        "ocihook_memory_bytes", "Memory checkpointed or restored: raw, and as it was stored.", labels=["act", "kind"]
    )
    for act in _ACTS:  # those of which there was none, too: what increases must have begun at 0
        total = acts.get(act, {"outcomes": {}, "causes": {}, "phases": {}, "bytes": {}})
        for outcome in _OUTCOMES:
            entry = total["outcomes"].get(outcome, {"count": 0, "last": 0.0})
            sessions.add_metric([act, outcome], entry["count"])
            if entry["count"]:
                last.add_metric([act, outcome], entry["last"])
        for code, count in total["causes"].items():
            causes.add_metric([act, code], count)
        for kind in ("raw", "stored"):
            memory.add_metric([act, kind], total["bytes"].get(kind, 0))
        for name, phase in total["phases"].items():
            bounds = [*map(str, history.BUCKETS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(phase["buckets"]), strict=True))
            if name == "all":
                whole.add_metric([act], buckets, phase["seconds"])
                continue
            phases.add_metric([act, name], buckets, phase["seconds"])
            if phase["bytes"]:
                moved.add_metric([act, name], phase["bytes"])
    yield from (sessions, last, causes, whole, phases, moved, memory)


def _open_sessions(runtime_dir: Path) -> Metric:
    """Count sessions that go on, and those whose CRIU is gone and that have still something to undo."""
    counts = {"running": 0, "undoing": 0, "given-up": 0}
    for path in open_journals(runtime_dir):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            try:
                counts[_state(read_journal(path))] += 1
            except OcihookError:  # a journal that only a person can interpret
                counts["undoing"] += 1
    family = GaugeMetricFamily("ocihook_open_sessions", "Sessions that have not ended.", labels=["state"])
    for state, count in counts.items():
        family.add_metric([state], count)
    return family


def _state(journal: dict[str, Any]) -> str:
    """Return what a session does: given-up when its engine has given up on it, and nobody else thaws."""
    criu, runtime = (ids is not None and Process(*ids).is_alive() for ids in (journal["criu"], journal["runtime"]))
    if journal["given_up"] is not None or (criu and journal["runtime"] is not None and not runtime):
        return "given-up"
    return "running" if criu else "undoing"


def _store(store: Store) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"ocihook_store_{name}", text, labels=["domain"])
        for name, text in (
            ("checkpoints", "Complete checkpoints."),
            ("raw_bytes", "Memory of all complete checkpoints."),
            ("stored_bytes", "What that takes on disk."),
            ("index_bytes", "What the index takes on disk."),
            ("dedup_ratio", "Bytes of memory that a stored byte stands for."),
            (
                "pending_checkpoints",
                "Checkpoints taken that are not complete yet, or still being read from a snapshot.",
            ),
            ("pending_bytes", "Memory of those that is still to be stored."),
            ("pending_oldest_timestamp_seconds", "When the oldest of those was taken."),
            ("lost_checkpoints", "Checkpoints taken that will never be complete: memory is gone."),
            ("due_pushes", "Checkpoints that are to be pushed."),
            ("due_push_oldest_timestamp_seconds", "Since when the oldest of those is to be."),
            ("due_push_failures", "Attempts to push those that failed."),
            ("pinned_checkpoints", "Checkpoints that no prune removes."),
            ("readable", "1; 0 if the domain is damaged; missing if it cannot be read for another reason."),
        )
    }
    gauges["unavailable"] = GaugeMetricFamily(
        "ocihook_store_unavailable",
        "1 for a domain that cannot be read, though no damage is known: without its key, for instance; by error code.",
        labels=["domain", "code"],
    )
    gauges["failing_checkpoints"] = GaugeMetricFamily(
        "ocihook_store_failing_checkpoints",
        "Checkpoints taken that could not be stored when it was last tried, by error code.",
        labels=["domain", "code"],
    )
    for name in store.names():
        values: dict[str, float] = {}
        try:
            domain = store.open(name)
            rows = list(pending_of(domain))
            values |= _pending(rows)
            for code, count in Counter(row.code for row in rows if row.is_on_its_way and row.reason).items():
                gauges["failing_checkpoints"].add_metric([name, code], count)
            values |= _complete(domain)
        except IntegrityError:
            values["readable"] = 0
        except (OcihookError, OSError) as error:
            gauges["unavailable"].add_metric([name, getattr(error, "code", "system")], 1)
        for key, value in values.items():
            gauges[key].add_metric([name], value)
    yield from gauges.values()


def _file_systems(settings: Settings) -> Iterator[Metric]:
    """Yield the space where checkpoints are: in mode inline the store's directory may not exist."""
    for what, directory in (("store", settings.store_dir), ("archives", settings.archive_dir)):
        with contextlib.suppress(OSError):  # not made yet, or not configured
            space = os.statvfs(directory)
            for key, blocks in (("free", space.f_bavail), ("size", space.f_blocks)):
                text = f"{key.capitalize()} bytes of the file system that has the {what}."
                yield GaugeMetricFamily(f"ocihook_{what}_filesystem_{key}_bytes", text, value=blocks * space.f_frsize)


def _retention(settings: Settings) -> Iterator[Metric]:
    """Yield what is bounded, and the bound; more than that is there only if nothing may be removed."""
    taken = GaugeMetricFamily("ocihook_retention_bytes", "What checkpoints take, by kind.", labels=["kind"])
    bounds = GaugeMetricFamily("ocihook_retention_max_bytes", "What they may take; 0: any number.", labels=["kind"])
    with contextlib.suppress(OcihookError, OSError):
        taken.add_metric(["store"], stored_bytes(Store.of(settings)))
        taken.add_metric(["archives"], archive_bytes(Path(settings.archive_dir)) if settings.archive_dir else 0)
    bounds.add_metric(["store"], settings.max_store_bytes)
    bounds.add_metric(["archives"], settings.max_archive_bytes)
    yield from (taken, bounds)


def _pending(rows: list[Listed]) -> dict[str, float]:
    waiting = [row for row in rows if row.is_on_its_way]
    values: dict[str, float] = {
        "pending_checkpoints": len(waiting),
        "pending_bytes": sum(max(0, row.raw_bytes - row.done_bytes) for row in waiting),
        "lost_checkpoints": len(rows) - len(waiting),
    }
    if waiting:
        created = min(timegm(time.strptime(row.created, "%Y-%m-%dT%H:%M:%SZ")) for row in waiting)
        values["pending_oldest_timestamp_seconds"] = min(time.time(), created)
    return values


def _complete(domain: Domain) -> dict[str, float]:
    manifests = domain.checkpoints()
    raw = sum(manifest.raw_bytes for manifest in manifests)
    stored = _size(domain.packs_dir) + _size(domain.checkpoints_dir)
    values: dict[str, float] = {
        "checkpoints": len(manifests),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "index_bytes": _size(domain.index_dir),
        "readable": 1,
    }
    values |= {"dedup_ratio": raw / stored} if manifests and stored else {}
    pushes = domain.due_pushes()
    values |= {"due_pushes": len(pushes), "due_push_failures": sum(push.attempts for push in pushes)}
    values |= {"due_push_oldest_timestamp_seconds": min(push.since_s for push in pushes)} if pushes else {}
    return values | {"pinned_checkpoints": sum(domain.marks.is_pinned(manifest.id) for manifest in manifests)}


def _size(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            total += path.stat().st_size
    return total
