"""README and docs/: links, commands and settings exist, and what is made from the program is what the program says."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import ocihook
from ocihook.cli.handbook import PARTS
from ocihook.config import ALLOWED, IDENTITY_ANNOTATIONS, TABLES, Policy, Settings, load_settings
from tests.cli.test_commands import ALL

PROJECT = Path(__file__).parents[2]
DOCS = sorted((PROJECT / "docs").glob("*.md"))
PAGES = [PROJECT / "README.md", PROJECT / "SECURITY.md", PROJECT / "CHANGELOG.md", *DOCS]
COMMANDS = dict(ALL)
KEYS = {field.name for field in (*dataclasses.fields(Policy), *dataclasses.fields(Settings))} - {"policy", "allowed"}
# Settings of others that our pages name.
FOREIGN_KEYS = {
    "enable_criu",
    "enable_criu_support",
    "enable_experimental_restore_via_create",
    "pod_annotations",
    "signature_policy",
}
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def blocks(page: Path) -> Iterator[str]:
    """Yield the code blocks of a page, fenced and indented."""
    yield from FENCE.findall(page.read_text())
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines):
            yield "\n".join(line.strip() for line in lines)


def code(page: Path) -> Iterator[str]:
    """Yield what a person may type: code in a line, and the lines of code blocks; of transcripts what was typed."""
    for text in INLINE.findall(prose(page)):
        yield " ".join(text.split())
    for block in blocks(page):
        lines = block.splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from (line.strip() for line in typed or lines)


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        if place.startswith("https://"):
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.is_file(), f"{page.name}: {place}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {place}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    text = (PROJECT / "README.md").read_text()
    assert DOCS
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


@pages
def test_files_of_the_project_are_there(page: Path) -> None:
    named = re.findall(r"`((?:integration|ocihook|packaging|tests)/[\w./-]+)`", prose(page))
    assert [name for name in named if not (PROJECT / name).exists() and not (PROJECT / f"{name}.py").exists()] == []


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    for text in code(page):
        match = re.match(r"(?:sudo )?(?:/\S+/)?ocihook (.+)", text)
        if match is None:
            continue
        words = shlex.split(re.sub(r"[;|…\\].*", "", match[1]), comments=True)
        path: tuple[str, ...] = ()
        while words and isinstance(COMMANDS[path], click.Group) and not words[0].startswith("-"):
            path = (*path, words.pop(0))
            assert path in COMMANDS, f"{page.name}: {text}"
        options = {name for option in COMMANDS[path].params for name in option.opts} | {"--help", "--version"}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options, f"{page.name}: {text}"


@pages
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    for text in code(page):
        if match := re.match(r"make ([a-z ]+)", text):
            assert set(match[1].split()) <= targets, f"{page.name}: {text}"


def test_what_ci_runs_is_in_the_readme() -> None:
    (command,) = re.findall(r"^exec (.+)$", (PROJECT / ".ci/run").read_text(), re.MULTILINE)
    assert command in [text.partition("#")[0].strip() for text in code(PROJECT / "README.md")]


@pages
def test_settings_exist(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page)):
        if re.match(r"\[(?:policy|policy\.allowed|restore_from|agent)\]", block):
            file = tmp_path / str(number) / "etc/ocihook/config.toml"
            file.parent.mkdir(parents=True)
            file.write_text(block)
            load_settings(tmp_path / str(number))  # or it raises, and names the key
    for text in code(page):
        if match := re.fullmatch(r"(\w+_\w+) = .+", text):
            assert match[1] in KEYS | FOREIGN_KEYS, f"{page.name}: {text}"
    annotations = re.findall(r"ocihook\.io/([a-z][a-z-]*)", page.read_text())
    others = {name.partition("/")[2] for name in IDENTITY_ANNOTATIONS}
    assert {name.replace("-", "_") for name in {*annotations} - others} <= {*KEYS}


def test_every_setting_is_there_with_its_default() -> None:
    (block,) = [block for block in blocks(PROJECT / "docs/configuration.md") if block.startswith("[policy]")]
    assert tomllib.loads(block) == {
        "policy": dataclasses.asdict(Policy())
        | {"allowed": {key: list(v) if isinstance(v, tuple) else v for key, v in ALLOWED.items()}},
        "restore_from": {},
        "agent": {f.name: f.default for f in dataclasses.fields(Settings) if f.name not in TABLES},
    }


def test_every_command_is_there() -> None:
    text = (PROJECT / "docs/commands.md").read_text()
    shown = [path for path, command in COMMANDS.items() if path and not isinstance(command, click.Group)]
    assert [path for path in shown if not re.search(rf"^\| `ocihook {' '.join(path)}\b", text, re.MULTILINE)] == []


def test_every_alert_is_in_the_runbook() -> None:
    alerts = re.findall(r"- alert: (\w+)", (PROJECT / "packaging/prometheus/ocihook.rules.yaml").read_text())
    text = (PROJECT / "docs/runbook.md").read_text()
    assert alerts
    assert [alert for alert in alerts if alert not in text] == []


def test_every_room_of_the_code_is_named() -> None:
    section = (PROJECT / "docs/architecture.md").read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rooms = {path.stem for path in Path(ocihook.__file__).parent.iterdir() if not path.name.startswith((".", "_"))}
    assert rooms - {"py"} == set(re.findall(r"`ocihook/(\w+)`", section))  # py.typed


def test_what_is_made_is_what_the_program_says(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "docs", tmp_path, dirs_exist_ok=True)
    # By a process of its own: other tests have effects and commands that are not the program's.
    subprocess.run([sys.executable, "-m", "ocihook.cli.handbook", str(tmp_path)], check=True, timeout=60)
    for page in DOCS:
        assert (tmp_path / page.name).read_text() == page.read_text(), "`make docs` makes it again"
    used = re.findall(r"<!-- made by make docs: (\w+) -->", "".join(page.read_text() for page in DOCS))
    assert sorted(used) == sorted(PARTS)


def test_faults_name_tests_that_are_there() -> None:
    """Each cell of the tables is shown by a test, or says that nothing is done there."""
    text = (PROJECT / "docs/faults.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, name in named:
        path = PROJECT / "integration" / file.removeprefix("integration/")
        assert f"def {name}(" in path.read_text(), f"{file}::{name}"
    rows = [row for row in text.splitlines() if row.startswith("| ") and not row.startswith("| fault")]
    assert [row for row in rows if "::" not in row and "no effect" not in row and "none is made" not in row] == []
