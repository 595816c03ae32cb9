"""A containerd whose pods a CNI plugin gives links, and addresses that the test chooses."""

import re
from collections.abc import Mapping, Sequence

from integration.containerd.engine import Containerd
from integration.cri.engine import CONTAINER_PID, POD_NETWORK
from integration.namespace import wait_for
from integration.net.engine import BRIDGE, Place

# All links are between the pods' namespaces and the bridge's: nothing comes into the machine's own.
_PLUGIN = f"""#!/bin/sh
set -e
pod=${{CNI_ARGS##*K8S_POD_NAME=}} pod=${{pod%%;*}}
case "$CNI_COMMAND" in
    VERSION) echo '{{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}}' ;;
    ADD)
        read -r four six < "/scratch/places/$pod"
        mkdir -p /run/netns
        touch "/run/netns/$pod"
        mount --bind "$CNI_NETNS" "/run/netns/$pod"
        {{
            ip -n "$pod" link set lo up
            ip -n "$pod" link add eth0 type veth peer name "v-$pod" netns {BRIDGE}
            ip -n {BRIDGE} link set "v-$pod" master br0
            ip -n "$pod" addr add "$four/16" dev eth0
            ip -n "$pod" addr add "$six/64" dev eth0 nodad
            ip -n "$pod" link set eth0 up
        }} >&2
        echo '{{"cniVersion": "1.0.0", "interfaces": [{{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}}],'
        echo ' "ips": [{{"address": "'"$four"'/16", "interface": 0}},'
        echo ' {{"address": "'"$six"'/64", "interface": 0}}]}}' ;;
    DEL)
        ip -n {BRIDGE} link delete "v-$pod" >&2 || true
        umount "/run/netns/$pod" >&2 || true ;;
esac
"""


class NetContainerd(Containerd):
    """One containerd, with a bridge in a network namespace beside it."""

    def make_bridge(self) -> None:
        """Make what pods are connected to."""
        self.write("/usr/lib/cni/no-link", _PLUGIN)
        (self.scratch / "places").mkdir()
        commands = (
            f"ip netns add {BRIDGE}",
            f"ip -n {BRIDGE} link add br0 type bridge",
            f"ip -n {BRIDGE} link set br0 up",
        )
        self.namespace.run("sh", "-ec", "\n".join(commands))

    def plug(self, *pods: str) -> None:
        """Let pods be reached."""
        for pod in pods:
            self.namespace.run("ip", "-n", BRIDGE, "link", "set", f"v-{pod}", "up")

    def unplug(self, *pods: str) -> None:
        """Keep pods from being reached."""
        for pod in pods:
            self.namespace.run("ip", "-n", BRIDGE, "link", "set", f"v-{pod}", "down")

    def inside(self, pod: str, *command: str) -> str:
        """Run a command in a pod's network."""
        return self.namespace.run("ip", "netns", "exec", pod, *command)

    def start_peer(self, pod: str, place: Place, *arguments: str, image: str = "", **notes: str) -> str:
        """Make a pod with the peer, or a checkpoint, which is not reachable yet, in a container; return its id.

        Args:
            pod: its name.
            place: its addresses.
            arguments: of the peer.
            image: a checkpoint to restore.
            notes: annotations of ocihook, without prefix.
        """
        (self.scratch / "places" / pod).write_text(f"{place.four} {place.six}\n")
        names = {"network": POD_NETWORK, "pid": CONTAINER_PID}
        config = {
            "metadata": {"name": pod, "uid": pod, "namespace": "default"},
            "log_directory": f"/scratch/logs/{pod}",
            "annotations": {f"ocihook.io/{key.replace('_', '-')}": value for key, value in notes.items()},
            "linux": {"cgroup_parent": "/ocihook-test", "security_context": {"namespace_options": names}},
        }
        sandbox = self.call("RunPodSandbox", config=config, runtime_handler="runc").pod_sandbox_id
        if not image:
            self.call("PullImage", image={"image": self.image})
        container = self._create(pod, sandbox, config, arguments, image)
        self._pods[container] = sandbox
        self.call("StartContainer", container_id=container)
        if not image:
            self.plug(pod)
            wait_for(f"{pod} to be ready", lambda: "ready" in self.said(container))
        return container

    def said(self, container: str) -> str:
        """Return what a container has printed since it was started or restored."""
        return re.sub(r"^\S+ std\w+ F ", "", self.log(container), flags=re.MULTILINE)

    def _create(
        self, pod: str, sandbox: str, sandbox_config: Mapping[str, object], arguments: Sequence[str], image: str
    ) -> str:
        labels = {"container.name": pod, "pod.name": pod, "pod.namespace": "default"}
        config = {
            "metadata": {"name": pod},
            "image": {"image": image or self.image, "user_specified_image": self.image},
            "args": list(arguments),
            "labels": {f"io.kubernetes.{key}": value for key, value in labels.items()},
            "log_path": "log",
            "linux": {"security_context": {"namespace_options": {"network": POD_NETWORK, "pid": CONTAINER_PID}}},
        }
        made = self.call("CreateContainer", pod_sandbox_id=sandbox, config=config, sandbox_config=sandbox_config)
        container: str = made.container_id
        return container
