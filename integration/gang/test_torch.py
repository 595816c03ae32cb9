"""A training with torch over gloo, of four ranks in containers: moved, its losses are those of an uninterrupted run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration.gang.mesh import Members, succeeded
from integration.gang.nodes import limit_members
from integration.gang.test_job import losses
from integration.namespace import Namespace, is_required, wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman
from integration.packages.engine import PIVOTED
from integration.podman.engine import IMAGE

TRAINING = Path(__file__).parent / "training.py"
TORCH = Path(os.environ.get("OCIHOOK_TORCH_ROOT", "/var/cache/ocihook/torch"))
IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_RANKS = 4
_STEPS = 400 if IS_NIGHTLY else 150
_DUMPS = 8 if IS_NIGHTLY else 2  # every second one moves it; the others leave it running
_FIRST_STEPS = 20  # between one dump and the next
_TRAINED_S = 600.0


@pytest.fixture
def torch() -> Path:
    """What `integration/node-setup torch` has installed."""
    if not (TORCH / ".complete").exists():
        assert not is_required(), f"{TORCH} is missing: run integration/node-setup torch {TORCH} PYTHON"
        pytest.skip(f"needs {TORCH}: integration/node-setup torch {TORCH} PYTHON")
    return TORCH


class HostPodman(NetPodman):
    """A podman that can give its containers programs of this machine."""

    def _make_namespace(self, size: str) -> Namespace:
        assert not size
        sources = {"/usr": "usr", sys.base_prefix: "python", str(TORCH): "torch"}
        binds = [
            f'mkdir -p "$root/host/{name}"; mount --rbind {path} "$root/host/{name}"' for path, name in sources.items()
        ]
        setup = PIVOTED.replace("mount --rbind /dev", "\n".join([*binds, "mount --rbind /dev"]))
        return Namespace(setup, [str(self.scratch), str(self._root)], own_network=True)


class Torch(Members):
    """Ranks of torch."""

    def __init__(self, node: NetPodman) -> None:
        """Start all."""
        super().__init__([node], _RANKS, "torch")
        self._said_dir = node.scratch / "said"
        self._said_dir.mkdir()
        shutil.copy(TRAINING, self._said_dir)
        self._slowly = self._said_dir / "slowly"
        self._slowly.touch()
        places = {"/host/usr": "/usr", "/host/usr/lib": "/lib", "/host/usr/lib64": "/lib64"}
        places |= {"/host/python": sys.base_prefix, "/host/torch": "/torch"}
        options = [f"--volume={here}:{there}:ro" for here, there in places.items()]
        options += [f"--volume={self._said_dir}:/said", "--tmpfs=/tmp", "--pids-limit=0"]
        options += ["--env=PYTHONPATH=/torch", "--env=GLOO_SOCKET_IFNAME=eth0"]
        options += [f"--annotation=ocihook.io/{key.replace('_', '-')}={text}" for key, text in self.notes.items()]
        program = [f"{sys.base_prefix}/bin/python3", "/said/training.py"]
        master = self.places[self.names[0]].four
        for rank, name in enumerate(self.names):
            arguments = [str(rank), str(_RANKS), str(_STEPS), master, f"/said/{name}"]
            network = f"--network=ns:/run/netns/{name}"
            node("run", "--detach", "--name", name, network, *options, IMAGE, *program, *arguments)

    def said(self, name: str) -> str:
        """Return all that a rank has written."""
        path = self._said_dir / name
        return path.read_text() if path.exists() else ""

    def hurry(self) -> None:
        """Let it come to its end."""
        assert not any("done" in self.said(name) for name in self.names)
        self._slowly.unlink()

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks have made so many steps."""
        for name in self.names:
            wait_for(f"step {step} of {name}", lambda name=name: len(losses(self.said(name))) > step, _TRAINED_S)  # type: ignore[misc]


def test_torch_over_gloo_moves(make_node: MakeNode, torch: Path) -> None:
    node = make_node(kind=HostPodman)
    limit_members(node, 600)
    alone = [node.scratch / f"alone{rank}" for rank in range(_RANKS)]
    environment = {**os.environ, "PYTHONPATH": str(torch), "GLOO_SOCKET_IFNAME": "lo"}
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

    training = Torch(node)
    for number in range(1, _DUMPS + 1):
        training.wait_for_step(number * _FIRST_STEPS)
        is_moved = number % 2 == 0
        succeeded(training.checkpoint(*([] if is_moved else ["--leave-running"])))
        assert "connections" in training.verify()
        if is_moved:
            training.move(number)
            succeeded(training.restore())
    training.hurry()
    training.wait_for_step(_STEPS - 1)
    for name in training.names:
        assert losses(training.said(name)) == expected
    training.assert_nothing_is_left()
