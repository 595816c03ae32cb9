"""Two nodes with a slow remote: a pod that is created again on the other node waits for what its predecessor leaves."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.namespace import wait_for
from integration.runtime.engine import HandledContainerd

_AGAIN: dict[str, Any] = {"checkpoint_on_stop": "true", "restore_from": "latest", "member": "job"}
_SETTINGS = """[agent]
idle_timeout_s = 2
remote = "{}"
[policy]
mode = "store"
push = "always"
"""
_ORDERS = (("created", "ended", "pushed"), ("ended", "created", "pushed"), ("ended", "pushed", "created"))


class SlowRemote:
    """A directory that takes no packs until it is told to."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._packs = directory, directory / "domains/default/packs"
        self._packs.parent.mkdir(parents=True)
        self.hold()

    def hold(self) -> None:
        """Take no packs: where they go leads nowhere."""
        if self._packs.exists():
            self._packs.rename(self._packs.with_name("held"))
        self._packs.symlink_to("nowhere")

    def let_go(self) -> None:
        """Take packs."""
        self._packs.unlink()
        if self._packs.with_name("held").exists():
            self._packs.with_name("held").rename(self._packs)

    def announced(self) -> list[Path]:
        """Return the stops that are announced."""
        return list(self.directory.glob("domains/default/claims/stop-*"))


@pytest.fixture
def nodes(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[list[HandledContainerd]]:
    """Two nodes; the directory of the second is seen by the first."""
    (scratch / "other").mkdir()
    with contextlib.ExitStack() as stack:
        made = []
        for place, remote in ((scratch, "/scratch/other/remote"), (scratch / "other", "/scratch/remote")):
            node = HandledContainerd(place, forky_root, wheels, workload)
            stack.callback(node.close)
            node.install()
            node.configure(_SETTINGS.format(remote))
            node.stall()
            made.append(node)
        made[1].pull_from(made[0].registry.address)  # the same image is the same name
        made[1].image = made[0].image
        yield made


def handler_log(node: HandledContainerd) -> str:
    path = node.namespace.path("/run/ocihook/handler.log")
    return path.read_text() if path.exists() else ""


class Move:
    """A pod that is stopped on one node and created again on another."""

    def __init__(self, one: HandledContainerd, two: HandledContainerd, remote: SlowRemote, container: str) -> None:
        """Begin the stop, which waits after its dump."""
        self.one, self.two, self.remote, self.container = one, two, remote, container
        self._told = len(handler_log(two))
        self.started: list[str] = []
        one.stall_at("post-dump")
        stop = {"container_id": container, "timeout": 60}
        self._stopping = threading.Thread(target=one.call, args=("StopContainer",), kwargs=stop)
        self._stopping.start()
        one.wait_for_stall()

    def created(self, name: str, *, is_to_wait: bool) -> None:
        """Create the pod again."""
        self._creating = threading.Thread(target=self._create, args=(name,))
        self._creating.start()
        if is_to_wait:
            wait_for("it to wait", lambda: "waits for its checkpoint" in handler_log(self.two)[self._told :])

    def _create(self, name: str) -> None:
        self.started.append(self.two.start(name, mib=4, container_name="main", **_AGAIN))

    def ended(self) -> None:
        """Let the stop end."""
        self.one.go_on()
        self._stopping.join()

    def pushed(self) -> None:
        """Let the checkpoint be pushed."""
        assert self.started == [], "it does not start from scratch"
        self.remote.let_go()
        self.one.ocihook("wait")
        self.one.ocihook("store", "push")

    def end(self) -> str:
        """Check that the pod goes on; return its container."""
        self._creating.join()
        (again,) = self.started
        wait_for("it to count", lambda: len(self.two.counts(again)) > 2)
        last = self.one.counts(self.container)[-1]
        assert self.two.counts(again)[0] == last + 1, handler_log(self.two)
        wait_for("the announcement to be withdrawn", lambda: self.remote.announced() == [])
        self.one.remove(self.container)
        self.remote.hold()
        return again


def test_every_order_of_end_creation_and_push(nodes: list[HandledContainerd], scratch: Path) -> None:
    one, two = nodes
    remote = SlowRemote(scratch / "other/remote")
    container = one.start("job-0", mib=4, container_name="main", **_AGAIN)
    counting = container
    wait_for("it to count", lambda: len(nodes[0].counts(counting)) > 2)
    for number, order in enumerate(_ORDERS, 1):
        move = Move(one, two, remote, container)
        assert remote.announced(), "it is announced before its dump"
        for event in order:
            if event == "created":
                move.created(f"job-{number}", is_to_wait=order[-1] != "created")
            elif event == "ended":
                move.ended()
            else:
                move.pushed()
        container = move.end()
        one, two = two, one
