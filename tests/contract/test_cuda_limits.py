"""The stand-in fails as the real driver was recorded to: what it refuses, and what state that leaves."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration import fake_driver

PROJECT = Path(__file__).parents[2]
CONTRACT = PROJECT / "integration/gpu/driver_contract.py"
RECORDED: dict[str, Any] = json.loads((PROJECT / "integration/gpu/results/driver-limits-580.json").read_text())["cases"]
PROBED: dict[str, Any] = json.loads((PROJECT / "integration/gpu/results/probes-580.json").read_text())["cases"]
ANSWER = re.compile(r"(\w+): (\w+) ([0-3]|)(?: |$)")


class Node:
    """A machine with the stand-in, and one program on it."""

    def __init__(self, built: Path, script: Path) -> None:
        self.script = script
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(built), "OCIHOOK_FAKE_CUDA": str(script)}
        self.built = built
        self.program: subprocess.Popen[str] | None = None

    def start(self, *words: str) -> int:
        command = [str(self.built / "cuda_workload"), "8", *words]
        self.program = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.counts()
        return self.program.pid

    def counts(self) -> bool:
        assert self.program is not None
        assert self.program.stdout is not None
        return self.program.stdout.readline().startswith("count")

    def call(self, verb: str, pid: int, **environment: str) -> tuple[str, str, str]:
        done = subprocess.run(
            [sys.executable, CONTRACT, "--call", verb, str(pid)],
            env={**self.environment, **environment}, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        return verb, answer["name"], str(answer.get("value", "")) if verb == "state" else ""

    def calls(self, pid: int, verbs: list[str], **environment: str) -> list[tuple[str, str, str]]:
        return [self.call(verb, pid, **environment) for verb in verbs]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def node(built: Path, tmp_path: Path) -> Iterator[Node]:
    node = Node(built, tmp_path / "script")
    yield node
    if node.program:
        os.killpg(node.program.pid, signal.SIGKILL)  # a forked child holds the pipe, too
        node.program.communicate()


def recorded(case: str, answers: str = "answers", process: int = 0) -> list[tuple[str, str, str]]:
    """Return verb, result and state of each call, for one of the processes."""
    found = []
    for text in RECORDED[case][answers]:
        verb, _, results = text.partition(": ")
        name, value, _ = results.split(", ")[process].split(" ")[:3]
        found.append((verb, name, value if verb == "state" else ""))
    return found


@pytest.mark.parametrize(
    ("case", "words"), [("plain", []), ("managed", ["managed"]), ("nccl p2p", ["p2p"]), ("nccl shared memory", [])]
)
def test_every_state_and_answer(node: Node, case: str, words: list[str]) -> None:
    real = recorded(case)
    pid = node.start(*words)
    fake = node.calls(pid, [verb for verb, _, _ in real])
    assert fake == real
    if real[-1][2] == "0":
        assert node.counts()


def test_a_lock_that_comes_too_late(node: Node) -> None:
    real = recorded("lock timeout")
    pid = node.start("busy=30")
    assert node.calls(pid, [verb for verb, _, _ in real], LOCK_TIMEOUT_MS="500") == real


def test_too_little_memory_on_the_node(node: Node) -> None:
    real = recorded("host memory")
    pid = node.start()
    fake = [node.call("lock", pid)]
    used = int(re.findall(r"VmSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) << 10
    resource.prlimit(pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    fake += node.calls(pid, [verb for verb, _, _ in real[1:3]])
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    fake += node.calls(pid, [verb for verb, _, _ in real[3:]])
    assert fake == real
    assert node.counts()


def test_too_little_memory_on_the_gpu_loses_the_process(node: Node) -> None:
    real = recorded("device memory")
    pid = node.start()
    fake = node.calls(pid, [verb for verb, _, _ in real[:2]])
    node.script.write_text("taken 17179869184\n")
    fake += node.calls(pid, [verb for verb, _, _ in real[2:6]])
    node.script.unlink()
    fake += node.calls(pid, [verb for verb, _, _ in real[6:]])
    assert fake == real


def probed(answers: list[str]) -> list[tuple[str, str, str]]:
    """Return verb, result and state of each call of a probe."""
    rows = (text.replace(":", "").split(" ") for text in answers)
    return [(row[0], row[1], row[2] if row[0] == "state" else "") for row in rows]


@pytest.mark.parametrize(
    ("case", "word"), [("churn: pool, 8 threads", "pool"), ("churn: pool, 8 threads, kept", "pool=kept")]
)
def test_a_pool_at_work(node: Node, case: str, word: str) -> None:
    """Where it gives memory back to the driver, no checkpoint is made, now or later; where it keeps it, all are."""
    pid = node.start(word)
    for real in map(probed, PROBED[case]["attempts"]["under churn"]):
        assert node.calls(pid, [verb for verb, _, _ in real]) == real
    assert node.counts()


def test_what_nvml_says_while_a_process_is_locked() -> None:
    """It is what the checkpoint then maps, a little less; before the lock it is anything, and after it nothing."""
    rounds = [row for case in ("plain", "vmm") for row in PROBED[f"shrinking: {case}"]["rounds"]]
    assert len(rounds) == 16
    for row in rounds:
        (locked,) = set(row["locked"])
        (mapped,) = row["mapped"]
        assert locked <= mapped <= locked + (10 << 20)
        assert (row["checkpointed"], row["restored"]) == (0, locked)
    assert any(row["running"][1] > row["locked"][0] for row in rounds)
    assert any(row["running"][1] < row["locked"][0] for row in rounds)


def test_memory_that_shrinks(node: Node) -> None:
    """The stand-in reports what it is set to of a process that runs, and the truth of one that is locked."""
    pid = node.start()
    node.script.write_text("running 123\n")
    program = "from ocihook.gpu.nvml import read_gpus; print([dict(gpu.held_bytes) for gpu in read_gpus()[1]])"

    def held() -> int:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=node.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return int(re.findall(rf"\b{pid}: (\d+)", done.stdout + f" {pid}: 0")[0])

    found = [held()]
    for verb in ("lock", "checkpoint", "restore", "unlock"):
        node.call(verb, pid)
        found.append(held())
    assert found == [123, 8 << 20, 0, 8 << 20, 123]


def test_a_fork_has_nothing_to_do_with_cuda(node: Node) -> None:
    real = recorded("fork", "child alone")
    pid = node.start("fork")
    child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    fake = node.calls(child, [verb for verb, _, _ in real])
    assert [answer[:2] for answer in fake] == [answer[:2] for answer in real]
