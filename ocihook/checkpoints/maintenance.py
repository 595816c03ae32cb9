"""Checks and repairs the store, and encrypts it with a new key."""

from ocihook.packs.pages import Progress, no_progress
from ocihook.store import garbage, rewrite
from ocihook.store import verify as check
from ocihook.store.store import Store


def verify(store: Store, *, read_data: bool, progress: Progress = no_progress) -> list[str]:
    """Return what is wrong with a store, a sentence each."""
    wrong = []
    for domain in store.domains():
        with domain.shared():
            wrong += [
                f"domain {domain.name}: {line}" for line in check.verify(domain, read_data=read_data, progress=progress)
            ]
    return wrong


def rekey(store: Store) -> dict[str, int]:
    """Encrypt every domain with its newest key; return by domain how many packs were rewritten.

    Raises:
        KeyMissing: if there is no key.
        IntegrityError: if something is damaged.
        OSError: from the file system, a full one included; what is done is done.
    """
    done = {}
    for domain in store.domains():
        with domain.upkeep(), domain.alone():
            done[domain.name] = rewrite.rekey(domain)
    return done


def repair(store: Store) -> list[str]:
    """Rebuild the index of every domain; return what was done.

    Raises:
        IntegrityError: if a checkpoint is damaged.
    """
    done = []
    for domain in store.domains():
        with domain.upkeep(), domain.alone():
            done += [f"domain {domain.name}: {line}" for line in garbage.repair(domain)]
    return done
