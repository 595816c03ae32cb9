"""Debian's docker-registry on loopback, with storage of its own: what images are pushed to."""

import re
import signal
import subprocess
from pathlib import Path

from integration.namespace import wait_for

USER, PASSWORD = "job", "geheim"
_HTPASSWD = "job:$2y$04$abcdefghijklmnopqrstuuPWRtT5yx7FBi4dcf6ROhboeNunUrLQ.\n"  # bcrypt is all that it reads
_CONFIG = """
version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage:
  filesystem: {{rootdirectory: {directory}/storage}}
  delete: {{enabled: true}}
http:
  addr: 127.0.0.1:{port}
  secret: so that uploads go on after a restart
"""
_AUTH = "auth: {{htpasswd: {{realm: test, path: {directory}/htpasswd}}}}\n"


class DockerRegistry:
    """A registry that can be killed and started again."""

    def __init__(self, directory: Path, *, has_auth: bool = False) -> None:
        directory.mkdir()
        (directory / "htpasswd").write_text(_HTPASSWD)
        self._directory = directory
        self._config = _CONFIG + (_AUTH if has_auth else "")
        self._port = 0  # of its own choice, and then the same again
        self._start()

    def _start(self) -> None:
        config = self._directory / "config.yml"
        config.write_text(self._config.format(directory=self._directory, port=self._port))
        began = len(self.log)
        with (self._directory / "log").open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "docker-registry", "serve", str(config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        pattern = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
        wait_for("the registry", lambda: pattern.search(self.log, began) is not None)
        match = pattern.search(self.log, began)
        assert match
        self._port = int(match[1])

    @property
    def address(self) -> str:
        """Host and port."""
        return f"localhost:{self._port}"

    @property
    def log(self) -> str:
        """What it has printed."""
        path = self._directory / "log"
        return path.read_text() if path.exists() else ""

    def kill_and_start(self) -> None:
        """End it without notice, and start it again."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        self._start()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(60)
