"""What we write for other programs, read by those programs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from integration.namespace import is_required
from ocihook.agent.metrics import render
from tests.fakes.node_record import make_node

PACKAGING = Path(__file__).parents[1] / "packaging"


def run(*command: str, text: str = "", cwd: Path = PACKAGING, **environment: str) -> str:
    """Run a program; return what it says on both streams."""
    if not shutil.which(command[0]) and not is_required():
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run(
        command,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", **environment},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_prometheus_takes_metrics_and_alerts(tmp_path: Path) -> None:
    settings = make_node(tmp_path)
    assert run("promtool", "check", "metrics", text=render(settings, tmp_path / "run").decode()) == ""
    assert "SUCCESS" in run("promtool", "check", "rules", "prometheus/ocihook.rules.yaml")
    assert "SUCCESS" in run("promtool", "test", "rules", "prometheus/ocihook.rules.test.yaml")
