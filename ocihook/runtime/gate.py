"""Decides whether a container may resume from a checkpoint: its bundle now against the one at the checkpoint.

CRIU gives processes the rights that they had. So a bundle that grants fewer must not resume; one that grants more may,
and its processes keep the fewer ones that they had. A bundle that runs another program starts it, unless its policy
prefers the old one.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from ocihook.container.device_rules import Rules, changed_access
from ocihook.container.program import changes_of_program
from ocihook.container.seccomp import Seccomp, changes
from ocihook.container.spec import Rights, SpecFacts
from ocihook.container.spec_mounts import Mount
from ocihook.errors import ProgramChanged, UnsupportedError, printable

_MOST_NAMES = 6  # of one difference that are listed


class Kind(Enum):
    """Which way two bundles differ."""

    NARROWER = "narrower"  # it grants less now: refused
    OTHER = "other"  # it cannot be restored so, or which of the two grants less is not known: refused
    PROGRAM = "program"  # it runs another program: started from scratch, or restored by policy
    WIDER = "wider"  # it grants more now: restored, with what was granted then


class Difference(NamedTuple):
    """One difference between two bundles."""

    kind: Kind
    what: str


Differences = Iterator[Difference]


def check_spec(then: SpecFacts, now: SpecFacts, *, restore_on_change: bool = False) -> tuple[Difference, ...]:
    """Refuse a checkpoint of a container that was configured differently, unless it only has more rights now.

    Args:
        then: the bundle at the checkpoint.
        now: the bundle of the new container.
        restore_on_change: whether a container resumes that was to run another program.

    Returns:
        The differences that have no effect on the processes that resume.

    Raises:
        ProgramChanged: if the container is to run another program, naming all differences.
        UnsupportedError: naming all differences that keep it from resuming; or if the checkpoint does not record its
            container's rights.
    """
    found = compare(then, now)
    if then.rights is None:
        raise UnsupportedError(
            "the checkpoint is of an earlier release, which did not record what its container was allowed",
            hint="start from scratch, without ocihook.io/restore-from",
        )
    program = [] if restore_on_change else [one.what for one in found if one.kind is Kind.PROGRAM]
    refused = [one.what for one in found if one.kind in (Kind.NARROWER, Kind.OTHER)]
    if program:
        raise ProgramChanged(
            printable(
                f"the container runs another program than the one that was checkpointed: "
                f"{'; '.join((*program, *refused))}"
            ),
            hint="the annotation ocihook.io/restore-on-change=true resumes the old program",
        )
    if refused:
        raise UnsupportedError(
            printable(f"the container is not configured as the one that was checkpointed: {'; '.join(refused)}"),
            hint="configure it as it was then, or start from scratch without ocihook.io/restore-from",
        )
    return found


def compare(then: SpecFacts, now: SpecFacts) -> tuple[Difference, ...]:
    """Return all differences between two bundles that count for processes which resume."""
    if then == now:
        return ()
    rows = [difference for name, get, of in _FACTS for difference in of(name, get(then), get(now))]
    if then.rights is not None and now.rights is not None:
        rows += [difference for name, of in _RIGHTS for difference in of(name, then.rights, now.rights)]
    if then.program is not None and now.program is not None:
        rows += [Difference(Kind.PROGRAM, what) for what in changes_of_program(then.program, now.program)]
    return tuple(rows)


def _equal(name: str, then: object, now: object) -> Differences:
    if then != now:
        yield Difference(Kind.OTHER, f"{name} was {then!r}, is {now!r}")


def _sets(gone: Kind, new: Kind) -> Callable[[str, Iterable[str], Iterable[str]], Differences]:
    """Return how sets are compared.

    Args:
        gone: the kind of the difference that something is missing now.
        new: the kind of the difference that something is new.
    """

    def compared(name: str, then: Iterable[str], now: Iterable[str]) -> Differences:
        for kind, word, found in ((gone, "missing", {*then} - {*now}), (new, "new", {*now} - {*then})):
            if found:
                yield Difference(kind, f"{name} that are {word}: {', '.join(sorted(found))}")

    return compared


def _larger(name: str, then: int, now: int, show: Callable[[int], str] = str) -> Differences:
    """Compare numbers of which the larger one grants more."""
    if then != now:
        yield Difference(Kind.WIDER if now > then else Kind.NARROWER, f"{name} was {show(then)}, is {show(now)}")


_GRANTED = _sets(Kind.NARROWER, Kind.WIDER)
_IMPOSED = _sets(Kind.WIDER, Kind.NARROWER)
_NEEDED = _sets(Kind.NARROWER, Kind.OTHER)  # what is new cannot be given in a restore


def _capabilities(name: str, then: Rights, now: Rights) -> Differences:
    for kind, word, more, less in ((Kind.NARROWER, "missing", then, now), (Kind.WIDER, "new", now, then)):
        sets: dict[str, list[str]] = {}
        for which, held in sorted(more.capabilities.items()):
            for capability in {*held} - {*less.capabilities.get(which, ())}:
                sets.setdefault(capability, []).append(which)
        if sets:
            listed = ", ".join(f"{capability} ({', '.join(sets[capability])})" for capability in sorted(sets))
            yield Difference(kind, f"{name} that are {word}: {listed}")


def _no_new_privileges(name: str, then: Rights, now: Rights) -> Differences:
    yield from _larger(name, -then.no_new_privileges, -now.no_new_privileges, lambda number: str(bool(number)))


def _root(name: str, then: Rights, now: Rights) -> Differences:
    yield from _larger(name, -then.has_read_only_root, -now.has_read_only_root, lambda number: str(bool(number)))


def _umask(name: str, then: Rights, now: Rights) -> Differences:
    yield from _modes(name, ~then.umask & 0o777, ~now.umask & 0o777)


def _modes(name: str, then: int, now: int) -> Differences:
    """Compare permissions."""
    if then != now:
        kind = Kind.WIDER if then & ~now == 0 else Kind.NARROWER
        yield Difference(kind, f"{name} allows {now:o}, allowed {then:o}")


def _seccomp(name: str, then: Rights, now: Rights) -> Differences:
    found = _changes(then.seccomp, now.seccomp)
    kinds = ((-1, Kind.NARROWER, "allows less of"), (None, Kind.OTHER, "allows other things of"), (1, Kind.WIDER, ""))
    for change, kind, words in kinds:
        names = [called for called, how in found.items() if how == change]
        if names:
            yield Difference(kind, f"{name} {words or 'allows more of'} {_some(names)}")


def _changes(then: Seccomp, now: Seccomp) -> dict[str, int | None]:
    return changes(then, now) if then != now else {}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _rlimits(name: str, then: Rights, now: Rights) -> Differences:
    """Compare limits; one that is not set is the runtime's own, which may be anything."""
    for limit in sorted(then.rlimits.keys() | now.rlimits.keys()):
        before, after = then.rlimits.get(limit), now.rlimits.get(limit)
        if before is None or after is None:
            kind = Kind.NARROWER if before is None else Kind.WIDER
            yield Difference(kind, f"{name} {limit} was {_limit(before)}, is {_limit(after)}")
        else:
            for which, old, new in zip(("soft", "hard"), before, after, strict=True):
                yield from _larger(f"{which} {name} {limit}", old, new)


def _limit(limit: tuple[int, int] | None) -> str:
    return f"{limit[0]}:{limit[1]}" if limit else "not set"


def _mounts(name: str, then: Rights, now: Rights) -> Differences:
    for place in sorted(then.mounts.keys() & now.mounts.keys()):
        yield from _mount(f"{name} {place}", then.mounts[place], now.mounts[place])


def _mount(name: str, then: Mount, now: Mount) -> Differences:
    yield from _equal(f"type of {name}", then.kind, now.kind)
    yield from _equal(f"source of {name}", then.source, now.source)
    yield from _IMPOSED(f"restrictions of {name}", then.restrictions, now.restrictions)
    yield from _larger(
        f"propagation of {name}", then.propagation, now.propagation, ("private", "slave", "shared").__getitem__
    )
    for limit in sorted(then.limits.keys() | now.limits.keys()):
        before, after = then.limits.get(limit, _UNLIMITED), now.limits.get(limit, _UNLIMITED)
        yield from _larger(f"{limit} of {name}", before, after, _number)
    yield from _equal(f"options of {name}", then.data, now.data)


_UNLIMITED = 1 << 80


def _number(number: int) -> str:
    return "not limited" if number == _UNLIMITED else str(number)


def _devices(name: str, then: Rights, now: Rights) -> Differences:
    for path in sorted(then.devices.keys() & now.devices.keys()):
        before, after = then.devices[path], now.devices[path]
        yield from _equal(f"kind of {name} {path}", before.kind, after.kind)
        yield from _equal(f"owner of {name} {path}", before.owner, after.owner)
        yield from _modes(f"mode of {name} {path}", before.mode, after.mode)


def _device_rules(name: str, then: Rights, now: Rights) -> Differences:
    rules = [Rules(rights.device_rules, rights.devices) for rights in (then, now)]
    if rules[0] != rules[1]:
        for device, before, after in changed_access(*rules):
            yield from _GRANTED(f"{name} {device}", before, after)


def _profile(name: str, then: str | None, now: str | None) -> Differences:
    """Compare labels of a security module: a restore replaces one by another, and gives none to a process without one.

    CRIU does so (`rst_prep_creds_args`), for all processes that had one.
    """
    if then is not None and now is not None and bool(then) != bool(now):
        kind = Kind.NARROWER if now else Kind.WIDER
        yield Difference(kind, f"{name} was {then or 'unconfined'}, is {now or 'unconfined'}")


def _sysctls(name: str, then: Rights, now: Rights) -> Differences:
    """Compare what was set: what is set now is set after the restore, and nothing sets back what no longer is."""
    if gone := {*then.sysctls} - {*now.sysctls}:
        yield Difference(Kind.OTHER, f"{name} that are missing: {', '.join(sorted(gone))}")


def _others(name: str, then: Rights, now: Rights) -> Differences:
    for key in sorted(then.others.keys() | now.others.keys()):
        yield from _equal(f"{name}{key}", then.others.get(key, "not set"), now.others.get(key, "not set"))


def _of(field: str, of: Callable[[str, Any, Any], Differences]) -> Callable[[str, Rights, Rights], Differences]:
    return lambda name, then, now: of(name, getattr(then, field), getattr(now, field))


_FACTS: tuple[tuple[str, Callable[[SpecFacts], Any], Callable[[str, Any, Any], Differences]], ...] = (
    ("image", lambda facts: facts.image, _equal),
    ("user", lambda facts: facts.user, _equal),
    ("terminal", lambda facts: facts.has_terminal, _equal),
    ("mounts", lambda facts: facts.mounts, _NEEDED),
    ("namespaces", lambda facts: facts.namespaces, _sets(Kind.OTHER, Kind.NARROWER)),
    ("devices", lambda facts: facts.devices, _NEEDED),
)
_RIGHTS: tuple[tuple[str, Callable[[str, Rights, Rights], Differences]], ...] = (
    ("capabilities", _capabilities),
    ("no_new_privileges", _no_new_privileges),
    ("umask", _umask),
    ("the seccomp profile", _seccomp),
    ("limit", _rlimits),
    ("read-only root", _root),
    ("mount", _mounts),
    ("masked paths", _of("masked_paths", _sets(Kind.OTHER, Kind.NARROWER))),  # CRIU needs each that was masked
    ("read-only paths", _of("read_only_paths", _IMPOSED)),
    ("device", _devices),
    ("access to device", _device_rules),
    ("shared namespaces", _of("shared_namespaces", _sets(Kind.NARROWER, Kind.OTHER))),
    ("AppArmor profile", _of("apparmor", _profile)),
    ("SELinux label", _of("selinux", _profile)),
    ("sysctls", _sysctls),
    ("", _others),
)
