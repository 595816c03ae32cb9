"""Finds in CRIU's log why a dump or restore has failed: the cause and its remedy, not the last line.

CRIU reports an error where it occurs and again in every caller, so the first line that is known names the cause; later
ones follow from it. Each pattern of the catalogue was seen in a log of CRIU 4.1.1 or 4.2.1 (tests/data/criu-logs, made
by integration/criu) or is quoted from the issue that is named beside it.
"""

import re
from typing import NamedTuple

from ocihook.criu.causes import Cause, catalogue, cause_named, remedy_of


class Explanation(NamedTuple):
    """Why CRIU failed."""

    name: str  # of the cause; "unknown" or "killed" if the catalogue has none
    what: str
    remedy: str
    line: str  # of the log, that shows it

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else self.what


def explain(log: str) -> Explanation | None:
    """Return why the dump or restore that wrote this log has failed; None if it has not, or no line shows it."""
    lines = log.splitlines()
    has_ended = bool(_HAS_ENDED.search(log))
    # CRIU logs its success only at the log level that runtimes use, or above.
    if _HAS_SUCCEEDED.search(log) or not (has_ended or _IS_VERBOSE.search(log)):
        return None
    before, first_error = _Before(), ""
    for line in lines:
        before.read(line)
        if before.said and _SCRIPT_FAILED.search(line):
            return Explanation("ocihook", before.said.rstrip("."), "", f"{_OURS}{before.said}")
        if not_stopped := _not_stopped(line, before, log):
            return not_stopped
        if cause := _cause_of(line, before):
            return _filled(cause, line, before)
        if not first_error and _ERROR.search(line) and not _NOISE.search(line):
            first_error = line
    if not first_error:
        return _unfinished(lines[-1], before, log)
    return Explanation("unknown", f"CRIU says «{_text(first_error)}»", "", first_error)


def _unfinished(last: str, before: "_Before", log: str) -> Explanation:
    """Return why a log without an error ends: CRIU was killed, maybe since it waited without end."""
    if "Detected cgroup V1 freezer" in log and (seizing := _SEIZING.search(last)):
        return _filled(cause_named("stopped"), seizing[0], before)
    remedy = "see the engine's log for a deadline (kubelet's runtimeRequestTimeout) and the kernel's for memory"
    return Explanation("killed", f"CRIU was killed after it wrote «{_text(last)}»", remedy, last)


def _not_stopped(line: str, before: "_Before", log: str) -> Explanation | None:
    """Return why a process could not be stopped, if this line says so: CRIU names it before or after it."""
    if before.not_seized and _FREEZE_FAILED.search(line):
        return _filled(cause_named("traced"), before.not_seized, before)
    if "Timeout reached" in line and (in_kernel := _IN_KERNEL.search(log)):
        return _filled(cause_named("waits-in-kernel"), in_kernel[0], before)
    return None


def has_given_up(log: str) -> bool:
    """Return whether CRIU has failed by its log and has only to end its processes and itself."""
    return bool(_HAS_GIVEN_UP.search(log))


def container_killed(pid: int) -> Explanation:
    """Return why a dump failed that CRIU itself would not have ended: a process of the container was killed."""
    what = f"process {pid} of the container was killed while CRIU dumped it, which CRIU does not notice: it was ended"
    return Explanation("container-killed", what, remedy_of("container-killed"), "")


class _Before:
    """What the log has said before a line: whom and what an error is about."""

    def __init__(self) -> None:
        self.process = ""
        self.opened = ""  # the name of a file, as the kernel shows it
        self.said = ""  # by us
        self.not_seized = ""  # the line that says so

    def read(self, line: str) -> None:
        if found := _PROCESS.search(line):
            self.process = found[1]
        elif found := _PATH.search(line):
            self.opened = found[1]
        elif _STAGE.search(line):
            self.said = ""
        elif line.startswith(_OURS):
            self.said = line.removeprefix(_OURS)
        elif _NOT_SEIZED.search(line):
            self.not_seized = line
        if _SEIZED.search(line):
            self.not_seized = ""


def _cause_of(line: str, before: _Before) -> Cause | None:
    if not _ERROR.search(line) or _NOISE.search(line):
        return None
    cause = next((cause for cause in catalogue() if cause.pattern.search(line)), None)
    has_its_name = bool(before.opened) and f"link remap for {before.opened}. Use" in line  # else it had " (deleted)"
    return cause_named("hidden-file") if has_its_name else cause


def _filled(cause: Cause, line: str, before: _Before) -> Explanation:
    match = cause.pattern.search(line)
    assert match is not None
    named = {name: value or "" for name, value in match.groupdict().items()}
    values = {name: _printable(value) for name, value in ({"opened": before.opened} | named).items()}
    who = f"process {before.process}" if before.process else "a process"
    return Explanation(
        cause.name,
        cause.what.format(who=who, **values),
        cause.remedy.format(who=who, **values),
        _printable(line.strip()),
    )


def _text(line: str) -> str:
    """Return a line of the log without time, place and process."""
    return re.sub(r"^(\([0-9.]+\))?\s*(pie: )?([0-9]+: )?\s*(Error|Warn)?\s*(\(\S+\): )?", "", _printable(line)).strip()


def _printable(text: str) -> str:
    """Return text without terminal control sequences: a container chooses the names of its files."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\t", " "))


_ERROR = re.compile(r"\bError \(|\bERROR\b|symbol lookup error|undefined symbol")
_OURS = "ocihook: "  # what our hook prints stands in CRIU's log
_STAGE = re.compile(r"Running \S+ scripts")
_SCRIPT_FAILED = re.compile(r"Script \S+ exited with")
_HAS_SUCCEEDED = re.compile(r"(?:Dumping|Restore) finished successfully")
_IS_VERBOSE = re.compile(r"^\([0-9.]+\) (?:Running \S+ scripts|Version: )", re.MULTILINE)
_HAS_GIVEN_UP = re.compile(r"Killing processes because of failure on restore|(?:Dumping|Restoring) FAILED")
_HAS_ENDED = re.compile(r"(?:Dumping|Restoring) FAILED")
# CRIU logs these before anything is wrong, or after every failure; the last one when it is killed.
_NOISE = re.compile(
    r"rlimit: Can't setup RLIMIT_NOFILE|BPF_MAP|CONFIG_NETFILTER_XT_MARK|exited, status=|No parent image found|"
    r"cgroupd: recv req error"
)
_PROCESS = re.compile(r"(?:Dumping (?:task|opened files|path)|Collecting mappings|Dump files)[^(]*\(pid: ([0-9]+)")
_PATH = re.compile(r"Dumping path for -?[0-9]+ fd via self -?[0-9]+ \[(.*)\]$")
# In a frozen cgroup CRIU takes a traced process for one about to end, and retries until its timeout. A zombie cannot be
# seized either: CRIU says so, says that it is seized, and continues.
_NOT_SEIZED = re.compile(r"Unable to interrupt task: \d+ \(Operation not permitted\)")
_SEIZED = re.compile(r"Seized task \d+|Dumping task")
_SEIZING = re.compile(r"SEIZE \d+ .*: success$")
_IN_KERNEL = re.compile(r"Unseizable non-zombie \d+ found, state D.*")
_FREEZE_FAILED = re.compile(r"Timeout reached\. Try to interrupt|Dumping FAILED")
