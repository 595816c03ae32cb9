"""The cause of a failed dump or restore in containerd's own error, and with it in the kubelet's answer and events."""

import tarfile

import grpc
import pytest

from integration.containerd.engine import Containerd
from integration.cri.engine import POD_NETWORK
from integration.criu.mount_behind import mount_behind


def test_the_cause_is_in_the_error(containerd: Containerd) -> None:
    """Of what a runtime says containerd shows the first line."""
    containerd.configure('[policy]\npreflight = "warn"\n[agent]\nidle_timeout_s = 2\n')
    for runtime in ("runc", "crun"):
        container = containerd.start(runtime, runtime=runtime, network=POD_NETWORK)
        mount_behind(containerd.init_pid(container), containerd.scratch / "nvidia", "/tmp")
        cause = f"exit status 1: ocihook: the dump of container default/{runtime}/{runtime} failed: /tmp was mounted"
        with pytest.raises(grpc.RpcError, match=cause):
            containerd.checkpoint(container, "c.tar")
        containerd.assert_counts(container)


def test_a_refusal_is_in_the_error(containerd: Containerd) -> None:
    container = containerd.start("c", network=POD_NETWORK)
    mount_behind(containerd.init_pid(container), containerd.scratch / "nvidia", "/tmp")
    cause = r"exit status 1: ocihook: pre-dump of container default/c/c: /tmp was mounted .*: nsenter -t"
    with pytest.raises(grpc.RpcError, match=cause):
        containerd.checkpoint(container, "c.tar")
    containerd.assert_counts(container)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_the_cause_of_a_failed_restore_is_in_the_error(containerd: Containerd, runtime: str) -> None:
    """containerd shows the last error of the runtime's log."""
    containerd.configure('[policy]\nmode = "off"\n[agent]\nidle_timeout_s = 2\n')  # CRIU finds out, not ocihook
    container = containerd.start("c1", runtime=runtime)
    archive = containerd.checkpoint(container, "c1.tar")
    containerd.remove(container)
    with tarfile.open(archive) as source, tarfile.open(archive.with_name("c2.tar"), "w") as target:
        for member in source:
            if member.name != "checkpoint/core-1.img":
                target.addfile(member, source.extractfile(member))
    with pytest.raises(grpc.RpcError, match=r"ocihook: the restore of .* failed: an image of the checkpoint is"):
        containerd.start("c2", runtime=runtime, image="/scratch/c2.tar")
