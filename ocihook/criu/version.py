"""Which CRIU and which runtimes a node has, and which configuration file each of them makes CRIU read."""

import re
import shutil
import subprocess
from functools import cache
from typing import NamedTuple

TIMEOUT_S = 10.0

# The first that read /etc/criu/{crun,runc}.conf through libcriu: crun 17f23ac2, criu_set_config_file in libcriu.
_CRUN_READS_CONF = (1, 26)
_LIBCRIU_READS_CONF = (4, 2)


class Program(NamedTuple):
    """A program of the node; version () if it does not tell."""

    name: str
    path: str
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        """The version as people write it."""
        return ".".join(map(str, self.version)) or "unknown"


@cache
def find_program(name: str) -> Program | None:
    """Return a program on PATH with its version, None if it is not there."""
    path = shutil.which(name)
    if path is None:
        return None
    first_lines = "\n".join(run_output(path, "--version").splitlines()[:2])
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", first_lines)
    return Program(name, path, tuple(int(part) for part in match.groups() if part) if match else ())


def run_output(*command: str) -> str:
    """Return what a command prints on stdout and stderr; "" if it cannot be run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def crun_reads_its_conf(crun: Program, criu: Program | None) -> bool:
    """Tell whether crun hands crun.conf (or runc.conf) to CRIU; if not, only default.conf is read."""
    return crun.version >= _CRUN_READS_CONF and criu is not None and criu.version >= _LIBCRIU_READS_CONF
