"""Properties of what takes pages in: whatever mixture comes, it comes back, and no page is stored twice."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ocihook.model import ContainerRef
from ocihook.packs.pack import PAGE_BYTES
from ocihook.store.deduplicate import _BATCH_PAGES, GROUP_PAGES
from ocihook.store.domain import Domain
from ocihook.store.index import Index
from ocihook.store.page_ids import ID_BYTES
from tests.unit.test_domain import content_of, take

lengths = st.sampled_from([1, 1, 2, 3, GROUP_PAGES - 1, GROUP_PAGES, GROUP_PAGES + 1, 40, 200, _BATCH_PAGES])
places = st.floats(0, 1, exclude_max=True)
parts = st.lists(st.tuples(st.sampled_from(["new", "zero", "again", "first"]), places, lengths), max_size=16)


def built(row: Sequence[tuple[str, float, int]], first: Sequence[int]) -> list[int]:
    """Return pages, by number: new ones, zero ones (0), some of those so far once more, some of the first image."""
    pages: list[int] = []
    number = len(first) + 1  # not in it
    for kind, place, length in row:
        if kind == "new":
            pages += range(number, number + length)
            number += length
        elif kind == "zero":
            pages += [0] * length
        else:
            source = pages if kind == "again" else first
            start = int(place * len(source))
            pages += source[start : start + length]
    return pages


def image(pages: Sequence[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") * (PAGE_BYTES // 8) for page in pages)


@given(first_row=parts, second_row=parts, with_before=st.booleans())
@example(first_row=[("new", 0.0, 3), ("zero", 0.0, 1), ("new", 0.0, 3)], second_row=[], with_before=False)
@settings(max_examples=50, deadline=None)
def test_each_page_is_stored_once(
    *, first_row: list[tuple[str, float, int]], second_row: list[tuple[str, float, int]], with_before: bool
) -> None:
    first = built(first_row, [])
    second = built(second_row, first)
    with tempfile.TemporaryDirectory() as name:
        domain = Domain.open(Path(name), "team", create=True)
        before = take(domain, {"pages-1.img": image(first)})
        other = ContainerRef(id="other")
        after = (
            take(domain, {"pages-1.img": image(second)}, before=before)
            if with_before
            else take(domain, {"pages-1.img": image(second)}, container=other)
        )
        assert content_of(domain, before) == {"pages-1.img": image(first)}
        assert content_of(domain, after) == {"pages-1.img": image(second)}
        stored = {*first, *second} - {0}
        joined = domain.page_ids.of(image([*stored, 0, max(stored, default=0) + 1]))
        ids = [joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES)]
        with contextlib.closing(Index(domain.index_dir)) as index:
            assert len(index) == len(stored)
            assert index.find_all(ids).keys() == set(ids[:-2])
