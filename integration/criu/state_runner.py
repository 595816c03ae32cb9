"""Runs containers of integration/criu/states.c by plain runc: predicts, dumps, removes and restores each; on a node.

`state_runner.py DIRECTORY PROGRAM` reads a list of runs from stdin and writes what became of each, a line of JSON each.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ocihook.container.running import RunningContainer
from ocihook.criu.version import find_program
from ocihook.errors import OcihookError
from ocihook.node.doctor.host_memory import check_host_memory
from ocihook.preflight import checks
from ocihook.preflight.observation import predict

_TIMEOUT_S = 60.0
_CRIU_S = 15.0  # CRIU gives up freezing after 10 s; a restore that hangs is one that fails
_CHECKS = 2  # of a state, after which it counts as seen
_RIGHTS = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_ADMIN
NET_RAW IPC_LOCK IPC_OWNER SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_ADMIN SYS_NICE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
AUDIT_WRITE SETFCAP SYSLOG WAKE_ALARM PERFMON BPF
"""
_MOUNTS = (
    ("/proc", "proc", ()),
    ("/dev", "tmpfs", ("mode=755", "size=64k")),
    ("/dev/pts", "devpts", ("newinstance", "ptmxmode=0666", "mode=0620")),
    ("/dev/shm", "tmpfs", ("mode=1777", "size=1m")),
    ("/dev/mqueue", "mqueue", ()),
)
_LIBRARY_BYTES = 3 << 20  # more than CRIU's ghost-limit


class Container:
    """One container, whose states are kept by a process each."""

    def __init__(self, directory: Path, program: Path, names: list[str], *, has_exec: bool) -> None:
        self.directory, self.names, self._has_exec = directory, names, has_exec
        self.id = f"{directory.parent.name}-{directory.name}"
        self._runc = ["runc", "--root", str(directory.parent / "runc"), "--log", str(directory / "runc.log")]
        self._program = program
        self.has_hung = False

    def start(self) -> None:
        """Run it on an overlay, as engines do."""
        for part in ("lower", "upper", "work", "rootfs"):
            (self.directory / part).mkdir(parents=True)
        lower = self.directory / "lower"
        shutil.copy(self._program, lower / "states")
        (lower / "library").write_bytes(b"x" * _LIBRARY_BYTES)
        for place in ("proc", "dev"):
            (lower / place).mkdir()
        options = ",".join(f"{name}dir={self.directory}/{name}" for name in ("lower", "upper", "work"))
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, self.directory / "rootfs"],
            check=True,
            timeout=_TIMEOUT_S,
        )
        (self.directory / "config.json").write_text(json.dumps(self._config()))
        self._call("run", "--detach", "--bundle", str(self.directory), self.id)
        if self._has_exec:
            self._call("exec", "--detach", self.id, "/states", "pause", "exec")

    def _config(self) -> Mapping[str, Any]:
        rights = [f"CAP_{right}" for right in _RIGHTS.split()]
        spaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/states", *self.names],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
            },
            "root": {"path": "rootfs"},
            "hostname": "states",
            "mounts": [
                {"destination": place, "type": kind, "source": kind, "options": ["nosuid", *options]}
                for place, kind, options in _MOUNTS
            ],
            "linux": {
                "cgroupsPath": f"/{self.id}",
                "namespaces": [*spaces, {"type": "network", "path": f"/proc/{os.getpid()}/ns/net"}],
                "resources": {"devices": [{"allow": True, "access": "rwm"}]},
            },
        }

    def _call(self, *arguments: str, timeout_s: float = _TIMEOUT_S) -> int:
        null = subprocess.DEVNULL
        return subprocess.run(
            [*self._runc, *arguments], stdin=null, stdout=null, stderr=null, timeout=timeout_s, check=False
        ).returncode

    def _images(self, verb: str, *options: str) -> bool:
        how = ["--image-path", str(self.directory / "images"), "--work-path", str(self.directory / "criu")]
        runc = find_program("runc")
        if runc and runc.version >= (1, 2):  # hybrid cgroups have none that CRIU could make anew
            how += ["--manage-cgroups-mode", "ignore"]
        try:
            return self._call(verb, *how, *options, self.id, timeout_s=_CRIU_S) == 0
        except subprocess.TimeoutExpired:
            self.has_hung = True
            return False

    def dump(self, *options: str) -> bool:
        """Dump it; return whether that succeeded."""
        return self._images("checkpoint", *options)

    def restore(self) -> bool:
        """Remove what is left, and restore it; return whether that succeeded."""
        self._call("delete", "--force", self.id)
        return self._images("restore", "--detach", "--bundle", str(self.directory))

    def log(self, verb: str) -> str:
        """Return CRIU's log."""
        with suppress(OSError):
            return (self.directory / f"criu/{verb}.log").read_text(errors="replace")
        return ""

    def said(self) -> dict[str, tuple[int, str]]:
        """Return of each state how often it was checked, and with what result."""
        found = {}
        with suppress(OSError):
            for line in (self.directory / "rootfs/said").read_text().splitlines():
                name, count, result = line.split(" ", 2)
                found[name] = (int(count), result)
        return found

    def predict(self) -> list[dict[str, str]]:
        """Return what doctor and the preflight find."""
        state = json.loads(subprocess.run([*self._runc, "state", self.id], capture_output=True, check=True).stdout)
        config = json.loads((self.directory / "config.json").read_text())
        seen = RunningContainer(self.id, "runc", state["pid"], str(self.directory), {}, config)
        observed = predict(state["pid"], seen)
        found = [*checks.run(observed, checks.CHECKS), *check_host_memory(observed, marks_writes=False)]
        return [{"check": f.check, "status": str(f.status), "detail": f.detail, "remedy": f.remedy} for f in found]

    def end(self) -> None:
        """Kill and remove it, a CRIU that hangs, and the cgroups that a restore has left."""
        self._end_hanging()
        self._call("delete", "--force", self.id)
        for left in Path("/sys/fs/cgroup").glob(f"*/{self.id}"):
            with suppress(OSError):
                left.rmdir()
        subprocess.run(["umount", "--lazy", self.directory / "rootfs"], check=False, timeout=_TIMEOUT_S)

    def _end_hanging(self) -> None:
        for process in Path("/proc").glob("[0-9]*") if self.has_hung else ():
            with suppress(OSError):
                if os.readlink(process / "cwd").startswith(str(self.directory / "criu")):
                    os.kill(int(process.name), signal.SIGKILL)


def _wait(is_true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _is_made(said: Mapping[str, tuple[int, str]], names: list[str]) -> bool:
    return len(said) == len(names) and all(
        count >= _CHECKS or result not in ("ok", "lost") for count, result in said.values()
    )


def become(container: Container, options: list[str]) -> dict[str, Any]:
    """Take a container through its life; return what became of it."""
    container.start()
    _wait(lambda: _is_made(container.said(), container.names), 20)
    before = container.said()
    made = {name: result for name, (_, result) in before.items()}
    became: dict[str, Any] = {"names": container.names, "made": made, "predicted": container.predict()}
    if not any(count for count, _ in before.values()):
        return became
    became["dumped"] = container.dump(*options)
    before = container.said()  # that a look before the dump is not taken for one after it
    if not became["dumped"]:
        lives = {} if container.has_hung else _moves(container, before)
        return became | {"log": container.log("dump"), "lives": lives}
    became["restored"] = container.restore()
    if not became["restored"]:
        return became | {"log": container.log("restore")}
    moved = _moves(container, before)
    return became | {
        "kept": {name: result if moved.get(name) else "stopped" for name, (_, result) in container.said().items()}
    }


def _moves(container: Container, before: Mapping[str, tuple[int, str]]) -> dict[str, bool]:
    """Return of each state whether it is still checked."""

    def moved() -> dict[str, bool]:
        now = container.said()
        return {name: name in now and now[name][0] > count + _CHECKS for name, (count, _) in before.items() if count}

    _wait(lambda: all(moved().values()), 5)
    return moved()


def main(directory: Path, program: Path) -> None:
    """Run what stdin lists."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for number, run in enumerate(json.load(sys.stdin)):
        container = Container(directory / str(number), program, run["names"], has_exec=run.get("exec", False))
        try:
            became = become(container, run.get("options", []))
        except (OSError, subprocess.SubprocessError, OcihookError) as error:
            became = {"names": run["names"], "error": repr(error)}
        finally:
            container.end()
        print(json.dumps(became), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
