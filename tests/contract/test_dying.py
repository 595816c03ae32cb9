"""An agent that dies at any of its steps costs a job with GPU memory nothing, and neither does a recovery that dies."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration import fake_driver
from integration.steps import representative

PROJECT = Path(__file__).parents[2]
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
MOMENTS = 1000 if IS_NIGHTLY else 5
STEPS = 1 << 30 if IS_NIGHTLY else 36
CHANCE = random.Random(None if IS_NIGHTLY else 1)
RECOVERY_STEPS = 60  # about as many as there are


class Sessions:
    """Sessions that die; see dying_session.py."""

    def __init__(self, directory: Path) -> None:
        built, work = directory / "built", directory / "work"
        built.mkdir()
        work.mkdir()
        fake_driver.build(built)
        self._log = (directory / "log").open("w+")
        command = ["unshare", "--mount", "--propagation", "private"]
        command += [sys.executable, "-m", "tests.contract.dying_session"]
        self._runner = subprocess.Popen(
            [*command, str(work), str(built / "cuda_workload")],
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(built),
                "OCIHOOK_FAKE_CUDA": str(work / "script"),
                "PYTHONPATH": str(PROJECT),
            },
            cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def dies(self, last: int, victims: str = "agent", criu_then: str = "gone", recovery: int = 0) -> dict[str, Any]:
        """Let one die, see that nothing is lost or left, and return what it did."""
        assert self._runner.stdin is not None
        assert self._runner.stdout is not None
        plan = f"{last} {victims} {criu_then} {recovery}"
        print(plan, file=self._runner.stdin, flush=True)
        line = self._runner.stdout.readline()
        if not line:
            self._log.seek(0)
            pytest.fail(f"{plan}: {self._log.read()[-20000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._runner.communicate()
        self._log.close()


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root: mounts, cgroups, ptrace")
    made = Sessions(tmp_path)
    yield made
    made.close()


def test_killed_at_any_step(sessions: Sessions) -> None:
    steps = sessions.dies(0)["steps"]
    assert len(steps) > 150, "so few steps were not seen before; are all counted?"
    for verb in ("lock", "checkpoint", "restore", "unlock"):
        assert sum(step.endswith(f"driver {verb}") for step in steps) == 2
    survived = 0
    for number, last in enumerate(representative(steps, STEPS)):
        for variant in range(4) if IS_NIGHTLY else [number % 4]:
            victims, criu_then = ("agent", "everybody")[variant % 2], ("again", "gone")[variant // 2]
            recovery = CHANCE.randint(1, RECOVERY_STEPS) if number % 2 else 0
            found = sessions.dies(last, victims, criu_then, recovery)
            survived += len(found["steps"]) >= last
    print(f"{survived} deaths survived, of {len(steps)} steps")
    assert survived


def test_killed_at_any_moment(sessions: Sessions) -> None:
    began = time.monotonic()
    sessions.dies(0)
    longest_ms = int((time.monotonic() - began) * 1000)
    for number in range(MOMENTS):
        moment = CHANCE.randint(1, longest_ms)
        sessions.dies(-moment, ("agent", "everybody")[number % 2], ("again", "gone")[number // 2 % 2])
