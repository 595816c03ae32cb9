"""A podman in a Debian root of its own, to which ocihook comes as a package or an image."""

from pathlib import Path

from integration.namespace import Namespace
from integration.podman.engine import Podman

# As in integration/containerd: CRIU wants the container's mounts below the root of the mount namespace, so no chroot.
_SETUP = """
root="$1/root"
mkdir -p "$1/upper" "$1/work" "$1/podman" "$root"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$root"
mount --make-private "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mkdir -p "$root/oldroot" "$root$1"
mount --bind "$1" "$root$1"
cd "$root"
pivot_root . oldroot
cd /
umount -l /oldroot
rmdir /oldroot
"""


class Node(Podman):
    """A node with a podman and without ocihook."""

    def __init__(self, scratch: Path, root: Path, workload: Path) -> None:
        self._root = root
        super().__init__(scratch, "runc", workload)

    def _make_namespace(self, size: str) -> Namespace:
        assert not size
        return Namespace(_SETUP, [str(self.scratch), str(self._root)])

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
