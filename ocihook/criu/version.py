"""Which CRIU and which runtimes a node has, and which configuration file each of them makes CRIU read."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 10.0
FIRST_CRIU_FOR_6_16 = (4, 2)  # of Linux: see linux/sockets.py, hides_socket_options

# Where programs of a node are. Not all are on everybody's PATH: runtimes are in sbin on Debian, and packages of CRI-O
# (cri-o/packaging) bring their own.
_PROGRAM_DIRS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "usr/libexec/crio")
_LIBRARY_DIRS = ("usr/local/lib", "usr/local/lib64", "usr/lib", "usr/lib64", "usr/lib/*-linux-gnu*")

# The first crun that passes /etc/criu/{crun,runc}.conf to libcriu (17f23ac2), if that has the call (from CRIU 4.2 on).
FIRST_CRIU_FOR_7_1 = (4, 2, 1)  # of Linux: criu#3002, corrected after 4.2
_CRUN_READS_CONF = (1, 26)
_LIBCRIU_CALL = b"criu_set_config_file"
_NFTABLES = "libnftables.so.1"
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_NFTABLES_FEATURE, _IS_SUPPORTED = "network_lock_nftables", "is supported"  # criu/cr-check.c


class Program(NamedTuple):
    """A program of the node; version () if it does not report one."""

    name: str
    path: str
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        """The version as people write it."""
        return ".".join(map(str, self.version)) or "unknown"


@cache
def find_path(name: str) -> str | None:
    """Return where a program of this node is, None if it does not exist."""
    directories = [os.environ.get("PATH", os.defpath), *(f"/{directory}" for directory in _PROGRAM_DIRS)]
    return shutil.which(name, path=os.pathsep.join(directories))


@cache
def find_program(name: str) -> Program | None:
    """Return a program of this node with its version, which it is run for; None if it does not exist."""
    path = find_path(name)
    if path is None:
        return None
    return Program(name, path, parse_version("\n".join(run_output(path, "--version").splitlines()[:2])))


def find_program_in(root: Path, name: str) -> Program | None:
    """Return a program of another root, which cannot be run: its version is that of its Debian package, if any."""
    for directory in _PROGRAM_DIRS:
        if os.path.lexists(root / directory / name):
            is_packaged = not directory.startswith("usr/local")
            return Program(name, f"/{directory}/{name}", _package_version(root, name) if is_packaged else ())
    return None


def _package_version(root: Path, name: str) -> tuple[int, ...]:
    try:
        packages = (root / "var/lib/dpkg/status").read_text(errors="replace")
    except OSError:
        return ()
    stanza = rf"^Package: {name}\nStatus: install ok installed\n(?:.+\n)*?Version: (?:\d+:)?(.+)"
    fields = re.search(stanza, packages, re.MULTILINE)
    return parse_version(fields[1]) if fields else ()


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first version in a text; () if there is none."""
    match = _VERSION.search(text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def run_output(*command: str) -> str:
    """Return what a command prints on stdout and stderr; "" if it cannot be run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def libcriu_reads_conf(root: Path = Path("/")) -> bool | None:
    """Return whether the libcriu that crun loads can name a configuration file to CRIU; None if there is no libcriu."""
    for directory in _LIBRARY_DIRS:
        for library in root.glob(f"{directory}/libcriu.so.2"):
            return _LIBCRIU_CALL in library.read_bytes()
    return None


@cache
def has_libbpf() -> bool:
    """Return whether the CRIU of this node is built with libbpf: without it, it dumps no BPF map."""
    criu = find_program("criu")
    return criu is None or b"libbpf.so" in Path(criu.path).read_bytes()


def locks_by_nftables(root: Path = Path("/")) -> bool:
    """Return whether CRIU can lock a network by nftables; of another root, whether it is built so, with the library."""
    if root == Path("/"):
        criu = find_program("criu")
        return criu is not None and _IS_SUPPORTED in run_output(
            criu.path,
            "check",
            "--no-default-config",
            "--feature",
            _NFTABLES_FEATURE,  # whatever that asks for
        )
    criu = find_program_in(root, "criu")
    has_library = any(any(root.glob(f"{directory}/{_NFTABLES}")) for directory in _LIBRARY_DIRS)
    return criu is not None and has_library and _NFTABLES.encode() in (root / criu.path.lstrip("/")).read_bytes()


def crun_reads_its_conf(crun: Program, root: Path = Path("/")) -> bool:
    """Return whether crun passes crun.conf (or runc.conf) to CRIU; if not, only default.conf is read."""
    return crun.version >= _CRUN_READS_CONF and bool(libcriu_reads_conf(root))
