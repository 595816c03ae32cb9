"""What pushes and pulls have in common: packs are transferred several at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ocihook.linux.patience import Patience
from ocihook.linux.workers import run_forked
from ocihook.packs.pack import PackInfo

TRANSFERS = 4  # packs transferred at a time


class Moved(NamedTuple):
    """What a push or a pull did."""

    checkpoint_id: str
    raw_bytes: int
    pack_bytes: int  # of all packs of the checkpoint
    moved_bytes: int  # of those that were transferred; 0 also if the checkpoint was there


def in_parallel(
    infos: Sequence[PackInfo],
    move: Callable[[PackInfo], Iterator[int]],
    patience: Patience,
    progress: Callable[[int], None],
) -> None:
    """Transfer packs, several at a time, each in steps that report the bytes transferred."""

    def worker(_number: int, tasks: Iterator[int]) -> Iterator[int]:
        for task in tasks:
            yield from move(infos[task])

    for size in run_forked(worker, tasks=len(infos), workers=TRANSFERS, patience=patience):
        progress(size)
