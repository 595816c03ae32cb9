"""The JobSet or Job that made a pod, by the labels that engines have, and engines that do not answer."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from ocihook.container.grpc import encode_text, fields
from ocihook.container.pod_owner import find_owner_uid, owner_uid
from ocihook.errors import UnsupportedError
from ocihook.model import ContainerRef
from ocihook.store.lineage import is_own

SANDBOX = "5a" * 32
JOB, OLD_JOB = "batch.kubernetes.io/controller-uid", "controller-uid"
JOBSET, JOBSET_UID = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
NOTES = {"io.kubernetes.cri.sandbox-id": SANDBOX}


@pytest.mark.parametrize(
    ("labels", "uid"),
    [
        ({JOB: "j", OLD_JOB: "j"}, "j"),
        ({OLD_JOB: "j"}, "j"),
        ({JOBSET: "set", JOBSET_UID: "s", JOB: "j"}, "s"),
        ({JOBSET: "set", JOB: "j", OLD_JOB: "j"}, ""),
        ({"statefulset.kubernetes.io/pod-name": "db-0"}, ""),
        ({JOB: ""}, ""),
        ({}, ""),
    ],
)
def test_which_label_counts(labels: Mapping[str, str], uid: str) -> None:
    assert owner_uid(labels) == uid


@pytest.mark.parametrize(
    ("then", "now", "owner", "is_same"),
    [
        ("1", "1", "", True),
        ("1", "2", "", False),
        ("1", "2", "train", True),
        ("", "2", "", True),
        ("1", "", "", True),
        ("", "", "", True),
    ],
)
def test_whose_checkpoint_is_a_container_s_own(then: str, now: str, owner: str, *, is_same: bool) -> None:
    names = {"name": "main", "pod_namespace": "team"}
    old = ContainerRef(id="a", pod_name="train-0-bcdfg", owner_uid=then, **names)
    new = ContainerRef(id="b", pod_name="train-0-ghjkl", owner_uid=now, owner=owner, **names)
    assert is_own(old, new) is is_same
    assert not is_own(old, ContainerRef(id="c", pod_name="train-1-ghjkl", owner_uid=then, **names))


def container(engine: str, bundle: Path = Path("/")) -> ContainerRef:
    return ContainerRef(id="c", engine=engine, pod_name="train-0", pod_namespace="team", bundle=str(bundle))


def status(labels: Mapping[str, str], padding: int = 0) -> bytes:
    """Return a PodSandboxStatusResponse as protobuf has it, with fields that are not read."""

    def field(number: int, data: bytes) -> bytes:
        size, encoded = len(data), bytearray()
        while size > 127:
            encoded.append(size & 127 | 128)
            size >>= 7
        return bytes((number << 3 | 2, *encoded, size)) + data

    entries = b"".join(field(7, field(1, key.encode()) + field(2, text.encode())) for key, text in labels.items())
    other = field(1, SANDBOX.encode()) + b"\x20\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + field(8, b"x" * padding)
    return field(1, other + entries + b"\x79" + bytes(8) + b"\x7d" + bytes(4)) + field(2, b"info")


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a containerd's shim says that its socket is."""
    monkeypatch.setenv("GRPC_ADDRESS", str(tmp_path / "containerd.sock"))
    return tmp_path / "containerd.sock"


@contextmanager
def serving(address: Path, answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[None]:
    """Serve the CRI, by another implementation of gRPC."""
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", {"PodSandboxStatus": handler})]
    )
    server.add_insecure_port(f"unix:{address}")
    server.start()
    yield
    server.stop(None).wait()


@pytest.mark.parametrize("padding", [0, 300, 300_000])
def test_containerd_is_asked_for_the_labels(address: Path, padding: int) -> None:
    asked = []

    def answer(request: bytes, _: grpc.ServicerContext) -> bytes:
        asked.append(request)
        return status({"app": "x", JOB: "uid-1"}, padding)

    with serving(address, answer):
        assert find_owner_uid(container("containerd"), NOTES) == "uid-1"
    assert asked == [encode_text(1, SANDBOX)]


def test_containerd_knows_no_such_pod(address: Path) -> None:
    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such sandbox")
        return b""

    with serving(address, answer), pytest.raises(UnsupportedError, match=r"does not say .* refused the call"):
        find_owner_uid(container("containerd"), NOTES)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\7\0\0\0\0\0"])
def test_what_does_not_speak_grpc(address: Path, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)

        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(UnsupportedError, match="does not say which labels pod train-0 has"):
            find_owner_uid(container("containerd"), NOTES)
        server.join()


def test_an_engine_that_is_not_there_or_does_not_answer(address: Path) -> None:
    with pytest.raises(UnsupportedError, match="No such file"):
        find_owner_uid(container("containerd"), NOTES)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        with pytest.raises(UnsupportedError):
            find_owner_uid(container("containerd"), NOTES, timeout_s=0.05)
    with pytest.raises(UnsupportedError, match=r"sandbox-id is '\.\./etc'"):
        find_owner_uid(container("containerd"), {"io.kubernetes.cri.sandbox-id": "../etc"})


def test_cri_o_has_the_labels_in_a_file(tmp_path: Path) -> None:
    bundle, sandbox = tmp_path / "c" / "userdata", tmp_path / SANDBOX / "userdata"
    sandbox.mkdir(parents=True)
    notes = {"io.kubernetes.cri-o.SandboxID": SANDBOX}
    config = sandbox / "config.json"
    config.write_text(json.dumps({"annotations": {"io.kubernetes.cri-o.Labels": json.dumps({JOB: "uid-1"})}}))
    assert find_owner_uid(container("cri-o", bundle), notes) == "uid-1"
    for damaged in ("", "[]", "{}", '{"annotations": {"io.kubernetes.cri-o.Labels": "["}}'):
        config.write_text(damaged)
        with pytest.raises(UnsupportedError):
            find_owner_uid(container("cri-o", bundle), notes)


def test_other_engines_have_no_labels() -> None:
    assert find_owner_uid(container("podman"), {}) == ""


@pytest.mark.parametrize("cut", [b"\x0a\x05abc", b"\x0a", b"\xff" * 11, b"\x0b", b"\x09abc"])
def test_a_message_that_is_none(cut: bytes) -> None:
    with pytest.raises(ValueError, match=r"a (field|number)"):
        list(fields(cut))
