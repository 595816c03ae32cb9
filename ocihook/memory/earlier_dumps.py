"""Which earlier dumps of an engine CRIU may be compared with: those since which nothing was marked as clean.

CRIU leaves out a page that is clean and that an earlier dump has (podman's --pre-checkpoint and --with-previous). But
the kernel has one mark of a page for all who ask: each dump that tracks memory leaves all pages clean, and so does what
is read past CRIU (clean_pages.py). What was written between an earlier dump and such another one would be missing, and
nothing would say so. So it is noted when a container's pages were marked as clean, and a dump that would be compared
with an older one is made whole.

CRIU's `pre-dump`, with which engines make their earlier dumps, calls no action script: its images say when it was made.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ocihook.criu.files import options_for
from ocihook.criu.parent_images import LINK_NAME, dumped_us, earlier_dumps, has_parent, lacks_pages, now_us
from ocihook.errors import UnsupportedError
from ocihook.linux.files import replace_file
from ocihook.linux.procfs import Process
from ocihook.session.effect import Facts
from ocihook.session.participant import Dump, Participant

_DIRECTORY_NAME = "cleaned"  # below that of the journals: a file for each container's first process, with a time


@dataclass(frozen=True, kw_only=True)
class CleanFacts(Facts):
    """What a dump does to the marks, and that what it is compared with was looked at before."""

    marks_clean: bool | None = None


class EarlierDumps(Participant):
    """Has a dump be whole whose engine's earlier one is too old; notes when pages are marked as clean."""

    def needs_tasks(self, dump: Dump) -> bool:
        """Look at what CRIU is to compare memory with; tasks need not run."""
        if dump.journal.facts(CleanFacts).marks_clean is None:  # else the note may be of this dump already
            is_compared = has_parent(dump.directory)
            if is_compared:
                _check(dump)
            dump.journal.note(CleanFacts(marks_clean=is_compared or _tracks_memory(dump)))
        return False

    def prepare(self, dump: Dump) -> None:
        """Note that pages may be marked as clean from now on; a dump of which that cannot be noted is refused."""
        init = Process.find(dump.init_pid)
        if init is not None and dump.journal.facts(CleanFacts).marks_clean:
            _note(_directory(dump), init, now_us())

    def after_images(self, dump: Dump) -> str:
        """Note when CRIU has marked them, by which it is known again: a later dump may be compared with this one."""
        init, made_us = Process.find(dump.init_pid), dumped_us(dump.directory)
        if init is not None and made_us is not None and dump.journal.facts(CleanFacts).marks_clean:
            with contextlib.suppress(OSError):  # what is noted holds: then it takes this dump, too, for one since then
                _note(_directory(dump), init, made_us)
        return ""


def is_outdated(made_us: Iterable[int | None], cleaned_us: int) -> bool:
    """Return whether pages may be missing in a dump.

    Args:
        made_us: when the dumps were made that it is compared with, each with the next; None: that is not known.
        cleaned_us: when pages were last marked as clean. What was made just then did so, and was itself checked.
    """
    for each_us in made_us:
        if each_us is None or each_us < cleaned_us:
            return True
        if each_us == cleaned_us:
            break
    return False


def _check(dump: Dump) -> None:
    """Have a dump be whole that would be compared with one that is outdated, or that was packed.

    Raises:
        OSError: if that is not possible.
    """
    init = Process.find(dump.init_pid)
    cleaned_us = _noted(_directory(dump), init) if init else None
    if cleaned_us is not None and is_outdated(earlier_dumps(dump.directory), cleaned_us):
        reason = "since the earlier dump that it is compared with, another one has marked pages as clean"
    elif lacks_pages(dump.directory):
        reason = "the memory of the earlier dump that it is compared with was packed, where CRIU does not look for it"
    else:
        return
    (dump.directory / LINK_NAME).unlink()  # CRIU has made it, and looks for it after this stage only
    remark = dump.degrade(UnsupportedError(reason), "All of its memory is dumped")
    dump.remark = f"{dump.remark} {remark}".lstrip()


def _tracks_memory(dump: Dump) -> bool:
    """Return whether CRIU tracks memory; runtimes have it do so where an earlier dump is named."""
    call = dump.call()
    return options_for(dump.container.runtime, call.criu_config, call.criu_asked).has("track-mem", "parent-path")


def _directory(dump: Dump) -> Path:
    return dump.journal.path.parents[1] / _DIRECTORY_NAME


def _note(directory: Path, init: Process, cleaned_us: int) -> None:
    """Note a time of a container; forget those of containers that are gone."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for path in directory.iterdir():
        if not Process(*map(int, path.stem.split("-"))).is_alive():
            path.unlink(missing_ok=True)
    replace_file(_path(directory, init), str(cleaned_us).encode(), mode=0o600, durable=False)


def _noted(directory: Path, init: Process) -> int | None:
    try:
        return int(_path(directory, init).read_bytes())
    except FileNotFoundError:
        return None


def _path(directory: Path, init: Process) -> Path:
    return directory / f"{init.pid}-{init.start_ticks}"
