"""What CRIU alone finds when it dumps, it is explained by; each log is test data of tests/unit/test_explain.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.criu.logs import record
from integration.criu.process import Hazard, hazard
from ocihook.criu.explain import explain
from ocihook.linux.procfs import descendants


def test_link_remap_does_not_help_what_is_hidden() -> None:
    with hazard("hidden_file") as process:
        check(process, "hidden_file-link-remap", "hidden-file", "--link-remap")


@pytest.mark.parametrize("name", ["traced", "traced_inside"])
def test_traced_in_a_frozen_cgroup(name: str) -> None:
    """As runtimes have CRIU dump: it keeps trying."""
    with hazard(name) as process, cgroup(process) as directory:
        check(process, f"{name}-frozen", "traced", "--freeze-cgroup", str(directory), "--timeout", "1")


def check(process: Hazard, name: str, cause: str, *options: str) -> None:
    succeeded, log = process.dump("--leave-running", *options)
    record(f"dump-{name}", log, process.directory)
    explanation = explain(log)
    assert not succeeded
    assert explanation is not None
    assert (explanation.name, bool(explanation.remedy)) == (cause, True)


@contextmanager
def cgroup(process: Hazard) -> Iterator[Path]:
    """Give the process a cgroup of its own, for as long as it lasts."""
    version_1 = Path("/sys/fs/cgroup/freezer")
    parent = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    directory = parent / process.directory.name
    directory.mkdir()
    try:
        for pid in descendants(process.pid):
            (directory / "cgroup.procs").write_text(str(pid))
        yield directory
    finally:
        for pid in descendants(process.pid):
            (parent / "cgroup.procs").write_text(str(pid))
        directory.rmdir()
