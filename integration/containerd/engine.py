"""A real containerd."""

from collections.abc import Sequence

from integration.cri.engine import CriEngine

_CONFIG = """
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
    "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.blockfile", "io.containerd.nri.v1.nri",
]
[grpc]
address = "/run/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "@PAUSE@"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "/etc/containerd/certs.d"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
enable_unprivileged_ports = false
enable_unprivileged_icmp = false
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["ocihook.io/*"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "@RUNTIME@runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["ocihook.io/*"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun.options]
SystemdCgroup = false
BinaryName = "@RUNTIME@crun"
"""


class Containerd(CriEngine):
    """One containerd."""

    name = "containerd"

    def command(self) -> Sequence[str]:
        """Configure it; return what starts it."""
        config = _CONFIG.replace("@PAUSE@", self.pause).replace("@RUNTIME@", self.runtime_prefix)
        self.write("/etc/containerd/config.toml", config)
        return ["containerd"]

    def pull_from(self, address: str) -> None:
        """Let it pull from a registry without TLS."""
        self.write(f"/etc/containerd/certs.d/{address}/hosts.toml", f'server = "http://{address}"\n')
