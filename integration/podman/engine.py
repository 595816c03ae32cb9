"""podman of this machine with storage, runtime and configuration of its own."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from integration import fake_driver
from integration.cri.registry import program_layer
from integration.namespace import CommandError, Namespace, wait_for
from ocihook.audit.state import STATE_NAME
from ocihook.checkpoints.origin import ORIGIN_NAME

SITE = Path(__file__).parents[2]
IMAGE = "localhost/workload:latest"
NOTES = {ORIGIN_NAME, STATE_NAME}  # about a container, beside CRIU's images and with names like theirs
GPU: Mapping[int, int] = MappingProxyType({0: 3})

_SETUP = """
mkdir -p "$1/mounts" "$1/podman"
mount -t tmpfs tmpfs "$1/mounts"
mkdir "$1/mounts/upper" "$1/mounts/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/mounts/upper,workdir=$1/mounts/work" /etc
mount -t tmpfs tmpfs /run
mkdir -p /var/lib/ocihook
mount -t tmpfs tmpfs /var/lib/ocihook
[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /etc/ocihook /etc/criu
rm -f /etc/criu/*.conf
[ -z "$2" ] || mount -t tmpfs -o "size=$2" tmpfs "$1/podman"
"""

# On a machine with hybrid cgroups crun asks CRIU to make cgroups anew that only v1 has, which CRIU may not.
_CRUN = """#!/bin/sh
for word; do
    shift
    case "$word" in
        checkpoint | restore) set -- "$@" "$word" --manage-cgroups-mode ignore ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec /usr/bin/crun "$@"
"""


class Podman:
    """One podman, in a namespace of its own."""

    environment: Mapping[str, str] = MappingProxyType({})  # of commands of ocihook
    own_network = False

    def __init__(
        self, scratch: Path, runtime: str, workload: Path, *, size: str = "", cuda_files: Path | None = None
    ) -> None:
        self.scratch = scratch
        self.namespace = self._make_namespace(size)
        self.configure("[agent]\nidle_timeout_s = 2\n")
        self.runtime = f"/usr/sbin/{runtime}"
        if runtime == "crun":
            self.runtime = str(scratch / "crun")
            Path(self.runtime).write_text(_CRUN)
            Path(self.runtime).chmod(0o755)
        if cuda_files:
            fake_driver.install_driver(self.namespace, cuda_files)
        self._import_image(workload, cuda_files)

    def _make_namespace(self, size: str) -> Namespace:
        return Namespace(_SETUP, [str(self.scratch), size], own_network=self.own_network)

    def _import_image(self, workload: Path, cuda_files: Path | None) -> None:
        archive = self.scratch / "image.tar"
        archive.write_bytes(program_layer(workload, cuda_files))
        self("import", str(archive), IMAGE)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run a podman command; return what it prints."""
        try:
            command = ("podman", *self.options(), *arguments)
            where = str(self.scratch)
            return self.namespace.run(*command, check=check, TMPDIR=where, PODMAN_IGNORE_CGROUPSV1_WARNING="1")
        except CommandError as error:
            raise CommandError(f"{error}\n{self.agent_log()}") from error

    def agent_log(self) -> str:
        """Return what the agent has said."""
        log = self.namespace.path("/run/ocihook/agent.log")
        return log.read_text() if log.exists() else "no agent"

    def options(self) -> list[str]:
        """Return what every call of this podman needs."""
        store = self.scratch / "podman"
        where = ["--root", str(store), "--runroot", "/run/podman-test", "--tmpdir", "/run/podman-test/tmp"]
        return [*where, "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--runtime", self.runtime]

    def ocihook(self, *arguments: str, check: bool = True) -> str:
        """Run an ocihook command inside."""
        command = ["env", *(f"{key}={value}" for key, value in self.environment.items())]
        command += [sys.executable, "-m", "ocihook", *arguments]
        return self.namespace.run(*command, check=check, PYTHONPATH=str(SITE))

    def spawn_agent(self, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start an agent of integration/."""
        log = self.scratch / "agent.log"
        return self.namespace.spawn(sys.executable, str(program), *arguments, log=log, PYTHONPATH=str(SITE))

    def install(self) -> None:
        """Install ocihook on this node."""
        self.ocihook("install", "--libexec", "/etc/ocihook/libexec")

    def configure(self, text: str) -> None:
        """Write ocihook's configuration."""
        self.namespace.path("/etc/ocihook/config.toml").write_text(text)

    def start(self, name: str, memory: int | str = 24, *, volume: str = "", **annotations: str) -> None:
        """Run a workload and wait until it counts.

        Args:
            name: of the container.
            memory: MiB to hold, or a file in the container whose content to hold.
            volume: to mount, as podman's --volume.
            annotations: of ocihook, without prefix.
        """
        options = [f"--volume={volume}"] if volume else []
        options += [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in annotations.items()]
        command = ["run", "--detach", "--name", name, "--network", "host", "--pids-limit", "0"]
        self(*command, *options, IMAGE, "/workload", str(memory))
        wait_for(f"{name} to count", lambda: self.count(name)[0] > 2)

    def start_cuda(
        self,
        name: str,
        mib: int = 24,
        *words: str,
        gpus: Mapping[int, int] = GPU,
        options: Sequence[str] = (),
        **annotations: str,
    ) -> None:
        """Run a CUDA workload and wait until it counts.

        Args:
            name: of the container.
            mib: to hold on each GPU.
            words: what else the workload is to do.
            gpus: number in the container's /dev and minor of each GPU that it gets.
            options: of podman run.
            annotations: of ocihook, without prefix.
        """
        devices = [("/dev/null", "ctl"), *((fake_driver.GPU_NODES[minor], str(n)) for n, minor in gpus.items())]
        given = [f"--device={node}:/dev/nvidia{number}" for node, number in devices]
        given += [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in annotations.items()]
        command = ["run", "--detach", "--name", name, "--network", "host", "--pids-limit", "0"]
        self(*command, *given, *options, IMAGE, "/cuda_workload", str(mib), *words)
        wait_for(f"{name} to count", lambda: self.count(name)[0] > 2)

    def count(self, name: str) -> tuple[int, str]:
        """Return the last count and checksum that a workload has printed."""
        found = re.findall(r"^count (\d+) checksum (\w+)$", self("logs", name), re.MULTILINE)
        return (int(found[-1][0]), found[-1][1]) if found else (0, "")

    def is_running(self, name: str) -> bool:
        """Return whether a container runs, by podman's own word."""
        return self("inspect", "--format", "{{.State.Status}}", name, check=False).strip() == "running"

    def assert_counts(self, name: str) -> None:
        """Check that a container is running and at work."""
        before = self.count(name)[0]
        wait_for(f"{name} to go on counting", lambda: self.count(name)[0] > before + 1)

    def checkpoint(self, name: str, archive: Path, *options: str, compression: str = "none", check: bool = True) -> str:
        """Checkpoint into an archive."""
        export = ["--compress", compression, "--export", str(archive)]
        return self("container", "checkpoint", *export, *options, name, check=check)

    def restore(self, archive: Path, *options: str, check: bool = True) -> str:
        """Restore from an archive."""
        return self("container", "restore", "--import", str(archive), *options, check=check)

    def assert_goes_on(self, name: str, before: tuple[int, str]) -> None:
        """Check that a workload counts on from where it was, with the memory it had; what it said up to now is old."""
        latest = max(before[0], self.count(name)[0])
        wait_for(f"{name} to go on", lambda: self.count(name)[0] > latest + 1)
        assert self.count(name)[1] == before[1]

    def remove(self, name: str) -> None:
        """Remove a container, running or not."""
        self("rm", "--force", "--time", "0", name)

    def close(self) -> None:
        """Remove everything."""
        self("rm", "--force", "--all", "--time", "0", check=False)
        # conmon cleans up with a podman of its own, which would make the directories anew.
        wait_for("podman to clean up", lambda: not self.namespace.programs() & {"conmon", "podman"})
        self.namespace.close()


def image_names(archive: Path) -> set[str]:
    """Return the names of the files below checkpoint/ in an archive."""
    with tarfile.open(archive) as tar:
        return {name.removeprefix("checkpoint/") for name in tar.getnames() if name.startswith("checkpoint/")}


def assert_packed(archive: Path) -> None:
    """Check that memory is in packs only."""
    names = image_names(archive)
    assert "ocihook.manifest" in names
    assert any(name.endswith(".pack") for name in names)
    assert not any(name.startswith("pages-") for name in names)
