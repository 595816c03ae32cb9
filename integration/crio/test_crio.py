"""CRI-O, as the kubelet uses it: what it passes on to the runtime, what it restores, and what its errors say."""

import re
import tarfile
from collections.abc import Callable

import grpc
import pytest

from integration.crio.engine import Crio
from integration.criu.mount_behind import mount_behind
from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import assert_packed, image_names
from integration.registry import DockerRegistry


@pytest.mark.parametrize(("runtime", "source"), [("runc", "archive"), ("crun", "registry")])
def test_round_trip(crio: Crio, make_registry: Callable[..., DockerRegistry], runtime: str, source: str) -> None:
    assert re.search(r"^ok +engine crio +\d", crio.ocihook("doctor"), re.MULTILINE)
    container = crio.start("c1", runtime=runtime)
    assert "A checkpoint of this container will work here" in crio.ocihook("doctor", "--container", container)
    archive = crio.checkpoint(container, "c1.tar")
    crio.assert_counts(container)
    before = crio.count(container)
    crio.remove(container)
    assert_packed(archive)
    dump = last_session(crio.namespace, "post-dump")["container"]
    assert (dump["engine"], dump["runtime"]) == ("cri-o", runtime)
    assert (dump["pod_namespace"], dump["pod_name"], dump["name"]) == ("default", "c1", "c1")
    assert "default/c1/c1" in crio.ocihook("archive", "list", "/scratch/c1.tar")
    assert "every checksum right" in crio.ocihook("archive", "verify", "/scratch/c1.tar")

    image = "/scratch/c1.tar"
    if source == "registry":
        image = f"{make_registry().address}/team/job:1"
        crio.pull_from(image.partition("/")[0])
        crio.ocihook("image", "push", "/scratch/c1.tar", image, "--plain-http")
    restored = crio.start("c2", image=image, runtime=runtime)
    wait_for("the workload to go on", lambda: crio.count(restored)[0] > 2)
    assert crio.count(restored)[1] == before[1]
    restore = last_session(crio.namespace, "pre-restore")
    assert restore["stages"]["pre-restore"]["status"] == 0
    assert restore["effects"] == []


def test_annotations_of_a_pod_are_passed(crio: Crio) -> None:
    """To the store, and the application asked before and told after: all by the pod's annotations alone."""
    container = crio.start("c1", mode="store", quiesce_signal="USR1", resume_signal="USR2")
    archive = crio.checkpoint(container, "c1.tar")
    assert "ocihook.thin" in image_names(archive)
    assert not any(name.startswith(("pages-", "ocihook-")) for name in image_names(archive))
    wait_for("the application to be told to go on", lambda: "resumed" in crio.log(container))
    assert "quiesced" in crio.log(container)
    before = crio.count(container)
    crio.remove(container)
    restored = crio.start("c2", image="/scratch/c1.tar")
    wait_for("the workload to go on", lambda: crio.count(restored)[0] > 2)
    assert crio.count(restored)[1] == before[1]


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_the_cause_is_in_the_error(crio: Crio, runtime: str) -> None:
    container = crio.start("c1", runtime=runtime)
    mount_behind(crio.init_pid(container), crio.scratch / "nvidia", "/tmp")
    with pytest.raises(grpc.RpcError, match="ocihook: the dump of container default/c1/c1 failed: /tmp was mounted"):
        crio.checkpoint(container, "c1.tar")
    crio.assert_counts(container)
    refused = crio.start("c2", runtime=runtime, mode="inlien")
    with pytest.raises(grpc.RpcError, match=r"ocihook: pre-dump of container default/c2/c2: .* mode must be one of"):
        crio.checkpoint(refused, "c2.tar")
    crio.assert_counts(refused)


def test_a_damaged_checkpoint_is_refused_in_the_error(crio: Crio) -> None:
    container = crio.start("c1")
    archive = crio.checkpoint(container, "c1.tar")
    crio.remove(container)
    with tarfile.open(archive) as tar:
        pack = max((m for m in tar if m.name.endswith(".pack")), key=lambda member: member.size)
    with archive.open("r+b") as file:
        file.seek(pack.offset_data + pack.size // 2)
        file.write(b"damaged")
    with pytest.raises(grpc.RpcError, match=r"ocihook: pre-restore of container default/c2/c2: pack .* is damaged"):
        crio.start("c2", image="/scratch/c1.tar")
