"""Whether a container may resume from a checkpoint: what its bundle says now against what it said then."""

from collections.abc import Iterator

from ocihook.container.spec import SpecFacts
from ocihook.errors import UnsupportedError, printable


def check_spec(then: SpecFacts, now: SpecFacts) -> None:
    """Refuse a checkpoint of a container that was configured differently.

    Raises:
        UnsupportedError: naming all that differs.
    """
    differing = list(_differences(then, now))
    if differing:
        raise UnsupportedError(
            printable(f"the container is not configured as the one that was checkpointed: {'; '.join(differing)}"),
            hint="configure it as it was then, or start from scratch without ocihook.io/restore-from",
        )


def _differences(then: SpecFacts, now: SpecFacts) -> Iterator[str]:
    for name in ("image", "user", "has_terminal"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            yield f"{name.replace('has_', '')} was {before!r}, is {after!r}"
    for name in ("mounts", "namespaces", "devices"):
        before, after = set(getattr(then, name)), set(getattr(now, name))
        if gone := sorted(before - after):
            yield f"{name} that are missing: {', '.join(gone)}"
        if new := sorted(after - before):
            yield f"{name} that are new: {', '.join(new)}"
