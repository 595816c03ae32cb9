"""Device rules of a bundle's cgroup: what they allow, and which of two lists allows less.

runtime-spec config-linux.md has the format. The last rule that fits decides, and the first state denies everything.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

EVERY = -1  # major or minor: all of them
_OTHER = -2  # a number that no rule names
_KINDS = {"a": "bc", "b": "b", "c": "c", "u": "c"}


class DeviceRule(NamedTuple):
    """One rule."""

    allow: bool
    kinds: str  # b, c, or both
    major: int
    minor: int
    access: str  # of r, w, m


class Device(NamedTuple):
    """A device that a bundle lists. Its numbers may differ on another node, or after a boot."""

    kind: str  # b, c, p
    numbers: tuple[int, int]
    mode: int
    owner: str  # uid:gid


class _Probe(NamedTuple):
    kind: str
    major: int
    minor: int


def parse_device_rules(rules: Iterable[Mapping[str, Any]] | None) -> tuple[DeviceRule, ...]:
    """Read `linux.resources.devices` of a bundle.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if it is malformed.
    """
    return tuple(
        DeviceRule(
            bool(rule["allow"]),
            _KINDS[rule.get("type") or "a"],
            _number(rule.get("major")),
            _number(rule.get("minor")),
            "".join(sorted(rule.get("access") or "rwm")),
        )
        for rule in rules or ()
    )


def _number(value: object) -> int:
    return EVERY if value is None or int(str(value)) < 0 else int(str(value))


def parse_devices(devices: Iterable[Mapping[str, Any]] | None) -> dict[str, Device]:
    """Read `linux.devices` of a bundle; return them by their paths.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if it is malformed.
    """
    return {
        str(device["path"]): Device(
            str(device.get("type", "c")).replace("u", "c"),
            (int(device.get("major") or 0), int(device.get("minor") or 0)),
            int(0o666 if device.get("fileMode") is None else device["fileMode"]) & 0o7777,
            f"{device.get('uid') or 0}:{device.get('gid') or 0}",
        )
        for device in devices or ()
    }


class Rules(NamedTuple):
    """The rules of one bundle, with the devices that it lists."""

    rules: Sequence[DeviceRule]
    devices: Mapping[str, Device]

    def access(self, probe: _Probe) -> frozenset[str]:
        """Return what is allowed of a device."""
        allowed: set[str] = set()
        for rule in self.rules:
            if probe.kind in rule.kinds and rule.major in (EVERY, probe.major) and rule.minor in (EVERY, probe.minor):
                allowed = allowed | {*rule.access} if rule.allow else allowed - {*rule.access}
        return frozenset(allowed)

    def probes(self) -> Iterator[_Probe]:
        """Yield devices of which one fits each set of rules that can fit together."""
        majors = {rule.major for rule in self.rules if rule.minor == EVERY} - {EVERY}
        minors = {rule.minor for rule in self.rules if rule.major == EVERY} - {EVERY}
        pairs = {(rule.major, rule.minor) for rule in self.rules if EVERY not in (rule.major, rule.minor)}
        pairs |= {(major, minor) for major in (*majors, _OTHER) for minor in (*minors, _OTHER)}
        yield from (_Probe(kind, *pair) for kind in "bc" for pair in pairs)


def changed_access(then: Rules, now: Rules) -> Iterator[tuple[str, frozenset[str], frozenset[str]]]:
    """Yield the devices whose access two bundles differ in: name, access then, access now.

    Devices that both list are compared by their paths, all others by their numbers.
    """
    for path in sorted(then.devices.keys() & now.devices.keys()):
        yield path, _access_of(then, path), _access_of(now, path)
    listed = {(d.kind, *d.numbers) for rules in (then, now) for d in rules.devices.values()}
    both = Rules((*then.rules, *now.rules), {})
    for probe in sorted({*both.probes()} - {_Probe(*entry) for entry in listed}):
        yield _name(probe), then.access(probe), now.access(probe)


def _access_of(rules: Rules, path: str) -> frozenset[str]:
    device = rules.devices[path]
    return rules.access(_Probe(device.kind, *device.numbers))


def _name(probe: _Probe) -> str:
    return f"{probe.kind} {':'.join('*' if number == _OTHER else str(number) for number in probe[1:])}"
