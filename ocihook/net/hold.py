"""The hold: no packet of TCP leaves or reaches a container's network while its connections are on their way.

All else passes: what finds neighbours and duplicate addresses, what tells switches who is in a multicast group, and the
datagrams of other containers in the network, whose senders would get an error. A table of nftables does it, one for
each session: `inet ocihook-SESSION`. A packet passes if no table drops it, so where several containers of a pod are
dumped at once the last of them releases it, and nothing counts. CRIU's own lock begins later and ends earlier, and with
crun there is none in a restore.

Where the container has ended with its dump its peers still wait for it, and so do those that know where it was about to
be where a restore has failed. Then one rule of the table stays: for `AWAITED_S` the kernel does not reset their
connections. New connections are still refused. The next restore removes the rule.

A rule drops while its set has elements, and these expire by themselves. A keeper, a process of its own, renews them for
as long as the session lives: should agent, hook, CRIU and runtime be killed together, traffic passes this table again
`HOLD_LIMIT_S` later, whether or not anybody ever starts another agent. A lock that CRIU has left does not expire; the
keeper outlives its session to remove that one, as late, unless another agent has.
"""

import contextlib
import logging
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from ocihook.errors import OcihookError, plain
from ocihook.linux.cgroup import leave_cgroup
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process, descendants
from ocihook.net import nftables
from ocihook.net.kick import Sender, wake
from ocihook.net.namespace import NetNamespace
from ocihook.net.stall import Place, Watch
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal, open_journals
from ocihook.wire import DETACHED_STAGE, RESTORE_STAGES

HOLD_LIMIT_S = 30  # without anybody who renews it; most applications wait as long
AWAITED_S = 600  # of a TCP connection the other end gives up after some 15 minutes (tcp_retries2)
_RENEWALS = 6  # in that time: on a busy node some may be late
CRIU_MARK = 0xC114  # of packets that CRIU itself sends, as the FIN of a connection that is half closed (SOCCR_MARK)
TABLE_PREFIX = "ocihook-"

_ACKNOWLEDGEMENT_BYTES = 120  # no IP packet without data is longer: headers with all their options
_DRAIN = f"meta l4proto tcp meta length > {_ACKNOWLEDGEMENT_BYTES} meta nfproto @held drop"
_HOLD = "meta l4proto tcp meta nfproto @held drop"
_PASSES = f"meta mark {CRIU_MARK:#x} accept"
# The kernel's answer to a segment of a connection that nobody has is a reset without ACK (RFC 9293 3.10.7.1).
_NO_ANSWER = "meta nfproto @awaited meta l4proto tcp tcp flags & (rst | ack) == rst drop"
_CRIU_TABLE = re.compile(r"CRIU-\S+")
_WITHOUT_CRIU = ("pre-dump", "pre-restore", DETACHED_STAGE)  # stages in which CRIU has locked nothing
_SBIN = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# As CRIU empties its own chain (criu/netfilter.c), which is then deleted, too.
_REMOVE_CHAIN = "*filter\n-D INPUT -j CRIU\n-D OUTPUT -j CRIU\n-F CRIU\n-X CRIU\nCOMMIT\n"

_LEGACY_TABLES = Path("/proc/thread-self/net/ip_tables_names")

log = logging.getLogger(__name__)


class Waiting(NamedTuple):
    """A connection with unacknowledged data; CRIU's image has the sequence number of the oldest byte."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    unacknowledged: int


@dataclass(kw_only=True)
class TrafficHeld(Effect, kind="traffic-held"):
    """TCP of the container's network is held: by a table of ours, and by CRIU while it is at work."""

    namespace: NetNamespace
    began: float  # seconds since 1970
    init: Process | None = None  # of the container that is dumped
    locks: tuple[str, ...] = ()  # of CRIU, that were there before
    waiting: tuple[Waiting, ...] = ()  # to be woken when traffic passes
    is_open: bool = False  # it passes our table again; CRIU's lock may still be there

    def take_over(self, journal: Journal) -> None:
        """Renew what nobody has renewed since its agent was killed."""
        if not self.is_open:
            _keep(self, journal)

    def undo(self, journal: Journal, _patience: Patience) -> None:
        """Let it pass: remove our table, and the lock that a killed or failed CRIU has left."""
        if journal.criu.is_alive() and journal.stage not in _WITHOUT_CRIU:
            raise OcihookError(f"CRIU (pid {journal.criu.pid}) is still at work on the network")
        with contextlib.suppress(FileNotFoundError):  # the namespace is gone
            running = descendants(self._running_pid) if self.waiting and self._running_pid else ()
            with Watch(running, {Place(*one[:4]) for one in self.waiting}) as watch:
                if self._is_awaited:
                    _await(self.namespace, table_of(journal))
                else:
                    remove_table(self.namespace, table_of(journal))
                # One that has detached from a container that was killed could not unlock what it could not enter.
                if not journal.criu.is_alive() or (journal.stage == DETACHED_STAGE and not self._running_pid):
                    self.remove_locks(journal)
                released_at = time.time()
                wake(self.namespace, map(_sender, self.waiting), self._running_pid)
                watch.record(journal, released_at)
        if not self.is_open:
            journal.add_phase("network held", self.began)

    @property
    def _is_awaited(self) -> bool:
        """Return whether peers wait for connections that nobody has: the container has ended, or is not restored."""
        return self._running_pid == 0 if self.init is not None else self.stage in RESTORE_STAGES

    @property
    def _running_pid(self) -> int:
        """Return the first process of the container that is dumped; 0 if it has ended, or none is dumped."""
        return self.init.pid if self.init is not None and self.init.is_alive() else 0

    def remove_locks(self, journal: Journal) -> None:
        """Remove the locks that a CRIU which has ended has left.

        Raises:
            OcihookError: while another one is at work there.
            FileNotFoundError: if the namespace is gone.
        """
        left = [name for name in criu_locks(self.namespace) if name not in self.locks]
        if left and _is_shared(self.namespace, journal):
            raise OcihookError(f"another dump or restore is at work in network namespace {self.namespace.inode}")
        for name in left:
            log.warning("container %s: CRIU has left its network locked (%s)", journal.container, name)
            remove_lock(self.namespace, name)


def _sender(one: Waiting) -> Sender:
    return Sender(ip_address(one.local), one.local_port, ip_address(one.remote), one.remote_port, one.unacknowledged)


def hold(
    journal: Journal,
    namespace: NetNamespace,
    *,
    init: Process | None = None,
    with_loopback: bool = False,
    drain: bool = False,
) -> None:
    """Hold TCP of a namespace that is not the node's own.

    Args:
        journal: of the session; gets what undoes it.
        namespace: the container's.
        init: its first process, if it is dumped.
        with_loopback: whether traffic of the container with itself is held, too.
        drain: keep only new data from leaving, while packets in flight arrive and are acknowledged. To TCP what the
            kernel drops here is not lost but unsent: it needs no timer to be sent later.

    Raises:
        RulesRefused: if the kernel does not take rules.
        OSError: if the namespace is gone, or cannot be entered.
    """
    held = journal.find(TrafficHeld)
    is_new = held is None
    if held is None:
        locks = tuple(criu_locks(namespace))
        held = journal.add(TrafficHeld(namespace=namespace, began=time.time(), init=init, locks=locks))
    rules = {"in": [] if drain else [_HOLD], "out": [_DRAIN if drain else _HOLD]}
    make_table(namespace, table_of(journal), rules, "held", HOLD_LIMIT_S, with_loopback=with_loopback)
    if is_new:
        _keep(held, journal)


def _keep(held: TrafficHeld, journal: Journal) -> None:
    """Start the keeper of a hold: outside of the agent's process group and cgroup, as it is to outlive their end."""
    session = Process.find(os.getpid())
    if os.fork() != 0:
        return
    try:
        os.setsid()
        leave_cgroup()
        _close_files()
        if session is None or _renew(held.namespace, table_of(journal), session):
            _unlock(held, journal)
    except (OcihookError, OSError) as error:
        log.debug("container %s: nobody keeps its hold any more: %s", journal.container, plain(error))
    finally:  # or the namespace is gone
        os._exit(0)


def _close_files() -> None:
    """Keep nobody's files open."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for handler in logging.getLogger().handlers:  # which open theirs again
        handler.close()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the kernel closes ranges


def _renew(namespace: NetNamespace, name: str, session: Process) -> bool:
    """Renew a hold until its table is gone, or its session; return whether that has ended."""
    pidfd = session.open()
    while pidfd is not None and ("inet", name) in nftables.tables(namespace):
        with contextlib.suppress(nftables.RulesRefused):  # somebody changes rules at this very moment
            nftables.run(namespace, f"flush set inet {name} held\n{_elements(name, 'held', HOLD_LIMIT_S)}")
        if select.select([pidfd], [], [], HOLD_LIMIT_S / _RENEWALS)[0]:  # waits: for as long as the session lives
            return True
    return pidfd is None


def _unlock(held: TrafficHeld, journal: Journal) -> None:
    """Remove the lock of a CRIU that has ended after its session, unless an agent does it in time."""
    if (criu := journal.criu.open()) is not None:
        select.select([criu], [], [])  # waits: for CRIU, and for nobody
    while journal.path.exists():
        time.sleep(HOLD_LIMIT_S)  # waits: for an agent, which undoes everything else, too
        try:
            if journal.path.exists():
                held.remove_locks(journal)
        except FileNotFoundError:
            return
        except (OcihookError, OSError) as error:  # another dump or restore is at work there
            log.warning("container %s: %s", journal.container, plain(error))
        else:
            return


def _elements(table: str, name: str, timeout_s: int) -> str:
    return f"add element inet {table} {name} {{ ipv4 timeout {timeout_s}s, ipv6 timeout {timeout_s}s }}"


def release(journal: Journal) -> None:
    """Let the traffic of a container that is being restored pass our table.

    Until `forget_hold` the restore may still fail: the kernel then resets no connection. Should CRIU be killed, or
    fail, its lock is removed, too.
    """
    held = journal.find(TrafficHeld)
    if held is not None and not held.is_open:
        with contextlib.suppress(FileNotFoundError):
            _await(held.namespace, table_of(journal))
            for name in _tables_of_ended(held.namespace, journal):
                remove_table(held.namespace, name)
        held.is_open = True
        journal.add_phase("network held", held.began)
        journal.save()


def _await(namespace: NetNamespace, name: str) -> None:
    """Make a session's table one that only keeps the kernel from answering peers that nobody is there."""
    make_table(namespace, name, {"in": [], "out": [_NO_ANSWER]}, "awaited", AWAITED_S, with_loopback=False)


def _tables_of_ended(namespace: NetNamespace, journal: Journal) -> list[str]:
    """Return the tables in which earlier sessions have left a rule."""
    others = {TABLE_PREFIX + path.stem for path in open_journals(journal.path.parent.parent)} | {table_of(journal)}
    names = [name for family, name in nftables.tables(namespace) if family == "inet"]
    return [name for name in names if name.startswith(TABLE_PREFIX) and name not in others]


def forget_hold(journal: Journal) -> None:
    """Forget a hold that is over: CRIU has removed its own lock, too."""
    held = journal.find(TrafficHeld)
    if held is not None and held.is_open:
        with contextlib.suppress(FileNotFoundError):
            remove_table(held.namespace, table_of(journal))
        journal.forget(held)


def table_of(journal: Journal) -> str:
    """Return the name of a session's table."""
    return f"{TABLE_PREFIX}{journal.session_id}"


def make_table(
    namespace: NetNamespace,
    name: str,
    rules: Mapping[str, list[str]],
    while_in: str,
    timeout_s: int,
    *,
    with_loopback: bool,
) -> None:
    """Make a table, or replace it in one transaction.

    Args:
        namespace: where.
        name: the table's.
        rules: what drops, for packets that come `in` and go `out`, behind what always passes.
        while_in: the set that has protocols for as long as these are to drop.
        timeout_s: after which it has them no more.
        with_loopback: whether they are for the loopback device, too.
    """
    lines = [f"table inet {name}", f"delete table inet {name}", f"table inet {name} {{"]
    lines += [f"set {while_in} {{ typeof meta nfproto; flags timeout; }}"]
    for chain, hook, device in (("in", "input", "iif"), ("out", "output", "oif")):
        passes = [*([] if with_loopback else [f"{device} lo accept"]), _PASSES]
        lines += [f"chain {chain} {{", f"type filter hook {hook} priority -300; policy accept"]
        lines += [*passes, *rules[chain], "}"]
    nftables.run(namespace, "\n".join([*lines, "}", _elements(name, while_in, timeout_s)]))


def remove_table(namespace: NetNamespace, name: str) -> None:
    """Remove a table, if it is there."""
    nftables.run(namespace, f"table inet {name}\ndelete table inet {name}")


def criu_locks(namespace: NetNamespace) -> list[str]:
    """Return CRIU's locks on a namespace: names of tables, and `CRIU` for its chains."""
    known = nftables.tables(namespace)
    found = [name for family, name in known if family == "inet" and _CRIU_TABLE.fullmatch(name)]
    has_filter = ("ip", "filter") in known or "filter" in namespace.run(_legacy_tables)
    return [*found, *(["CRIU"] if has_filter and _has_chain(namespace) else [])]


def _legacy_tables() -> list[str]:
    return _LEGACY_TABLES.read_text().split() if _LEGACY_TABLES.exists() else []


def remove_lock(namespace: NetNamespace, name: str) -> None:
    """Remove one of CRIU's locks."""
    if name != "CRIU":
        remove_table(namespace, name)
        return
    for program in ("iptables-restore", "ip6tables-restore"):
        _iptables(namespace, program, "--noflush", text=_REMOVE_CHAIN)


def _has_chain(namespace: NetNamespace) -> bool:
    return ":CRIU " in _iptables(namespace, "iptables-save", "-t", "filter")


def _iptables(namespace: NetNamespace, program: str, *arguments: str, text: str = "") -> str:
    """Run one of its programs in a namespace, if it is there: a thread's children are where it is."""
    path = shutil.which(program, path=_SBIN)
    if path is None:
        return ""
    done = namespace.run(
        lambda: subprocess.run([path, *arguments], input=text, capture_output=True, text=True, timeout=10, check=False)
    )
    return done.stdout


def _is_shared(namespace: NetNamespace, journal: Journal) -> bool:
    """Return whether another session of this node, whose CRIU lives, holds the same network."""
    for path in open_journals(journal.path.parent.parent):
        if path != journal.path:
            with contextlib.suppress(OcihookError, OSError):
                other = Journal.load(path)
                held = other.find(TrafficHeld)
                if held and held.namespace.inode == namespace.inode and other.criu.is_alive():
                    return True
    return False
