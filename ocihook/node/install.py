"""Has CRIU call ocihook on a node, and undoes that: a launcher, a block in CRIU's configuration, systemd units.

The launcher comes first and goes last: an interrupted run leaves nothing that points to a missing file. It also
records which directories were made, so that uninstalling leaves exactly what was there before. Where a package has
installed launcher and units, those are the package's, and only CRIU's configuration is changed.
"""

import contextlib
import difflib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ocihook.criu.conf import (
    CRIU_CONF_DIR,
    Block,
    action_scripts,
    add_block,
    options,
    plugin_dir,
    read_block,
    remove_block,
)
from ocihook.criu.plugin import is_to_stay_out
from ocihook.criu.version import crun_reads_its_conf, find_program, find_program_in, locks_by_nftables
from ocihook.errors import UnsupportedError
from ocihook.linux import soft_dirty
from ocihook.linux.files import replace_file
from ocihook.node import distribution
from ocihook.node.drain import wait_until_unused

NODE = Path("/")
LIBEXEC = Path("/usr/local/libexec/ocihook")
LAUNCHER_NAME = "criu-action"
CONF_NAMES = ("runc.conf", "crun.conf", "default.conf")
# What runtimes override in every other file: with these no open connection makes a dump fail; what becomes of it is
# decided in the restore. crun does not set skip-in-flight.
_KEPT_CONNECTIONS = {
    "runc.conf": ("tcp-established", "skip-in-flight"),
    "crun.conf": ("tcp-established", "skip-in-flight"),
    "default.conf": ("skip-in-flight",),
}
# With these CRIU leaves out pages that are clean since an earlier dump. There is none in /; but any other directory
# would have to exist at every dump and restore. ocihook makes one up where it reads the memory itself.
TRACKING = ("track-mem", "prev-images-dir /")
UNIT_DIR = Path("/etc/systemd/system")
# What is enabled, with the target that wants it: the agent listens, prunes once a day, and looks after a boot for
# what the one before left. Before the engines start, what a new kernel cannot do is taken out of the configuration.
SOCKET = "ocihook.socket"
LISTEN = f"systemctl enable --now {SOCKET}"
WANTED_BY = {
    SOCKET: "sockets.target",
    "ocihook-prune.timer": "timers.target",
    "ocihook.service": "multi-user.target",
    "ocihook-kernel.service": "multi-user.target",
}
COORDINATOR = "ocihook-coordinator.service"  # enabled by nobody but an administrator, on one machine
PACKAGE_LIBEXEC = distribution.PACKAGE_PREFIX / distribution.LIBEXEC_BELOW_PREFIX
DRAIN_S = 900.0  # as long as systemd gives sessions to finish, too

SIGN = "Installed by `ocihook install`"  # files with this line are ours to replace and to remove
MADE = "# Directory made for it: "
_MAX_LINKS = 40  # the kernel's own limit


@dataclass(frozen=True, slots=True)
class Change:
    """One file that is to have other content, or to go (`after` None)."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int | None = None  # None: mode and owner stay as they are; else the file is to be root's

    def diff(self) -> str:
        """Return the change as a unified diff."""
        if self.before == self.after:
            return f"{self.path}: owner root, mode {self.mode or 0:04o}"
        old, new = ((data or b"").decode("utf-8", "replace").splitlines() for data in (self.before, self.after))
        old_name, new_name = ("/dev/null" if data is None else str(self.path) for data in (self.before, self.after))
        return "\n".join(difflib.unified_diff(old, new, old_name, new_name, lineterm=""))

    def is_needed(self) -> bool:
        """Return whether the file is not yet as it is to be."""
        if self.before != self.after or self.before is None or self.mode is None:
            return self.before != self.after
        status = self.path.stat()
        return stat.S_IMODE(status.st_mode) != self.mode or status.st_uid not in (0, os.geteuid())


def default_libexec() -> Path:
    """Return where the launcher is, or goes."""
    return PACKAGE_LIBEXEC if distribution.is_packaged() else LIBEXEC


def plan_install(root: Path, libexec: Path = LIBEXEC, *, track_memory: bool = False) -> list[Change]:
    """Return what is to be changed below `root`, in the order in which it must be.

    Args:
        root: of the node, or of a tree.
        libexec: where the launcher goes.
        track_memory: CRIU is to track memory in every dump; without, it is told to no longer.

    Raises:
        ConfigError: if a block of ours in CRIU's configuration is damaged.
        UnsupportedError: if a path cannot be named where it must be, or a file of others is in the way.
    """
    launcher = libexec / LAUNCHER_NAME
    for path in (launcher, *map(Path, distribution.interpreters()), distribution.SITE, Path(distribution.command()[0])):
        _check_nameable(path)
    blocks = _blocks(root, launcher, track_memory=track_memory)
    place = below(root, launcher)
    launchers = _launchers(root, libexec)
    older = [Change(path, read(path), None) for path in launchers if path != place]
    if libexec == PACKAGE_LIBEXEC and distribution.is_packaged():
        if not place.exists():
            raise UnsupportedError(f"{place} is missing; nothing was changed", hint="install the package in that tree")
        changes = [*blocks, *older, *(Change(path, read(path), None) for path in _signed_units(root))]
        return [change for change in changes if change.is_needed()]
    units = [_written(below(root, UNIT_DIR / unit.name), unit.read_text(), 0o644) for unit in _units(root)]
    if (content := read(place)) is not None and not is_signed(content):
        raise UnsupportedError(f"{place} is not ocihook's; nothing was changed", hint="choose another --libexec")
    files = [place, *(c.path for c in (*units, *blocks) if c.after is not None)]
    links = _links(root) if units and root != NODE else []
    directories = sorted({*made_directories(launchers), *missing_directories(root, (*files, *links))})
    record = "".join(f"{MADE}{directory}\n" for directory in directories)
    template = (distribution.PACKAGE_DIR / "hook" / LAUNCHER_NAME).read_text()
    changes = [_written(place, template + record, 0o755), *units, *blocks, *older]
    return [change for change in changes if change.is_needed()]


def plan_refresh(root: Path, libexec: Path = LIBEXEC) -> list[Change]:
    """Return what brings an installation in order, with what was asked for before if this kernel can; [] without one.

    Raises:
        OcihookError: as `plan_install` does.
    """
    return plan_install(root, libexec, track_memory=goes_on_tracking(root)) if _own_blocks(root) else []


def goes_on_tracking(root: Path) -> bool:
    """Return whether CRIU is told to track memory by a block of ours, and can.

    Raises:
        ConfigError: if a block is damaged.
    """
    return any(set(TRACKING) & set(block.others) for block in _own_blocks(root)) and soft_dirty.works()


def check_tracking(root: Path) -> None:
    """Check that CRIU can track memory: with a kernel that does not, it would refuse every dump and every restore.

    Raises:
        UnsupportedError: if it cannot, or nobody knows which kernel it will be.
    """
    if root != NODE:
        raise UnsupportedError(
            f"which kernel will run the tree {root} is not known, so memory cannot be tracked; nothing was changed",
            hint="install without --track-memory, then with it on the node",
        )
    if not soft_dirty.works():
        raise UnsupportedError(
            f"this kernel ({os.uname().release}) does not mark what is written to (soft-dirty bits): CRIU would then "
            "refuse every dump and restore; nothing was changed",
            hint="install without --track-memory: all else works here",
        )


def _own_blocks(root: Path) -> list[Block]:
    paths = [below(root, CRIU_CONF_DIR / name) for name in CONF_NAMES]
    found = (read_block(read(path) or b"", where=str(path)) for path in paths)
    return [block for block in found if block is not None]


def conf_names(root: Path) -> list[str]:
    """Return the configuration files that the runtimes below `root` make CRIU read.

    crun reads crun.conf if there is one, else runc.conf: making crun.conf would hide the rest of runc.conf from it.
    """
    find = find_program if root == NODE else partial(find_program_in, root)
    own = "crun.conf" if below(root, CRIU_CONF_DIR / "crun.conf").exists() else "runc.conf"
    runc, crun = find("runc"), find("crun")
    if root != NODE and not runc and not crun:  # it may get any later: serve every one
        return list(dict.fromkeys(["runc.conf", own, "default.conf"]))
    names = ["runc.conf"] if runc or crun is None else []
    if crun:
        names.append(own if crun_reads_its_conf(crun, root) else "default.conf")
    return list(dict.fromkeys(names))


def other_action_scripts(root: Path) -> list[tuple[Path, str]]:
    """Return the action scripts of others in CRIU's configuration, with the file that names each: they run, too."""
    found = []
    for name in CONF_NAMES:
        path = below(root, CRIU_CONF_DIR / name)
        content = read(path) or b""
        found += [(path, script) for script in action_scripts(remove_block(content, where=str(path)))]
    return found


def plan_uninstall(root: Path, libexec: Path = LIBEXEC) -> list[Change]:
    """Return what undoes an installation, in the order in which it must be.

    Raises:
        ConfigError: if a block of ours in CRIU's configuration is damaged.
    """
    changes = [_without_block(below(root, CRIU_CONF_DIR / name)) for name in CONF_NAMES]
    changes += [Change(path, read(path), None) for path in (*_signed_units(root), *_launchers(root, libexec))]
    return [change for change in changes if change.is_needed()]


def apply_install(changes: list[Change], root: Path) -> None:
    """Make the changes of `plan_install`, and have systemd listen for the hook.

    Raises:
        UnsupportedError: if something cannot be written; what was done before can stay, installing again continues.
    """
    for change in changes:
        apply_change(change)
    units = _units(root)
    hint = "checkpoints work without it: the hook then starts the agent itself"
    if distribution.is_packaged():  # which enables its own; only such of an installation before it may have gone
        if root == NODE and units and any(change.path.parent == UNIT_DIR for change in changes):
            _systemctl("daemon-reload", hint=hint)
            _systemctl("reenable", *WANTED_BY, hint=hint)
            _systemctl("restart", "ocihook.socket", hint=hint)
    elif units and root == NODE:
        _systemctl("daemon-reload", hint=hint)
        _systemctl("enable", *WANTED_BY, hint=hint)
        _systemctl("start", "ocihook.socket", "ocihook-prune.timer", hint=hint)
    elif units:
        for link in _links(root):
            with _explained(link), contextlib.suppress(FileExistsError):
                make_directories(link.parent)
                link.symlink_to(UNIT_DIR / link.name)


def apply_refresh(changes: list[Change], root: Path) -> None:
    """Make the changes of `plan_refresh`; systemd is called only for units, as this runs while the node boots.

    Raises:
        UnsupportedError: if something cannot be written.
    """
    if any(change.path.parent == below(root, UNIT_DIR) for change in changes):
        apply_install(changes, root)
        return
    for change in changes:
        apply_change(change)


def listen() -> str:
    """Have systemd listen for the hook, whoever has put its units there; return what was done.

    Raises:
        UnsupportedError: if systemd refuses.
    """
    _systemctl("enable", "--now", SOCKET, hint="checkpoints work without it: the hook then starts the agent itself")
    return f"enabled and started {SOCKET}"


def apply_uninstall(changes: list[Change], root: Path, libexec: Path = LIBEXEC, *, timeout_s: float = DRAIN_S) -> None:
    """Make the changes of `plan_uninstall`; between configuration and launcher wait for those who may still call it.

    Raises:
        UnsupportedError: if something cannot be removed; uninstalling again continues.
        AgentError: if dumps and restores that run do not end in time; uninstalling again continues.
    """
    directories = made_directories(_launchers(root, libexec))
    named = _named_launchers(root, libexec)
    confs = {below(root, CRIU_CONF_DIR / name) for name in CONF_NAMES}
    for change in changes:
        if change.path in confs:
            apply_change(change)
    if root == NODE:
        wait_until_unused(launchers=named, timeout_s=timeout_s)
    hint = "CRIU no longer calls ocihook; uninstall again to remove the rest"
    has_units = root == NODE and bool(_units(root)) and bool(_signed_units(root))
    if has_units:
        coordinator = [COORDINATOR] if (UNIT_DIR / COORDINATOR).exists() else []  # earlier versions had none
        _systemctl("disable", "--now", *WANTED_BY, *coordinator, hint=hint)
    if not distribution.is_packaged():
        for link in _links(root):
            _remove(link)
    for change in changes:
        if change.path not in confs:
            apply_change(change)
    units = [UNIT_DIR / unit.name for unit in unit_templates()]
    for path in (*confs, *(below(root, path) for path in (*units, libexec / LAUNCHER_NAME))):
        _remove(path.with_name(f"{path.name}.partial"))  # of an install that was killed in the middle of a file
    if has_units:
        _systemctl("daemon-reload", hint=hint)
    for directory in reversed(directories):
        with contextlib.suppress(OSError):  # not empty: not only ours
            below(root, directory).rmdir()


def apply_change(change: Change) -> None:
    """Write a file or remove it.

    Raises:
        UnsupportedError: if that cannot be.
    """
    with _explained(change.path):
        if change.after is None:
            change.path.unlink(missing_ok=True)
            return
        make_directories(change.path.parent)
        old = change.path.stat() if change.mode is None and change.path.exists() else None
        replace_file(change.path, change.after, mode=stat.S_IMODE(old.st_mode) if old else change.mode or 0o644)
        new = change.path.stat()
        if old and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.chown(change.path, old.st_uid, old.st_gid)


def _remove(path: Path) -> None:
    if os.path.lexists(path):  # a read-only file system refuses even where there is nothing to remove
        with _explained(path):
            path.unlink()


def _plugin_dir(root: Path, libexec: Path) -> str:
    """Return where CRIU is to look for plugins: in the launcher's directory, which has none; "": where it does anyway.

    If an administrator has named a directory it stays.
    """
    paths = [below(root, CRIU_CONF_DIR / name) for name in CONF_NAMES]
    named = plugin_dir(*(remove_block(read(path) or b"", where=str(path)) for path in paths))
    return str(libexec) if not named and is_to_stay_out(partial(below, root)) else ""


def _blocks(root: Path, launcher: Path, *, track_memory: bool) -> list[Change]:
    """Return what is to be changed in CRIU's configuration files."""
    wanted, plugins = conf_names(root), _plugin_dir(root, launcher.parent)
    changes = []
    for name in CONF_NAMES:
        path = below(root, CRIU_CONF_DIR / name)
        before = read(path)
        others = _options(root, name, remove_block(before or b"", where=str(path)))
        old = read_block(before or b"", where=str(path))
        made_file = old.made_file if old else before is None
        if name in wanted:
            tracking = TRACKING if track_memory else ()
            block = Block(str(launcher), made_file, plugins, (*others, *_KEPT_CONNECTIONS[name], *tracking))
        elif others:
            block = Block("", made_file, others=others)
        else:
            changes.append(_without_block(path))
            continue
        changes.append(Change(path, before, add_block(before or b"", block, where=str(path))))
    return changes


def _options(root: Path, name: str, foreign: bytes) -> tuple[str, ...]:
    """Return what is to be set for every dump: in default.conf alone, as elsewhere it crashes CRIU up to 4.2."""
    is_set = any(option.name == "network-lock" for option in options(foreign))
    return ("network-lock nftables",) if name == "default.conf" and not is_set and locks_by_nftables(root) else ()


def _without_block(path: Path) -> Change:
    before = read(path)
    block = read_block(before or b"", where=str(path))
    after = remove_block(before or b"", where=str(path))
    is_to_go = before is None or (block and block.made_file and not after)
    return Change(path, before, None if is_to_go else after)


def _written(path: Path, template: str, mode: int) -> Change:
    return Change(path, read(path), render(template, SIGN, distribution.SITE).encode(), mode)


def render(template: str, origin: str, site: Path) -> str:
    """Fill in the template of a launcher or unit: who put it there, what runs it, and from which directory."""
    values = {
        "@ORIGIN@": origin,
        "@PYTHONS@": " ".join(f"'{path}'" for path in distribution.interpreters()),
        "@COMMAND@": " ".join(distribution.command()),
        "@SITE@": str(site),
    }
    for name, value in values.items():
        template = template.replace(name, value)
    return template


def _launchers(root: Path, libexec: Path) -> list[Path]:
    """Return the launchers of ours that are there: in `libexec`, and wherever a block of ours names one."""
    return [place for place in _named_launchers(root, libexec) if is_signed(read(place))]


def _named_launchers(root: Path, libexec: Path) -> list[Path]:
    scripts = [block.action_script for block in _own_blocks(root)]
    named = [str(libexec / LAUNCHER_NAME), *(script for script in scripts if script.startswith("/"))]
    return [*dict.fromkeys(below(root, Path(launcher)) for launcher in named)]


def made_directories(launchers: Iterable[Path]) -> list[Path]:
    """Return the directories that launchers record, the upper ones first, as paths below their root."""
    lines = [line for launcher in launchers for line in (read(launcher) or b"").decode().splitlines()]
    return [Path(line.removeprefix(MADE)) for line in lines if line.startswith(MADE)]


def missing_directories(root: Path, files: Iterable[Path]) -> set[Path]:
    """Return the directories that have to be made for files, as paths below their root."""
    return {NODE / parent.relative_to(root) for file in files for parent in file.parents if not parent.exists()}


def make_directories(directory: Path) -> None:
    """Make a directory that root's programs are run from: as open as usual and no more, whatever the umask is."""
    for parent in reversed([directory, *directory.parents]):
        if not parent.exists():
            parent.mkdir(0o755)
            parent.chmod(0o755)


def is_signed(content: bytes | None) -> bool:
    """Return whether `ocihook install` has written a file's content."""
    return SIGN.encode() in (content or b"")


def _signed_units(root: Path) -> list[Path]:
    """Return the units that `ocihook install` has written; an administrator's and a package's are none of these."""
    places = [below(root, UNIT_DIR / unit.name) for unit in unit_templates()]
    return [place for place in places if is_signed(read(place))]


def unit_templates() -> list[Path]:
    """Return the templates of all systemd units."""
    return sorted((distribution.PACKAGE_DIR / "node" / "systemd").iterdir())


def _units(root: Path) -> list[Path]:
    """Return the templates of systemd's units, none where there is no systemd."""
    if root == NODE:
        has_systemd = Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None
    else:
        has_systemd = below(root, Path("/usr/lib/systemd/system")).is_dir()
    return unit_templates() if has_systemd else []


def _links(root: Path) -> list[Path]:
    return [below(root, UNIT_DIR / f"{target}.wants") / unit for unit, target in WANTED_BY.items()]


def _check_nameable(path: Path) -> None:
    """Refuse what CRIU's configuration, a shell and systemd would not read alike: blanks, quotes, %, $, #."""
    if not re.fullmatch(r"/[\w./+@:,=~-]*", str(path)):
        raise UnsupportedError(
            f"{path} cannot be named in CRIU's configuration, in a shell script and in a systemd unit",
            hint="it must be an absolute path of letters, digits and _./+@:,=~-",
        )


def read(path: Path) -> bytes | None:
    """Return a file's content, None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def below(root: Path, path: Path) -> Path:
    """Return where `path` is for who has `root` as its root directory: no link leads out of a tree.

    Raises:
        UnsupportedError: if links form a cycle.
    """
    place, rest, links = root, [*reversed(path.parts[1:])], 0
    while rest:
        part = rest.pop()
        step = place / part
        if part == "..":
            place = place if place == root else place.parent
        elif not step.is_symlink():
            place = step
        else:
            links += 1
            if links > _MAX_LINKS:
                raise UnsupportedError(f"the link {step} leads to itself; nothing was changed", hint="correct the link")
            target = step.readlink()
            place = root if target.is_absolute() else place
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return place


def _systemctl(*arguments: str, hint: str) -> None:
    try:
        subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise UnsupportedError(f"`systemctl {' '.join(arguments)}` failed: {detail.strip()}", hint=hint) from error


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"{path} cannot be changed: {error.strerror}",
            hint="run it as root, on a writable file system; what was done so far can stay",
        ) from error
