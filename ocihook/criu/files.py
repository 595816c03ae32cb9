"""CRIU's configuration on this node: which files are read for which runtime, and which options result."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from ocihook.criu.conf import CRIU_CONF_DIR, options, plugin_dir
from ocihook.criu.plugin import find_plugin
from ocihook.criu.version import crun_reads_its_conf, find_path, find_program
from ocihook.errors import ConfigError

_MAX_BYTES = 1 << 20  # of a file
_KIB = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_GHOST_LIMIT_BYTES = 1 << 20  # criu/include/cr_options.h, DEFAULT_GHOST_LIMIT
# Options that runtimes set in every dump, so that default.conf has no effect on them; the file that they name has.
OVERRULED = {"runc": ("tcp-established", "skip-in-flight"), "crun": ("tcp-established",)}


# Options of runtimes that CRIU knows by another name.
_NAMES = {"tcp-skip-in-flight": "skip-in-flight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CriuOptions:
    """Those options of CRIU that decide what it can dump."""

    file: str = str(CRIU_CONF_DIR / "default.conf")  # where an option would be added
    names: frozenset[str] = frozenset()  # of those that are set and take no value
    ghost_limit_bytes: int = _GHOST_LIMIT_BYTES
    scanned: tuple[str, ...] = ()  # irmap-scan-path

    def add(self, option: str) -> str:
        """Return the command that adds an option to the file; a container may have chosen the file's name."""
        return f"echo {option} >> {quote(self.file)}"

    def has(self, *names: str) -> bool:
        """Return whether one of these is set."""
        return not self.names.isdisjoint(names)


def files_read_for(runtime: str) -> list[str]:
    """Return the configuration files that CRIU reads when a runtime calls it; the last one wins."""
    if runtime == "runc":
        return ["default.conf", "runc.conf"] if find_path(runtime) else []
    program = find_program(runtime)
    if program is None:
        return []
    if not crun_reads_its_conf(program):
        return ["default.conf"]
    return ["default.conf", "crun.conf" if (CRIU_CONF_DIR / "crun.conf").exists() else "runc.conf"]


def content(name: str) -> bytes:
    """Return what a configuration file has; b"" if it does not exist."""
    try:
        return (CRIU_CONF_DIR / name).read_bytes()
    except FileNotFoundError:
        return b""


def content_at(path: Path) -> bytes:
    """Return what a configuration file has, wherever it is: a container may name it; b"" if it is not a file.

    Raises:
        ConfigError: if it is larger than any such file.
        OSError: if it cannot be read.
    """
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes: it is no configuration file of CRIU")
    return data


def options_for(runtime: str, named: str = "", asked: frozenset[str] = frozenset()) -> CriuOptions:
    """Return the options that CRIU would get for a container.

    Args:
        runtime: that runs it; "" for a process that is dumped with `criu` directly.
        named: the file that its `org.criu.config` names instead of the runtime's own.
        asked: options that the engine gives the runtime.
    """
    paths = _paths(runtime, named)
    names = {_NAMES.get(name, name) for name in asked}
    ghost_limit_bytes = _GHOST_LIMIT_BYTES
    scanned = []
    for path in paths:
        for option in options(content_at(path)):
            if option.name == "ghost-limit":
                ghost_limit_bytes = _size(option.value)
            elif option.name == "irmap-scan-path":
                scanned.append(option.value)
            elif option.name.startswith("no-"):
                names.discard(option.name.removeprefix("no-"))
            elif path.name != "default.conf" or option.name not in OVERRULED.get(runtime, ()):
                names.add(option.name)
    return CriuOptions(
        file=str(paths[-1] if paths else CRIU_CONF_DIR / "default.conf"),
        names=frozenset(names),
        ghost_limit_bytes=ghost_limit_bytes,
        scanned=tuple(scanned),
    )


def _paths(runtime: str, named: str) -> list[Path]:
    paths = [CRIU_CONF_DIR / name for name in (files_read_for(runtime) if runtime else ["default.conf"])]
    if named:
        paths[1:] = [Path(named)]
    return paths


def loaded_plugin(runtime: str, named: str = "") -> Path | None:
    """Return CRIU's CUDA plugin if CRIU would load it for a container, None if there is none or it is kept out.

    Args:
        runtime: that runs the container.
        named: the file that its `org.criu.config` names instead of the runtime's own.
    """
    return find_plugin(plugin_dir(*map(content_at, _paths(runtime, named))))


def _size(text: str) -> int:
    """Return a size as CRIU reads it: a number, K, M or G behind it (criu/config.c, parse_size)."""
    number, unit = text.rstrip("KMG"), text[-1:] if text[-1:] in _KIB else ""
    return int(number) * _KIB[unit] if number.isdigit() else _GHOST_LIMIT_BYTES
