"""Reads the state of all tasks of a container, while none of them runs.

A container may have hundreds of threads and is stopped meanwhile. So each file is read once, texts that are equal are
parsed once, and a file that few programs change is read of each process and not of each thread.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ocihook.audit.mapped import TASK_POLICY, Allowance, read_mapped, read_task_policy
from ocihook.audit.opened import OpenFiles
from ocihook.audit.places import CGROUP, has_inner, read_cgroups, read_files, read_mounts
from ocihook.audit.state import ContainerState, ProcessState, Values
from ocihook.errors import printable
from ocihook.linux.task_state import (
    KCMP_FILES,
    KCMP_FS,
    describe_scheduling,
    io_priority,
    listed,
    online_cpus,
    parse_limits,
    raw_scheduling,
    read_file,
    shares,
    usual_slice_ns,
)

# Lines of /proc/PID/status; those between are of no use here, and differ in each thread.
_PARTS = ((b"\nUmask:", b"\nState:"), (b"\nUid:", b"\nFDSize:"), (b"\nGroups:", b"\nNStgid:"))
_LATER_PARTS = ((b"\nTHP_enabled:", b"\nThreads:"), (b"\nSigPnd:", b"\nMems_allowed:"))
_IDS, _MAPPED = ("Uid", "Gid", "Groups"), ("uid_map", "gid_map", "gid_map")
_NO_VALUES = frozenset({"Cpus_allowed", "Cpus_allowed_list", "SigPnd", "ShdPnd"})  # kept in another form
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
THREADS_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "uts")  # others are of whole processes
_SHARED = {"files": KCMP_FILES, "fs": KCMP_FS}
_CGROUP = re.compile(rb"^0::(/.*)$", re.MULTILINE)
_AUTOGROUP = re.compile(rb"nice (-?[0-9]+)")
_TIMER_OWNER = re.compile(r"\.\d+$", re.MULTILINE)
_CAP_SYS_ADMIN = 1 << 21  # linux/capability.h
_SELINUX = "/sys/fs/selinux/enforce"
_SELINUX_FILES = ("exec", "fscreate", "keycreate", "sockcreate")
_OF_PROCESS, _OF_SESSION = ("oom_score_adj", "coredump_filter"), ("loginuid",)
_PIDS = b"\nNSpid:\t"
_ENDED, _ALONE = b"\nState:\tZ", b"\nThreads:\t1\n"
_MOST_TEXT = 4000  # characters of a value
# Processor time in which the memory of stopped processes is looked at, and how much one may have.
_FOR_MEMORY_S, _MOST_MEMORY_BYTES = 0.002, 64 << 20

ALL_CPUS = "all"


class Reader:
    """Reads one container."""

    def __init__(
        self,
        init_pid: int,
        cpus: str,
        proc: str = "/proc",
        *,
        cgroup: Path | None = None,
        allowance: Allowance | None = None,
        with_options: bool = True,
    ) -> None:
        """Prepare to read.

        Args:
            init_pid: its first process.
            cpus: on which its cgroup lets it run, as the kernel lists them; "": all that the machine has.
            proc: where /proc is.
            cgroup: the container's own, of v2; None: it has none.
            allowance: for the memory of its processes; None: what is right while they are stopped.
            with_options: whether options of sockets are read.
        """
        self.init_pid, self._proc = init_pid, proc
        self._cpus = cpus or online_cpus()
        self._slice_ns = usual_slice_ns()
        self._known: dict[object, Values] = {}  # states that were met, by what was read
        self._first: dict[str, str] = {}  # thread that was met first in a namespace, by its name
        self._leader_may_leave = True  # the namespaces of the first process, of the process that is being read
        self._cgroup = cgroup
        self._has_inner = cgroup is not None and has_inner(cgroup)
        self._allowance = allowance or Allowance(_FOR_MEMORY_S, _MOST_MEMORY_BYTES)
        self._unread: list[str] = []  # processes whose memory was too much
        self._files = OpenFiles(self._owner, proc, with_options=with_options)
        self._selinux = Path(_SELINUX).exists()
        self._maps = {name: _id_map(read_file(f"{proc}/{init_pid}/{name}")) for name in ("uid_map", "gid_map")}
        status = read_file(f"{proc}/{init_pid}/status")
        self._depth = max(0, len(self._pids_of(status)) - 1)
        self._has_admin = bool(int(_last(status, b"CapBnd:") or b"-1", 16) & _CAP_SYS_ADMIN)
        self._user = _link(f"{proc}/{init_pid}/ns/user")

    def read(self, pids: Iterable[int]) -> ContainerState:
        """Return the state of processes, and the names of those that do not descend from the first one.

        One that has ended has no state, nor has one whose parent is not among them.
        """
        statuses = {pid: self._status(pid) for pid in pids}
        own = self._descendants(statuses)
        found = {}
        for key, pid in sorted((self._key(statuses[pid]), pid) for pid in own):
            if key and _ENDED not in statuses[pid]:
                found[key] = self._process(pid, key, statuses[pid])
        others = sorted(statuses.keys() - own)
        mounts = dict(read_mounts(self.init_pid, self._proc))
        return ContainerState(
            processes=found,
            left_out=tuple(f"{_name(statuses[pid])} (pid {pid})" for pid in others if statuses[pid]),
            cpus=self._cpus,
            places={
                **mounts,
                **dict(read_files(self.init_pid, mounts, self._proc)),
                **dict(read_cgroups(self._cgroup)),
            },
            unread_files=self._files.unread,
            unread_memory=tuple(self._unread),
        )

    def _descendants(self, statuses: Mapping[int, bytes]) -> set[int]:
        """Return the first process and those that descend from it."""
        own, others = {self.init_pid}, statuses.keys() - {self.init_pid}
        parents = {pid: int(_last(statuses[pid], b"PPid:") or 0) for pid in others}
        while found := {pid for pid in others - own if parents[pid] in own}:
            own |= found
        return own & statuses.keys()

    def wiped(self, pids: Iterable[int], allowance: Allowance) -> dict[str, str]:
        """Return what memory is empty in children, by what processes are called in the container."""
        found = {}
        for pid in pids:
            status = self._status(pid)
            mapped = read_mapped(f"{self._proc}/{pid}", status, allowance) or {}
            if spans := mapped.get("wf"):
                found[self._key(status)] = spans
        return found

    def tasks(self, pids: Iterable[int]) -> dict[str, tuple[int, dict[str, int]]]:
        """Return the pid of each process, and the ids of its threads, by what they are called in the container."""
        found = {}
        for pid in pids:
            threads = {self._key(self._status(tid)): int(tid) for tid in listed(f"{self._proc}/{pid}/task")}
            found[self._key(self._status(pid))] = (pid, threads)
        return found

    def inner_cgroup(self, place: str) -> Path | None:
        """Return the directory of a cgroup, by what `read_cgroups` calls it; None if that is no cgroup below."""
        kind, _, path = place.partition(" ")
        is_below = kind == CGROUP and ".." not in Path(path).parts and not path.startswith("/")
        return self._cgroup / path if self._cgroup is not None and is_below else None

    def _process(self, pid: int, key: str, status: bytes) -> ProcessState:
        threads = {key: self._thread(pid, pid, key, status)}
        tids = () if _ALONE in status else (int(tid) for tid in listed(f"{self._proc}/{pid}/task"))
        others = ((self._status(tid), tid) for tid in tids if tid != pid)
        for own_key, tid, of_thread in sorted((self._key(text), tid, text) for text, tid in others if text):
            if _ENDED not in of_thread:
                threads[own_key] = self._thread(pid, tid, own_key, of_thread)
        own = {**self._own(pid, status), **self._mapped(pid, key, status)}
        own[TASK_POLICY] = read_task_policy(f"{self._proc}/{pid}")
        if self._has_inner:
            own["cgroup"] = self._cgroup_of(pid)
        return ProcessState(name=_name(status), own=own, threads=threads, files=self._files.of(pid, key))

    def _mapped(self, pid: int, key: str, status: bytes) -> Values:
        found = read_mapped(f"{self._proc}/{pid}", status, self._allowance)
        if found is None:
            self._unread.append(f"{_name(status)} {key}")
        return found or {}

    def _status(self, tid: int | str) -> bytes:
        return read_file(f"{self._proc}/{tid}/status")

    @staticmethod
    def _pids_of(status: bytes) -> list[bytes]:
        start = status.find(_PIDS) + len(_PIDS)
        return status[start : status.find(b"\n", start)].split(b"\t") if start >= len(_PIDS) else []

    def _key(self, status: bytes) -> str:
        return b"/".join(self._pids_of(status)[self._depth :]).decode()

    def _thread(self, pid: int, tid: int, key: str, status: bytes) -> Values:
        parts = _cut(status)
        scheduling, priority = raw_scheduling(tid), io_priority(tid)
        slack = read_file(f"{self._proc}/{tid}/timerslack_ns")
        personality = read_file(f"{self._proc}/{tid}/personality")
        places = self._namespaces(pid, tid, key)
        shared = () if tid == pid else tuple(shares(pid, tid, kind) for kind in _SHARED.values())
        seen = (parts, scheduling, priority, slack, personality, places, shared)
        if seen not in self._known:
            values = self._of_status(parts)
            if scheduling:
                values["scheduling"] = describe_scheduling(scheduling, self._slice_ns).words()
            values |= {"I/O priority": str(priority)} if priority >= 0 else {}
            values |= {"timer slack": slack.decode().strip()} if slack else {}
            values |= {"personality": personality.decode().strip()} if personality else {}
            values |= {f"{kind} namespace": first for kind, first in places}
            values |= {name: "own" for name, is_shared in zip(_SHARED, shared, strict=False) if not is_shared}
            self._known[seen] = values
        return self._known[seen]

    def _namespaces(self, pid: int, tid: int, key: str) -> tuple[tuple[str, str], ...]:
        names = ((kind, _link(f"{self._proc}/{tid}/ns/{kind}")) for kind in self._kinds(pid, tid))
        return tuple((kind, self._first.setdefault(name, key)) for kind, name in names if name)

    def _kinds(self, pid: int, tid: int) -> Iterable[str]:
        """Return the kinds of namespaces that a thread may have of its own.

        In a container without CAP_SYS_ADMIN no task can have left the namespaces of the first one, unless it has made a
        user namespace.
        """
        if tid == pid:
            may_leave = self._has_admin or pid == self.init_pid or _link(f"{self._proc}/{pid}/ns/user") != self._user
            self._leader_may_leave = may_leave
            return _NAMESPACES if may_leave else ("user",)
        return THREADS_NAMESPACES if self._leader_may_leave and (self._has_admin or pid != self.init_pid) else ()

    def _of_status(self, parts: tuple[bytes, ...]) -> dict[str, str]:
        values: dict[str, str] = {}
        for line in b"".join(parts).decode(errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name and name not in _NO_VALUES:
                values[name] = value.strip()[:_MOST_TEXT]
            if name == "Cpus_allowed_list":
                values["CPU affinity"] = ALL_CPUS if value.strip() == self._cpus else value.strip()
        lines = dict(line.split(b":\t", 1) for line in parts[-1].split(b"\n") if b":\t" in line)
        pending = [int(lines.get(name, b"0"), 16) for name in (b"SigPnd", b"ShdPnd", b"SigBlk")]
        values["pending"] = f"{(pending[0] | pending[1]) & pending[2]:x}"
        for name, id_map in zip(_IDS, _MAPPED, strict=True):
            if name in values:
                values[name] = " ".join(_mapped(word, self._maps[id_map]) for word in values[name].split())
        return values

    def _own(self, pid: int, status: bytes) -> Values:
        read = partial(self._read, pid)
        limits, timers = read("limits"), read("timers")
        leads = _last(status, b"NSsid:") == _last(status, b"NSpid:")
        others = tuple((name, read(name)) for name in (*_OF_PROCESS, *(_OF_SESSION if leads else ())))
        nice = _AUTOGROUP.search(read("autogroup")) if leads else None
        labels = tuple((name, read(f"attr/{name}")) for name in _SELINUX_FILES) if self._selinux else ()
        seen = (limits, _TIMER_OWNER.sub("", timers.decode()), others, nice and nice[1], labels)
        if seen not in self._known:
            values = {name: text.decode().strip() for name, text in others if text}
            values |= {"autogroup nice": nice[1].decode()} if nice else {}
            values |= parse_limits(limits.decode()) | {"POSIX timers": _in_short(seen[1])}
            values |= {f"SELinux {name}": text.decode(errors="replace").rstrip("\0\n") for name, text in labels}
            self._known[seen] = values
        return self._known[seen]

    def _owner(self, ids: tuple[int, int]) -> str:
        """Return user and group as the first process sees them."""
        maps = (self._maps["uid_map"], self._maps["gid_map"])
        return " ".join(_mapped(str(number), id_map) for number, id_map in zip(ids, maps, strict=True))

    def _cgroup_of(self, pid: int) -> str:
        """Return the cgroup (v2) of a process, from that of the first one."""
        paths = [_CGROUP.search(self._read(one, "cgroup")) for one in (pid, self.init_pid)]
        found = [os.fsdecode(match[1]) for match in paths if match]
        return os.path.relpath(*found) if len(found) == len(paths) else "."

    def _read(self, pid: int, name: str) -> bytes:
        return read_file(f"{self._proc}/{pid}/{name}")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _name(status: bytes) -> str:
    return printable(status.partition(b"\n")[0].removeprefix(b"Name:\t").decode(errors="replace"))


def _cut(status: bytes) -> tuple[bytes, ...]:
    """Return the parts of a status that count, which most threads have alike."""
    found = []
    for begin, end in (*_PARTS, *_LATER_PARTS):
        start = status.find(begin)
        found.append(status[start : status.find(end, start)] if start >= 0 else b"")
    return tuple(found)


def _last(status: bytes, name: bytes) -> bytes:
    """Return the last word of a line: an id as the innermost namespace has it."""
    start = status.find(b"\n" + name)
    if start < 0:
        return b""
    return status[start + 1 : status.find(b"\n", start + 1)].rpartition(b"\t")[2]


def _in_short(timers: str) -> str:
    """Return timers one after the other: id, signal and value, how it notifies, clock."""
    lines = (line.partition(":")[2].strip() for line in timers.splitlines())
    return " ".join(lines)[:_MOST_TEXT]


def _id_map(text: bytes) -> list[tuple[int, int, int]]:
    """Return a map of ids (user_namespaces(7)): first id inside, first outside, how many."""
    rows = (list(map(int, line.split())) for line in text.splitlines())
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def _mapped(word: str, id_map: Sequence[tuple[int, int, int]]) -> str:
    """Return an id as the container's first process sees it."""
    number = int(word)
    for inside, outside, size in id_map:
        if outside <= number < outside + size:
            return str(number - outside + inside)
    return word
