"""The stand-in for libcuda answers as the real driver was recorded to; our adapter drives it with cuda-bindings."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
CONTRACT = PROJECT / "integration/gpu/driver_contract.py"
ODD_SIZES = PROJECT / "integration/gpu/odd_sizes.py"
RECORDED = PROJECT / "integration/gpu/results/driver-contract-580.json"
VRAM_BYTES = 32 << 20


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which libcuda.so.1 is the stand-in."""
    directory = tmp_path_factory.mktemp("cuda")
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    source = PROJECT / "tests/fakes/cuda/libcuda.c"
    cuda, nvml = str(directory / "libcuda.so.1"), str(directory / "libnvidia-ml.so.1")
    subprocess.run(["gcc", *options, "-o", cuda, source, "-lpthread"], check=True, timeout=60)
    wrap = ["gcc", "-shared", "-Wl,-soname,libnvidia-ml.so.1,--no-as-needed", "-o", nvml, cuda]
    subprocess.run(wrap, check=True, timeout=60)
    return {**os.environ, "LD_LIBRARY_PATH": str(directory), "VRAM_BYTES": str(VRAM_BYTES)}


@pytest.fixture
def program(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds device memory and checks it again and again."""
    command = [sys.executable, str(CONTRACT), "--program", "context"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def answers(case: list[dict[str, Any]]) -> list[tuple[str, str, int | None]]:
    """Return verb, result and state of each answer; thread ids differ from run to run."""
    return [(a["verb"], a["name"], a.get("value") if a["verb"] == "state" else None) for a in case]


def test_it_answers_as_the_real_driver_does(environment: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, CONTRACT, results], env=environment, check=True, timeout=120, capture_output=True)
    fake = json.loads(results.read_text())["cases"]
    real = json.loads(RECORDED.read_text())["cases"]
    assert fake.keys() == real.keys()
    for name in ("no cuda", "no process", "cuInit only", "stopped", "killed while checkpointed"):
        assert answers(fake[name]) == answers(real[name]), name
    for fake_step, real_step in zip(fake["context"], real["context"], strict=True):
        assert answers(fake_step["answers"]) == answers(real_step["answers"])
        large = [step["changed"]["new_large_mappings"] for step in (fake_step, real_step)]
        assert [len(mappings) for mappings in large] in ([0, 0], [1, 1])
        for mappings in large:
            assert all(mode == "rw-p" and inode == "0" and not path for _, mode, inode, path in mappings)
        assert (fake_step["changed"]["device_files"][1] == 0) == (real_step["changed"]["device_files"][1] == 0)
    assert fake["goes on afterwards"] is real["goes on afterwards"] is True


def test_a_call_on_a_stopped_process_does_not_return(
    environment: dict[str, str], program: subprocess.Popen[str]
) -> None:
    command = [sys.executable, str(CONTRACT), "--call", "state", str(program.pid)]
    program.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, timeout=2, check=False, capture_output=True)
    program.send_signal(signal.SIGCONT)
    done = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["name"] == "CUDA_SUCCESS"


# Runs where libcuda is the stand-in, which the test process itself must not load.
ADAPTER = """
import os, sys
from ocihook.gpu.driver import CudaDriver, CudaState
from ocihook.gpu.process import CudaProcess
from ocihook.errors import CudaError, CudaStateError

driver, pid = CudaDriver(), int(sys.argv[1])
assert driver.version >= 12080
assert CudaProcess.find(driver, os.getppid()) is None
try:
    driver.state(1 << 22)
    raise AssertionError("a state of no process")
except CudaError as error:
    assert error.result == "CUDA_ERROR_OPERATING_SYSTEM" and "gone" in error.hint
process = CudaProcess.find(driver, pid)
assert process is not None and process.state is CudaState.RUNNING
assert driver.restore_thread_id(pid) > 0
for wrong in (process.unlock, process.restore, process.checkpoint):
    try:
        wrong()
        raise AssertionError(wrong)
    except CudaStateError as error:
        assert str(pid) in str(error) and error.result == "CUDA_ERROR_ILLEGAL_STATE"
process.set_running()
process.lock(5)
assert process.state is CudaState.LOCKED
process.set_running()
assert process.state is CudaState.RUNNING
process.lock(5)
process.checkpoint()
assert process.state is CudaState.CHECKPOINTED
process.set_running()
assert process.state is CudaState.RUNNING
print("done")
"""


def test_the_adapter(environment: dict[str, str], program: subprocess.Popen[str]) -> None:
    command = [sys.executable, "-c", ADAPTER, str(program.pid)]
    done = subprocess.run(command, env=environment, timeout=60, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert program.poll() is None
    assert program.stdout is not None
    before = program.stdout.readline()
    assert program.stdout.readline() != before  # it goes on, and checks its device memory each time


def test_doctor_tells_of_the_driver(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ocihook", "doctor", "--json"]
    for env, status, detail in ((environment, "ok", "CUDA 13.0"), (dict(os.environ), "skip", "no NVIDIA driver")):
        done = subprocess.run(command, env=env, timeout=60, check=False, capture_output=True, text=True)
        finding = next(f for f in json.loads(done.stdout)["findings"] if f["check"] == "cuda")
        if env is environment or finding["status"] == "skip":  # a node with a GPU says ok in both
            assert finding["status"] == status
            assert detail in finding["detail"]


def test_what_is_asked_of_a_real_driver_about_forks_can_be_asked(environment: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    script = PROJECT / "integration/gpu/fork.py"
    environment = {**environment, "PINNED_BYTES": str(1 << 20), "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, str(script), str(results), str(VRAM_BYTES / (1 << 30))]
    subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
    (case,) = json.loads(results.read_text())["cases"]
    assert [way["way"] for way in case["ways"]] == ["plain", "forked", "dropped"], case
    for way in case["ways"]:
        assert way["GPU memory is intact"], way
        assert way["goes on"], way
        assert way["children"] == 0, way
        assert way.get("child is equal", way["way"] == "plain"), way


WITHOUT_ROOM = """
import sys
from pathlib import Path
from ocihook.gpu.driver import CudaDriver
from ocihook.errors import CudaError

driver, pid, script = CudaDriver(), int(sys.argv[1]), Path(sys.argv[2])
driver.lock(pid, 5)
driver.checkpoint(pid)
for content in (f"total {1 << 30}\\ntaken {1 << 30}\\n", ""):
    script.write_text(content)
    try:
        driver.restore(pid)
        raise AssertionError("it has its GPU back")
    except CudaError as error:
        print(error.result)
"""


def test_a_restore_without_room_is_final(
    environment: dict[str, str], program: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Recorded in driver-limits-580.json: the process is lost, though there is room by then."""
    script = tmp_path / "script"
    env = {**environment, "OCIHOOK_FAKE_CUDA": str(script)}
    command = [sys.executable, "-c", WITHOUT_ROOM, str(program.pid), str(script)]
    done = subprocess.run(command, env=env, timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"]


IN_A_NODE = """
mount -t tmpfs tmpfs /run
mkdir -p "$1"
cp "$2/libcuda.so.1" "$1/libcuda.so.580.159.04"
cp "$2/libnvidia-ml.so.1" "$1/libnvidia-ml.so.580.159.04"
if [ -n "$3" ]; then
    mkdir -p /run/cdi
    mount -t tmpfs tmpfs /var/run/cdi 2>/dev/null || true
    printf '%s' "$3" > /var/run/cdi/nvidia.yaml
fi
exec "$4" -m ocihook doctor --json
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize(
    ("place", "specification"),
    [
        ("/run/nvidia/driver/usr/lib/x86_64-linux-gnu", ""),
        ("/run/nvidia/driver/usr/lib64", ""),
        (
            "/run/elsewhere",
            (
                "mounts:\n- hostPath: /run/elsewhere/libcuda.so.580.159.04\n  containerPath: /usr/lib\n"
                "- hostPath: /run/elsewhere/libnvidia-ml.so.580.159.04\n"
            ),
        ),
    ],
)
def test_a_driver_in_a_container_is_found(environment: dict[str, str], place: str, specification: str) -> None:
    """As the GPU Operator installs it, or as CDI names it."""
    built = environment["LD_LIBRARY_PATH"]
    command = ["unshare", "--mount", "sh", "-ec", IN_A_NODE, "sh", place, built, specification, sys.executable]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["cuda"]["status"] == "ok", done.stderr
    assert "driver 580.159.04: Stand-in" in findings["gpus"]["detail"]


SUSPENDS = """
import sys
from pathlib import Path
from ocihook.config import Settings
from ocihook.gpu.driver import CudaDriver
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.runtime.containers import Kept
from ocihook.runtime.suspending import suspend_gpus

pid, script = int(sys.argv[1]), Path(sys.argv[2])
root, init = Path("/"), Process.find(pid)
kept = Kept(container=ContainerRef(id="a"), bundle=root, program=root, prefix=(), domain="", init=init)
for line in ("", "driver 595.71.05\\nlock 600", "driver 595.71.05", "driver 595.71.05"):
    script.write_text(line + "\\n")
    why = suspend_gpus(kept, Settings())
    print(CudaDriver().state(pid), "NOT_READY" in why or why)
"""


def test_gpus_are_suspended_where_the_driver_is_on_the_list(
    environment: dict[str, str], program: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A driver that refuses does not keep a container from its signal."""
    script = tmp_path / "script"
    env = {**environment, "OCIHOOK_FAKE_CUDA": str(script)}
    command = [sys.executable, "-c", SUSPENDS, str(program.pid), str(script)]
    done = subprocess.run(command, env=env, timeout=60, check=False, capture_output=True, text=True)
    expected = ["running", "running True", "checkpointed", "checkpointed"]
    assert [line.strip() for line in done.stdout.splitlines()] == expected, done.stderr


def test_it_counts_odd_sizes_as_nvml_does(environment: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    subprocess.run([sys.executable, ODD_SIZES, results], env=environment, check=True, timeout=120, capture_output=True)
    recorded = json.loads((PROJECT / "integration/gpu/results/odd-sizes-580.json").read_text())
    assert json.loads(results.read_text())["cases"] == recorded["cases"]
    assert all(case["mapping"] * 2 >= case["nvml"] for case in recorded["cases"])
