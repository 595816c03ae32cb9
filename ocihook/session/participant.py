"""Participants of a dump or restore: the calls that each gets, and what is known of the dump or restore by then."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ocihook.config import Policy, Settings
from ocihook.errors import plain
from ocihook.images.direct import Cut
from ocihook.images.image_set import MovedRegions
from ocihook.images.pre_copied import PreCopied
from ocihook.linux.cgroup import Freezer, find_freezer
from ocihook.linux.hold import Hold
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef, GangRef
from ocihook.packs.cipher import KeySource
from ocihook.packs.pages import Parts
from ocihook.session.effect import Facts
from ocihook.session.journal import Journal
from ocihook.store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CallFacts(Facts):
    """What CRIU was called for, and with which settings."""

    verb: str = ""
    leave_running: bool = False
    init: Process | None = None  # of a container that is dumped: its first process
    cgroup: str = ""  # name of the one that the runtime gave the container
    policy: Policy = field(default_factory=Policy)
    criu_config: str = ""  # the file that an annotation names
    criu_asked: frozenset[str] = frozenset()  # names of the options that the runtime was called with
    criu_version: str = ""
    workers: int = 1
    memory_room_bytes: int = 0  # that GPU memory may take in between
    snapshot_share: float = 0.0  # of its memory, which a container may write while a snapshot of it is read
    store: tuple[str, ...] = ()  # directory and keys of the node's store
    gang: GangRef | None = None  # the one that its annotations name
    grace_s: float = 0.0  # that its pod has to end; 0: not known
    coordinator: tuple[str, str] = ("", "")  # of gangs: where it is, and the directory with certificates

    def open_store(self, patience: Patience) -> Store:
        """Return the node's store."""
        root, *keys = self.store
        return Store(Path(root), KeySource(*keys), patience)


@dataclass(frozen=True, kw_only=True)
class SizeFacts(Facts):
    """What resulted from it."""

    raw_bytes: int | None = None
    stored_bytes: int | None = None
    checkpoint: str | None = None  # in the store


class Gang(Protocol):
    """The container's gang, if it is dumped or restored with one."""

    def meet(self, phase: str, message: object = None, about: Collection[str] = ()) -> Mapping[str, str]:
        """Wait until all members have reached a phase, or a later one; return what they publish.

        Args:
            phase: which (gang/protocol.py).
            message: what this one publishes, by keys.
            about: keys whose values it asks for.

        Raises:
            OcihookError: if they will not reach it: none of them is dumped, or restored.
        """

    def agree(self, attempt: int, *, is_locked: bool) -> bool:
        """Return whether the CUDA processes of all members are locked, if those of this one are."""


class Alone(Gang):
    """No gang."""

    def meet(self, phase: str, message: object = None, about: Collection[str] = ()) -> Mapping[str, str]:
        """Return at once."""
        del phase, message, about
        return {}

    def agree(self, attempt: int, *, is_locked: bool) -> bool:
        """Return whether this one is."""
        del attempt
        return is_locked


@dataclass
class Act:
    """A dump or restore at one of its stages."""

    journal: Journal
    patience: Patience
    criu_pid: int
    init_pid: int  # 0: no such process yet
    image_dir: str  # as the agent's own mount namespace may see it
    directory: Path  # the same, whatever mount namespace CRIU is in
    gang: Gang = field(default_factory=Alone, kw_only=True)
    remark: str = field(default="", kw_only=True)  # to be reported, though the dump or restore continues

    def call(self) -> CallFacts:
        """Return what CRIU was called for."""
        return self.journal.facts(CallFacts)

    @property
    def policy(self) -> Policy:
        """What is wanted."""
        return self.call().policy

    def progress(self, _done_bytes: int) -> None:
        """Continue long work only while somebody waits for it.

        Raises:
            GivenUp: if nobody waits any more.
        """
        self.patience.check()


@dataclass
class Dump(Act):
    """A dump."""

    hold: Hold = field(default_factory=Hold)  # of threads that must not run until everything is given back
    needs_tasks: bool = False  # tasks must run before CRIU begins
    has_gpu: bool = False
    gpu_bytes: int = 0  # that it has on GPUs, known once they are locked
    has_connections: bool = False  # of TCP, which CRIU dumps in several steps
    reads_memory: bool = False  # most host memory is read past CRIU, which leaves it out
    takes_snapshot: bool = False  # it is read from a snapshot, once the container runs again; else before CRIU begins
    pre_copied: PreCopied | None = None  # what was read of it already, while it ran
    gang_stops: bool = False  # a member of the gang is gone after it: then nothing may be lost any more
    gang_addresses: Collection[str] = ()  # of members of the gang that it is connected with
    staged_at: Path | None = None  # a place in the store for memory that goes past CRIU
    memory: Path | None = None  # where memory may be mounted for it
    moved: MovedRegions | None = (
        None  # memory that is in packs and not in CRIU's images; None: no GPU, and nothing read
    )
    awaited: Mapping[str, int] = field(default_factory=dict)  # page images that await a snapshot, and their sizes then
    completes_later: bool = False  # once the container runs on: CRIU waits at its end

    @property
    def place(self) -> Path:
        """Where memory goes that goes past CRIU."""
        return self.staged_at or self.directory

    @property
    def place_name(self) -> Path:
        """The same as others can find it later."""
        return self.staged_at or Path(self.image_dir)

    def degrade(self, error: Exception, consequence: str) -> str:
        """Record that not everything works as requested; return what to report."""
        self.journal.note_error(error, "degraded")
        log.warning("container %s: %s. %s", self.container, plain(error).rstrip("."), consequence)
        return f"warning: container {self.container}: {plain(error).rstrip('.')}. {consequence}"

    @property
    def container(self) -> ContainerRef:
        """What is dumped."""
        assert self.journal.container is not None
        return self.journal.container

    @property
    def store(self) -> Store:
        """The node's store."""
        return self.call().open_store(self.patience)

    @cached_property
    def freezer(self) -> Freezer | None:
        """Of the container, as its engine uses it."""
        return find_freezer(self.init_pid, self.call().cgroup)


class Checkpoint(Protocol):
    """What a restore reads: an image set with packs, or a checkpoint in the store."""

    @property
    def gpu(self) -> Mapping[str, Any]:
        """What the container had of GPUs; {} for nothing."""

    @property
    def region_processes(self) -> Collection[str]:
        """The processes, as seen in the container, whose memory went past CRIU."""

    @property
    def region_bytes(self) -> int:
        """Bytes of that memory at least: without zero pages."""

    @property
    def image_names(self) -> Collection[str]:
        """The page images that are in packs, or in the store."""

    @property
    def write_parts(self) -> Callable[..., None]:
        """What writes parts of these to `targets`, by their names, with `workers`, `patience` and `progress`."""

    @property
    def write_regions(self) -> Callable[..., int]:
        """What writes it into `processes`, by their names, with `workers`, `patience`, `progress` and `spans`."""


@dataclass
class Restore(Act):
    """A restore."""

    settings: Settings
    checkpoint: Checkpoint | None = None  # None: images as CRIU alone writes them
    cuts: Sequence[Cut] = ()  # of pagemaps, for what goes past CRIU

    @property
    def kept(self) -> Mapping[str, Parts]:
        """What CRIU is to find of page images, by their names, where it is not to find all."""
        return {cut.direct.pages_name: cut.direct.kept for cut in self.cuts}

    @property
    def init(self) -> Process | None:
        """The container's first process."""
        return Process.find(self.init_pid)


class Participant:
    """One participant. Whatever it does to the node is an effect in the journal, by which it is undone later.

    Work is quiesced from the first participant to the last; state is taken and given back from the last to the first.
    Dump: `refuse`, `needs_tasks`, `prepare`; backwards `hold`; CRIU writes its images; backwards `after_images`,
    and if the engine is kept waiting after that, `container_runs`.
    Restore: `check`, `before_processes`; CRIU makes processes; `recall`, and backwards `processes_made`,
    `processes_wait`, `about_to_run`, `running`.
    """

    # A dump. An error refuses it, or fails it in the last two: the effects are undone, the container continues.

    def refuse(self, dump: Dump) -> None:
        """Refuse what is known to fail. Nothing is touched here, and the container may be frozen by its engine."""

    def needs_tasks(self, dump: Dump) -> bool:
        """Return whether the container's tasks must run for what is to be prepared."""
        del dump
        return False

    def prepare(self, dump: Dump) -> None:
        """Quiesce the container; its tasks run, if any participant needs them to. Refuse what only shows now."""

    def hold(self, dump: Dump) -> None:
        """Take from the container what CRIU cannot dump, and stop it: CRIU begins after this."""

    def after_images(self, dump: Dump) -> str:
        """Process what CRIU has written; tasks are stopped. Return what to report."""
        del dump
        return ""

    def container_runs(self, dump: Dump) -> str:
        """Do what could wait until the container runs again: CRIU waits (detached.py). Return what to report."""
        del dump
        return ""

    # A restore. An error refuses it in the first two; then CRIU ends what it has made; the last two only report theirs.

    def check(self, restore: Restore) -> None:
        """Refuse what cannot be restored here. Nothing is written here."""

    def before_processes(self, restore: Restore) -> str:
        """Make what CRIU is about to read. Return what to report."""
        del restore
        return ""

    def needs_processes(self, restore: Restore) -> bool:
        """Return whether there is anything to do before processes run: else CRIU does not wait for `processes_wait`."""
        del restore
        return False

    def recall(self, restore: Restore) -> None:
        """Recover what was found in an earlier stage."""

    def processes_made(self, restore: Restore) -> None:
        """Take note of the first process."""

    def processes_wait(self, restore: Restore) -> str:
        """Fill memory: all is mapped, and nothing runs. Return what to report."""
        del restore
        return ""

    def about_to_run(self, restore: Restore) -> None:
        """Make sure that nothing runs too early."""

    def running(self, restore: Restore) -> None:
        """Let the application continue."""
