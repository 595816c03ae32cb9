"""A kubelet over each engine, where one is to be had: like CRI-O, it is in no package, and CI skips these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.containerd.engine import Containerd
from integration.cri.engine import CriEngine
from integration.crio.engine import PROGRAMS, Crio
from integration.kubelet.engine import PROGRAM, Kubelet

_ENGINES: dict[str, type[CriEngine]] = {"containerd": Containerd, "crio": Crio}


@pytest.fixture(params=sorted(_ENGINES))
def kubelet(
    request: pytest.FixtureRequest, scratch: Path, forky_root: Path, wheels: Path, workload: Path
) -> Iterator[Kubelet]:
    """A kubelet on a node with ocihook installed."""
    if not PROGRAM.is_file():
        pytest.skip("needs OCIHOOK_KUBELET, a kubelet: no package has it")
    if request.param == "crio" and not (PROGRAMS / "crio").is_file():
        pytest.skip("needs OCIHOOK_CRIO, a directory with crio, pinns and conmon: no package has them")
    engine = _ENGINES[request.param](scratch, forky_root, wheels, workload)
    try:
        engine.install()
        made = Kubelet(engine)
        yield made
        made.close()
    finally:
        engine.close()
