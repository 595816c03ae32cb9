"""The hook starts fast because it imports next to nothing."""

import subprocess
import sys
from pathlib import Path

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
