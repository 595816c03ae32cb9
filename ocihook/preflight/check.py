"""One row of the list of checks: what it looks for, and the versions and options of CRIU for which it holds."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ocihook.criu.files import CriuOptions
from ocihook.errors import plain
from ocihook.preflight.finding import Finding, Problem, Status

Version = tuple[int, ...]


class Versions(NamedTuple):
    """Versions of CRIU: from one on, and before another."""

    since: Version = ()
    before: Version = ()  # (): no end

    def has(self, version: Version) -> bool:
        """Return whether a version is one of these."""
        return self.since <= version and (not self.before or version < self.before)

    @property
    def is_all(self) -> bool:
        """Return whether every version is one of these."""
        return not self.since and not self.before


ALL_VERSIONS = Versions()


def before(*version: int) -> Versions:
    """Return the versions before this one."""
    return Versions(before=version)


def since(*version: int) -> Versions:
    """Return this version and all later ones."""
    return Versions(since=version)


class Seen(Protocol):
    """The subject of checks: a container (observation.py), or a checkpoint on its node (target.py)."""

    @property
    def criu(self) -> Version:
        """Version of the CRIU; () if it is unknown."""

    @property
    def options(self) -> CriuOptions:
        """Of that CRIU."""


SeenT = TypeVar("SeenT", bound=Seen)


@dataclass(frozen=True, kw_only=True)
class Check(Generic[SeenT]):
    """One row: a condition under which a dump or restore fails, or loses something."""

    name: str  # as criu/explain.py names the failure
    find: Callable[[SeenT], Iterable[Problem]]
    criu: Versions = ALL_VERSIONS  # for which it holds
    unless: Collection[str] = ()  # options of CRIU: with one of them it does not hold
    only_with: Collection[str] = ()  # options of CRIU: it holds only with one of them
    is_final: bool = False  # the policy `preflight = "warn"` does not overrule it

    def holds(self, seen: SeenT) -> bool:
        """Return whether it holds for the CRIU and the options of a dump; for a CRIU of unknown version it may."""
        if not self.criu.is_all and seen.criu and not self.criu.has(seen.criu):
            return False
        if seen.options.has(*self.unless):
            return False
        return not self.only_with or seen.options.has(*self.only_with)

    def findings(self, seen: SeenT) -> Iterator[Finding]:
        """Yield the findings of a row that holds; what cannot be read is a warning."""
        is_certain = self.criu.is_all or bool(seen.criu)
        try:
            for problem in self.find(seen):
                status = problem.status
                if status is Status.FAIL and not is_certain:
                    status = Status.WARN
                yield Finding(self.name, status, problem.detail, problem.remedy, problem.repair)
        except OSError as error:
            detail = f"could not be checked: {plain(error)}"
            yield Finding(self.name, Status.WARN, detail, "run `sudo ocihook doctor --container`")
