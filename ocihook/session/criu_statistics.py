"""CRIU's own measurements of a dump or restore, which it writes into its work directory at the end."""

import contextlib
import logging
import os
import stat
import time
from dataclasses import dataclass, replace
from typing import Any

from ocihook.criu.images import parse_dump_stats, parse_restore_stats
from ocihook.errors import ImageError
from ocihook.session.effect import Facts
from ocihook.session.history import act_of
from ocihook.session.journal import Journal

_MAX_BYTES = 1 << 16  # a few dozen in practice

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CriuFacts(Facts):
    """What CRIU measured itself."""

    criu_ended: float | None = None  # seconds since 1970
    criu_statistics: dict[str, int] | None = None  # microseconds of its parts
    criu_pages: int | None = None  # written or restored


def open_work_directory(criu_pid: int) -> int | None:
    """Return a descriptor of CRIU's work directory, None if CRIU is gone.

    An engine may remove the directory as soon as CRIU has ended, so it is opened before.
    """
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{criu_pid}/cwd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def note_end(journal: Journal, work_directory: int | None) -> None:
    """Record when CRIU ended and, if it completed, its statistics; then close the directory."""
    ended = time.time()
    if work_directory is not None:
        try:
            note_statistics(journal, _read(journal.to_json(), work_directory))
        except FileNotFoundError:  # of a dump or restore that failed
            pass
        except OSError as error:
            log.warning("session %s: CRIU's statistics: %s", journal.session_id, error)
        finally:
            os.close(work_directory)
    journal.note(replace(journal.facts(CriuFacts), criu_ended=ended))


def note_statistics(journal: Journal, written: bytes) -> None:
    """Record what CRIU has written as its statistics."""
    try:
        statistics, pages = _parse(act_of(journal.to_json()), written)
    except ImageError as error:
        log.warning("session %s: CRIU's statistics: %s", journal.session_id, error)
        return
    journal.note(replace(journal.facts(CriuFacts), criu_statistics=statistics, criu_pages=pages))


def _read(session: dict[str, Any], work_directory: int) -> bytes:
    name = f"stats-{act_of(session)}"
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=work_directory)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_mtime < session["began"] - 1:  # file systems round
            raise FileNotFoundError  # of an earlier one in the same directory
        return file.read(_MAX_BYTES)


def _parse(act: str, written: bytes) -> tuple[dict[str, int], int]:
    """Return the times, in microseconds, and the pages."""
    if act == "dump":
        dump = parse_dump_stats(written)
        times = {"freezing": dump.freezing_us, "frozen": dump.frozen_us}
        return times | {"memdump": dump.memdump_us, "memwrite": dump.memwrite_us}, dump.pages_written
    restore = parse_restore_stats(written)
    return {"forking": restore.forking_us, "restore": restore.restore_us}, restore.pages_restored
