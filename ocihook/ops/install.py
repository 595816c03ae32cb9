"""Has CRIU call ocihook on a node, and takes that back: a launcher, a block in CRIU's configuration, systemd units.

The executable comes first and goes last: whoever is interrupted leaves nothing that points into the void.
"""

import contextlib
import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ocihook
from ocihook.criu.conf import Block, add_block, read_block, remove_block
from ocihook.criu.version import crun_reads_its_conf, find_program
from ocihook.errors import UnsupportedError
from ocihook.linux.files import replace_file

LIBEXEC = Path("/usr/local/libexec/ocihook")
CRIU_CONF_DIR = Path("/etc/criu")
CONF_NAMES = ("runc.conf", "crun.conf", "default.conf")
UNIT_DIR = Path("/etc/systemd/system")
WANTS_LINK = UNIT_DIR / "sockets.target.wants" / "ocihook.socket"

_PACKAGE = Path(ocihook.__file__).parent


@dataclass(frozen=True, slots=True)
class Change:
    """One file that is to have other content, or to go (`after` None)."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int

    def diff(self) -> str:
        """Return the change as a unified diff."""
        old, new = ((data or b"").decode("utf-8", "replace").splitlines() for data in (self.before, self.after))
        old_name, new_name = ("/dev/null" if data is None else str(self.path) for data in (self.before, self.after))
        return "\n".join(difflib.unified_diff(old, new, old_name, new_name, lineterm=""))


def plan_install(root: Path, libexec: Path = LIBEXEC) -> list[Change]:
    """Return what is to be changed below `root`, in the order in which it must be.

    Raises:
        ConfigError: if a block of ours in CRIU's configuration is damaged.
    """
    launcher = libexec / "criu-action"
    changes = [_written(_below(root, launcher), _render((_PACKAGE / "hook" / "criu-action").read_text()), 0o755)]
    if _has_systemd(root):
        changes += [_written(_below(root, UNIT_DIR / u.name), _render(u.read_text()), 0o644) for u in _units()]
    wanted = conf_names(root)
    for name in CONF_NAMES:
        path = _below(root, CRIU_CONF_DIR / name)
        if name in wanted:
            changes.append(_with_block(path, str(launcher)))
        elif path.exists():
            changes.append(_without_block(path))
    return [change for change in changes if change.before != change.after]


def conf_names(root: Path) -> list[str]:
    """Return the configuration files that the runtimes below `root` make CRIU read.

    crun reads crun.conf if there is one, else runc.conf: making crun.conf would hide the rest of runc.conf from it.
    """
    has_crun_conf = _below(root, CRIU_CONF_DIR / "crun.conf").exists()
    if root != Path("/"):  # programs of an image cannot be asked for their version: serve every one there may be
        return ["runc.conf", *(["crun.conf"] if has_crun_conf else []), "default.conf"]
    crun = find_program("crun")
    names = ["runc.conf"] if find_program("runc") or crun is None else []
    if crun and not crun_reads_its_conf(crun, find_program("criu")):
        names.append("default.conf")
    elif crun and (has_crun_conf or not names):
        names.append("crun.conf" if has_crun_conf else "runc.conf")
    return names


def plan_uninstall(root: Path, libexec: Path = LIBEXEC) -> list[Change]:
    """Return what takes an installation back, in the order in which it must be.

    Raises:
        ConfigError: if a block of ours in CRIU's configuration is damaged.
    """
    confs = [_below(root, CRIU_CONF_DIR / name) for name in CONF_NAMES]
    changes = [_without_block(path) for path in confs if path.exists()]
    ours = [_below(root, path) for path in [*(UNIT_DIR / unit.name for unit in _units()), libexec / "criu-action"]]
    changes += [Change(path, _read(path), None, 0) for path in ours]
    return [change for change in changes if change.before != change.after]


def apply_install(changes: list[Change], root: Path) -> None:
    """Make the changes of `plan_install`.

    Raises:
        UnsupportedError: if something cannot be written; what was done before can stay, installing again goes on.
    """
    with _explained():
        for change in changes:
            change.path.parent.mkdir(parents=True, exist_ok=True)
            _apply(change)
    if _has_systemd(root):
        link = _below(root, WANTS_LINK)
        if root != Path("/"):
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(UNIT_DIR / "ocihook.socket")
        else:
            _systemctl("daemon-reload")
            _systemctl("enable", "--now", "ocihook.socket")


def apply_uninstall(changes: list[Change], root: Path, libexec: Path = LIBEXEC) -> None:
    """Make the changes of `plan_uninstall`.

    Raises:
        UnsupportedError: if something cannot be removed; uninstalling again goes on.
    """
    if root == Path("/") and _has_systemd(root) and (UNIT_DIR / "ocihook.socket").exists():
        _systemctl("disable", "--now", "ocihook.socket")
    made_directory = any(
        block.made_directory
        for change in changes
        if change.before and change.path.parent == _below(root, CRIU_CONF_DIR)
        for block in [read_block(change.before, where=str(change.path))]
        if block
    )
    with _explained():
        _below(root, WANTS_LINK).unlink(missing_ok=True)
        for change in changes:
            _apply(change)
        directories = [_below(root, WANTS_LINK).parent] * (root != Path("/")) + [_below(root, libexec)]
        for directory in directories + [_below(root, CRIU_CONF_DIR)] * made_directory:
            with contextlib.suppress(OSError):  # not empty: not only ours
                directory.rmdir()
    if root == Path("/") and _has_systemd(root):
        _systemctl("daemon-reload")


def _apply(change: Change) -> None:
    if change.after is None:
        change.path.unlink(missing_ok=True)
        return
    target = Path(os.path.realpath(change.path))  # a link to a file kept elsewhere stays a link
    mode = target.stat().st_mode & 0o7777 if change.before is not None and change.mode == 0 else change.mode or 0o644
    owner = target.stat() if target.exists() else None
    replace_file(target, change.after, mode=mode)
    if owner and (owner.st_uid, owner.st_gid) != (0, 0):
        os.chown(target, owner.st_uid, owner.st_gid)


def _with_block(path: Path, launcher: str) -> Change:
    before = _read(path)
    old = read_block(before, where=str(path)) if before is not None else None
    block = Block(
        launcher,
        made_file=old.made_file if old else before is None,
        made_directory=old.made_directory if old else not path.parent.exists(),
    )
    return Change(path, before, add_block(before or b"", block, where=str(path)), 0)


def _without_block(path: Path) -> Change:
    before = _read(path) or b""
    block = read_block(before, where=str(path))
    after = remove_block(before, where=str(path))
    return Change(path, before, None if block and block.made_file and not after else after, 0)


def _written(path: Path, content: str, mode: int) -> Change:
    before = _read(path)
    after = content.encode()
    if before == after and path.stat().st_mode & 0o7777 != mode:
        before = b""
    return Change(path, before, after, mode)


def _units() -> list[Path]:
    return sorted((_PACKAGE / "ops" / "systemd").iterdir())


def _render(template: str) -> str:
    return template.replace("@PYTHON@", sys.executable).replace("@SITE@", str(_PACKAGE.parent))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _has_systemd(root: Path) -> bool:
    if root == Path("/"):
        return Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None
    return _below(root, Path("/usr/lib/systemd/system")).is_dir()


def _systemctl(*arguments: str) -> None:
    try:
        subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise UnsupportedError(
            f"`systemctl {' '.join(arguments)}` failed: {detail.strip()}",
            hint="checkpoints work without it: the hook then starts the agent itself",
        ) from error


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"{error.filename or 'a file'} cannot be changed: {error.strerror}",
            hint="run it as root on a file system that can be written; what was done so far can stay",
        ) from error
