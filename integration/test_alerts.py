"""Alerts as they are shipped, over what this exporter says of a node in each state."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from integration.test_documents import PACKAGING, run
from ocihook.agent.metrics import render
from ocihook.checkpoints.complete import complete
from ocihook.checkpoints.pending import Failure, directory_of, write_failure
from ocihook.checkpoints.stage import choose_place, stage
from ocihook.config import Settings
from ocihook.images.image_set import list_packable
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.session import history
from ocihook.session.journal import Journal
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.fakes.keys import make_keys
from tests.fakes.node_record import record

RULES = PACKAGING / "prometheus/ocihook.rules.yaml"
_QUIET_MINUTES = 10  # before what happens
_MINUTES = 26 * 60  # after it: one alert waits for a day


@dataclass
class Node:
    """A node whose record is in a directory; by default in mode inline, without a store."""

    path: Path
    settings: Settings

    def metrics(self) -> bytes:
        return render(self.settings, self.path / "run")

    def session(self, act: str, outcome: str) -> None:
        history.keep(self.path / "history", f"{act}-{outcome}", record(act, outcome, time.time()), limit=100)

    def take(self) -> str:
        """Take a checkpoint for the store, to be completed."""
        images = self.path / "images"
        make_image_set(images, {1: mixed_pages(20)})
        container = ContainerRef(id="ab" * 32, name="c", pod_name="p", pod_namespace="ml")
        store = Store.of(self.settings)
        place = choose_place(container, store)
        place.pending.mkdir()
        return stage(place, list_packable(images), container, images, store=store, host={}, durable=False).id

    def complete(self) -> str:
        checkpoint_id = self.take()
        assert complete(self.domain(), checkpoint_id, workers=1)
        return checkpoint_id

    def domain(self) -> Domain:
        return Store.of(self.settings).open("ml")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    settings = Settings(history_dir=str(tmp_path / "history"), store_dir=str(tmp_path / "store"), workers=1)
    return Node(tmp_path, settings)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a file system")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True, timeout=60)
    yield place
    subprocess.run(["umount", place], check=True, timeout=60)


def nothing(_: Node) -> None:
    """Leave the node as it is."""


def work_as_wanted(node: Node) -> None:
    for act in ("dump", "restore", "store"):
        node.session(act, "done")
    node.complete()


def lose_the_key(node: Node) -> None:
    make_keys(node.path)
    node.settings = replace(node.settings, key_file=str(node.path / "store.keys"))
    node.complete()
    node.settings = replace(node.settings, key_file="", key_command="/bin/false")


def damage(node: Node) -> None:
    node.complete()
    next(node.domain().checkpoints_dir.glob("*.manifest")).write_bytes(b"")


def wait_for_the_store(node: Node) -> None:
    node.take()


def fail_to_store(node: Node) -> None:
    write_failure(node.domain(), node.take(), Failure("store-full", "no space left", "make room", attempts=2))


def lose(node: Node) -> None:
    (directory_of(node.domain(), node.take()) / "pages-1.img").unlink()


def fail_to_push(node: Node) -> None:
    node.domain().pushes.note(node.complete())
    (waiting,) = node.domain().due_pushes()
    node.domain().pushes.failed(waiting, "no route to host", 1000.0)


def exceed_the_store(node: Node) -> None:
    node.complete()
    node.settings = replace(node.settings, max_store_bytes=1)


def exceed_the_archives(node: Node) -> None:
    make_image_set(node.path / "images", {1: mixed_pages(5)})
    (node.path / "archives").mkdir()
    make_archive(node.path / "archives/checkpoint-1.tar", node.path / "images", "containerd")
    node.settings = replace(node.settings, archive_dir=str(node.path / "archives"), max_archive_bytes=1)


def leave_a_session(node: Node) -> None:
    Journal.create(node.path / "run", Process(1, 1))  # no process has ever begun then


def give_up(node: Node) -> None:
    here = Process.find(os.getpid())
    assert here is not None
    Journal.create(node.path / "run", here, runtime=Process(1, 1))


STATES: list[tuple[Callable[[Node], None], set[str]]] = [
    (nothing, set()),
    (work_as_wanted, set()),
    (lambda node: node.session("restore", "failed"), {"OcihookRestoreFailed"}),
    (lambda node: node.session("restore", "refused"), {"OcihookRestoreFailed"}),
    (lambda node: node.session("dump", "failed"), {"OcihookDumpFailed"}),
    (lambda node: node.session("dump", "refused"), {"OcihookDumpFailed"}),
    (lambda node: node.session("dump", "degraded"), {"OcihookDumpDegraded"}),
    (lose_the_key, {"OcihookStoreUnavailable"}),
    (damage, {"OcihookStoreDamaged"}),
    (wait_for_the_store, {"OcihookStorePending"}),
    (fail_to_store, {"OcihookStorePending", "OcihookStoreFails"}),
    (lose, {"OcihookCheckpointLost"}),
    (fail_to_push, {"OcihookNotPushed"}),
    (exceed_the_store, {"OcihookRetentionNotKept"}),
    (exceed_the_archives, {"OcihookRetentionNotKept"}),
    (leave_a_session, {"OcihookUndoStuck"}),
    (give_up, {"OcihookStandsStill"}),
]
ON_A_FULL_DISK = {"OcihookStoreFillingUp"}


@pytest.mark.parametrize(("happen", "expected"), STATES)
def test_the_alerts_of_a_state(node: Node, happen: Callable[[Node], None], expected: set[str]) -> None:
    if happen in (fail_to_store, lose, fail_to_push):  # these look at a domain before there is a checkpoint
        node.complete()
    before = node.metrics()
    happen(node)
    assert_fire(node, before, expected)


@pytest.mark.parametrize("is_store", [True, False])
def test_a_disk_without_room(node: Node, small_disk: Path, *, is_store: bool) -> None:
    place = str(small_disk / "place")
    node.settings = replace(node.settings, store_dir=place) if is_store else replace(node.settings, archive_dir=place)
    (small_disk / "place").mkdir()
    before = node.metrics()
    (small_disk / "others").write_bytes(bytes(int(3.9 * (1 << 20))))
    assert_fire(node, before, ON_A_FULL_DISK)


def test_every_alert_has_a_state() -> None:
    rules = yaml.safe_load(RULES.read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set.union(*(expected for _, expected in STATES), ON_A_FULL_DISK) == alerts
    runbook = (PACKAGING.parent / "docs/runbook.md").read_text()
    assert {alert for alert in alerts if alert not in runbook} == set()


def assert_fire(node: Node, before: bytes, expected: set[str]) -> None:
    """Check which alerts fire at any time, all of them, when these metrics become what they are now."""
    series = list(_series(before, node.metrics()))
    window = f"[{_MINUTES}m]"
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f'count by (alertname) (last_over_time(ALERTS{{alertstate="firing"}}{window}))',
                "eval_time": f"{_QUIET_MINUTES + _MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)],
            }
        ],
    }
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    path = node.path / "rules.test.yaml"
    path.write_text(yaml.safe_dump(document))
    assert "SUCCESS" in run("promtool", "test", "rules", str(path))


def _series(before: bytes, after: bytes) -> Iterator[dict[str, Any]]:
    """Yield what Prometheus has of two scrapes that each were repeated every minute."""
    old, new = _samples(before), _samples(after)
    for name in sorted(old.keys() | new.keys()):
        parts = [f"{_repeated(old.get(name), _QUIET_MINUTES)}", f"{_repeated(new.get(name), _MINUTES)}"]
        yield {"series": name, "values": " ".join(parts)}


def _repeated(value: float | None, times: int) -> str:
    return f"_x{times}" if value is None else f"{value!r}x{times}"


def _samples(text: bytes) -> dict[str, float]:
    """Return each sample by its name and labels; of timestamps, as if all had happened after the quiet minutes."""
    shift = time.time() - 60 * _QUIET_MINUTES
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ", ".join(f'{key}="{text}"' for key, text in {**sample.labels, "instance": "n1"}.items())
            value = sample.value - shift if sample.name.endswith("_timestamp_seconds") else sample.value
            found[f"{sample.name}{{{labels}}}"] = value
    return found
