"""A CRI-O for each test, where there is one to be had: the one exception to the rule that CI skips nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.crio.engine import PROGRAMS, Crio

MakeCrio = Callable[..., Crio]


@pytest.fixture
def crio(scratch: Path, forky_root: Path, wheels: Path, workload: Path) -> Iterator[Crio]:
    """A CRI-O with ocihook installed."""
    if not (PROGRAMS / "crio").is_file():
        pytest.skip("needs OCIHOOK_CRIO, a directory with crio, pinns and conmon: no package has them")
    node = Crio(scratch, forky_root, wheels, workload)
    try:
        node.install()
        yield node
    finally:
        node.close()
