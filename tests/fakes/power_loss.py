"""Power losses: records what processes do below a directory, and gives the states that its disk may be left in.

What was not synced may be lost: content until the file was, a name until its directory was, each write and each name
for itself; no file system that this is meant for promises more, though most do. A move from one directory to another
is never there by its old name's removal alone.
"""

import builtins
import contextlib
import fcntl
import io
import os
import pickle
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

KILLED = 9  # exit status of a process that ends before one of its calls
Mark = Callable[[str], None]  # says that something has been promised
Tree = dict[str, bytes | None]  # content by path; None: a directory


class Made(NamedTuple):
    """A new file or directory, which has no name yet."""

    inode: int
    is_directory: bool


class Named(NamedTuple):
    """Names of a directory were given or, without an inode, taken away, all at once."""

    directory: int
    changes: tuple[tuple[str, int | None], ...]
    synced_by: tuple[int, ...]  # directories: the sync of any of them makes it sure
    follows: bool = False  # it is not there without the change before it


class Written(NamedTuple):
    """Bytes of a file."""

    inode: int
    offset: int
    data: bytes


class Cut(NamedTuple):
    """A file was given a size."""

    inode: int
    size: int


class Synced(NamedTuple):
    """A file or a directory is on stable storage as it was then."""

    inode: int


class Marked(NamedTuple):
    """Something has been promised."""

    what: str


Call: TypeAlias = Made | Named | Written | Cut | Synced | Marked


# --- recording


class Recorder:
    """Puts itself between Python and the kernel, for this process and those that it forks."""

    def __init__(self, root: Path, log: Path, last: int) -> None:
        """Take the directory, where calls are logged, and the number of calls before the one that kills."""
        self._root = os.path.realpath(root) + "/"
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._left = last

    def install(self) -> None:
        """Take the place of all that changes files."""
        self._real = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
        for name, function in {
            "open": self._open,
            "write": lambda fd, data: self._write(fd, (data,), "write", data),
            "writev": lambda fd, buffers: self._write(fd, buffers, "writev", buffers),
            "pwrite": lambda fd, data, offset: self._write(fd, (data,), "pwrite", data, offset),
            "ftruncate": self._ftruncate,
            "fsync": self._fsync,
            "fdatasync": self._fsync,
            "link": self._link,
            "rename": self._replace,
            "replace": self._replace,
            "unlink": self._unlink,
            "remove": self._unlink,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
        }.items():
            setattr(os, name, function)
        io.open = builtins.open = _open_file

    def mark(self, what: str) -> None:
        """Log that something has been promised."""
        self._append(Marked(what))

    @contextlib.contextmanager
    def _logged(self) -> Iterator[list[Call]]:
        """Log in the order in which it happens, whichever of several processes does it."""
        if self._left == 0:
            os._exit(KILLED)
        self._left -= 1
        fcntl.lockf(self._log, fcntl.LOCK_EX)
        try:
            calls: list[Call] = []
            yield calls
            self._append(*calls)
        finally:
            fcntl.lockf(self._log, fcntl.LOCK_UN)

    def _append(self, *calls: Call) -> None:
        self._real.write(self._log, b"".join(map(pickle.dumps, calls)))

    def _has(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._root)

    def _has_open(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(self._root[:-1])

    @staticmethod
    def _split(path: Any) -> tuple[int, str]:
        directory, name = os.path.split(path)
        return os.stat(directory).st_ino, name

    def _named(self, path: Any, inode: int | None) -> Named:
        directory, name = self._split(path)
        return Named(directory, ((name, inode),), (directory,))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR) or not self._has(path):
            return int(self._real.open(path, flags, mode, dir_fd=dir_fd))
        with self._logged() as calls:
            was_there = os.path.lexists(path)
            fd = int(self._real.open(path, flags, mode, dir_fd=dir_fd))
            inode = os.fstat(fd).st_ino
            if not was_there:
                calls += [Made(inode, is_directory=False), self._named(path, inode)]
            elif flags & os.O_TRUNC:
                calls.append(Cut(inode, 0))
        return fd

    def _write(self, fd: int, buffers: Sequence[Any], name: str, *arguments: Any) -> int:
        real = getattr(self._real, name)
        if not self._has_open(fd):
            return int(real(fd, *arguments))
        with self._logged() as calls:
            if name == "pwrite":
                offset = arguments[1]
            elif fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
                offset = os.fstat(fd).st_size
            else:
                offset = os.lseek(fd, 0, os.SEEK_CUR)
            size = int(real(fd, *arguments))
            calls.append(Written(os.fstat(fd).st_ino, offset, b"".join(map(bytes, buffers))[:size]))
        return size

    def _ftruncate(self, fd: int, size: int) -> None:
        if not self._has_open(fd):
            self._real.ftruncate(fd, size)
            return
        with self._logged() as calls:
            self._real.ftruncate(fd, size)
            calls.append(Cut(os.fstat(fd).st_ino, size))

    def _fsync(self, fd: int) -> None:
        with self._logged() as calls:  # without the real one, which takes long
            calls.append(Synced(os.fstat(fd).st_ino))

    def _link(self, source: Any, target: Any, *, follow_symlinks: bool = True) -> None:
        with self._logged() as calls:
            self._real.link(source, target, follow_symlinks=follow_symlinks)
            calls.append(self._named(target, os.stat(target).st_ino))

    def _replace(self, source: Any, target: Any) -> None:
        if not self._has(source):
            self._real.replace(source, target)
            return
        with self._logged() as calls:
            inode = os.lstat(source).st_ino
            self._real.replace(source, target)
            (old, old_name), (new, new_name) = self._split(source), self._split(target)
            if old == new:
                calls.append(Named(new, ((new_name, inode), (old_name, None)), (new,)))
            else:
                calls.append(Named(new, ((new_name, inode),), (new, old)))
                calls.append(Named(old, ((old_name, None),), (old,), follows=True))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self._has(path):
            self._real.unlink(path, dir_fd=dir_fd)
            return
        with self._logged() as calls:
            self._real.unlink(path)
            calls.append(self._named(path, None))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self._has(path):
            self._real.mkdir(path, mode, dir_fd=dir_fd)
            return
        with self._logged() as calls:
            self._real.mkdir(path, mode)
            inode = os.stat(path).st_ino
            calls += [Made(inode, is_directory=True), self._named(path, inode)]

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or not self._has(path):
            self._real.rmdir(path, dir_fd=dir_fd)
            return
        with self._logged() as calls:
            self._real.rmdir(path)
            calls.append(self._named(path, None))


class _File(io.FileIO):
    """A file object that writes as `os` does."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size


_open_for_reading = io.open


def _open_file(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
    if not set(mode) & set("wax+"):
        return _open_for_reading(file, mode, buffering, *arguments, **options)
    raw = _File(file, mode.replace("b", ""), opener=lambda path, flags: os.open(path, flags, 0o666))
    if buffering == 0:
        return raw
    buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **options)


def run_recorded(root: Path, log: Path, act: Callable[[Mark], object], *, last: int = -1) -> int:
    """Run `act` in a process of its own and log what it does below `root`; return its exit status.

    Args:
        root: a directory.
        log: a file outside of it, which is appended to.
        act: what to do; given a function by which it says that something has been promised.
        last: the number of calls before the one that it is killed at; negative: none.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            recorder = Recorder(root, log, last)
            recorder.install()
            act(recorder.mark)
            status = 0
        except BaseException:  # noqa: BLE001 - reported by the exit status
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- what is left


class State(NamedTuple):
    """A state that a power loss may leave."""

    at: int  # calls that were made
    how: str  # it was chosen
    tree: Tree
    marks: frozenset[str]  # what had been promised


@dataclass
class _Thing:
    """A file or a directory, as it was at first."""

    is_directory: bool
    names: dict[str, int] = field(default_factory=dict)
    data: bytes = b""


@dataclass
class _Change:
    call: Named | Written | Cut  # inodes are the numbers of things
    at: int  # number of the call
    sure_at: float = float("inf")  # of the sync that makes it sure


_LOST, _ZEROS, _HALF, _KEPT = range(4)  # what becomes of a change that was not synced


class Disk:
    """A directory: as it was at first, which is on stable storage, and all that was done to it since."""

    def __init__(self, root: Path, *, volatile: Collection[str] = ()) -> None:
        """Look at it.

        Args:
            root: the directory.
            volatile: what in it is no disk, such as /run.
        """
        self._root = root
        self._volatile = set(volatile)
        self._things: list[_Thing] = []
        self._numbers: dict[int, int] = {}  # by inode
        self._add(root)
        self._changes: list[_Change] = []
        self._marks: list[tuple[int, str]] = []
        self._calls = 0

    def _add(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode in self._numbers:
            return self._numbers[inode]
        thing = _Thing(path.is_dir())
        number = self._new(inode, thing)
        if thing.is_directory:
            thing.names = {entry.name: self._add(entry) for entry in sorted(path.iterdir())}
        else:
            thing.data = path.read_bytes()
        return number

    def _new(self, inode: int, thing: _Thing) -> int:
        self._things.append(thing)
        self._numbers[inode] = len(self._things) - 1  # inodes are used again
        return self._numbers[inode]

    def replay(self, log: Path, *, syncs: bool = True) -> None:
        """Learn what was done, and check that it was all: it leads to what is there now.

        Args:
            log: of `run_recorded`.
            syncs: else all is as if nothing had been synced.
        """
        unsynced: dict[int, list[_Change]] = {}
        number_of = self._numbers.__getitem__
        for call in _read_log(log):
            self._calls += 1
            change = None
            match call:
                case Made():
                    self._new(call.inode, _Thing(call.is_directory))
                case Marked():
                    self._marks.append((self._calls, call.what))
                case Synced():
                    for synced in unsynced.pop(self._numbers.get(call.inode, -1), ()) if syncs else ():
                        synced.sure_at = min(synced.sure_at, self._calls)
                case Named():
                    changes = tuple((name, inode and number_of(inode)) for name, inode in call.changes)
                    synced_by = tuple(map(number_of, call.synced_by))
                    change = _Change(Named(number_of(call.directory), changes, synced_by, call.follows), self._calls)
                    for thing in synced_by:
                        unsynced.setdefault(thing, []).append(change)
                case Written() | Cut():
                    number = number_of(call.inode)
                    change = _Change(call._replace(inode=number), self._calls)
                    unsynced.setdefault(number, []).append(change)
            if change is not None:
                self._changes.append(change)
        now = Disk(self._root, volatile=self._volatile)
        assert self.tree() == now.tree()

    def tree(self) -> Tree:
        """Return what is there now."""
        return self._state(self._calls, lambda _: _KEPT)

    def last_state(self) -> State:
        """Return what is left when power is lost after all, and nothing that was not synced is there."""
        return State(self._calls, "nothing", self._state(self._calls, lambda _: _LOST), self._promised(self._calls))

    def _promised(self, at: int) -> frozenset[str]:
        return frozenset(what for when, what in self._marks if when <= at)

    def states(self, *, mixed: int = 1, seed: int = 1) -> Iterator[State]:
        """Yield the states that a power loss after any of the calls may leave, each once.

        All that was not synced is gone; only unsynced content is gone; only sizes of files are there, and zeros;
        and by chance some of all this.

        Args:
            mixed: how many of the last kind for each call.
            seed: of chance.
        """
        chance = random.Random(seed)
        seen = set()
        for at in range(self._calls + 1):
            marks = self._promised(at)
            kinds: dict[str, Callable[[_Change], int]] = {
                "nothing": lambda _: _LOST,
                "names": lambda change: _KEPT if isinstance(change.call, Named) else _LOST,
                "sizes": lambda change: _ZEROS if isinstance(change.call, Written) else _KEPT,
            }
            for number in range(mixed):
                likely = chance.choice((0.2, 0.5, 0.8))

                def some(_change: _Change, likely: float = likely) -> int:
                    return _KEPT if chance.random() < likely else chance.choice((_LOST, _LOST, _ZEROS, _HALF))

                kinds[f"some {number}"] = some
            for how, keep in kinds.items():
                tree = self._state(at, keep)
                key = hash((marks, tuple(tree.items())))
                if key not in seen:
                    seen.add(key)
                    yield State(at, how, tree, marks)

    def _state(self, at: int, keep: Callable[[_Change], int]) -> Tree:
        names = {number: dict(thing.names) for number, thing in enumerate(self._things) if thing.is_directory}
        data: dict[int, bytearray] = {}
        was_kept = True
        for change in self._changes:
            if change.at > at:
                break
            call, kept = change.call, _KEPT if change.sure_at <= at else keep(change)
            if isinstance(call, Named):
                was_kept = kept == _KEPT and (was_kept or not call.follows)
                for name, number in call.changes if was_kept else ():
                    if number is not None:
                        names[call.directory][name] = number
                    else:
                        names[call.directory].pop(name, None)
                continue
            content = data.setdefault(call.inode, bytearray(self._things[call.inode].data))
            if isinstance(call, Cut):
                if kept in {_KEPT, _ZEROS}:
                    del content[call.size :]
                    content.extend(bytes(call.size - len(content)))
            elif kept != _LOST:
                new = bytes(len(call.data)) if kept == _ZEROS else call.data
                new = new[: len(new) // 2] if kept == _HALF else new
                content.extend(bytes(max(0, call.offset - len(content))))
                content[call.offset : call.offset + len(new)] = new
        tree: Tree = {}
        self._walk("", 0, names, data, tree)
        return tree

    def _walk(
        self, prefix: str, number: int, names: dict[int, dict[str, int]], data: dict[int, bytearray], tree: Tree
    ) -> None:
        for name, child in sorted(names[number].items()):
            if prefix or name not in self._volatile:
                path = prefix + name
                if self._things[child].is_directory:
                    tree[path] = None
                    self._walk(path + "/", child, names, data, tree)
                else:
                    tree[path] = bytes(data[child]) if child in data else self._things[child].data


def _read_log(log: Path) -> Iterator[Call]:
    with log.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def write_tree(tree: Tree, to: Path) -> None:
    """Write a state to a new directory."""
    to.mkdir()
    for name, data in tree.items():
        if data is None:
            (to / name).mkdir(mode=0o700)
        else:
            (to / name).write_bytes(data)
            (to / name).chmod(0o600)
