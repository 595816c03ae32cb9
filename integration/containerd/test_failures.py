"""What containerd's own error, and with it the kubelet's answer, says of a dump that fails."""

import grpc
import pytest

from integration.containerd.engine import Containerd
from integration.cri.engine import POD_NETWORK
from integration.criu.mount_behind import mount_behind


def test_the_cause_is_in_the_error(containerd: Containerd) -> None:
    """Of what a runtime says containerd shows the first line."""
    for runtime in ("runc", "crun"):
        container = containerd.start(runtime, runtime=runtime, network=POD_NETWORK)
        mount_behind(containerd.init_pid(container), containerd.scratch / "nvidia", "/tmp")
        cause = f"exit status 1: ocihook: the dump of container default/{runtime}/{runtime} failed: /tmp was mounted"
        with pytest.raises(grpc.RpcError, match=cause):
            containerd.checkpoint(container, "c.tar")
        containerd.assert_counts(container)
