"""Makes test data of CRIU's logs: short, and without what only the machine has on which they were written."""

import os
import re
from pathlib import Path

_CONTEXT_LINES = 4
_RECORDED = Path(__file__).parents[2] / "tests/data/criu-logs"


def reduce_log(log: str, directory: Path) -> str:
    """Return the first line, all errors, each with what stands before it, and where processes begin."""
    lines = [line for line in log.splitlines() if " Running on " not in line]
    kept = {0, 1, len(lines) - 1}
    for number, line in enumerate(lines):
        if "Error (" in line or line.startswith("ocihook: "):
            kept.update(range(max(0, number - _CONTEXT_LINES), number + 1))
        elif any(
            word in line for word in ("(pid: ", "scripts", "finished successfully", "Version: ", "Detected cgroup")
        ):
            kept.add(number)
    text = "\n".join(lines[number] for number in sorted(kept)) + "\n"
    text = re.sub(rf"/?{re.escape(str(directory).lstrip('/'))}", "/scratch", text)
    text = re.sub(r"[^ \[]*/(python3)[.0-9]*", r"/usr/bin/\1", text)
    return re.sub(r"run id = \S+", "run id = 0", text)


def record(name: str, log: str, directory: Path) -> None:
    """Keep a log as test data, if OCIHOOK_RECORD_LOGS is set."""
    if os.environ.get("OCIHOOK_RECORD_LOGS"):
        _RECORDED.mkdir(parents=True, exist_ok=True)
        (_RECORDED / f"{name}.log").write_text(reduce_log(log, directory))
