"""sshd for a test: in its own network, with keys made for it, as it is on a node that podman is to be reached on."""

import os
import shutil
import subprocess
from pathlib import Path

from integration.namespace import Namespace, wait_for

_CONFIG = """Port 22
ListenAddress 127.0.0.1
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""
_SEPARATED = "sshd:x:199:65534::/run/sshd:/usr/sbin/nologin\n"  # whose part it does before anybody is known


class Sshd:
    """sshd in a namespace with a network of its own, whose /etc is not the machine's."""

    def __init__(self, namespace: Namespace, directory: Path) -> None:
        """Start it.

        Args:
            namespace: to be reached.
            directory: for its keys, and as home of those who log in.
        """
        keys, home = directory / "keys", directory / "home"
        keys.mkdir()
        (home / ".ssh").mkdir(parents=True)
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
            subprocess.run(command, check=True, timeout=60)
        (home / ".ssh/known_hosts").write_text(f"127.0.0.1 {(keys / 'host.pub').read_text()}")
        (keys / "config").write_text(_CONFIG.format(keys=keys))
        namespace.path("/run/sshd").mkdir(mode=0o755)
        users = namespace.path("/etc/passwd")
        if "sshd:" not in users.read_text():
            users.write_text(users.read_text() + _SEPARATED)
        namespace.run("ip", "link", "set", "lo", "up")
        program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        assert program, "`integration/node-setup trixie` installs sshd"
        log = directory / "sshd.log"
        namespace.spawn(program, "-D", "-e", "-f", str(keys / "config"), log=log)
        wait_for("sshd to listen", lambda: "Server listening" in log.read_text())
        self.log = log
        self.environment = {"HOME": str(home), "CONTAINER_SSHKEY": str(keys / "user")}

    @staticmethod
    def url(socket: str) -> str:
        """Return by what podman reaches a service there."""
        return f"ssh://root@127.0.0.1{socket}"

    def logins(self) -> int:
        """Return how often somebody has logged in."""
        return self.log.read_text().count("Accepted publickey for root")
