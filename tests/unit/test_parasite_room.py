"""A container at its memory limit is not dumped, if the kernel would kill it for what CRIU needs there."""

import os
from pathlib import Path

import pytest

from ocihook.errors import PreflightError
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.memory import parasite_room
from ocihook.memory.parasite_room import ParasiteRoom, lacking_for_criu
from ocihook.model import ContainerRef
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump

MIB = 1 << 20


@pytest.mark.parametrize(
    ("room_bytes", "swap_bytes", "lacks"),
    [(None, 0, False), (MIB, 0, False), (MIB - 1, 0, True), (-5, 0, True), (0, 4096, False)],
)
def test_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, *, room_bytes: int | None, swap_bytes: int, lacks: bool
) -> None:
    asked: list[bool] = []

    def headroom(_pid: int, *, reclaims_all: bool) -> int | None:
        asked.append(reclaims_all)
        return room_bytes

    monkeypatch.setattr(parasite_room, "memory_headroom_bytes", headroom)
    monkeypatch.setattr(parasite_room, "free_swap_bytes", lambda: swap_bytes)
    reason = lacking_for_criu(os.getpid())
    assert bool(reason) == lacks
    assert not lacks or f"leaves it {max(0, room_bytes or 0) >> 10} KiB" in reason
    assert asked == [True]


def test_the_dump_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parasite_room, "memory_headroom_bytes", lambda _pid, **_: 5 << 10)
    monkeypatch.setattr(parasite_room, "free_swap_bytes", lambda: 0)
    me = Process.find(os.getpid())
    assert me is not None
    journal = Journal.create(tmp_path, me)
    journal.identify(ContainerRef(id="ab" * 32, engine="podman", runtime="runc", name="job"), str(tmp_path))
    dump = Dump(journal, ENDLESS, me.pid, me.pid, str(tmp_path), tmp_path)
    with pytest.raises(
        PreflightError, match=r"container job \(abababababab\): its memory limit leaves it 5 KiB; .* Raise"
    ):
        ParasiteRoom().refuse(dump)
    monkeypatch.setattr(parasite_room, "memory_headroom_bytes", lambda _pid, **_: None)
    ParasiteRoom().refuse(dump)
