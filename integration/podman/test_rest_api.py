"""podman's REST API, as Cockpit and podman-py use it: each verb of checkpoints through podman-py and a real service."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from podman import PodmanClient
from podman.errors import APIError

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import IMAGE, Podman, assert_packed
from integration.runtime.conftest import MakeHandled, make_handled

__all__ = ["make_handled"]

TIMEOUT_S = 120


@contextmanager
def service(podman: Podman) -> Iterator[PodmanClient]:
    """A service of this podman and a client of it."""
    address = f"unix://{podman.scratch}/api.sock"
    command = ("podman", *podman.options(), "system", "service", "--time", "0", address)
    process = podman.namespace.spawn(*command, log=podman.scratch / "service.log", TMPDIR=str(podman.scratch))
    try:
        wait_for("the service to listen", lambda: _listens(podman.scratch / "api.sock"))
        with PodmanClient(base_url=address, timeout=TIMEOUT_S) as client:
            yield client
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def checkpoint(client: PodmanClient, name: str, **options: bool | str) -> bytes:
    """Checkpoint a container; return its archive, if it is exported.

    Raises:
        podman.errors.APIError: with what podman says.
    """
    response = client.api.post(f"/containers/{name}/checkpoint", params=options)
    response.raise_for_status()
    return bytes(response.content)


def restore(client: PodmanClient, container: str, archive: Path | None = None, **options: bool | str) -> None:
    """Restore a container, from an archive if there is one.

    Raises:
        podman.errors.APIError: with what podman says.
    """
    data = archive.read_bytes() if archive else None
    response = client.api.post(
        f"/containers/{container}/restore", params={"import": archive is not None, **options}, data=data
    )
    response.raise_for_status()


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_export_and_import(make_podman: MakePodman, runtime: str) -> None:
    podman = make_podman(runtime)
    podman.install()
    podman.start("c")
    with service(podman) as client:
        archive = podman.scratch / "a.tar"
        archive.write_bytes(checkpoint(client, "c", export=True))
        assert_packed(archive)
        before = podman.count("c")
        client.containers.get("c").remove(force=True)
        restore(client, "c", archive)
        assert client.containers.get("c").status == "running"
        podman.assert_goes_on("c", before)


def test_left_running(podman: Podman) -> None:
    podman.start("c")
    with service(podman) as client:
        archive = podman.scratch / "a.tar"
        archive.write_bytes(checkpoint(client, "c", export=True, leaveRunning=True))
        assert_packed(archive)
        podman.assert_counts("c")
        before = podman.count("c")
        client.containers.get("c").remove(force=True)
        restore(client, "c", archive)
        podman.assert_goes_on("c", before)


def test_in_its_own_storage(podman: Podman) -> None:
    podman.start("c")
    with service(podman) as client:
        checkpoint(client, "c")
        assert "post-dump" in last_session(podman.namespace, "pre-dump")["stages"]
        before = podman.count("c")
        assert client.containers.get("c").status == "exited"
        restore(client, "c")
        podman.assert_goes_on("c", before)


def test_another_name(podman: Podman) -> None:
    podman.start("c")
    with service(podman) as client:
        archive = podman.scratch / "a.tar"
        archive.write_bytes(checkpoint(client, "c", export=True))
        before = podman.count("c")
        restore(client, "c", archive, name="d")
        podman.assert_goes_on("d", before)
        assert client.containers.get("c").status == "exited"


def test_the_log_of_the_service_explains_a_refusal(podman: Podman) -> None:
    """podman gives its client the command that failed, and what that printed to its own stderr."""
    podman.start("c", mode="inlien")
    with service(podman) as client:
        with pytest.raises(APIError, match="runc checkpoint"):
            checkpoint(client, "c", export=True)
        podman.assert_counts("c")
    log = (podman.scratch / "service.log").read_text()
    assert "ocihook: pre-dump of container" in log
    assert "mode must be one of" in log


def test_a_client_that_disconnects(make_handled: MakeHandled) -> None:
    """The service goes on without its client; the container runs or is checkpointed, and can be restored."""
    podman = make_handled("runc")
    podman.stall()
    podman.start("c")
    with service(podman) as client:
        podman.stall_at("post-dump")
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"{podman.scratch}/api.sock")
            caller.sendall(
                b"POST /v5.0.0/libpod/containers/c/checkpoint HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\n\r\n"
            )
            podman.wait_for_stall()
        before = podman.count("c")
        podman.go_on()
        wait_for("the checkpoint to end", lambda: client.containers.get("c").status in ("exited", "running"))
        sessions(podman.namespace)
        if client.containers.get("c").status == "exited":
            restore(client, "c")
        podman.assert_goes_on("c", before)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_container_that_is_created_again_resumes(make_handled: MakeHandled, runtime: str) -> None:
    podman = make_handled(runtime)
    conf = podman.namespace.path("/etc/containers/containers.conf.d/99-test.conf")
    conf.parent.mkdir(parents=True, exist_ok=True)
    conf.write_text("[containers]\npids_limit = 0\n")  # hybrid cgroups have no controller for it in cgroup2
    notes = {"ocihook.io/checkpoint-on-stop": "true", "ocihook.io/restore-from": "latest"}
    options = {"name": "job", "network_mode": "host", "annotations": notes, "stop_timeout": 60}

    def run(client: PodmanClient) -> None:
        client.containers.create(IMAGE, ["/workload", "4"], **options).start()
        wait_for("job to count", lambda: podman.count("job")[0] > 2)

    with service(podman) as client:
        run(client)
        client.containers.get("job").stop(timeout=60)
        wait_for("job to end", lambda: client.containers.get("job").status == "exited")
        last, checksum = podman.counts("job")[-1], podman.count("job")[1]
        client.containers.get("job").remove()
        run(client)
        assert podman.counts("job")[0] == last + 1
        assert podman.count("job")[1] == checksum


def test_the_cause_of_a_failed_restore_reaches_the_client(podman: Podman) -> None:
    shared = podman.scratch / "shared"
    shared.mkdir()
    (shared / "file").write_bytes(bytes(5 << 20))
    podman.start("c", "/shared/file", volume=f"{shared}:/shared", mode="off")
    with service(podman) as client:
        archive = podman.scratch / "a.tar"
        archive.write_bytes(checkpoint(client, "c", export=True))
        client.containers.get("c").remove(force=True)
        (shared / "file").unlink()
        with pytest.raises(APIError, match=r"ocihook: pre-restore of container .*/shared/file .* is missing here"):
            restore(client, "c", archive)
