"""Shows the whole thing on this node: a podman container is checkpointed, removed and restored through ocihook.

Runs in a private mount namespace, so that neither the node's configuration nor its containers are touched.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from ocihook import wire
from ocihook.config import load_settings
from ocihook.criu.images import parse_dump_stats
from ocihook.errors import OcihookError, UnsupportedError
from ocihook.node import demo_workload, distribution
from ocihook.session import history
from ocihook.session.journal import open_journals

PYTHON = "/usr/bin/python3"  # the container sees the node's /usr
COMMAND_TIMEOUT_S = 120.0
WAIT_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo measured; times in seconds, sizes in bytes."""

    runtime: str
    raw_bytes: int
    packed_bytes: int
    archive_bytes: int
    checkpoint_s: float
    frozen_s: float
    criu_memory_s: float
    pack_s: float
    restore_s: float
    unpack_s: float
    count_before: int
    count_after: int
    checksum_before: str
    checksum_after: str

    @property
    def succeeded(self) -> bool:
        """Whether the container went on where it was, with the memory it had."""
        return self.checksum_before == self.checksum_after and self.count_after > self.count_before


def check_node() -> str:
    """Return the runtime to use.

    Raises:
        UnsupportedError: naming what this node lacks.
    """
    if os.geteuid() != 0:
        raise UnsupportedError("the demo checkpoints a real container, which needs root")
    missing = [name for name in ("podman", "criu", "conmon", "unshare") if shutil.which(name) is None]
    runtime = next((name for name in ("runc", "crun") if shutil.which(name)), None)
    if missing or runtime is None:
        raise UnsupportedError(
            f"the demo needs {', '.join(missing) or 'runc or crun'}", hint="install it, or run `make demo`"
        )
    if not Path(PYTHON).exists():
        raise UnsupportedError(f"the demo's container needs {PYTHON} of the node")
    return runtime


def enter_private_namespace(arguments: Sequence[str]) -> None:
    """Run this program again, with `arguments`, where mounts are private; does not return."""
    command = ["unshare", "--mount", "--propagation", "private", *distribution.command(), *arguments]
    os.execvp(command[0], command)  # noqa: S606 - no shell


def run_demo(runtime: str, *, size_bytes: int, say: Say) -> DemoResult:
    """Do it all; the mount namespace must be private (`enter_private_namespace`).

    Raises:
        OcihookError: if any step fails, with what the step printed.
    """
    scratch = Path(tempfile.mkdtemp(prefix="ocihook-demo-", dir="/var/tmp"))
    try:
        _make_private(scratch / "mounts")
        return _Demo(runtime, scratch, say).run(size_bytes >> 20)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_private(mounts: Path) -> None:
    """Cover everything that is written: /etc with an overlay, /run with an empty one.

    Nothing below /usr may be a mount, since the container has /usr bound, and CRIU would want to mount it again.
    """
    mounts.mkdir()
    _run("mount", "-t", "tmpfs", "tmpfs", str(mounts))
    upper, work = mounts / "upper", mounts / "work"
    upper.mkdir()
    work.mkdir()
    _run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/etc,upperdir={upper},workdir={work}", "/etc")
    _run("umount", "--lazy", str(mounts))  # the overlay keeps it
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    if _run("stat", "-f", "-c", "%T", "/sys/fs/cgroup").strip() != "cgroup2fs":
        _run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")


class _Demo:
    def __init__(self, runtime: str, scratch: Path, say: Say) -> None:
        self.runtime = runtime
        self.scratch = scratch
        self.archive = scratch / "checkpoint.tar"
        self.say = say

    def run(self, size_mib: int) -> DemoResult:
        self.say("ocihook install")
        # An agent of the demo need not stay.
        config = Path("/etc/ocihook/config.toml")
        config.parent.mkdir(exist_ok=True)
        config.write_text(f'[agent]\nidle_timeout_s = 1\nhistory_dir = "{self.scratch}/history"\n')
        _run(*distribution.command(), "install", "--libexec", "/etc/ocihook/libexec")
        image = self._import_image()
        try:
            return self._round_trip(image, size_mib)
        finally:
            self._podman("rm", "--force", "--all", "--time", "0")
            self._podman("system", "reset", "--force")
            _wait("the agent to leave", lambda: not (Path(wire.RUNTIME_DIR) / wire.SOCKET_NAME).exists())

    def _round_trip(self, image: str, size_mib: int) -> DemoResult:
        self.say(f"podman run: a process that holds {size_mib} MiB of mixed memory and counts")
        command = ["run", "--detach", "--name", "demo", "--network", "host", "--pids-limit", "0"]
        command += self._volumes()
        self._podman(*command, image, PYTHON, "/demo.py", str(size_mib))
        _wait("the container to count", lambda: self._last("count") is not None)
        checksum_before, _ = self._checksum()

        self.say("podman container checkpoint --export")
        begin = time.monotonic()
        self._podman("container", "checkpoint", "--compress", "none", "--export", str(self.archive), "demo")
        checkpoint_s = time.monotonic() - begin
        count_before = int(self._last("count") or 0)
        dumped = self._session("post-dump")
        frozen_us, memory_us = self._stats()

        self.say("podman rm, podman container restore --import")
        self._podman("rm", "--force", "--time", "0", "demo")
        begin = time.monotonic()
        self._podman("container", "restore", "--import", str(self.archive))
        restore_s = time.monotonic() - begin
        restored = self._session("pre-restore")
        _wait("the count to go on", lambda: int(self._last("count") or 0) > count_before)
        checksum_after, count_after = self._checksum()
        return DemoResult(
            runtime=self.runtime,
            raw_bytes=dumped["facts"].get("raw_bytes", 0),
            packed_bytes=dumped["facts"].get("stored_bytes", 0),
            archive_bytes=self.archive.stat().st_size,
            checkpoint_s=checkpoint_s,
            frozen_s=frozen_us / 1e6,
            criu_memory_s=memory_us / 1e6,
            pack_s=_phase_s(dumped, "pack"),
            restore_s=restore_s,
            unpack_s=_phase_s(restored, "unpack") + _phase_s(restored, "memory write back"),
            count_before=count_before,
            count_after=count_after,
            checksum_before=checksum_before,
            checksum_after=checksum_after,
        )

    def _podman(self, *arguments: str) -> str:
        store = self.scratch / "podman"
        where = ["--root", str(store / "root"), "--runroot", "/run/ocihook-demo", "--tmpdir", "/run/ocihook-demo/tmp"]
        how = ["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--runtime", self.runtime]
        return _run("podman", *where, *how, *arguments)

    def _import_image(self) -> str:
        """Make an image without any network: mount points, and links into the node's /usr."""
        archive = self.scratch / "image.tar"
        with tarfile.open(archive, "w") as tar:
            for name in ("usr", "etc", "run", "tmp", "proc", "sys", "dev", *self._host_directories(is_link=False)):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            for name in self._host_directories(is_link=True):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(entry)
            passwd = b"root:x:0:0:root:/:/bin/sh\n"
            entry = tarfile.TarInfo("etc/passwd")
            entry.size = len(passwd)
            tar.addfile(entry, BytesIO(passwd))
        self._podman("import", str(archive), "localhost/ocihook-demo:latest")
        return "localhost/ocihook-demo:latest"

    @staticmethod
    def _host_directories(*, is_link: bool) -> list[str]:
        """Return lib, lib64, bin where the node has them as links into /usr, or as directories of their own."""
        names = ("bin", "lib", "lib64")
        return [name for name in names if Path("/", name).is_dir() and Path("/", name).is_symlink() == is_link]

    def _volumes(self) -> list[str]:
        mounts = [f"{demo_workload.__file__}:/demo.py:ro", "/usr:/usr:ro"]
        mounts += [f"/{name}:/{name}:ro" for name in self._host_directories(is_link=False)]
        return [word for mount in mounts for word in ("--volume", mount)]

    def _last(self, word: str) -> str | None:
        lines = [line.split() for line in self._podman("logs", "demo").splitlines()]
        values = [line[1] for line in lines if len(line) > 1 and line[0] == word]
        return values[-1] if values else None

    def _checksum(self) -> tuple[str, int]:
        """Have the container checksum its memory: (checksum, count at that time)."""

        def lines() -> list[list[str]]:
            return [line.split() for line in self._podman("logs", "demo").splitlines() if line.startswith("checksum")]

        before = len(lines())
        self._podman("kill", "--signal", "USR1", "demo")
        _wait("the container's checksum", lambda: len(lines()) > before)
        _, checksum, _, count = lines()[-1]
        return checksum, int(count)

    def _session(self, stage: str) -> dict[str, Any]:
        """Return the journal of the session that handled `stage`."""
        _wait("the session to end", lambda: not open_journals())
        journals = history.read(Path(load_settings().history_dir))
        handled = [journal for journal in journals if stage in journal["stages"]]
        if not handled:
            raise OcihookError(f"CRIU did not call ocihook in {stage}", hint="`ocihook doctor` says why")
        return handled[-1]

    def _stats(self) -> tuple[int, int]:
        """Return the microseconds that CRIU held the container frozen, and those in which it wrote memory."""
        with tarfile.open(self.archive) as tar:
            member = tar.extractfile("stats-dump")
            if member is None:
                raise OcihookError("podman's archive has no stats-dump")
            stats = parse_dump_stats(member.read())
        return stats.frozen_us, stats.memwrite_us


def _phase_s(journal: dict[str, Any], name: str) -> float:
    return float(sum(phase["seconds"] for phase in journal["phases"] if phase["name"] == name))


def _wait(what: str, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise OcihookError(f"waited {WAIT_S:g} s for {what}, without success")
        time.sleep(0.1)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OcihookError(f"`{' '.join(command)}` did not end within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise OcihookError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
