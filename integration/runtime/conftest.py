"""A podman with the runtime handler for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.runtime.engine import HandledPodman

MakeHandled = Callable[..., HandledPodman]


@pytest.fixture
def make_handled(scratch: Path, workload: Path) -> Iterator[MakeHandled]:
    """Return a function that makes a podman for a runtime; all are removed after the test."""
    made: list[HandledPodman] = []

    def make(
        runtime: str,
        kind: type[HandledPodman] = HandledPodman,
        *,
        cgroup_version: int = 2,
        program: Path | None = None,
    ) -> HandledPodman:
        made.append(kind(scratch, runtime, program or workload, cgroup_version=cgroup_version))
        return made[-1]

    yield make
    for podman in made:
        podman.close()
