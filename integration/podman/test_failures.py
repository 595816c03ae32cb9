"""A dump or restore that fails is explained: to the engine, in the journal, and beforehand by doctor."""

import contextlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.criu.logs import record
from integration.criu.mount_behind import mount_behind
from integration.criu.test_states import build
from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import IMAGE, Podman


def init_pid(podman: Podman, name: str) -> str:
    return podman("inspect", "--format", "{{.State.Pid}}", name).strip()


def kept_log(podman: Podman, failure: dict[str, str]) -> str:
    return podman.namespace.path(failure["log"]).read_text()


def test_dump_that_doctor_foresaw(podman: Podman) -> None:
    podman.start("c")
    container_id = podman("inspect", "--format", "{{.Id}}", "c").strip()
    assert "A checkpoint of this container will work here" in podman.ocihook("doctor", "--container", container_id)

    mount_behind(int(init_pid(podman, "c")), podman.scratch / "nvidia", "/tmp")
    answer = json.loads(podman.ocihook("doctor", "--json", "--container", container_id[:12], check=False))
    assert answer["will_work"] is False
    (found,) = [finding for finding in answer["findings"] if finding["status"] == "fail"]
    output = podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    assert found["detail"] in output
    assert found["remedy"] in output
    assert "The dump is refused, the container runs on" in output
    podman.assert_counts("c")


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda file: file.unlink(), "/data/config was open when the checkpoint was made, and is missing here"),
        (lambda file: file.write_text("longer"), "/data/config has 6 bytes, when the checkpoint was made it had 4"),
        (lambda file: file.chmod(0o600), "/data/config has mode 100600, when the checkpoint was made it had 100644"),
    ],
    ids=["missing", "size", "mode"],
)
def test_a_restore_that_its_node_does_not_allow(podman: Podman, spoil: Callable[[Path], object], names: str) -> None:
    """It is refused before CRIU makes a process, as doctor says; with the file as it was, it succeeds."""
    data, archive = podman.scratch / "data", podman.scratch / "c.tar"
    data.mkdir()
    file = data / "config"
    file.write_text("here")
    file.chmod(0o644)
    command = ["run", "--detach", "--name", "c", "--network", "host", "--pids-limit", "0", f"--volume={data}:/data"]
    podman(*command, IMAGE, "/workload", "hold-open", "/data", "24")
    wait_for("c to count", lambda: podman.count("c")[0] > 2)
    podman.checkpoint("c", archive)
    podman.remove("c")
    spoil(file)
    answer = json.loads(podman.ocihook("doctor", "--json", "--archive", str(archive), check=False))
    assert names in [found["detail"] for found in answer["findings"] if found["status"] == "fail"]
    output = podman.restore(archive, check=False)
    assert names in output
    session = last_session(podman.namespace, "pre-restore")
    assert session["error_code"] == "preflight"
    assert list(session["stages"]) == ["pre-restore"]
    podman.remove("c")  # which podman leaves
    file.write_text("here")
    file.chmod(0o644)
    podman.restore(archive)
    podman.assert_counts("c")


_TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
print(flush=True)
sys.stdin.read()
"""


def test_a_traced_container_is_refused_before_criu_stops_it(podman: Podman) -> None:
    """CRIU would try for 10 s to stop it; its log shows that it has not begun to."""
    podman.start("c")
    init = init_pid(podman, "c")
    command = [sys.executable, "-c", _TRACER, init]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        tracer.stdout.readline()
        output = podman.checkpoint("c", podman.scratch / "c.tar", check=False)
        assert f"is traced by process {tracer.pid}" in output
        assert f"kill {tracer.pid}" in output
    session = last_session(podman.namespace, "pre-dump")
    assert session["error_code"] == "preflight"
    log = kept_log(podman, session["facts"]["failure"])
    assert "Running pre-dump scripts" in log
    assert not [word for word in ("Seized task", "SEIZE ", "freezing processes", "interrupt task") if word in log]
    podman.checkpoint("c", podman.scratch / "c.tar")


def test_a_restore_that_fails_late_ends(podman: Podman) -> None:
    """CRIU kills the first process and waits for that alone, which waits for CRIU to wait for the others."""
    program, archive = podman.scratch / "states", podman.scratch / "c.tar"
    build(program)
    command = [
        "run",
        "--detach",
        "--name",
        "c",
        "--network",
        "host",
        "--pids-limit",
        "0",
        f"--volume={program}:/states",
    ]
    podman(*command, IMAGE, "/states", "ambient_without_raise")
    said = Path(f"/proc/{init_pid(podman, 'c')}/root/said")
    wait_for("the state to be made", lambda: said.exists() and said.read_text().endswith(" ok\n"))
    podman.checkpoint("c", archive)
    podman.remove("c")
    output = podman.restore(archive, check=False)
    session = last_session(podman.namespace, "pre-restore")
    assert session["error_code"] == "criu-capabilities", output
    assert "SECBIT_NO_CAP_AMBIENT_RAISE" in output
    left = [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if is_called(path, b"/states\0ambient_without_raise\0")
    ]
    assert left == []
    podman.start("d")


def is_called(path: Path, command: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == command
    return False


def test_dump_at_the_users_risk(podman: Podman) -> None:
    podman.start("c", preflight="warn")
    mount_behind(int(init_pid(podman, "c")), podman.scratch / "nvidia", "/tmp")
    output = podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    session = last_session(podman.namespace, "pre-dump")
    failure = session["facts"]["failure"]
    assert failure["name"] == "mount"
    assert failure["what"] in output
    log = kept_log(podman, failure)
    record("dump-mount", log, podman.scratch)
    assert "Dumping FAILED" in log
    podman.assert_counts("c")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_restore_without_an_image(make_podman: MakePodman, runtime: str) -> None:
    """In mode off nothing is verified before CRIU reads it."""
    podman = make_podman(runtime)
    podman.install()
    archive, partial = podman.scratch / "c.tar", podman.scratch / "partial.tar"
    podman.start("c", mode="off")
    podman.checkpoint("c", archive)
    podman.remove("c")
    with tarfile.open(archive) as source, tarfile.open(partial, "w") as target:
        for member in source:
            if member.name != "checkpoint/core-1.img":
                target.addfile(member, source.extractfile(member))
    output = podman.restore(partial, check=False)
    session = last_session(podman.namespace, "pre-restore")
    failure = session["facts"]["failure"]
    assert session["error_code"] == "criu-image-missing"
    assert failure["what"] in output
    assert "Restoring FAILED" in kept_log(podman, failure)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_restore_that_a_stage_refuses(make_podman: MakePodman, runtime: str) -> None:
    podman = make_podman(runtime)
    podman.install()
    archive, partial = podman.scratch / "c.tar", podman.scratch / "partial.tar"
    podman.start("c")
    podman.checkpoint("c", archive)
    podman.remove("c")
    with tarfile.open(archive) as source, tarfile.open(partial, "w") as target:
        for member in source:
            if not member.name.endswith(".pack"):
                target.addfile(member, source.extractfile(member))
    output = podman.restore(partial, check=False)
    assert "ocihook-0.pack cannot be opened" in output
    assert "The restore is refused, nothing was started" in output


def test_refusal_is_shown_by_the_engine(podman: Podman) -> None:
    podman.start("c", mode="inlien")
    output = podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    assert "ocihook: pre-dump of container" in output
    assert "mode must be one of" in output
    failure = last_session(podman.namespace, "pre-dump")["facts"]["failure"]
    assert failure["name"] == "ocihook"
    assert "Pre dump script failed" in kept_log(podman, failure)
    podman.assert_counts("c")


def test_doctor_says_what_the_preflight_would(gpu_podman: Podman) -> None:
    options = ["--env=CUDA_MPS_PIPE_DIRECTORY=/x", "--tmpfs=/scratch:size=100m"]
    gpu_podman.start_cuda("c", options=options)
    Path(f"/proc/{init_pid(gpu_podman, 'c')}/root/scratch/large").write_bytes(bytes(70 << 20))
    answer = json.loads(gpu_podman.ocihook("doctor", "--json", "--pid", init_pid(gpu_podman, "c"), check=False))
    found = {finding["check"]: finding for finding in answer["findings"] if finding["status"] != "ok"}
    assert found["tmpfs"]["detail"].startswith("/scratch is memory (tmpfs) with 70 MiB")
    assert found["gpu"]["status"] == "fail"
    assert "is a client of MPS" in found["gpu"]["detail"]
    assert found["gpu"]["remedy"] == "run it without MPS"
    output = gpu_podman.checkpoint("c", gpu_podman.scratch / "c.tar", check=False)
    assert found["gpu"]["detail"] in output
    gpu_podman.assert_counts("c")
