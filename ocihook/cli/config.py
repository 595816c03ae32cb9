"""`ocihook config`: the settings in use on this node, and where each comes from."""

import json
from typing import Any

import click

from ocihook.cli.render import json_option, print_json, print_table
from ocihook.config import ALLOWED, Policy, Settings, Source, load_with_sources


@click.group()
def config() -> None:
    """Show this node's configuration; `ocihook.toml` (5) explains each setting."""


@config.command()
@json_option
def show(*, as_json: bool) -> None:
    """Show each setting with its value and where it comes from: the default, or a file and its line.

    Annotations of a container override the [policy] that is shown; `ocihook doctor --container` shows them.
    """
    settings, sources = load_with_sources()
    rows = [_row(name, value, default, sources.get(name)) for name, value, default in _settings(settings)]
    if as_json:
        print_json({"settings": rows})
        return
    columns = ["SETTING", "VALUE", "FROM"]
    cells = [[row["name"], _toml(row["value"]), _place(row)] for row in rows]
    print_table(columns, cells)


def _settings(settings: Settings) -> list[tuple[str, Any, Any]]:
    """Return name, value and default of all settings; names as they are below their tables."""
    default, policy = Settings(), settings.policy
    found = [(f"policy.{key}", getattr(policy, key), getattr(default.policy, key)) for key in Policy.__slots__]
    found += [(f"policy.allowed.{key}", settings.allowed[key], ALLOWED[key]) for key in ALLOWED]
    found += [(f"restore_from.{name}", domains, ()) for name, domains in settings.restore_from.items()]
    keys = [key for key in Settings.__slots__ if key not in ("policy", "allowed", "restore_from")]
    return found + [(f"agent.{key}", getattr(settings, key), getattr(default, key)) for key in keys]


def _row(name: str, value: Any, default: Any, source: Source | None) -> dict[str, Any]:  # noqa: ANN401 - as settings are
    file, line = (str(source.file), source.line or None) if source else (None, None)
    return {"name": name, "value": value, "default": default, "file": file, "line": line}


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _place(row: dict[str, Any]) -> str:
    if row["file"] is None:
        return "default"
    return f"{row['file']}, line {row['line']}" if row["line"] else row["file"]
