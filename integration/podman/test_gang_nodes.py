"""A gang whose members are on two nodes: services of two podmans with storage of their own, reached over ssh."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.podman.engine import IMAGE, Podman
from integration.podman.sshd import Sshd

MEMBERS = ("a", "b")


class Reached(Podman):
    """A podman in a network of its own, where sshd listens."""

    own_network = True


@pytest.fixture
def podman(scratch: Path, workload: Path) -> Iterator[Podman]:
    """It, with runc and ocihook installed."""
    podman = Reached(scratch, "runc", workload)
    podman.install()
    yield podman
    podman.close()


class Node(Podman):
    """Another podman of the same machine, with its service."""

    def __init__(self, first: Podman, name: str, image: Path) -> None:
        self.namespace, self.scratch, self.runtime, self.name = first.namespace, first.scratch, first.runtime, name
        self("load", "--quiet", "--input", str(image))
        self.socket = self.namespace.path(f"/run/{name}.sock")
        self.url = Sshd.url(f"/run/{name}.sock")
        words = ["podman", *self.options(), "system", "service", "--time", "0", f"unix:///run/{name}.sock"]
        self.service = self.namespace.spawn(*words, log=self.scratch / f"{name}.log", TMPDIR=str(self.scratch))
        wait_for(f"the service of {name}", self.socket.exists)

    def options(self) -> list[str]:
        """Keep everything at a place of its own."""
        return [
            option.replace("podman-test", self.name).replace("/podman", f"/{self.name}") for option in super().options()
        ]

    def close(self) -> None:
        """End the service, and all containers."""
        self.service.send_signal(signal.SIGTERM)
        self.service.wait()
        self("rm", "--force", "--all", "--time", "0", check=False)


def test_members_of_two_nodes_are_checkpointed_and_restored(podman: Podman) -> None:
    image = podman.scratch / "image-of-nodes.tar"
    sshd = Sshd(podman.namespace, podman.scratch)
    podman.environment = sshd.environment
    podman("save", "--quiet", "--output", str(image), IMAGE)
    nodes = {name: Node(podman, f"node-{name}", image) for name in MEMBERS}
    try:
        for name, node in nodes.items():
            node.start(name, 4, gang="job", gang_size="2")
        where = [word for node in nodes.values() for word in ("--node", node.url)]
        directory = podman.scratch / "epoch"
        said = podman.ocihook("gang", "checkpoint", "job", str(directory), *where, "--json")
        done = json.loads(said[said.index("{") :])  # behind the phases, which are on stderr
        assert sorted(done["archives"]) == list(MEMBERS)
        assert sshd.logins() >= len(nodes), sshd.log.read_text()
        before = {name: node.count(name) for name, node in nodes.items()}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: nodes[name].remove(name), MEMBERS))
        assert "job, epoch 1: restored" in podman.ocihook("gang", "restore", str(directory))
        for name, node in nodes.items():
            wait_for(f"{name} to continue", lambda name=name, node=node: node.count(name)[0] > before[name][0])  # type: ignore[misc]
            assert node.count(name)[1] == before[name][1]
    finally:
        for node in nodes.values():
            node.close()
