"""containerd's CRI, as the kubelet uses it: CheckpointContainer, restore from the archive and from an image."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from integration.containerd.conftest import MakeContainerd
from integration.containerd.engine import Containerd
from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.engine import NOTES, assert_packed, image_names
from integration.registry import DockerRegistry
from ocihook.criu.conf import action_scripts


@pytest.mark.parametrize("source", ["archive", "registry", "layout"])
def test_round_trip(containerd: Containerd, make_registry: Callable[..., DockerRegistry], source: str) -> None:
    container = containerd.start("c1")
    archive = containerd.checkpoint(container, "c1.tar")
    assert containerd.is_running(container)
    containerd.assert_counts(container)
    before = containerd.count(container)
    containerd.remove(container)
    assert_packed(archive)
    dump = last_session(containerd.namespace, "post-dump")["container"]
    assert (dump["engine"], dump["runtime"]) == ("containerd", "runc")
    assert (dump["pod_namespace"], dump["pod_name"], dump["name"]) == ("default", "c1", "c1")

    image = "/scratch/c1.tar"
    if source == "registry":
        image = f"{make_registry().address}/team/job:1"
        containerd.pull_from(image.partition("/")[0])
        containerd.ocihook("image", "push", "/scratch/c1.tar", image, "--plain-http")
    elif source == "layout":
        image = "example.org/team/job:1"
        containerd.ocihook("image", "build", "/scratch/c1.tar", "/scratch/i.tar", "--oci-archive", "--name", image)
        containerd.namespace.run(
            "ctr", "-a", "/run/containerd.sock", "-n", "k8s.io", "images", "import", "/scratch/i.tar"
        )
    restored = containerd.start("c2", image=image, pull=source == "registry")
    wait_for("the workload to go on", lambda: containerd.count(restored)[0] > 2)
    assert containerd.count(restored)[1] == before[1]
    assert containerd.is_running(restored)
    restore = last_session(containerd.namespace, "pre-restore")
    assert restore["stages"]["pre-restore"]["status"] == 0
    assert restore["effects"] == []


def test_store(containerd: Containerd) -> None:
    """What the kubelet asks for twice: the job continues, the second archive costs little, in store and out."""
    containerd.configure('[policy]\nmode = "store"\n[agent]\nidle_timeout_s = 2\nstore_dir = "/scratch/store"\n')
    container = containerd.start("c1")
    archives = []
    for name in ("first.tar", "second.tar"):
        archives.append(containerd.checkpoint(container, name))
        containerd.assert_counts(container)
    before = containerd.count(container)
    containerd.remove(container)
    for archive in archives:
        assert "ocihook.thin" in image_names(archive)
        assert not any(name.startswith(("pages-", "ocihook-")) for name in image_names(archive) - NOTES)
    containerd.ocihook("wait")
    first, second = json.loads(containerd.ocihook("store", "list", "--json"))["checkpoints"]
    assert first["domain"] == second["domain"] == "default"
    assert second["added_bytes"] < first["added_bytes"] / 20
    for name in ("first", "second"):
        restored = containerd.start(name, image=f"/scratch/{name}.tar")
        wait_for("the workload to go on", lambda restored=restored: containerd.count(restored)[0] > 2)  # type: ignore[misc]
        assert containerd.count(restored)[1] == before[1]
    assert "every byte right" in containerd.ocihook("store", "verify", "--read-data")


def test_a_pod_of_another_namespace_gets_nothing_unless_a_rule_allows_it(containerd: Containerd) -> None:
    settings = '[policy]\nmode = "store"\n[agent]\nidle_timeout_s = 2\nstore_dir = "/scratch/store"\n'
    containerd.configure(settings)
    container = containerd.start("c1")
    containerd.checkpoint(container, "c1.tar")
    before = containerd.count(container)
    containerd.remove(container)
    containerd.ocihook("wait")
    with pytest.raises(grpc.RpcError):
        containerd.start("c2", image="/scratch/c1.tar", namespace="other")
    restore = last_session(containerd.namespace, "pre-restore")
    message = restore["stages"]["pre-restore"]["message"]
    assert "the checkpoint is in domain default of the store, the container's own is other" in message
    assert message.endswith("The restore is refused, nothing was started")
    assert restore["effects"] == []

    containerd.configure(settings + '[restore_from]\nother = ["default"]\n')
    restored = containerd.start("c3", image="/scratch/c1.tar", namespace="other")
    wait_for("the workload to go on", lambda: containerd.count(restored)[0] > 2)
    assert containerd.count(restored)[1] == before[1]


@pytest.mark.parametrize("conf", ["runc.conf", "crun.conf"])
def test_crun_of_today_reads_a_configuration_of_its_own(make_containerd: MakeContainerd, conf: str) -> None:
    """It reads crun.conf if there is one, else runc.conf; `install` knows, and default.conf names no script."""
    containerd = make_containerd()
    directory = containerd.namespace.path("/etc/criu")
    (directory / conf).touch()
    containerd.install()
    assert action_scripts((directory / conf).read_bytes())
    assert not action_scripts((directory / "default.conf").read_bytes())
    doctor = containerd.ocihook("doctor")
    assert "A checkpoint will work here" in doctor
    assert "pod_annotations" not in doctor
    container = containerd.start("c1", runtime="crun")
    archive = containerd.checkpoint(container, "c1.tar")
    containerd.assert_counts(container)
    assert_packed(archive)
    assert last_session(containerd.namespace, "post-dump")["container"]["runtime"] == "crun"
    assert "every checksum right" in containerd.ocihook("archive", "verify", "/scratch/c1.tar")


def test_two_checkpoints_at_once_do_not_meet(containerd: Containerd) -> None:
    containers = [containerd.start(name, mib=48) for name in ("a", "b")]
    with ThreadPoolExecutor() as pool:
        archives = list(pool.map(containerd.checkpoint, containers, ["a.tar", "b.tar"]))
    before = [containerd.count(container) for container in containers]
    assert before[0][1] != before[1][1]
    assert len({tuple(session["criu"]) for session in sessions(containerd.namespace)}) == 2
    for archive, container in zip(archives, containers, strict=True):
        assert_packed(archive)
        containerd.remove(container)
    for name, (_, checksum) in zip(("a", "b"), before, strict=True):
        restored = containerd.start(f"{name}2", image=f"/scratch/{name}.tar")
        wait_for("the workload to go on", lambda restored=restored: containerd.count(restored)[0] > 2)  # type: ignore[misc]
        assert containerd.count(restored)[1] == checksum


# Records the freezer's state and the ack file before and after our script, whose place in the file decides the order.
_PROBE = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-dump ] || exit 0
path=$(sed -n 's/^0:://p' /proc/$CRTOOLS_INIT_PID/cgroup)
v2=$(sed -n 's/^frozen //p' /sys/fs/cgroup$path/cgroup.events 2>/dev/null)
path=$(sed -n 's/^[0-9]*:freezer://p' /proc/$CRTOOLS_INIT_PID/cgroup)
v1=$(cat /sys/fs/cgroup/freezer$path/freezer.state 2>/dev/null)
[ -e /proc/$CRTOOLS_INIT_PID/root/run/ocihook-quiesced ] && ack=yes || ack=no
case "$v2$v1" in *1* | *FROZEN*) frozen=yes ;; *) frozen=no ;; esac
echo "$(basename $0) frozen=$frozen ack=$ack" >> /run/probe.log
"""


@pytest.mark.parametrize("cgroup_version", [2, 1])
def test_a_frozen_container_answers_in_pre_dump(make_containerd: MakeContainerd, cgroup_version: int) -> None:
    """containerd freezes it; we thaw it, it answers, it is frozen again for CRIU, and continues afterwards."""
    containerd = make_containerd(cgroup_version=cgroup_version)
    containerd.install()
    for name in ("before", "after"):
        probe = containerd.namespace.path(f"/usr/local/bin/{name}")
        probe.write_text(_PROBE)
        probe.chmod(0o755)
    conf = containerd.namespace.path("/etc/criu/runc.conf")
    # CRIU runs the script that is named last first.
    conf.write_text(f"action-script /usr/local/bin/after\n{conf.read_text()}action-script /usr/local/bin/before\n")

    container = containerd.start("c1", quiesce_signal="USR1", resume_signal="USR2")
    archive = containerd.checkpoint(container, "c1.tar")
    assert_packed(archive)
    probes = containerd.namespace.path("/run/probe.log").read_text().splitlines()
    assert probes == ["before frozen=yes ack=no", "after frozen=yes ack=yes"]
    wait_for("the application to be told to go on", lambda: "resumed" in containerd.log(container))
    containerd.assert_counts(container)
    dump = last_session(containerd.namespace, "pre-dump")
    assert dump["effects"] == []
