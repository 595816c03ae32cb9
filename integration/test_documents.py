"""What we write for other programs, read by those programs."""

import shutil
import subprocess
import sys
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


def test_man_pages_are_clean() -> None:
    pages = [str(path) for path in sorted((PACKAGING / "man").iterdir())]
    assert len(pages) > 10
    assert run("mandoc", "-Tlint", "-Wstyle", *pages) == ""
    assert "OCIHOOK-TIMELINE(1)" in run("mandoc", "-Tutf8", str(PACKAGING / "man/ocihook-timeline.1"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_in_a_real_shell(tmp_path: Path, shell: str) -> None:
    program = tmp_path / "ocihook"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ocihook "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
    script = PACKAGING / "completions" / shell / {"bash": "ocihook", "zsh": "_ocihook", "fish": "ocihook.fish"}[shell]

    def complete(*words: str) -> list[str]:
        if shell == "fish":
            code = f"source {script}; complete --do-complete '{' '.join(words)}'"
            answer = run("fish", "--no-config", "-c", code, PATH=path, XDG_DATA_HOME=str(tmp_path))
            return [line.partition("\t")[0] for line in answer.splitlines()]
        if shell == "bash":
            code = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            code += '_ocihook_completion ocihook; printf "%s\\n" "${COMPREPLY[@]}"'
            return run("bash", "--norc", "-c", code, PATH=path).split()
        code = "compdef() { :; }; _describe() { print -l -- ${(P)4:-} $completions_with_descriptions; }; "
        code += f"compadd() {{ :; }}; source {script}; words=({' '.join(words)}); CURRENT={len(words)}; "
        code += "_ocihook_completion"
        answer = run("zsh", "-f", "-c", code, PATH=path)
        return [line.partition(":")[0] for line in answer.split()]

    assert {"archive"} <= set(complete("ocihook", "arch"))
    assert {"verify"} <= set(complete("ocihook", "store", "ver"))
    assert {"--keep-last", "--keep-within"} <= set(complete("ocihook", "store", "prune", "--keep"))
