"""The state of tasks is read as the kernel shows it, compared, put back, and reported."""

import ctypes
import fcntl
import logging
import os
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest

from ocihook.audit.comparing import compare, in_words
from ocihook.audit.foreseeing import foresee
from ocihook.audit.inheriting import InheritedCall, NumaPolicy, inherited_calls, make_inherit, numa_policy
from ocihook.audit.mapped import Allowance, read_mapped, read_task_policy
from ocihook.audit.participant import Audit, WipedFacts, audit
from ocihook.audit.places import tmpfs_places
from ocihook.audit.reading import ALL_CPUS, Reader
from ocihook.audit.rows import FILE, MOUNTED, PLACED, PROCESS, THREAD, Target
from ocihook.audit.state import (
    STATE_NAME,
    ContainerState,
    ProcessState,
    Values,
    decode_state,
    encode_state,
    read_state,
    write_state,
)
from ocihook.config import Settings
from ocihook.criu.proto import message_class
from ocihook.errors import IntegrityError, TraceError
from ocihook.linux.attributes import read_attributes
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.linux.ptrace import find_call_instruction
from ocihook.linux.socket_options import peer_ids, read_options, set_option
from ocihook.linux.task_state import parse_cpus, parse_limits, read_file
from ocihook.model import ContainerRef
from ocihook.packs.frame import encode_frame
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump, Restore
from tests.fakes.images import make_address_space

INIT, CHILD, THREAD_OF_CHILD, GONE = 4_200_001, 4_200_002, 4_200_003, 4_200_004  # above any pid_max
STATUS = """Name:\t{name}
Umask:\t0022
State:\t{state}
Pid:\t{pid}
PPid:\t{parent}
Uid:\t100000\t100000\t100000\t100000
Gid:\t100000\t100000\t100000\t100000
FDSize:\t64
Groups:\t{groups}
NStgid:\t{pid}\t{inside}
NSpid:\t{pid}\t{inside}
NSsid:\t{pid}\t1
THP_enabled:\t1
Threads:\t{threads}
SigPnd:\t0000000000000000
SigBlk:\t0000000000000000
Seccomp:\t2
Cpus_allowed:\tf
Cpus_allowed_list:\t{cpus}
Mems_allowed:\t1
"""


class FakeProc:
    """A tree as /proc is, of the files that are read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, pid: int, inside: int, *, of: int = 0, net: str = "net:[1]", **words: str) -> None:
        usual = {"name": "job", "threads": "1", "parent": str(INIT), "groups": "", "cpus": "0-3"}
        words = usual | {"state": "S (sleeping)"} | words
        directory = self.root / str(pid)
        (directory / "ns").mkdir(parents=True)
        (self.root / str(of or pid) / "task" / str(pid)).mkdir(parents=True)
        (directory / "status").write_text(STATUS.format(pid=pid, inside=inside, **words))
        (directory / "ns/net").symlink_to(net)
        (directory / "timerslack_ns").write_text("50000\n")

    def write(self, pid: int, **files: str) -> None:
        for name, text in files.items():
            (self.root / str(pid) / name).write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    made = FakeProc(tmp_path / "proc")
    made.add(INIT, 1, groups="100007 55 ")
    made.write(INIT, uid_map="0 100000 65536\n", gid_map="0 100000 65536\n", oom_score_adj="-5\n")
    made.write(INIT, limits="Limit  Soft Limit  Hard Limit  Units\nMax open files            10   unlimited   files\n")
    made.write(INIT, timers="ID: 0\nsignal: 60/0000\nnotify: signal/pid.4200001\nClockID: 0\n")
    made.write(INIT, autogroup="/autogroup-7 nice 3\n")
    return made


def read(proc: FakeProc, *pids: int, cpus: str = "0-3") -> ContainerState:
    return Reader(INIT, cpus, str(proc.root)).read(pids)


def test_a_process_is_read_by_what_it_is_called_inside(proc: FakeProc) -> None:
    state = read(proc, INIT)
    process = state.processes["1"]
    values = process.threads["1"]
    assert process.name == "job"
    assert (values["Uid"], values["Groups"], values["CPU affinity"]) == ("0 0 0 0", "7 55", ALL_CPUS)
    assert values["net namespace"] == "1"
    assert values["timer slack"] == "50000"
    assert process.own["oom_score_adj"] == "-5"
    assert process.own["Max open files"] == "10 unlimited"
    assert process.own["POSIX timers"] == "0 60/0000 signal/pid 0"
    assert process.own["autogroup nice"] == "3"


def test_each_thread_is_read(proc: FakeProc) -> None:
    proc.add(CHILD, 5, threads="2")
    proc.add(THREAD_OF_CHILD, 6, of=CHILD, threads="2", cpus="2", net="net:[2]")
    state = read(proc, INIT, CHILD)
    assert state.processes.keys() == {"1", "5"}
    threads = state.processes["5"].threads
    assert {tid: values["CPU affinity"] for tid, values in threads.items()} == {"5": ALL_CPUS, "6": "2"}
    assert {tid: values["net namespace"] for tid, values in threads.items()} == {"5": "1", "6": "6"}


def test_what_has_ended_is_left_out(proc: FakeProc) -> None:
    proc.add(CHILD, 5, state="Z (zombie)")
    assert read(proc, INIT, CHILD, GONE).processes.keys() == {"1"}


def test_equal_states_are_one_object(proc: FakeProc) -> None:
    proc.add(CHILD, 5)
    proc.add(THREAD_OF_CHILD, 6)
    state = read(proc, CHILD, THREAD_OF_CHILD)
    assert state.processes["5"].threads["5"] is state.processes["6"].threads["6"]


def test_a_pinned_thread_is_not_taken_for_one_on_all_processors(proc: FakeProc) -> None:
    assert read(proc, INIT, cpus="0-7").processes["1"].threads["1"]["CPU affinity"] == "0-3"


def test_left_out_processes_are_named(proc: FakeProc) -> None:
    proc.add(CHILD, 9, name="probe\x1b", parent="1")
    proc.add(GONE, 12, name="its child", parent=str(CHILD))
    state = read(proc, INIT, CHILD, GONE)
    assert state.left_out == (f"probe\\x1b (pid {CHILD})", f"its child (pid {GONE})")
    assert state.processes.keys() == {"1"}


def one(values: Values, own: Mapping[str, str] = {}, cpus: str = "0-3", tid: str = "1") -> ContainerState:
    return ContainerState(processes={"1": ProcessState(name="job", own=own, threads={tid: values})}, cpus=cpus)


@pytest.mark.parametrize(
    ("before", "after", "allowed", "differs"),
    [
        ("all", "all", "0-3", False),
        ("all", "0-1", "0-3", True),
        ("0-1", "all", "0-3", True),
        ("0,2", "2", "2-3", False),  # cut with the processors that there are
        ("0,2", "2-3", "2-3", True),
        ("0", "2-3", "2-3", True),  # none of them is there
        ("x", "0", "0-3", True),
    ],
)
def test_affinity(*, before: str, after: str, allowed: str, differs: bool) -> None:
    found = compare(one({"CPU affinity": before}), one({"CPU affinity": after}, cpus=allowed))
    assert bool(found) == differs


@pytest.mark.parametrize("name", sorted(THREAD))
def test_every_row_of_threads_is_compared(name: str) -> None:
    (found,) = compare(one({name: "thread 0-1"}), one({name: "thread 0-2"}))
    assert found.row is THREAD[name]


@pytest.mark.parametrize("name", sorted(FILE))
def test_every_row_of_descriptors_is_compared(name: str) -> None:
    before = ContainerState(processes={"1": ProcessState(name="job", files={"7": {name: "1"}})})
    after = ContainerState(processes={"1": ProcessState(name="job", files={"7": {name: "2"}})})
    (found,) = compare(before, after)
    assert (found.row, found.task) == (FILE[name], "job 1 descriptor 7")
    (closed,) = compare(before, ContainerState(processes={"1": ProcessState(name="job")}))
    assert in_words([closed]) == ["descriptors of job 1 descriptor 7"]


@pytest.mark.parametrize("name", sorted(PROCESS))
def test_every_row_of_processes_is_compared(name: str) -> None:
    (found,) = compare(one({}, {name: "1"}), one({}, {name: "2"}))
    assert (found.row, found.thread) == (PROCESS[name], "")


def test_descriptors_are_read_by_kind() -> None:
    me, once = os.getpid(), os.eventfd(1, os.EFD_SEMAPHORE)
    with socket.socket() as listener, open("/dev/null", "rb") as file:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
        first, copy, null = listener.fileno(), os.dup(listener.fileno()), file.fileno()
        files = next(iter(Reader(me, "").read([me]).processes.values())).files
        os.close(copy)
    os.close(once)
    assert (files[str(once)]["kind"], files[str(once)]["count"]) == ("[eventfd]", "1")
    assert files[str(once)]["[eventfd]"] == "eventfd-semaphore:1"
    assert int(files[str(first)]["TCP_DEFER_ACCEPT"]) > 0
    assert (files[str(copy)]["kind"], files[str(copy)]["same"].split(":")[1]) == ("socket", str(first))
    assert (files[str(null)]["kind"], files[str(null)]["locks"]) == ("file", "")


def test_options_are_put_back() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        before = read_options(sock.fileno())
        set_option(sock.fileno(), "IP_RECVTTL", 1)
        after = read_options(sock.fileno())
        assert {name for name in before if before[name] != after[name]} == {"IP_RECVTTL"}
        row = FILE["IP_RECVTTL"]
        assert row.put_back is not None
        row.put_back(Target(os.getpid(), os.getpid(), sock.fileno()), "0", "1")
        assert read_options(sock.fileno()) == before


def files_of_this_process() -> Mapping[str, Values]:
    return next(iter(Reader(os.getpid(), "").read([os.getpid()]).processes.values())).files


def put_back(name: str, fd: int, before: str, after: str) -> None:
    row = FILE[name]
    assert row.put_back is not None
    row.put_back(Target(os.getpid(), os.getpid(), fd), before, after)


def test_what_fcntl_shows_is_put_back(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(tmp_path / "locked", "w") as file, open(os.memfd_create("m", os.MFD_ALLOW_SEALING), "w") as memory:
        fcntl.flock(file, fcntl.LOCK_SH)
        before = files_of_this_process()
        numbers = {"file": str(file.fileno()), "pipe": str(reader), "memory": str(memory.fileno())}
        assert before[numbers["file"]]["locks"] == "FLOCK ADVISORY READ 0 EOF"
        fcntl.flock(file, fcntl.LOCK_UN)
        changed = {
            ("flags", "file"): f"{int(before[numbers['file']]['flags'], 8) | os.O_APPEND:o}",
            ("locks", "file"): "FLOCK ADVISORY WRITE 0 EOF, OFDLCK ADVISORY WRITE 3 7",
            ("signal", "pipe"): "12",
            ("pipe size", "pipe"): str(1 << 17),
            ("seals", "memory"): "4",
        }
        for (name, where), value in changed.items():
            put_back(name, int(numbers[where]), value, before[numbers[where]].get(name, ""))
        after = files_of_this_process()
        assert {key: after[numbers[key[1]]][key[0]] for key in changed} == changed
    os.close(reader)
    os.close(writer)


def test_flags_of_a_terminal_are_its_own() -> None:
    """The kernel keeps O_CLOEXEC with the open file, where this opened the other end (ioctl_tty(2), TIOCGPTPEER)."""
    master, named = os.openpty()
    peer = fcntl.ioctl(master, 0x5441, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    copy = os.dup(peer)
    os.set_inheritable(copy, True)
    found = files_of_this_process()
    assert found[str(peer)]["flags"] == "2"
    for fd in (master, named, peer, copy):
        os.close(fd)


def test_counters_and_expired_timers_are_put_back() -> None:
    counter, timer = os.eventfd(7), ctypes.CDLL(None).timerfd_create(1, os.O_NONBLOCK)
    number = str(timer)
    assert files_of_this_process()[number]["ticks"] == "0"
    ctypes.CDLL(None).timerfd_settime(timer, 1, struct.pack("4q", 0, 0, 1, 0), None)  # TFD_TIMER_ABSTIME, long ago
    assert Patience(timeout_s=60).until(lambda: files_of_this_process()[number]["ticks"] == "1")
    put_back("ticks", timer, "0", "1")
    with pytest.raises(ValueError, match="anew"):
        put_back("ticks", timer, "1", "0")
    put_back("count", counter, str(5 << 33), "7")
    with pytest.raises(ValueError, match="smaller"):
        put_back("count", counter, "0", "7")
    after = files_of_this_process()
    assert (after[str(counter)]["count"], after[number]["ticks"]) == (str(5 << 33), "0")
    os.close(counter)
    os.close(timer)


def test_only_so_many_descriptors_are_looked_at() -> None:
    pipes = [os.pipe() for _ in range(505)]
    state = Reader(os.getpid(), "").read([os.getpid()])
    assert state.unread_files > 0
    last = next(iter(state.processes.values())).files[str(pipes[-1][1])]
    assert last == {"kind": "pipe"}
    for fd in chain.from_iterable(pipes):
        os.close(fd)


SMAPS = b"""1000-3000 rw-p 00000000 00:00 0
Size:                  8 kB
ProtectionKey:         0
VmFlags: rd wr mr mw me ac wf
3000-4000 rw-p 00000000 00:00 0                                          [anon:a name]
Size:                  4 kB
ProtectionKey:         2
VmFlags: rd wr wf dc sd
6000-7000 rw-s 00000000 00:01 7                                          /dev/shm/a file
Size:                  4 kB
ProtectionKey:         0
VmFlags: rd wr sh dd
8000-9000 rw-p 00000000 00:00 0
Size:                  4 kB
ProtectionKey:         0
VmFlags: rd wr dp wf nr
9000-a000 r--p 00000000 00:00 0                                          [vvar]
Size:                  4 kB
ProtectionKey:         0
VmFlags: rd dd de
"""


def test_what_is_set_for_memory(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_bytes(SMAPS)
    (tmp_path / "numa_maps").write_text("1000 default anon=1\n3000 bind:0 anon=1\n6000 interleave:0-1\n")
    status = b"Name:\tjob\nVmRSS:\t   100 kB\n"
    found = read_mapped(str(tmp_path), status, Allowance(60, 1 << 20))
    assert found is not None
    assert {name: value for name, value in found.items() if value} == {
        "wf": "1000-4000", "dc": "3000-4000", "dd": "6000-7000", "dp": "8000-9000",
        "protection key": "2: 3000-4000", "memory name": "a name: 3000-4000",
        "memory policy": "bind:0: 3000-4000 interleave:0-1: 6000-7000",
    }  # fmt: skip
    assert found.keys() <= PROCESS.keys()
    assert read_mapped(str(tmp_path), status, Allowance(60, 1 << 10)) is None, "it has too much memory"
    assert read_mapped(str(tmp_path), status, Allowance(0, 1 << 20)) is None, "there is no time"
    crowded = status + b"Threads:\t5000000\n"
    assert read_mapped(str(tmp_path), crowded, Allowance(59, 1 << 20)) is None, "there is no time for its stacks"
    assert read_mapped(str(tmp_path / "gone"), status, Allowance(60, 1 << 20)) is None


MOUNTINFO = """20 1 0:30 / / rw,relatime master:7 - overlay overlay rw,lowerdir=/a
21 20 0:31 / /tmp rw,nosuid shared:9 - tmpfs tmpfs rw,size=64k,inode64
22 21 0:32 / /tmp ro - tmpfs tmpfs rw
23 20 0:33 / /proc/keys rw - tmpfs tmpfs rw
"""


def test_mounts_are_read_and_compared(proc: FakeProc) -> None:
    proc.write(INIT, mountinfo=MOUNTINFO)
    before = read(proc, INIT)
    assert before.places == {
        "mount /": {"file system": "overlay", "options": "relatime,rw", "propagation": "private"},
        "mount /tmp": {
            "file system": "tmpfs", "options": "nosuid,rw", "propagation": "shared",
            "file system options": "rw,size=64k",
        },
        "mount /tmp #2": {
            "file system": "tmpfs", "options": "ro", "propagation": "private", "file system options": "rw",
        },
    }  # fmt: skip
    proc.write(INIT, mountinfo=MOUNTINFO.replace("rw,nosuid shared:9", "rw").replace("22 21", ""))
    changed = in_words(compare(before, read(proc, INIT)))
    assert changed == [
        "mounts of mount /tmp #2",
        "options of mounts of mount /tmp (was nosuid,rw, is rw)",
        "propagation of mounts of mount /tmp (was shared, is private)",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="it mounts")
def test_a_mount_is_restricted_again(tmp_path: Path) -> None:
    """Nothing becomes allowed that is not now."""
    script = f"mount -t tmpfs -o nosuid none {tmp_path}; echo; exec sleep 600"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        row = MOUNTED["options"]
        assert row.put_back is not None
        row.put_back(Target(process.pid, path=str(tmp_path)), "noexec,noatime,ro,rw", "nosuid,relatime,rw")
        options = {
            line.split()[5]
            for line in Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()
            if line.split()[4] == str(tmp_path)
        }
        with pytest.raises(ValueError, match="0 mounts are at"):
            row.put_back(Target(process.pid, path=f"{tmp_path} #2"), "ro", "rw")
        process.kill()
    assert options == {"ro,nosuid,noexec,relatime"}


def test_no_server_is_asked_for_a_tmpfs() -> None:
    """It may be a process of the container, which is stopped."""
    kinds = {
        "/": "overlay",
        "/tmp": "tmpfs",
        "/f": "fuse",
        "/f/a": "tmpfs",
        "/b": "fuse",
        "/b #2": "tmpfs",
        "/c": "tmpfs",
    }
    kinds |= {"/c #2": "tmpfs", "/d": "nfs4", "/d/e": "ext4", "/d/e/f": "tmpfs"}
    mounts: Mapping[str, Values] = {f"mount {place}": {"file system": kind} for place, kind in kinds.items()}
    assert list(tmpfs_places(mounts)) == ["/tmp"]


def test_limits_of_inner_cgroups_are_put_back(proc: FakeProc, tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "cgroup/cgroup.controllers").write_text("memory\n")
    (inner / "memory.max").write_text("4096\n")
    (inner / "memory.current").write_text("4096\n")
    reader = Reader(INIT, "", str(proc.root), cgroup=tmp_path / "cgroup")
    before = reader.read([INIT])
    assert before.places["cgroup a/b"] == {"memory.max": "4096"}
    (inner / "memory.max").write_text("max\n")
    (found,) = compare(before, Reader(INIT, "", str(proc.root), cgroup=tmp_path / "cgroup").read([INIT]))
    assert in_words([found]) == ["limit of cgroups that it has made (memory.max) of cgroup a/b (was 4096, is max)"]
    assert found.row.put_back is not None
    found.row.put_back(Target(cgroup=reader.inner_cgroup(found.name)), found.before, found.after)
    assert (inner / "memory.max").read_text() == "4096"
    (inner / "memory.current").write_text("4097\n")
    with pytest.raises(ValueError, match="more is in use"):
        found.row.put_back(Target(cgroup=inner), found.before, found.after)
    for name in ("cgroup ../x", "cgroup /x", "mount a"):
        assert reader.inner_cgroup(name) is None


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def test_attributes_of_files_in_memory_are_put_back(in_memory: Path, tmp_path: Path) -> None:
    """Links are not followed: what they lead to is not the container's."""
    me, directory = os.getpid(), in_memory
    (directory / "in").mkdir()
    (directory / "in/named").touch()
    (directory / "out").symlink_to(directory / "in")
    attribute = b"kept"
    try:
        os.setxattr(directory / "in/named", "user.state", attribute)
    except OSError:
        pytest.skip("this file system has no attributes")
    wanted = f"user.state={attribute.hex()}"
    found = dict(read_attributes(me, str(directory)))
    assert found == {str(directory): "", f"{directory}/in": "", f"{directory}/in/named": wanted}
    os.removexattr(directory / "in/named", "user.state")
    row = PLACED["attributes"]
    assert row.put_back is not None
    row.put_back(Target(me, path=f"{directory}/in/named"), wanted, "")
    assert os.getxattr(directory / "in/named", "user.state") == attribute
    with pytest.raises(OSError, match=r"out|Not a directory"):
        row.put_back(Target(me, path=f"{directory}/out/named"), wanted, "")
    with pytest.raises(ValueError, match="the node's"):
        row.put_back(Target(me, path=f"{directory}/in"), "security.selinux=00", "")
    with pytest.raises(ValueError, match="not in memory"):
        row.put_back(Target(me, path=str(tmp_path)), wanted, "")
    assert dict(read_attributes(me, f"{directory}/out")) == {}
    before = ContainerState(places={"file /tmp/a": {"attributes": wanted}})
    (lost,) = compare(before, ContainerState())
    assert in_words([lost]) == [f"extended attributes and ACLs of file /tmp/a (was {wanted}, is empty)"]


def test_processes_in_cgroups_of_their_own(proc: FakeProc, tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    (own / "init").mkdir(parents=True)
    proc.add(CHILD, 5)
    proc.write(INIT, cgroup="4:cpu:/x\n0::/pod/init\n")
    proc.write(CHILD, cgroup="0::/pod/service/a\n")
    before = Reader(INIT, "", str(proc.root), cgroup=own).read([INIT, CHILD])
    assert {pid: one.own["cgroup"] for pid, one in before.processes.items()} == {"1": ".", "5": "../service/a"}
    proc.write(CHILD, cgroup="0::/pod/init\n")
    again = Reader(INIT, "", str(proc.root), cgroup=own / "init").read([INIT, CHILD])
    assert in_words(compare(before, again)) == ["cgroup (v2) of its own of job 5 (was ../service/a, is .)"]


def test_waiting_signals_may_become_more() -> None:
    assert compare(one({"pending": "200"}), one({"pending": "201"})) == []
    assert compare(one({"pending": "201"}), one({"pending": "200"})) != []


def test_what_no_program_notices_is_no_loss(sleeper: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    key, found = next(iter(state_of(sleeper).processes.items()))
    own = {**found.own, "memory name": "heap: 1000-2000"}
    write_state(tmp_path, ContainerState(processes={key: ProcessState(name="sleep", own=own, threads=found.threads)}))
    restore = restore_of(journal_of(tmp_path), sleeper, tmp_path)
    Audit().about_to_run(restore)
    assert restore.remark == ""
    assert "not restored, which no program notices: names of memory of sleep" in caplog.text


def test_what_is_not_shown_here_is_not_compared() -> None:
    assert compare(one({"untag_mask": "1"}, {"autogroup nice": "1"}), one({})) == []
    assert compare(one({"files": "own"}), one({}))[0].after == "shared"


def test_mitigations_of_the_machine_do_not_count() -> None:
    name = "Speculation_Store_Bypass"
    assert compare(one({name: "vulnerable"}), one({name: "not vulnerable"})) == []
    assert compare(one({name: "thread vulnerable"}), one({name: "thread mitigated"})) != []


def test_missing_processes_and_threads_come_first() -> None:
    before = ContainerState(
        processes={
            "1": ProcessState(name="a", threads={"1": {"Umask": "1"}, "2": {}}),
            "7": ProcessState(name="b"),
        }
    )
    after = ContainerState(processes={"1": ProcessState(name="a", threads={"1": {"Umask": "2"}})})
    lines = in_words(compare(before, after))
    assert lines == ["processes of a 2, b 7", "umask of a 1 (was 1, is 2)"]


def test_a_line_names_the_first_tasks() -> None:
    threads = {str(tid): {"timer slack": "1"} for tid in range(1, 9)}
    before = ContainerState(processes={"1": ProcessState(name="a\n", threads=threads)})
    after = ContainerState(
        processes={"1": ProcessState(name="a\n", threads={tid: {"timer slack": "2"} for tid in threads})}
    )
    assert in_words(compare(before, after)) == ["timer slack of a\\n 1, a\\n 2, a\\n 3 and 5 more (was 1, is 2)"]


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    state = ContainerState(
        processes={"1": ProcessState(name="job", own={"oom_score_adj": "1"}, threads={"1": {"Umask": "0"}})},
        left_out=("sh (pid 7)",),
        cpus="0-3",
    )
    assert read_state(tmp_path) is None
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    data = (tmp_path / STATE_NAME).read_bytes()
    for broken in (b"", data[:-1], data[:-4] + b"0000", encode_frame("tasks", 1, b"{}"), encode_frame("tasks", 2, b"")):
        with pytest.raises(IntegrityError):
            decode_state(broken)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"values": [], "processes": {"1": ["a", 0, {}, {}]}, "left_out": [], "cpus": ""}',  # no such values
        b'{"values": [{"a": 1}], "processes": {}, "left_out": [], "cpus": ""}',
        b'{"values": [{"a": "' + b"x" * 5000 + b'"}], "processes": {}, "left_out": [], "cpus": ""}',
        b'{"values": [], "processes": {"1": ["a"]}, "left_out": [], "cpus": ""}',
        b'{"values": [], "processes": {}, "left_out": {}, "cpus": ""}',
        b" " * (17 << 20),
    ],
)
def test_a_hostile_note_is_malformed(body: bytes) -> None:
    import zlib

    with pytest.raises(IntegrityError, match="malformed"):
        decode_state(encode_frame("tasks", 1, zlib.compress(body, 1)))


def test_two_hundred_threads_take_little_room() -> None:
    values: Values = dict.fromkeys(THREAD, "x" * 20)
    own: Values = dict.fromkeys(PROCESS, "y" * 20)
    many = ProcessState(name="job", own=own, threads={str(tid): values for tid in range(200)})
    assert len(encode_state(ContainerState(processes={"1": many}))) < 4 << 10


def test_what_a_restore_will_lose_shows_before() -> None:
    leader: Values = {"net namespace": "1"}
    threads = {"1": leader, "2": {"net namespace": "2"}, "3": {**leader, "files": "own"}}
    files: Mapping[str, Values] = {
        "3": {"[eventfd]": "eventfd-semaphore:1"},
        "4": {"[eventfd]": "eventfd-semaphore:0"},
        "5": {"inotify": "1:400 2:84000400"},
        "6": {"inotify": "1:400"},
        "7": {"peer": "1000 1000"},
        "8": {"peer": "0 0"},
    }
    job = ProcessState(name="job", threads=threads, files=files)
    found = [(one.row.name, one.thread, one.file) for one in foresee(ContainerState(processes={"1": job}))]
    assert found == [
        ("net namespace", "2", ""),
        ("files", "3", ""),
        ("[eventfd]", "", "3"),
        ("inotify", "", "5"),
        ("peer", "", "7"),
    ]
    (found_one,) = foresee(of_personalities("00000000", "00040000"))
    assert (found_one.row.name, found_one.process) == ("personality", "1")


def test_only_peers_of_named_sockets_count(tmp_path: Path) -> None:
    first, second = socket.socketpair()
    with first, second, socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        assert peer_ids(first.fileno()) is None
        listener.bind(str(tmp_path / "s"))
        assert peer_ids(listener.fileno()) is None
        listener.listen()
        client.connect(str(tmp_path / "s"))
        assert peer_ids(client.fileno()) == (os.getuid(), os.getgid())
    with socket.socket() as other:
        assert peer_ids(other.fileno()) is None


KEYRING, NO_GROUPS = InheritedCall("keyctl", (1, 0)), InheritedCall("setgroups", (0, 0))


def of_personalities(*values: str) -> ContainerState:
    return ContainerState(
        processes={
            str(pid): ProcessState(name="a", threads={str(pid): {"personality": value}})
            for pid, value in enumerate(values)
        }
    )


def test_what_tasks_inherit_from_criu() -> None:
    assert inherited_calls(ContainerState(), "") == [KEYRING]
    assert inherited_calls(ContainerState(), "0 4") == [KEYRING, NO_GROUPS]
    randomized = InheritedCall("personality", (0x40000,))
    assert inherited_calls(of_personalities("00040000", "00040000"), "") == [KEYRING, randomized]
    for others in (("00040000", "00000000"), ("00000000",), ("00400000",), ("00440000",)):
        assert inherited_calls(of_personalities(*others), "") == [KEYRING]


@pytest.mark.parametrize(
    ("name", "before", "arguments"),
    [
        ("Speculation_Store_Bypass", ["thread mitigated"] * 2, (53, 0, 4, 0, 0)),
        ("Speculation_Store_Bypass", ["thread force mitigated"], (53, 0, 8, 0, 0)),
        ("SpeculationIndirectBranch", ["conditional disabled"], (53, 1, 4, 0, 0)),
        ("SpeculationIndirectBranch", ["conditional force disabled"], (53, 1, 8, 0, 0)),
        ("Speculation_Store_Bypass", ["thread mitigated", "thread vulnerable"], None),
        ("Speculation_Store_Bypass", ["not vulnerable"], None),
        ("SpeculationIndirectBranch", ["always disabled"], None),
    ],
)
def test_speculation_that_was_switched_off(name: str, before: list[str], arguments: tuple[int, ...] | None) -> None:
    found = {
        str(pid): ProcessState(name="a", threads={str(pid): {name: value}, "99": {name: "?"}})
        for pid, value in enumerate(before)
    }
    calls = [call.arguments for call in inherited_calls(ContainerState(processes=found), "") if call.name == "prctl"]
    assert calls == ([arguments] if arguments else [])


def test_a_process_is_made_to_pass_on_what_its_children_need(sleeper: Process) -> None:
    make_inherit(sleeper.pid, of_personalities("00040000"), ENDLESS)
    assert read_file(f"/proc/{sleeper.pid}/personality") == b"00040000\n"
    assert sleeper.is_alive()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("prefer:0", (1, 1)),
        ("bind=static:0-1", (2 | 1 << 15, 3)),
        ("interleave=relative:1,3", (3 | 1 << 14, 10)),
        ("weighted interleave:0", (6, 1)),
        ("", None),
        ("bind:", None),
        ("bind:64", None),
        ("unknown:0", None),
    ],
)
def test_numa_policies(text: str, policy: tuple[int, int] | None) -> None:
    assert NumaPolicy.of_text(text) == policy
    assert numa_policy(of_policies(text, text)) == policy
    assert numa_policy(of_policies(text, "prefer:7")) is None


def of_policies(*policies: str) -> ContainerState:
    found = {str(pid): ProcessState(name="a", own={"NUMA policy": text}) for pid, text in enumerate(policies)}
    return ContainerState(processes=found)


def test_a_process_passes_its_numa_policy_on(sleeper: Process) -> None:
    make_inherit(sleeper.pid, of_policies("prefer:0"), ENDLESS)
    assert read_task_policy(f"/proc/{sleeper.pid}") == "prefer:0"
    (several,) = foresee(of_policies("prefer:0", ""))
    assert several.row.name == "NUMA policy"
    assert list(foresee(of_policies("prefer:0", "prefer:0"))) == []


def test_lists_of_processors() -> None:
    assert parse_cpus("0-2,7\n") == {0, 1, 2, 7}
    assert parse_cpus("") == set()
    for bad in ("x", "0-999999999", "1-2-3"):
        with pytest.raises(ValueError, match=r"."):
            parse_cpus(bad)


def test_limits_of_this_process() -> None:
    found = parse_limits(read_file("/proc/self/limits").decode())
    assert len(found) == 16
    assert found.keys() <= PROCESS.keys()


@pytest.fixture
def sleeper() -> Iterator[Process]:
    """A process of this test's own, whose state may be changed."""
    with subprocess.Popen(["sleep", "600"]) as started:
        process = Process.find(started.pid)
        assert process is not None
        assert Patience(timeout_s=60).until(lambda: has_loaded(process)), "it has not loaded its libraries"
        yield process
        started.kill()


def has_loaded(process: Process) -> bool:
    try:
        find_call_instruction(process.pid)
    except TraceError:
        return False
    return True


def state_of(process: Process) -> ContainerState:
    return Reader(process.pid, "").read([process.pid])


def change(state: ContainerState, process: Process, **values: str) -> ContainerState:
    """Return a state that differs in some values, which may be of the thread or of the process."""
    key, found = next(iter(state.processes.items()))
    given = {name.replace("_", " ") if name not in PROCESS else name: text for name, text in values.items()}
    thread = {**found.threads[key], **{name: text for name, text in given.items() if name in THREAD}}
    own = {**found.own, **{name: text for name, text in given.items() if name in PROCESS}}
    return ContainerState(processes={key: ProcessState(name="sleep", own=own, threads={key: thread})}, cpus=state.cpus)


def test_what_can_be_is_put_back(sleeper: Process) -> None:
    first = min(os.sched_getaffinity(sleeper.pid))
    wanted = change(
        state_of(sleeper),
        sleeper,
        CPU_affinity=str(first),
        scheduling="3 0 4 0 0 0 0 0 1024",  # SCHED_BATCH, nice 4
        I_O_priority="",
        timer_slack="1234",
        oom_score_adj="77",
        coredump_filter="0000007f",
    )
    values = wanted.processes[next(iter(wanted.processes))]
    limited = {**values.own, "Max open files": "99 100"}
    threads = {tid: {**found, "I/O priority": str(2 << 13 | 7)} for tid, found in values.threads.items()}
    key = next(iter(wanted.processes))
    wanted = ContainerState(processes={key: ProcessState(name="sleep", own=limited, threads=threads)}, cpus=wanted.cpus)
    assert audit(wanted, sleeper.pid) == []
    assert os.sched_getscheduler(sleeper.pid) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, sleeper.pid) == 4
    assert Path(f"/proc/{sleeper.pid}/oom_score_adj").read_text() == "77\n"


def test_what_cannot_be_is_returned(sleeper: Process) -> None:
    wanted = change(state_of(sleeper), sleeper, CPU_affinity="8000", scheduling="no numbers", personality="1")
    left = audit(wanted, sleeper.pid)
    assert [difference.row.name for difference in left] == ["CPU affinity", "scheduling", "personality"]


def journal_of(tmp_path: Path) -> Journal:
    me = Process.find(os.getpid())
    assert me is not None
    journal = Journal.create(tmp_path / "run", me)
    journal.identify(ContainerRef(id="ab" * 32, engine="podman", runtime="runc", name="job"), str(tmp_path))
    return journal


def restore_of(journal: Journal, process: Process, directory: Path) -> Restore:
    return Restore(journal, ENDLESS, journal.criu.pid, process.pid, str(directory), directory, settings=Settings())


def test_a_dump_records_once_and_a_restore_reports(tmp_path: Path, sleeper: Process) -> None:
    journal = journal_of(tmp_path)
    dump = Dump(journal, ENDLESS, journal.criu.pid, sleeper.pid, str(tmp_path), tmp_path)
    Audit().after_images(dump)
    recorded = read_state(tmp_path)
    assert recorded is not None
    assert recorded.processes.keys() == {str(sleeper.pid)}
    write_state(tmp_path, change(recorded, sleeper, personality="1"))
    assert Audit().after_images(dump) == ""
    restore = restore_of(journal, sleeper, tmp_path)
    Audit().about_to_run(restore)
    assert restore.remark.startswith("container job (abababababab): not restored: personality of sleep")
    Audit().prepare(dump)
    assert not (tmp_path / STATE_NAME).exists()


def test_a_damaged_note_fails_no_restore(tmp_path: Path, sleeper: Process, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / STATE_NAME).write_bytes(b"\xff" * 100)
    restore = restore_of(journal_of(tmp_path), sleeper, tmp_path)
    with caplog.at_level(logging.WARNING):
        Audit().about_to_run(restore)
    assert "is not compared: the tasks does not begin as one" in caplog.text
    assert restore.remark == ""


@pytest.mark.parametrize(("criu", "marked"), [("4.1.1", [0, 1 << 18, 0]), ("4.2", [0, 0, 0])])
def test_memory_that_children_find_empty_is_in_the_image(
    sleeper: Process, tmp_path: Path, criu: str, marked: list[int]
) -> None:
    """CRIU before 4.2 restores the advice and does not write it."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1/smaps").write_bytes(SMAPS)
    (tmp_path / "1/status").write_text("Name:\tjob\nPPid:\t0\nNSpid:\t7\nVmRSS:\t 100 kB\n")
    assert Reader(1, "", str(tmp_path)).wiped([1], Allowance(60, 1 << 20)) == {"7": "1000-4000"}
    journal = journal_of(tmp_path)
    journal.note(CallFacts(verb="dump", criu_version=criu))
    dump = Dump(journal, ENDLESS, journal.criu.pid, sleeper.pid, str(tmp_path), tmp_path)
    Audit().prepare(dump)
    assert journal.knows(WipedFacts) == (criu == "4.1.1")
    if criu == "4.1.1":
        journal.note(WipedFacts(wiped={"7": "1000-4000", "8": "0-1"}))  # the last one has no image
    make_address_space(tmp_path, 7, [(0, 0x1000), (0x1000, 0x3000), (0x3000, 0x5000)])
    Audit().after_images(dump)
    data = (tmp_path / "mm-7.img").read_bytes()
    mm = message_class("mm_entry").FromString(data[12:])
    assert [area.madv for area in mm.vmas] == marked  # type: ignore[attr-defined]
    assert (tmp_path / STATE_NAME).exists()
