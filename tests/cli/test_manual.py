"""Man pages and completions say what the code does."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from ocihook import errors
from ocihook.cli.main import EXIT_STATUS
from ocihook.cli.manual import configuration, documents
from ocihook.config import ALLOWED, TABLES, Policy, Settings, load_settings
from tests.cli.test_commands import ALL

PROJECT = Path(__file__).parents[2]
COMMANDS = [(path, command) for path, command in ALL if path]


def texts(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_what_is_committed_is_what_the_code_says(tmp_path: Path) -> None:
    # By a process of its own: commands that were called otherwise before keep how.
    subprocess.run([sys.executable, "-m", "ocihook.cli.manual", str(tmp_path)], check=True, timeout=60)
    for directory in ("man", "completions"):
        made, committed = texts(tmp_path / directory), texts(PROJECT / "packaging" / directory)
        assert made == committed, "`make docs` makes them again"


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=str)
def test_every_command_and_option_is_in_its_page(path: tuple[str, ...], command: click.Command) -> None:
    page = (PROJECT / f"packaging/man/ocihook-{path[0]}.1").read_text().replace("\\", "")
    assert f".B ocihook {' '.join(path)}\n" in page
    section = page.partition(f".B ocihook {' '.join(path)}\n")[2]
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            entry = re.search(rf"^\.B .*{re.escape(option.opts[0])}\b.*\n(.+)", section, re.MULTILINE)
            assert entry, f"{option.opts[0]} of {path}"
            assert len(entry[1]) > 10


def test_every_setting_is_in_its_page_with_default_and_meaning() -> None:
    page = (PROJECT / "packaging/man/ocihook.toml.5").read_text().replace("\\", "")
    for field in (*dataclasses.fields(Policy), *dataclasses.fields(Settings)):
        if field.name in TABLES:
            continue
        entry = re.search(rf"^\.B {field.name}\n((?:[^.].*\n)+)\.br\n\((\w+), default (.*)\)", page, re.MULTILINE)
        assert entry, f"{field.name} is not in the page"
        assert re.search(r"\w", entry[1]), f"{field.name} has no comment in config.py"
        assert tomllib.loads(f"value = {entry[3].partition(';')[0]}")["value"] == field.default


def test_every_exit_status_is_documented() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OcihookError)]
    assert {c.exit_code for c in classes} | {0, 2, 130} == set(EXIT_STATUS)
    for name, text in documents().items():
        if name.endswith(".1"):
            assert all(f".B {status}\n{meaning[:1].upper()}" in text for status, meaning in EXIT_STATUS.items()), name


def test_the_configuration_of_packages_says_the_defaults(tmp_path: Path) -> None:
    """As it is, with any one of its lines no comment any more, and with all of them."""
    file = tmp_path / "etc/ocihook/config.toml"
    file.parent.mkdir(parents=True)
    lines = configuration().splitlines()
    assert max(map(len, lines)) <= 120
    settings = [number for number, line in enumerate(lines) if re.match(r"#\w", line)]
    fields = [f.name for f in dataclasses.fields(Policy)]
    fields += [f.name for f in dataclasses.fields(Settings) if f.name not in TABLES]
    named = sorted(lines[number].lstrip("#").partition(" ")[0] for number in settings)
    assert named == sorted([*fields, *ALLOWED])
    for chosen in ([], *([number] for number in settings), settings):
        text = "\n".join(line[number in chosen :] for number, line in enumerate(lines))
        file.write_text(text)
        assert load_settings(tmp_path) == Settings()
        assert text.count("\n#") == configuration().count("\n#") - len(chosen)
