"""CRIU tracks memory in dumps of the handler's containers; what their engine compares with earlier ones is its own."""

import os
from pathlib import Path

import pytest

from ocihook.linux import soft_dirty
from ocihook.runtime import tracking
from ocihook.runtime.call import Call

ID = "c" * 64
GLOBAL = ("--root", "/r", "--log=/l")


class Called(Exception):
    """The runtime was executed, with these words."""


def call_it(call: Call) -> None:
    raise Called(*call.words)


class Node:
    """What the runtime is called with for one container of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works = True
        monkeypatch.setattr(soft_dirty, "works", lambda: self.works)
        monkeypatch.setattr(Call, "pass_on", call_it)

    def checkpoint(self, *words: str) -> tuple[str, ...]:
        """Return what the runtime gets."""
        with pytest.raises(Called) as called:
            tracking.checkpoint(Call.parse(Path("/usr/sbin/runc"), [*GLOBAL, "checkpoint", *words, ID]))
        return tuple(map(str, called.value.args[len(GLOBAL) :]))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_a_parent_that_is_none_is_named(node: Node, tmp_path: Path) -> None:
    images = tmp_path / "images"
    words = ("--image-path", str(images), "--leave-running")
    command, option, parent, *rest = node.checkpoint(*words)
    assert (command, option, rest) == ("checkpoint", "--parent-path", [*words, ID])
    assert not Path(parent).is_absolute()
    assert os.path.normpath(images / parent) == "/"


def test_a_link_to_the_images_is_followed_as_criu_does(node: Node, tmp_path: Path) -> None:
    deep = tmp_path / "a/b/c/images"
    deep.mkdir(parents=True)
    for link, target in ((tmp_path / "link", deep), (tmp_path / "a/b/c/d", tmp_path)):
        link.symlink_to(target)
        parent = node.checkpoint("--image-path", str(link))[2]
        assert (link / parent).samefile("/")
        assert os.path.normpath(link / parent) == "/", "runc looks at the path alone"


@pytest.mark.parametrize("words", [("--lazy-pages",), ("--page-server", "127.0.0.1:9")])
def test_what_is_not_changed(node: Node, words: tuple[str, ...]) -> None:
    words = ("--image-path", "/images", *words)
    assert node.checkpoint(*words) == ("checkpoint", *words, ID)
    assert node.checkpoint("--leave-running") == ("checkpoint", "--leave-running", ID)
    node.works = False
    assert node.checkpoint("--image-path", "/images") == ("checkpoint", "--image-path", "/images", ID)


@pytest.mark.parametrize("words", [("--pre-dump",), ("--parent-path", "../pre-checkpoint"), ("--parent-path=../pre",)])
def test_what_an_engine_compares_with_its_earlier_dumps_stays_its_own(node: Node, words: tuple[str, ...]) -> None:
    words = ("--image-path", "/images", *words)
    assert node.checkpoint(*words) == ("checkpoint", *words, ID)
    assert node.checkpoint("--image-path", "/images")[1] == "--parent-path", "unlike an ordinary one after that"
