"""A real engine with its CRI, in a Debian root of its own that is pivoted to: what a kubelet would talk to."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from packaging.requirements import Requirement

from integration import fake_driver
from integration.cri.registry import Registry, program_layer
from integration.namespace import TIMEOUT_S, CommandError, Namespace, wait_for

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
POD_NETWORK, NODE_NETWORK = 0, 2  # NamespaceMode.POD, NODE
CONTAINER_PID = 1  # NamespaceMode.CONTAINER
RUNNING = 1  # ContainerState.CONTAINER_RUNNING

# A chroot would not do: CRIU wants the container's mounts below the root of the mount namespace. $3 is 1 or 2.
_SETUP = """
root="$1/root"
mkdir -p "$1/upper" "$1/work" "$1/containerd" "$1/containers" "$root"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$root"
mount --make-private "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
if [ "$3" = 1 ]; then mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
else mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"; fi
mkdir -p "$root/scratch" "$root/var/lib/containerd" "$root/var/lib/containers" "$root/oldroot" "$root/opt/project"
mount --bind "$1" "$root/scratch"
mount --bind "$1/containerd" "$root/var/lib/containerd"
mount --bind "$1/containers" "$root/var/lib/containers"
cd "$root"
pivot_root . oldroot
cd /
umount -l /oldroot
"""

# A network that pods have of their own, without links: nothing of it is in the node's.
_NETWORK = '{"cniVersion": "1.0.0", "name": "test", "plugins": [{"type": "no-link"}]}'
_NO_LINK = """#!/bin/sh
case "$CNI_COMMAND" in
    VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
    ADD)
        echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],'
        echo ' "ips": [{"address": "10.88.0.2/24", "interface": 0}]}' ;;
esac
"""


class CriEngine:
    """One engine, its registry, and a CRI client."""

    name = ""  # of its program and its socket in /run
    mounts: tuple[Mapping[str, str], ...] = ()  # of every container
    process: subprocess.Popen[bytes] | None = None

    def __init__(
        self,
        scratch: Path,
        forky_root: Path,
        wheels: Path,
        workload: Path,
        *,
        cgroup_version: int = 2,
        cuda_files: Path | None = None,
    ) -> None:
        self.scratch = scratch
        self.registry = Registry()
        layer = program_layer(workload, cuda_files)
        self.image = self.registry.add("workload", layer, entrypoint=["/workload"])
        self.pause = self.registry.add("pause", layer, entrypoint=["/workload", "pause"])
        self.namespace = Namespace(_SETUP, [str(scratch), str(forky_root), str(cgroup_version)])
        self.cgroup_version = cgroup_version
        subprocess.run(["cp", "-r", wheels, self.namespace.path("/opt/ocihook")], check=True, timeout=TIMEOUT_S)
        if cuda_files:
            subprocess.run(["cp", "-r", cuda_files, self.namespace.path("/opt/cuda")], check=True, timeout=TIMEOUT_S)
            fake_driver.install_driver(self.namespace, Path("/opt/cuda"))
        self.runtime_prefix = "/usr/sbin/" if cgroup_version == 1 else "/usr/local/bin/limitless-"
        if cgroup_version == 2:
            for name in ("runc", "crun"):
                wrapper = self.namespace.path(self.runtime_prefix + name)
                subprocess.run(["cp", HERE / "limitless-runtime", wrapper], check=True, timeout=TIMEOUT_S)
        self.write("/etc/cni/net.d/10-test.conflist", _NETWORK)
        self.write("/usr/lib/cni/no-link", _NO_LINK)
        self.namespace.path("/usr/lib/cni/no-link").chmod(0o755)
        self.write("/etc/criu/runc.conf", "manage-cgroups=ignore\n" if cgroup_version == 2 else "")
        self.configure("[agent]\nidle_timeout_s = 2\n")
        self.pull_from(self.registry.address)
        try:
            self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        self.process = self.namespace.spawn(*self.command(), log=self.scratch / f"{self.name}.log")
        wait_for(self.name, self._listens)
        # grpc wants a path that stays short and has no links of /proc in it.
        (self.scratch / "run").symlink_to(self.namespace.path("/run"))
        self._channel = grpc.insecure_channel(f"unix:{self.scratch}{self.socket}")
        self._messages, services = grpc.protos_and_services("integration/cri/cri.proto")
        self._runtime = services.RuntimeServiceStub(self._channel)
        self._images = services.ImageServiceStub(self._channel)
        wait_for(f"{self.name}'s CRI", self._is_ready)
        self._pods: dict[str, str] = {}  # container id -> sandbox id

    @property
    def socket(self) -> str:
        """Where it listens, on the node."""
        return f"/run/{self.name}.sock"

    def command(self) -> Sequence[str]:
        """Configure it; return what starts it."""
        raise NotImplementedError

    def pull_from(self, address: str) -> None:
        """Let it pull from a registry without TLS."""
        raise NotImplementedError

    def _listens(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            log = (self.scratch / f"{self.name}.log").read_text()
            raise CommandError(f"{self.name} ended: {log[-1000:]}")
        return self.namespace.path(self.socket).exists()

    def _is_ready(self) -> bool:
        try:
            self.call("Version")
        except grpc.RpcError:
            return False
        return True

    def call(self, method: str, timeout_s: float = TIMEOUT_S, **fields: object) -> Any:  # noqa: ANN401 - a message of the CRI
        """Call a method of the CRI."""
        service = self._images if "Image" in method else self._runtime
        return getattr(service, method)(getattr(self._messages, f"{method}Request")(**fields), timeout=timeout_s)

    def message(self, kind: str) -> Any:  # noqa: ANN401 - a message of the CRI
        """Return an empty message."""
        return getattr(self._messages, kind)()

    def write(self, path: str, text: str) -> None:
        """Write a file of the node."""
        file = self.namespace.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def configure(self, text: str) -> None:
        """Write ocihook's configuration."""
        self.write("/etc/ocihook/config.toml", text)

    def ocihook(self, *arguments: str, check: bool = True) -> str:
        """Run an ocihook command on the node."""
        command = ("python3", "-m", "ocihook", *arguments)
        return self.namespace.run(*command, check=check, PYTHONPATH="/opt/ocihook")

    def install(self) -> None:
        """Install ocihook on the node."""
        self.ocihook("install")

    def start(  # noqa: PLR0913 - what a pod may be
        self,
        name: str,
        *,
        image: str = "",
        mib: int = 24,
        arguments: Sequence[str] = (),
        runtime: str = "runc",
        gpus: Sequence[int] = (),
        pull: bool = True,
        network: int = NODE_NETWORK,
        namespace: str = "default",
        container_name: str = "",
        **annotations: str,
    ) -> str:
        """Make a pod with one container and start it; return the container's id.

        Args:
            name: of the pod.
            image: a checkpoint (archive or image) to restore; else the workload's.
            mib: memory of a new workload.
            arguments: of a workload that does not count, instead.
            runtime: runc or crun.
            gpus: minors of those that it gets; with any, a new workload is the CUDA one.
            pull: whether an image has to be pulled.
            network: the node's or the pod's own.
            namespace: the pod's.
            container_name: the container's, unless it is the pod's.
            annotations: of ocihook, without prefix; the pod's, as a kubelet passes them on.
        """
        notes = {f"ocihook.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        names = {"network": network, "pid": CONTAINER_PID}
        pod = {
            "metadata": {"name": name, "uid": name, "namespace": namespace},
            "log_directory": f"/scratch/logs/{name}",
            "annotations": notes,
            "linux": {"cgroup_parent": "/ocihook-test", "security_context": {"namespace_options": names}},
        }
        sandbox = self.call("RunPodSandbox", config=pod, runtime_handler=runtime).pod_sandbox_id
        if pull and not image.startswith("/"):
            self.call("PullImage", image={"image": image or self.image})
        config = {
            "metadata": {"name": container_name or name},
            "image": {"image": image or self.image, "user_specified_image": self.image},
            "args": arguments or ([] if image else [str(mib), *(["watch"] if gpus else [])]),
            "labels": {
                "io.kubernetes.container.name": container_name or name,
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
            },
            "mounts": self.mounts,
            "log_path": "log",
            "linux": {"security_context": {"namespace_options": names}},
            "devices": fake_driver.devices(gpus),
        }
        if gpus and not image:
            config["command"] = ["/cuda_workload"]
        try:
            container: str = self.call(
                "CreateContainer", pod_sandbox_id=sandbox, config=config, sandbox_config=pod
            ).container_id
            self._pods[container] = sandbox
            self.call("StartContainer", container_id=container)
        except grpc.RpcError:
            self.call("StopPodSandbox", pod_sandbox_id=sandbox)
            self.call("RemovePodSandbox", pod_sandbox_id=sandbox)
            raise
        if not image and not arguments:
            wait_for(f"{name} to count", lambda: self.count(container)[0] > 2)
        return container

    def log(self, container: str) -> str:
        """Return what a container has printed."""
        path: str = self.call("ContainerStatus", container_id=container).status.log_path
        return self.namespace.path(path).read_text()

    def count(self, container: str) -> tuple[int, str]:
        """Return the last count and checksum that a workload has printed."""
        found = re.findall(r"count (\d+) checksum (\w+)\r?$", self.log(container), re.MULTILINE)
        return (int(found[-1][0]), found[-1][1]) if found else (0, "")

    def init_pid(self, container: str) -> int:
        """Return the pid of a container's first process."""
        info = self.call("ContainerStatus", container_id=container, verbose=True).info["info"]
        pid: int = json.loads(info)["pid"]
        return pid

    def is_running(self, container: str) -> bool:
        """Return whether a container runs, by the engine's own word."""
        state: int = self.call("ContainerStatus", container_id=container).status.state
        return state == RUNNING

    def assert_counts(self, container: str) -> None:
        """Check that a container is running and at work."""
        before = self.count(container)[0]
        wait_for("the container to go on counting", lambda: self.count(container)[0] > before + 1)

    def assert_goes_on(self, container: str, before: tuple[int, str]) -> None:
        """Check that a workload counts on from where it was, with the memory it had; what it said up to now is old."""
        latest = max(before[0], self.count(container)[0])
        wait_for("the container to go on", lambda: self.count(container)[0] > latest + 1)
        assert self.count(container)[1] == before[1]

    def is_open(self) -> bool:
        """Return whether a session is open."""
        return any(self.namespace.path("/run/ocihook/sessions").glob("*.json"))

    def checkpoint(self, container: str, name: str, timeout_s: float = TIMEOUT_S) -> Path:
        """Checkpoint as the kubelet does, which waits so long; return the archive."""
        self.call("CheckpointContainer", timeout_s, container_id=container, location=f"/scratch/{name}")
        return self.scratch / name

    def remove(self, container: str) -> None:
        """Remove a container with its pod."""
        self._remove_pod(self._pods.pop(container))

    def _remove_pod(self, sandbox: str) -> None:
        self.call("StopPodSandbox", pod_sandbox_id=sandbox)
        self.call("RemovePodSandbox", pod_sandbox_id=sandbox)

    def close(self) -> None:
        """Remove everything."""
        for pod in self.call("ListPodSandbox").items:
            self._remove_pod(pod.id)
        self._channel.close()
        self._end()

    def _end(self) -> None:
        self.registry.close()
        self.namespace.close()


def build_wheels(target: Path, python_version: str) -> None:
    """Install the project and what it needs into `target`, as `pip install .` would with that Python."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in project["dependencies"]]
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    names = [f"{r.name}{r.specifier}" for r in needed if r.marker is None or r.marker.evaluate(environment)]
    _pip("wheel", "--no-deps", "--wheel-dir", str(target.parent), str(PROJECT))
    wheel = next(target.parent.glob("ocihook-*.whl"))
    _pip("install", "--target", str(target), "--no-deps", str(wheel))
    _pip("install", "--target", str(target), "--python-version", python_version, "--only-binary=:all:", *names)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, timeout=600)
