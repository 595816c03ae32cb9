"""A node's store: domains in a directory, and where their keys are."""

import os
from pathlib import Path
from typing import NamedTuple

from ocihook.config import Settings
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.packs.cipher import NO_KEYS, KeySource
from ocihook.packs.domain_names import DOMAIN_NAME
from ocihook.packs.packing import workers_within
from ocihook.store.deduplicate import WORKER_BYTES
from ocihook.store.domain import Domain


class Store(NamedTuple):
    """Domains in a directory."""

    root: Path
    keys: KeySource = NO_KEYS
    patience: Patience = ENDLESS  # how long users of it wait

    @classmethod
    def of(cls, settings: Settings, patience: Patience = ENDLESS) -> "Store":
        """Return the one that the node's configuration names."""
        return cls(Path(settings.store_dir), KeySource.of(settings), patience)

    def names(self) -> list[str]:
        """Return the names of all domains."""
        found = (self.root / "domains").glob("*/domain") if self.root.exists() else iter(())
        return sorted(path.parent.name for path in found if DOMAIN_NAME.fullmatch(path.parent.name))

    def domains(self) -> list[Domain]:
        """Return all domains."""
        return [self.open(name) for name in self.names()]

    def open(self, name: str, *, create: bool = False) -> Domain:
        """Open a domain.

        Raises:
            StoreError: if there is none, or it cannot be made.
            KeyMissing: if it is to be made and encrypted, and there is no key.
        """
        return Domain.open(self.root, name, self.keys, self.patience, create=create)


def store_workers(settings: Settings) -> int:
    """Return how many processes may store at a time."""
    cores = settings.workers or len(os.sched_getaffinity(0))
    return workers_within(settings.bound_bytes, cores, WORKER_BYTES)
