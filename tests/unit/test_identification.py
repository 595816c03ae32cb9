"""From CRIU's pid to the container: command lines of runtimes, their state, and the annotations of engines."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ocihook.container import runtime_call as runtime
from ocihook.container.identity import container_ref, engine_of
from ocihook.container.runtime_call import RuntimeCall, find_runtime_call, parse_runtime_call, read_annotations
from ocihook.errors import IdentificationError
from ocihook.model import ContainerRef
from ocihook.store.lineage import domain_name

ID = "ab" * 32


@pytest.mark.parametrize(
    ("argv", "verb", "root", "bundle", "leave_running"),
    [
        # podman, dump; conmon, restore
        (f"/usr/bin/crun checkpoint --image-path /s/c --work-path /s {ID}", "checkpoint", "/run/crun", "", False),
        (
            f"/usr/bin/runc restore --bundle /s/u --pid-file /p --detach --image-path /c --work-path /s {ID}",
            "restore",
            "/run/runc",
            "/s/u",
            False,
        ),
        # containerd's shim
        (
            f"runc --root /run/k8s.io --log /l --log-format json --systemd-cgroup checkpoint --leave-running {ID}",
            "checkpoint",
            "/run/k8s.io",
            "",
            True,
        ),
        (
            f"/usr/sbin/runc --root /r --log-format json restore --image-path /i --bundle=/b --no-pivot --detach {ID}",
            "restore",
            "/r",
            "/b",
            False,
        ),
        # CRI-O
        (f"runc --root=/run/runc checkpoint --file-locks --leave-running {ID}", "checkpoint", "/run/runc", "", True),
        (f"crun --cgroup-manager cgroupfs --debug checkpoint -R {ID}", "checkpoint", "/run/crun", "", True),
    ],
)
def test_command_lines(argv: str, verb: str, root: str, bundle: str, *, leave_running: bool) -> None:
    found = parse_runtime_call(argv.split())
    assert found is not None
    call, found_root = found
    assert (call.verb, found_root, call.bundle, call.leave_running) == (verb, root, bundle, leave_running)
    assert call.container_id == ID
    assert call.runtime in argv


@pytest.mark.parametrize(
    "argv",
    ["", "criu dump -t 5", "runc run x", "runc", "runc checkpoint", "runc --root", "/bin/bash runc checkpoint x"],
)
def test_what_is_no_checkpoint_of_a_runtime(argv: str) -> None:
    assert parse_runtime_call(argv.split()) is None


@pytest.fixture
def called_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of CRIU's parent; this process stands for CRIU."""
    argv: list[str] = []
    monkeypatch.setattr(runtime, "command_line", lambda _pid: argv)
    return argv


def test_bundle_from_the_state_of_runc_and_crun(called_by: list[str], tmp_path: Path) -> None:
    state = tmp_path / ID
    state.mkdir()
    (state / "state.json").write_text(json.dumps({"config": {"labels": ["a=b", "bundle=/some/bundle"]}}))
    (state / "status").write_text(json.dumps({"bundle": "/other/bundle"}))
    for name, bundle in (("runc", "/some/bundle"), ("crun", "/other/bundle")):
        called_by[:] = [name, "--root", str(tmp_path), "checkpoint", ID]
        call = find_runtime_call(os.getpid())
        assert call == RuntimeCall(runtime=name, verb="checkpoint", container_id=ID, bundle=bundle, leave_running=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/usr/bin/runc", "runc"),
        ("runc-1.3", "runc"),
        ("/usr/lib/real/runc.real", "runc"),
        ("/opt/limitless-runc", "runc"),
        ("/usr/libexec/crio/crun", "crun"),
        ("crun_1.28", "crun"),
        ("crun-wasm", "crun"),
        ("ocihook-crun", "crun"),
        ("truncate", ""),
        ("crunch", ""),
        ("runcible", ""),
        ("youki", ""),
        ("", ""),
    ],
)
def test_runtimes_by_the_names_of_their_programs(name: str, expected: str) -> None:
    assert runtime.runtime_named(name) == expected


def test_runtimes_under_any_name(tmp_path: Path) -> None:
    """The content of the program decides, not the name of a link."""
    for kind, mark in (("runc", b"\0github.com/opencontainers/runc/libcontainer\0"), ("crun", b"[libcrun:%s]")):
        program = tmp_path / f"{kind[0]}-oci"
        program.write_bytes(b"\x7fELF" + bytes(5000) + mark)
        assert runtime.runtime_of(program) == kind
    (tmp_path / "runc").symlink_to("crun-2")
    (tmp_path / "crun-2").touch()
    assert runtime.runtime_of(tmp_path / "runc") == "crun"
    (tmp_path / "other").touch()
    assert runtime.runtime_of(tmp_path / "other") == runtime.runtime_of(tmp_path / "gone") == ""


def test_a_process_whose_program_is_a_copy_of_a_runtime(tmp_path: Path) -> None:
    """A wrapper has executed it: neither its name nor its first argument says what it is."""
    program = tmp_path / "oci"
    shutil.copy(Path(sys.executable).resolve(), program)
    with program.open("ab") as file:
        file.write(b"github.com/opencontainers/runc/libcontainer")
    code = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    command = ["wrapped", f"-c{code}", "checkpoint", "--leave-running", ID]
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with subprocess.Popen(command, executable=program, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        criu = int(caller.stdout.readline())
        try:
            call = find_runtime_call(criu)
        finally:
            os.kill(criu, signal.SIGKILL)
    assert call is not None
    assert (call.runtime, call.verb, call.container_id, call.leave_running) == ("runc", "checkpoint", ID, True)


def test_state_that_is_missing_or_broken(called_by: list[str], tmp_path: Path) -> None:
    called_by[:] = ["runc", "--root", str(tmp_path), "checkpoint", ID]
    call = find_runtime_call(os.getpid())
    assert call is not None
    assert call.bundle == ""
    (tmp_path / ID).mkdir()
    for text in ("{", "[]"):
        (tmp_path / ID / "state.json").write_text(text)
        with pytest.raises(IdentificationError, match=r"state.json"):
            find_runtime_call(os.getpid())


@pytest.mark.parametrize("name", ["../../etc", "a/b", ".hidden"])
def test_an_id_is_no_path(called_by: list[str], name: str) -> None:
    called_by[:] = ["runc", "checkpoint", name]
    with pytest.raises(IdentificationError, match="is not a container id"):
        find_runtime_call(os.getpid())


def test_criu_on_its_own_is_not_ours(called_by: list[str]) -> None:
    called_by[:] = ["bash"]
    assert find_runtime_call(os.getpid()) is None


def test_annotations_of_a_bundle(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"annotations": {"a": "b", "c": 1}}))
    assert read_annotations(os.getpid(), str(tmp_path)) == {"a": "b", "c": "1"}
    config.write_text("{}")
    assert read_annotations(os.getpid(), str(tmp_path)) == {}
    assert read_annotations(os.getpid(), "") == {}
    config.unlink()
    with pytest.raises(IdentificationError, match=r"has no config.json"):
        read_annotations(os.getpid(), str(tmp_path))


@pytest.mark.parametrize(
    ("annotations", "engine", "name"),
    [
        ({"io.container.manager": "libpod"}, "podman", ID[:12]),
        ({"io.podman.annotations.autoremove": "FALSE"}, "", ID[:12]),
        # podman's pods have CRI-O's marks of a sandbox, for Kata
        ({"io.container.manager": "libpod", "io.kubernetes.cri-o.SandboxID": ID}, "podman", ID[:12]),
        (
            {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.container-name": "c",
                "io.kubernetes.cri.sandbox-name": "p",
                "io.kubernetes.cri.sandbox-namespace": "n",
            },
            "containerd",
            "n/p/c",
        ),
        (
            {
                "io.container.manager": "cri-o",
                "io.kubernetes.cri-o.ContainerType": "container",
                "io.kubernetes.container.name": "c",
                "io.kubernetes.pod.name": "p",
                "io.kubernetes.pod.namespace": "n",
            },
            "cri-o",
            "n/p/c",
        ),
        ({}, "", ID[:12]),
    ],
)
def test_engines(annotations: dict[str, str], engine: str, name: str) -> None:
    assert engine_of(annotations) == engine
    container = container_ref(annotations, container_id=ID, runtime="runc", bundle="/b")
    assert (container.engine, str(container)) == (engine, name)
    assert ContainerRef.from_json(container.to_json()) == container


CONTAINERD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "c",
    "io.kubernetes.cri.sandbox-name": "p",
    "io.kubernetes.cri.sandbox-namespace": "team",
}
CRIO = {
    "io.container.manager": "cri-o",
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.container.name": "c",
    "io.kubernetes.pod.name": "p",
    "io.kubernetes.pod.namespace": "team",
}
# What a pod, or on CRI-O an archive, can say beside, or in place of, what its engine says. Only what CRI-O writes last,
# the kubelet's labels, and what containerd writes last, its own keys, stays as it is.
FORGED = [
    {"io.podman.annotations.autoremove": "FALSE"},
    {"io.container.manager": "libpod"},
    {"io.container.manager": "cri-o"},
    {"io.container.manager": ""},
    {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.Namespace": "victim"},
    {"io.kubernetes.cri.container-type": "container"},
    {"io.kubernetes.cri.sandbox-namespace": "victim"},
    {"io.kubernetes.cri.sandbox-namespace": ""},
    {"io.kubernetes.pod.namespace": "victim"},
    {"io.kubernetes.pod.namespace": ""},
]


@pytest.mark.parametrize(("engine", "written"), [("containerd", CONTAINERD), ("cri-o", CRIO)])
def test_what_a_pod_says_changes_neither_its_engine_nor_its_namespace(engine: str, written: dict[str, str]) -> None:
    kept = {key: value for key, value in written.items() if key != "io.container.manager"}
    refused = 0
    for size in (1, 2, 3):
        for forgeries in itertools.combinations(FORGED, size):
            annotations = {**written, **{k: v for forged in forgeries for k, v in forged.items()}, **kept}
            is_twofold = {"io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"} <= annotations.keys()
            if is_twofold:
                refused += 1
                with pytest.raises(IdentificationError, match="its owner is ambiguous"):
                    container_ref(annotations, container_id=ID, runtime="runc", bundle="/b")
                assert engine_of(annotations) == ""
                continue
            container = container_ref(annotations, container_id=ID, runtime="runc", bundle="/b")
            assert (container.engine, str(container)) == (engine, "team/p/c")
            assert (container.is_in_pod, domain_name(container)) == (True, "team")
    assert refused


@pytest.mark.parametrize("namespace", ["", "_node", "../x", "Team"])
@pytest.mark.parametrize("key", ["io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"])
def test_a_pod_has_a_namespace(key: str, namespace: str) -> None:
    with pytest.raises(IdentificationError, match="its owner is ambiguous"):
        container_ref({key: namespace}, container_id=ID, runtime="runc", bundle="/b")


def test_a_container_of_cri_o_is_never_the_nodes() -> None:
    container = container_ref({"io.container.manager": "cri-o"}, container_id=ID, runtime="runc", bundle="/b")
    assert container.is_in_pod
    with pytest.raises(IdentificationError, match="a pod whose namespace its engine does not report"):
        domain_name(container)


@pytest.mark.parametrize("value", [None, [], {}, {"id": 1}, {"id": "x", "name": 5}])
def test_what_is_no_container(value: object) -> None:
    with pytest.raises(ValueError, match="container"):
        ContainerRef.from_json(value)


def test_a_bundle_with_text_that_is_not_utf8_is_read_as_runc_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"annotations": {"a": "\xff"}, "process": {"env": ["A=\xfe\xff"]}}')
    assert read_annotations(os.getpid(), str(tmp_path)) == {"a": "\N{REPLACEMENT CHARACTER}"}
