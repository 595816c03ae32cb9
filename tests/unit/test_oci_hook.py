"""The OCI hook: its file as engines take it, and what the hook refuses."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ocihook import wire
from ocihook.config import Settings
from ocihook.errors import ConfigError
from ocihook.hook import oci

HOOKS = Path(__file__).parents[2] / "hooks.d"
# oci-hooks(5), and containers/common, pkg/hooks: 1.0.0.
KEYS = {"version", "hook", "when", "stages"}
HOOK_KEYS = {"path", "args", "env", "timeout"}
WHEN_KEYS = {"always", "annotations", "commands", "hasBindMounts"}
STAGES = {"precreate", "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}


@pytest.mark.parametrize("path", sorted(HOOKS.iterdir()), ids=lambda path: path.name)
def test_engines_take_the_file_for_containers_of_ours_alone(path: Path) -> None:
    assert path.suffix == ".json"
    found = json.loads(path.read_text())
    assert found.keys() <= KEYS
    assert found["version"] == "1.0.0"
    assert found["hook"].keys() <= HOOK_KEYS
    assert found["hook"]["path"].startswith("/usr/libexec/ocihook/")
    assert (HOOKS.parent / "ocihook/hook" / Path(found["hook"]["path"]).name).exists()
    assert isinstance(found["hook"]["timeout"], int)
    assert found["stages"]
    assert set(found["stages"]) <= STAGES
    assert found["when"].keys() == {"annotations"}
    ((name, value),) = found["when"]["annotations"].items()
    assert re.search(name, "ocihook.io/mode")
    assert re.search(value, "")
    assert not re.search(name, "example.com/ocihook.io/mode")
    assert not re.search(name, "ocihookXio/mode")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(oci, "load_settings", Settings)
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def answer(annotations: dict[str, str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = oci.main(io.StringIO(json.dumps({"id": "c", "bundle": "/b", "annotations": annotations})))
    return status, capsys.readouterr().err


def test_right_annotations_and_those_of_other_releases_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer({"ocihook.io/mode": "store", "ocihook.io/of-tomorrow": "x"}, capsys) == (0, "")
    assert answer({}, capsys) == (0, "")


def test_wrong_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer({"ocihook.io/mode": "shop"}, capsys) == (
        1,
        "ocihook: annotation ocihook.io/mode: mode must be one of 'inline', 'store', 'off', not 'shop'\n",
    )
    in_pod = {"io.kubernetes.cri.sandbox-namespace": "team", "ocihook.io/preflight": "warn"}
    status, message = answer(in_pod, capsys)
    assert status == 1
    assert "a pod may not set 'warn'" in message


def test_what_is_no_state_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "[]", "{", '{"annotations": 3}'):
        assert oci.main(io.StringIO(text)) == 1
    assert "ocihook: " in capsys.readouterr().err


def test_a_wrong_configuration_stops_no_container(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Settings:
        raise ConfigError("config.toml: wrong")

    monkeypatch.setattr(oci, "load_settings", fail)
    assert answer({"ocihook.io/mode": "store"}, capsys) == (0, "ocihook: config.toml: wrong\n")


def test_a_restore_is_refused_by_no_annotation(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"id": "c", "bundle": "/b", "status": "stopped", "annotations": {"ocihook.io/mode": "shop"}}
    assert oci.main(io.StringIO(json.dumps(state))) == 0
    assert capsys.readouterr().err == ""


def test_what_is_refused_is_in_a_log_since_crun_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))
    assert oci.main(io.StringIO(json.dumps({"annotations": {"ocihook.io/mode": "shop"}}))) == 1
    assert "mode must be one of" in (tmp_path / "run" / wire.HANDLER_LOG_NAME).read_text()
