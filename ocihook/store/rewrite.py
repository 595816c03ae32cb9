"""Writes packs of a domain anew: without the pages that no checkpoint needs any more, or with another key.

New packs and the index come first, then each layout in one step; the old packs are rubbish when no layout names them.
A crash leaves checkpoints that are in the old packs, and some that are in the new ones.
"""

import contextlib
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from ocihook.store.deduplicate import GROUP_PAGES, compress_group
from ocihook.store.domain import Domain
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.identity import ID_BYTES
from ocihook.store.index import KEY_BYTES, add_to_index, merge_index
from ocihook.store.pack import PAGE_BYTES, PackInfo, PackWriter
from ocihook.store.places import StoredPack
from ocihook.store.upkeep import remove_rubbish

_AT_A_TIME = 16  # packs, 4 GiB


class Span(NamedTuple):
    """Pages of a pack that follow one another, all of them needed."""

    first: int
    end: int


class _Moved(NamedTuple):
    info: PackInfo
    spans: list[Span]
    starts: list[int]  # where each is now

    def page(self, page: int) -> int:
        """Return where a page is now."""
        number = bisect_right(self.spans, page, key=lambda span: span.first) - 1
        return self.starts[number] + page - self.spans[number].first


def needed_spans(layouts: Iterable[Layout]) -> dict[str, list[Span]]:
    """Return by pack what layouts need of it, in order, without overlap."""
    rows: dict[str, list[Span]] = {}
    for layout in layouts:
        for extents in layout.images.values():
            for number, first, pages in extents:
                if number != ZERO:
                    rows.setdefault(layout.packs[number].name, []).append(Span(first, first + pages))
    return {name: _joined(spans) for name, spans in rows.items()}


def _joined(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.first <= joined[-1].end:
            joined[-1] = Span(joined[-1].first, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def drop_unneeded(domain: Domain) -> int:
    """Write packs anew of which less than half is needed; return the bytes freed. Call it with the lock alone.

    Raises:
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included.
    """
    before = domain.pack_bytes()
    spans = _needed(domain)
    wasteful = []
    for name in spans:
        with contextlib.closing(domain.packs.open(name)) as pack:
            if 2 * sum(span.end - span.first for span in spans[name]) < pack.pages:
                wasteful.append(name)
    _rewrite_all(domain, wasteful, spans)
    return before - domain.pack_bytes()


def rekey(domain: Domain) -> int:
    """Encrypt a domain with its newest key; return how many packs were written anew. Call it with the lock alone.

    After an interruption what is done is done, and all can be read with the keys, old and new; it may be called again.

    Raises:
        KeyMissing: if there is no key.
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included.
    """
    domain = domain.begin_rekey()
    spans = _needed(domain)
    old = []
    for name in spans:
        with contextlib.closing(domain.packs.open(name)) as pack:
            if pack.key_id != domain.keyring.newest.id:
                old.append(name)
    _rewrite_all(domain, old, spans)
    remove_rubbish(domain.end_rekey())
    return len(old)


def _needed(domain: Domain) -> dict[str, list[Span]]:
    return needed_spans(domain.layout(manifest) for manifest in domain.checkpoints())


def _rewrite_all(domain: Domain, names: list[str], spans: Mapping[str, list[Span]]) -> None:
    """Rewrite packs, few at a time: of so many there are two copies on the disk."""
    for at in range(0, len(names), _AT_A_TIME):
        rewrite_packs(domain, {name: spans[name] for name in names[at : at + _AT_A_TIME]})
        remove_rubbish(domain)


def rewrite_packs(domain: Domain, packs: Mapping[str, list[Span]]) -> None:
    """Write what is needed of packs into new ones, and let all layouts know. Call it with the lock alone.

    Raises:
        IntegrityError: if something is damaged; everything is as it was.
        OSError: from the file system, a full one included; likewise.
    """
    moved: dict[str, _Moved] = {}
    for name, spans in packs.items():
        with contextlib.closing(domain.packs.open(name)) as pack:
            moved[name] = _rewrite(domain, pack, spans)
    merge_index(domain.index_dir)
    for manifest in domain.checkpoints():
        layout = domain.layout(manifest)
        if any(info.name in moved for info in layout.packs):
            domain.replace_layout(manifest, _moved_layout(layout, moved))


def _rewrite(domain: Domain, pack: StoredPack, spans: list[Span]) -> _Moved:
    number = secrets.randbits(63)
    keys: list[bytes] = []
    starts = [0, *accumulate(span.end - span.first for span in spans)]
    with domain.packs.create(number) as writer:
        group = bytearray()
        for content in _contents(pack, spans):
            ids = domain.page_ids.of(content)
            keys += [ids[at : at + KEY_BYTES] for at in range(0, len(ids), ID_BYTES)]
            group += content
            while len(group) >= GROUP_PAGES * PAGE_BYTES:
                _append(writer, bytes(group[: GROUP_PAGES * PAGE_BYTES]))
                del group[: GROUP_PAGES * PAGE_BYTES]
        if group:
            _append(writer, bytes(group))
        info = writer.close(durable=True)
    add_to_index(domain.index_dir, {number: b"".join(keys)})
    return _Moved(info, spans, starts)


def _append(writer: PackWriter, content: bytes) -> None:
    kind, stored = compress_group(content)
    writer.append(kind, len(content) // PAGE_BYTES, (1 << len(content) // PAGE_BYTES) - 1, stored)
    writer.flush()


def _contents(pack: StoredPack, spans: list[Span]) -> Iterator[memoryview]:
    for first, end in spans:
        at = first
        while at < end:
            content, pages = pack.read(at, end - at)
            yield content
            at += pages


def _moved_layout(layout: Layout, moved: Mapping[str, _Moved]) -> Layout:
    packs = tuple(moved[info.name].info if info.name in moved else info for info in layout.packs)
    images = {}
    for name, extents in layout.images.items():
        images[name] = Extents()
        for number, first, pages in extents:
            there = moved.get(layout.packs[number].name) if number != ZERO else None
            images[name].append(number, there.page(first) if there else first, pages)
    return Layout(packs, images)
