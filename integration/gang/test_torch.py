"""A training with torch over gloo, of four ranks in containers: moved, its losses are those of an uninterrupted run.

Only nightly (conftest.py): torch takes 900 MB, and its ranks some minutes on two cores.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from integration.gang.mesh import Members, succeeded
from integration.gang.nodes import limit_members
from integration.gang.test_job import losses
from integration.namespace import Namespace, wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman
from integration.packages.engine import PIVOTED
from integration.podman.engine import IMAGE

TRAINING = Path(__file__).parent / "training.py"
_RANKS = 4
_STEPS = 400
_MOVES = 4  # every second one; the others leave it running
_TORCH = "torch==2.13.0"
_TRAINED_S = 600.0


class HostPodman(NetPodman):
    """A podman that can give its containers programs of this machine."""

    def _make_namespace(self, size: str) -> Namespace:
        assert not size
        sources = {"/usr": "usr", sys.base_prefix: "python"}
        binds = [
            f'mkdir -p "$root/host/{name}"; mount --rbind {path} "$root/host/{name}"' for path, name in sources.items()
        ]
        setup = PIVOTED.replace("mount --rbind /dev", "\n".join([*binds, "mount --rbind /dev"]))
        return Namespace(setup, [str(self.scratch), str(self._root)], own_network=True)


class Torch(Members):
    """Ranks of torch."""

    def __init__(self, node: NetPodman, site: Path) -> None:
        """Start all; torch and the program are in `site`."""
        super().__init__([node], _RANKS, "torch")
        self._said_dir = node.scratch / "said"
        self._said_dir.mkdir()
        places = {"/host/usr": "/usr", "/host/usr/lib": "/lib", "/host/usr/lib64": "/lib64"}
        places |= {"/host/python": sys.base_prefix, str(site): "/site"}
        options = [f"--volume={here}:{there}:ro" for here, there in places.items()]
        options += [f"--volume={self._said_dir}:/said", "--tmpfs=/tmp", "--pids-limit=0"]
        options += ["--env=PYTHONPATH=/site", "--env=GLOO_SOCKET_IFNAME=eth0"]
        options += [f"--annotation=ocihook.io/{key.replace('_', '-')}={text}" for key, text in self.notes.items()]
        program = [f"{sys.base_prefix}/bin/python3", "/site/training.py"]
        master = self.places[self.names[0]].four
        for rank, name in enumerate(self.names):
            arguments = [str(rank), str(_RANKS), str(_STEPS), master, f"/said/{name}"]
            network = f"--network=ns:/run/netns/{name}"
            node("run", "--detach", "--name", name, network, *options, IMAGE, *program, *arguments)

    def said(self, name: str) -> str:
        """Return all that a rank has written."""
        path = self._said_dir / name
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks have made so many steps."""
        for name in self.names:
            wait_for(f"step {step} of {name}", lambda name=name: len(losses(self.said(name))) > step, _TRAINED_S)  # type: ignore[misc]


def test_torch_over_gloo_moves(make_node: MakeNode) -> None:
    node = make_node(kind=HostPodman)
    limit_members(node, 600)
    site = node.scratch / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), _TORCH]
    subprocess.run(pip, check=True, timeout=_TRAINED_S)
    shutil.copy(TRAINING, site)
    alone = [node.scratch / f"alone{rank}" for rank in range(_RANKS)]
    environment = {**os.environ, "PYTHONPATH": str(site), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [[str(rank), str(_RANKS), str(_STEPS), "127.0.0.1", str(log)] for rank, log in enumerate(alone)]
    uninterrupted = [subprocess.Popen([sys.executable, str(TRAINING), *each], env=environment) for each in arguments]
    try:
        wait_for("the other", lambda: all(log.exists() and "done" in log.read_text() for log in alone), _TRAINED_S)
    finally:
        for process in uninterrupted:
            process.kill()
            process.wait()
    expected = losses(alone[0].read_text())
    assert [step for step, _ in expected] == list(range(_STEPS))

    training = Torch(node, site)
    for number in range(1, _MOVES + 1):
        training.wait_for_step(number * _STEPS // (_MOVES + 2))
        is_moved = number % 2 == 0
        succeeded(training.checkpoint(*([] if is_moved else ["--leave-running"])))
        assert "connections" in training.verify()
        if is_moved:
            training.move(number)
            succeeded(training.restore())
    training.wait_for_step(_STEPS - 1)
    for name in training.names:
        assert losses(training.said(name)) == expected
    training.assert_nothing_is_left()
