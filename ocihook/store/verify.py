"""Checks a domain: that all records fit together, that nothing was removed or exchanged, and every byte if wanted."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import BinaryIO

from ocihook.errors import IntegrityError, OcihookError
from ocihook.packs.pack import PAGE_BYTES
from ocihook.packs.pages import Progress, no_progress
from ocihook.store.assemble import open_part
from ocihook.store.domain import Domain
from ocihook.store.extents import ZERO, Layout
from ocihook.store.page_ids import PageIds
from ocihook.store.stored_manifest import StoredManifest


def verify(domain: Domain, *, read_data: bool, progress: Progress = no_progress) -> list[str]:
    """Return what is wrong, a sentence each; with `read_data` every byte is read. Call it with the lock shared."""
    wrong: list[str] = []
    manifests = []
    for checkpoint_id in domain.checkpoint_ids():
        with _collecting(wrong):
            manifests.append(domain.read(checkpoint_id))
    with _collecting(wrong):
        wrong += check_chain(domain)
    pages: dict[str, int] = {}
    for manifest in manifests:
        with _collecting(wrong):
            layout = domain.layout(manifest)
            verify_layout(domain, manifest, layout, pages, read_data=read_data)
            domain.verify_ids(manifest)
            if read_data:
                verify_content(domain, manifest, layout, progress)
    return wrong


def verify_checkpoint(domain: Domain, manifest: StoredManifest, progress: Progress = no_progress) -> None:
    """Read every byte of one checkpoint. Call it with the lock shared.

    Raises:
        IntegrityError: naming what is missing or damaged.
    """
    layout = domain.layout(manifest)
    verify_layout(domain, manifest, layout, {}, read_data=False)
    domain.verify_ids(manifest)
    verify_content(domain, manifest, layout, progress)


def verify_layout(
    domain: Domain, manifest: StoredManifest, layout: Layout, pages: dict[str, int], *, read_data: bool
) -> None:
    """Check that what a layout names is there; `pages` gets how many each pack has. With `read_data`, read packs whole.

    Raises:
        IntegrityError: naming what is missing or damaged.
    """
    for info in layout.packs:
        if info.name not in pages:
            with contextlib.closing(domain.packs.open(info.name, info)) as pack:
                if read_data:
                    pack.verify()
                pages[info.name] = pack.pages
    for name, extents in layout.images.items():
        for number, first, count in extents:
            if number != ZERO and first + count > pages[layout.packs[number].name]:
                raise IntegrityError(f"checkpoint {manifest.id}: {name} lies outside of its packs")


def verify_content(
    domain: Domain, manifest: StoredManifest, layout: Layout, progress: Progress, ids: BinaryIO | None = None
) -> None:
    """Read all pages of a checkpoint; write their ids as the domain has them into a file, if one is given.

    Raises:
        IntegrityError: naming what is damaged, or if they are not what was checkpointed.
    """
    found = hashlib.blake2b(digest_size=32)
    theirs = PageIds(manifest.seed)
    for name in layout.images:
        with contextlib.closing(open_part(layout, name, domain.packs)) as part:
            for pages, contents in part.runs(0, part.size_bytes):
                found.update(theirs.of_run(pages, contents))
                if ids is not None:
                    ids.write(domain.page_ids.of_run(pages, contents))
                progress(pages * PAGE_BYTES)
    if found.hexdigest() != manifest.page_ids_digest:
        raise IntegrityError(f"checkpoint {manifest.id} does not hold the pages that were checkpointed")


def check_chain(domain: Domain) -> list[str]:
    """Return what is wrong with the chain, a sentence each: checkpoints that were removed or exchanged."""
    wrong = []
    entries = domain.entries()
    there_are = set(domain.checkpoint_ids())
    head = domain.recorded_head()
    named = [(entry.previous, f"checkpoint {entry.link.id}") for entry in entries.values() if entry.previous]
    if head is not None:
        named.append((head.link, "the domain's head"))
    pulled = [domain.entry(checkpoint_id) for checkpoint_id in there_are - entries.keys()]
    for entry in pulled:  # its predecessor elsewhere need not be here; if it is, it must be the same
        before = entry.previous
        if before and before.id in there_are and domain.entry(before.id).link != before:
            wrong.append(f"checkpoint {before.id} was exchanged: checkpoint {entry.link.id} names another manifest")
    for link, by in named:
        there = entries.get(link.id)
        if there is None:
            # A prune drops the records of what it removed, but for the newest before what is left.
            if not any(e.previous == link and e.link.id not in there_are for e in entries.values()):
                wrong.append(f"checkpoint {link.id}, which {by} names, was removed, but not by a prune")
        elif there.link != link:
            wrong.append(f"checkpoint {link.id} was exchanged: {by} names another manifest")
    return wrong


@contextlib.contextmanager
def _collecting(wrong: list[str]) -> Iterator[None]:
    try:
        yield
    except (OcihookError, OSError) as error:
        wrong.append(str(error))
