"""Which GPUs a restored container gets, and when a node will not do."""

import dataclasses
from typing import Any

import pytest

from ocihook.errors import UnsupportedError
from ocihook.gpu.mapping import check_gpus, choose_gpu_map
from ocihook.gpu.nvml import Gpu

GIB = 1 << 30


def node(*minors: int, **changes: Any) -> list[Gpu]:
    gpu = Gpu(uuid="", name="H200", minor=0, total_bytes=140 * GIB, free_bytes=130 * GIB, **changes)
    return [dataclasses.replace(gpu, uuid=f"GPU-{minor}", minor=minor) for minor in minors]


def had(*minors: int) -> dict[str, Any]:
    devices = [
        {"uuid": f"GPU-{m}", "name": "H200", "minor": m, "total_bytes": 140 * GIB, "held_bytes": GIB} for m in minors
    ]
    return {"driver": "580.1", "devices": devices}


@pytest.mark.parametrize(
    ("had_minors", "here", "given", "wanted", "pairs"),
    [
        ((0, 1), (0, 1, 2, 3), (), "", ()),
        ((0, 1), (0, 1), (0, 1), "", ()),
        ((0,), (0, 1), (1,), "", (("GPU-0", "GPU-1"),)),
        ((0, 1), (4, 5, 6), (), "", (("GPU-0", "GPU-4"), ("GPU-1", "GPU-5"))),
        ((0, 1), (1, 2), (), "", (("GPU-0", "GPU-2"), ("GPU-1", "GPU-1"))),
        ((0, 1), (0, 1), (), "GPU-0=GPU-1,GPU-1=GPU-0", (("GPU-0", "GPU-1"), ("GPU-1", "GPU-0"))),
        ((0,), (0, 1), (0,), "GPU-0=GPU-1", (("GPU-0", "GPU-1"),)),
        ((), (), (), "", ()),
    ],
)
def test_choice(had_minors: Any, here: Any, given: Any, wanted: str, pairs: Any) -> None:
    assert choose_gpu_map(had(*had_minors), node(*here), given_minors=given, wanted=wanted) == pairs


@pytest.mark.parametrize(
    ("here", "given", "wanted", "message"),
    [
        ((0,), (), "", "had 2 GPUs, this node gives it 1.*as many, of the same model"),
        ((0, 1, 2), (2,), "", "had 2 GPUs, this node gives it 1"),
        ((0, 1), (), "GPU-0=GPU-1", "has nothing for GPU-1.*must name every GPU"),
        ((0, 1), (), "GPU-0=GPU-1,GPU-1=GPU-9", "has GPU-9 for GPU-1, this node has GPU-0, GPU-1"),
    ],
)
def test_no_choice(here: Any, given: Any, wanted: str, message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose_gpu_map(had(0, 1), node(*here), given_minors=given, wanted=wanted)
    import re

    assert re.search(message, str(caught.value))


def test_a_node_that_will_do_needs_so_much() -> None:
    assert check_gpus(had(0, 1), node(0, 1), "580.1", ()) == {"GPU-0": GIB, "GPU-1": GIB}
    assert check_gpus(had(0), node(0, 1), "580.1", [("GPU-0", "GPU-1")]) == {"GPU-1": GIB}


def test_a_node_that_will_not_do() -> None:
    for here, version, message in (
        (node(0), "590.2", "made with driver 580.1, this node has 590.2"),
        ([dataclasses.replace(node(0)[0], name="A100")], "580.1", "had a H200, GPU-0 is a A100"),
        ([dataclasses.replace(node(0)[0], free_bytes=GIB - 1, held_bytes={42: 1})], "580.1", r"free.*processes 42\)"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            check_gpus(had(0), here, version, ())
