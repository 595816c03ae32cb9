"""podman with the runtime handler before its runtime, as `ocihook install --runtime` would have it."""

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc

from integration import fake_driver
from integration.containerd.engine import Containerd
from integration.cri.engine import CONTAINER_PID, NODE_NETWORK
from integration.namespace import Namespace, wait_for
from integration.podman.engine import IMAGE, SITE, Podman
from ocihook.linux.procfs import Process, descendants, parent_pid
from ocihook.node.install import render

if TYPE_CHECKING:
    import subprocess

_PREFIX = "/usr/local/bin/ocihook-"
_STALL = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = "$(cat /run/stall 2>/dev/null)" ] || exit 0
touch /run/stall.there
while [ -e /run/stall ]; do sleep 0.02; done
"""
_LINE_DIGITS = 127  # of the workload's stream
HYBRID = 0  # version of cgroups: v1, with v2 beside it, as this machine has them
_CGROUPS = {1: "umount /sys/fs/cgroup && umount /sys/fs/cgroup/unified", HYBRID: "umount /sys/fs/cgroup"}
_OWN_PIDS = {"network": NODE_NETWORK, "pid": CONTAINER_PID}
# On a machine with hybrid cgroups crun's CRIU is to see the hierarchies alone that a test has: that of v2, or of v1.
# A controller that only cgroup2 has (hugetlb) would be enabled anew in a cgroup that has processes, and be refused.
_CRUN_CONF = {
    1: "".join(
        f"cgroup-dump-controller {name}\n" for name in ("cpu", "cpuacct", "devices", "freezer", "memory", "pids")
    ),
    2: "cgroup-dump-controller unified\n",
}


class Stalling:
    """A node on which CRIU waits where a test wants it to."""

    namespace: Namespace

    def stall(self) -> None:
        """Have CRIU wait at the stage that /run/stall names, as long as it does."""
        script = self.namespace.path("/etc/ocihook/stall")
        script.write_text(_STALL)
        script.chmod(0o755)
        for conf in self.namespace.path("/etc/criu").glob("*.conf"):
            conf.write_text(f"{conf.read_text()}action-script /etc/ocihook/stall\n")

    def stall_at(self, stage: str) -> None:
        """Have the next CRIU wait at a stage."""
        self.namespace.path("/run/stall.there").unlink(missing_ok=True)
        self.namespace.path("/run/stall").write_text(stage)

    def wait_for_stall(self) -> None:
        """Wait until CRIU is there."""
        wait_for("CRIU to be at its stage", self.namespace.path("/run/stall.there").exists)

    def go_on(self) -> None:
        """Let CRIU continue."""
        self.namespace.path("/run/stall").unlink(missing_ok=True)

    def restorer(self, who: str) -> int:
        """Return one of those who restore a container now: caller, worker, agent, criu, or else the runtime."""
        if who in ("worker", "caller"):
            handlers = self.namespace.pids("ocihook.hook.handler")
            return next(pid for pid in handlers if (parent_pid(pid) in handlers) == (who == "worker"))
        words = {"criu": "criu: restore", "agent": "ocihook.agent.server"}
        return self.namespace.pid_of(words.get(who, " restore --detach "))

    def stopper(self, who: str) -> int:
        """Return one of those who checkpoint a container that is stopped: wrapper, agent, criu, or else the runtime."""
        runtime = self.namespace.pid_of(" checkpoint --image-path ")
        if who == "criu":
            return next(p for p in descendants(runtime) if Path(f"/proc/{p}/comm").read_text().strip() == "criu")
        words = {"wrapper": "ocihook.hook.handler", "agent": "ocihook.agent.server"}
        return self.namespace.pid_of(words[who]) if who in words else runtime


def streamed(*logs: str) -> str:
    """Return what workloads have written to stderr, by logs as podman and the CRI have them, without ends of lines."""
    return "".join(re.findall(r"^\S+ stderr [FP] (.*)$", "\n".join(logs), re.MULTILINE))


def assert_streamed(*logs: str) -> None:
    """Check that no byte of a stream is missing or there twice, over all containers that were one after another."""
    found = streamed(*logs)
    lines = len(found) // _LINE_DIGITS + 1
    wanted = "".join(f"{line:0{_LINE_DIGITS}}" for line in range(lines))
    assert found, "nothing"
    at = next((at for at, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
    assert at is None, f"after {at} bytes: {found[at - 200 : at + 200]}"


def _signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_full(pid: int, descriptor: int) -> bool:
    pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [pipe], [], 0)[1]
    finally:
        os.close(pipe)


class HandledPodman(Stalling, Podman):
    """One podman, whose containers are the handler's if an annotation says so."""

    def __init__(self, scratch: Path, runtime: str, workload: Path, *, cgroup_version: int = 2) -> None:
        self.cgroup_version = cgroup_version
        super().__init__(scratch, runtime, workload)
        if runtime == "crun":
            self.namespace.path("/etc/criu/default.conf").write_text(_CRUN_CONF[cgroup_version])
        program = self.namespace.run("sh", "-c", f"command -v {runtime}").strip()
        handler = scratch / f"ocihook-{runtime}"
        handler.write_text(
            render((SITE / "ocihook/hook/handler").read_text(), "Test", SITE).replace("@RUNTIME@", program)
        )
        handler.chmod(0o755)
        self.handler = handler
        self.runtime = str(handler)
        self.install()

    def _make_namespace(self, size: str) -> Namespace:
        namespace = super()._make_namespace(size)
        if set_up := _CGROUPS.get(self.cgroup_version):  # which podman and runtimes know by the file system there
            namespace.run("sh", "-c", set_up)
        return namespace

    def options(self) -> list[str]:
        """Keep containers by overlayfs: what one has changed is known then."""
        return ["overlay" if option == "vfs" else option for option in super().options()]

    def close(self) -> None:
        """Remove everything; an agent would stay for a claim at a remote that is gone."""
        self.namespace.run("sh", "-c", "kill $(cat /run/ocihook/agent.lock) 2>/dev/null", check=False)
        super().close()

    def use_by_default(self) -> None:
        """Have podman be this one inside, whoever calls it and without any options."""
        root = self.scratch / "podman"
        self.namespace.path("/etc/containers/storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{root}"\nrunroot = "/run/podman-test"\n'
        )
        drop_in = self.namespace.path("/etc/containers/containers.conf.d/99-test.conf")
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text('[engine]\ncgroup_manager = "cgroupfs"\ntmp_dir = "/run/podman-test/tmp"\n')

    def agent_log(self) -> str:
        """Return what agent and handler have said."""
        logs = [self.namespace.path(f"/run/ocihook/{name}.log") for name in ("agent", "handler")]
        return "\n".join(log.read_text() for log in logs if log.exists())

    def make(self, verb: str, name: str, *options: str, workload: Sequence[str] = ("4",), **annotations: str) -> None:
        """Create or run a workload with annotations of ocihook, named without prefix."""
        notes = [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in annotations.items()]
        words = ["--detach"] if verb == "run" else []
        command = [verb, *words, "--name", name, "--network", "host", "--pids-limit", "0", "--stop-timeout", "60"]
        self(*command, *options, *notes, IMAGE, "/workload", *workload)

    def counts(self, name: str) -> list[int]:
        """Return all counts that a workload has printed, in their order."""
        return [int(count) for count in re.findall(r"^count (\d+) checksum \w+\r?$", self("logs", name), re.MULTILINE)]

    def wait_to_count(self, name: str, times: int = 3) -> None:
        """Wait until a workload has printed so many counts more than now."""
        there = len(self.counts(name))
        wait_for(f"{name} to count", lambda: len(self.counts(name)) >= there + times)

    def stop(self, name: str) -> int:
        """Stop a container and remove it; return its last count."""
        super().__call__("stop", name)
        wait_for(f"{name} to be over", lambda: not self.is_running(name))
        last = self.counts(name)[-1]
        super().__call__("rm", name)
        return last

    def stop_unread(self, name: str) -> None:
        """Stop a container that waits for room in its pipe, since conmon does not read; then conmon reads the rest."""
        init, conmon = Process.find(self.init_pid(name)), int(self("inspect", "--format", "{{.State.ConmonPid}}", name))
        assert init is not None
        os.kill(conmon, signal.SIGSTOP)
        try:
            wait_for("the pipe to be full", lambda: _is_full(init.pid, 2))
            stopping = self.namespace.spawn("podman", *self.options(), "stop", name, log=self.scratch / "stop.log")
            wait_for(f"{name} to be gone", lambda: not init.is_alive())
        finally:
            os.kill(conmon, signal.SIGCONT)
        wait_for("podman to end", lambda: stopping.poll() is not None)
        wait_for(f"{name} to be over", lambda: not self.is_running(name))

    def workloads(self) -> list[int]:
        """Return the processes of all containers of this podman, whatever it knows of them."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_workload = (process / "cmdline").read_bytes().startswith(b"/workload\0")
                if is_workload and str(self.scratch) in (process / "mountinfo").read_text():
                    found.append(int(process.name))
        return found

    def init_pid(self, name: str) -> int:
        """Return the pid of a container's first process."""
        return int(self("inspect", "--format", "{{.State.Pid}}", name))

    def file(self, name: str, path: str) -> str:
        """Return the content of a file in a container, "" if there is none."""
        place = Path(f"/proc/{self.init_pid(name)}/root") / path.lstrip("/")
        return place.read_text() if place.exists() else ""

    def write(self, name: str, path: str, text: str) -> None:
        """Write a file in a container."""
        place = Path(f"/proc/{self.init_pid(name)}/root") / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def spawn_run(self, name: str, log: Path, **annotations: str) -> "subprocess.Popen[bytes]":
        """Run a container as `make` does, without waiting for podman."""
        notes = [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in annotations.items()]
        command = ["run", "--detach", "--name", name, "--network", "host", "--pids-limit", "0", *notes, IMAGE]
        return self.namespace.spawn("podman", *self.options(), *command, "/workload", "4", log=log)

    def restore_killing(self, who: str, stage: str, name: str, **annotations: str) -> None:
        """Run a container, and kill what restores it when CRIU has reached a stage."""
        self.stall_at(stage)
        running = self.spawn_run(name, self.scratch / "killed", **annotations)
        self.wait_for_stall()
        os.kill(self.restorer(who), signal.SIGKILL)
        self.go_on()
        wait_for("podman to end", lambda: running.poll() is not None)
        wait_for("the restore to be over", lambda: not self.namespace.pids("ocihook.hook.handler"))


class HandledContainerd(Stalling, Containerd):
    """One containerd, whose runtimes the handler stands before."""

    _is_lost = False

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as of a containerd
        self._configs: dict[str, dict[str, object]] = {}  # of pods, by their names
        self.pod_labels: Mapping[str, str] = {}  # of pods that are made from now on
        super().__init__(*arguments, **options)

    def command(self) -> Sequence[str]:
        """Put the handler before the runtimes; return what starts it."""
        template = (SITE / "ocihook/hook/handler").read_text()
        for runtime in ("runc", "crun"):
            values = {"@ORIGIN@": "Test", "@PYTHONS@": "/usr/bin/python3", "@SITE@": "/opt/ocihook"}
            text = template.replace("@RUNTIME@", f"{self.runtime_prefix}{runtime}")
            for name, value in values.items():
                text = text.replace(name, value)
            self.write(f"{_PREFIX}{runtime}", text)
            self.namespace.path(f"{_PREFIX}{runtime}").chmod(0o755)
        self.write("/etc/criu/runc.conf", "")
        self.write("/etc/criu/default.conf", _CRUN_CONF[2])
        self.runtime_prefix = _PREFIX
        return super().command()

    def start_agent(self) -> None:
        """Start an agent; it leaves if one runs."""
        command = ("python3", "-c", "from ocihook.agent.server import main; main()")
        self.namespace.spawn(*command, log=self.scratch / "agent.log", PYTHONPATH="/opt/ocihook")

    def kill_agent(self) -> bool:
        """Kill the agent with all that it does; return whether there was one."""
        agents = self.namespace.pids("ocihook.agent.server")
        _signal_all(agents, signal.SIGKILL)
        return bool(agents)

    def lose(self) -> None:
        """End all processes of the node at once, as if its power had failed."""
        stopped: set[int] = set()
        while running := self._all_processes() - stopped:  # one that is killed first would be seen by the others
            stopped |= running
            _signal_all(running, signal.SIGSTOP)
        _signal_all(stopped, signal.SIGKILL)
        self._is_lost = True

    def _all_processes(self) -> set[int]:
        workloads = [pid for container in self._pods for pid in self.processes(container)]
        return {*self.namespace.pids(""), *workloads} - {self.namespace.pid}

    def come_back(self) -> None:
        """Start its engine again."""
        self._is_lost = False
        self.go_on()
        self.process = self.namespace.spawn("containerd", log=self.scratch / f"{self.name}.log")
        wait_for(f"{self.name}'s CRI", self._is_ready)

    def close(self) -> None:
        """Remove everything, also of a node that was lost."""
        if self._is_lost:
            self.come_back()
        super().close()

    def counts(self, container: str) -> list[int]:
        """Return all counts that a workload has printed, in their order."""
        return [int(count) for count in re.findall(r"count (\d+) checksum \w+\r?$", self.log(container), re.MULTILINE)]

    def stop(self, container: str) -> int:
        """Stop a container and remove it with its pod; return its last count."""
        self.call("StopContainer", container_id=container, timeout=60)
        last = self.counts(container)[-1]
        self.remove(container)
        return last

    def file(self, container: str, path: str) -> Path:
        """Return a file of a container as this process can open it."""
        return Path(f"/proc/{self.init_pid(container)}/root") / path.lstrip("/")

    def write_in(self, container: str, path: str, text: str) -> None:
        """Write a file in a container."""
        place = self.file(container, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def make_pod(self, name: str, runtime: str = "runc", **annotations: str) -> str:
        """Make a pod on the node's network, with the labels of `pod_labels`; return its sandbox's id."""
        self._configs[name] = {
            "metadata": {"name": name, "uid": name, "namespace": "default"},
            "log_directory": f"/scratch/logs/{name}",
            "labels": {**self.pod_labels},
            "annotations": {f"ocihook.io/{key.replace('_', '-')}": value for key, value in annotations.items()},
            "linux": {"cgroup_parent": "/ocihook-test", "security_context": {"namespace_options": _OWN_PIDS}},
        }
        self.call("PullImage", image={"image": self.image})
        made = self.call("RunPodSandbox", config=self._configs[name], runtime_handler=runtime)
        sandbox: str = made.pod_sandbox_id
        return sandbox

    def add(  # noqa: PLR0913 - what a container may be
        self,
        sandbox: str,
        pod: str,
        name: str,
        *words: str,
        volumes: Sequence[str] = (),
        gpus: Sequence[int] = (),
        memory_mib: int = 0,
        has_terminal: bool = False,
        host_paths: Mapping[str, str] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        **security: Any,  # noqa: ANN401 - as the CRI has it
    ) -> str:
        """Create a container in a pod, which is not started; return its id.

        Args:
            sandbox: of the pod.
            pod: its name.
            name: of the container.
            words: of the workload; of the CUDA one, with GPUs.
            volumes: of the pod, an emptyDir for each, by where the container has them.
            gpus: minors of those that it gets.
            memory_mib: that it may have; 0: any.
            has_terminal: whether it has one.
            host_paths: directories of the node, by where the container has them; read-only with ":ro" behind.
            environment: variables by their names.
            security: of its security context.
        """
        volume = "/var/lib/kubelet/pods/{}/volumes/kubernetes.io~empty-dir/{}"
        places = {path: volume.format(pod, Path(path).name) for path in volumes}
        for place in places.values():
            self.namespace.path(place).mkdir(parents=True, exist_ok=True)
        labels = {"container.name": name, "pod.name": pod, "pod.namespace": "default"}
        config = {
            "metadata": {"name": name},
            "image": {"image": self.image, "user_specified_image": self.image},
            "command": ["/cuda_workload" if gpus else "/workload"],
            "args": list(words),
            "envs": [{"key": key, "value": value} for key, value in environment.items()],
            "labels": {f"io.kubernetes.{key}": value for key, value in labels.items()},
            "mounts": [
                {
                    "container_path": path,
                    "host_path": place.removesuffix(":ro"),
                    "readonly": place.endswith(":ro"),
                }
                for path, place in (places | {**host_paths}).items()
            ],
            "log_path": f"{name}.log",
            "tty": has_terminal,
            "linux": {
                "resources": {"memory_limit_in_bytes": memory_mib << 20},
                "security_context": {"namespace_options": _OWN_PIDS, **security},
            },
            "devices": fake_driver.devices(gpus),
        }
        made = self.call("CreateContainer", pod_sandbox_id=sandbox, config=config, sandbox_config=self._configs[pod])
        container: str = made.container_id
        self._pods[container] = sandbox
        return container

    def ctr(self, *words: str) -> str:
        """Call containerd by its own client."""
        return self.namespace.run("ctr", "--address", self.socket, "--namespace", "k8s.io", *words)

    def processes(self, container: str) -> list[int]:
        """Return the processes in a container's cgroup, whatever its engine knows of it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if container in (process / "cgroup").read_text():
                    found.append(int(process.name))
        return found

    def shim_pid(self, container: str) -> int:
        """Return the shim of a container's pod."""
        return self.namespace.pid_of(f"containerd-shim-runc-v2 -namespace k8s.io -id {self._pods[container]}")

    def remove(self, container: str) -> None:
        """Remove a container with its pod; ask again, as a kubelet does, where its shim was just killed."""
        sandbox = self._pods.pop(container)

        def is_removed() -> bool:
            try:
                self._remove_pod(sandbox)
            except grpc.RpcError:
                return False
            return True

        wait_for(f"the pod of {container} to be removed", is_removed)
