"""Pods of one job on a node with containerd, each in a network of its own, linked with one another."""

from pathlib import Path

from integration.containerd.engine import Containerd
from integration.cri.crictl import Crictl
from integration.cri.engine import POD_NETWORK
from integration.net.traffic import assert_flows

_CONNECTION = "7"
# A plugin of CNI: the pod's link leads to a bridge in a namespace of its own, and addresses are never used again.
_LINK = """#!/bin/sh -e
case "$CNI_COMMAND" in
    VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
    ADD)
        exec 9> /run/bridge.lock
        flock 9
        bridge="nsenter --net=/run/bridge ip"
        if [ ! -e /run/bridge ]; then
            touch /run/bridge
            unshare --net=/run/bridge true
            $bridge link add br0 type bridge
            $bridge link set br0 up
        fi
        number=$(($(cat /run/bridge.last 2>/dev/null || echo 1) + 1))
        echo $number > /run/bridge.last
        pod="nsenter --net=$CNI_NETNS ip"
        $bridge link add "pod$number" type veth peer name "$CNI_IFNAME" netns "$CNI_NETNS"
        $bridge link set "pod$number" master br0 up
        $pod address add "10.88.0.$number/24" dev "$CNI_IFNAME"
        $pod link set "$CNI_IFNAME" up
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],'
        echo ' "ips": [{"address": "10.88.0.'$number'/24", "interface": 0}]}' ;;
esac
"""


class Pair:
    """Two pods of a gang, with a connection between them."""

    names = ("first", "second")

    def __init__(self, node: Containerd) -> None:
        """Start them, and wait for traffic."""
        self.node, self.crictl = node, Crictl(node)
        node.write("/usr/lib/cni/no-link", _LINK)
        node.mounts = ({"container_path": "/said", "host_path": "/scratch/said"},)
        node.namespace.path("/scratch/said").mkdir()
        node.configure("[agent]\nidle_timeout_s = 2\n[policy]\ngang_timeout_s = 110\n")
        addresses = [f"10.88.0.{2 + number}/7000" for number in range(2)]
        self.containers = [
            node.start(
                name,
                arguments=["member", "-o", f"/said/{name}", "-r", "1", "-k", _CONNECTION, own, *addresses[:number]],
                network=POD_NETWORK,
                gang="job",
                gang_size="2",
            )
            for number, (name, own) in enumerate(zip(self.names, addresses, strict=True))
        ]
        self.assert_flows()

    def said(self, name: str) -> str:
        """Return what a member says of its connection."""
        path = self.node.scratch / "said" / name
        return path.read_text() if path.exists() else ""

    def assert_flows(self) -> None:
        """Check that the connection continues in both directions, with the bytes that it must have."""
        peers = {name: lambda name=name: self.said(name) for name in self.names}
        assert_flows(peers, connections=1, enough_bytes=5000)

    def epoch(self, number: int) -> Path:
        """Return where archives are written, as the node sees it."""
        return Path(f"/scratch/epoch{number}")
