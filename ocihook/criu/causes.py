"""The catalogue of causes for which CRIU fails, each with its remedy: causes.toml."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

_CONF = "/etc/criu/runc.conf (for crun see `ocihook doctor`)"


class Cause(NamedTuple):
    """One way to fail."""

    group: str  # of causes that belong together, as docs/troubleshooting.md has them
    name: str
    pattern: re.Pattern[str]
    what: str  # with the pattern's groups
    remedy: str  # likewise


@cache
def catalogue() -> Sequence[Cause]:
    """Return all causes that are known; docs/troubleshooting.md has them."""
    return tuple(_read())


def _read() -> Iterator[Cause]:
    for group in tomllib.loads(Path(__file__).with_name("causes.toml").read_text())["group"]:
        for row in group["cause"]:
            remedy = row["remedy"].replace("{conf}", _CONF)
            yield Cause(group["name"], row["name"], re.compile(row["pattern"]), row["what"], remedy)


def cause_named(name: str) -> Cause:
    """Return the first cause of a name."""
    return next(cause for cause in catalogue() if cause.name == name)


def remedy_of(name: str) -> str:
    """Return the remedy of the first cause of a name."""
    return cause_named(name).remedy
