"""Real CRIU fails to dump or restore for causes outside the processes: its log is explained."""

import os
import re
import subprocess
from collections.abc import Callable

import pytest

from integration.criu.logs import record
from integration.criu.process import Hazard, hazard
from ocihook.criu.explain import explain

_VETO = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = "$VETO" ] || exit 0
echo "ocihook: $VETO of container c: the reason. The end"
exit 1
"""


def _nothing(_process: Hazard) -> None:
    """Leave all as it was."""


def _lack_cpu(process: Hazard) -> None:
    """Have the checkpoint ask for everything that a CPU may have in one word of its capabilities."""
    image = process.images / "cpuinfo.img"
    image.write_bytes(re.sub(rb"\x30[\x80-\xff]{4}[\x01-\x0f]", _all_bits, image.read_bytes(), count=1))


def _all_bits(_match: re.Match[bytes]) -> bytes:
    return b"\x30\xff\xff\xff\xff\x0f"


def _cut_cores(process: Hazard) -> None:
    for image in process.images.glob("core-*"):
        os.truncate(image, 100)


def _remove_cores(process: Hazard) -> None:
    for image in process.images.glob("core-*"):
        image.unlink()


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("file-missing", lambda process: (process.directory / "data").unlink(), "/data, which was open"),
        ("file-size", lambda process: (process.directory / "data").write_text("y"), "has 1 bytes"),
        ("file-mode", lambda process: (process.directory / "data").chmod(0o777), "has mode 0100777"),
        ("image-missing", _remove_cores, "is missing"),
        ("image-damaged", _cut_cores, "is cut short or damaged"),
        ("cpu", _lack_cpu, "this CPU lacks"),
        ("", _nothing, ""),
    ],
)
def test_restore(name: str, spoil: Callable[[Hazard], None], said: str) -> None:
    with hazard("file_open") as process:
        assert process.dump("--cpu-cap=all")[0]
        spoil(process)
        succeeded, log = process.restore("--cpu-cap=all")
        record(f"restore-{name or 'good'}", log, process.directory)
    explanation = explain(log)
    assert succeeded is (explanation is None)
    assert (explanation.name if explanation else "") == name
    assert said in (explanation.what if explanation else "")


def test_pid_is_taken() -> None:
    with hazard("nothing") as process:
        assert process.dump("--leave-running")[0]
        succeeded, log = process.restore()
        record("restore-pid-taken", log, process.directory)
    explanation = explain(log)
    assert explanation is not None
    assert (succeeded, explanation.name) == (False, "pid-taken")
    assert explanation.what.startswith(f"pid {process.pid}, which")


def test_no_space() -> None:
    with hazard("nothing") as process:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", process.images], check=True)
        try:
            succeeded, log = process.dump()
        finally:
            subprocess.run(["umount", process.images], check=True)
        record("dump-no-space", log, process.directory)
    explanation = explain(log)
    assert explanation is not None
    assert (succeeded, explanation.name) == (False, "no-space")


@pytest.mark.parametrize("stage", ["pre-dump", "pre-restore"])
def test_what_a_hook_says_is_the_cause(stage: str) -> None:
    with hazard("nothing") as process:
        script = process.directory / "veto"
        script.write_text(_VETO)
        script.chmod(0o755)
        act = process.dump if stage == "pre-dump" else process.restore
        if stage == "pre-restore":
            assert process.dump()[0]
        succeeded, log = act("--action-script", str(script), environment={"VETO": stage})
        record(f"veto-{stage}", log, process.directory)
    explanation = explain(log)
    assert explanation is not None
    assert (succeeded, explanation.name) == (False, "ocihook")
    assert str(explanation) == f"{stage} of container c: the reason. The end"
