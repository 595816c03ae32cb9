"""Rewrites packs of a domain: without the pages that no checkpoint needs any more, or with another key.

New packs and the index come first, then each layout in one step; the old packs are rubbish when no layout names them.
A crash leaves checkpoints that are in the old packs, and some that are in the new ones. So does a checkpoint that is in
use, which stays where it is. Nobody has to wait: what is added meanwhile needs old packs or new ones.
"""

import contextlib
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ocihook.errors import StoreError
from ocihook.linux.files import sync_directory
from ocihook.packs.pack import PAGE_BYTES, PackInfo, PackWriter
from ocihook.store.deduplicate import GROUP_PAGES, compress_group
from ocihook.store.domain import LOCK_TIMEOUT_S, Domain
from ocihook.store.extents import ZERO, Extents, Layout
from ocihook.store.garbage import Needs, Step, remove_rubbish
from ocihook.store.index import KEY_BYTES, add_to_index, merge_index
from ocihook.store.pack_directory import StoredPack
from ocihook.store.page_ids import ID_BYTES
from ocihook.store.stored_manifest import StoredManifest

_AT_A_TIME = 16  # packs, 4 GiB
_POLL_S = 0.1
_INDEX_BYTES = 24  # for a page, with its share of filter and table


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


class Estimate:
    """The bytes that checkpoints of a domain take once all that they do not need is gone; add one after the other."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._spans: dict[str, list[Span]] = {}
        self._packs: dict[str, tuple[int, int]] = {}  # bytes, and pages
        self.size_bytes = 0

    def add(self, manifest: StoredManifest) -> None:
        """Add a checkpoint.

        Raises:
            IntegrityError: if it, or a pack, is damaged.
        """
        layout = self._domain.layout(manifest)
        for name, spans in needed_spans([layout]).items():
            if name not in self._packs:
                with contextlib.closing(self._domain.packs.open(name)) as pack:
                    self._packs[name] = (self._domain.packs_dir / name).stat().st_size, pack.pages
            self.size_bytes -= self._taken(name)
            self._spans[name] = _joined([*self._spans.get(name, ()), *spans])
            self.size_bytes += self._taken(name)
        self.size_bytes += self._domain.own_bytes(manifest.id)

    def _taken(self, name: str) -> int:
        size, pages = self._packs[name]
        needed = sum(span.end - span.first for span in self._spans.get(name, ()))
        if 2 * needed < pages:  # it is rewritten
            size, pages = size * needed // pages, needed
        return size + pages * _INDEX_BYTES


def drop_unneeded(domain: Domain, needs: Needs | None = None, step: Step = contextlib.nullcontext) -> int:
    """Rewrite packs of which less than half is needed; return the bytes freed. Call it in `upkeep`.

    Args:
        domain: of which.
        needs: what is known of its needs.
        step: gives the lock alone for a step; by default it is held already.

    Raises:
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included.
    """
    needs = needs or Needs(domain)
    before = domain.pack_bytes()
    manifests = needs.manifests()
    spans = _needed(domain, manifests)
    for manifest in manifests:
        if domain.marks.is_used(manifest.id):  # it stays in its packs
            for info in domain.layout(manifest).packs:
                spans.pop(info.name, None)
    wasteful = []
    for name in spans:
        with contextlib.closing(domain.packs.open(name)) as pack:
            if 2 * sum(span.end - span.first for span in spans[name]) < pack.pages:
                wasteful.append(name)
    for some in _few(wasteful, spans):
        rewrite_packs(domain, some, manifests)
        needs.forget(manifest.id for manifest in manifests)
        remove_rubbish(domain, needs, step)
    return max(0, before - domain.pack_bytes())


def rekey(domain: Domain) -> int:
    """Encrypt a domain with its newest key; return how many packs were rewritten. Call it with the lock alone.

    After an interruption, what was done stays done, and all can be read with the old and new keys; call it again.

    Raises:
        KeyMissing: if there is no key.
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included.
        StoreError: if a checkpoint is in use for too long.
    """
    domain = domain.begin_rekey()
    manifests = domain.checkpoints()
    spans = _needed(domain, manifests)
    old = []
    for name in spans:
        with contextlib.closing(domain.packs.open(name)) as pack:
            if pack.key_id != domain.keyring.newest.id:
                old.append(name)
    for some in _few(old, spans):
        rewrite_packs(domain, some, manifests, wait_s=LOCK_TIMEOUT_S)
        remove_rubbish(domain)
    remove_rubbish(domain.end_rekey())
    return len(old)


def _needed(domain: Domain, manifests: Iterable[StoredManifest]) -> dict[str, list[Span]]:
    return needed_spans(map(domain.layout, manifests))


def _few(names: Sequence[str], spans: Mapping[str, list[Span]]) -> Iterator[dict[str, list[Span]]]:
    """Yield a few packs at a time: these are on the disk twice while they are rewritten."""
    for at in range(0, len(names), _AT_A_TIME):
        yield {name: spans[name] for name in names[at : at + _AT_A_TIME]}


def rewrite_packs(
    domain: Domain, packs: Mapping[str, list[Span]], manifests: Iterable[StoredManifest], *, wait_s: float = 0
) -> None:
    """Write what is needed of packs into new ones, and update layouts. Call it in `upkeep`.

    Args:
        domain: of which.
        packs: and what is needed of each.
        manifests: of all the checkpoints that need it; what was added since stays where it is.
        wait_s: for a checkpoint that is in use; 0: it stays where it is, too.

    Raises:
        StoreError: if a checkpoint is in use for longer.
        IntegrityError: if something is damaged; everything is as it was.
        OSError: from the file system, a full one included; likewise.
    """
    moved: dict[str, _Moved] = {}
    for name, spans in packs.items():
        with contextlib.closing(domain.packs.open(name)) as pack:
            moved[name] = _rewrite(domain, pack, spans)
    merge_index(domain.index_dir)
    sync_directory(domain.packs_dir)
    patience = domain.patience.within(wait_s)
    for manifest in manifests:
        layout = domain.layout(manifest)
        if not any(info.name in moved for info in layout.packs):
            continue
        new = _moved_layout(layout, moved)
        if not patience.until(partial(domain.replace_layout, manifest, new), poll_s=_POLL_S) and wait_s:
            raise StoreError(f"checkpoint {manifest.id} is in use by another process")


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
