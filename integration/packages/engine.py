"""A podman in a Debian root of its own, to which ocihook comes as a package or an image; with a systemd if need be."""

import shutil
import subprocess
from pathlib import Path

from integration.namespace import Namespace, wait_for
from integration.podman.engine import Podman

_ROOT = """
root="$1/root"
mkdir -p "$1/upper" "$1/work" "$1/podman" "$root"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$root"
mount --make-private "$root"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/oldroot" "$root$1"
mount --bind "$1" "$root$1"
"""

# As in integration/containerd: CRIU wants the container's mounts below the root of the mount namespace, so no chroot.
_MOUNTS = """
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
pivot_root . oldroot
cd /
umount -l /oldroot
rmdir /oldroot
"""

# A root tree ($2) as the root of a node whose files are in $1.
PIVOTED = _ROOT + 'mount --rbind /dev "$root/dev"\n' + _MOUNTS

# Devices are those that every machine has, so that no terminal of this one is systemd's. Its cgroups are below one of
# its own. Whoever kills the holder kills all.
_BOOT = """
mount -t tmpfs tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -sf /dev/null "$root/etc/systemd/system/getty.target"
ln -sf /dev/null "$root/etc/systemd/system/systemd-udevd.service"
mkdir "$1/cgroups"
mount -t cgroup2 cgroup2 "$1/cgroups"
mkdir "$1/cgroups/$3"
echo 0 > "$1/cgroups/$3/cgroup.procs"
setpriv --pdeathsig KILL unshare --pid --fork --kill-child --uts --ipc --cgroup --mount --propagation private \\
    sh -ec '@MOUNTS@
        exec env -i container=ocihook-test PATH=/usr/sbin:/usr/bin /usr/lib/systemd/systemd --unit=multi-user.target
    ' sh "$1" >"$1/systemd.log" 2>&1 &
echo $! > "$1/systemd.pid"
umount -l "$1/cgroups"
"""


class Machine(Namespace):
    """A root with a systemd as its first process."""

    def __init__(self, scratch: Path, root: Path) -> None:
        self._cgroup = scratch.name
        super().__init__(_ROOT + _BOOT.replace("@MOUNTS@", _MOUNTS), [str(scratch), str(root), self._cgroup])
        parent = int((scratch / "systemd.pid").read_text())
        children = Path(f"/proc/{parent}/task/{parent}/children")
        wait_for("systemd's process", lambda: bool(children.read_text()))
        self._systemd = int(children.read_text().split()[0])
        wait_for("systemd", lambda: self._state() in ("running", "degraded"))

    def _state(self) -> str:
        return self.run("systemctl", "is-system-running", check=False).strip()

    @property
    def kinds(self) -> tuple[str, ...]:
        """All but the network."""
        return ("--mount", "--pid", "--uts", "--ipc", "--cgroup")

    @property
    def pid(self) -> int:
        """systemd's process."""
        return self._systemd

    def close(self) -> None:
        """End everything, and remove the cgroups that it had."""
        super().close()
        remove = 'mount -t cgroup2 cgroup2 "$1" && find "$1/$2" -depth -type d -exec rmdir {} +'
        with_mount = ["unshare", "--mount", "sh", "-c", remove, "sh", "/mnt", self._cgroup]
        wait_for("cgroups to go", lambda: subprocess.run(with_mount, capture_output=True, check=False).returncode == 0)


class Node(Podman):
    """A node with a podman and without ocihook; with systemd it also has a stand-in for NVIDIA's driver."""

    def __init__(self, scratch: Path, root: Path, workload: Path, *, cuda_files: Path | None = None) -> None:
        self._root = root
        self.has_systemd = cuda_files is not None
        if cuda_files:
            cuda_files = Path(shutil.copytree(cuda_files, scratch / "cuda"))
        super().__init__(scratch, "runc", workload, cuda_files=cuda_files)

    def _make_namespace(self, size: str) -> Namespace:
        assert not size
        if self.has_systemd:
            return Machine(self.scratch, self._root)
        return Namespace(PIVOTED, [str(self.scratch), str(self._root)])

    def agent_log(self) -> str:
        """Return what the agent has said, to the journal where there is one."""
        if not self.has_systemd:
            return super().agent_log()
        return self.namespace.run("journalctl", "--no-pager", "--unit=ocihook.service")

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on the node, without a network."""
        return self.namespace.run("unshare", "--net", *command, check=check)

    def ocihook(self, *arguments: str, check: bool = True) -> str:
        """Run the ocihook that was installed."""
        return self.namespace.run("ocihook", *arguments, check=check)

    def configure(self, text: str) -> None:
        """Write ocihook's configuration where a package does not own it."""
        path = self.namespace.path("/etc/ocihook/config.toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the node."""
        place = self.namespace.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def criu_configuration(self) -> str:
        """Return all that CRIU reads for the node's runtimes."""
        directory = self.namespace.path("/etc/criu")
        return "".join(path.read_text() for path in sorted(directory.glob("*.conf"))) if directory.is_dir() else ""

    def files(self) -> set[str]:
        """Return the names of all files that were made or changed since the node came to be, but for what runs."""
        upper = self.scratch / "upper"
        names = {str(path.relative_to(upper)) for path in upper.rglob("*") if not path.is_dir()}
        return {name for name in names if not name.startswith(("var/", "tmp/", "run/"))}
