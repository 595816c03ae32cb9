"""Our block in CRIU's configuration files (runc.conf, crun.conf, default.conf); every foreign byte stays as it is.

The block is at the beginning of a file, so that what follows is untouched however its last line ends. Its first line
also says whether we made the file, so that removing the block leaves exactly what was there before.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import ConfigError

CRIU_CONF_DIR = Path("/etc/criu")  # of the node; CRIU reads no other (criu/config.c, GLOBAL_CONFIG_DIR)
_END = b"# END ocihook\n"
_BLOCK = re.compile(rb"^# BEGIN ocihook(?P<made>( [a-z-]+)*)\n(?P<body>(?:[^\n]*\n)*?)# END ocihook\n", re.MULTILINE)
_MARK = re.compile(rb"^# (BEGIN|END) ocihook", re.MULTILINE)


class Block(NamedTuple):
    """What the block in a file says."""

    action_script: str  # "": none
    made_file: bool
    plugin_dir: str = ""  # where CRIU is to look for plugins; "": its default
    others: tuple[str, ...] = ()  # lines with further options


class Option(NamedTuple):
    """One line of a configuration file; `is_joined`: as name=value, the only way CRIU takes some values."""

    name: str
    value: str
    is_joined: bool = False


def add_block(content: bytes, block: Block, *, where: str) -> bytes:
    """Return `content` with our block in it; one that is there already is replaced.

    Raises:
        ConfigError: if a block in it is damaged.
    """
    made = b" made-file" * block.made_file
    named = (("action-script", block.action_script), ("libdir", block.plugin_dir))
    lines = [*(f"{name} {value}" for name, value in named if value), *block.others]
    body = "".join(f"{line}\n" for line in lines).encode()
    return b"# BEGIN ocihook%s\n%s%s" % (made, body, _END) + remove_block(content, where=where)


def remove_block(content: bytes, *, where: str) -> bytes:
    """Return `content` without our block: what it was before `add_block`.

    Raises:
        ConfigError: if the block is damaged.
    """
    match = _find(content, where)
    return content if match is None else content[: match.start()] + content[match.end() :]


def read_block(content: bytes, *, where: str) -> Block | None:
    """Return our block, None if there is none.

    Raises:
        ConfigError: if it is damaged.
    """
    match = _find(content, where)
    if match is None:
        return None
    found = options(match["body"])
    values = {option.name: option.value for option in found}
    others = tuple(f"{o.name} {o.value}".rstrip() for o in found if o.name not in ("action-script", "libdir"))
    made_file = b"made-file" in match["made"].split()
    return Block(values.get("action-script", ""), made_file, values.get("libdir", ""), others)


def _find(content: bytes, where: str) -> re.Match[bytes] | None:
    marks = list(_MARK.finditer(content))
    match = _BLOCK.search(content)
    if not marks:
        return None
    if match is None or len(marks) != 2:
        line = content.count(b"\n", 0, marks[0].start()) + 1
        raise ConfigError(
            f"{where}, line {line}: ocihook's block is damaged; nothing was changed",
            hint="remove the lines from '# BEGIN ocihook' to '# END ocihook' by hand and try again",
        )
    return match


def options(content: bytes) -> list[Option]:
    """Return the options of a CRIU configuration file in their order.

    The syntax is CRIU's (criu/config.c): `name`, `name value`, `name=value`, quotes around a value, # for comments.
    """
    found = []
    for line in content.decode("utf-8", "replace").split("\n"):
        text = line.split("#", 1)[0].strip()
        match = re.match(r"(?:--)?([^\s=]+)(=?)\s*(.*)", text)
        if match:
            found.append(Option(match[1], match[3].strip("\"'"), bool(match[2])))
    return found


def plugin_dir(*contents: bytes) -> str:
    """Return where CRIU looks for plugins, given configuration files in the order it reads them; "": not configured."""
    named = [option.value for content in contents for option in options(content) if option.name == "libdir"]
    return named[-1] if named else ""


def action_scripts(content: bytes) -> list[str]:
    """Return the action scripts that a configuration file names."""
    return [option.value for option in options(content) if option.name == "action-script"]
