"""Debian 13's CRIU cannot dump a socket on a current kernel: that is said beforehand, with what helps."""

import os
import subprocess
from pathlib import Path

from packaging.version import Version

from integration.journals import last_session
from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman


def can_dump_sockets() -> bool:
    """Return whether this machine's CRIU can; before Linux 6.16 every one can (criu #2705)."""
    said = subprocess.run(["criu", "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    kernel = Version(".".join(os.uname().release.split("-")[0].split(".")[:2]))
    return kernel < Version("6.16") or Version(said.split()[1]) >= Version("4.2")


def test_sockets_that_no_dump_would_survive(scratch: Path, peer: Path) -> None:
    podman = Podman(scratch, "runc", peer)
    try:
        podman.install()
        command = ["run", "--detach", "--name", "c", "--network", "none", "--pids-limit", "0", IMAGE]
        podman(*command, "/workload", "server", "127.0.0.1/7000")
        wait_for("the socket", lambda: "ready" in podman("logs", "c"))
        container = podman("inspect", "--format", "{{.Id}}", "c").strip()
        found = podman.ocihook("doctor", "--container", container, check=False)
        podman.checkpoint("c", scratch / "c.tar", "--leave-running", check=can_dump_sockets())
        assert podman.is_running("c")
        session = last_session(podman.namespace, "pre-dump")
        assert session["effects"] == []
        if can_dump_sockets():
            assert session["stages"]["pre-dump"]["status"] == 0
            return
        message = session["stages"]["pre-dump"]["message"]
        for text in (found, message):
            assert "CRIU 4.2" in text
    finally:
        podman.close()
