"""Metrics say what the history and the store say; alerts and dashboard name no others."""

import json
import os
import re
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from ocihook.agent.metrics import render
from ocihook.agent.server import _metrics_listener
from ocihook.cli import metrics as command
from ocihook.config import Settings
from ocihook.linux.procfs import Process
from ocihook.session import history
from ocihook.session.journal import Journal
from ocihook.store.domain import Domain
from tests.fakes.node_record import PAGES, make_node, record

PROMETHEUS = Path(__file__).parents[2] / "packaging/prometheus"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(settings: Settings, runtime_dir: Path) -> Samples:
    text = render(settings, runtime_dir).decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[f"ocihook_{name}", frozenset(labels.items())]


def test_history_and_store_in_numbers(tmp_path: Path) -> None:
    settings = make_node(tmp_path)
    Journal.create(tmp_path / "run", Process(1, 1))  # no process has ever begun then
    here = Process.find(os.getpid())
    assert here is not None
    Journal.create(tmp_path / "run", here, runtime=Process(1, 1))
    found = samples(settings, tmp_path / "run")
    assert value(found, "sessions_total", act="dump", outcome="done") == 1
    assert value(found, "sessions_total", act="dump", outcome="refused") == 1
    assert value(found, "sessions_total", act="restore", outcome="failed") == 1
    assert value(found, "sessions_total", act="store", outcome="done") == 1
    assert value(found, "sessions_total", act="restore", outcome="done") == 0
    assert value(found, "failures_total", act="dump", code="store-full") == 2
    assert value(found, "session_last_end_timestamp_seconds", act="restore", outcome="failed") == 1030
    assert value(found, "memory_bytes_total", act="dump", kind="raw") == 3 * (4 << 20)
    assert value(found, "memory_bytes_total", act="dump", kind="stored") == 3 * (1 << 20)
    frozen = {"act": "dump", "phase": "criu frozen"}
    assert value(found, "phase_duration_seconds_bucket", **frozen, le="1.0") == 0
    assert value(found, "phase_duration_seconds_bucket", **frozen, le="2.5") == 3
    assert value(found, "phase_duration_seconds_count", **frozen) == 3
    assert value(found, "phase_duration_seconds_sum", **frozen) == 4.5
    assert value(found, "session_duration_seconds_sum", act="dump") == 6
    assert value(found, "phase_bytes_total", act="dump", phase="pack") == 3 * (4 << 20)
    assert value(found, "phase_bytes_total", act="store", phase="store") == PAGES * 4096
    assert value(found, "open_sessions", state="undoing") == 1
    assert value(found, "open_sessions", state="running") == 0
    assert value(found, "open_sessions", state="given-up") == 1
    for name, wanted in (
        ("checkpoints", 1),
        ("raw_bytes", PAGES * 4096),
        ("pending_checkpoints", 1),
        ("pending_bytes", PAGES * 4096),
        ("lost_checkpoints", 1),
        ("due_pushes", 1),
        ("due_push_failures", 1),
        ("pinned_checkpoints", 1),
        ("readable", 1),
    ):
        assert value(found, f"store_{name}", domain="ml") == wanted, name
    assert value(found, "store_due_push_oldest_timestamp_seconds", domain="ml") > 1_000_000_000
    taken = sum(value(found, f"store_{name}_bytes", domain="ml") for name in ("stored", "index"))
    assert value(found, "retention_bytes", kind="store") == taken
    assert value(found, "retention_max_bytes", kind="store") == 0
    assert value(found, "store_failing_checkpoints", domain="ml", code="store-full") == 1
    ratio = value(found, "store_raw_bytes", domain="ml") / value(found, "store_stored_bytes", domain="ml")
    assert value(found, "store_dedup_ratio", domain="ml") == ratio > 1
    assert 0 < value(found, "store_filesystem_free_bytes") < value(found, "store_filesystem_size_bytes")


def test_a_damaged_domain_is_a_metric_and_not_an_error(tmp_path: Path) -> None:
    settings = make_node(tmp_path)
    domain = Domain.open(tmp_path / "store", "ml")
    next(domain.checkpoints_dir.glob("*.manifest")).write_bytes(b"")
    found = samples(settings, tmp_path / "run")
    assert value(found, "store_readable", domain="ml") == 0
    assert value(found, "store_pending_checkpoints", domain="ml") == 1  # what waits shows nevertheless
    assert value(found, "store_failing_checkpoints", domain="ml", code="store-full") == 1
    assert value(found, "sessions_total", act="dump", outcome="done") == 1


def test_counters_never_go_back(tmp_path: Path) -> None:
    """What is removed from the history stays in the totals."""
    settings = Settings(history_dir=str(tmp_path / "history"), store_dir=str(tmp_path / "store"))
    for number in range(4):
        history.keep(tmp_path / "history", f"{number}-1", record("dump", "done", 10.0 + number), limit=2)
        found = samples(settings, tmp_path / "run")
        assert value(found, "sessions_total", act="dump", outcome="done") == number + 1
    assert len(history.read(tmp_path / "history")) == 2


def test_alerts_and_dashboard_name_metrics_that_are_there(tmp_path: Path) -> None:
    settings = replace(make_node(tmp_path), archive_dir=str(tmp_path))
    there = {name for name, _ in samples(settings, tmp_path / "run")}
    there |= set(re.findall(r"^# TYPE (\w+)", render(settings, tmp_path / "run").decode(), re.MULTILINE))
    dashboard = json.loads((PROMETHEUS / "ocihook-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    expressions += re.findall(r"expr: (.*)", (PROMETHEUS / "ocihook.rules.yaml").read_text())
    named = [set(re.findall(r"\bocihook_\w+", expression)) for expression in expressions]
    assert all(named)
    assert set().union(*named) <= there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    labels = {key for _, pairs in samples(settings, tmp_path / "run") for key, _ in pairs} | {"instance"}
    used = {label for expression in expressions for label in re.findall(r"(\w+)=~?\"", expression)}
    assert used <= labels


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1:0", socket.AF_INET), ("[::1]:0", socket.AF_INET6)])
def test_the_endpoint_is_on_loopback_only(address: str, family: int) -> None:
    listener = _metrics_listener(address)
    if listener is None and family == socket.AF_INET6:
        pytest.skip("no IPv6 here")
    assert listener is not None
    assert (listener.family, listener.getsockname()[0]) == (family, address.rpartition(":")[0].strip("[]"))
    listener.close()
    assert _metrics_listener("127.0.0.1:99999") is None


def test_the_textfile_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_node(tmp_path)
    monkeypatch.setattr(command, "load_settings", lambda: settings)
    target = tmp_path / "ocihook.prom"
    target.write_text("old")
    before = target.stat().st_ino
    assert CliRunner().invoke(command.metrics, ["--textfile", str(target)]).exit_code == 0
    assert target.stat().st_ino != before
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.glob("ocihook.prom*")] == ["ocihook.prom"]
    printed = CliRunner().invoke(command.metrics, []).output
    assert [line.split(" ")[0] for line in printed.splitlines()] == [
        line.split(" ")[0] for line in target.read_text().splitlines()
    ]
