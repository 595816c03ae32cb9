"""A training of four ranks, preempted and made again elsewhere: its losses are those of an uninterrupted run.

It is a small stand-in for torch (test_torch.py), which can be moved often: a static program with the same steps and the
same traffic (integration/net/rank.c).
"""

import os
import re

from integration.gang.handled import HandledNetPodman
from integration.gang.mesh import Members, succeeded
from integration.gang.nodes import limit_members
from integration.namespace import wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman, Place
from integration.podman.engine import IMAGE

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_RANKS = 4
_STEPS = 400
_PAUSE_MS = 50  # it lasts as long as it is to be preempted, whatever else this machine does
_FIRST_STEPS = 20  # between one move and the next
_MOVES = 8 if IS_NIGHTLY else 2
_AGAIN = {"checkpoint_on_stop": "true", "restore_from": "latest", "on_restore_error": "fail"}


def losses(said: str) -> list[tuple[int, str]]:
    """Return steps and losses that a rank has printed."""
    return [(int(step), loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", said, re.MULTILINE)]


class Preempted(Members):
    """Ranks of the stand-in, which the runtime checkpoints when they are stopped and restores when they are created."""

    def __init__(self, node: NetPodman) -> None:
        super().__init__([node], _RANKS, "rank")
        self.node = node
        self._said = dict.fromkeys(self.names, "")  # up to the last stop
        addresses = [self.places[name].four for name in self.names]
        self._words = {
            name: words(rank, (addresses[rank], 7000), (addresses[(rank + 1) % _RANKS], 7000), _PAUSE_MS)
            for rank, name in enumerate(self.names)
        }
        self.run()

    def run(self) -> None:
        """Create and start all ranks."""
        given = _AGAIN | self.notes
        notes = [f"--annotation=ocihook.io/{key.replace('_', '-')}={text}" for key, text in given.items()]

        def one(name: str) -> str:
            command = ["run", "--detach", "--name", name, "--network", f"ns:/run/netns/{name}", "--pids-limit", "0"]
            return self.node(*command, *notes, IMAGE, "/workload", *self._words[name])

        succeeded(self.at_once(one))

    def preempt(self) -> None:
        """Stop all ranks at once, and remove them."""
        succeeded(self.at_once(lambda name: self.node("stop", "--time", "600", name)))
        for name in self.names:
            self._said[name] += self.node("logs", name)

    def said(self, name: str) -> str:
        """Return all that a rank has printed."""
        return self._said[name] + self.node("logs", name)


def words(rank: int, own: tuple[str, int], following: tuple[str, int], pause_ms: int) -> list[str]:
    """Return what a rank is called with."""
    return ["rank", *map(str, (rank, _RANKS, _STEPS, pause_ms, *own, *following))]


def test_a_training_is_preempted_and_continues_elsewhere(make_node: MakeNode) -> None:
    node = make_node(kind=HandledNetPodman)
    limit_members(node)
    node.make_place("alone", Place.of(99, 1))
    ends = [("127.0.0.1", 7000 + rank) for rank in range(_RANKS)]
    alone = [node.spawn_peer("alone", *words(rank, ends[rank], ends[(rank + 1) % _RANKS], 0)) for rank in range(_RANKS)]
    training = Preempted(node)
    for number in range(1, _MOVES + 1):
        step = number * _FIRST_STEPS
        for name in training.names:
            wait_for(f"step {step} of {name}", lambda name=name, step=step: len(losses(training.said(name))) > step)  # type: ignore[misc]
        training.preempt()
        assert all("done" not in node("logs", name) for name in training.names)
        training.move(number)
        training.run()
    for name in training.names:
        node("kill", "--signal", "USR1", name)
    for name in training.names:
        wait_for(f"the end of {name}", lambda name=name: "done" in training.said(name))  # type: ignore[misc]
    wait_for("the end of the other", lambda: all("done" in log.read_text() for log in alone))
    expected = losses(alone[0].read_text())
    assert [step for step, _ in expected] == list(range(_STEPS))
    for name in training.names:
        assert losses(training.said(name)) == expected
    training.assert_nothing_is_left()
