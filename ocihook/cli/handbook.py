"""Generates parts of the pages in docs/ from the program itself: settings, commands, causes of failures, effects.

A page has a marked part for each, from `<!-- made by make docs: NAME -->` to `<!-- end -->`; all else in it is written
by hand. A test fails when it is due: `python -m ocihook.cli.handbook docs`.
"""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from ocihook import config
from ocihook.audit.rows import FILE, LIMITED, MOUNTED, PLACED, PROCESS, THREAD, Row
from ocihook.cli.main import EXIT_STATUS, cli
from ocihook.cli.manual import commands_of, settings_of
from ocihook.criu.causes import catalogue
from ocihook.linux.socket_options import OPTIONS
from ocihook.session.effect import Effect
from ocihook.stages.order import participants

_PART = re.compile(r"(<!-- made by make docs: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 100


def write(directory: Path) -> None:
    """Regenerate the marked parts of all pages in a directory.

    Raises:
        KeyError: if a page wants a part that is not known.
    """
    for page in sorted(directory.glob("*.md")):
        text = page.read_text()
        filled = _PART.sub(lambda match: f"{match[1]}\n{PARTS[match['name']]()}\n{match[3]}", text)
        if filled != text:
            page.write_text(filled)


def _settings() -> str:
    lines = ["```toml", "[policy]"]
    lines += _keys(config.Policy)
    lines += ["[policy.allowed] # what annotations of pods may set: these values, at most so much, any (true) or none"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in config.ALLOWED.items()]
    lines += ["", "[restore_from] # NAMESPACE = [NAMESPACE, …], see below; by default nothing", "", "[agent]"]
    lines += _keys(config.Settings)
    return "\n".join(lines).rstrip() + "\n```\n"


def _keys(settings: type[config.Policy | config.Settings]) -> Iterator[str]:
    for key in settings_of(settings):
        for text in filter(None, (key.text, key.allowed)):
            yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        yield from (f"{key.name} = {key.default}", "")


def _commands() -> str:
    rows = []
    for name, command in commands_of(cli):
        if isinstance(command, click.Group):
            rows += [(f"{name} {sub_name}", sub) for sub_name, sub in commands_of(command)]
        else:
            rows.append((name, command))
    cells = ((f"`ocihook {_usage(name, command)}`", _summary(command)) for name, command in rows)
    return _table(("command", "does"), cells)


def _usage(name: str, command: click.Command) -> str:
    pieces = command.collect_usage_pieces(click.Context(command))
    return " ".join([name, *(piece for piece in pieces if piece != "[OPTIONS]")])


def _summary(documented: object) -> str:
    """Return the first paragraph of the text about a command, a class or a function."""
    text = documented.help if isinstance(documented, click.Command) else inspect.getdoc(documented)
    return " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())


def _exit_status() -> str:
    return _table(("status", "means"), ((str(status), meaning) for status, meaning in EXIT_STATUS.items()))


def _causes() -> str:
    parts = []
    for group in dict.fromkeys(cause.group for cause in catalogue()):
        rows = ((f"`{c.name}`", _sentence(c.what), _sentence(c.remedy)) for c in catalogue() if c.group == group)
        parts.append(f"### {group}\n\n{_table(('cause', 'what it means', 'what to do'), rows)}")
    return "\n".join(parts)


def _sentence(text: str) -> str:
    """Return a cause or its remedy, with the parts that vary between failures as words in capitals."""
    named = re.sub(r"(\{\w+\})(\{\w+\})", r"\1", text.replace("{who}", "a process"))  # one of two is always empty
    filled = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), named)
    return f"{filled[0].upper()}{filled[1:]}"


def _effects() -> str:
    rows = ((f"`{name}`", _summary(kind), _summary(kind.undo)) for name, kind in sorted(Effect.kinds().items()))
    return _table(("kind", "what was done", "its undo"), rows)


def _participants() -> str:
    rows = (
        (str(number), f"`{type(one).__name__}`", _summary(type(one)), f"`{_calls(type(one))}`")
        for number, one in enumerate(participants(), 1)
    )
    return _table(("", "participant", "what it does", "takes part in"), rows)


def _audit() -> str:
    """Rows that differ in a name in brackets only are one line: what has it, in the order of the table."""
    rows: dict[tuple[str, str, str, str], None] = {}
    tables = (
        ("thread", THREAD),
        ("process", PROCESS),
        ("descriptor", FILE),
        ("mount", MOUNTED),
        ("file on a tmpfs", PLACED),
        ("cgroup", LIMITED),
    )
    for scope, found in tables:
        for row in found.values():
            outcome = "put back" if row.put_back else row.inherited or ("reported" if row.matters else "logged only")
            rows[_general(row), scope, row.criu, outcome] = None
    return _table(("state", "of each", "CRIU", "if it differs after a restore"), rows)


def _general(row: Row) -> str:
    if row.name in OPTIONS:
        return "options of sockets, see below"
    return re.sub(r" \((?:Max [a-z ]+|Inh|Prm|Eff|Bnd|Amb|exec|\w+create|\w+(?:\.\w+)+)\)$", "", row.what)


def _socket_options() -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in OPTIONS), _WIDTH, break_on_hyphens=False) + "\n"


def _calls(kind: type) -> str:
    return "`, `".join(name for name in vars(kind) if inspect.isfunction(vars(kind)[name]) and not name.startswith("_"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PARTS: Mapping[str, Callable[[], str]] = {
    "settings": _settings,
    "commands": _commands,
    "exit_status": _exit_status,
    "causes": _causes,
    "effects": _effects,
    "participants": _participants,
    "audit": _audit,
    "socket_options": _socket_options,
}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
