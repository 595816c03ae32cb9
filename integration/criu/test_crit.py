"""CRIU's own reader reads what is made up for CRIU: an earlier dump, and pagemaps that name it no more."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration.namespace import is_required
from ocihook.criu.images import complete_pagemap, cut_pagemap, make_pagemap
from ocihook.criu.parent_images import LINK_NAME, make_parent
from tests.unit.test_merging import PAGES_ID, START, as_pagemap

PAGE = 4096
PARENT, PRESENT = 1, 4  # criu/include/pagemap.h
RUNS = [(1 << 12, 4 << 12), (1 << 40, (1 << 40) + (1 << 34)), ((1 << 47) - PAGE, 1 << 47)]

pytestmark = pytest.mark.skipif(
    not shutil.which("crit") and not is_required(), reason="needs crit: integration/node-setup trixie"
)


def decode(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the kind of an image, and what is in it."""
    done = subprocess.run(["crit", "decode", "-i", path], capture_output=True, text=True, check=True, timeout=60)
    image = json.loads(done.stdout)
    return image["magic"], image["entries"]


def test_an_earlier_dump_that_was_made_up(tmp_path: Path) -> None:
    make_parent(tmp_path, {7: make_pagemap(RUNS, 1), 4194304: make_pagemap([], 1)})
    kind, (inventory,) = decode(tmp_path / LINK_NAME / "inventory.img")
    assert kind == "INVENTORY"
    assert inventory["img_version"] == 2
    assert 0 < inventory["dump_uptime"] <= float(Path("/proc/uptime").read_text().split()[0]) * 1e6
    kind, (head, *entries) = decode(tmp_path / LINK_NAME / "pagemap-7.img")
    assert (kind, head) == ("PAGEMAP", {"pages_id": 1})
    assert [(e["vaddr"], e["vaddr"] + e["nr_pages"] * PAGE, e["flags"]) for e in entries] == [
        (*run, PRESENT) for run in RUNS
    ]
    assert decode(tmp_path / LINK_NAME / "pagemap-4194304.img") == ("PAGEMAP", [{"pages_id": 1}])


@pytest.mark.parametrize("is_old", [False, True])
def test_pagemaps_that_were_changed(tmp_path: Path, *, is_old: bool) -> None:
    pagemap = as_pagemap([(0, 3, True), (3, 9, False), (20, 21, True)], is_old=is_old)
    path = tmp_path / "pagemap-1.img"
    for made, rows in (
        (complete_pagemap(pagemap), [(0, 3), (3, 6), (20, 1)]),
        (
            cut_pagemap(complete_pagemap(pagemap), [(START + PAGE, START + 4 * PAGE)], PAGES_ID),
            [(0, 1), (4, 5), (20, 1)],
        ),
    ):
        path.write_bytes(made)
        kind, (head, *entries) = decode(path)
        assert (kind, head) == ("PAGEMAP", {"pages_id": PAGES_ID})
        assert [((e["vaddr"] - START) // PAGE, e["nr_pages"]) for e in entries] == rows
        for entry in entries:
            assert entry.get("flags", PRESENT) == PRESENT
            assert not entry.get("in_parent", False)
