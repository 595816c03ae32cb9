"""A session laid out in time: every phase at its place, with its bytes; and its page, trace and table."""

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ocihook.cli import timeline as command
from ocihook.cli.timeline_page import page
from ocihook.config import Settings
from ocihook.errors import StoreError
from ocihook.session import history
from ocihook.session.timeline import Bar, chrome_trace, lay_out, lay_out_gang

GPUS = ["GPU-0a", "GPU-0b"]
CHECKPOINT = "20260101T000000Z-00000001"


def stage(began: float, seconds: float, status: int = 0) -> dict[str, Any]:
    return {"began": began, "seconds": seconds, "status": status, "message": ""}


def span(phase: str, name: str, pid: int, began: float, seconds: float, size: int = 0, worker: int = 0) -> Any:
    times = {"began": began, "seconds": seconds, "bytes": size, "worker": worker}
    return {"phase": f"gpu {phase}", "name": name, "pid": pid, **times}


def dump(**changes: Any) -> dict[str, Any]:
    """Two processes, a GPU each, dumped by two workers and left running."""
    spans = [
        span("lock", "lock", 11, 101.0, 0.1),
        span("lock", "lock", 12, 101.0, 0.2) | {"failed": True},
        span("lock", "lock", 12, 101.3, 0.1),
        span("checkpoint", "checkpoint", 11, 102.0, 1.0, 100),
        span("checkpoint", "checkpoint", 12, 102.0, 2.0, 300),
        span("move out", "move", 11, 104.0, 0.5, 60, worker=0),
        span("move out", "move", 11, 104.1, 0.5, 40, worker=1),
        span("resume", "restore", 11, 109.0, 0.5),
        span("resume", "unlock", 11, 109.5, 0.1),
    ]
    return {
        "id": "7-7",
        "began": 100.0,
        "ended": 110.0,
        "container": {"id": "ab" * 32, "name": "web", "engine": "podman", "runtime": "runc"},
        "stages": {"pre-dump": stage(100.5, 5.5), "post-dump": stage(108.0, 0.5)},
        "phases": [{"name": "gpu lock", "began": 101.0, "seconds": 0.4, "bytes": 0}],
        "spans": spans,
        "facts": {
            "checkpoint": CHECKPOINT,
            "criu_ended": 108.8,
            "criu_statistics": {"freezing": 100000, "frozen": 2000000, "memdump": 300000, "memwrite": 200000},
            "criu_pages": 5,
            "pids": {"1": 11, "3/1": 12},
            "gpu": {"held": {"1": {GPUS[0]: 90}, "3/1": {GPUS[0]: 10, GPUS[1]: 290}}},
        },
        **changes,
    }


def test_every_part_is_at_its_place() -> None:
    found = lay_out(dump())
    assert (found.act, found.container, found.outcome, found.seconds) == ("dump", "web (abababababab)", "done", 10.0)
    bars = {(bar.lane, bar.name, round(bar.start_s, 3)): bar for bar in found.bars}
    assert bars["container", "without CUDA", 1.0].seconds == pytest.approx(8.6)
    assert bars["CRIU", "from pre-dump on", 6.0].seconds == pytest.approx(2.0)
    assert bars["CRIU", "from post-dump on", 8.5].seconds == pytest.approx(0.3)
    frozen = bars["CRIU, its own measure", "frozen", 6.1]
    assert (frozen.seconds, frozen.is_estimated) == (2.0, True)
    assert bars["CRIU, memory", "memory drained", 6.1].bytes == 5 * 4096
    assert bars["CRIU, memory", "memory written", 6.4].seconds == 0.2
    assert bars["process 12 (3/1 inside)", "lock", 1.0].failed
    assert not bars["process 12 (3/1 inside)", "lock", 1.3].failed
    moved = bars["process 11 (1 inside)", "move out", 4.0]
    assert moved.bytes == 100
    assert moved.seconds == pytest.approx(0.6)
    assert moved.bytes_per_s == pytest.approx(100 / 0.6)
    assert bars["worker 1", "move out of 11", 4.1].bytes == 40
    on_gpus = {(bar.lane, bar.name): bar.bytes for bar in found.bars if bar.lane in GPUS}
    assert on_gpus == {
        (GPUS[0], "checkpoint of 11"): 90,
        (GPUS[0], "checkpoint of 12"): 10,
        (GPUS[1], "checkpoint of 12"): 290,
        (GPUS[0], "restore of 11"): 90,
    }


@pytest.mark.parametrize(
    ("container", "head"),
    [
        (dump()["container"], "dump of container web (abababababab) of podman, runc"),
        ({"id": "ab" * 32, "engine": "cri-o"}, "dump of container abababababab of cri-o"),
        ({"id": "abrasive-cicada", "runtime": "crun"}, "dump of container abrasive-cicada of crun"),
        ({"id": "training-of-the-large-model", "name": ""}, "dump of container training-of-the-large-model"),
        (None, "dump of an unknown container"),
    ],
)
def test_heads_name_container_and_engine(
    monkeypatch: pytest.MonkeyPatch, container: dict[str, str] | None, head: str
) -> None:
    record = dump(container=container)
    text = page(lay_out(record))
    assert f"<title>{head}</title>" in text
    assert f"<h1>{head}</h1>" in text
    monkeypatch.setattr(command, "load_settings", Settings)
    monkeypatch.setattr(history, "read", lambda _: [record])
    monkeypatch.setattr(command, "_open_sessions", list)
    assert CliRunner().invoke(command.timeline, []).output.startswith(f"{head}: session 7-7")


def test_a_restore_onto_other_gpus_and_one_that_failed() -> None:
    facts = {**dump()["facts"], "gpu_map": [[GPUS[0], "GPU-new"]], "criu_statistics": {"forking": 1, "restore": 500000}}
    stages = {"pre-restore": stage(100.0, 1.0), "post-resume": stage(102.0, 8.0)}
    found = lay_out(dump(stages=stages, facts=facts))
    assert {bar.lane for bar in found.bars if bar.name == "restore of 11"} == {"GPU-new"}
    assert [bar.seconds for bar in found.bars if bar.name == "restore" and bar.is_estimated] == [0.5]
    refused = {"pre-restore": stage(100.0, 1.0, 1)}
    error = {"error": "GPU is full", "error_code": "cuda"}
    found = lay_out(dump(stages=refused, facts={}, spans=[], phases=[], **error))
    assert (found.outcome, found.error, found.error_code) == ("refused", "GPU is full", "cuda")
    assert [(bar.name, bar.failed) for bar in found.bars] == [("pre-restore", True)]


def test_memory_that_goes_past_criu_is_at_its_place() -> None:
    """In a dump, in its snapshot after the last stage, and in a restore; with who read and wrote it."""

    def phase(name: str, began: float, seconds: float, size: int = 0) -> dict[str, Any]:
        return {"name": name, "began": began, "seconds": seconds, "bytes": size}

    read = [span("", "move", 11, 104.0, 0.5, 60) | {"phase": "memory read", "worker": worker} for worker in (0, 1)]
    phases = [phase("snapshot read", 109.0, 0.9, 500), phase("memory read", 104.0, 0.6, 120)]
    phases += [phase("mark clean", 104.6, 0.1), phase("merge", 108.1, 0.2, 130), phase("fork", 108.9, 0.01)]
    found = lay_out(dump(phases=phases, spans=read))
    bars = {(bar.lane, bar.name): (round(bar.start_s, 3), bar.bytes) for bar in found.bars}
    assert [bar.name for bar in found.bars if bar.lane == "ocihook"] == [
        *("memory read", "mark memory as clean", "merge with CRIU's pages", "fork for the snapshot")
    ]
    assert bars["ocihook", "memory read"] == (4.0, 120)
    assert bars["process 11 (1 inside)", "memory read"] == (4.0, 120)
    assert bars["worker 1", "memory read of 11"] == (4.0, 60)
    assert bars["ocihook", "merge with CRIU's pages"] == (8.1, 130)
    assert bars["snapshot, while the container runs", "snapshot read"] == (9.0, 500)
    shown = {name: kind for kind, name in re.findall(r'<rect class="(\w+)"[^>]*><title>([^:]*):', page(found))}
    assert {name for name, kind in shown.items() if kind == "copy"} == {
        *("memory read", "memory read of 11", "merge with CRIU&#x27;s pages", "snapshot read")
    }
    phases = [phase("cut pagemaps", 100.5, 0.1), phase("memory write back", 103.0, 0.5, 90)]
    stages = {"pre-restore": stage(100.2, 1.0), "post-restore": stage(102.9, 0.7)}
    spans = [span("", "move", 11, 103.0, 0.5, 90) | {"phase": "memory write back"}]
    bars = {
        (bar.lane, bar.name): (round(bar.start_s, 3), bar.bytes)
        for bar in lay_out(dump(stages=stages, phases=phases, spans=spans, facts={})).bars
    }
    assert bars["stages", "post-restore"] == (2.9, 0)
    assert bars["ocihook", "memory write back"] == bars["process 11", "memory write back"] == (3.0, 90)


def test_a_record_without_spans_or_statistics_is_shown() -> None:
    """Of a session that began under an earlier version, or whose CRIU was killed at once."""
    record = dump(facts={}, stages={"pre-dump": {"began": 100.0}}, phases=[])
    del record["spans"], record["ended"]
    assert lay_out(record).bars == ()
    assert "<svg" in page(lay_out(record))


def test_the_trace_has_every_bar() -> None:
    found = lay_out(dump())
    trace = chrome_trace(found)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(found.bars)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    lock = next(event for event in events if event["name"] == "lock" and names[event["tid"]].startswith("process 12"))
    assert (lock["ts"], lock["dur"], lock["args"]) == (1000000, 200000, {"failed": True})


def test_the_members_of_a_gang_are_in_one_picture() -> None:
    def member(name: str, began: float, epoch: int = 2) -> dict[str, Any]:
        stages = {"pre-dump": stage(began + 0.5, 1.0), "post-dump": stage(began + 2, 0.5)}
        gang = {"gang_ref": ["", "job", name, 2, 0], "gang_epoch": epoch}
        return dump(id=name, began=began, ended=began + 5, stages=stages, spans=[], phases=[], facts=gang)

    found = lay_out_gang([member("a", 50.0, epoch=1), member("b", 101.0), dump(), member("a", 100.0)], "job")
    assert (found.who, found.session, found.began, found.seconds) == ("gang job", "epoch 2", 100.0, 6.0)
    starts = [(bar.lane, bar.start_s) for bar in found.bars if bar.name == "pre-dump"]
    assert starts == [("a: stages", 0.5), ("b: stages", 1.5)]
    with pytest.raises(StoreError, match="gang 'other'"):
        lay_out_gang([member("a", 50.0)], "other")


def test_names_that_containers_chose_stay_text() -> None:
    hostile = dump(container={"id": "ab" * 32, "name": "<script>alert(1)</script><img src=https://e.example/>"})
    text = page(lay_out(hostile)._replace(bars=(Bar("<b>", "</svg><i>", 0, 1),), error="<u>", outcome="failed"))
    assert set(re.findall(r"<(\w+)", text)) <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "p", "figure", "svg", "line", "text", "rect"),
        *("span", "table", "thead", "tbody", "tr", "th", "td"),
    }
    assert not re.search(r"\b(src|href)=|url\(|@import", re.sub("&lt;.*?&gt;", "", text))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_settings", lambda: Settings(history_dir=str(tmp_path / "history")))
    monkeypatch.setattr(command, "open_journals", list)
    stored = dump(act="store", stages={}, spans=[], facts={"checkpoint": CHECKPOINT})
    stored["phases"] = [{"name": "store", "began": 111.0, "seconds": 2.0, "bytes": 4096}]
    history.keep(tmp_path / "history", "7-7", dump(), limit=9)
    history.keep(tmp_path / "history", f"store-{CHECKPOINT}", stored | {"ended": 113.0}, limit=9)
    run = CliRunner().invoke
    table = run(command.timeline, [CHECKPOINT]).output
    assert re.search(r"process 11 \(1 inside\) +lock +1\.000 s +0\.100 s", table)
    assert re.search(r"store, in the background +store +11\.000 s +2\.000 s +4\.0 KiB +2\.0 KiB/s", table)
    value = json.loads(run(command.timeline, ["--json"]).output)
    assert (value["session"], value["seconds"]) == ("7-7", 13.0)
    assert {"lane", "name", "start_s", "seconds", "bytes", "bytes_per_s"} < value["bars"][0].keys()
    html = tmp_path / "page.html"
    assert json.loads(run(command.timeline, ["--chrome", "--html", str(html)]).output)["traceEvents"]
    assert html.read_text().startswith("<!DOCTYPE html>")
    offered = command.timeline.params[0].shell_complete(click.Context(command.timeline), "2026")
    assert [(item.value, item.help) for item in offered] == [(CHECKPOINT, "dump")]
    assert run(command.timeline, ["--chrome", "--json"]).exit_code == 2
    assert "no session, checkpoint or container 'x'" in str(run(command.timeline, ["x"]).exception)
