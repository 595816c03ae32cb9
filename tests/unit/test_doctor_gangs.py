"""Doctor's findings about the coordinator of gangs, and of a container's own gang."""

import os
from pathlib import Path

import pytest

from ocihook.config import Settings
from ocihook.container.running import RunningContainer
from ocihook.gang.certificates import ServerTls
from ocihook.gang.coordinator import Coordinator
from ocihook.gang.link import Link
from ocihook.node.doctor import gangs
from ocihook.preflight.finding import Finding, Status
from ocihook.preflight.observation import Observation
from tests.fakes.authority import Authority
from tests.unit.test_gang import Serving


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """A coordinator over TLS, which the node's configuration names."""
    authority = Authority()
    tls = ServerTls(authority.give(tmp_path / "coordinator", "coordinator"))
    serving = Serving(tmp_path, tls, authority.give(tmp_path / "node", "node"))
    use(monkeypatch, serving.link.url, tmp_path / "node")
    return serving


def use(monkeypatch: pytest.MonkeyPatch, coordinator: str, tls_dir: Path) -> None:
    monkeypatch.setattr(gangs, "load_settings", lambda: Settings(coordinator=coordinator, tls_dir=str(tls_dir)))


def of_node() -> list[Finding]:
    return [found for check in gangs.CHECKS for found in check()]


def of_container(**notes: str) -> list[Finding]:
    annotations = {f"ocihook.io/{key.replace('_', '-')}": value for key, value in notes.items()}
    container = RunningContainer("c" * 64, "runc", os.getpid(), "/", annotations, {})
    return list(gangs.check_gang(Observation(init_pid=os.getpid(), container=container)))


def test_a_node_without_a_coordinator_has_none_to_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "", tmp_path)
    assert of_node() == []
    assert of_container() == []
    (found,) = of_container(gang="job", gang_size="2", gang_index="1")
    assert found.status is Status.OK, "the agent coordinates, and starts by itself"


def test_a_coordinator_that_answers(serving: Serving) -> None:
    (found,) = of_node()
    assert found.status is Status.OK
    assert serving.link.url in found.detail
    (found,) = of_container(gang="job", gang_size="2", gang_index="1")
    assert (found.status, found.detail[:42]) == (Status.OK, "member 1 of gang job, which has 2: all of ")
    (found,) = of_container(gang="job", gang_size="one")
    assert found.status is Status.FAIL
    assert "gang-size" in found.detail


def test_a_coordinator_that_is_not_there(monkeypatch: pytest.MonkeyPatch, serving: Serving, tmp_path: Path) -> None:
    use(monkeypatch, "https://127.0.0.1:1", tmp_path / "node")
    (found,) = of_node()
    assert (found.status, found.rules_out) == (Status.WARN, "members of gangs")
    assert "cannot be reached" in found.detail
    (found,) = of_container(gang="job", gang_size="2")
    assert found.status is Status.FAIL
    use(monkeypatch, serving.link.url, tmp_path / "nothing")
    (found,) = of_node()
    assert found.status is Status.WARN
    assert "tls.crt" in found.detail
    use(monkeypatch, serving.link.url, Authority().give(tmp_path / "foreign", "node"))
    (found,) = of_node()
    assert "certificate" in found.detail


def test_a_coordinator_of_an_earlier_release(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Link.ask
    monkeypatch.setattr(Link, "ask", lambda *asked: {"gangs": ask(*asked)["gangs"]})
    (found,) = of_node()
    assert found.status is Status.WARN
    assert "of an earlier release" in found.detail
    assert serving.link.url in found.detail


def test_a_gang_whose_last_attempt_was_of_another_size(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    del serving
    attempt = {"act": "dump", "epoch": 1, "size": 3, "state": "over", "reason": "b: failed", "members": {}}
    row = {"namespace": "", "gang": "job", "epochs": [], "incomplete": {}, "attempt": attempt}
    monkeypatch.setattr(Coordinator, "status", lambda _: [row])
    (found,) = of_container(gang="job", gang_size="2", gang_index="1")
    assert found.status is Status.WARN
    assert "its last dump was of 3 members" in found.detail
    (found,) = of_container(gang="job", gang_size="3", gang_index="1")
    assert "its last dump has failed: b: failed" in found.detail
