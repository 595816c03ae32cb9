"""A real CRI-O, from a directory with its programs: no suite of Debian has it."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration.cri.engine import CriEngine
from integration.namespace import TIMEOUT_S, wait_for

# crio, pinns and conmon, as the project's release bundles have them in bin/.
PROGRAMS = Path(os.environ.get("OCIHOOK_CRIO", ""))

# The one thing in packages' configuration that is in the way of a restore, which _CONFIG puts right.
_PACKAGES = """
[crio.image]
signature_policy = "/etc/crio/policy.json"
"""

_CONFIG = """
[crio]
log_dir = "/scratch/logs"
version_file = "/run/crio/version"
[crio.api]
listen = "/run/crio.sock"
[crio.runtime]
conmon = "/opt/crio/conmon"
conmon_cgroup = "pod"
pinns_path = "/opt/crio/pinns"
cgroup_manager = "cgroupfs"
apparmor_profile = "unconfined"
enable_criu_support = true
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "@RUNTIME@runc"
runtime_root = "/run/runc"
monitor_cgroup = "pod"
[crio.runtime.runtimes.crun]
runtime_path = "@RUNTIME@crun"
runtime_root = "/run/crun"
monitor_cgroup = "pod"
[crio.image]
pause_image = "@PAUSE@"
pause_command = ""
signature_policy = ""
[crio.network]
plugin_dirs = ["/usr/lib/cni"]
network_dir = "/etc/cni/net.d"
"""


class Crio(CriEngine):
    """One CRI-O."""

    name = "crio"
    mounts: tuple[Mapping[str, str], ...] = (
        {"container_path": "/etc/hosts", "host_path": "/etc/hosts"},
    )  # it wants them again for a restore

    def command(self) -> Sequence[str]:
        """Configure it; return what starts it."""
        subprocess.run(["cp", "-r", PROGRAMS, self.namespace.path("/opt/crio")], check=True, timeout=TIMEOUT_S)
        self.namespace.path("/usr/local/bin/crio").symlink_to("/opt/crio/crio")
        for place in ("/etc/containers/policy.json", "/etc/crio/policy.json"):
            self.write(place, '{"default": [{"type": "insecureAcceptAnything"}]}')
        config = _CONFIG.replace("@PAUSE@", self.pause).replace("@RUNTIME@", self.runtime_prefix)
        self.write("/etc/crio/crio.conf.d/10-crio.conf", _PACKAGES)
        self.write("/etc/crio/crio.conf.d/20-test.conf", config)
        return ["crio"]

    def pull_from(self, address: str) -> None:
        """Let it pull from a registry without TLS."""
        file = f"/etc/containers/registries.conf.d/{address.replace(':', '-')}.conf"
        self.write(file, f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGHUP)
            wait_for("CRI-O to read it", lambda: address in (self.scratch / "crio.log").read_text())
