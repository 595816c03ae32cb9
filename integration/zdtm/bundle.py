"""The containers that tests of CRIU's suite run in: a root with their libraries and programs, everything allowed."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from integration.zdtm.case import Case

SUITE = "zdtm/static"
LOG, STATUS = ".init.log", ".init.status"
_DIRECTORIES = ("bin", "etc", "lib", "lib64", "dev", "tmp", "usr", "proc", "run", "sys", SUITE)
_CAPABILITIES = (  # in the order of linux/capability.h
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT "
    "SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL "
    "SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
_OTHER_USER = ("ZDTM_UID=18943", "ZDTM_GID=58467", "ZDTM_GROUPS=27495 48244")
_DEVICES = (("/dev/net/tun", 10, 200), ("/dev/autofs", 10, 235))
_TMPFS = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}
_PTS = {"type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666", "mode=0666"]}
_MOUNTS = (
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", **_TMPFS},
    {"destination": "/dev/pts", **_PTS},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["mode=1777"]},
    {"destination": "/run", "type": "tmpfs", "source": "zdtm_run"},
)


def make_template(template: Path, cases: Iterable[Case]) -> None:
    """Make the root that each container gets a copy of: libraries, and the programs that tests ask for."""
    for name in _DIRECTORIES:
        (template / name).mkdir(parents=True)
        (template / name).chmod(0o777)
    (template / "sbin").symlink_to("bin")
    for name in ("bin", "sbin", "lib", "lib64"):
        (template / "usr" / name).symlink_to(f"../{name}")
    wanted = {"/bin/sh", "/bin/true"}
    binaries = []
    for case in cases:
        wanted.update(case.described.get("deps", ()))
        binaries.append(str(case.suite / case.name))
    programs = [name for choice in wanted for name in choice.split("|") if os.access(name, os.X_OK)]
    files = {program: Path(program) for program in programs}
    files |= {str(path): path for path in Path("/usr/lib").glob("*/xtables/*.so") if "iptables" in str(programs)}
    for program in (*programs, *binaries):
        files |= _libraries(program)
    for target, source in files.items():
        place = template / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copy2(source, place)
    here = Path(__file__).parent / "init.c"
    subprocess.run(["gcc", "-O2", "-Wall", "-static", "-s", "-o", template / "init", here], check=True, timeout=120)


def _libraries(program: str) -> dict[str, Path]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False, timeout=60).stdout
    found = (Path(path) for path in re.findall(r"(/\S+) \(0x", listed))
    return {str(path) if path.parts[1] == "lib64" else f"/lib/{path.name}": path for path in found}


def make_bundle(place: Path, template: Path, case: Case, network: str) -> Path:
    """Make a bundle whose container is named as it; return where the test's own files are."""
    place.mkdir(parents=True)
    root = place / "rootfs"
    subprocess.run(["cp", "-al", template, root], check=True, timeout=120)
    directory = root / SUITE
    shutil.copy2(case.suite / case.name, directory / case.name)
    for each in (directory, directory.parent, root, root / "tmp"):
        each.chmod(0o777)
    (place / "config.json").write_text(json.dumps(_config(case, place.name, network)))
    return directory


def _config(case: Case, name: str, network: str) -> dict[str, Any]:
    """Return the OCI configuration: everything allowed, nothing masked; the network is there, as engines do it."""
    capabilities = _capabilities()
    environment = ["PATH=/sbin:/bin", "TMPDIR=/tmp"]
    if "suid" not in case.flags and "CAP_SYS_RESOURCE" in capabilities:  # CRIU cannot read that user's limits without
        environment += _OTHER_USER
    devices = [{"path": p, "type": "c", "major": a, "minor": i, "fileMode": 0o666} for p, a, i in _DEVICES]
    namespaces = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]
    return {
        "ociVersion": "1.0.2",
        "hostname": "zdtm",
        "root": {"path": "rootfs"},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": f"/{SUITE}",
            "args": ["/init", LOG, STATUS, *case.words],
            "env": environment,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": False,
        },
        "mounts": _MOUNTS,
        "linux": {
            "cgroupsPath": f"/{name}",
            "namespaces": [*namespaces, {"type": "network", "path": network}],
            "rootfsPropagation": "private",
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            "devices": devices,
        },
    }


def _capabilities() -> list[str]:
    bounding = re.search(r"^CapBnd:\s+(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(bounding[1], 16) if bounding else 0
    return [f"CAP_{name}" for bit, name in enumerate(_CAPABILITIES.split()) if held >> bit & 1]
