"""Which dumps of gangs are complete: with one member missing, the checkpoints of the others are worth nothing.

A member's checkpoint names its dump, how many members that has, and how many were on the same node. So whoever sees the
checkpoints of a domain knows what is missing there: no record of the coordinator is needed, nor its answer.
"""

from collections.abc import Iterable

from ocihook.errors import StoreError
from ocihook.model import ContainerRef


class Epochs:
    """The dumps of gangs that checkpoints of one domain are part of."""

    def __init__(self, containers: Iterable[ContainerRef]) -> None:
        """Take the containers of all checkpoints that are complete themselves."""
        self._members: dict[str, set[str]] = {}
        for container in containers:
            if container.gang:
                self._members.setdefault(container.gang, set()).add(container.gang_member)

    def is_whole(self, container: ContainerRef) -> bool:
        """Return whether all members are there that were dumped with a container; True if it was in no gang."""
        return not self.missing(container)

    def has_all_of_node(self, container: ContainerRef) -> bool:
        """Return whether those are that were dumped on the same node: a node does not know what others have stored."""
        return not container.gang or self._here(container) >= max(1, _number(container.gang_here))

    def missing(self, container: ContainerRef) -> int:
        """Return how many members are missing that were dumped with a container."""
        if not container.gang:
            return 0
        return max(0, max(2, _number(container.gang_size)) - self._here(container))

    def missing_of_node(self, container: ContainerRef) -> int:
        """Return how many of those are missing that were dumped on the same node: all others may be elsewhere."""
        return max(0, _number(container.gang_here) - self._here(container)) if container.gang else 0

    def _here(self, container: ContainerRef) -> int:
        return len(self._members.get(container.gang, ()))


def epoch_of(container: ContainerRef) -> str:
    """Return how people call the dump of a gang that a checkpoint is part of: GANG/EPOCH; "" if it is of none."""
    return "/".join(container.gang.split("/")[:2])


def find_epoch(name: str, where: str, known: Iterable[tuple[str, str, ContainerRef]]) -> tuple[str, list[str]]:
    """Return domain and checkpoints of a dump of a gang.

    Args:
        name: of the dump: GANG/EPOCH, or GANG/EPOCH/ATTEMPT.
        where: it is looked for, in words.
        known: domain, id and container of every checkpoint there.

    Raises:
        StoreError: if there is none, or more than one.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for domain, checkpoint_id, container in known:
        if container.gang and name in (container.gang, epoch_of(container)):
            found.setdefault((domain, container.gang), []).append(checkpoint_id)
    if not found:
        raise StoreError(f"{where} has nothing of {name}", hint="name GANG/EPOCH as `ocihook store list` shows it")
    if len(found) > 1:
        which = ", ".join(f"{gang} in domain {domain}" for domain, gang in found)
        raise StoreError(f"{where} has {len(found)} dumps {name}: {which}", hint="name one of them, and its domain")
    ((domain, _), ids) = found.popitem()
    return domain, ids


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
