"""Gangs of several sizes, dumped and moved at random moments beside random load: not a byte is lost or comes twice."""

import os
import random

from integration.gang.mesh import Mesh, succeeded
from integration.gang.nodes import limit_members
from integration.net.conftest import MakeNode

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))


def test_four_members_at_random_moments_under_load(make_node: MakeNode) -> None:
    node = make_node("crun")
    limit_members(node)
    mesh = Mesh([node], 4)
    for number in range(1, 101 if IS_NIGHTLY else 11):
        chance = random.Random(number)
        busy = [
            node.namespace.spawn("sh", "-c", "while :; do :; done", log=node.scratch / "busy")
            for _ in range(chance.randrange(3))
        ]
        is_moved = number % 3 == 0
        succeeded(mesh.checkpoint(*([] if is_moved else ["--leave-running"])))
        assert f"{mesh.connections} connections" in mesh.verify()
        if is_moved:
            mesh.move(number)
            succeeded(mesh.restore())
        for process in busy:
            process.kill()
        mesh.assert_flows()
        mesh.assert_nothing_is_left()


def test_sixteen_members_move(make_node: MakeNode) -> None:
    node = make_node()
    limit_members(node)
    mesh = Mesh([node], 16, rate=0.05)
    succeeded(mesh.checkpoint())
    assert f"{mesh.connections} connections" in mesh.verify()
    mesh.move(1)
    succeeded(mesh.restore())
    mesh.assert_flows()
    mesh.assert_nothing_is_left()
