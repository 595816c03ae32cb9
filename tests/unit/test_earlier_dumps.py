"""What an engine's dump is compared with: an earlier one only if no page can be missing, whatever was dumped since."""

import os
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.criu.files import CriuOptions
from ocihook.criu.images import INVENTORY_NAME
from ocihook.criu.parent_images import LINK_NAME, PARENT_NAME, dumped_us, earlier_dumps, encode_inventory, now_us
from ocihook.linux.procfs import Process
from ocihook.memory import earlier_dumps as earlier
from ocihook.memory.earlier_dumps import is_outdated
from ocihook.session.journal import Journal
from tests.unit.test_session import Killed, Node, fail_with

PAGES = range(3)
TRACKED = frozenset(("parent-path",))


@pytest.mark.parametrize(
    ("made_us", "is_it"),
    [
        ([], False),
        ([51], False),
        ([52, 51], False),
        ([50], False),
        ([49], True),
        ([None], True),
        ([51, 49], True),
        ([51, None], True),
        ([51, 50, 49], False),
        ([51, 50, None], False),
    ],
)
def test_how_old_an_earlier_dump_may_be(made_us: list[int | None], *, is_it: bool) -> None:
    assert is_outdated(made_us, 50) == is_it


@dataclass(frozen=True)
class Made:
    """A dump of a few pages, as CRIU makes it: what is clean is left out where there is a parent."""

    at: int
    pages: dict[int, int]
    parent: "Made | None"

    def page(self, page: int) -> int:
        if page in self.pages:
            return self.pages[page]
        assert self.parent is not None
        return self.parent.page(page)

    def times(self) -> Iterator[int]:
        one = self.parent
        while one is not None:
            yield one.at
            one = one.parent


class Container:
    """One whose pages are written and dumped, the kernel's marks of them, and what is noted of these."""

    def __init__(self) -> None:
        self.now = 0
        self.memory = dict.fromkeys(PAGES, 0)
        self.dirty = set(PAGES)
        self.noted: int | None = None
        self.engines: list[Made] = []  # what an engine may name: the last of which it alone knows, and those since then

    def write(self, page: int) -> None:
        self.memory[page] = self.now
        self.dirty.add(page)

    def make(self, parent: Made | None) -> Made:
        self.now += 1
        made = Made(self.now, {p: v for p, v in self.memory.items() if parent is None or p in self.dirty}, parent)
        self.dirty.clear()
        return made

    def pre_dump(self, parent: Made | None) -> None:
        """CRIU's, which asks nobody."""
        self.engines = [self.make(parent)]

    def dump(self, parent: Made | None, *, has_ended: bool) -> None:
        """One that we are asked about."""
        self.now += 1
        if self.noted is not None and is_outdated(Made(0, {}, parent).times(), self.noted):
            parent = None
        self.noted = self.now
        made = self.make(parent)
        if has_ended:
            self.noted = made.at
        self.engines.append(made)
        assert {page: made.page(page) for page in PAGES} == self.memory


@given(st.lists(st.tuples(st.sampled_from(["write", "pre-dump", "dump", "cut off"]), st.integers(0, 4))))
def test_no_page_is_ever_missing(steps: list[tuple[str, int]]) -> None:
    """Whatever is dumped in between, with an earlier dump or without."""
    container = Container()
    for what, number in steps:
        parent = container.engines[-number] if 0 < number <= len(container.engines) else None
        container.now += 1
        if what == "write":
            container.write(number % len(PAGES))
        elif what == "pre-dump":
            container.pre_dump(parent)
        else:
            container.dump(parent, has_ended=what == "dump")


def make_dump(directory: Path, parent: str = "") -> Path:
    """Make the images of a dump that was made just now, as far as they say when."""
    directory.mkdir(exist_ok=True)
    (directory / INVENTORY_NAME).write_bytes(encode_inventory(dump_uptime=now_us()))
    (directory / "pages-1.img").touch()
    if parent:
        (directory / LINK_NAME).symlink_to(parent)
    return directory


def test_each_dump_says_when_it_was_made(tmp_path: Path) -> None:
    before = now_us()
    made = [make_dump(tmp_path / str(n), f"../{n - 1}" if n else "") for n in range(4)]
    times = [dumped_us(one) or 0 for one in made]
    assert before < times[0] < times[1] < times[2] < times[3] < now_us()
    assert list(earlier_dumps(made[0])) == []
    assert list(earlier_dumps(made[3])) == times[2::-1]
    for nowhere in ("/", PARENT_NAME):
        (made[0] / LINK_NAME).symlink_to(nowhere)
        assert list(earlier_dumps(made[1])) == times[:1]
        (made[0] / LINK_NAME).unlink()
    (made[0] / LINK_NAME).symlink_to("../3")
    assert list(earlier_dumps(made[3]))[-1] is None, "in a circle"


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\x16\x31\x31\x58",
        b"\x16\x31\x31\x58\x02\0\0\0\x08\x02",  # not tracked: it has no time
        b"\x16\x31\x31\x58\x04\0\0\0\x08\x02\x40",  # cut off
        b"\x16\x31\x31\x58\x03\0\0\0\x08\x02\x40",
        b"\x16\x31\x31\x58\x02\0\0\0\x40\x07",  # no version
        b"\x16\x31\x31\x59\x04\0\0\0\x08\x02\x40\x07",
    ],
)
def test_a_dump_that_does_not_say_when_it_was_made(tmp_path: Path, content: bytes | None) -> None:
    directory = make_dump(tmp_path / "later", "../earlier")
    (tmp_path / "earlier").mkdir()
    if content is not None:
        (tmp_path / "earlier" / INVENTORY_NAME).write_bytes(content)
    assert list(earlier_dumps(directory)) == [None]
    (tmp_path / "earlier" / INVENTORY_NAME).write_bytes(b"\x16\x31\x31\x58\x04\0\0\0\x08\x02\x40\x07")
    assert list(earlier_dumps(directory)) == [7]


class Dumped:
    """A container that is dumped as the test wants it, each time by another CRIU."""

    def __init__(self, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.path, self.patch = node, tmp_path, monkeypatch
        self.notes = node.runtime_dir / "cleaned"

    def begin(self, parent: str = "", *, asked: Collection[str] = TRACKED) -> tuple[int, str]:
        """Begin a dump; return the verdict."""
        criu = Process.find(os.getpid())
        assert criu is not None
        self.node.journal.path.unlink(missing_ok=True)
        Journal.create(self.node.runtime_dir, criu)
        self.node.reload()
        self.link.unlink(missing_ok=True)
        if parent:
            self.link.symlink_to(parent)
        self.patch.setattr(earlier, "options_for", lambda *_: CriuOptions(names=frozenset(asked)))
        return self.node.stage("pre-dump")

    @property
    def link(self) -> Path:
        return self.node.directory / LINK_NAME

    def end(self) -> None:
        """CRIU has written all, and says when."""
        make_dump(self.node.directory)
        assert self.node.stage("post-dump")[0] == 0

    def noted_us(self) -> int | None:
        init = Process.find(self.node.init_pid)
        assert init is not None
        path = self.notes / f"{init.pid}-{init.start_ticks}"
        return int(path.read_bytes()) if path.exists() else None


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container_pid: int) -> Dumped:
    node = Node(tmp_path, monkeypatch, container_pid)
    node.annotations["ocihook.io/mode"] = "off"
    return Dumped(node, tmp_path, monkeypatch)


def test_a_dump_that_would_be_compared_with_an_older_one_is_whole(dumped: Dumped) -> None:
    """Whoever made the one in between, and whatever the policy is."""
    make_dump(dumped.path / "pre-checkpoint")
    assert dumped.begin("../pre-checkpoint") == (0, ""), "nothing was dumped since"
    assert dumped.link.is_symlink()
    dumped.end()
    for _ in range(2):
        status, message = dumped.begin("../pre-checkpoint")
        assert (status, "All of its memory is dumped" in message) == (0, True)
        assert not dumped.link.is_symlink()
    assert dumped.node.journal.to_json()["outcome"] == "degraded"
    make_dump(dumped.path / "pre-checkpoint")
    assert dumped.begin("../pre-checkpoint") == (0, ""), "and none since this one"
    dumped.end()
    (dumped.path / "pre-checkpoint" / INVENTORY_NAME).unlink()
    assert "All of its memory" in dumped.begin("../pre-checkpoint")[1]


def test_a_dump_that_would_be_compared_with_one_that_is_packed_is_whole(dumped: Dumped) -> None:
    """A runtime may be told to: CRIU finds no page images there, when it restores."""
    make_dump(dumped.path / "first")
    make_dump(dumped.path / "second", "../first")
    (dumped.path / "first" / "pages-1.img").unlink()
    status, message = dumped.begin("../second")
    assert (status, "was packed" in message) == (0, True)
    assert not dumped.link.is_symlink()


def test_a_dump_that_was_looked_at_may_be_compared_with(dumped: Dumped) -> None:
    make_dump(dumped.path / "pre-checkpoint")
    dumped.begin("../pre-checkpoint")
    dumped.end()
    assert dumped.noted_us() == dumped_us(dumped.node.directory)
    last = make_dump(dumped.path / "last", "../pre-checkpoint")
    (dumped.node.directory / INVENTORY_NAME).replace(last / INVENTORY_NAME)
    assert dumped.begin("../last") == (0, "")
    assert dumped.link.is_symlink()


@pytest.mark.parametrize(
    ("asked", "parent", "is_noted"),
    [
        (set(), "", False),
        (set(), "/", False),
        ({"prev-images-dir"}, "/", False),
        ({"track-mem"}, "", True),
        ({"parent-path"}, "/", True),
        (set(), "../pre-checkpoint", True),
    ],
)
def test_what_marks_pages_as_clean_is_noted(dumped: Dumped, asked: set[str], parent: str, *, is_noted: bool) -> None:
    make_dump(dumped.path / "pre-checkpoint")
    before = now_us()
    assert dumped.begin(parent, asked=asked)[0] == 0
    noted = dumped.noted_us()
    assert (noted is not None) == is_noted
    assert noted is None or before < noted < now_us()
    dumped.end()
    assert dumped.noted_us() == (dumped_us(dumped.node.directory) if is_noted else None)


def test_it_is_noted_before_anything_is_marked_or_the_dump_is_refused(
    dumped: Dumped, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int | None] = []
    monkeypatch.setattr("ocihook.memory.pre_copy.PreCopy.prepare", lambda *_: noted.append(dumped.noted_us()))
    assert dumped.begin()[0] == 0
    assert noted[0] is not None
    monkeypatch.setattr(earlier, "replace_file", fail_with(OSError(28, "No space left on device", "/run/ocihook/x")))
    status, message = dumped.begin()
    assert status == 1
    assert "/run/ocihook/x: No space left on device. The dump is refused" in message
    assert len(noted) == 1


def test_a_time_that_cannot_be_noted_afterwards_fails_nothing(dumped: Dumped, monkeypatch: pytest.MonkeyPatch) -> None:
    dumped.begin()
    noted = dumped.noted_us()
    monkeypatch.setattr(earlier, "replace_file", fail_with(OSError(28, "No space left on device")))
    dumped.end()
    assert dumped.noted_us() == noted


@pytest.mark.parametrize("step", ["degrade", "prepare", "hold"])
def test_an_agent_that_is_killed(dumped: Dumped, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The stage begins again: what it has noted itself makes no earlier dump outdated, and what was so remains so."""
    make_dump(dumped.path / "pre-checkpoint")
    places = {"degrade": "session.participant.Dump.degrade", "hold": "memory.clean_pages.ReadPages.hold"}
    place = places.get(step, "memory.pre_copy.PreCopy.prepare")
    for is_outdated_now in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(f"ocihook.{place}", fail_with(Killed()))
            if step == "degrade" and not is_outdated_now:
                dumped.begin("../pre-checkpoint")
            else:
                with pytest.raises(Killed):
                    dumped.begin("../pre-checkpoint")
        dumped.node.reload()
        assert dumped.node.stage("pre-dump")[0] == 0
        assert dumped.node.stage("pre-dump")[0] == 0, "CRIU up to 4.1.1 asks twice"
        assert dumped.link.is_symlink() != is_outdated_now
        dumped.end()


def test_notes_of_containers_that_are_gone_are_removed(dumped: Dumped) -> None:
    dumped.notes.mkdir()
    with subprocess.Popen(["sleep", "60"]) as other:
        process = Process.find(other.pid)
        assert process is not None
        alive = dumped.notes / f"{process.pid}-{process.start_ticks}"
        for name in (alive.name, f"{process.pid}-1", f"{process.pid}-1.partial"):
            (dumped.notes / name).write_text("7")
        dumped.begin()
        assert len(list(dumped.notes.iterdir())) == 2
        assert alive.read_text() == "7"
        other.kill()
    dumped.begin()
    assert len(list(dumped.notes.iterdir())) == 1
    assert dumped.noted_us() is not None
