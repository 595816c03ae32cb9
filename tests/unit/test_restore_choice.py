"""Whether a new container continues from a checkpoint, and from which: decisions alone."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ocihook.checkpoints import pulling
from ocihook.checkpoints.pending import Job, claimed, directory_of, write_job
from ocihook.checkpoints.remote_listing import RemoteCheckpoints
from ocihook.config import Settings
from ocihook.container.spec import spec_facts
from ocihook.errors import (
    AdmissionError,
    ConfigError,
    NoCheckpoint,
    OcihookError,
    RemoteError,
    StoreError,
    UnsupportedError,
)
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process, command_line, descendants
from ocihook.model import ContainerRef
from ocihook.runtime import cgroups, choice
from ocihook.runtime.call import Call
from ocihook.runtime.choice import Known, choose, domains_of, fetch, newest
from ocihook.runtime.containers import Kept
from ocihook.runtime.create import read_policy
from ocihook.runtime.gate import check_spec
from ocihook.runtime.left_behind import is_restart
from ocihook.runtime.restoring import lsm_profile, restore_words
from ocihook.store.lineage import has_identity, lineage
from ocihook.store.store import Store
from ocihook.store.thin import Thin

ID = "20261123T120000Z-0123abcd"


def pod(name: str, uid: str = "u1", member: str = "") -> ContainerRef:
    return ContainerRef(id=name, name="main", pod_name=name, pod_namespace="team", pod_uid=uid, member=member)


def test_the_newest_of_the_member_counts() -> None:
    known = [
        Known("a", pod("train-0-abcde".replace("abcde", "bcdfg")), "2026-11-23T12:00:00Z"),
        Known("b", pod("train-0-xyzzz".replace("xyzzz", "zzxww")), "2026-11-23T12:00:01Z"),
        Known("c", pod("train-1-bcdfg"), "2026-11-23T12:00:02Z"),
    ]
    assert newest(known, lineage(pod("train-0-vvvvv"))) == known[1]
    assert newest(known, lineage(pod("train-2-vvvvv"))) is None
    again = [known[1]._replace(id=name, sequence=number) for name, number in (("z", 1), ("y", 3), ("x", 2))]
    assert newest(again, lineage(pod("train-0-vvvvv"))) == again[1], "of one second the last that was made"


def test_a_member_may_be_named() -> None:
    assert lineage(pod("anything", member="rank-3")) == lineage(pod("other", member="rank-3"))
    assert lineage(pod("anything", member="rank-3")) != lineage(pod("other", member="rank-4"))
    one = ContainerRef(id="1", engine="podman", name="x", member="m")
    assert lineage(one) == lineage(ContainerRef(id="2", engine="podman", name="y", member="m")) == "m"


def test_replicas_of_a_deployment_have_no_identity() -> None:
    assert not has_identity(pod("web-5d78c9869d-bcdfg"))
    assert has_identity(pod("web-5d78c9869d-bcdfg", member="web")), "unless its owner names one"
    assert has_identity(pod("train-0-bcdfg"))
    assert has_identity(pod("db-0"))
    assert has_identity(ContainerRef(id="1", name="job"))


def test_only_what_is_made_again_is_restored() -> None:
    assert is_restart(pod("a", "u1"), pod("a", "u1"))
    assert not is_restart(pod("a", "u2"), pod("b", "u1"))
    assert is_restart(ContainerRef(id="1"), ContainerRef(id="1"))
    assert not is_restart(ContainerRef(id="1"), ContainerRef(id="2"))


def test_whose_checkpoints_a_container_may_have() -> None:
    rules: dict[str, tuple[str, ...]] = {"b": ("a",), "c": ("*",)}
    settings = Settings(restore_from=rules)
    assert domains_of("a", ["a", "b", "c"], settings) == ["a"]
    assert domains_of("b", ["a", "b", "c"], settings) == ["b", "a"]
    assert domains_of("c", ["a", "b", "c"], settings) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("restore-from", "../../etc", "restore_from must be the id of a checkpoint.*or 'latest', not '../../etc'"),
        ("restore-from", f"{ID}/..", "must be the id"),
        ("restore-from", "newest", "must be the id"),
        ("member", "a b", "member must be up to 63 letters, digits"),
        ("member", "a/b", "member must be"),
        ("checkpoint-on-stop", "yes", "checkpoint_on_stop must be true or false, not 'yes'"),
        ("on-restore-error", "retry", "must be one of 'start', 'fail'"),
        ("mode", "shop", "mode must be one of"),  # not the handler's own: else the first dump would report it
    ],
)
def test_a_wrong_annotation_is_an_error_that_names_it(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"annotation ocihook.io/{key}: .*{message}"):
        read_policy(Settings(), {f"ocihook.io/{key}": value}, in_pod=True)


def test_annotations_say_what_is_wanted() -> None:
    notes = {"ocihook.io/restore-from": ID, "ocihook.io/checkpoint-on-stop": "true", "ocihook.io/mode": "off"}
    policy = read_policy(Settings(), notes, in_pod=True)
    assert (policy.restore_from, policy.checkpoint_on_stop, policy.restore_on_restart) == (ID, True, False)
    with pytest.raises(AdmissionError, match="may not set"):
        read_policy(Settings(allowed={**Settings().allowed, "restore_from": False}), notes, in_pod=True)


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "process": {"user": {"uid": 1, "gid": 2, "additionalGids": [3]}, "terminal": False},
        "mounts": [{"destination": "/proc"}, {"destination": "/data/", "source": "/x"}],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "network", "path": "/n"}], "devices": [{"path": "/dev/x"}]},
        "annotations": {"io.kubernetes.cri.image-name": "a@sha256:1"},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": {"io.kubernetes.cri.image-name": "b"}}, "image was 'a@sha256:1', is 'b'"),
        ({"process": {"user": {"uid": 0, "gid": 2}}}, "user was '1:2:3', is '0:2'"),
        ({"mounts": [{"destination": "/proc"}]}, "mounts that are missing: /data"),
        ({"mounts": [*spec()["mounts"], {"destination": "/new"}]}, "mounts that are new: /new"),
        ({"linux": {"devices": [{"path": "/dev/x"}]}}, "namespaces that are missing: network, pid"),
        ({"linux": {**spec()["linux"], "devices": []}}, "devices that are missing: /dev/x"),
        ({"process": {**spec()["process"], "terminal": True}}, "terminal was False, is True"),
    ],
)
def test_the_gate_names_what_has_changed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    then = spec_facts(spec(), tmp_path)
    check_spec(then, spec_facts(spec(), tmp_path / "elsewhere"))
    with pytest.raises(UnsupportedError, match=message):
        check_spec(then, spec_facts(spec(**changes), tmp_path))


def test_the_image_of_podman_is_in_its_storage(tmp_path: Path) -> None:
    bundle = tmp_path / "overlay-containers" / ("a" * 64) / "userdata"
    (tmp_path / "overlay-containers").mkdir()
    (tmp_path / "overlay-containers/containers.json").write_text(f'[{{"id": "{"a" * 64}", "image": "i1"}}]')
    assert spec_facts(spec(annotations={}), bundle).image == "i1"
    assert spec_facts(spec(annotations={}), bundle.parent / "userdata" / "x").image == ""


@pytest.mark.parametrize("broken", [{"mounts": [{}]}, {"mounts": 3}, {"process": [1]}, {"linux": "x"}])
def test_an_invalid_config_is_an_error(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json is not one that a runtime accepts"):
        spec_facts({**spec(), **broken}, tmp_path)


def test_what_a_runtime_is_asked_for() -> None:
    words = ["create", "--bundle", "/b", "--pid-file", "/p", "--console-socket", "/c", "--no-pivot", "id"]
    places = Path("/i"), Path("/w")
    asked = restore_words(Call.parse(Path("/usr/sbin/runc"), words), {"linux": {"mountLabel": "l2"}}, *places, "lsm:p")
    assert asked == [
        *("restore", "--detach", "--tcp-established", "--file-locks"),
        *("--image-path", "/i", "--work-path", "/w", "--bundle", "/b"),
        *("--pid-file", "/p", "--console-socket", "/c", "--no-subreaper"),
        *("--lsm-profile", "lsm:p", "--lsm-mount-context", "l2", "id"),
    ]
    assert "--no-subreaper" not in restore_words(Call.parse(Path("crun"), words), {}, *places, "")


@pytest.mark.parametrize(
    ("then", "now", "asked"),
    [
        ({}, {}, ""),
        ({"apparmorProfile": "a"}, {"apparmorProfile": "a"}, ""),  # a process may have changed its own
        ({"apparmorProfile": "a"}, {"apparmorProfile": "b"}, "apparmor:b"),
        ({"apparmorProfile": "a"}, {"apparmorProfile": "unconfined"}, ""),  # it keeps the narrower one
        ({"selinuxLabel": "u:r:t:s0:c1"}, {"selinuxLabel": "u:r:t:s0:c2"}, "selinux:u:r:t:s0:c2"),
        ({"selinuxLabel": "u:r:t:s0"}, {"selinuxLabel": "u:r:t:s0"}, "selinux:u:r:t:s0"),
        ({"selinuxLabel": "u:r:t:s0"}, {}, ""),
    ],
)
def test_what_confines_the_restored_processes(then: dict[str, str], now: dict[str, str], asked: str) -> None:
    rights = [spec_facts({"process": process}, Path("/b")).rights for process in (then, now)]
    assert rights[0] is not None
    assert rights[1] is not None
    assert lsm_profile(rights[0], rights[1]) == asked


def test_processes_are_brought_into_the_container_s_own_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that has ended and is not waited for is in no cgroup, and asks for none."""
    words = "sleep 1000 & sleep 1000 & sleep 0 & exec sleep 1000"
    with subprocess.Popen(["sh", "-c", words], start_new_session=True) as running:
        try:
            assert Patience(timeout_s=60).until(lambda: command_line(running.pid)[:1] == ["sleep"])
            assert Patience(timeout_s=60).until(lambda: len(_alive(running)) == 3)
            _bring(Process(running.pid, 0), _alive(running), tmp_path, monkeypatch)
        finally:
            os.killpg(running.pid, signal.SIGKILL)


def _alive(running: "subprocess.Popen[bytes]") -> list[int]:
    return [pid for pid in descendants(running.pid) if Process.find(pid)]


def _bring(init: Process, alive: list[int], cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(descendants(init.pid)) == 4
    (cgroup / "below").mkdir()
    procs, below = cgroup / "cgroup.procs", cgroup / "below/cgroup.procs"
    procs.write_text(f"{alive[0]}\n")
    below.write_text(f"{alive[1]}\n")
    written: list[str] = []

    def write(path: Path, text: str) -> None:
        written.append(text)
        with path.open("a") as file:
            file.write(f"{text}\n")

    monkeypatch.setattr(Path, "write_text", write)
    assert cgroups.mend(init, [cgroup]) == 1
    assert written == [str(alive[2])]
    monkeypatch.setattr(Path, "write_text", lambda *_: None)  # as if it left at once, each time
    procs.write_bytes(b"")
    with pytest.raises(OcihookError, match="keep leaving its cgroups"):
        cgroups.mend(init, [cgroup])


def here(tmp_path: Path) -> Kept:
    return Kept(container=pod("train-0"), bundle=tmp_path, program=tmp_path, prefix=(), domain="team")


def test_a_remote_that_does_not_answer_is_waited_for_no_longer_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    settings = Settings(store_dir=str(tmp_path / "store"), remote=str(tmp_path / "remote"))
    policy = read_policy(settings, {"ocihook.io/restore-from": "latest"}, in_pod=False)
    with pytest.raises(NoCheckpoint, match="nor at"):
        choose(here(tmp_path), policy, settings, ENDLESS)
    monkeypatch.setattr(choice, "REMOTE_S", 0.2)
    monkeypatch.setattr(RemoteCheckpoints, "all", lambda _: time.sleep(1000))
    with pytest.raises(RemoteError, match=r"has not said in 0.2 s which checkpoints it has"):
        choose(here(tmp_path), policy, settings, ENDLESS)


def test_a_pull_is_waited_for_as_long_as_something_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(store_dir=str(tmp_path / "store"), remote="/remote")
    arrived = tmp_path / "arrived"

    def send(_store: object, _domain: str, _id: str, _remote: str, *, progress: Callable[[int], None]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 10 * choice.STALL_S)
        progress(1)
        if 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= choice.STALL_S:  # it begins again with what arrives
            arrived.touch()
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(pulling, "pull", send)
    with pytest.raises(RemoteError, match=rf"/remote has sent nothing of checkpoint {ID} for 90 s"):
        fetch(Thin("team", ID), settings, ENDLESS)
    assert arrived.exists()


def test_a_checkpoint_that_another_process_stores_is_waited_for_no_longer_than_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(store_dir=str(tmp_path / "store"))
    domain = Store.of(settings).open("team", create=True)
    pending = directory_of(domain, ID)
    pending.mkdir()
    write_job(
        domain,
        Job(id=ID, created="", container=pod("a"), host={}, images={}, sizes={}, other_images=(), boot_id=""),
        durable=False,
    )
    monkeypatch.setattr(choice, "COMPLETE_S", 0.2)
    with claimed(pending), pytest.raises(StoreError, match=f"checkpoint {ID} is not complete yet"):
        fetch(Thin("team", ID), settings, ENDLESS)
