"""A gang of pods that containerd runs, asked by `crictl`: its archives fit together, and it runs on."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.containerd.engine import Containerd
from integration.gang.pods import Pair
from integration.journals import sessions
from integration.namespace import CommandError


@pytest.fixture
def pair(scratch: Path, forky_root: Path, wheels: Path, peer: Path) -> Iterator[Pair]:
    """Two pods of a gang, which are connected."""
    node = Containerd(scratch, forky_root, wheels, peer)
    try:
        node.install()
        yield Pair(node)
    finally:
        node.close()


def test_pods_are_checkpointed_and_made_again(pair: Pair) -> None:
    """They run on, as CRI wants it; made again at other addresses, they continue from the checkpoint."""
    said = pair.node.ocihook("gang", "checkpoint", "default/job", str(pair.epoch(1)), "--cri", "--json")
    done = json.loads(said[said.index("{") :])  # behind the phases, which are on stderr
    assert (done["epoch"], done["connections"]) == (1, 1)
    assert sorted(done["archives"]) == [f"{name}/{name}" for name in pair.names]
    for path in done["archives"].values():
        with tarfile.open(pair.node.namespace.path(path)) as archive:
            assert {"config.dump", "spec.dump", "checkpoint/inventory.img"} <= {*archive.getnames()}
    assert all(pair.node.is_running(container) for container in pair.containers)
    pair.assert_flows()
    again = ("gang", "restore", str(pair.epoch(1)), "--cri")
    with pytest.raises(CommandError, match="members of gang default/job run already: first/first, second/second"):
        pair.node.ocihook(*again)
    for container in pair.containers:
        pair.node.remove(container)
    assert "default/job, epoch 1: restored" in pair.node.ocihook(*again)
    pair.assert_flows()
    assert all(session["effects"] == [] for session in sessions(pair.node.namespace))
