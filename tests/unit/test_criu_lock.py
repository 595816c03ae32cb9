"""The table by which CRIU has locked the node's network, and which a dump that stops its container leaves."""

import os
from pathlib import Path

import pytest

from ocihook.criu.images import INVENTORY_NAME
from ocihook.criu.parent_images import dumped_us, encode_inventory, run_id
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.net import nftables
from ocihook.net.dump import CriuLockLeft
from ocihook.net.namespace import NetNamespace
from ocihook.session.journal import Journal

NAME = f"CRIU-test-{os.getpid()}"


def test_the_name_of_a_criu_is_in_its_inventory(tmp_path: Path) -> None:
    assert run_id(tmp_path) == ""
    (tmp_path / INVENTORY_NAME).write_bytes(encode_inventory(dump_criu_run_id="487c2ab0-5a87"))
    assert run_id(tmp_path) == "487c2ab0-5a87"
    assert dumped_us(tmp_path) is None
    (tmp_path / INVENTORY_NAME).write_bytes(b"damaged")
    assert run_id(tmp_path) == ""


@pytest.mark.skipif(os.geteuid() != 0 or not nftables.has_nftables(), reason="needs root and libnftables")
def test_it_is_removed_once_or_more(tmp_path: Path) -> None:
    here = NetNamespace.of(os.getpid())
    journal = Journal.create(tmp_path, Process(11, 1))
    nftables.run(here, f"table inet {NAME}")
    assert ("inet", NAME) in nftables.tables(here)
    for _ in range(2):
        CriuLockLeft(table=NAME).undo(journal, ENDLESS)
        assert ("inet", NAME) not in nftables.tables(here)
