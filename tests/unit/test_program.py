"""Changes of arguments, environment and working directory: of another program, or only of another pod."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.container import spec
from ocihook.container.program import Program, changes_of_program, read_program
from ocihook.container.spec import SpecFacts, spec_facts
from ocihook.errors import NoCheckpoint, ProgramChanged, UnsupportedError
from ocihook.linux.node_names import node_names
from ocihook.runtime.gate import Kind, check_spec, compare
from ocihook.session.record import from_json, to_json

Process = dict[str, Any]
ARGUMENTS = ["python", "train.py", "--epochs=10", "--lr", "0.1"]
ENVIRONMENT = ["PATH=/bin", "SEED=1", "PASSWORD=hunter2"]


def pod(name: str, *, uid: str = "", address: str = "", hosts: Path | None = None, **process: Any) -> SpecFacts:
    """Return a bundle as containerd writes it for a pod."""
    mounts = []
    if hosts is not None:
        hosts.write_text(f"127.0.0.1\tlocalhost\n{address}\t{name}\n")
        mounts = [{"destination": "/etc/hosts", "source": str(hosts), "type": "bind"}]
    config = {
        "hostname": name,
        "process": {"args": ARGUMENTS, "env": ENVIRONMENT, "cwd": "/work", **process},
        "mounts": mounts,
        "annotations": {
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": name,
            "io.kubernetes.cri.sandbox-uid": uid or f"uid-of-{name}",
            "io.kubernetes.cri.sandbox-id": (uid or name).encode().hex().ljust(64, "0")[:64],
        },
    }
    return spec_facts(config, Path("/run/containerd/io.containerd.runtime.v2.task/k8s.io") / ("a" * 64))


def env(*entries: str) -> list[str]:
    return [*ENVIRONMENT, *entries]


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (
            {"args": [*ARGUMENTS[:2], "--epochs=20", *ARGUMENTS[3:]]},
            r"differ \(5\): argument 2 \(--epochs\) is the first",
        ),
        ({"args": [*ARGUMENTS[:4], "0.2"]}, r"arguments differ \(5\): argument 4 is the first"),
        ({"args": ["sh", *ARGUMENTS[1:]]}, r"argument 0 is the first"),
        ({"args": [*ARGUMENTS, "--resume"]}, r"differ \(5 then, 6 now\): argument 5 \(--resume\)"),
        ({"args": ARGUMENTS[:3]}, r"differ \(5 then, 3 now\): argument 3 \(--lr\)"),
        ({"args": [*ARGUMENTS[:2], "--lr", "0.1", "--epochs=10"]}, r"in another order: argument 2 \(--lr\)"),
        ({"args": []}, r"differ \(5 then, 0 now\)"),
        ({"cwd": "/else"}, "the working directory differs"),
        ({"env": env("MORE=1")}, "environment variables that are new: MORE"),
        ({"env": ENVIRONMENT[:2]}, "environment variables that are missing: PASSWORD"),
        ({"env": [*ENVIRONMENT[:2], "PASSWORD=hunter3"]}, "environment variables that are changed: PASSWORD"),
        ({"env": ["PATH=/bin", "SEED=1\nX=2", "PASSWORD=hunter2"]}, "that are changed: SEED"),
        ({"env": env("LORA_RANK=8")}, "that are new: LORA_RANK"),
        ({"env": env("DB_HOSTNAME=b")}, "that are new: DB_HOSTNAME"),
        ({"env": env("APP_PORT=80")}, "that are new: APP_PORT"),
        ({"env": env("EOS_TOKEN=</s>")}, "that are new: EOS_TOKEN"),
        (
            {"env": env("DB_SERVICE_HOST=db.example", "DB_SERVICE_PORT=1")},
            "that are new: DB_SERVICE_HOST, DB_SERVICE_P",
        ),
        ({"env": env("SEED=2")}, "that are changed: SEED"),
    ],
)
def test_another_program_is_named_without_values(process: Process, message: str) -> None:
    then, now = pod("job-abcde"), pod("job-fghij", **process)
    for one, other in ((then, now), (now, then)):
        with pytest.raises(ProgramChanged) as refused:
            check_spec(one, other)
        assert not any(value in str(refused.value) for value in ("hunter", "0.1", "0.2", "train.py", "</s>"))
    with pytest.raises(ProgramChanged, match=message):
        check_spec(then, now)
    assert {one.kind for one in check_spec(then, now, restore_on_change=True)} == {Kind.PROGRAM}
    assert issubclass(ProgramChanged, NoCheckpoint)  # `on-no-checkpoint` decides: it has no checkpoint of this program


SERVICE = [
    "WEB_SERVICE_HOST=10.96.0.7",
    "WEB_SERVICE_PORT=80",
    "WEB_SERVICE_PORT_HTTP=80",
    "WEB_PORT=tcp://10.96.0.7:80",
    "WEB_PORT_80_TCP=tcp://10.96.0.7:80",
    "WEB_PORT_80_TCP_PROTO=tcp",
    "WEB_PORT_80_TCP_PORT=80",
    "WEB_PORT_80_TCP_ADDR=10.96.0.7",
    "WEB_SIX_SERVICE_HOST=fd00::7",
    "KUBERNETES_SERVICE_HOST=10.96.0.1",
]


@pytest.mark.parametrize(
    "entries",
    [
        *(
            [entry]
            for entry in ("HOSTNAME=job-x", "POD_IP=10.1.1.1", "MY_POD_NAME=x", "MY_NODE_NAME=n2", "HOST_IP=1.1.1.1")
        ),
        *(
            [entry]
            for entry in ("JOB_COMPLETION_INDEX=1", "RANK=3", "LOCAL_RANK=0", "OMPI_COMM_WORLD_RANK=1", "PMI_RANK=1")
        ),
        *(
            [entry]
            for entry in ("MASTER_ADDR=10.1.1.4", "MASTER_PORT=29500", "HF_TOKEN=hf_x", "TOKEN=y", "RAY_IP=1.1.1.1")
        ),
        *([entry] for entry in ("NVIDIA_VISIBLE_DEVICES=GPU-0", "PCIDEVICE_INTEL_COM_VF=0000:01", "INVOCATION_ID=f")),
        SERVICE,
    ],
)
def test_what_identifies_a_pod_does_not_count(entries: Sequence[str]) -> None:
    then, now = pod("job-abcde"), pod("job-fghij", env=env(*entries))
    assert compare(then, now) == compare(now, then) == ()
    other = pod("job-fghij", env=env(*(f"{entry}9" for entry in entries)))
    assert compare(now, other) == ()


def test_the_own_names_within_values_do_not_count(tmp_path: Path) -> None:
    """Whatever the variable is called: the kubelet has replaced $(POD_NAME) in arguments, too."""

    def made(name: str, uid: str, address: str) -> SpecFacts:
        words = [*ARGUMENTS, f"--name={name}", f"--listen={address}:80", f"http://{name}.svc/{uid}"]
        return pod(
            name,
            uid=uid,
            address=address,
            hosts=tmp_path / "hosts",
            args=words,
            env=env(f"SELF={address}", f"ID={uid}"),
            cwd=f"/srv/{name}",
        )

    then, now = made("job-abcde", "0b1c-1", "10.1.0.5"), made("job-fghij", "0b1c-2", "10.1.0.50")
    assert compare(then, now) == ()
    other = made("job-fghij", "0b1c-2", "10.1.0.50")
    assert other == now
    peers = [pod("job-abcde", args=[f"--peer={peer}"]) for peer in ("job-0", "job-1")]
    assert {one.kind for one in compare(*peers)} == {Kind.PROGRAM}


def test_the_names_of_the_node_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the downward API gives them to an agent's client, under any variable."""

    def made(node: str, address: str) -> SpecFacts:
        monkeypatch.setattr(spec, "node_names", lambda: {node, address})
        return pod(
            "job-abcde", args=[f"--node={node}"], env=env(f"DD_AGENT_HOST={address}", f"OTEL=http://{address}:4317")
        )

    then, now = made("n1", "10.0.0.1"), made("n2", "10.0.0.2")
    assert compare(then, now) == ()
    monkeypatch.setattr(spec, "node_names", set)
    other = pod("job-abcde", args=["--node=n3"], env=env("DD_AGENT_HOST=10.0.0.1", "OTEL=http://10.0.0.1:4317"))
    assert [one.what for one in compare(then, other)] == [
        "arguments differ (1): argument 0 (--node) is the first that differs"
    ]


def test_the_node_has_names() -> None:
    found = node_names()
    assert os.uname().nodename in found | {"localhost"}
    assert not found & {"127.0.0.1", "::1", "localhost"}
    listed = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True, timeout=30).stdout
    addresses = {line.split()[3].partition("/")[0] for line in listed.splitlines() if " lo " not in line}
    assert addresses <= found


def test_a_host_name_that_is_also_an_argument_stays_one() -> None:
    """Only the value with the own names replaced differs then, and one of the two is enough."""
    assert compare(pod("python"), pod("web-1")) == ()


def test_the_rights_are_named_with_the_program() -> None:
    then, now = pod("a"), pod("a", args=["x"], user={"uid": 5})
    with pytest.raises(ProgramChanged, match=r"argument 0.*; user was"):
        check_spec(then, now)
    with pytest.raises(UnsupportedError, match="user was"):
        check_spec(then, now, restore_on_change=True)


def test_a_record_without_a_program_is_compared_as_far_as_it_goes() -> None:
    then = from_json(SpecFacts, to_json(pod("a"))[:7])
    assert then.program is None
    assert compare(then, pod("a", args=["x"])) == ()


@pytest.mark.parametrize(
    "process",
    [
        {"env": [f"V{number}={'x' * 200}" for number in range(20_000)]},
        {"env": [f"{chr(0x1F600) * 2000}{number}=1" for number in range(2000)]},
        {"args": ["-" + "x" * 100_000] * 3000},
        {"env": ["\ud800=1", "NO_EQUALS", "=", "A=\udcff"]},
    ],
)
def test_the_record_of_anything_is_small_and_notices_a_change(process: Process) -> None:
    facts = pod("a", **process)
    text = json.dumps(to_json(facts))
    assert len(text.encode()) < 512 << 10
    assert from_json(SpecFacts, json.loads(text)) == facts
    changed: Process = {name: [*words, "Z=1"] for name, words in process.items()}
    with pytest.raises(ProgramChanged) as refused:
        check_spec(facts, pod("a", **changed))
    str(refused.value).encode()


@pytest.mark.parametrize("process", [{}, {"args": None, "env": None}, {"args": [], "env": [], "cwd": ""}])
def test_a_process_without_a_program(process: Process) -> None:
    facts = [spec_facts({"process": process}, Path("/b")), spec_facts({}, Path("/b"))]
    assert compare(*facts) == ()


@pytest.mark.parametrize("process", [{"args": 3}, {"env": 5}])
def test_a_malformed_program_is_an_error(process: Process) -> None:
    with pytest.raises(UnsupportedError, match="not one that a runtime accepts"):
        spec_facts({"process": process}, Path("/b"))


TEXTS = st.text(st.sampled_from("ab=-\n\x00é\ud800"), max_size=4)
PROCESSES = st.fixed_dictionaries(
    {"args": st.lists(TEXTS, max_size=4), "env": st.lists(TEXTS, max_size=4), "cwd": TEXTS}
)
OWN = st.lists(st.sampled_from(["a", "ab", "é"]), unique=True)


def changes(then: Program, now: Program) -> list[str]:
    return list(changes_of_program(then, now))


@given(PROCESSES, OWN, OWN)
def test_the_same_process_is_the_same_program_for_any_pod(process: Process, one: list[str], two: list[str]) -> None:
    assert changes(read_program(process, one), read_program(process, two)) == []


@given(PROCESSES, PROCESSES, OWN)
def test_a_difference_is_one_in_both_directions(one: Process, two: Process, own: list[str]) -> None:
    programs = [read_program(process, own) for process in (one, two)]
    assert bool(changes(*programs)) == bool(changes(*reversed(programs)))


@given(PROCESSES, PROCESSES)
def test_without_own_names_every_change_of_arguments_is_seen(one: Process, two: Process) -> None:
    programs = [read_program(process, ()) for process in (one, two)]
    if one["args"] != two["args"] or one["cwd"] != two["cwd"]:
        assert changes(*programs)
