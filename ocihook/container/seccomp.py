"""A seccomp profile as OCI bundles have it, reduced to the system calls that it allows; two of them compared.

runtime-spec config-linux.md has the format. A profile that allows everything stands for a container without one.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ANY = "*"  # architecture: all of them
ALLOW = "SCMP_ACT_ALLOW"
# From the most restrictive to the least: the kernel prefers the first of those that filters return (seccomp(2)).
_ACTIONS = (
    "SCMP_ACT_KILL_PROCESS",
    "SCMP_ACT_KILL",  # of the thread, as is SCMP_ACT_KILL_THREAD
    "SCMP_ACT_TRAP",
    "SCMP_ACT_ERRNO",
    "SCMP_ACT_NOTIFY",
    "SCMP_ACT_TRACE",
    "SCMP_ACT_LOG",
    ALLOW,
)
_RANKS = {action: rank for rank, action in enumerate(_ACTIONS)} | {"SCMP_ACT_KILL_THREAD": 1}


class Rule(NamedTuple):
    """An action for calls of one system call."""

    action: str
    arguments: str  # their conditions, as JSON; "": none, it holds for every call


class Group(NamedTuple):
    """System calls with the same rules."""

    rules: tuple[Rule, ...]
    names: tuple[str, ...]


class Seccomp(NamedTuple):
    """A profile. Error numbers and flags are left out: they change how a call is refused, and not which."""

    default: str = ALLOW
    architectures: tuple[str, ...] = (ANY,)
    groups: tuple[Group, ...] = ()

    def by_name(self) -> dict[str, tuple[Rule, ...]]:
        """Return the rules of each system call."""
        return {name: group.rules for group in self.groups for name in group.names}


def parse_seccomp(value: Mapping[str, Any] | None) -> Seccomp:
    """Read `linux.seccomp` of a bundle.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if it is malformed.
    """
    if not value:
        return Seccomp()
    rules: dict[str, set[Rule]] = {}
    for entry in value.get("syscalls") or ():
        arguments = entry.get("args") or []
        rule = Rule(_known(entry["action"]), json.dumps(arguments, sort_keys=True) if arguments else "")
        for name in entry["names"]:
            rules.setdefault(str(name), set()).add(rule)
    groups: dict[tuple[Rule, ...], list[str]] = {}
    for name, found in sorted(rules.items()):
        groups.setdefault(tuple(sorted(found)), []).append(name)
    ordered = tuple(Group(found, tuple(names)) for found, names in sorted(groups.items()))
    architectures = tuple(sorted(map(str, value.get("architectures") or ())))
    profile = Seccomp(_known(value["defaultAction"]), architectures, ordered)
    return profile if _restricts(profile) else Seccomp()


def _known(action: str) -> str:
    if action not in _RANKS:
        raise ValueError(f"{action!r} is not an action of seccomp")
    return action


def _restricts(profile: Seccomp) -> bool:
    actions = [rule.action for group in profile.groups for rule in group.rules]
    return any(action != ALLOW for action in (profile.default, *actions))


def changes(then: Seccomp, now: Seccomp) -> dict[str, int | None]:
    """Return the system calls, and architectures, that two profiles treat differently.

    Returns:
        By name: 1 if the later profile allows more, -1 if it allows less, None if that cannot be told.
    """
    before, after = then.by_name(), now.by_name()
    found = {
        name: _change(_outcomes(then.default, before.get(name, ())), _outcomes(now.default, after.get(name, ())))
        for name in sorted({*before, *after})
    }
    found["all other calls"] = _sign([_RANKS[now.default] - _RANKS[then.default]])
    found["architectures"] = _change_of_sets(_architectures(then), _architectures(now))
    return {name: change for name, change in found.items() if change != 0}


def _architectures(profile: Seccomp) -> frozenset[str] | None:
    return None if ANY in profile.architectures else frozenset(profile.architectures)


def _change_of_sets(then: frozenset[str] | None, now: frozenset[str] | None) -> int | None:
    """Compare sets of which None has everything."""
    if then == now:
        return 0
    if now is None or (then is not None and then < now):
        return 1
    return -1 if then is None or now < then else None


class _Outcomes(NamedTuple):
    base: int  # the rank of the action for a call that meets no condition
    conditions: Mapping[str, int]  # ranks by their conditions


def _outcomes(default: str, rules: tuple[Rule, ...]) -> _Outcomes:
    always = [_RANKS[rule.action] for rule in rules if not rule.arguments]
    conditions = {rule.arguments: _RANKS[rule.action] for rule in rules if rule.arguments and not always}
    return _Outcomes(max(always, default=_RANKS[default]), conditions)


def _change(then: _Outcomes, now: _Outcomes) -> int | None:
    return _sign([now.base - then.base, *_steps(then, now)])


def _steps(then: _Outcomes, now: _Outcomes) -> Iterator[int]:
    """Yield by how much each condition changes the rank of the calls that meet it."""
    for condition in {*then.conditions, *now.conditions}:
        yield now.conditions.get(condition, now.base) - then.conditions.get(condition, then.base)


def _sign(steps: list[int]) -> int | None:
    if min(steps) < 0 < max(steps):
        return None
    return 1 if max(steps) > 0 else -1 if min(steps) < 0 else 0
