"""One session laid out in time: what ocihook, CRIU, each process, each GPU and each worker did, when and how long.

Stages, phases and spans were measured. CRIU reports only how long its own parts took, so where those lie is estimated
from the stages around them, and they are marked so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ocihook.errors import StoreError
from ocihook.model import ContainerRef
from ocihook.session.history import act_of, error_of, outcome_of
from ocihook.session.record import from_json

_MEMORY_STEPS = {"memdump": "memory drained", "memwrite": "memory written"}
_SHOWN = {  # phases whose own names say too little among others
    "mark clean": "mark memory as clean",
    "merge": "merge with CRIU's pages",
    "fork": "fork for the snapshot",
}
_AFTERWARDS = {"snapshot read": "snapshot, while the container runs"}  # phases that are not among those of the stages


class Bar(NamedTuple):
    """Something that took time."""

    lane: str  # who did it
    name: str
    start_s: float  # since the session began
    seconds: float
    bytes: int = 0
    is_estimated: bool = False  # its start is; its duration is CRIU's own measurement
    failed: bool = False

    @property
    def bytes_per_s(self) -> float | None:
        """Its rate, None where nothing was moved."""
        return self.bytes / self.seconds if self.bytes and self.seconds > 0 else None


class Timeline(NamedTuple):
    """A session."""

    session: str
    act: str
    container: str
    engine: str  # and its runtime; "" where they are not known
    checkpoint: str
    outcome: str
    error_code: str
    error: str
    began: float  # seconds since 1970
    seconds: float
    bars: tuple[Bar, ...] = ()

    @property
    def who(self) -> str:
        """The container and its engine, for people."""
        if not self.container:
            return "an unknown container"
        if self.container.startswith("gang "):  # no container's name has a space
            return self.container
        return f"container {self.container}" + (f" of {self.engine}" if self.engine else "")

    @property
    def lanes(self) -> list[str]:
        """All who did something, in display order."""
        return list(dict.fromkeys(bar.lane for bar in self.bars))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Timeline":
        """Return what `to_json` was of.

        Raises:
            TypeError, ValueError, LookupError: if it was not.
        """
        bars = [from_json(Bar, [bar[name] for name in Bar._fields]) for bar in value["bars"]]
        return from_json(cls, [value[name] for name in cls._fields[:-1]])._replace(bars=tuple(bars))

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        bars = [bar._asdict() | {"bytes_per_s": bar.bytes_per_s} for bar in self.bars]
        return self._asdict() | {"bars": bars}


def lay_out(record: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> Timeline:
    """Return the timeline of a session.

    Args:
        record: of the history, or a journal's.
        others: of the history. The session that later stored a dump's checkpoint is shown with the dump.
    """
    began = float(record["began"])
    checkpoint = str(record["facts"].get("checkpoint", ""))
    bars = [*_container(record), *_stages(record), *_phases(record, "ocihook"), *_criu(record)]
    bars += [*_processes(record), *_workers(record)]
    if checkpoint and act_of(record) == "dump":
        stored = [other for other in others if act_of(other) == "store" and other["facts"]["checkpoint"] == checkpoint]
        bars += [bar for other in stored for bar in _phases(other, "store, in the background")]
    code, error = error_of(record)
    container = ContainerRef.from_json(record["container"]) if record.get("container") else None
    return Timeline(
        session=str(record["id"]),
        act=act_of(record),
        container=str(container or ""),
        engine=", ".join(filter(None, (container.engine, container.runtime))) if container else "",
        checkpoint=checkpoint,
        outcome=outcome_of(record),
        error_code=code,
        error=error,
        began=began,
        seconds=max([float(record.get("ended", began)) - began, *(b.start_s + b.seconds - began for b in bars)]),
        bars=tuple(bar._replace(start_s=max(0.0, bar.start_s - began)) for bar in bars),
    )


def lay_out_gang(records: Sequence[Mapping[str, Any]], name: str) -> Timeline:
    """Return the newest dump or restore of a gang: what its members on this node did, one below the other.

    Args:
        records: of the history, and journals.
        name: of the gang, with its namespace if it has one.

    Raises:
        StoreError: if there is none.
    """
    known = [record for record in records if record["facts"].get("gang_ref") and name == _gang_of(record)]
    if not known:
        raise StoreError(
            f"the history has no dump or restore of gang {name!r}", hint="`ocihook ps --all` shows what it has"
        )
    newest = known[-1]
    key = newest["facts"]["gang_epoch"], act_of(newest)
    same = [record for record in known if (record["facts"]["gang_epoch"], act_of(record)) == key]
    return merge([_of_gang(record, f"gang {name}", f"epoch {key[0]}") for record in reversed(same)])


def _of_gang(record: Mapping[str, Any], gang: str, epoch: str) -> Timeline:
    found, member = lay_out(record), record["facts"]["gang_ref"][2]
    bars = tuple(bar._replace(lane=f"{member}: {bar.lane}") for bar in found.bars)
    return found._replace(session=epoch, container=gang, engine="", bars=bars)


def merge(parts: Sequence[Timeline]) -> Timeline:
    """Return what members of a gang did, on one node or several, as one timeline; the nodes' clocks should agree.

    Raises:
        StoreError: if it is not the same dump or restore.
    """
    first = parts[0]
    for part in parts:
        if part[:3] != first[:3]:
            raise StoreError(
                f"{part.act} of {part.who}, {part.session} is not {first.act} of {first.who}, {first.session}"
            )
    began = min(part.began for part in parts)
    bars = [bar._replace(start_s=bar.start_s + part.began - began) for part in parts for bar in part.bars]
    return next((part for part in parts if part.error), first)._replace(
        began=began,
        seconds=max(part.began + part.seconds for part in parts) - began,
        bars=tuple(sorted(bars, key=lambda bar: bar.lane.partition(":")[0])),
    )


def _gang_of(record: Mapping[str, Any]) -> str:
    namespace, name, *_ = record["facts"]["gang_ref"]
    return f"{namespace}/{name}" if namespace else str(name)


def _stages(record: Mapping[str, Any]) -> Iterator[Bar]:
    for name, entry in record["stages"].items():
        if "seconds" in entry:
            yield Bar("stages", name, entry["began"], entry["seconds"], failed=bool(entry["status"]))


def _container(record: Mapping[str, Any]) -> Iterator[Bar]:
    """Yield how long a container that was left running was without CUDA."""
    locks = [span["began"] for span in record.get("spans", []) if span["name"] == "lock"]
    unlocks = [span["began"] + span["seconds"] for span in record.get("spans", []) if span["name"] == "unlock"]
    if locks and unlocks and max(unlocks) > min(locks):
        yield Bar("container", "without CUDA", min(locks), max(unlocks) - min(locks))


def _phases(record: Mapping[str, Any], lane: str) -> Iterator[Bar]:
    failed = outcome_of(record) == "failed" and act_of(record) == "store"
    for phase in sorted(record["phases"], key=lambda phase: float(phase["began"])):
        name, is_failed = phase["name"], failed or bool(phase.get("failed"))
        where, shown = _AFTERWARDS.get(name, lane), _SHOWN.get(name, name)
        yield Bar(where, shown, phase["began"], phase["seconds"], phase["bytes"], failed=is_failed)


def _criu(record: Mapping[str, Any]) -> Iterator[Bar]:
    """Yield what CRIU did between the stages, and its statistics."""
    stages = [entry for entry in record["stages"].values() if "seconds" in entry]
    ends = [*(float(entry["began"]) for entry in stages[1:]), record["facts"].get("criu_ended")]
    names = list(record["stages"])
    for entry, name, end in zip(stages, names, ends, strict=False):
        start = float(entry["began"]) + float(entry["seconds"])
        if end is not None and end > start:
            yield Bar("CRIU", f"from {name} on", start, end - start)
    took = {name: us / 1e6 for name, us in record["facts"].get("criu_statistics", {}).items()}
    if not stages or not took:
        return
    start = float(stages[0]["began"]) + float(stages[0]["seconds"])
    if act_of(record) == "dump":
        frozen = start + took["freezing"]
        yield Bar("CRIU, its own measure", "freezing", start, took["freezing"], is_estimated=True)
        yield Bar("CRIU, its own measure", "frozen", frozen, took["frozen"], is_estimated=True)
        size = int(record["facts"].get("criu_pages", 0)) << 12
        for name, shown in _MEMORY_STEPS.items():
            yield Bar("CRIU, memory", shown, frozen, took[name], size, is_estimated=True)
            frozen += took[name]
    else:
        yield Bar("CRIU, its own measure", "forking", start, took["forking"], is_estimated=True)
        at = start + took["forking"]
        size = int(record["facts"].get("criu_pages", 0)) << 12
        yield Bar("CRIU, its own measure", "restore", at, took["restore"], size, is_estimated=True)


def _processes(record: Mapping[str, Any]) -> Iterator[Bar]:
    """Yield what was done for each process, and on which of the GPUs its memory was."""
    facts, spans = record["facts"], record.get("spans", [])
    names = {pid: name for name, pid in facts.get("pids", {}).items()}
    targets = dict(facts.get("gpu_map", ()))
    held: Mapping[str, Mapping[str, int]] = (facts.get("gpu") or {}).get("held", {})
    per_gpu: list[Bar] = []
    for pid in dict.fromkeys(span["pid"] for span in spans):
        name = names.get(pid, "")
        lane = f"process {pid}" + (f" ({name} inside)" if name else "")
        for bar in _joined([span for span in spans if span["pid"] == pid], lane):
            yield bar._replace(bytes=sum(held.get(name, {}).values())) if bar.name == "restore" else bar
            if bar.name in {"checkpoint", "restore"}:
                per_gpu += [
                    bar._replace(lane=str(targets.get(uuid, uuid)), name=f"{bar.name} of {pid}", bytes=size)
                    for uuid, size in held.get(name, {}).items()
                ]
    yield from sorted(per_gpu, key=lambda bar: (bar.lane, bar.start_s))


def _joined(spans: list[dict[str, Any]], lane: str) -> Iterator[Bar]:
    """Yield the bars of one process; what several workers copied in one phase is one."""
    for phase, name in dict.fromkeys((span["phase"], span["name"]) for span in spans):
        same = [span for span in spans if (span["phase"], span["name"]) == (phase, name)]
        shown = phase.removeprefix("gpu ") if name == "move" else name
        groups = [same] if name == "move" else [[span] for span in same]  # an attempt to lock is a bar of its own
        for group in groups:
            start = min(float(span["began"]) for span in group)
            end = max(span["began"] + span["seconds"] for span in group)
            size = sum(span["bytes"] for span in group)
            failed = any(span.get("failed") for span in group)
            yield Bar(lane, shown, start, end - start, size, failed=failed)


def _workers(record: Mapping[str, Any]) -> Iterator[Bar]:
    moves = [span for span in record.get("spans", []) if span["name"] == "move"]
    for span in sorted(moves, key=lambda span: (span["worker"], span["began"])):
        name = f"{span['phase'].removeprefix('gpu ')} of {span['pid']}"
        yield Bar(f"worker {span['worker']}", name, span["began"], span["seconds"], span["bytes"])


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return it as chrome://tracing, Perfetto and speedscope read it (Trace Event Format, JSON object format)."""
    numbers = {lane: number for number, lane in enumerate(timeline.lanes)}
    title = f"ocihook {timeline.act} {timeline.container}".strip()
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for lane, number in numbers.items():
        where = {"ph": "M", "pid": 1, "tid": number}
        events.append({**where, "name": "thread_name", "args": {"name": lane}})
        events.append({**where, "name": "thread_sort_index", "args": {"sort_index": number}})
    for bar in timeline.bars:
        facts: dict[str, Any] = {"bytes": bar.bytes, "bytes_per_s": bar.bytes_per_s} if bar.bytes else {}
        facts |= {"start": "estimated"} if bar.is_estimated else {}
        facts |= {"failed": True} if bar.failed else {}
        microseconds = {"ts": round(bar.start_s * 1e6, 3), "dur": round(bar.seconds * 1e6, 3)}
        events.append({"ph": "X", "pid": 1, "tid": numbers[bar.lane], "name": bar.name, **microseconds, "args": facts})
    kept = ("session", "act", "container", "engine", "checkpoint", "outcome", "error", "began")
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {key: getattr(timeline, key) for key in kept}}
