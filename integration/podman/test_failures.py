"""A dump or restore that fails is explained: to the engine, in the journal, and beforehand by doctor."""

import json
import tarfile
from pathlib import Path

import pytest

from integration.criu.logs import record
from integration.criu.mount_behind import mount_behind
from integration.journals import last_session
from integration.podman.conftest import MakePodman
from integration.podman.engine import Podman


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
