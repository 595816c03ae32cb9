"""The hold and the dump's part of the network, in network namespaces of their own; only root can make these."""

import array
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ocihook.config import Policy
from ocihook.errors import IntegrityError, OcihookError, PreflightError, printable
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.linux.sockets import Socket, sockets
from ocihook.model import ContainerRef
from ocihook.net import dump as dump_half
from ocihook.net import hold, netlink, nftables, repair
from ocihook.net import restore as restore_half
from ocihook.net.addresses import map_addresses
from ocihook.net.kick import Sender, wake
from ocihook.net.lost_options import TcpOptions, keep, put_back, read_options, tcp_sockets
from ocihook.net.memberships import Membership, read_memberships, rejoin
from ocihook.net.namespace import NetNamespace
from ocihook.net.note import NETWORK_NAME, NetworkNote, decode_note, read_note, write_note
from ocihook.net.restore import NetworkFacts, end_release, wake_senders
from ocihook.net.stall import Watch, place_of
from ocihook.net.survey import Survey
from ocihook.packs.frame import encode_frame
from ocihook.session.journal import Journal
from ocihook.session.participant import CallFacts, Dump, Restore
from ocihook.session.undo import undo_all, undo_interrupted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces")

# Opens sockets as asked, prints which ports they have, and waits until it is asked to end.
WORKLOAD = """
import json, socket, subprocess, sys
subprocess.run("ip link set lo up; ip addr add 10.7.0.1/24 dev lo; ip addr add fd07::1/64 dev lo nodad", shell=True)
subprocess.run("ip addr add 169.254.7.1/16 dev lo scope link", shell=True)
listener = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
client = socket.create_connection(listener.getsockname()[:2])
server = listener.accept()[0]
client.setsockopt(socket.IPPROTO_TCP, 18, 12345)
if sys.argv[2:] == ["mptcp"]:
    multipath = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
group = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
membership = socket.inet_aton("239.1.2.3") + socket.inet_aton("10.7.0.1")
group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
print(json.dumps([client.getsockname()[1], listener.getsockname()[1]]), flush=True)
sys.stdin.readline()
"""

# Has an interface of that name, with an address and a multicast group on it.
NAMED = """
import os, socket, subprocess, sys
name = os.fsencode(sys.argv[1])
for words in (["link", "add", name, "type", "bridge"], ["link", "set", name, "up"]):
    subprocess.run(["ip", *words], check=True)
subprocess.run(["ip", "address", "add", "10.9.9.1/24", "dev", name], check=True)
group = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
group.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, bytes([239, 1, 2, 3, 10, 9, 9, 1]))
print("ready", flush=True)
sys.stdin.readline()
"""

StartWorkload = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_workload() -> Iterator[StartWorkload]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = ["unshare", "--net", sys.executable, "-c", WORKLOAD, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def workload(start_workload: StartWorkload) -> "subprocess.Popen[str]":
    return start_workload("10.7.0.1")


@pytest.fixture
def criu() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def journal(tmp_path: Path, criu: "subprocess.Popen[bytes]") -> Journal:
    found = Process.find(criu.pid)
    assert found is not None
    journal = Journal.create(tmp_path, found)
    journal.begin_stage("pre-dump")
    return journal


def make_dump(journal: Journal, pid: int, directory: Path, **facts: object) -> Dump:
    journal.identify(ContainerRef(id="c1"), str(directory))
    journal.note(CallFacts(**{"criu_version": "4.2.1", **facts}))  # type: ignore[arg-type]
    return Dump(
        journal=journal,
        patience=Patience(),
        criu_pid=journal.criu.pid,
        init_pid=pid,
        image_dir=str(directory),
        directory=directory,
    )


def names(namespace: NetNamespace) -> list[str]:
    return [name for _, name in nftables.tables(namespace)]


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def test_a_namespace_is_found_again_by_its_inode(
    workload: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = NetNamespace.of(workload.pid)

    def search(inode: int) -> Iterator[str]:
        yield pytest.fail(f"{inode} is searched for")

    with monkeypatch.context() as patch:  # to look at all processes is for what is no more where it was
        patch.setattr("ocihook.net.namespace._places", search)
        os.close(namespace.open())
    assert not namespace.is_ours
    assert NetNamespace.of(os.getpid()).is_ours
    elsewhere = NetNamespace("/proc/self/ns/net", namespace.inode)
    assert elsewhere.run(lambda: os.stat("/proc/thread-self/ns/net").st_ino) == namespace.inode
    assert os.stat("/proc/self/ns/net").st_ino != namespace.inode  # nobody else has moved
    workload.kill()
    workload.communicate()
    with pytest.raises(FileNotFoundError, match="is gone"):
        elsewhere.open()


def test_what_the_kernel_tells(workload: "subprocess.Popen[str]") -> None:
    namespace = NetNamespace.of(workload.pid)
    survey = Survey.of([workload.pid])
    assert survey is not None
    assert {link.name: link.is_loopback for link in netlink.links(namespace)}["lo"]
    assert {ip_address("10.7.0.1"), ip_address("fd07::1")} <= survey.own
    assert len(survey.connections) == 2
    assert {str(sock.local) for sock in survey.connections} == {"10.7.0.1"}
    (listener,) = [sock for sock in survey.sockets if sock.state == netlink.LISTEN]
    assert str(listener) == f"TCP 10.7.0.1:{listener.local_port}"
    assert [str(one) for one in read_memberships([workload.pid])] == ["239.1.2.3 on lo"]
    options = {read_options(sock).user_timeout_ms for _, sock in tcp_sockets([workload.pid])}
    assert options == {0, 12345}
    assert netlink.destroy(namespace, survey.connections[:1]) == 1  # whose reset ends the other one
    assert Patience(timeout_s=60).until(lambda: Survey.of([workload.pid]).connections == [])  # type: ignore[union-attr]


def test_a_copy_that_is_kept_leaves_the_socket_as_it_is() -> None:
    """A socket that was not to block, and does, lets the whole application stand still."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setblocking(False)
        inode = os.fstat(client.fileno()).st_ino
        (copy,) = (keep(sock) for number, sock in tcp_sockets([os.getpid()]) if number == inode)
        with copy:
            assert copy.getpeername() == server.getsockname()
            assert not os.get_blocking(client.fileno())
        assert client.getpeername() == server.getsockname()


def test_all_that_has_an_old_address_is_reported(tmp_path: Path) -> None:
    """Of a process with a network, a host table and an environment of its own, as the kernel gives them."""
    hosts = tmp_path / "hosts"
    hosts.write_text("10.7.0.1 old-name\n")
    make = """
    ip link add v0 type veth peer name v1; ip link set v1 up; ip link set v0 up; ip addr add 10.8.0.1/24 dev v0
    ip route add 192.0.2.0/24 via 10.8.0.9; ip route add 10.7.0.1/32 dev v0; ip route add 198.51.100.0/24 via 10.8.0.9
    mount --bind "$0" /etc/hosts; echo ready; read line
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = ["unshare", "--net", "--mount", "sh", "-ec", make, str(hosts)]
    with subprocess.Popen(command, env={**os.environ, "MASTER_ADDR": "10.7.0.1"}, **pipes) as program:  # type: ignore[call-overload]
        try:
            assert program.stdout.readline() == "ready\n"
            namespace = NetNamespace.of(program.pid)
            had = [*netlink.routes(namespace), netlink.Route("203.0.113.0/24", "10.7.0.254", 2)]
            own = netlink.links(namespace, is_of_link=True)
            facts = NetworkFacts(network=namespace, moved_addresses={"10.7.0.1": "10.8.0.1"}, routes=had)
            found = set(restore_half._old_addresses(program.pid, facts))
        finally:
            program.kill()
    assert {
        "its environment has 10.7.0.1 in 'MASTER_ADDR'; the address is 10.8.0.1 now",
        "its /etc/hosts has 10.7.0.1; the address is 10.8.0.1 now",
        "its route to 10.7.0.1/32 has 10.7.0.1; the address is 10.8.0.1 now",
        "it had a route to 203.0.113.0/24 by 10.7.0.254, and has none where it is restored",
    } == found
    assert {link.name: [text[:6] for text in link.addresses] for link in own if link.name != "lo"} == {
        "v0": ["fe80::"],
        "v1": ["fe80::"],
    }


def test_unix_sockets_know_their_peers_and_what_nobody_has_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"unread")
        found = netlink.unix_sockets(NetNamespace.of(os.getpid()))
        end = found[os.fstat(one.fileno()).st_ino]
        assert end.peer == os.fstat(other.fileno()).st_ino
        assert end.unread_bytes > 0


def test_options_are_put_back_and_what_cannot_be_is_named() -> None:
    with socket.socket() as sock:
        assert put_back(sock, TcpOptions(5000, 4096, "reno")) == []
        assert read_options(sock) == TcpOptions(5000, 4096, "reno")
        assert put_back(sock, TcpOptions(0, 0, "no-such-thing")) == ["TCP_CONGESTION no-such-thing"]
        assert read_options(sock) == TcpOptions(0, 0, "reno")


@pytest.mark.parametrize("group", ["239.1.2.3", "ff15::1:3"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("count", [0, 2])
def test_a_group_is_joined_again_with_its_sources(group: str, mode: int, count: int) -> None:
    """By the one socket of several at the same address that had joined it, and as it had."""
    family = socket.AF_INET6 if ":" in group else socket.AF_INET
    sources = ("fd07::5", "fd07::6") if ":" in group else ("192.0.2.5", "192.0.2.6")
    with socket.socket(family, socket.SOCK_DGRAM) as sock, socket.socket(family, socket.SOCK_DGRAM):
        wanted = Membership(str(os.getpid()), sock.fileno(), "lo", group, mode, sources[:count])
        assert rejoin([os.getpid()], [wanted]) == []
        had = [one for one in read_memberships([os.getpid()]) if one.fd == sock.fileno()]
        left = mode == 1 and count == 0  # datagrams of no source: the kernel has such a one leave the group
        assert [one._replace(pid=wanted.pid, sources=tuple(sorted(one.sources))) for one in had] == (
            [] if left else [wanted]
        )
        assert rejoin([os.getpid()], had) == []
        assert [one for one in read_memberships([os.getpid()]) if one.fd == sock.fileno()] == had


def test_a_group_that_cannot_be_joined_is_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        here = Membership(str(os.getpid()), sock.fileno(), "no-such", "239.1.2.3")
        lost = ["membership of 239.1.2.3 on no-such"]
        assert rejoin([os.getpid()], [here]) == lost
        assert rejoin([os.getpid()], [here._replace(pid="1/2")]) == lost


def test_traffic_is_held_drained_and_let_go(workload: "subprocess.Popen[str]", journal: Journal) -> None:
    namespace = NetNamespace.of(workload.pid)
    nftables.run(namespace, "table inet theirs { chain c { type filter hook input priority 0; }; }")
    hold.hold(journal, namespace, drain=True)
    drained = nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    assert drained.count("drop") == 1
    assert 'oif "lo" accept' in drained
    hold.hold(journal, namespace)
    held = nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    assert held.count("drop") == 2
    assert held.count("0x0000c114 accept") == held.count("tcp meta nfproto @held drop") == 2
    assert len(journal.effects) == 1
    hold.hold(journal, namespace, with_loopback=True)
    assert '"lo"' not in nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    hold.release(journal)
    assert "@held" not in nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    hold.forget_hold(journal)
    assert names(namespace) == ["theirs"]
    assert journal.effects == []
    assert [phase["name"] for phase in journal.to_json()["phases"]] == ["network held"]


def client_of(workload: "subprocess.Popen[str]") -> socket.socket:
    """Return the connection of a workload that it has connected itself."""
    for _, sock in tcp_sockets([workload.pid]):
        if read_options(sock).user_timeout_ms == 12345:
            return sock.dup()
    raise AssertionError("no such connection")


def has_waited(sock: socket.socket, least_ms: int) -> bool:
    """Return whether a timer of a connection has doubled three times, and so long ago (struct tcp_info)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 48)
    backoff, last_sent_ms = info[4], int.from_bytes(info[44:], sys.byteorder)
    return backoff >= 3 and last_sent_ms >= least_ms


def number_in(sock: socket.socket, request: int) -> int:
    """Return what SIOCOUTQ (0x5411) or SIOCOUTQNSD (0x894B) says of a connection's unsent and unacknowledged bytes."""
    number = array.array("i", [0])
    fcntl.ioctl(sock, request, number)
    return number[0]


def unacknowledged(sock: socket.socket) -> int:
    """Return the number of the oldest byte without an answer: nobody uses the connection, so it may be in repair."""
    for option, value in ((19, 1), (20, 2)):  # TCP_REPAIR, TCP_REPAIR_QUEUE: what is sent
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    following: int = sock.getsockopt(socket.IPPROTO_TCP, 21)  # TCP_QUEUE_SEQ
    sock.setsockopt(socket.IPPROTO_TCP, 19, -1)  # off, and no packet
    return (following - number_in(sock, 0x5411)) % (1 << 32)


def sender_of(sock: socket.socket, number: int) -> Sender:
    (local, port, *_), (remote, remote_port, *_) = sock.getsockname(), sock.getpeername()
    return Sender(ip_address(local), port, ip_address(remote), remote_port, number)


@pytest.mark.parametrize("address", ["10.7.0.1", "::1"])
def test_what_a_hold_kept_from_leaving_leaves_at_once(
    start_workload: StartWorkload, journal: Journal, address: str
) -> None:
    workload = start_workload(address)
    namespace = NetNamespace.of(workload.pid)
    with client_of(workload) as sock:
        hold.hold(journal, namespace, with_loopback=True)
        sock.send(b"question")
        assert number_in(sock, 0x894B) == 8
        assert Patience(timeout_s=60).until(lambda: has_waited(sock, 0))  # and would for a second or two
        hold.release(journal)
        wake(namespace, [sender_of(sock, 0)], workload.pid)
        assert number_in(sock, 0x5411) == 0


@pytest.mark.parametrize("address", ["10.7.0.1", "::1"])
def test_what_had_left_and_was_lost_is_sent_again_at_once(start_workload: StartWorkload, address: str) -> None:
    workload = start_workload(address)
    namespace = NetNamespace.of(workload.pid)
    with client_of(workload) as sock:
        rule = f"tcp dport {sock.getpeername()[1]} drop"
        nftables.run(namespace, f"table inet t {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}")
        sock.send(b"question")
        assert number_in(sock, 0x894B) == 0
        assert Patience(timeout_s=60).until(lambda: has_waited(sock, 300))  # more than the timer at first
        number = unacknowledged(sock)
        nftables.run(namespace, "delete table inet t")
        wake(namespace, [sender_of(sock, number)], workload.pid)
        assert number_in(sock, 0x5411) == 0


@pytest.mark.parametrize("address", ["10.7.0.1", "::1"])
def test_a_sender_whose_owner_is_told_what_icmp_says_is_left_alone(start_workload: StartWorkload, address: str) -> None:
    workload = start_workload(address)
    with client_of(workload) as sock:
        number = unacknowledged(sock)
        level, option = (
            (socket.IPPROTO_IPV6, 25) if ":" in address else (socket.IPPROTO_IP, 11)
        )  # IPV6_RECVERR, IP_RECVERR
        sock.setsockopt(level, option, 1)
        wake(NetNamespace.of(workload.pid), [sender_of(sock, number)], workload.pid)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def test_peers_of_a_container_that_has_ended_get_no_answer(workload: "subprocess.Popen[str]", journal: Journal) -> None:
    """Until another session of that network lets traffic pass."""
    namespace = NetNamespace.of(workload.pid)
    hold.hold(journal, namespace, init=Process(workload.pid, 1))  # another process has its pid by now
    held = journal.find(hold.TrafficHeld)
    assert held is not None
    journal.stage = "pre-dump"
    held.undo(journal, Patience())
    left = nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    assert left.count("drop") == 1
    assert "tcp flags & (rst | ack) == rst drop" in left
    hold.release(journal)
    hold.forget_hold(journal)
    assert names(namespace) == []


def test_of_two_who_hold_a_network_the_last_lets_go(
    workload: "subprocess.Popen[str]", journal: Journal, criu: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    namespace = NetNamespace.of(workload.pid)
    second = subprocess.Popen(["sleep", "600"])
    try:
        other = Journal.create(tmp_path, Process.find(second.pid) or Process(0, 0))
        other.begin_stage("pre-dump")
        for one in (journal, other):
            hold.hold(one, namespace)
        assert len(names(namespace)) == 2
        nftables.run(namespace, "table inet CRIU-1 {}")
        end(criu)
        with pytest.raises(OcihookError, match="another dump or restore is at work"):
            undo_all(journal, Patience())
        assert names(namespace) == [hold.table_of(other), "CRIU-1"]  # whose that is is not known yet
        end(second)
        undo_all(other, Patience())
        undo_all(journal, Patience())
    finally:
        end(second)
    assert names(namespace) == []


def serve(journal: Journal, work: Callable[[Journal], None]) -> int:
    """Start a session that does this, and then waits until it is killed; return its pid when it has done so."""
    has_done, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(Journal.load(journal.path))
            os.write(done, b"!")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(has_done, 1)
    os.close(has_done)
    os.close(done)
    return pid


def test_a_hold_is_renewed_while_its_session_lives_and_then_ends_by_itself(
    workload: "subprocess.Popen[str]", journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the session of an agent that has taken over from one that was killed."""
    monkeypatch.setattr(hold, "HOLD_LIMIT_S", 3)
    namespace = NetNamespace.of(workload.pid)

    def left_ms() -> int:
        """Return how long the hold lasts if it is not renewed; 0 once it is over."""
        found = nftables.run(namespace, f"list set inet {hold.table_of(journal)} held")
        left = re.search(r"ipv4 timeout 3s expires (?:(\d+)s)?(?:(\d+)ms)?", found)
        return int(left[1] or 0) * 1000 + int(left[2] or 0) if left else 0

    def is_renewed() -> bool:
        before = left_ms()
        return Patience(timeout_s=1).until(lambda: left_ms() > before)

    def take_over(journal: Journal) -> None:
        for effect in journal.effects:
            effect.take_over(journal)

    for work in (lambda journal: hold.hold(journal, namespace), take_over):
        session = serve(journal, work)
        assert Patience(timeout_s=60).until(lambda: names(namespace) != [] and is_renewed())
        os.kill(session, signal.SIGKILL)
        os.waitpid(session, 0)
        assert Patience(timeout_s=60).until(lambda: left_ms() == 0)


def test_the_lock_of_a_criu_that_is_killed_with_its_session_goes_without_any_agent(
    workload: "subprocess.Popen[str]",
    journal: Journal,
    criu: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before CRIU has ended, and not another's."""
    monkeypatch.setattr(hold, "HOLD_LIMIT_S", 1)
    namespace = NetNamespace.of(workload.pid)
    nftables.run(namespace, "table inet CRIU-before {}")
    session = serve(journal, lambda journal: hold.hold(journal, namespace))
    nftables.run(namespace, "table inet CRIU-0123456789abcdef01234 {}")
    os.kill(session, signal.SIGKILL)
    os.waitpid(session, 0)
    assert Patience(timeout_s=60).until(
        lambda: "elements" not in nftables.run(namespace, f"list set inet {hold.table_of(journal)} held")
    )
    assert hold.criu_locks(namespace) == ["CRIU-before", "CRIU-0123456789abcdef01234"]
    end(criu)
    assert Patience(timeout_s=60).until(lambda: hold.criu_locks(namespace) == ["CRIU-before"])


def test_a_restore_that_fails_leaves_a_rule_that_the_next_takes_away(
    workload: "subprocess.Popen[str]", journal: Journal
) -> None:
    namespace = NetNamespace.of(workload.pid)
    journal.begin_stage("pre-restore")
    hold.hold(journal, namespace, with_loopback=True)
    undo_all(journal, Patience())
    left = nftables.run(namespace, f"list table inet {hold.table_of(journal)}")
    assert "tcp flags & (rst | ack) == rst drop" in left
    assert "@held" not in left
    hold.hold(journal, namespace, with_loopback=True)
    hold.release(journal)
    assert (
        nftables.run(namespace, f"list table inet {hold.table_of(journal)}").split("expires")[0]
        == (left.split("expires")[0])
    )
    hold.forget_hold(journal)
    assert names(namespace) == []


def test_what_criu_has_left_goes_only_where_it_was_ours(
    workload: "subprocess.Popen[str]", journal: Journal, criu: "subprocess.Popen[bytes]"
) -> None:
    namespace = NetNamespace.of(workload.pid)
    nftables.run(namespace, "table inet CRIU-before {}; table inet mine {}; table ip CRIU-4 {}")
    hold.hold(journal, namespace)
    nftables.run(namespace, "table inet CRIU-0123456789abcdef01234 {}")
    journal.begin_stage("post-restore")
    with pytest.raises(OcihookError, match="is still at work on the network"):
        undo_all(journal, Patience())
    end(criu)
    undo_all(journal, Patience())
    assert names(namespace) == ["CRIU-before", "mine", "CRIU-4"]


def test_a_chain_of_criu_goes_too(
    workload: "subprocess.Popen[str]", journal: Journal, criu: "subprocess.Popen[bytes]"
) -> None:
    namespace = NetNamespace.of(workload.pid)
    hold.hold(journal, namespace)
    rules = "*filter\n:CRIU - [0:0]\n-I INPUT -j CRIU\n-I OUTPUT -j CRIU\n-A CRIU -j DROP\nCOMMIT\n"

    def lock() -> None:
        for program in ("iptables-restore", "ip6tables-restore"):
            subprocess.run([f"/usr/sbin/{program}", "-w", "--noflush"], input=rules, text=True, check=True)

    namespace.run(lock)
    assert hold.criu_locks(namespace) == ["CRIU"]
    end(criu)
    undo_all(journal, Patience())
    assert hold.criu_locks(namespace) == []


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_undo_at_any_step(workload: "subprocess.Popen[str]", journal: Journal, *, is_made: bool, is_gone: bool) -> None:
    """Killed before the table was made, or behind it; the namespace may be gone meanwhile."""
    namespace = NetNamespace.of(workload.pid)
    hold.hold(journal, namespace)
    if not is_made:
        hold.remove_table(namespace, hold.table_of(journal))
    if is_gone:
        workload.kill()
        workload.communicate()
    again = Journal.load(journal.path)
    again.stage = "pre-dump"
    undo_interrupted(again, Patience())
    assert again.effects == []
    (effect,) = Journal.load(journal.path).effects or journal.effects
    effect.undo(again, Patience())  # a second time, as by whoever was killed before it was forgotten
    assert is_gone or names(namespace) == []


def test_a_refused_rule_is_one_clear_error(workload: "subprocess.Popen[str]") -> None:
    with pytest.raises(nftables.RulesRefused, match="were refused: Error"):
        nftables.run(NetNamespace.of(workload.pid), "table inet x { nonsense }")


def test_a_dump_notes_drains_and_holds(workload: "subprocess.Popen[str]", journal: Journal, tmp_path: Path) -> None:
    dump = make_dump(journal, workload.pid, tmp_path)
    dump_half.refuse(dump)
    assert dump.has_connections
    dump_half.hold_network(dump)
    note = read_note(tmp_path)
    assert note is not None
    assert ip_address("10.7.0.1") in note.own
    assert note.of_link == {"lo": ("169.254.7.1/16",)}
    assert [str(one) for one in note.memberships] == ["239.1.2.3 on lo"]
    assert [o.user_timeout_ms for o in note.options.values() if o.user_timeout_ms] == [12345]
    assert [effect.kind for effect in journal.effects] == ["in-repair", "traffic-held"]
    assert [phase["name"] for phase in journal.to_json()["phases"]] == ["drain"]
    assert names(NetNamespace.of(workload.pid)) == [hold.table_of(journal)]
    undo_all(journal, Patience())
    assert names(NetNamespace.of(workload.pid)) == []


def test_without_rules_a_dump_goes_on(
    workload: "subprocess.Popen[str]", journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nftables, "LIBRARY", "libnftables.so.none")
    nftables._library.cache_clear()
    try:
        dump_half.hold_network(make_dump(journal, workload.pid, tmp_path, leave_running=True))
        assert not nftables.has_nftables()
    finally:
        monkeypatch.undo()
        nftables._library.cache_clear()
    assert read_note(tmp_path) is not None
    undo_all(journal, Patience())


def test_the_nodes_own_network_is_never_held(journal: Journal, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        dump_half.hold_network(make_dump(journal, os.getpid(), tmp_path))
    assert [effect.kind for effect in journal.effects] == ["in-repair"]
    note = read_note(tmp_path)
    assert note is not None
    assert note.is_node


def test_a_note_of_an_earlier_dump_goes(journal: Journal, tmp_path: Path, criu: "subprocess.Popen[bytes]") -> None:
    write_note(tmp_path, NetworkNote(links=()))
    dump_half.hold_network(make_dump(journal, criu.pid, tmp_path))  # a process without sockets
    assert read_note(tmp_path) is None
    assert journal.effects == []


def test_connections_with_itself_are_not_refused(
    workload: "subprocess.Popen[str]", journal: Journal, tmp_path: Path
) -> None:
    dump_half.refuse(make_dump(journal, workload.pid, tmp_path, policy=Policy(tcp="refuse")))
    assert journal.effects == []


def test_the_policy_refuse_names_the_connections(
    workload: "subprocess.Popen[str]", journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Survey, "own", frozenset())
    monkeypatch.setattr(
        Survey,
        "connections",
        [s._replace(remote=ip_address("10.9.0.9")) for s in Survey.of([workload.pid]).connections],  # type: ignore[union-attr]
    )
    dump = make_dump(journal, workload.pid, tmp_path, policy=Policy(tcp="refuse"))
    with pytest.raises(
        PreflightError, match=r"its 2 open connections \(TCP 10.7.0.1:\d+ -> 10.9.0.9:\d+, TCP .*ocihook"
    ):
        dump_half.refuse(dump)
    asked = make_dump(
        journal, workload.pid, tmp_path, policy=Policy(tcp="refuse"), criu_asked=frozenset({"tcp-established"})
    )
    dump_half.refuse(asked)  # who asks the engine for it by name gets it


def test_connections_come_out_of_repair_mode(
    workload: "subprocess.Popen[str]", journal: Journal, criu: "subprocess.Popen[bytes]"
) -> None:
    def modes() -> list[int]:
        survey = Survey.of([workload.pid])
        assert survey is not None
        connected = {sock.inode for sock in survey.connections}
        return [s.getsockopt(socket.IPPROTO_TCP, 19) for inode, s in tcp_sockets([workload.pid]) if inode in connected]

    reusable = []
    for inode, sock in tcp_sockets([workload.pid]):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            reusable.append(inode)
        if inode in {s.inode for s in Survey.of([workload.pid]).connections}:  # type: ignore[union-attr]
            sock.setsockopt(socket.IPPROTO_TCP, 19, 1)
    assert modes() == [1, 1]
    init = Process.find(workload.pid)
    assert init is not None
    journal.add(repair.InRepair(init=init, reusable=tuple(reusable)))
    journal.begin_stage("post-dump")
    with pytest.raises(OcihookError, match="still has the container's connections"):
        undo_all(journal, Patience())
    assert modes() == [1, 1]
    end(criu)
    undo_all(journal, Patience())
    assert modes() == [0, 0]
    for inode, sock in tcp_sockets([workload.pid]):
        assert bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) == (inode in reusable)


def test_a_note_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    link = netlink.Link("eth0", 2, "02:00:00:00:00:01", "veth", 1500, True, False, ("10.0.0.5/16", "fd00::5/64"))
    note = NetworkNote(
        links=(link,), options={"12": TcpOptions(1, 2, "bbr")}, memberships=(Membership("1", 3, "eth0", "239.0.0.1"),)
    )
    write_note(tmp_path, note)
    assert read_note(tmp_path) == note
    data = (tmp_path / NETWORK_NAME).read_bytes()
    for broken in (b"", data[:-1], data.replace(b"eth0", b"eth1", 1), b"ocihook-network 2" + data[17:]):
        with pytest.raises(IntegrityError):
            decode_note(broken)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"links": [["eth0"]]},
        {"links": [["eth0", 2, "", "", 1500, True, False, ["no address"]]]},
        {"links": [], "options": {"x": [0, 0, ""]}},
        {"links": [], "options": {"1": [0, "0"]}},
        {"links": [], "memberships": [1]},
        {"links": [], "memberships": [["1", 3, "\x1b[2Jeth0", "239.0.0.1"]]},
        {"links": [], "memberships": [["1", 3, 1000 * "e", "239.0.0.1"]]},
        {"links": [], "options": {"1": [0, 0, "\ud800"]}},
        {"links": [["eth0", 2, "", "", 1500, True, False, 1 << 400]]},
        [],
    ],
)
def test_a_note_that_says_what_none_says(body: object) -> None:
    with pytest.raises(IntegrityError, match="is malformed"):
        decode_note(encode_frame("network", 1, json.dumps(body).encode()))


def test_a_note_that_is_nested_deeply_is_refused() -> None:
    body = 5000 * b"[" + bytes(5000 * 16).replace(b"\0", b" ") + 5000 * b"]"
    with pytest.raises(IntegrityError, match="nested"):
        decode_note(encode_frame("network", 1, body))


def test_many_addresses_take_no_more_than_their_number() -> None:
    """A note may claim as many as fit into it; each with the names of all others would be gigabytes."""
    had = {"eth0": [ip_address((0xFD << 120) + number) for number in range(100_000)]}
    mapped = map_addresses(had, {"eth0": [ip_address("fd01::1")]})
    assert len(mapped.gaps) == 100_000
    assert max(map(len, mapped.gaps.values())) < 400
    moved = map_addresses(had, {"eth0": [address + (1 << 64) for address in had["eth0"]]})
    assert moved.pairs[had["eth0"][7]] == had["eth0"][7] + (1 << 64)


@pytest.mark.parametrize("name", [b"a\x1cb", b"a\xffb", b"a\x85b", b"e\xe2\x80\xa8b", b"e\x1b[1mb", b"longer-than-10"])
def test_a_container_may_call_its_interfaces_what_it_likes(name: bytes, tmp_path: Path) -> None:
    command = ["unshare", "--net", sys.executable, "-c", NAMED, os.fsdecode(name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        links, groups = netlink.links(NetNamespace.of(process.pid)), tuple(read_memberships([process.pid]))
    note = NetworkNote(links=tuple(links), memberships=groups)
    write_note(tmp_path, note)
    assert read_note(tmp_path) == note
    shown = printable(name.decode("utf-8", "surrogateescape"))
    assert [str(one) for one in groups] == [f"239.1.2.3 on {shown}"]
    assert [str(address) for address in note.addresses[shown]] == ["10.9.9.1"]


def test_connections_that_go_on_before_tasks_run_are_not_waited_for_again(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, Process(1000, 1))
    restore = cast("Restore", SimpleNamespace(journal=journal, init_pid=os.getpid()))

    def stalls() -> list[str]:
        return [phase["name"] for phase in journal.to_json()["phases"]]

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            senders = [(place_of(client), 7)]
            journal.note(NetworkFacts(network=NetNamespace.of(os.getpid()), senders=senders, released_at=time.time()))
            wake_senders(restore)
            assert (stalls(), journal.facts(NetworkFacts).senders) == ([], senders)
            client.sendall(b"data")
            with Watch([os.getpid()], {place_of(client)}, is_restored=True) as watch:
                assert watch.go_on(60)
            wake_senders(restore)
            assert (stalls(), journal.facts(NetworkFacts).senders) == (["connections stalled"], [])
            end_release(restore)
            assert stalls() == ["connections stalled"]


def test_a_stall_is_measured_until_the_peer_acknowledges() -> None:
    class Phases:
        def __init__(self) -> None:
            self.names: list[str] = []

        def add_phase(self, name: str, began: float) -> None:
            assert began == 7
            self.names.append(name)

    phases = Phases()
    journal = cast("Journal", phases)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            here = {place_of(client)}
            with Watch([os.getpid()], here) as watch:
                watch.record(journal, 7)
                client.sendall(b"data")
                watch.record(journal, 7)
            with Watch([os.getpid()], here) as later, Watch([os.getpid()], here, is_restored=True) as whole:
                later.record(journal, 7)
                whole.record(journal, 7)
            with Watch([os.getpid()], set()) as none:
                none.record(journal, 7)
    at_least = "connections stalled (at least)"
    assert phases.names == [at_least, "connections stalled", at_least, "connections stalled"]


@pytest.mark.parametrize("is_inline", [False, True])
def test_an_urgent_byte_is_seen(*, is_inline: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, int(is_inline))
        inode = os.fstat(receiver.fileno()).st_ino
        assert not described(inode).has_urgent
        sender.send(b"before")
        sender.send(b"!", socket.MSG_OOB)
        while not described(inode).has_urgent:
            pass
        seen = described(inode)
        assert (seen.has_urgent_inline, seen.before_urgent_bytes) == (is_inline, 0 if is_inline else len("before"))


def described(inode: int) -> Socket:
    return next(sock for sock in sockets(os.getpid()) if sock.inode == inode)
