"""A real kubelet without an API server, over a real engine: it runs static pods and has its checkpoint API."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from integration.cri.engine import RUNNING, CriEngine
from integration.namespace import TIMEOUT_S, wait_for

PROGRAM = Path(os.environ.get("OCIHOOK_KUBELET", ""))
NODE = "node1"
CHECKPOINTS = "/var/lib/kubelet/checkpoints"
_MANIFESTS = "/etc/kubernetes/manifests"
_CONFIG = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "staticPodPath": _MANIFESTS,
    "address": "127.0.0.1",
    "healthzPort": 0,
    "authentication": {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": False},
        "x509": {"clientCAFile": "/scratch/client.crt"},
    },
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "failCgroupV1": False,
    "oomScoreAdj": 0,
    "makeIPTablesUtilChains": False,
    "resolvConf": "",
    "fileCheckFrequency": "1s",
    "syncFrequency": "1s",
    "localStorageCapacityIsolation": False,
    "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
}


class Kubelet:
    """One kubelet, with a client's certificate in `engine.scratch`."""

    def __init__(self, engine: CriEngine) -> None:
        self.engine = engine
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        names = ["-subj", "/CN=client", "-keyout", "client.key", "-out", "client.crt"]
        subprocess.run([*make, *names], cwd=engine.scratch, check=True, capture_output=True, timeout=TIMEOUT_S)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        config = {**_CONFIG, "port": self.port, "containerRuntimeEndpoint": f"unix://{engine.socket}"}
        engine.write("/etc/kubernetes/kubelet.json", json.dumps(config))
        engine.namespace.path(_MANIFESTS).mkdir()
        subprocess.run(["cp", PROGRAM, engine.namespace.path("/usr/local/bin/kubelet")], check=True, timeout=TIMEOUT_S)
        options = ["--config", "/etc/kubernetes/kubelet.json", "--hostname-override", NODE]
        self._process = engine.namespace.spawn("kubelet", *options, log=engine.scratch / "kubelet.log")
        wait_for("the kubelet", lambda: self.curl("GET", "healthz")[0] == 200)

    def curl(self, method: str, path: str) -> tuple[int, str]:
        """Ask it as docs/quickstart.md does; return the status and the answer."""
        options = ["-sk", "--cert", "client.crt", "--key", "client.key", "-X", method, "-w", "\n%{http_code}"]
        command = ["curl", *options, f"https://localhost:{self.port}/{path}"]
        done = subprocess.run(
            command, cwd=self.engine.scratch, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer, _, status = done.stdout.rpartition("\n")
        return int(status), answer

    def start(self, name: str, image: str = "", **annotations: str) -> str:
        """Run a static pod with one container, `main`, in a network of its own; return the container's id."""
        notes = {f"ocihook.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        container: dict[str, Any] = {"name": "main", "image": image or self.engine.image}
        if not image:
            container["args"] = ["24"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "team", "annotations": notes},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
        }
        self.engine.write(f"{_MANIFESTS}/{name}.json", json.dumps(pod))
        wait_for(f"{name} to run", lambda: bool(self._containers(name)))
        (found,) = self._containers(name)
        wait_for(f"{name} to count", lambda: self.engine.count(found)[0] > 2)
        return found

    def _containers(self, name: str) -> list[str]:
        listed = self.engine.call("ListContainers").containers
        pod = f"{name}-{NODE}"
        return [c.id for c in listed if c.labels["io.kubernetes.pod.name"] == pod and c.state == RUNNING]

    def remove(self, name: str) -> None:
        """Remove a pod."""
        self.engine.namespace.path(f"{_MANIFESTS}/{name}.json").unlink()
        wait_for(f"{name} to end", lambda: not self._containers(name))

    def close(self) -> None:
        """End it; the engine then removes its pods."""
        self._process.terminate()
        self._process.wait(10)

    def checkpoint(self, name: str) -> tuple[int, str]:
        """Ask for a checkpoint of a pod's container; return the status and the answer."""
        return self.curl("POST", f"checkpoint/team/{name}-{NODE}/main")
