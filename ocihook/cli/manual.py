"""Writes man pages and shell completions, all made from the commands and the settings themselves.

`make docs` writes them to packaging/, where a test compares them with the code; a package may also make its own:
`python -m ocihook.cli.manual DIRECTORY`. handbook.py generates the parts of docs/.
"""

import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from ocihook import config
from ocihook.cli.main import COMMANDS, EXIT_STATUS, cli

_EDITION = "2026-11-21"  # of the pages; with today's date every build would differ
_FILES = {
    "/etc/ocihook/config.toml, /etc/ocihook/config.d/*.toml": "Settings of the node: see ocihook.toml(5).",
    "/etc/criu/runc.conf, crun.conf, default.conf": "CRIU's configuration; `ocihook install` writes a block into it.",
    "/run/ocihook": "The agent's socket, lock and log, journals of open sessions, and when memory was marked as clean.",
    "/var/lib/ocihook/store": "Checkpoints of mode store.",
    "/var/lib/ocihook/history": "The last sessions, and totals of all: see ocihook-timeline(1), ocihook-metrics(1).",
}
_JSON_ERRORS = (
    "With `--json` an error is one JSON object on one line of standard error. Its `error` has `code`, `text`, `remedy` "
    "and `exit_status`. Standard output has results only."
)
_SHELLS: Mapping[str, type[ShellComplete]] = {
    "bash/ocihook": BashComplete,
    "zsh/_ocihook": ZshComplete,
    "fish/ocihook.fish": FishComplete,
}
_SETTING = re.compile(r"    (?P<key>\w+): \w+ = .*?(?:  # (?P<text>.*))?")
_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}


class Setting(NamedTuple):
    """A key of the configuration."""

    name: str
    text: str  # what it is, as a sentence
    default: str  # as TOML has it
    allowed: str  # which other values it may have, "" for any of its type
    kind: str

    @property
    def words(self) -> str:
        """The values that it may have."""
        return "; ".join(filter(None, (f"{self.kind}, default {self.default}", self.allowed)))


def settings_of(settings: type[config.Policy | config.Settings]) -> Iterator[Setting]:
    """Yield the keys of a table; what each is stands beside it in config.py."""
    source = inspect.getsource(settings).splitlines()
    texts = {match["key"]: match["text"] for line in source if (match := _SETTING.fullmatch(line))}
    for field in dataclasses.fields(settings):
        if settings is config.Settings and field.name in config.TABLES:
            continue
        default = json.dumps(field.default)
        text = texts.get(field.name) or ""
        is_value = text.partition(":")[0] in config.CHOICES.get(field.name, ())
        allowed = ""
        if field.name in config.CHOICES:
            allowed = "one of " + ", ".join(f'"{choice}"' for choice in config.CHOICES[field.name])
        if field.name in config.RANGES:
            low, high = config.RANGES[field.name]
            allowed = f"from {low:.0f} to {high:.0f}" if isinstance(field.default, int) else f"{low:g} to {high:g}"
        sentence = f"{text if is_value else text[:1].upper() + text[1:]}."
        yield Setting(field.name, sentence, default, allowed, _KINDS[type(field.default)])


def documents() -> dict[str, str]:
    """Return all files with their content, by their path below packaging/."""
    found = {"man/ocihook.1": _overview(), "man/ocihook.toml.5": _settings()}
    for name, command in commands_of(cli):
        found[f"man/ocihook-{name}.1"] = _command_page(name, command, COMMANDS[name][1])
    for name, shell in _SHELLS.items():
        completion = shell(cli, {}, "ocihook", "_OCIHOOK_COMPLETE")
        found[f"completions/{name}"] = completion.source_template % completion.source_vars() + "\n"
    return found


def write(directory: Path) -> None:
    """Write all files below a directory, in place of those that are there."""
    for name, text in documents().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commands_of(group: click.Group) -> list[tuple[str, click.Command]]:
    """Return the commands of a group that are shown, by name."""
    context = _context(group)
    named = [(name, group.get_command(context, name)) for name in group.list_commands(context)]
    return [(name, command) for name, command in named if command is not None and not command.hidden]


def _context(command: click.Command) -> click.Context:
    return click.Context(command, help_option_names=["-h", "--help"])  # as below `ocihook`


def _overview() -> str:
    lines = _head("ocihook", 1, "checkpoint and restore GPU containers on stock clusters")
    lines += [".SH SYNOPSIS", ".B ocihook", ".RI [ options ]", ".I command", ".RI [ arguments ]", ".SH DESCRIPTION"]
    lines += [
        _text(
            "CRIU calls ocihook, its action script, whenever runc or crun checkpoints or restores a container. podman, "
            "CRI-O, containerd and the kubelet's checkpoint API stay as they are."
        ),
        ".PP",
        _text(
            "`ocihook install` sets this up on a node, `ocihook doctor` checks whether a checkpoint will work there."
        ),
        ".SH COMMANDS",
    ]
    for name, _ in commands_of(cli):
        lines += [".TP", f".BR ocihook\\-{_plain(name)} (1)", _text(COMMANDS[name][1])]
    lines += [".SH OPTIONS", *_options(cli)]
    lines += _exit_status()
    lines += [".SH FILES"]
    for names, text in _FILES.items():
        lines += [".TP", f".I {_plain(names)}", _text(text)]
    return _done([*lines, ".SH SEE ALSO", ".BR ocihook.toml (5),", ".BR criu (8)"])


def _command_page(name: str, command: click.Command, summary: str) -> str:
    lines = _head(f"ocihook-{name}", 1, summary)
    lines += [".SH SYNOPSIS", *_synopsis(f"ocihook {name}", command), ".SH DESCRIPTION", *_paragraphs(command.help)]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for sub_name, sub in commands_of(command):
            full = f"ocihook {name} {sub_name}"
            lines += [f".SS {_plain(full)}", *_synopsis(full, sub), ".PP", *_paragraphs(sub.help), *_options(sub)]
    lines += [".SH OPTIONS", *_options(command)]
    lines += _exit_status()
    return _done([*lines, ".SH SEE ALSO", ".BR ocihook (1),", ".BR ocihook.toml (5)"])


def _synopsis(name: str, command: click.Command) -> list[str]:
    words = " ".join(command.collect_usage_pieces(_context(command)))
    return [f".B {_plain(name)}", _plain(words)]


def _options(command: click.Command) -> Iterator[str]:
    context = _context(command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:  # an argument has nothing but its name
            yield from (".TP", f".B {_plain(record[0])}", _text(record[1]))


def _exit_status() -> list[str]:
    lines = [".SH EXIT STATUS"]
    for status, meaning in EXIT_STATUS.items():
        lines += [".TP", f".B {status}", _text(meaning[0].upper() + meaning[1:] + ".")]
    return [*lines, ".PP", _text(_JSON_ERRORS)]


def _settings() -> str:
    lines = _head("ocihook.toml", 5, "configuration of ocihook on a node")
    lines += [".SH SYNOPSIS", ".I /etc/ocihook/config.toml", ".br", ".I /etc/ocihook/config.d/*.toml"]
    lines += [
        ".SH DESCRIPTION",
        _text(
            "TOML. If a key is in several files, the last one counts: config.toml first, then those of config.d "
            "in the order of their names. A wrong key or value is an error that names file and key: the dump is "
            "refused and the container runs on; a restore goes ahead with default settings."
        ),
        ".SH [policy]",
        _text(
            "What to do with a container. Each key is also an annotation of the container, which goes before the "
            "files: quiesce_signal as `ocihook.io/quiesce-signal`."
        ),
        *_keys(config.Policy),
        ".SH [policy.allowed]",
        _text(
            "What the annotations of pods may set: the values of a word, the most that a number may be, or true or "
            "false for any or none. What the node's configuration has anyway is always allowed. A dump that is asked "
            "for more is refused, with the key; a restore goes ahead without it. Containers in no pod, as of podman, "
            "are root's own, and may set all."
        ),
        *_allowed(),
        ".SH [restore_from]",
        _text(
            "Whose checkpoints a container may be restored from, if the archive or image that it is restored from "
            "names one in a store: always those of its own namespace, and of the namespaces listed here, as in "
            '`team-b = ["team-a"]`. On the left the container\'s own namespace, on both sides `"*"` stands for all, '
            "`_node` for containers in no pod. By default nothing."
        ),
        ".SH [agent]",
        "What holds for the whole node.",
        *_keys(config.Settings),
        ".SH EXAMPLE",
        ".nf",
        "[policy]",
        _plain('mode = "store"'),
        "",
        "[agent]",
        "keep_last = 3",
        ".fi",
    ]
    return _done([*lines, ".SH SEE ALSO", ".BR ocihook (1)"])


def configuration() -> str:
    """Return a config.toml with all settings, each with its meaning and default, all commented out.

    A line that begins with `#` and no blank is a setting: without the `#` it sets the default.
    """
    lines = _remark(
        "Settings of ocihook on this node: ocihook.toml(5). What is commented out is the default. A file in config.d "
        "overrides this one; `ocihook config show` shows the value in use, and where it comes from."
    )
    lines += ["", *_remark("What to do with a container. A key is also an annotation: ocihook.io/quiesce-signal.")]
    lines += ["[policy]", *_commented(config.Policy), ""]
    lines += _remark("What the annotations of pods may set: values of a word, the most of a number, or any or none.")
    lines += ["[policy.allowed]", *(f"#{key} = {json.dumps(value)}" for key, value in config.ALLOWED.items()), ""]
    lines += _remark(
        "Whose checkpoints a container may be restored from, beside those of its own namespace: "
        'team-b = ["team-a"]. "*" stands for all, _node for containers in no pod.'
    )
    lines += ["[restore_from]", "", *_remark("What holds for the whole node."), "[agent]"]
    return "\n".join([*lines, *_commented(config.Settings)]) + "\n"


def _commented(settings: type[config.Policy | config.Settings]) -> Iterator[str]:
    for key in settings_of(settings):
        yield from ("", *_remark(f"{key.text} ({key.words})"), f"#{key.name} = {key.default}")


def _remark(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _keys(settings: type[config.Policy | config.Settings]) -> Iterator[str]:
    for key in settings_of(settings):
        yield from (".TP", f".B {_plain(key.name)}", _text(key.text), ".br", _plain(f"({key.words})"))


def _allowed() -> Iterator[str]:
    for key, allowed in config.ALLOWED.items():
        value = json.dumps(allowed)
        yield from (".TP", f".B {_plain(key)}", _plain(f"(default {value})"))


def _head(name: str, section: int, summary: str) -> list[str]:
    title = f'.TH {_plain(name).upper()} {section} {_EDITION} "ocihook" "ocihook manual"'
    return [
        '.\\" Made from the program itself by `make docs`.',
        title,
        ".SH NAME",
        _text(f"{name} - {summary[0].lower()}{summary[1:].rstrip('.')}"),
    ]


def _paragraphs(text: str | None) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(text or ""))):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_plain, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _plain(text: str) -> str:
    """Return text as roff has it, on one line."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _text(text: str) -> str:
    """Return running text: a sentence begins a line, no line is long, and what is in backticks is bold."""
    sentences = re.split(r"(?<=[a-z)][.:]) (?=[A-Z`])", text)
    lines: list[str] = []
    for sentence in sentences:
        width = 72 - 4 * min(4, sentence.count("`") // 2)  # bold takes so much more than its backticks
        lines += textwrap.wrap(sentence, width, break_on_hyphens=False, break_long_words=False)
    marked = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", "\n".join(map(_plain, lines)))
    return re.sub(r"\n(?=\\fB[.'])", r"\n\\&", marked)


def _done(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
