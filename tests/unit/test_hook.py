"""The hook starts fast because it imports next to nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ocihook.hook.client import _without_agent

PROJECT = Path(__file__).parents[2]
# What an interpreter without `site` has loaded by itself, and what the hook adds.
ALLOWED = {"ocihook", "ocihook.hook", "ocihook.hook.client", "ocihook.wire", "_socket", "os", "sys", "time"}


def test_the_hook_imports_nothing_slow() -> None:
    def modules(code: str) -> set[str]:
        command = [
            sys.executable,
            "-IS",
            "-c",
            f"import sys; sys.path.insert(0, {str(PROJECT)!r}); {code}print(*sys.modules)",
        ]
        return set(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split())

    assert modules("import ocihook.hook.client; ") - modules("import os; ") <= ALLOWED


@pytest.mark.parametrize(
    ("stage", "names", "status", "message"),
    [
        ("pre-restore", ["ocihook.manifest"], 1, "cannot be unpacked here"),
        ("pre-restore", ["pages-1.img"], 0, "nothing was done"),
        ("post-dump", ["pages-1.img"], 0, "complete but not packed"),
        ("post-dump", ["pages-1.img", "ocihook-region-3.pack"], 1, "incomplete.*the dump fails, the container runs on"),
        ("post-restore", ["ocihook-region-0.pack"], 1, "GPU memory cannot be written.*the restore fails"),
        ("post-resume", [], 0, "nothing was done"),
    ],
)
def test_without_an_agent_nothing_is_taken_for_complete(
    tmp_path: Path, stage: str, names: list[str], status: int, message: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    found, text = _without_agent(stage, str(tmp_path), OSError("gone"))
    assert found == status
    assert re.search(message, text)


@pytest.mark.parametrize("stage", ["setup-namespaces", "post-restore"])
def test_the_action_passes_on_only_where_there_is_gpu_memory(tmp_path: Path, stage: str) -> None:
    action, python = tmp_path / "criu-action", tmp_path / "python"
    python.write_text("#!/bin/sh\necho called\n")
    python.chmod(0o755)
    text = (PROJECT / "ocihook/hook/criu-action").read_text()
    action.write_text(text.replace("@PYTHONS@", f"/missing/python3 '{python}'"))
    environment = {"CRTOOLS_SCRIPT_ACTION": stage, "CRTOOLS_IMAGE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run() -> str:
        done = subprocess.run(["sh", action], env=environment, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout

    assert run() == ""
    (tmp_path / "ocihook-region-7.pack").touch()
    assert run().startswith("called")
